"""Attention by multiply-adds, in CUDA and in OpenCL C: float32, and 16 bits where no instruction multiplies them.

Threads form a grid over a tile of logits, ``lanes`` of them side by side along the keys; each has the same columns of
the values. Tiles lie in shared memory in float32. The largest logit and the exponentials of a row pass between its
threads there too, so that the kernel needs nothing of a warp and has the same statements in both languages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.gpu.walks.bounds import named, numbered
from codegen.gpu.walks.float_products import FloatProducts
from codegen.gpu.walks.language import ELEMENTS, Language
from codegen.gpu.walks.pages import numbered_row, own_keys
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention import SLICE_NUMBERS, AttentionKernel
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import AttentionSchedule, SharedFloats, shared_bytes


def takes(request: LoweringRequest[AttentionKernel, AttentionSchedule]) -> bool:
    """Attention without matrix instructions."""
    return request.schedule.instruction is Instruction.FMA


def lower(request: LoweringRequest[AttentionKernel, AttentionSchedule]) -> Lowered:
    """The kernel of attention, or of slices of it."""
    kernel, schedule = request.problem, request.schedule
    shared, language = shared_bytes(kernel, schedule), Language.of(request.target)
    text = _text(kernel, schedule, request.entry, language)
    return Lowered.of_text(
        text,
        request.entry,
        blocks=schedule.blocks(kernel),
        threads=schedule.threads,
        shared_bytes=shared,
        dynamic_shared_bytes=0 if language.is_opencl else shared,
    )


def _text(kernel: AttentionKernel, schedule: AttentionSchedule, entry: str, language: Language) -> str:
    element, _ = ELEMENTS[kernel.attention.dtype]
    result = "float" if kernel.slices > 1 else element
    types = [*[element] * 3, *["int"] * (len(kernel.inputs) - 3)]
    inputs = zip(types, kernel.inputs, strict=True)
    tensors = [*((f"const {kind}", tensor.name) for kind, tensor in inputs), (result, kernel.output.name)]
    body = [
        f"  {language.shared.format(pieces=SharedFloats.of(kernel, schedule).total // 4)}",
        _place(kernel, schedule),
        _walk(kernel, schedule),
        (_results if kernel.slices == 1 else _partial_results)(kernel, schedule),
    ]
    return language.kernel(entry, schedule.threads, tensors, "\n".join(body))


def _place(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """Which rows a block has, which keys they see, and which of those the block walks; the longest walks first."""
    attention, row_blocks, walked = kernel.attention, schedule.row_blocks(kernel), kernel.block_range
    last = f"(first_row + {schedule.rows - 1}) / {kernel.group}"
    lines = [
        f"const int thread = THREAD, lane = thread % {schedule.lanes}, first = thread / {schedule.lanes};",
        f"const int block = BLOCK, row_block = {row_blocks - 1} - block % {row_blocks};",
        f"const int slice = block / {row_blocks} % {kernel.slices}, problem = block / {row_blocks * kernel.slices};",
        f"const int first_row = row_block * {schedule.rows}, first_query = first_row / {kernel.group};",
        f"const int last_query = {last} < {attention.queries - 1} ? {last} : {attention.queries - 1};",
    ]
    first_bound, last_bound = walked.bounds
    begin = numbered(first_bound, "first_query", walked.sizes, f" / {schedule.keys}")
    end = numbered(last_bound, "last_query", walked.sizes)
    if kernel.lengths is not None:
        sizes = {"CAUSAL": int(attention.causal), "WINDOW": attention.window_size}
        lines.append(f"const int {', '.join(f'{name} = {size}' for name, size in sizes.items())};")
        lines += [line.strip() for line in own_keys(kernel).splitlines()]
        begin = named(first_bound, "first_query", f" / {schedule.keys}")
        end = named(last_bound, "last_query")
    lines += [
        f"const int seen_end = {end}, seen_begin = {begin};",
        f"const int steps_all = (seen_end + {schedule.keys - 1}) / {schedule.keys} - seen_begin;",
        f"const int share = (steps_all + {kernel.slices - 1}) / {kernel.slices}, rest = steps_all - slice * share;",
        "const int first_step = seen_begin + slice * share, steps = rest < share ? rest : share;",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _place_of(kernel: AttentionKernel, row: str) -> str:
    """Where a row of a problem lies: its rows are queries, heads of a group side by side, and each head
    lies by itself."""
    if kernel.group == 1:
        return row
    return f"({row} % {kernel.group} * {kernel.attention.queries} + {row} / {kernel.group})"


@dataclass(frozen=True, kw_only=True)
class FloatTile:
    """A tile on its way to shared memory.

    Attributes:
        tensor: where it comes from.
        width, full: elements of a row in memory, and in shared memory.
        pitch: floats from row to row in shared memory.
        start: its first float.
        rows: rows of the tile.
        bound: condition under which ``row`` is one that there is; empty where all are.
        place: where ``row`` lies in memory.
        apart: elements from row to row in memory; ``width`` of them where 0.
        pointer: to its first problem; empty where that is the tensor's own.
        is_paged: whether ``place`` counts from the start of the tensor, not of its problem.
    """

    tensor: str
    width: int
    full: int
    pitch: int
    start: int
    rows: int
    bound: str
    place: str
    apart: int = 0
    pointer: str = ""
    is_paged: bool = False

    def copy(self, first_row: str, problem_rows: int, threads: int, ending: str) -> str:
        """The loop that copies it, four elements a thread at a time, zeros where there are none."""
        pieces = self.full // 4
        count = self.rows * pieces
        inside = list(filter(None, [self.bound, f"piece < {self.width // 4}" if self.width != self.full else ""]))
        row = f"(long){self.place}" if self.is_paged else f"(long)problem * {problem_rows} + {self.place}"
        place = f"({row}) * {self.apart or self.width}"
        at = f"{self.pointer or f'{self.tensor}_ptr'} + {place} + piece * 4"
        value = f"four_{ending}({at})"
        if inside:
            value = f"{' && '.join(inside)} ? {value} : zeros"
        return f"""\
