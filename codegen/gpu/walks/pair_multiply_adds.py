"""Two products in a row by multiply-adds, in CUDA and in OpenCL C: float32, and 16 bits without an instruction.

Threads form a grid over a tile of H, as in :mod:`codegen.gpu.walks.attention_multiply_adds`; elements of H pass
between the threads of a row through shared memory, in float32.
"""

from __future__ import annotations

from codegen.gpu.matrix.final_text import READ
from codegen.gpu.walks.attention_multiply_adds import FloatTile
from codegen.gpu.walks.float_products import FloatProducts
from codegen.gpu.walks.language import ELEMENTS, Language
from codegen.gpu.walks.pair_pointwise import (
    SUM,
    batch_places,
    final_text,
    inner_text,
    output_load,
    parameters,
    problem_start,
)
from codegen.tir.lowered import Lowered, identifier
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pair import ProductPair
from sokoban.schedule.pair import PairSchedule, pair_floats, pair_shared_bytes


def takes(request: LoweringRequest[ProductPair, PairSchedule]) -> bool:
    """Pairs of products without matrix instructions."""
    return request.schedule.instruction is Instruction.FMA


def lower(request: LoweringRequest[ProductPair, PairSchedule]) -> Lowered:
    """The kernel of a pair of products."""
    kernel, schedule = request.problem, request.schedule
    shared, language = pair_shared_bytes(kernel, schedule), Language.of(request.target)
    body = [
        f"  {language.shared.format(pieces=pair_floats(kernel, schedule).total // 4)}",
        _place(kernel, schedule), _walk(kernel, schedule), _results(kernel, schedule),
    ]  # fmt: skip
    return Lowered.of_text(
        language.kernel(request.entry, schedule.threads, parameters(kernel), "\n".join(filter(None, body))),
        request.entry, blocks=schedule.blocks(kernel), threads=schedule.threads, shared_bytes=shared,
        dynamic_shared_bytes=0 if language.is_opencl else shared,
    )  # fmt: skip


def _place(kernel: ProductPair, schedule: PairSchedule) -> str:
    """Which rows of which problem a block has, and where its problem's factors begin."""
    lanes, row_blocks = schedule.lanes, schedule.row_blocks(kernel)
    element, _ = ELEMENTS[kernel.dtype]
    pointers = "\n".join(
        f"  GLOBAL const {element}* {pointer} = {identifier(load.tensor)}_ptr + {problem_start(kernel, load, 'long')};"
        for pointer, load in (("x_rows", kernel.own), ("a_tile", kernel.first), ("b_tile", kernel.second))
    )
    return f"""\
  const int thread = THREAD, lane = thread % {lanes}, first = thread / {lanes};
  const int block = BLOCK, first_row = block % {row_blocks} * {schedule.rows}, problem = block / {row_blocks};
{batch_places(kernel)}
{pointers}"""


def _tile(kernel: ProductPair, schedule: PairSchedule, name: str) -> str:
    """The copy of the block's rows of X, or of a step's tile of A or of B."""
    floats = pair_floats(kernel, schedule)
    _, ending = ELEMENTS[kernel.dtype]
    load, size, full, pitch = {
        "x_rows": (kernel.own, kernel.depth_size, floats.depth, floats.key_pitch),
        "a_tile": (kernel.first, kernel.depth_size, floats.depth, floats.key_pitch),
        "b_tile": (kernel.second, kernel.width_size, floats.width, floats.width),
    }[name]
    if load.indices[-1].axes[0] == kernel.middle:
        other = kernel.depth if name == "a_tile" else kernel.width
        return _turned(kernel, schedule, name, size, full, pitch, kernel.stride(load, other))
    is_own = name == "x_rows"
    rows, first, count = (
        (schedule.rows, "first_row", kernel.rows) if is_own else (schedule.step, "first_column", kernel.middle_size)
    )
    tile = FloatTile(
        tensor=load.tensor, pointer=name, width=size, full=full, pitch=pitch, rows=rows,
        start=0 if is_own else floats.step, bound=f"row < {count}" if count % rows else "", place="row",
        apart=kernel.stride(load, kernel.row if is_own else kernel.middle),
    )  # fmt: skip
    return tile.copy(first, 0, schedule.threads, ending)


