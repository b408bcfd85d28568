"""Attention by ``mma.sync``: every warp multiplies rows of its own by all keys of a step.

What a row needs stays with the four lanes that hold its sums: the base of its exponentials, their sum, and the values
weighted by them, all in registers. The fragment of sums that one product leaves is the fragment of factors
that the next one takes, so that exponentials go from product to product without shared memory (T. Dao,
"FlashAttention-2", 2023, 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from codegen.gpu.walks.bounds import named
from codegen.gpu.walks.fragments import product_of_columns, product_of_rows, row_fragments, unseen_keys
from codegen.gpu.walks.pages import PagedTile, element_type, own_keys, page_sizes, pointers
from codegen.gpu.walks.staged_tiles import StagedTile
from codegen.gpu.walks.staged_walk import StagedWalk, rows_in_registers
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention import AttentionKernel, GroupedHeads
from sokoban.kernel.block_range import KEYS_OF_QUERIES
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import (
    FRAGMENT_ROWS,
    LANES,
    PIECE_BYTES,
    AttentionSchedule,
    one_columns,
    padded,
    problem_band,
    shared_bytes,
)

#: By element type: what multiplies fragments, and what makes a pair of elements of two sums.
PRODUCTS = {"float16": ("mma_16x8x16_f16", "pair_f16"), "bfloat16": ("mma_16x8x16_bf16", "pair_bf16")}


def takes(request: LoweringRequest[AttentionKernel, AttentionSchedule]) -> bool:
    """Attention by the matrix instructions of single warps."""
    return request.schedule.instruction is Instruction.MMA_16X8X16


def lower(request: LoweringRequest[AttentionKernel, AttentionSchedule]) -> Lowered:
    """The kernel of attention, or of slices of it."""
    kernel, schedule = request.problem, request.schedule
    product, pair = PRODUCTS[kernel.attention.dtype]
    shared = shared_bytes(kernel, schedule)
    body = f"""\
  extern __shared__ __align__({PIECE_BYTES}) char shared[];
  const int key_buffers = ROWS * KEY_PITCH, value_buffers = key_buffers + STAGES * KEYS * KEY_PITCH;
{_copies(kernel, schedule)}
{CLEAR}
{_products(schedule, product, pair, kernel.scale)}
{TOTALS}
{results(kernel, pair)}"""
    text = _text(kernel, schedule, request.entry, body)
    return Lowered.of_text(
        text, request.entry, blocks=schedule.blocks(kernel), threads=schedule.threads, shared_bytes=shared
    )


def _text(kernel: AttentionKernel, schedule: AttentionSchedule, entry: str, body: str) -> str:
    names = [f"const {element_type(tensor)}* __restrict__ {tensor.name}_ptr" for tensor in kernel.inputs]
    element = "float" if kernel.slices > 1 else "unsigned short"
    parameters = ", ".join([*names, f"{element}* __restrict__ {kernel.output.name}_ptr"])
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}) {entry}{KERNEL_SUFFIX}({parameters}) {{
{constants(kernel, schedule)}
{place(kernel)}
  const unsigned short* queries = {kernel.inputs[0].name}_ptr + (long long)problem * ROWS_ALL * HEAD_DIM;
{pointers(kernel)}
{body}
}}
"""


