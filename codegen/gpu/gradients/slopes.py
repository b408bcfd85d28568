"""The gradient of attention's queries from the slopes of its logits, by ``mma.sync``: one product with the keys.

A block has queries of one head for its own and walks the keys that they see. Slopes lie key by key, so that a tile of
them is read turned, straight into the fragments of the product's left factor; nothing is computed between loading them
and multiplying. Queries and keys that do not see each other are left out element by element at the edges of a mask.
"""

from __future__ import annotations

from codegen.gpu.walks.attention_warps import ORDER, PRODUCTS, band_sizes, named_sizes
from codegen.gpu.walks.bounds import named
from codegen.gpu.walks.fragments import cleared
from codegen.gpu.walks.staged_tiles import StagedTile
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention_gradient import SlopeProduct
from sokoban.kernel.block_range import KEYS_OF_QUERIES
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import FRAGMENT_ROWS, LANES, PIECE_BYTES, padded
from sokoban.schedule.attention_gradient import GradientSchedule, slope_shared_bytes


def takes(request: LoweringRequest[SlopeProduct, GradientSchedule]) -> bool:
    """Products of slopes and keys by the matrix instructions of single warps."""
    return request.schedule.instruction is Instruction.MMA_16X8X16


def lower(request: LoweringRequest[SlopeProduct, GradientSchedule]) -> Lowered:
    """The kernel of a product of slopes and keys."""
    kernel, schedule = request.problem, request.schedule
    return Lowered.of_text(
        _text(kernel, schedule, request.entry), request.entry, blocks=schedule.blocks(kernel), threads=schedule.threads,
        shared_bytes=slope_shared_bytes(kernel, schedule),
    )  # fmt: skip


#: Queries that a block has, the longest walks first, and keys that they see.
PLACE = f"""\
  // The longest walks start first.
{ORDER}
  const int row_block = ROW_BLOCKS - 1 - turn, problem = whole;
  const int first_row = row_block * ROWS, last_row = min(first_row + ROWS, QUERIES_ALL) - 1;
  const int end = {named(KEYS_OF_QUERIES[1], "last_row")};
  const int first_step = {named(KEYS_OF_QUERIES[0], "first_row", " / STEP")};
  const int steps = (end + STEP - 1) / STEP - first_step;"""

#: True for steps of which some query does not see a key.
IS_EDGE = """\
const bool is_edge = first_walked + STEP > KEYS_ALL || (CAUSAL && first_walked + STEP > first_row + AHEAD + 1) ||
        (WINDOW && first_walked <= last_row + AHEAD - WINDOW);"""


def _text(kernel: SlopeProduct, schedule: GradientSchedule, entry: str) -> str:
    product, pair = PRODUCTS[kernel.attention.dtype]
    slopes, keys, output = kernel.parameters
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}) {entry}{KERNEL_SUFFIX}(
    const unsigned short* __restrict__ {slopes}_ptr, const unsigned short* __restrict__ {keys}_ptr,
    unsigned short* __restrict__ {output}_ptr) {{
{constants(kernel, schedule)}
{PLACE}
  // Slopes of a head's queries lie behind those of the head before, all of them behind dK and dV.
  const long long first_key = (long long)(problem / GROUP) * KEYS_ALL;
  const unsigned short* slopes = {slopes}_ptr + first_key * ROW_ALL + BEFORE + problem % GROUP * QUERIES_ALL;
  const unsigned short* keys = {keys}_ptr + first_key * HEAD_DIM;
  extern __shared__ __align__({PIECE_BYTES}) char shared[];
{_copies(kernel, schedule)}
  // Where this lane finds its part of fragments: of slopes, of which rows are keys, and of columns of keys.
  const int slope_place = (lane / 16 * 8 + lane % 8) * SLOPE_PITCH + (warp * FRAGMENTS * 16 + lane / 8 % 2 * 8) * 2;
  const int key_place = KEY_BUFFERS + lane % 16 * KEY_PITCH + lane / 16 * 16;
  float sums[FRAGMENTS][DEPTH / 8][4];
{cleared("sums", "DEPTH")}
  if (steps > 0) {{
    copy_slopes(first_step, 0);
    copy_keys(first_step, 0);
    copy_async_commit();
  }}
  for (int number = 0; number < steps; ++number) {{
    const int step = first_step + number, first_walked = step * STEP, buffer = number % STAGES;
    copy_async_wait_0();
    __syncthreads();
{_next_copies("1 - buffer") if schedule.stages > 1 else ""}
    {IS_EDGE}
{_product(product)}
{_next_copies("0", waits=True) if schedule.stages == 1 else ""}
  }}
{stores(kernel, pair)}
}}
"""


def constants(kernel: SlopeProduct, schedule: GradientSchedule) -> str:
    """Sizes of the problem and of its tiles as names of the text."""
    attention = kernel.attention
    slope_pitch, key_pitch = (
        schedule.pitch_bytes(width, attention.dtype) for width in (schedule.rows, attention.head_dim)
    )
    sizes = {
        "ROWS": schedule.rows, "STEP": schedule.step, "STAGES": schedule.stages, "THREADS": schedule.warps * LANES,
        "FRAGMENTS": schedule.rows // schedule.warps // FRAGMENT_ROWS, "QUERIES_ALL": attention.queries,
        "KEYS_ALL": attention.key_count, "GROUP": kernel.group,
        "HEAD_DIM": attention.head_dim, "DEPTH": padded(attention.head_dim), "SLOPE_PITCH": slope_pitch,
        "KEY_PITCH": key_pitch, "KEY_BUFFERS": schedule.stages * schedule.step * slope_pitch,
        "ROW_ALL": attention.row_size, "BEFORE": attention.head_dim + attention.value_size,
        "AHEAD": kernel.ahead, **band_sizes(kernel, schedule.row_blocks(kernel)),
        "CAUSAL": int(attention.causal), "WINDOW": attention.window_size,
    }  # fmt: skip
    return f"{named_sizes(sizes)}\n  constexpr float FACTOR = {kernel.scale!r}f;"


def _copies(kernel: SlopeProduct, schedule: GradientSchedule) -> str:
    """Copies of tiles to shared memory: rows of both are keys, columns of slopes are the block's queries."""
    attention, rows = kernel.attention, schedule.step
    is_bounded = attention.key_count % rows != 0
    has_last = attention.queries % schedule.rows != 0
    slopes = StagedTile(
        tensor="slopes", width=schedule.rows, full="ROWS", rows=rows, pitch="SLOPE_PITCH",
        start="buffer * STEP * SLOPE_PITCH", first="step * STEP", bound="KEYS_ALL", is_bounded=is_bounded,
        is_walked=True, is_grouped=False, apart=attention.row_size, column="first_row",
        last_column="QUERIES_ALL" if has_last else "",
    )  # fmt: skip
    keys = StagedTile(
        tensor="keys", width=attention.head_dim, full="DEPTH", rows=rows, pitch="KEY_PITCH",
        start="KEY_BUFFERS + buffer * STEP * KEY_PITCH", first="step * STEP", bound="KEYS_ALL", is_bounded=is_bounded,
        is_walked=True, is_grouped=False,
    )  # fmt: skip
    return "\n".join(tile.copy(schedule.threads) for tile in (slopes, keys))


