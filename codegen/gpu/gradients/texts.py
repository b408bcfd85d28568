"""Texts that gradients of attention by single warps and by warp groups share: places, sizes, masks, results."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.gpu.gradients.slope_texts import WHOLE_STEP, StepColumns
from codegen.gpu.walks.attention_warps import BLOCK_ORDER, band_sizes, named_sizes
from codegen.gpu.walks.bounds import named
from sokoban.kernel.attention_gradient import AttentionGradientKernel
from sokoban.kernel.block_range import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from sokoban.schedule.attention import FRAGMENT_ROWS, LANES, padded
from sokoban.schedule.attention_gradient import GradientSchedule, factor_pitch, factor_place

#: Which queries a block has, and which keys they see. The longest walks start first.
PLACE_OF_QUERIES = f"""\
{BLOCK_ORDER}
  const int row_block = ROW_BLOCKS - 1 - turn, problem = whole;
  const int first_row = row_block * ROWS, first_query = first_row / GROUP;
  const int last_query = min((first_row + ROWS - 1) / GROUP, QUERIES_ALL - 1);
  const int end = {named(KEYS_OF_QUERIES[1], "last_query")};
  const int first_step = {named(KEYS_OF_QUERIES[0], "first_query", " / STEP")};
  const int steps = (end + STEP - 1) / STEP - first_step;"""


_BEGIN, _END = (replace(bound, scale="") for bound in QUERIES_OF_KEYS)

#: Which keys a block has, and which queries of every head of a group see them. The first keys are seen by most, and
#: start first.
PLACE_OF_KEYS = f"""\
{BLOCK_ORDER}
  const int share = whole % SHARES, problem = whole / SHARES;
  const int first_row = turn * ROWS, last_row = min(first_row + ROWS, ROWS_ALL) - 1;
  const int begin = {named(_BEGIN, "first_row")};
  const int end = {named(replace(_END, otherwise="QUERIES_ALL"), "last_row")};
  const int first_step = begin / STEP, head_steps = max((end + STEP - 1) / STEP - first_step, 0);
  const int steps = GROUP * head_steps;"""

#: The first query of a step, and its head where several share keys.
FIRST_QUERY = "const int first_walked = (first_step + (GROUP == 1 ? number : number % head_steps)) * STEP;"
HEAD = "const int head = GROUP == 1 ? 0 : number / head_steps;"

#: The two numbers of every query of a block, in registers of the threads that have its row.
OWN_NUMBERS = """\
  float exponents[FRAGMENTS][2], dots[FRAGMENTS][2];
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i;
      const long long place = (long long)problem * QUERY_ROWS + place_of(row);
      exponents[m][i] = row < ROWS_ALL ? L_ptr[place] * TWOS : 0.0f;
      dots[m][i] = row < ROWS_ALL ? D_ptr[place] : 0.0f;
    }"""


@dataclass(frozen=True)
class Result:
    """A result of a block: sums of factors times columns of a tile that the block walks.

    Attributes:
        sums, factors: names of the fragments.
        width: name of the elements of its rows, padded.
        columns, pitch: where a lane finds columns of the tile, and name of the bytes from row to row of it.
        size, column: elements of a row, and where they begin in the output's.
        scale: what sums are multiplied by at the end; empty for nothing.
    """

    sums: str
    factors: str
    width: str
    columns: str
    pitch: str
    size: int
    column: int
    scale: str


def results_of(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> list[Result]:
    """Results of the blocks, that of the gradients of logits first; with two shares of warp groups either, in the same
    registers."""
    depth, width = kernel.attention.head_dim, kernel.attention.value_size
    first = Result("key_sums", "wanted", "DEPTH", "keys_now + key_columns", "KEY_PITCH", depth, 0, " * FACTOR")
    second = Result("value_sums", "logits", "WIDTH", "values_now + value_columns", "VALUE_PITCH", width, depth, "")
    results = [first, second] if kernel.is_of_keys else [first]
    if schedule.columns == 1:
        return results
    return [
        replace(each, width=f"({each.width} / PARTS)", columns=f"{each.columns} + part * ({each.width} / PARTS * 2)")
        for each in results
    ]


def sums_of(results: list[Result], schedule: GradientSchedule) -> dict[str, str]:
    """Names of the fragments of results, and of the elements of their rows."""
    if schedule.shares > 1:
        return {"sums": "(DEPTH > WIDTH ? DEPTH : WIDTH)"}
    return {each.sums: each.width for each in results}


def _sizes_of_parts(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> dict[str, int]:
    """Sizes by which warps divide columns of the same rows, and pass factors to each other."""
    if schedule.columns == 1:
        return {}
    return {
        "WARPS": schedule.warps, "PARTS": schedule.columns, "COLUMNS": schedule.step // schedule.columns,
        "FACTORS": factor_place(kernel, schedule), "FACTOR_PITCH": factor_pitch(schedule),
    }  # fmt: skip


def constants(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> str:
    """Sizes of the problem and of its tiles as names of the text."""
    attention, warp_rows = kernel.attention, schedule.warp_rows
    sizes = {
        "ROWS": schedule.rows, "STEP": schedule.step, "STAGES": schedule.stages,
        "THREADS": schedule.warps * LANES, **_sizes_of_parts(kernel, schedule),
        "FRAGMENTS": warp_rows // FRAGMENT_ROWS, "ROWS_ALL": kernel.rows, "WALKED_ALL": kernel.walked_rows,
        "KEYS_ALL": attention.key_count, "QUERY_ROWS": kernel.query_rows, "QUERIES_ALL": attention.queries,
        "GROUP": kernel.group, "HEAD_DIM": attention.head_dim, "VALUE_DIM": attention.value_size,
        "DEPTH": padded(attention.head_dim), "WIDTH": padded(attention.value_size),
        "KEY_PITCH": schedule.pitch_bytes(attention.head_dim, attention.dtype),
        "VALUE_PITCH": schedule.pitch_bytes(attention.value_size, attention.dtype),
        "SHARES": schedule.shares, "AHEAD": kernel.ahead,
        **band_sizes(kernel, schedule.row_blocks(kernel), schedule.shares),
        "CAUSAL": int(attention.causal), "WINDOW": attention.window_size, "ROW_ALL": attention.row_size,
    }  # fmt: skip
    # Logits are taken as powers of two, whose exponentials take one instruction.
    twos = 1 / math.log(2)
    factors = f"FACTOR = {kernel.scale!r}f, SCALE = {kernel.scale * twos!r}f, TWOS = {twos!r}f"
    return f"{named_sizes(sizes)}\n  constexpr float {factors};"


def each_logit(statement: str, columns: StepColumns = WHOLE_STEP) -> str:
    """A statement for every logit of a thread: of fragment ``m``, row ``i``, columns ``n`` and ``j``."""
    return f"""\
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < {columns.size} / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {statement}"""


def mask_of_keys(columns: StepColumns = WHOLE_STEP) -> str:
    """No probability for pairs that are not seen, where a step has any; a column of fragments is its lane's place among
    four."""
    first, size = columns
    return f"""\
    if ({first} + {size} > QUERIES_ALL || (CAUSAL && {first} + AHEAD < last_row) ||
        (WINDOW && first_row <= {first} + {size} - 1 + AHEAD - WINDOW)) {{
#pragma unroll
      for (int n = 0; n < {size} / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {{
          const int query = {first} + n * 8 + lane % 4 * 2 + j;
          const int keys_end = query >= QUERIES_ALL ? 0 : CAUSAL ? query + AHEAD + 1 : KEYS_ALL;
          const int keys_begin = WINDOW ? query + AHEAD + 1 - WINDOW : 0;
#pragma unroll
          for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {{
              const int key = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i;
              if (key >= keys_end || key < keys_begin) logits[m][n][2 * i + j] = 0.0f;
            }}
        }}
    }}"""


def stores(kernel: AttentionGradientKernel, schedule: GradientSchedule, pair: str) -> str:
    """Stores of the results: a pair of elements a lane."""
    results = results_of(kernel, schedule)
    total = kernel.attention.row_size if kernel.is_of_keys else kernel.attention.head_dim
    place = "row" if kernel.is_of_keys else "place_of(row)"
    stores: list[str] = []
    for result in results:
        sums = "sums" if schedule.shares > 1 else result.sums
        low, high = (f"{sums}[m][n][2 * i{more}]{result.scale}" for more in ("", " + 1"))
        at = f"result + {result.column} + n * 8 + lane % 4 * 2" if result.column else "result + n * 8 + lane % 4 * 2"
        count, guard = str(result.size), ""
        if schedule.columns > 1:
            count, at = result.width, f"{at} + part * {result.width}"
            guard = f"if (part * {result.width} + n * 8 < {result.size}) "
        opening = f"        if (share == {len(stores)}) {{\n" if schedule.shares > 1 else ""
        closing = "\n        }" if schedule.shares > 1 else ""
        stores.append(f"""\
{opening}#pragma unroll
        for (int n = 0; n < {count} / 8; ++n)
          {guard}*(unsigned*)({at}) = {pair}({low}, {high});{closing}""")
    body = "\n".join(stores)
    return f"""\
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {{
      const int row = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i;
      if (row < ROWS_ALL) {{
        unsigned short* result =
            {kernel.parameters[-1]}_ptr + ((long long)problem * ROWS_ALL + {place}) * {total};
{body}
      }}
    }}"""
