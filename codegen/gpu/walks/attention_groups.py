"""Attention by ``wgmma`` of sm_90a: four warps multiply 64 rows together, while they take exponentials.

Tiles lie in shared memory in 128-byte swizzle, as :mod:`codegen.gpu.matrix.panels` describes it: panels of 64 elements,
each as long as the tile. Rows of keys run along the depth of their product; those of values are the depth of theirs,
which the instruction reads turned. Exponentials are operands out of registers.

A warp group of its own copies keys and values in bulk (TMA), as :mod:`codegen.gpu.matrix.bulk` copies operands: two
barriers belong to each buffer of either, *full* counts the bytes that have come, *empty* the warps that have no more
use for them. Nothing else orders the groups that multiply, so that one takes exponentials while another multiplies.

Products are asynchronous: the logits of a step and the values of the step before are issued together, and the
exponentials of the step are taken when the logits are there and while the values are still multiplied (J. Shah et al.,
"FlashAttention-3", 2024, 3.1 and 3.2). Behind values of a whole panel the product reads eight columns of ones, so that
the sums of exponentials over a row are one of its results.
"""

from __future__ import annotations

from itertools import product

from codegen.gpu.matrix.wgmma_functions import ATOM_BYTES
from codegen.gpu.walks.attention_warps import (
    CLEAR,
    PRODUCTS,
    SHRINK,
    TOTALS,
    constants,
    mask,
    place,
    queries_tile,
    results,
    softmax,
)
from codegen.gpu.walks.group_functions import beside, done_name
from codegen.gpu.walks.group_products import (
    GROUP,
    Tile,
    factors_of,
    moved_registers,
    panel_map,
    product_of_columns,
    product_of_rows,
)
from codegen.gpu.walks.pages import in_pool, table_pointer
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.tir.lowering import LoweringRequest
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.attention import AttentionKernel
from sokoban.kernel.pages import rows_in_a_page
from sokoban.schedule.attention import (
    BARRIERS_BYTES,
    GROUP_WARPS,
    ONES_BYTES,
    AttentionSchedule,
    one_columns,
    padded,
    shared_bytes,
)
from sokoban.schedule.warp_groups import PANEL_BYTES


def takes(request: LoweringRequest[AttentionKernel, AttentionSchedule]) -> bool:
    """Attention by the matrix instructions of warp groups."""
    return request.schedule.instruction.is_by_groups


def lower(request: LoweringRequest[AttentionKernel, AttentionSchedule]) -> Lowered:
    """The kernel of attention, or of slices of it."""
    kernel, schedule = request.problem, request.schedule
    return Lowered.of_text(
        _text(kernel, schedule, request.entry),
        request.entry,
        blocks=schedule.blocks(kernel),
        threads=schedule.threads,
        shared_bytes=shared_bytes(kernel, schedule),
        maps=tuple(panel_map(tensor, _rows_at_once(kernel, schedule)) for tensor in kernel.inputs[1:3]),
    )


def _rows_at_once(kernel: AttentionKernel, schedule: AttentionSchedule) -> int:
    """Rows of a copy: those of a step, or of a step and a page."""
    pages = kernel.attention.pages
    return schedule.keys if pages is None else rows_in_a_page(schedule.keys, pages.tokens)


