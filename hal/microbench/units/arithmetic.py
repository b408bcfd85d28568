"""Multiply-add rate of the ordinary pipelines per element type, and with it the lanes of a unit.

Sixteen independent chains per thread and 512 threads per unit: nothing is read or written in the loop. The kernel
notes the clock cycles and the nanoseconds of one block, so that the clock of that very run is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.microbench.launcher import KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement, rates
from hal.microbench.sampling import Settings, long_enough, power_of_two, timed

CHAINS = 16
UNROLL = 8
#: Threads of the only block of a unit: four warps per scheduler, and 64 registers for each thread on any board.
BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """A multiply-add: element type, its C type and PTX constraint, text, operations per lane, oldest capability."""

    dtype: str
    kind: str
    constraint: str
    ptx: str
    operations: int
    capability: int
    operands: tuple[int | float, int | float]
    storage: str


INSTRUCTIONS = (
    Instruction(
        dtype="float32",
        kind="float",
        constraint="f",
        ptx="fma.rn.f32 %0, %0, %1, %2;",
        operations=2,
        capability=50,
        operands=(0.9991, 0.0007),
        storage="float32",
    ),
    Instruction(
        dtype="float64",
        kind="double",
        constraint="d",
        ptx="fma.rn.f64 %0, %0, %1, %2;",
        operations=2,
        capability=50,
        operands=(0.9991, 0.0007),
        storage="float64",
    ),
    # Bits of two halves each: 0.9995 and 0.00098; of two bfloat16: 0.9961 and 0.00098.
    Instruction(
        dtype="float16",
        kind="unsigned",
        constraint="r",
        ptx="fma.rn.f16x2 %0, %0, %1, %2;",
        operations=4,
        capability=53,
        operands=(0x3BFF3BFF, 0x14041404),
        storage="uint32",
    ),
    Instruction(
        dtype="bfloat16",
        kind="unsigned",
        constraint="r",
        ptx="fma.rn.bf16x2 %0, %0, %1, %2;",
        operations=4,
        capability=80,
        operands=(0x3F7F3F7F, 0x3A803A80),
        storage="uint32",
    ),
    Instruction(
        dtype="int8",
        kind="int",
        constraint="r",
        ptx="dp4a.s32.s32 %0, %1, %2, %0;",
        operations=8,
        capability=61,
        operands=(0x7B31C50D, 0x1FE3A97C),
        storage="int32",
    ),
    Instruction(
        dtype="int32",
        kind="int",
        constraint="r",
        ptx="mad.lo.s32 %0, %0, %1, %2;",
        operations=2,
        capability=50,
        operands=(1664525, 1013904223),
        storage="int32",
    ),
)

_SOURCE = """
extern "C" __global__ void __launch_bounds__($BLOCK) $ENTRY(
    $KIND* out, const $KIND* operands, unsigned long long* stamps, int rounds) {
  $KIND factor = operands[0], summand = operands[1], chain[$CHAINS];
  #pragma unroll
  for (int i = 0; i < $CHAINS; ++i) chain[i] = factor + ($KIND)(threadIdx.x * $CHAINS + i);
  unsigned long long start, end;
  long long cycles = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  #pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    #pragma unroll
    for (int j = 0; j < $UNROLL; ++j)
      #pragma unroll
      for (int i = 0; i < $CHAINS; ++i)
        asm volatile("$PTX" : "+$CONSTRAINT"(chain[i]) : "$CONSTRAINT"(factor), "$CONSTRAINT"(summand));
  }
  cycles = clock64() - cycles;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
  $KIND sum = 0;
  #pragma unroll
  for (int i = 0; i < $CHAINS; ++i) sum += chain[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (blockIdx.x == 0 && threadIdx.x == 0) { stamps[0] = cycles; stamps[1] = end - start; }
}
"""


def kernel_text(instruction: Instruction) -> KernelText:
    """The kernel of one instruction."""
    return text(
        f"fma_{instruction.dtype}",
        _SOURCE,
        KIND=instruction.kind,
        CONSTRAINT=instruction.constraint,
        PTX=instruction.ptx,
        CHAINS=CHAINS,
        UNROLL=UNROLL,
        BLOCK=BLOCK,
    )


def kernels(capability: int) -> tuple[KernelText, ...]:
    """One kernel for every type that this compute capability multiplies and adds."""
    return tuple(kernel_text(each) for each in INSTRUCTIONS if capability >= each.capability)


class Load:
    """The multiply-add kernel of one type on one board: its launches, its work, its clock."""

    def __init__(self, launcher: Launcher, instruction: Instruction) -> None:
        self.launcher, self.instruction = launcher, instruction
        self.kernel = launcher.kernel(kernel_text(instruction))
        self.stamps = launcher.empty(16)
        self._out: Any = launcher.empty(8 * launcher.board.units * BLOCK)
        self._operands = launcher.array(np.array(instruction.operands, instruction.storage))

    def launch(self, rounds: int) -> Launch:
        """One block per unit, ``rounds`` times 128 instructions per thread."""
        arguments = (self._out, self._operands, self.stamps, scalar(rounds))
        return Launch(self.kernel, self.launcher.board.units, BLOCK, arguments)

    def operations(self, rounds: int) -> float:
        """Operations of such a launch; a multiply-add is two."""
        per_thread = CHAINS * UNROLL * self.instruction.operations
        return float(per_thread * rounds * self.launcher.board.units * BLOCK)

    def clock_hz(self) -> float:
        """Clock of the units during the last launch."""
        cycles, nanoseconds = self.launcher.host(self.stamps, "uint64")
        return float(cycles) / max(float(nanoseconds), 1.0) * 1e9


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``fma.TYPE`` in operations per second and ``lanes.TYPE``: what a unit's pipelines start in a cycle."""
    board = launcher.board
    for instruction in INSTRUCTIONS:
        if board.capability < instruction.capability:
            continue
        load = Load(launcher, instruction)
        rounds = long_enough(launcher, load.launch, settings)
        seconds = timed(launcher, [load.launch(rounds)], settings.repeats)
        clock = load.clock_hz()
        samples = rates(load.operations(rounds), seconds)
        unit = "OP/s" if instruction.dtype.startswith("int") else "FLOP/s"
        method = (
            f"{load.kernel.text.entry}: {CHAINS} chains per thread, {BLOCK} threads per unit, at {clock / 1e6:.0f} MHz"
        )
        most = 128.0 * instruction.operations * board.units * max(clock, board.clock_hz)
        yield Measurement(
            key=f"fma.{instruction.dtype}",
            unit=unit,
            samples=samples,
            method=method,
            path="",
            low=most / 256,
            high=most,
        )
        per_cycle = [rate / (board.units * clock * instruction.operations) for rate in samples]
        lanes = tuple(float(power_of_two(each)) for each in per_cycle)
        method = f"multiply-adds per unit and cycle of {load.kernel.text.entry} ({per_cycle[0]:.1f}), next power of two"
        yield Measurement(
            key=f"lanes.{instruction.dtype}", unit="", samples=lanes, method=method, path="", low=1, high=128
        )
        if instruction.dtype == "float32":
            method = "cycles over nanoseconds of a block of fma_float32"
            yield Measurement(
                key="clock.short",
                unit="Hz",
                samples=(clock,),
                method=method,
                path="",
                low=0.3 * board.clock_hz,
                high=1.03 * board.clock_hz,
            )
