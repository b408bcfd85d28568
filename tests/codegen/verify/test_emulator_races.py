"""Faulty kernels, each beside its mended twin: the emulator names the fault's lines, and lets the twin pass."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest

from codegen.verify.emulator import Emulation, EmulatorError, run_cuda_on_cpu

pytestmark = pytest.mark.usefixtures("emulator")

HEAD = 'extern "C" __global__ void __launch_bounds__(64) f(float* __restrict__ X, float* __restrict__ Y) {\n'


def emulated(body: str, *, elements: int = 256, grid: int = 1, block: int = 64, optimized: bool = False) -> Emulation:
    x = np.arange(elements, dtype=np.float32)
    arguments = [x, np.full(elements, np.nan, np.float32)]
    return run_cuda_on_cpu(f"{HEAD}{body}}}", "f", arguments, [grid], [block], [1], optimized=optimized)


class Fault(NamedTuple):
    """A kernel with a fault.

    Attributes:
        body: the kernel; the line that mends it is a comment that begins with ``//+``, one to leave out ends with ``//-``.
        message: what the error says, as a regular expression.
        grid: blocks.
    """

    body: str
    message: str
    grid: int = 1


STEPS = """
__shared__ float s[64];
float sum = 0.0f;
for (int step = 0; step < 4; ++step) {
  s[threadIdx.x] = X[step * 64 + threadIdx.x];
  __syncthreads();
  sum += s[63 - threadIdx.x];
  //+ __syncthreads();
}
Y[threadIdx.x] = sum;
"""

DOUBLE_BUFFER = """
__shared__ float s[2 * 64];
float sum = 0.0f;
s[threadIdx.x] = X[threadIdx.x];
for (int step = 0; step < 4; ++step) {
  __syncthreads();
  if (step < 3) {
    s[step % 2 * 64 + threadIdx.x] = X[(step + 1) * 64 + threadIdx.x]; //-
    //+ s[(step + 1) % 2 * 64 + threadIdx.x] = X[(step + 1) * 64 + threadIdx.x];
  }
  sum += s[step % 2 * 64 + 63 - threadIdx.x];
}
Y[threadIdx.x] = sum;
"""

PIPELINE = """
__shared__ alignas(128) float s[3 * 64];
float sum = 0.0f;
for (int step = 0; step < 2; ++step) {
  copy_async_4(s, (step * 64 + threadIdx.x) * 4, X + step * 64 + threadIdx.x);
  copy_async_commit();
}
for (int step = 0; step < 4; ++step) {
  copy_async_wait_2(); //-
  //+ copy_async_wait_1();
  __syncthreads();
  if (step < 2) copy_async_4(s, ((step + 2) % 3 * 64 + threadIdx.x) * 4, X + (step + 2) * 64 + threadIdx.x);
  copy_async_commit();
  sum += s[step % 3 * 64 + 63 - threadIdx.x];
}
Y[threadIdx.x] = sum;
"""

FEW_LANES = """
float v = X[threadIdx.x];
if (threadIdx.x % 32 < 16) { //-
  v += __shfl_down_sync(0xffffffff, v, 16);
} //-
Y[threadIdx.x] = v;
"""

SMALL_MASK = """
float v = X[threadIdx.x];
v += __shfl_xor_sync(0xffff, v, 1); //-
//+ v += __shfl_xor_sync(0xffffffff, v, 1);
Y[threadIdx.x] = v;
"""

TWO_BLOCKS = """
Y[threadIdx.x] += X[blockIdx.x * 64 + threadIdx.x]; //-
//+ atomicAdd(Y + threadIdx.x, X[blockIdx.x * 64 + threadIdx.x]);
"""

WARP_ALONE = """
__shared__ float s[64];
s[threadIdx.x] = X[threadIdx.x];
//+ __syncwarp();
Y[threadIdx.x] = s[threadIdx.x ^ 1];
"""

WARP_NOT_BLOCK = """
__shared__ float s[64];
s[threadIdx.x] = X[threadIdx.x];
__syncwarp(); //-
//+ __syncthreads();
Y[threadIdx.x] = s[63 - threadIdx.x];
"""

BEFORE_THE_WAIT = """
__shared__ alignas(128) float s[64];
copy_async_4(s, threadIdx.x * 4, X + threadIdx.x);
copy_async_commit();
s[threadIdx.x] = 1.0f; //-
copy_async_wait_0();
Y[threadIdx.x] = s[threadIdx.x];
"""

AN_INPUT = """
X[threadIdx.x] = 1.0f; //-
Y[threadIdx.x] = X[threadIdx.x];
"""

FAULTS = {
    "a missing barrier between two steps": Fault(
        STEPS, r'race on shared s\+\d+: (read by .* at LINE6 .*written by .* at LINE4|written by .* at LINE4 .*read by .* at LINE6)'
    ),
    "a double buffer that wraps one step early": Fault(DOUBLE_BUFFER, r"race on shared s\+\d+: .* at LINE(7|10) .* at LINE(7|10) "),
    "a wait that leaves a group too many": Fault(
        PIPELINE, r"race on shared s\+\d+: an asynchronous copy of .* at LINE4 .* is under way, when it is read by .* at LINE13 "
    ),
    "a shuffle without half of its lanes": Fault(FEW_LANES, r"lane \d+, which takes no part, .* at LINE3 "),
    "a mask without some lanes": Fault(SMALL_MASK, r"a mask, 0xffff, without the lane itself by .* at LINE2 "),
    "blocks that add without atomics": Fault(TWO_BLOCKS, r"race on Y\[\d+\]: .* at LINE1 .* at LINE1 .*no order", grid=2),
    "lanes of a warp without a barrier": Fault(WARP_ALONE, r"race on shared s\+\d+: .* at LINE(2|4) .* at LINE(2|4) "),
    "a barrier of the warp for the block": Fault(WARP_NOT_BLOCK, r"race on shared s\+\d+: .* at LINE(2|5) .* at LINE(2|5) "),
    "a store under a copy": Fault(BEFORE_THE_WAIT, r"race on shared s\+\d+: .* at LINE2 .* at LINE4 .* read by .* at LINE6 "),
    "a store into an input": Fault(AN_INPUT, r"an input is written: X\[\d+\] by .* at LINE1 "),
}  # fmt: skip


def faulty(body: str) -> str:
    return body.replace("//+", "//").lstrip("\n")


def mended(body: str) -> str:
    return "\n".join(line.replace("//+", "") for line in body.split("\n") if not line.endswith("//-"))


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("optimized", [False, True])
def test_a_fault_is_named_by_its_lines(name: str, optimized: bool) -> None:
    fault = FAULTS[name]
    # The kernel's head is the text's first line, which its body follows.
    body = faulty(fault.body)
    pattern = re.sub(
        r"LINE(\((?:\d+\|?)+\)|\d+)",
        lambda m: r"kernel\.cu:" + re.sub(r"\d+", lambda n: str(int(n[0]) + 1), m[1]),
        fault.message,
    )
    with pytest.raises(EmulatorError, match=pattern) as raised:
        emulated(body, grid=fault.grid, optimized=optimized)
    assert "\n" not in str(raised.value)
    assert re.search(r"\(seed \d\)$", str(raised.value))


@pytest.mark.parametrize("name", FAULTS)
def test_its_mended_twin_passes(name: str) -> None:
    emulation = emulated(mended(FAULTS[name].body), grid=FAULTS[name].grid)
    assert emulation.seeds == (0, 1, 2)