#pragma unroll
    for (int i = 0; i < {-(-count // threads)}; ++i) {{
      const int at = i * {threads} + thread;
      const int tile_row = at / {pieces}, piece = at % {pieces}, row = {first_row} + tile_row;
      {f"if (at < {count}) " if count % threads else ""}\
*(LOCAL float4*)(shared + {self.start} + tile_row * {self.pitch} + piece * 4) = {value};
    }}"""


def _walk(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """The walk along the keys: two products a step and the exponentials between them."""
    attention, floats = kernel.attention, SharedFloats.of(kernel, schedule)
    _, ending = ELEMENTS[attention.dtype]
    products, columns = FloatProducts(schedule, schedule.keys), floats.width // schedule.lanes
    rows_each, keys_each, gap, keys_all = products.rows, products.logits, products.stride, attention.key_count
    query_tile, key_tile, value_tile = _tiles(kernel, schedule, floats)
    return f"""\
  const float nothing = -1.0f / 0.0f;
  float4 zeros;
  zeros.x = zeros.y = zeros.z = zeros.w = 0.0f;
  float peaks[{rows_each}], totals[{rows_each}], sums[{rows_each}][{columns}];
#pragma unroll
  for (int i = 0; i < {rows_each}; ++i) {{
    peaks[i] = nothing;
    totals[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < {columns}; ++c) sums[i][c] = 0.0f;
  }}
  if (steps > 0) {{
{query_tile.copy("first_row", kernel.rows, schedule.threads, ending)}
  }}
  for (int number = 0; number < steps; ++number) {{
    const int first_key = (first_step + number) * {schedule.keys};
{key_tile.copy("first_key", keys_all, schedule.threads, ending)}
    BARRIER;
    float logits[{rows_each}][{keys_each}];
{products.of_rows("logits", 0, floats.step, floats.key_pitch, floats.depth)}
#pragma unroll
    for (int i = 0; i < {rows_each}; ++i)
#pragma unroll
      for (int j = 0; j < {keys_each}; ++j) logits[i][j] *= {_scale(kernel)};
{_mask(kernel, schedule)}\
{_weights(schedule, floats, products, columns)}
{value_tile.copy("first_key", keys_all, schedule.threads, ending)}
    BARRIER;
{products.of_columns("sums", floats.weights, floats.weight_pitch, floats.step, floats.width, columns)}
    if (number + 1 < steps) {{
      BARRIER;
    }}
  }}
#pragma unroll
  for (int i = 0; i < {rows_each}; ++i)
    shared[{floats.exchange} + (first + i * {gap}) * {schedule.lanes} + lane] = totals[i];
  BARRIER;"""


def _tiles(
    kernel: AttentionKernel, schedule: AttentionSchedule, floats: SharedFloats
) -> tuple[FloatTile, FloatTile, FloatTile]:
    """The tiles of queries, keys and values in shared memory; the latter two take turns in one place."""
    attention = kernel.attention
    query_tile = FloatTile(
        tensor=kernel.inputs[0].name, width=attention.head_dim, full=floats.depth, pitch=floats.key_pitch, start=0,
        rows=schedule.rows, bound=f"row < {kernel.rows}" if kernel.rows % schedule.rows else "",
        place=_place_of(kernel, "row"),
    )  # fmt: skip
    bound = f"row < {_keys_end(kernel)}" if _may_end_within(kernel, schedule) else ""
    pages = attention.pages
    place = "row" if pages is None else numbered_row(pages, kernel.inputs[3].name, attention.key_heads)
    key_tile, value_tile = (
        FloatTile(
            tensor=tensor.name, width=width, full=full, pitch=pitch, start=floats.step, rows=schedule.keys, bound=bound,
            place=place, is_paged=pages is not None,
        )
        for tensor, width, full, pitch in (
            (kernel.inputs[1], attention.head_dim, floats.depth, floats.key_pitch),
            (kernel.inputs[2], attention.value_size, floats.width, floats.width),
        )
    )  # fmt: skip
    return query_tile, key_tile, value_tile


def _weights(schedule: AttentionSchedule, floats: SharedFloats, products: FloatProducts, columns: int) -> str:
    """Logits of a step to weights: the largest of a row, what its sums shrink by, the exponentials."""
    rows_each, keys_each, gap = products.rows, products.logits, products.stride
    return f"""\
#pragma unroll
    for (int i = 0; i < {rows_each}; ++i) {{
      float peak = logits[i][0];
#pragma unroll
      for (int j = 1; j < {keys_each}; ++j) peak = LARGER(peak, logits[i][j]);
      shared[{floats.exchange} + (first + i * {gap}) * {schedule.lanes} + lane] = peak;
    }}
    BARRIER;
#pragma unroll
    for (int i = 0; i < {rows_each}; ++i) {{
      float peak = peaks[i];
#pragma unroll
      for (int x = 0; x < {schedule.lanes}; ++x)
        peak = LARGER(peak, shared[{floats.exchange} + (first + i * {gap}) * {schedule.lanes} + x]);
      const float base = peak == nothing ? 0.0f : peak;
      const float shrink = power_of_two(peaks[i] - base);
      peaks[i] = peak;
      totals[i] *= shrink;
#pragma unroll
      for (int c = 0; c < {columns}; ++c) sums[i][c] *= shrink;
#pragma unroll
      for (int j = 0; j < {keys_each}; ++j) {{
        const float weight = power_of_two(logits[i][j] - base);
        totals[i] += weight;
        shared[{floats.weights} + (first + i * {gap}) * {floats.weight_pitch} + lane + j * {schedule.lanes}] = weight;
      }}
    }}"""


def _scale(kernel: AttentionKernel) -> str:
    """Factor that makes logits powers of two, whose exponentials take one instruction."""
    return f"{kernel.scale / math.log(2)!r}f"


def _mask(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """Keys that a row does not see, where a step has any."""
    attention, keys_all, window = kernel.attention, _keys_end(kernel), kernel.attention.window_size

    def ahead(more: int) -> str:
        """Keys before those of the first query, and ``more``."""
        return str(kernel.ahead + more) if kernel.lengths is None else f"AHEAD + {more}"

    conditions, unseen = [], []
    if _may_end_within(kernel, schedule):
        conditions.append(f"first_key + {schedule.keys} > {keys_all}")
        unseen.append(f"key >= {keys_all}")
    if attention.causal:
        conditions.append(f"first_key + {schedule.keys} > first_query + {ahead(1)}")
        unseen.append(f"key > query + {ahead(0)}")
    if window:
        conditions.append(f"first_key <= last_query + {ahead(-window)}")
        unseen.append(f"key <= query + {ahead(-window)}")
    if not conditions:
        return ""
    return f"""\
    if ({" || ".join(conditions)}) {{
#pragma unroll
      for (int i = 0; i < {schedule.thread_rows}; ++i) {{
        const int query = (first_row + first + i * {schedule.threads // schedule.lanes}) / {kernel.group};
#pragma unroll
        for (int j = 0; j < {schedule.keys // schedule.lanes}; ++j) {{
          const int key = first_key + lane + j * {schedule.lanes};
          if ({" || ".join(unseen)}) logits[i][j] = nothing;
        }}
      }}
    }}
"""


def _keys_end(kernel: AttentionKernel) -> str:
    """Where the keys of a sequence end."""
    return str(kernel.attention.key_count) if kernel.lengths is None else "KEYS_ALL"


def _may_end_within(kernel: AttentionKernel, schedule: AttentionSchedule) -> bool:
    """True if the keys of a sequence may end within a step."""
    return kernel.lengths is not None or kernel.attention.key_count % schedule.keys != 0


def _results(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """Values over the sum of their weights, four elements at a time."""
    width = kernel.attention.value_size
    element, ending = ELEMENTS[kernel.attention.dtype]
    stored = f"store_{ending}(result + column, sums[i] + c * 4, inverse);"
    start = f"{kernel.output.name}_ptr + ((long)problem * {kernel.rows} + {_place_of(kernel, 'row')}) * {width}"
    text = f"GLOBAL {element}* result = {start};"
    return _rows_written(kernel, schedule, text, stored)


def _partial_results(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """Results of a slice for every row: weighted values, the largest logit, the sum of weights."""
    pitch = kernel.attention.value_size + SLICE_NUMBERS
    place = (
        f"(long)slice * {kernel.problems * kernel.rows} + (long)problem * {kernel.rows} + {_place_of(kernel, 'row')}"
    )
    text = f"""\
GLOBAL float* result = {kernel.output.name}_ptr + ({place}) * {pitch};
    if (lane == 0) {{
      result[{pitch - 2}] = peaks[i];
      result[{pitch - 1}] = total;
    }}"""
    stored = "for (int e = 0; e < 4; ++e) result[column + e] = sums[i][c * 4 + e];"
    return _rows_written(kernel, schedule, text, stored)


def _rows_written(kernel: AttentionKernel, schedule: AttentionSchedule, opening: str, stored: str) -> str:
    """The loop over the rows of a thread: the sum of the weights of all lanes, then every column."""
    floats, gap = SharedFloats.of(kernel, schedule), schedule.threads // schedule.lanes
    width = kernel.attention.value_size
    inverse = "    const float inverse = 1.0f / total;\n" if kernel.slices == 1 else ""
    bound = f"    if (row >= {kernel.rows}) break;\n" if kernel.rows % schedule.rows else ""
    return f"""\
#pragma unroll
  for (int i = 0; i < {schedule.thread_rows}; ++i) {{
    const int row = first_row + first + i * {gap};
{bound}\
    float total = 0.0f;
#pragma unroll
    for (int x = 0; x < {schedule.lanes}; ++x)
      total += shared[{floats.exchange} + (first + i * {gap}) * {schedule.lanes} + x];
{inverse}    {opening}
#pragma unroll
    for (int c = 0; c < {floats.width // schedule.lanes // 4}; ++c) {{
      const int column = (lane + c * {schedule.lanes}) * 4;
      {f"if (column < {width}) " if width != floats.width else ""}{stored}
    }}
  }}"""