def _text(kernel: AttentionKernel, schedule: AttentionSchedule, entry: str) -> str:
    """All of it, from ``extern "C" __global__`` on."""
    queries, keys, values, *table = kernel.inputs
    tables = "".join(f"\n                       const int* __restrict__ {each.name}_ptr," for each in table)
    table_place = "".join(f"\n{table_pointer(each)}" for each in table)
    output = f"{'float' if kernel.slices > 1 else 'unsigned short'}* __restrict__ {kernel.output.name}_ptr"
    pair, ones = PRODUCTS[kernel.attention.dtype][1], one_columns(kernel, schedule)
    bound, more, fewer = moved_registers(schedule.warps // GROUP_WARPS)
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}{bound})
{entry}{KERNEL_SUFFIX}(const unsigned short* __restrict__ {queries.name}_ptr,
                       const __grid_constant__ TensorMap {keys.name}_map,
                       const __grid_constant__ TensorMap {values.name}_map,{tables} {output}) {{
{constants(kernel, schedule)}
  constexpr int WARPS = {schedule.warps}, KEY_TILE = KEYS * KEY_PITCH, VALUE_TILE = KEYS * VALUE_PITCH;
  constexpr int KEY_BUFFERS = ROWS * KEY_PITCH, VALUE_BUFFERS = KEY_BUFFERS + STAGES * KEY_TILE;
  // Barriers: of the queries, then four of every buffer.
  constexpr int ONES = VALUE_BUFFERS + STAGES * VALUE_TILE, QUERIES_FULL = ONES + {ONES_BYTES if ones else 0};
  constexpr int KEYS_FULL = QUERIES_FULL + 32;
  constexpr int KEYS_EMPTY = KEYS_FULL + 8, VALUES_FULL = KEYS_FULL + 16, VALUES_EMPTY = KEYS_FULL + 24;
  extern __shared__ __align__({ATOM_BYTES}) char shared[];
{place(kernel)}{table_place}
  if (thread == 0) {{
    barrier_make(shared, QUERIES_FULL, THREADS);
    for (int stage = 0; stage < STAGES; ++stage) {{
      barrier_make(shared, KEYS_FULL + {BARRIERS_BYTES} * stage, 1);
      barrier_make(shared, KEYS_EMPTY + {BARRIERS_BYTES} * stage, WARPS);
      barrier_make(shared, VALUES_FULL + {BARRIERS_BYTES} * stage, 1);
      barrier_make(shared, VALUES_EMPTY + {BARRIERS_BYTES} * stage, WARPS);
    }}
    barrier_fence();
  }}
  __syncthreads();
  if (warp >= WARPS) {{
    {fewer}
    if (thread == THREADS) {{
{_copies(kernel, schedule)}
    }}
  }} else {{
    {more}
    {GROUP}
    const unsigned short* queries = {queries.name}_ptr + (long long)problem * ROWS_ALL * HEAD_DIM;
{queries_tile(kernel, schedule).copy(schedule.warps * 32)}
{CLEAR}
{_products(kernel, schedule, pair)}
{_TOTALS_OF_ONES if ones else TOTALS}
{results(kernel, pair)}
  }}
}}
"""


def _copies(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """The walk along the keys of the thread that copies: a buffer that is empty gets the next tile."""
    attention = kernel.attention
    lines = []
    for tensor, subject, width in (
        (kernel.inputs[1], "KEY", attention.head_dim), (kernel.inputs[2], "VALUE", attention.value_size)
    ):  # fmt: skip
        full, empty = (f"{subject}S_{state} + {BARRIERS_BYTES} * stage" for state in ("FULL", "EMPTY"))
        panel = PANEL_BYTES // DTYPE_BYTES[tensor.dtype]
        lines += [
            f"        barrier_wait(shared, {empty}, parity ^ 1);",
            f"        barrier_expect(shared, {full}, {subject}_TILE);",
        ]
        rows = _rows_at_once(kernel, schedule)
        for number, first_row in product(range(-(-width // panel)), range(0, schedule.keys, rows)):
            to = f"{subject}_BUFFERS + stage * {subject}_TILE + {number} * KEYS * {PANEL_BYTES}"
            to += f" + {first_row * PANEL_BYTES}" if first_row else ""
            at = f"{number * panel}, {_place(kernel, first_row, rows)}"
            lines.append(f"        copy_tile(shared, {to}, &{tensor.name}_map, {full},\n                  {at});")
    return f"""\
#pragma unroll 1
      for (int number = 0; number < steps; ++number) {{
        const int stage = number % STAGES, parity = number / STAGES % 2, first_key = (first_step + number) * KEYS;
{_pages(kernel, schedule)}{chr(10).join(lines)}
      }}"""


def _pages(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """The pages of a step, looked up before its buffers are waited for; behind the last key there is none, and a page
    behind the pool is copied as zeros."""
    if kernel.attention.pages is None:
        return ""
    keys = [f"first_key + {first}" for first in range(0, schedule.keys, _rows_at_once(kernel, schedule))]
    pages = (
        f"        const int page_{number} =\n"
        f"            {key} < KEYS_ALL ? {in_pool(f'table[({key}) / PAGE]', 'POOL - 1')} : POOL;\n"
        for number, key in enumerate(keys)
    )
    return "".join(pages)


def _place(kernel: AttentionKernel, first_row: int, rows: int) -> str:
    """Where a copy of a step's rows begins: its row, head and sequence, or its row in a page, head and page."""
    heads = kernel.attention.key_heads
    if kernel.attention.pages is None:
        return f"first_key, problem % {heads}, problem / {heads}"
    return f"(first_key + {first_row}) % PAGE, problem % {heads}, page_{first_row // rows}"


def _full(subject: str, number: str) -> str:
    """The wait for the tile of a step."""
    return f"barrier_wait(shared, {subject}_FULL + {BARRIERS_BYTES} * ({number} % STAGES), {number} / STAGES % 2);"


