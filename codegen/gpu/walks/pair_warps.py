"""Two products in a row by ``mma.sync``: every warp multiplies rows of its own by all columns of H of a step.

As in attention (:mod:`codegen.gpu.walks.attention_warps`) the fragment of sums that the first product leaves is the
fragment of factors that the second one takes, so that elements of H go from product to product in registers: in float32
through what is done with each of them, then rounded to 16 bits.
"""

from __future__ import annotations

from codegen.gpu.walks.attention_warps import PRODUCTS, named_sizes
from codegen.gpu.walks.fragments import cleared, own_fragments, product_of_columns, product_of_rows
from codegen.gpu.walks.pair_pointwise import (
    SUM,
    batch_places,
    column_loads,
    final_text,
    inner_text,
    output_load,
    parameters,
    problem_start,
)
from codegen.gpu.walks.staged_tiles import StagedTile
from codegen.gpu.walks.staged_walk import StagedWalk, held_rows
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered, identifier
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pair import ProductPair
from sokoban.schedule.attention import FRAGMENT_ROWS, PIECE_BYTES, padded, pitch_bytes
from sokoban.schedule.pair import PairSchedule, StagedFactor, pair_shared_bytes, staged_factors


def takes(request: LoweringRequest[ProductPair, PairSchedule]) -> bool:
    """Pairs of products by the matrix instructions of single warps."""
    return request.schedule.instruction is Instruction.MMA_16X8X16


def lower(request: LoweringRequest[ProductPair, PairSchedule]) -> Lowered:
    """The kernel of a pair of products."""
    kernel, schedule = request.problem, request.schedule
    return Lowered.of_text(
        _text(kernel, schedule, request.entry), request.entry, blocks=schedule.blocks(kernel),
        threads=schedule.threads, shared_bytes=pair_shared_bytes(kernel, schedule),
    )  # fmt: skip


