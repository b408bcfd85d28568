"""The kernel that brings slices of attention together: a warp per row, its lanes side by side along the row."""

from __future__ import annotations

from codegen.gpu.source.text import KERNEL_SUFFIX
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention import SLICE_NUMBERS, SliceSum
from sokoban.schedule.attention import SliceSumSchedule

#: By element type of the result: its C type, and what makes one of a float.
_RESULTS = {
    "float16": ("unsigned short", "(unsigned short)pair_f16({}, 0.0f)"),
    "bfloat16": ("unsigned short", "(unsigned short)pair_bf16({}, 0.0f)"),
    "float32": ("float", "{}"),
}


def takes(request: LoweringRequest) -> bool:
    """Sums of slices."""
    return isinstance(request.schedule, SliceSumSchedule)


def lower(request: LoweringRequest) -> Lowered:
    """The kernel of a sum of slices."""
    kernel, schedule = request.problem, request.schedule
    assert isinstance(kernel, SliceSum) and isinstance(schedule, SliceSumSchedule)
    return Lowered(
        module=None,
        entry=request.entry,
        grid=(schedule.blocks(kernel), 1, 1),
        block=(schedule.threads, 1, 1),
        shared_bytes=0,
        dynamic_shared_bytes=0,
        text=_text(kernel, schedule, request.entry),
    )


def _text(kernel: SliceSum, schedule: SliceSumSchedule, entry: str) -> str:
    element, rounded = _RESULTS[kernel.output.dtype]
    source, output = f"{kernel.source.name}_ptr", f"{kernel.output.name}_ptr"
    each = -(-kernel.width // 32)
    bound = "" if kernel.width % 32 == 0 else "if (lane + 32 * i < WIDTH) "
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}) {entry}{KERNEL_SUFFIX}(\
const float* __restrict__ {source}, {element}* __restrict__ {output}) {{
  constexpr int ROWS_ALL = {kernel.rows}, SLICES = {kernel.slices}, WIDTH = {kernel.width}, EACH = {each};
  constexpr int PITCH = WIDTH + {SLICE_NUMBERS};
  const int lane = threadIdx.x % 32, row = blockIdx.x * {schedule.threads // 32} + threadIdx.x / 32;
  if (row >= ROWS_ALL) return;
  float peak = -1.0f / 0.0f, total = 0.0f, sums[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) sums[i] = 0.0f;
  const float* from = {source} + (long long)row * PITCH;
  for (int slice = 0; slice < SLICES; ++slice) peak = fmaxf(peak, from[(long long)slice * ROWS_ALL * PITCH + WIDTH]);
#pragma unroll 4
  for (int slice = 0; slice < SLICES; ++slice) {{
    const float* part = from + (long long)slice * ROWS_ALL * PITCH;
    const float weight = power_of_two(part[WIDTH] - peak);
    total += part[WIDTH + 1] * weight;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {bound}sums[i] += part[lane + 32 * i] * weight;
  }}
  const float inverse = 1.0f / total;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    {bound}{output}[(long long)row * WIDTH + lane + 32 * i] = {rounded.format("sums[i] * inverse")};
}}
"""
