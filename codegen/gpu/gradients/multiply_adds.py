"""Gradients of attention by multiply-adds, in CUDA and in OpenCL C: float32, and 16 bits that nothing else multiplies.

Threads form a grid over a tile of logits, ``lanes`` of them side by side along what is walked; each has the same
columns of the results. Tiles lie in shared memory in float32, and so do probabilities and gradients of logits between
the products, so that the kernel needs nothing of a warp and has the same statements in both languages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from codegen.gpu.walks.attention_multiply_adds import FloatTile
from codegen.gpu.walks.bounds import inside, numbered
from codegen.gpu.walks.float_products import FloatProducts
from codegen.gpu.walks.language import ELEMENTS, Language
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention_gradient import AttentionGradientKernel
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention_gradient import GradientFloats, GradientSchedule, gradient_shared_bytes, weight_pitch


def takes(request: LoweringRequest[AttentionGradientKernel, GradientSchedule]) -> bool:
    """Gradients of attention without matrix instructions."""
    return request.schedule.instruction is Instruction.FMA


def lower(request: LoweringRequest[AttentionGradientKernel, GradientSchedule]) -> Lowered:
    """The kernel of a gradient."""
    kernel, schedule = request.problem, request.schedule
    language, shared = Language.of(request.target), gradient_shared_bytes(kernel, schedule)
    text = _Text(kernel, schedule).kernel(request.entry, language)
    return Lowered.of_text(
        text,
        request.entry,
        blocks=schedule.blocks(kernel),
        threads=schedule.threads,
        shared_bytes=shared,
        dynamic_shared_bytes=0 if language.is_opencl else shared,
    )


@dataclass(frozen=True)
class _Result:
    """A result of a block: sums of what stands at ``factors`` in shared memory times rows of the walked tile at
    ``tile``.

    Attributes:
        sums: name of the sums.
        factors: where the factors begin.
        tile, pitch: where the walked tile begins, and its floats from row to row.
        columns: sums of a row that a thread has.
        size, column: elements of a row of the result, and where they begin in the output's.
        scale: what sums are multiplied by at the end.
    """

    sums: str
    factors: int
    tile: int
    pitch: int
    columns: int
    size: int
    column: int
    scale: float


@dataclass(frozen=True)
class _Text:
    """The text of a kernel."""

    gradient: AttentionGradientKernel
    schedule: GradientSchedule

    @property
    def _floats(self) -> GradientFloats:
        return GradientFloats.of(self.gradient, self.schedule)

    @property
    def _row_stride(self) -> int:
        """From one row of a thread to the next."""
        return self.schedule.threads // self.schedule.lanes

    @property
    def _results(self) -> list[_Result]:
        floats, attention, lanes = self._floats, self.gradient.attention, self.schedule.lanes
        depth, width = attention.head_dim, attention.value_size
        first = _Result(
            "key_sums", floats.slopes, floats.step, floats.key_pitch, floats.depth // lanes, depth, 0,
            self.gradient.scale,
        )  # fmt: skip
        if not self.gradient.is_of_keys:
            return [first]
        second = _Result(
            "value_sums",
            floats.weights,
            floats.step_values,
            floats.value_pitch,
            floats.width // lanes,
            width,
            depth,
            1.0,
        )
        return [first, second]

    def kernel(self, entry: str, language: Language) -> str:
        """All of it."""
        gradient, schedule = self.gradient, self.schedule
        element, _ = ELEMENTS[gradient.attention.dtype]
        kinds = {"L": "float", "D": "float"}
        *inputs, output = gradient.parameters
        tensors = [(f"const {kinds.get(name, element)}", name) for name in inputs]
        body = [
            f"  {language.shared.format(pieces=-(-self._floats.total // 4))}",
            "\n".join(
                f"  {line}" for line in (self._place_of_keys if gradient.is_of_keys else self._place_of_queries)()
            ),
            self._walk(),
            self._stores(),
        ]
        return language.kernel(entry, schedule.threads, [*tensors, (element, output)], "\n".join(body))

    def _place_of_queries(self) -> Iterator[str]:
        """Which queries a block has, and which keys they see; the longest walks first."""
        gradient, schedule, attention = self.gradient, self.schedule, self.gradient.attention
        blocks = schedule.row_blocks(gradient)
        last = f"(first_row + {schedule.rows - 1}) / {gradient.group}"
        yield self._thread
        yield f"const int block = BLOCK, problem = block / {blocks};"
        yield f"const int first_row = ({blocks - 1} - block % {blocks}) * {schedule.rows};"
        yield f"const int first_query = first_row / {gradient.group};"
        yield f"const int last_query = {last} < {attention.queries - 1} ? {last} : {attention.queries - 1};"
        yield self._steps("first_query", "last_query")

    def _place_of_keys(self) -> Iterator[str]:
        """Which keys a block has, and which queries see them; the first keys are seen by most, and start first."""
        gradient, schedule = self.gradient, self.schedule
        blocks = schedule.row_blocks(gradient)
        yield self._thread
        yield f"const int block = BLOCK, problem = block / {blocks}, first_row = block % {blocks} * {schedule.rows};"
        last = f"first_row + {schedule.rows - 1}"
        yield f"const int last_row = {last} < {gradient.rows - 1} ? {last} : {gradient.rows - 1};"
        yield self._steps("first_row", "last_row")

    def _steps(self, first: str, last: str) -> str:
        """The first step of a block and how many it walks, by its first and last own row."""
        walked, step = self.gradient.block_range, self.schedule.step
        first_bound, last_bound = walked.bounds
        begin = numbered(first_bound, first, walked.sizes, f" / {step}")
        end = inside(numbered(last_bound, last, walked.sizes))
        return f"const int first_step = {begin}, steps = ({end} + {step - 1}) / {step} - first_step;"

    @property
    def _thread(self) -> str:
        lanes = self.schedule.lanes
        return f"const int thread = THREAD, lane = thread % {lanes}, first = thread / {lanes};"

    def _place_of(self, row: str) -> str:
        """Place of a row of queries: heads of a group side by side, and each head by itself."""
        group = self.gradient.group
        return row if group == 1 else f"({row} % {group} * {self.gradient.attention.queries} + {row} / {group})"

    def _tiles(self, is_walked: bool) -> str:
        """The copies of two tiles: a block's own, or those of a step."""
        gradient, schedule, floats, attention = self.gradient, self.schedule, self._floats, self.gradient.attention
        of_queries = gradient.is_of_keys == is_walked
        names = ("Q", "dY") if of_queries else ("K", "V")
        rows, rows_all = (
            (schedule.step, gradient.walked_rows) if is_walked else (schedule.rows, gradient.rows)
        )  # fmt: skip
        starts = (floats.step, floats.step_values) if is_walked else (0, floats.own_values)
        tiles = [
            FloatTile(
                tensor=name, width=width, full=full, pitch=pitch, start=start, rows=rows,
                bound=f"row < {rows_all}" if rows_all % rows else "",
                place=self._place_of("row") if of_queries else "row",
            )
            for name, width, full, pitch, start in zip(
                names, (attention.head_dim, attention.value_size), (floats.depth, floats.width),
                (floats.key_pitch, floats.value_pitch), starts, strict=True,
            )
        ]  # fmt: skip
        first, ending = "first_walked" if is_walked else "first_row", ELEMENTS[attention.dtype][1]
        return "\n".join(tile.copy(first, rows_all, schedule.threads, ending) for tile in tiles)

    def _numbers(self) -> tuple[str, str]:
        """The numbers of queries: those of a block's own before its steps, those of a step in shared memory."""
        gradient, schedule, at = self.gradient, self.schedule, self._floats.numbers
        place = f"(long)problem * {gradient.query_rows} + {self._place_of('row')}"
        twos = f"{1 / math.log(2)!r}f"
        if gradient.is_of_keys:
            return (
                "",
                f"""
    if (thread < {schedule.step}) {{
      const int row = first_walked + thread;
      shared[{at} + thread] = row < {gradient.walked_rows} ? L_ptr[{place}] * {twos} : 0.0f;
      shared[{at + schedule.step} + thread] = row < {gradient.walked_rows} ? D_ptr[{place}] : 0.0f;
    }}""",
            )
        each = schedule.thread_rows
        return (
            f"""
  float exponents[{each}], dots[{each}];
#pragma unroll
  for (int i = 0; i < {each}; ++i) {{
    const int row = first_row + first + i * {self._row_stride};
    exponents[i] = row < {gradient.rows} ? L_ptr[{place}] * {twos} : 0.0f;
    dots[i] = row < {gradient.rows} ? D_ptr[{place}] : 0.0f;
  }}""",
            "",
        )

    def _walk(self) -> str:
        """The steps of a block."""
        schedule, floats, of_keys = self.schedule, self._floats, self.gradient.is_of_keys
        before, arriving = self._numbers()
        products, pitch = FloatProducts(schedule, schedule.step), weight_pitch(schedule)
        sums = "\n".join(
            products.of_columns(each.sums, each.factors, pitch, each.tile, each.pitch, each.columns)
            for each in self._results
        )
        each, logits = schedule.thread_rows, schedule.step // schedule.lanes
        declared = "\n".join(
            f"  float {result.sums}[{each}][{result.columns}];\n#pragma unroll\n  for (int i = 0; i < {each}; ++i)\n"
            f"#pragma unroll\n    for (int c = 0; c < {result.columns}; ++c) {result.sums}[i][c] = 0.0f;"
            for result in self._results
        )
        column = f"lane + j * {schedule.lanes}"
        exponent = f"shared[{floats.numbers} + {column}]" if of_keys else "exponents[i]"
        dot = f"shared[{floats.numbers + schedule.step} + {column}]" if of_keys else "dots[i]"
        at = f"(first + i * {self._row_stride}) * {weight_pitch(schedule)} + {column}"
        weight_store = f"\n        shared[{floats.weights} + {at}] = weight;" if of_keys else ""
        scale = f"{self.gradient.scale / math.log(2)!r}f"
        attention = self.gradient.attention
        return f"""\
  float4 zeros;
  zeros.x = zeros.y = zeros.z = zeros.w = 0.0f;
{declared}{before}
  if (steps > 0) {{
{self._tiles(is_walked=False)}
  }}
  for (int number = 0; number < steps; ++number) {{
    const int first_walked = (first_step + number) * {schedule.step};
{self._tiles(is_walked=True)}{arriving}
    BARRIER;
    float logits[{each}][{logits}], wanted[{each}][{logits}];
{products.of_rows("logits", 0, floats.step, floats.key_pitch, attention.head_dim)}
{products.of_rows("wanted", floats.own_values, floats.step_values, floats.value_pitch, attention.value_size)}
#pragma unroll
    for (int i = 0; i < {each}; ++i) {{
#pragma unroll
      for (int j = 0; j < {logits}; ++j) {{
        float weight = power_of_two(FMA(logits[i][j], {scale}, -{exponent}));
{self._mask()}\
        shared[{floats.slopes} + {at}] = weight * (wanted[i][j] - {dot});{weight_store}
      }}
    }}
    BARRIER;
{sums}
    if (number + 1 < steps) {{
      BARRIER;
    }}
  }}"""

    def _mask(self) -> str:
        """Pairs that are not seen have no probability."""
        gradient, schedule, attention = self.gradient, self.schedule, self.gradient.attention
        own_row = f"(first_row + first + i * {self._row_stride})"
        walked = f"(first_walked + lane + j * {schedule.lanes})"
        key, row = (own_row, walked) if gradient.is_of_keys else (walked, own_row)
        query = f"{row} / {gradient.group}"
        unseen = []
        if gradient.walked_rows % schedule.step:
            unseen.append(f"{walked} >= {gradient.walked_rows}")
        if attention.causal:
            unseen.append(f"{key} > {query} + {gradient.ahead}")
        if attention.window_size:
            unseen.append(f"{key} <= {query} + {gradient.ahead - attention.window_size}")
        return f"        if ({' || '.join(unseen)}) weight = 0.0f;\n" if unseen else ""

    def _stores(self) -> str:
        """Stores of the results, four elements at a time."""
        gradient, schedule, results = self.gradient, self.schedule, self._results
        element, ending = ELEMENTS[gradient.attention.dtype]
        total = sum(result.size for result in results)
        place = "row" if gradient.is_of_keys else self._place_of("row")
        bound = f"    if (row >= {gradient.rows}) break;\n" if gradient.rows % schedule.rows else ""
        stores = []
        for result in results:
            column = f"(lane + c * {schedule.lanes}) * 4"
            inside = f"if ({column} < {result.size}) " if result.columns * schedule.lanes != result.size else ""
            more = f"{result.column} + " if result.column else ""
            stores.append(f"""\
#pragma unroll
    for (int c = 0; c < {result.columns // 4}; ++c)
      {inside}store_{ending}(result + {more}{column}, {result.sums}[i] + c * 4, {result.scale!r}f);""")
        body = "\n".join(stores)
        return f"""\
#pragma unroll
  for (int i = 0; i < {schedule.thread_rows}; ++i) {{
    const int row = first_row + first + i * {self._row_stride};
{bound}\
    GLOBAL {element}* result =
        {gradient.parameters[-1]}_ptr + ((long)problem * {gradient.rows} + {place}) * {total};
{body}
  }}"""
