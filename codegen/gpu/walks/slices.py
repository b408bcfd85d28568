"""The kernel that brings slices of attention together: a warp per row, its lanes side by side along the row."""

from __future__ import annotations

from codegen.gpu.walks.language import ELEMENTS, Language
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention import SLICE_NUMBERS, SliceSum
from sokoban.schedule.attention import LANES, SliceSumSchedule


def takes(request: LoweringRequest[SliceSum, SliceSumSchedule]) -> bool:
    """Sums of slices."""
    return True


def lower(request: LoweringRequest[SliceSum, SliceSumSchedule]) -> Lowered:
    """The kernel of a sum of slices."""
    kernel, schedule = request.problem, request.schedule
    text = _text(kernel, schedule, request.entry, Language.of(request.target))
    return Lowered.of_text(text, request.entry, blocks=schedule.blocks(kernel), threads=schedule.threads)


def _text(kernel: SliceSum, schedule: SliceSumSchedule, entry: str, language: Language) -> str:
    element, ending = ELEMENTS[kernel.output.dtype]
    source, output = f"{kernel.source.name}_ptr", f"{kernel.output.name}_ptr"
    pieces, pitch, slice_floats = (
        kernel.width // 4,
        kernel.width + SLICE_NUMBERS,
        kernel.rows * (kernel.width + SLICE_NUMBERS),
    )
    each = -(-pieces // LANES)
    bound = "" if pieces % LANES == 0 else f"if (lane + {LANES} * i < {pieces}) "
    body = f"""\
  const int lane = THREAD % {LANES}, row = BLOCK * {schedule.threads // LANES} + THREAD / {LANES};
  if (row >= {kernel.rows}) return;
  float peak = -1.0f / 0.0f, total = 0.0f, sums[{each}][4];
#pragma unroll
  for (int i = 0; i < {each}; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[i][e] = 0.0f;
  GLOBAL const float* from = {source} + (long)row * {pitch};
  for (int slice = 0; slice < {kernel.slices}; ++slice)
    peak = LARGER(peak, from[(long)slice * {slice_floats} + {kernel.width}]);
#pragma unroll 4
  for (int slice = 0; slice < {kernel.slices}; ++slice) {{
    GLOBAL const float* part = from + (long)slice * {slice_floats};
    const float weight = power_of_two(part[{kernel.width}] - peak);
    total += part[{kernel.width + 1}] * weight;
#pragma unroll
    for (int i = 0; i < {each}; ++i) {bound}{{
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][e] += part[(lane + {LANES} * i) * 4 + e] * weight;
    }}
  }}
#pragma unroll
  for (int i = 0; i < {each}; ++i)
    {bound}store_{ending}({output} + (long)row * {kernel.width} + (lane + {LANES} * i) * 4, sums[i], 1.0f / total);"""
    tensors = [("const float", kernel.source.name), (element, kernel.output.name)]
    return language.kernel(entry, schedule.threads, tensors, body)