def _next_copies(buffer: str, *, waits: bool = False) -> str:
    """The copies of the next step; they wait for all warps where they write what those still read."""
    wait = "      __syncthreads();\n" if waits else ""
    return f"""\
    if (number + 1 < steps) {{
{wait}      copy_slopes(step + 1, {buffer});
      copy_keys(step + 1, {buffer});
      copy_async_commit();
    }}"""


def masked(factor: str) -> str:
    """Slopes of queries and keys that do not see each other as zeros.

    Args:
        factor: two slopes of a lane, of word ``c`` of fragment ``m`` of sixteen keys ``n``.
    """
    return f"""\
      if (is_edge) {{
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
          for (int c = 0; c < 4; ++c) {{
            const int query = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + c % 2 * 8;
            const int keys_end = CAUSAL ? min(query + AHEAD + 1, KEYS_ALL) : KEYS_ALL;
            const int keys_begin = WINDOW ? query + AHEAD + 1 - WINDOW : 0;
            const int key = first_walked + n * 16 + c / 2 * 8 + lane % 4 * 2;
            if (key >= keys_end || key < keys_begin) {factor} &= 0xffff0000u;
            if (key + 1 >= keys_end || key + 1 < keys_begin) {factor} &= 0x0000ffffu;
          }}
      }}"""


def stores(kernel: SlopeProduct, pair: str) -> str:
    """Stores of the results: a pair of elements a lane."""
    return f"""\
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {{
      const int row = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i;
      if (row < QUERIES_ALL) {{
        unsigned short* result = {kernel.parameters[-1]}_ptr + ((long long)problem * QUERIES_ALL + row) * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
          *(unsigned*)(result + n * 8 + lane % 4 * 2) =
              {pair}(sums[m][n][2 * i] * FACTOR, sums[m][n][2 * i + 1] * FACTOR);
      }}
    }}"""


def _product(product: str) -> str:
    """The product of a step: sixteen keys at a time, whose slopes are a fragment of every sixteen queries."""
    return f"""\
#pragma unroll
    for (int n = 0; n < STEP / 16; ++n) {{
      unsigned factors[FRAGMENTS][4];
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m)
        load_matrix_x4_trans(factors[m], 0, shared,
                             slope_place + (buffer * STEP + n * 16) * SLOPE_PITCH + m * 32);
{masked("factors[m][c]")}
#pragma unroll
      for (int e = 0; e < DEPTH / 16; ++e) {{
        unsigned walked_fragment[4];
        load_matrix_x4_trans(walked_fragment, 0, shared, key_place + (buffer * STEP + n * 16) * KEY_PITCH + e * 32);
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {{
          {product}(sums[m][2 * e], 0, factors[m], 0, walked_fragment, 0);
          {product}(sums[m][2 * e + 1], 0, factors[m], 0, walked_fragment, 2);
        }}
      }}
    }}"""