def _turned(
    kernel: ProductPair, schedule: PairSchedule, name: str, size: int, full: int, pitch: int, apart: int
) -> str:
    """The copy of a tile whose rows, of ``size`` elements, lie one element beside the other in memory: neighbouring
    threads read neighbouring rows, four elements each."""
    threads, step, middle = schedule.threads, schedule.step, kernel.middle_size
    count = step * full // 4
    is_rest = count % threads != 0
    inside = [f"column < {middle}"] * (middle % step != 0) + [f"piece < {size}"] * (full != size)
    inside += [f"at < {count}"] * is_rest
    read = READ[kernel.dtype]
    fetched = "\n".join(
        f"        value.{part} = {read.format(f'{name}[(long)(piece + {at}) * {apart} + column]')};"
        for at, part in enumerate("xyzw")
    )
    return f"""\
#pragma unroll
    for (int i = 0; i < {-(-count // threads)}; ++i) {{
      const int at = i * {threads} + thread;
      const int tile_row = at % {step}, piece = at / {step} * 4, column = first_column + tile_row;
      float4 value = zeros;
      {f"if ({' && '.join(inside)}) " if inside else ""}{{
{fetched}
      }}
      {f"if (at < {count}) " * is_rest}\
*(LOCAL float4*)(shared + {pair_floats(kernel, schedule).step} + tile_row * {pitch} + piece) = value;
    }}"""


def _walk(kernel: ProductPair, schedule: PairSchedule) -> str:
    """The walk along H's columns: two products a step, and what is done with every element between them."""
    floats, products = pair_floats(kernel, schedule), FloatProducts(schedule, schedule.step)
    rows, columns, steps = products.rows, floats.width // schedule.lanes, -(-kernel.middle_size // schedule.step)
    return f"""\
  float4 zeros;
  zeros.x = zeros.y = zeros.z = zeros.w = 0.0f;
  float sums[{rows}][{columns}];
#pragma unroll
  for (int i = 0; i < {rows}; ++i)
#pragma unroll
    for (int c = 0; c < {columns}; ++c) sums[i][c] = 0.0f;
{_tile(kernel, schedule, "x_rows")}
#pragma unroll 1
  for (int step = 0; step < {steps}; ++step) {{
    const int first_column = step * {schedule.step};
{_tile(kernel, schedule, "a_tile")}
    BARRIER;
    float middle[{rows}][{products.logits}];
{products.of_rows("middle", 0, floats.step, floats.key_pitch, floats.depth)}
    BARRIER;
{_inner(kernel, schedule, products)}
{_tile(kernel, schedule, "b_tile")}
    BARRIER;
{products.of_columns("sums", floats.weights, floats.weight_pitch, floats.step, floats.width, columns)}
    if (step + 1 < {steps}) {{
      BARRIER;
    }}
  }}"""


def _inner(kernel: ProductPair, schedule: PairSchedule, products: FloatProducts) -> str:
    """What elements of H become, where all threads of a row find them; nothing beyond the columns there are."""
    floats, lanes = pair_floats(kernel, schedule), schedule.lanes
    row, column, value = "first_row + tile_row", f"first_column + lane + j * {lanes}", inner_text(kernel)
    if kernel.rows % schedule.rows:
        row = f"min({row}, {kernel.rows - 1})"
    if kernel.middle_size % schedule.step:
        value = f"{column} < {kernel.middle_size} ? {value} : 0.0f" if value != SUM else value
        column = f"min({column}, {kernel.middle_size - 1})"
    return f"""\
#pragma unroll
    for (int i = 0; i < {products.rows}; ++i) {{
      const int tile_row = first + i * {products.apart}, row = {row};
#pragma unroll
      for (int j = 0; j < {products.logits}; ++j) {{
        const int column = {column};
        const float {SUM} = middle[i][j];
        shared[{floats.weights} + tile_row * {floats.weight_pitch} + lane + j * {lanes}] = {value};
      }}
    }}"""


def _results(kernel: ProductPair, schedule: PairSchedule) -> str:
    """Sums through the final statement, four elements at a time."""
    floats, lanes, width = pair_floats(kernel, schedule), schedule.lanes, kernel.width_size
    element, ending = ELEMENTS[kernel.dtype]
    load = output_load(kernel)
    bound = f"    if (row >= {kernel.rows}) break;\n" if kernel.rows % schedule.rows else ""
    start = f"{problem_start(kernel, load, 'long')} + (long)row * {kernel.stride(load, kernel.row)}"
    return f"""\
#pragma unroll
  for (int i = 0; i < {schedule.thread_rows}; ++i) {{
    const int row = first_row + first + i * {schedule.threads // lanes};
{bound}\
    GLOBAL {element}* to = {identifier(kernel.output.name)}_ptr + {start};
#pragma unroll
    for (int c = 0; c < {floats.width // lanes // 4}; ++c) {{
      const int piece = (lane + c * {lanes}) * 4;
      float four[4];
      {f"if (piece < {width}) " if width != floats.width else ""}{{
#pragma unroll
        for (int e = 0; e < 4; ++e) {{
          const int column = piece + e;
          const float {SUM} = sums[i][c * 4 + e];
          four[e] = {final_text(kernel)};
        }}
        store_{ending}(to + piece, four, 1.0f);
      }}
    }}
  }}"""