def _text(kernel: ProductPair, schedule: PairSchedule, entry: str) -> str:
    names = ", ".join(f"{kind}* __restrict__ {name}_ptr" for kind, name in parameters(kernel))
    pointers = "\n".join(
        f"  const unsigned short* {pointer} = "
        f"{identifier(load.tensor)}_ptr + {problem_start(kernel, load, 'long long')};"
        for pointer, load in (("x_rows", kernel.own), ("a_tiles", kernel.first), ("b_tiles", kernel.second))
    )
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}) {entry}{KERNEL_SUFFIX}({names}) {{
{_constants(kernel, schedule)}
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_row = blockIdx.x % ROW_BLOCKS * ROWS, problem = blockIdx.x / ROW_BLOCKS;
{batch_places(kernel)}
{pointers}
  extern __shared__ __align__({PIECE_BYTES}) char shared[];
  const int a_tile_buffers = ROWS * X_PITCH, b_tile_buffers = a_tile_buffers + STAGES * A_BYTES;
{_copies(kernel, schedule)}
{_walk(kernel, schedule)}
{_results(kernel)}
}}
"""


def _constants(kernel: ProductPair, schedule: PairSchedule) -> str:
    """Sizes of the problem and of its tiles as names of the text."""
    first, second = staged_factors(kernel, schedule)
    return named_sizes({
        "ROWS": schedule.rows, "STEP": schedule.step, "STAGES": schedule.stages, "THREADS": schedule.threads,
        "FRAGMENTS": schedule.rows // schedule.warps // FRAGMENT_ROWS, "ROWS_ALL": kernel.rows,
        "MIDDLE_ALL": kernel.middle_size, "DEPTH_ALL": kernel.depth_size, "WIDTH_ALL": kernel.width_size,
        "DEPTH": padded(kernel.depth_size), "WIDTH": padded(kernel.width_size),
        "X_PITCH": pitch_bytes(kernel.depth_size, kernel.dtype), "A_PITCH": first.pitch, "A_BYTES": first.size_bytes,
        "B_PITCH": second.pitch, "B_BYTES": second.size_bytes, "ROW_BLOCKS": schedule.row_blocks(kernel),
    })  # fmt: skip


def _copies(kernel: ProductPair, schedule: PairSchedule) -> str:
    """How tiles come to shared memory."""
    own = StagedTile(
        tensor="x_rows", width=kernel.depth_size, full="DEPTH", rows=schedule.rows, pitch="X_PITCH", start="0",
        first="first_row", bound="ROWS_ALL", is_bounded=kernel.rows % schedule.rows != 0, is_walked=False,
        is_grouped=False, apart=kernel.stride(kernel.own, kernel.row),
    )  # fmt: skip
    first, second = staged_factors(kernel, schedule)
    walked = [
        _factor(kernel, schedule, "a", first, kernel.depth, is_turned=kernel.is_first_turned),
        _factor(kernel, schedule, "b", second, kernel.width, is_turned=kernel.is_second_turned),
    ]
    return "\n".join(tile.copy(schedule.threads) for tile in (own, *walked))


def _factor(
    kernel: ProductPair, schedule: PairSchedule, name: str, tile: StagedFactor, other: str, *, is_turned: bool
) -> StagedTile:
    """A tile of A or B, whose axis beside H's columns is ``other``; turned it has a part of every row there is."""
    load = kernel.first if name == "a" else kernel.second
    size, full = (kernel.depth_size, "DEPTH") if name == "a" else (kernel.width_size, "WIDTH")
    is_cut = kernel.middle_size % schedule.step != 0
    start, pitch = f"{name}_tile_buffers + buffer * {name.upper()}_BYTES", f"{name.upper()}_PITCH"
    if not is_turned:
        return StagedTile(
            tensor=f"{name}_tiles", width=size, full=full, rows=tile.rows, pitch=pitch, start=start,
            first="step * STEP", bound="MIDDLE_ALL", is_bounded=is_cut, is_walked=True, is_grouped=False,
            apart=kernel.stride(load, kernel.middle),
        )  # fmt: skip
    return StagedTile(
        tensor=f"{name}_tiles", width=schedule.step, full="STEP", rows=tile.rows, pitch=pitch, start=start, first="0",
        bound=f"{full}_ALL", is_bounded=tile.rows != size, is_walked=True, is_grouped=False,
        apart=kernel.stride(load, other), column="step * STEP", last_column="MIDDLE_ALL" if is_cut else "",
    )  # fmt: skip


def _walk(kernel: ProductPair, schedule: PairSchedule) -> str:
    """The walk along H's columns: two products a step, and what is done with every element between them."""
    product, pair = PRODUCTS[kernel.dtype]
    own = "x_fragments[m][d]" if schedule.held else "x_fragments[m]"
    loads = own_fragments(own, "x_place", "X_PITCH", indent="      " if schedule.held else "    ")
    walk = StagedWalk(
        stages=schedule.stages, own="x_rows", first="a_tiles", second="b_tiles", first_bytes="A_BYTES",
        second_bytes="B_BYTES", first_step="0", step="step", number="step",
        held=held_rows("step", loads) if schedule.held else "",
    )  # fmt: skip
    middle = product_of_rows(
        "middle", own, "a_tiles_now + a_place", "A_PITCH", depth="DEPTH", step="STEP", product=product,
        loads="" if schedule.held else f"      unsigned x_fragments[FRAGMENTS][4];\n{loads}\n",
        is_turned=kernel.is_first_turned,
    )  # fmt: skip
    sums = product_of_columns(
        "sums", "middle", "b_tiles_now + b_place", "B_PITCH", width="WIDTH", step="STEP", product=product, pair=pair,
        is_turned=kernel.is_second_turned,
    )  # fmt: skip
    return f"""\
  // Where this lane finds fragments: of rows, and of tiles whose rows or whose columns are multiplied.
  const int x_place = (warp * FRAGMENTS * 16 + lane % 16) * X_PITCH + lane / 16 * 16;
  const int a_place = {_place("A_PITCH", by_columns=kernel.is_first_turned)};
  const int b_place = {_place("B_PITCH", by_columns=not kernel.is_second_turned)};
  const int steps = (MIDDLE_ALL + STEP - 1) / STEP;
  float sums[FRAGMENTS][WIDTH / 8][4];
{cleared("sums", "WIDTH")}
{walk.prologue()}
{"  unsigned x_fragments[FRAGMENTS][DEPTH / 16][4];" if schedule.held else ""}
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {{
    const int first_column = step * STEP;
{_fetched(kernel, schedule)}
{walk.before_first()}
    float middle[FRAGMENTS][STEP / 8][4];
{middle}
{_inner(kernel, schedule)}
{walk.before_second()}
{sums}
  }}"""