def constants(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """Sizes of the problem and of its tiles as names of the text."""
    attention, warp_rows = kernel.attention, schedule.rows // schedule.warps
    sizes = {
        "ROWS": schedule.rows, "KEYS": schedule.keys, "STAGES": schedule.stages, "THREADS": schedule.warps * LANES,
        "FRAGMENTS": warp_rows // FRAGMENT_ROWS, "ROWS_ALL": kernel.rows, "KEYS_HELD": attention.key_count,
        "GROUP": kernel.group, "QUERIES_ALL": attention.queries, "HEAD_DIM": attention.head_dim,
        "VALUE_DIM": attention.value_size, "DEPTH": padded(attention.head_dim),
        "WIDTH": padded(attention.value_size) + one_columns(kernel, schedule),
        "KEY_PITCH": schedule.pitch_bytes(attention.head_dim, attention.dtype),
        "VALUE_PITCH": schedule.pitch_bytes(attention.value_size, attention.dtype),
        "SLICES": kernel.slices, "CAUSAL": int(attention.causal),
        **band_sizes(kernel, schedule.row_blocks(kernel), kernel.slices),
        "WINDOW": attention.window_size, **page_sizes(kernel),
    }  # fmt: skip
    if kernel.lengths is None:
        sizes |= {"KEYS_ALL": attention.key_count, "AHEAD": kernel.ahead}
    # Logits are kept in powers of two, whose exponentials take one instruction.
    scale = abs(kernel.scale) / math.log(2) or 1e-30
    return f"{named_sizes(sizes)}\n  constexpr float SCALE = {scale!r}f;"


def band_sizes(kernel: GroupedHeads, row_blocks: int, parts: int = 1) -> Mapping[str, int]:
    """Blocks along the rows of a problem, problems that start side by side, and all of them, each part counted."""
    band = problem_band(kernel, row_blocks)
    return {"ROW_BLOCKS": row_blocks, "BAND": band * parts, "PROBLEMS": kernel.problems * parts}


#: Which rows of which problem a block has, by the order in which blocks start: of every band of problems the first
#: rows of all, then the next.
BLOCK_ORDER = """\
  const int band_first = blockIdx.x / (ROW_BLOCKS * BAND) * BAND, within = blockIdx.x - band_first * ROW_BLOCKS;
  const int band = PROBLEMS % BAND == 0 ? BAND : min(BAND, PROBLEMS - band_first);
  const int turn = within / band, whole = band_first + within % band;"""
#: The place of a thread in its block, and that of the block.
THREAD_PLACE = "  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;"
ORDER = f"{THREAD_PLACE}\n{BLOCK_ORDER}"


def named_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes as constants of a text, as many to a line as there is room for."""
    lines, line = [], "  constexpr int"
    for name, size in sizes.items():
        item = f" {name} = {size},"
        if len(line) + len(item) > 118:
            lines.append(line)
            line = "   "
        line += item
    return "\n".join([*lines, line.rstrip(",") + ";"])


def place(kernel: AttentionKernel) -> str:
    """Which rows a block has, which keys they see, and which of those the block walks. The longest walks start
    first."""
    own = "" if kernel.lengths is None else f"\n{own_keys(kernel)}"
    return f"""\
{ORDER}
  const int row_block = ROW_BLOCKS - 1 - turn, slice = whole % SLICES, problem = whole / SLICES;{own}
  const int first_row = row_block * ROWS, first_query = first_row / GROUP;
  const int last_query = min((first_row + ROWS - 1) / GROUP, QUERIES_ALL - 1);
  const int seen_end = {named(KEYS_OF_QUERIES[1], "last_query")};
  const int seen_begin = {named(KEYS_OF_QUERIES[0], "first_query", " / KEYS")};
  const int steps_all = (seen_end + KEYS - 1) / KEYS - seen_begin, share = (steps_all + SLICES - 1) / SLICES;
  const int first_step = seen_begin + slice * share, steps = min(share, steps_all - slice * share);
  // Rows of a problem are its queries, of all heads of a group one beside the other; each head lies by itself.
  auto place_of = [](int row) {{ return GROUP == 1 ? row : row % GROUP * QUERIES_ALL + row / GROUP; }};"""


def queries_tile(kernel: AttentionKernel, schedule: AttentionSchedule) -> StagedTile:
    """The queries of a block, on their way to shared memory."""
    return StagedTile(
        tensor="queries", width=kernel.attention.head_dim, full="DEPTH", rows=schedule.rows, pitch="KEY_PITCH",
        start="0", first="first_row", bound="ROWS_ALL", is_bounded=kernel.rows % schedule.rows != 0, is_walked=False,
        is_grouped=True, is_swizzled=schedule.instruction.is_by_groups,
    )  # fmt: skip


def _copies(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """Copies of tiles to shared memory."""
    attention = kernel.attention
    bounded = attention.key_count % schedule.keys != 0 or kernel.lengths is not None
    pages = attention.pages
    tile_of = StagedTile if pages is None else partial(PagedTile, page=pages.tokens)
    walked = [
        tile_of(
            tensor=tensor, width=width, full=full, rows=schedule.keys, pitch=pitch,
            start=f"{tensor[:-1]}_buffers + buffer * KEYS * {pitch}", first="step * KEYS", bound="KEYS_ALL",
            is_bounded=bounded, is_walked=True, is_grouped=False,
        )
        for tensor, width, full, pitch in (
            ("keys", attention.head_dim, "DEPTH", "KEY_PITCH"), ("values", attention.value_size, "WIDTH", "VALUE_PITCH")
        )
    ]  # fmt: skip
    return "\n".join(tile.copy(schedule.threads) for tile in (queries_tile(kernel, schedule), *walked))


def _products(schedule: AttentionSchedule, product: str, pair: str, scale: float) -> str:
    """The walk along the keys: two products a step and the exponentials between them."""
    declared = "      unsigned query_fragments[FRAGMENTS][4];\n"
    logits = product_of_rows(
        "logits", _query(schedule), "keys_now + key_place", "KEY_PITCH", depth="DEPTH", step="KEYS", product=product,
        loads="" if schedule.held else f"{declared}{row_fragments(_query(schedule), 'query_place', 'KEY_PITCH')}\n",
    )  # fmt: skip
    values = product_of_columns(
        "sums", "logits", "values_now + value_place", "VALUE_PITCH", width="WIDTH", step="KEYS", product=product,
        pair=pair,
    )  # fmt: skip
    walk = _walk(schedule)
    query_registers = "  unsigned query_fragments[FRAGMENTS][DEPTH / 16][4];\n" if schedule.held else ""
    return f"""\
  // Where this lane finds rows of fragments: of queries, of keys (two tiles of eight), of values.
  const int query_place = (warp * FRAGMENTS * 16 + lane % 16) * KEY_PITCH + lane / 16 * 16;
  const int key_place = (lane / 16 * 8 + lane % 8) * KEY_PITCH + lane / 8 % 2 * 16;
  const int value_place = lane % 16 * VALUE_PITCH + lane / 16 * 16;
{walk.prologue()}
{query_registers}  for (int number = 0; number < steps; ++number) {{
    const int step = first_step + number, first_key = step * KEYS;
{walk.before_first()}
    float logits[FRAGMENTS][KEYS / 8][4];
{logits}
{mask(scale)}
{softmax(SHRINK)}
{walk.before_second()}
{values}
  }}"""


#: What a thread keeps of its rows, before the first step.
CLEAR = """\
  float sums[FRAGMENTS][WIDTH / 8][4], bases[FRAGMENTS][2], totals[FRAGMENTS][2];
  const float nothing = -1.0f / 0.0f;
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bases[m][i] = 0.0f;
      totals[m][i] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[m][n][c] = 0.0f;
  }"""

#: The sums of exponentials over all keys, from those over the keys of each lane.
TOTALS = """\
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      totals[m][i] += __shfl_xor_sync(0xffffffffu, totals[m][i], 1);
      totals[m][i] += __shfl_xor_sync(0xffffffffu, totals[m][i], 2);
    }"""


def _query(schedule: AttentionSchedule) -> str:
    return "query_fragments[m][d]" if schedule.held else "query_fragments[m]"


def _walk(schedule: AttentionSchedule) -> StagedWalk:
    """Copies and waits of keys and values."""
    loads = row_fragments(_query(schedule), "query_place", "KEY_PITCH", indent="      ")
    return StagedWalk(
        stages=schedule.stages, own="queries", first="keys", second="values", first_bytes="KEYS * KEY_PITCH",
        second_bytes="KEYS * VALUE_PITCH", first_step="first_step", step="step", number="number",
        held=rows_in_registers("number", loads) if schedule.held else "",
    )  # fmt: skip


def mask(scale: float) -> str:
    """Logits as the softmax takes them: nothing where a row does not see the key."""
    return f"{_NEGATION if scale < 0 else ''}{unseen_keys('KEYS', 'first_key', 'nothing')}"


#: Logits of a negative scale, so that the largest is still the largest after scaling.
_NEGATION = """\
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) logits[m][n][c] = -logits[m][n][c];
"""

#: What was summed over a smaller base shrinks.
SHRINK = """\
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) {
          sums[m][n][2 * i] *= shrink;
          sums[m][n][2 * i + 1] *= shrink;
        }"""


def softmax(at_new_base: str, *, has_ones: bool = False) -> str:
    """The exponentials of a step over the base of its row, which is the largest logit of some step before.

    A base stays while no logit of a warp is :data:`MARGIN` powers of two above that of its row: exponentials grow to
    2**8 at most, which 16 bits hold as exactly as those up to 1, and results are divided by their sum in the end
    (FlashAttention 4 skips the rescaling so). Only where one is, or a row has no base yet, the largest are looked for.
    ``at_new_base`` of every row is what shrinks the sums.

    The sum of a row's exponentials, ``totals``, says whether it has a base. Where a product with ones sums them,
    ``has_base`` does.
    """
    if has_ones:
        parts = {"no_base": "!has_base[m][i]", "total": "", "total_of_lanes": "", "shrink_total": "", "sum": ""}
        parts["is_first"] = "!has_base[m][i];\n        has_base[m][i] |= peak != nothing;"
    else:
        parts = {
            "no_base": "totals[m][i] == 0.0f", "total": ", total = totals[m][i]",
            "total_of_lanes": "\n          total += __shfl_xor_sync(0xffffffffu, total, apart);",
            "is_first": "total == 0.0f;", "shrink_total": "\n        totals[m][i] *= shrink;",
            "sum": "\n            totals[m][i] += logits[m][n][j];",
        }  # fmt: skip
    return f"{_LOGITS.format_map(parts)}\n{at_new_base}\n      }}\n{_EXPONENTIALS.format_map(parts)}"


#: Powers of two by which a logit may be above the base of its row.
MARGIN = 8.0

#: Numbers above 0 are ordered as the integers of their bits, of which sm_90 takes the largest of three at a time.
_LOGITS = f"""\
    int largest = 0;
    bool is_new = false;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {{{{
        is_new |= {{no_base}};
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {{{{
#pragma unroll
          for (int j = 2 * i; j < 2 * i + 2; ++j) logits[m][n][j] = fmaf(logits[m][n][j], SCALE, -bases[m][i]);
          largest = max(max(largest, __float_as_int(logits[m][n][2 * i])), __float_as_int(logits[m][n][2 * i + 1]));
        }}}}
      }}}}
    const bool has_new_base = __ballot_sync(0xffffffffu, is_new || largest > __float_as_int({MARGIN}f)) != 0;
    if (has_new_base)
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {{{{
        float peak = nothing{{total}};
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) peak = fmaxf(peak, fmaxf(logits[m][n][2 * i], logits[m][n][2 * i + 1]));
#pragma unroll
        for (int apart = 1; apart < 4; apart *= 2) {{{{
          peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, apart));{{total_of_lanes}}
        }}}}
        // A row that has seen no key has no base, and nothing that shrinks.
        const bool is_first = {{is_first}}
        const float rise = peak == nothing ? 0.0f : is_first ? peak : fmaxf(peak, 0.0f);
        const float shrink = is_first ? 1.0f : power_of_two(-rise);
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int j = 2 * i; j < 2 * i + 2; ++j) logits[m][n][j] -= rise;
        bases[m][i] += rise;{{shrink_total}}"""

_EXPONENTIALS = """\
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int j = 2 * i; j < 2 * i + 2; ++j) {{
            logits[m][n][j] = power_of_two(logits[m][n][j]);{sum}
          }}"""


def results(kernel: AttentionKernel, pair: str) -> str:
    """Stores of values over the sum of their weights, a pair of elements a lane; or of a slice's partial results."""
    if kernel.slices > 1:
        return _partial_results(kernel, kernel.attention.value_size)
    return f"""\
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {{
      const int row = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i;
      const float inverse = 1.0f / totals[m][i];
      if (row < ROWS_ALL) {{
        unsigned short* result = {kernel.output.name}_ptr + ((long long)problem * ROWS_ALL + place_of(row)) * VALUE_DIM;
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; ++n)
          *(unsigned*)(result + n * 8 + lane % 4 * 2) =
              {pair}(sums[m][n][2 * i] * inverse, sums[m][n][2 * i + 1] * inverse);
      }}
    }}"""


def _partial_results(kernel: AttentionKernel, width: int) -> str:
    """Results of a slice for every row: weighted values, the base of the weights, their sum."""
    total_rows = kernel.problems * kernel.rows
    return f"""\
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {{
      const int row = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i;
      if (row < ROWS_ALL) {{
        const long long place = (long long)slice * {total_rows} + (long long)problem * ROWS_ALL + place_of(row);
        float* result = {kernel.output.name}_ptr + place * {width + 2};
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 8; ++n) {{
          float2 pair;
          pair.x = sums[m][n][2 * i];
          pair.y = sums[m][n][2 * i + 1];
          *(float2*)(result + n * 8 + lane % 4 * 2) = pair;
        }}
        if (lane % 4 == 0) {{
          result[VALUE_DIM] = totals[m][i] == 0.0f ? nothing : bases[m][i];
          result[VALUE_DIM + 1] = totals[m][i];
        }}
      }}
    }}"""
