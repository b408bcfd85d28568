"""Tensor Core rate through WMMA: products of fragments that stay in registers, four accumulators per warp.

Written as PTX, as NVRTC has ``mma.h`` only where a toolkit is installed. On Hopper and newer boards WMMA does not reach
the datasheet's rate, which needs warp-group instructions; the number is what WMMA reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.microbench.launcher import Kernel, KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement, rates
from hal.microbench.sampling import Settings, long_enough, power_of_two, timed

_ACCUMULATORS = 4
_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A WMMA instruction: types, shape, registers of an operand and of an accumulator, oldest compute capability."""

    input_dtype: str
    accumulate_dtype: str
    shape: tuple[int, int, int]
    types: str
    operand_registers: int
    accumulator_registers: int
    capability: int

    @property
    def key(self) -> str:
        """``float16-float32``, as key paths name it."""
        return f"{self.input_dtype}-{self.accumulate_dtype}"


FRAGMENTS = (
    Fragment(
        input_dtype="float16",
        accumulate_dtype="float32",
        shape=(16, 16, 16),
        types="f32.f32",
        operand_registers=8,
        accumulator_registers=8,
        capability=70,
    ),
    Fragment(
        input_dtype="float16",
        accumulate_dtype="float16",
        shape=(16, 16, 16),
        types="f16.f16",
        operand_registers=8,
        accumulator_registers=4,
        capability=70,
    ),
    Fragment(
        input_dtype="bfloat16",
        accumulate_dtype="float32",
        shape=(16, 16, 16),
        types="f32.bf16.bf16.f32",
        operand_registers=4,
        accumulator_registers=8,
        capability=80,
    ),
    Fragment(
        input_dtype="tfloat32",
        accumulate_dtype="float32",
        shape=(16, 16, 8),
        types="f32.tf32.tf32.f32",
        operand_registers=4,
        accumulator_registers=8,
        capability=80,
    ),
    Fragment(
        input_dtype="int8",
        accumulate_dtype="int32",
        shape=(16, 16, 16),
        types="s32.s8.s8.s32",
        operand_registers=2,
        accumulator_registers=8,
        capability=72,
    ),
)

_SOURCE = """
extern "C" __global__ void __launch_bounds__($BLOCK) $ENTRY($KIND* out, const unsigned* data, int rounds) {
  unsigned a[$OPERANDS], b[$OPERANDS];
  $KIND d[$ACCUMULATORS][$COUNT];
  #pragma unroll
  for (int i = 0; i < $OPERANDS; ++i) { a[i] = data[2 * i]; b[i] = data[2 * i + 1]; }
  #pragma unroll
  for (int i = 0; i < $ACCUMULATORS; ++i)
    #pragma unroll
    for (int j = 0; j < $COUNT; ++j) d[i][j] = 0;
  #pragma unroll 4
  for (int round = 0; round < rounds; ++round) {
    #pragma unroll
    for (int i = 0; i < $ACCUMULATORS; ++i) {
      asm volatile("$PTX" : $RESULTS : $INPUTS);
    }
  }
  $KIND sum = 0;
  #pragma unroll
  for (int i = 0; i < $ACCUMULATORS; ++i)
    #pragma unroll
    for (int j = 0; j < $COUNT; ++j) sum += d[i][j];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def kernel_text(fragment: Fragment) -> KernelText:
    """The kernel of one WMMA instruction."""
    results, operands = fragment.accumulator_registers, fragment.operand_registers
    kind, constraint = {"float32": ("float", "f"), "int32": ("int", "r")}.get(
        fragment.accumulate_dtype, ("unsigned", "r")
    )

    def registers(first: int, count: int) -> str:
        return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"

    d, a, b = registers(0, results), registers(results, operands), registers(results + operands, operands)
    m, n, k = fragment.shape
    return text(
        f"wmma_{fragment.input_dtype}_{fragment.accumulate_dtype}",
        _SOURCE,
        KIND=kind,
        BLOCK=_BLOCK,
        OPERANDS=operands,
        ACCUMULATORS=_ACCUMULATORS,
        COUNT=results,
        PTX=f"wmma.mma.sync.aligned.row.col.m{m}n{n}k{k}.{fragment.types} {d}, {a}, {b}, {d};",
        RESULTS=", ".join(f'"+{constraint}"(d[i][{j}])' for j in range(results)),
        INPUTS=", ".join(f'"r"({name}[{j}])' for name in "ab" for j in range(operands)),
    )


def kernels(capability: int) -> tuple[KernelText, ...]:
    """One kernel for every WMMA instruction of this compute capability."""
    return tuple(kernel_text(each) for each in FRAGMENTS if capability >= each.capability)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``wmma.INPUT-ACCUMULATOR`` in operations per second and the operations per unit and cycle behind it."""
    board = launcher.board
    grid = 2 * board.units
    clock = found["clock.short"].value if "clock.short" in found else board.clock_hz
    for fragment in FRAGMENTS:
        if board.capability < fragment.capability:
            continue
        kernel = launcher.kernel(kernel_text(fragment))
        # Halves of about 0.1 with all mantissas: zeros would take less power, and with it more clock.
        data = launcher.array(np.random.default_rng(1).integers(0, 1024, 32, np.uint16) + np.uint16(0x2C00))
        out = launcher.empty(4 * grid * _BLOCK)

        def work(rounds: int, kernel: Kernel = kernel, out: Any = out, data: Any = data) -> Launch:
            return Launch(kernel, grid, _BLOCK, (out, data, scalar(rounds)))

        rounds = long_enough(launcher, work, settings)
        m, n, k = fragment.shape
        operations = 2.0 * m * n * k * _ACCUMULATORS * rounds * grid * _BLOCK / board.lanes
        samples = rates(operations, timed(launcher, [work(rounds)], settings.repeats))
        unit = "OP/s" if fragment.accumulate_dtype == "int32" else "FLOP/s"
        method = f"{kernel.text.entry}: {_ACCUMULATORS} accumulators per warp, {_BLOCK} threads in two blocks per unit"
        yield Measurement(
            key=f"wmma.{fragment.key}",
            unit=unit,
            samples=samples,
            method=method,
            path="",
            low=0.0,
            high=16384.0 * board.units * board.clock_hz,
        )
        cycle = tuple(float(power_of_two(rate / board.units / clock)) for rate in samples)
        method = f"operations per unit and cycle of {kernel.text.entry}, next power of two"
        yield Measurement(
            key=f"wmma.cycle.{fragment.key}", unit="", samples=cycle, method=method, path="", low=128, high=16384
        )
