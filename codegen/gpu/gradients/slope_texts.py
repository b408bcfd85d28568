"""Texts by which gradients of keys write the slopes of their logits, behind dK and dV of every key.

Names are those of the kernels: a block has rows ``first_row`` on, of which a lane has row ``i`` of fragment ``m``, and
walks the queries of a head from ``first_walked`` on, of which it has two in each column ``n``.
"""

from __future__ import annotations

from typing import NamedTuple


class StepColumns(NamedTuple):
    """Columns of a step that a warp has: names of the first one's row among all that are walked, and of their count.

    Attributes:
        first, size: the names.
    """

    first: str = "first_walked"
    size: str = "STEP"


#: All columns of a step.
WHOLE_STEP = StepColumns()


def pair_of(slopes: str, pair: str, more: str) -> str:
    """Two slopes of a row in one word: of columns ``n``, or of ``n + 1``."""
    low, high = (f"{slopes}[m][n{more}][2 * i{next_one}]" for next_one in ("", " + 1"))
    return f"{pair}({low}, {high})"


def slope_stores(low: str, high: str, columns: StepColumns = WHOLE_STEP) -> str:
    """Stores of a step's slopes, behind dK and dV of their keys: four elements a lane, 16 of a row by lanes in a row.

    Args:
        low, high: what a lane has of row ``i`` in columns ``n`` and ``n + 1`` of fragment ``m``.
        columns: those of the warp.
    """
    return f"""\
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {{
        const int row = first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i;
        unsigned short* slope_row = dKVS_ptr + ((long long)problem * ROWS_ALL + row) * ROW_ALL + HEAD_DIM + VALUE_DIM;
        if (GROUP > 1) slope_row += number / head_steps * QUERIES_ALL;
#pragma unroll
        for (int n = 0; n < {columns.size} / 8; n += 2) {{
          // Of two lanes the first one gets columns n of both, the second one columns n + 1.
          const unsigned low = {low}, high = {high};
          const unsigned got = __shfl_xor_sync(0xffffffffu, lane % 2 ? low : high, 1);
          const int column = {columns.first} + (n + lane % 2) * 8 + lane % 4 / 2 * 4;
          if (row < ROWS_ALL && column < QUERIES_ALL)
            *(uint2*)(slope_row + column) = lane % 2 ? make_uint2(got, high) : make_uint2(low, got);
        }}
      }}"""


def cleared_slopes(thread: str, threads: str) -> str:
    """Zeros for the slopes of queries that no step of a block has, by ``threads`` threads of the first share.

    Args:
        thread: number of a thread among them.
    """
    return f"""  if ((CAUSAL || WINDOW) && share == 0) {{
    const int walk_begin = min(first_step * STEP, QUERIES_ALL);
    const int walk_end = min(walk_begin + head_steps * STEP, QUERIES_ALL);
    const int before = walk_begin / 8, pieces = before + (QUERIES_ALL - walk_end) / 8;
    for (int at = {thread}; at < min(ROWS, ROWS_ALL - first_row) * GROUP * pieces; at += {threads}) {{
      const int piece = at % pieces, row = at / pieces / GROUP, head = at / pieces % GROUP;
      const int column = piece < before ? piece * 8 : walk_end + (piece - before) * 8;
      unsigned short* slope_row = dKVS_ptr + ((long long)problem * ROWS_ALL + first_row + row) * ROW_ALL;
      *(uint4*)(slope_row + HEAD_DIM + VALUE_DIM + head * QUERIES_ALL + column) = make_uint4(0, 0, 0, 0);
    }}
  }}"""