def _place(pitch: str, *, by_columns: bool) -> str:
    """Where a lane finds its part of a fragment of a tile, whose columns are multiplied or whose rows."""
    if by_columns:
        return f"lane % 16 * {pitch} + lane / 16 * 16"
    return f"(lane / 16 * 8 + lane % 8) * {pitch} + lane / 8 % 2 * 16"


def _column(kernel: ProductPair, schedule: PairSchedule) -> str:
    """The column of H of a lane's element; the last one there is where a step reaches beyond it."""
    column = "first_column + n * 8 + lane % 4 * 2 + j"
    return f"min({column}, MIDDLE_ALL - 1)" if kernel.middle_size % schedule.step else column


def _fetched(kernel: ProductPair, schedule: PairSchedule) -> str:
    """What columns of H need of other tensors, under way before the step waits for its copies."""
    texts = [
        f"""\
    float fetched_{number}[STEP / 8][2];
#pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {{
        const int column = {_column(kernel, schedule)};
        fetched_{number}[n][j] = {text};
      }}"""
        for number, (_, text) in enumerate(column_loads(kernel))
    ]
    return "\n".join(texts)


def _inner(kernel: ProductPair, schedule: PairSchedule) -> str:
    """What elements of H become; nothing in columns beyond those there are, where another tensor's elements would make
    something of them."""
    fetched = {tensor: f"fetched_{number}[n][j]" for number, (tensor, _) in enumerate(column_loads(kernel))}
    text = inner_text(kernel, fetched, is_rounded=True)
    if text == SUM:
        return ""
    row = "first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i"
    row = f"min({row}, ROWS_ALL - 1)" if kernel.rows % schedule.rows else row
    is_cut = kernel.middle_size % schedule.step != 0
    value = f"first_column + n * 8 + lane % 4 * 2 + j < MIDDLE_ALL ? {text} : 0.0f" if is_cut else text
    return f"""\
#pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {{
        const int column = {_column(kernel, schedule)};
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {{
            const int row = {row};
            const float {SUM} = middle[m][n][2 * i + j];
            middle[m][n][2 * i + j] = {value};
          }}
      }}"""


def _results(kernel: ProductPair) -> str:
    """What leaves: sums through the final statement, a pair of elements a lane."""
    _, pair = PRODUCTS[kernel.dtype]
    load = output_load(kernel)
    start = f"{problem_start(kernel, load, 'long long')} + (long long)row * {kernel.stride(load, kernel.row)}"
    # Columns outside rows: what columns need of other tensors is fetched for one at a time, not held for all of them.
    return f"""\
  auto final_value = [&](float {SUM}, int row, int column) -> float {{ return {final_text(kernel, is_rounded=True)}; }};
#pragma unroll
  for (int n = 0; n < WIDTH_ALL / 8; ++n)
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {{
        const int row = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i, column = n * 8 + lane % 4 * 2;
        unsigned short* to = {identifier(kernel.output.name)}_ptr + {start} + column;
        if (row < ROWS_ALL)
          *(unsigned*)to = {pair}(final_value(sums[m][n][2 * i], row, column),
                            final_value(sums[m][n][2 * i + 1], row, column + 1));
      }}"""