def _empty(subject: str, number: str) -> str:
    """The warp has no more use for the tile of a step."""
    return f"if (lane == 0) barrier_arrive(shared, {subject}_EMPTY + {BARRIERS_BYTES} * ({number} % STAGES));"


def _products(kernel: AttentionKernel, schedule: AttentionSchedule, pair: str) -> str:
    """The walk along the keys: the first step's logits, steps of both products, the last step's values."""
    ones = one_columns(kernel, schedule)
    logits_done = done_name(1, schedule.keys)
    values_done = done_name(0, padded(kernel.attention.value_size) + ones)
    return f"""\
  float logits[1][KEYS / 8][4], shrinks[2];{_HAS_BASE if ones else ""}
  unsigned weights[KEYS / 16][4];
  if (steps > 0) {{
    copy_queries();
    copy_async_commit();{_ones(kernel) if ones else ""}
    copy_async_wait_0();
    async_proxy_fence();
    barrier_arrive(shared, QUERIES_FULL);
    barrier_wait(shared, QUERIES_FULL, 0);
    {_full("KEYS", "0")}
    warp_group_arrive();
{_logits(kernel, schedule, "0")}
    {done_name(0, schedule.keys)}(logits[0][0]);
    {_empty("KEYS", "0")}
    {{
      const int first_key = first_step * KEYS;
{mask(kernel.scale)}
{softmax("", has_ones=bool(ones))}
    }}
{_weights(pair)}
#pragma unroll 1
    for (int number = 1; number < steps; ++number) {{
      const int first_key = (first_step + number) * KEYS;
      {_full("KEYS", "number")}
      warp_group_arrive();
{_logits(kernel, schedule, "number % STAGES")}
      {_full("VALUES", "(number - 1)")}
{_values(kernel, schedule, "(number - 1) % STAGES")}
      {logits_done}(logits[0][0]);
      {_empty("KEYS", "number")}
{mask(kernel.scale)}
{softmax("        shrinks[i] = shrink;", has_ones=bool(ones))}
      {beside("logits", "KEYS")}
      {values_done}(sums[0][0]);
      {_empty("VALUES", "(number - 1)")}
      if (has_new_base)
#pragma unroll
      for (int i = 0; i < 2; ++i) {{
        const int m = 0;
        const float shrink = shrinks[i];
{SHRINK}
      }}
{_weights(pair)}
    }}
    {_full("VALUES", "(steps - 1)")}
    warp_group_arrive();
{_values(kernel, schedule, "(steps - 1) % STAGES")}
    {values_done}(sums[0][0]);
  }}"""


def _logits(kernel: AttentionKernel, schedule: AttentionSchedule, buffer: str) -> str:
    """The products of a group's queries and the keys of a buffer."""
    attention = kernel.attention
    return product_of_rows(
        "logits", attention.dtype, attention.head_dim, own=Tile("0", "own_start"),
        walked=Tile("KEY_BUFFERS", moved=f"{buffer} * (KEY_TILE / 16)"), step=schedule.keys, step_name="KEYS",
    )  # fmt: skip


def _values(kernel: AttentionKernel, schedule: AttentionSchedule, buffer: str) -> str:
    """The products of exponentials and the values of a buffer, and ones behind them."""
    attention, ones = kernel.attention, one_columns(kernel, schedule)
    return product_of_columns(
        "sums", "weights", attention.dtype, padded(attention.value_size) + ones,
        walked=Tile("VALUE_BUFFERS", moved=f"{buffer} * (VALUE_TILE / 16)"), step_name="KEYS",
        ones=f"ONES - VALUE_BUFFERS - {buffer} * VALUE_TILE" if ones else "",
    )  # fmt: skip


def _ones(kernel: AttentionKernel) -> str:
    """Ones in shared memory, wherever the permutation of a panel reads them."""
    pair = {"float16": "0x3c003c00u", "bfloat16": "0x3f803f80u"}[kernel.attention.dtype]
    return f"""
    for (int i = thread; i < {ONES_BYTES // 4}; i += THREADS) ((unsigned*)(shared + ONES))[i] = {pair};"""


#: Rows of a thread that have seen a key, from which on they have a base.
_HAS_BASE = "\n  bool has_base[1][2] = {{false, false}};"

#: The sums of exponentials over all keys, as the columns of ones have them.
_TOTALS_OF_ONES = """\
#pragma unroll
  for (int i = 0; i < 2; ++i) totals[0][i] = sums[0][WIDTH / 8 - 1][2 * i];"""


def _weights(pair: str) -> str:
    """Exponentials as operands."""
    return factors_of("logits", "weights", pair, "KEYS")
