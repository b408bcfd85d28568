"""Attention by ``wgmma`` of sm_90a: four warps multiply 64 rows together, while they take exponentials.

Tiles lie in shared memory in 128-byte swizzle, as :mod:`codegen.gpu.matrix.wgmma` describes it: panels of 64 elements,
each as long as the tile. Rows of keys run along the depth of their product; those of values are the depth of theirs,
which the instruction reads turned. Exponentials are operands out of registers.

Products are asynchronous: the logits of a step and the values of the step before are issued together, and the
exponentials of the step are taken when the logits are there and while the values are still multiplied (J. Shah et al.,
"FlashAttention-3", 2024, 3.2). Keys and values have two buffers each, and a step one barrier.
"""

from __future__ import annotations

from codegen.gpu.attention.group_functions import BESIDE, done_name, logits_name, values_name
from codegen.gpu.attention.warps import PRODUCTS, SHRINK, lowered, mask, softmax
from codegen.gpu.matrix.wgmma_functions import ATOM_BYTES
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention import AttentionKernel
from sokoban.schedule.attention import AttentionSchedule, padded


def takes(request: LoweringRequest) -> bool:
    """Attention by the matrix instructions of warp groups."""
    return isinstance(request.schedule, AttentionSchedule) and request.schedule.instruction.is_by_groups


def lower(request: LoweringRequest) -> Lowered:
    """The kernel of attention, or of slices of it."""
    kernel, schedule = request.problem, request.schedule
    assert isinstance(kernel, AttentionKernel) and isinstance(schedule, AttentionSchedule)
    pair = PRODUCTS[kernel.attention.dtype][1]
    return lowered(request, _products(kernel, schedule, pair), pair, ATOM_BYTES)


def _products(kernel: AttentionKernel, schedule: AttentionSchedule, pair: str) -> str:
    """The walk along the keys: the first step's logits, steps of both products, the last step's values."""
    logits_done = done_name(1, schedule.keys)
    values_done = done_name(0, padded(kernel.attention.value_size))
    return f"""\
  float logits[1][KEYS / 8][4], shrinks[2];
  unsigned weights[KEYS / 16][4];
  if (steps > 0) {{
    copy_queries();
    copy_keys(first_step, 0);
    copy_async_commit();
{_ARRIVED}
    copy_values(first_step, 0);
    if (steps > 1) copy_keys(first_step + 1, 1);
    copy_async_commit();
    warp_group_arrive();
{_logits(kernel, schedule, "0")}
    {done_name(0, schedule.keys)}(logits[0][0]);
    {{
      const int first_key = first_step * KEYS;
{mask(kernel.scale)}
{softmax("")}
    }}
{_weights(pair)}
    for (int number = 1; number < steps; ++number) {{
      const int step = first_step + number, first_key = step * KEYS, buffer = number % 2;
{_ARRIVED}
      warp_group_arrive();
{_logits(kernel, schedule, "buffer")}
{_values(kernel, "1 - buffer")}
      copy_values(step, buffer);
      if (number + 1 < steps) copy_keys(step + 1, 1 - buffer);
      copy_async_commit();
      {logits_done}(logits[0][0]);
{mask(kernel.scale)}
{softmax("        shrinks[i] = shrink;")}
      {BESIDE}(fminf(totals[0][0], totals[0][1]));
      {values_done}(sums[0][0]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {{
        const int m = 0;
        const float shrink = shrinks[i];
{SHRINK}
      }}
{_weights(pair)}
    }}
{_ARRIVED}
    warp_group_arrive();
{_values(kernel, "(steps - 1) % 2")}
    {values_done}(sums[0][0]);
  }}"""


#: What was copied has arrived, and warp groups may read it.
_ARRIVED = """\
    copy_async_wait_0();
    async_proxy_fence();
    __syncthreads();"""


def _logits(kernel: AttentionKernel, schedule: AttentionSchedule, buffer: str) -> str:
    """The products of a group's queries and the keys of a buffer, issued as one group."""
    dtype, keys = kernel.attention.dtype, schedule.keys
    first, more = (logits_name(dtype, keys, is_first) for is_first in (True, False))
    lines = []
    for depth in range(0, padded(kernel.attention.head_dim), 16):
        # Sixteen elements further are 32 bytes; a panel further is a tile of 128 bytes a row.
        panel, within = divmod(depth * 2, 128)
        queries = f"warp / 4 * 8192 + {panel} * ROWS * 128 + {within}"
        from_keys = f"key_buffers + {buffer} * KEYS * KEY_PITCH + {panel} * KEYS * 128 + {within}"
        lines.append(
            f"    {more if depth else first}(logits[0][0], matrix_descriptor(shared, {queries}, 16, 1024),\n"
            f"        matrix_descriptor(shared, {from_keys}, 16, 1024));\n"
        )
    return f"{''.join(lines)}    warp_group_commit();"


def _values(kernel: AttentionKernel, buffer: str) -> str:
    """The products of exponentials and the values of a buffer, issued as one group."""
    product = values_name(kernel.attention.dtype, padded(kernel.attention.value_size))
    return f"""\
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n)
      {product}(sums[0][0], weights[n], matrix_descriptor(
          shared, value_buffers + ({buffer}) * KEYS * VALUE_PITCH + n * 2048, KEYS * 128, 1024));
    warp_group_commit();"""


def _weights(pair: str) -> str:
    """Exponentials as operands."""
    return f"""\
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        weights[n][c] = {pair}(logits[0][2 * n + c / 2][c % 2 * 2], logits[0][2 * n + c / 2][c % 2 * 2 + 1]);"""
