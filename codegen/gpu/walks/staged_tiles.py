"""Tiles on their way to shared memory past the registers, for attention by matrix instructions."""

from __future__ import annotations

from dataclasses import dataclass

from sokoban.kernel.pages import pieces_at_once
from sokoban.schedule.attention import PANEL_PIECES, PIECE_BYTES, padded
from sokoban.schedule.warp_groups import PANEL_BYTES


@dataclass(frozen=True, kw_only=True)
class StagedTile:
    """A tile that is copied to shared memory, 16 bytes a lane, zeros where there is nothing.

    Attributes:
        tensor: name of the pointer to its problem, and of what copies it.
        width: elements of a row in memory.
        full: name of its width in shared memory.
        rows: rows of the tile.
        pitch: name of the bytes from row to row in shared memory.
        start: where it begins in shared memory, in bytes.
        first: its first row in memory.
        bound: name of the rows that there are.
        is_bounded: whether the last tile reaches beyond them.
        is_walked: whether it is copied step by step, into buffers: ``copy_keys(step, buffer)``, not ``copy_queries()``.
        is_grouped: whether its rows are queries of all heads of a group, which lie where ``place_of`` says.
        is_swizzled: whether it lies in panels of 128 bytes, whose pieces are permuted in every eight rows.
        apart: elements from row to row in memory; ``width`` of them where 0.
        column: its first column in memory; empty where its rows begin with those in memory.
        last_column: name of the columns that there are; empty where no tile reaches beyond them.
    """

    tensor: str
    width: int
    full: str
    rows: int
    pitch: str
    start: str
    first: str
    bound: str
    is_bounded: bool
    is_walked: bool
    is_grouped: bool
    is_swizzled: bool = False
    apart: int = 0
    column: str = ""
    last_column: str = ""

    def copy(self, threads: int) -> str:
        """A lambda that copies the tile."""
        arguments = "int step, int buffer" if self.is_walked else ""
        paced = self.is_walked and not self.is_grouped and self._pieces_paced(threads)
        body = self._guarded(paced) if self._inside_condition or not paced else ""
        if paced:
            body = f"{self._unguarded(threads)}{body}"
        return f"  auto copy_{self.tensor} = [&]({arguments}) {{\n{body}  }};"

    @property
    def _inside_condition(self) -> str:
        """The condition that no part of a tile is beyond what there is; empty where it always holds."""
        rows = [f"{self.first} + {self.rows} <= {self.bound}"] if self.is_bounded else []
        columns = [f"{self.column} + {self.width} <= {self.last_column}"] if self.last_column else []
        return " && ".join([*rows, *columns])

    @property
    def _from(self) -> str:
        """Where a row begins in memory, in elements from the tensor's start."""
        return f"{self.apart or self.width}{f' + {self.column}' if self.column else ''}"

    def _pieces_paced(self, threads: int) -> bool:
        """True if a thread copies the same pieces of every so many rows, so that its addresses are constants apart."""
        row_step = threads // self._pieces_of_a_row(threads)
        return self.width == padded(self.width) and self.rows % row_step == 0

    def _pieces_of_a_row(self, threads: int) -> int:
        """Pieces of a row that as many threads copy at once."""
        return pieces_at_once(self.width, threads)

    def _copied(self, row: int, more_rows: int, piece: int) -> str:
        """The copy of ``row`` rows and ``piece`` pieces behind a thread's first, ``more_rows`` behind it in memory."""
        shared_offset = f"{row} * {self.pitch} + {16 * piece}"
        more = more_rows * 2 * (self.apart or self.width) + 16 * piece
        return f"  copy_async_16_apart(shared, to, {shared_offset}, from, {more});"

    @property
    def _place(self) -> str:
        """Bytes from the start of the tile to ``piece`` of ``tile_row``."""
        if self.is_swizzled:
            panel = f"piece / {PANEL_PIECES} * {self.rows * PANEL_BYTES} + tile_row * {PANEL_BYTES}"
            return f"{panel} + (piece % {PANEL_PIECES} ^ tile_row % 8) * {PIECE_BYTES}"
        return f"tile_row * {self.pitch} + piece * {PIECE_BYTES}"

    @property
    def _row_place(self) -> str:
        """Which row in memory ``row`` is."""
        return "place_of(row)" if self.is_grouped else "row"

    def _unguarded(self, threads: int) -> str:
        """Copies of a whole tile: one address, and constants from there."""
        row_pieces = self._pieces_of_a_row(threads)
        place = f"const int tile_row = thread / {row_pieces}, piece = thread % {row_pieces};"
        pad = "  " * (2 + bool(self._inside_condition))
        opening = f"    if ({self._inside_condition}) {{\n" if self._inside_condition else ""
        closing = "      return;\n    }\n" if self._inside_condition else ""
        return (
            f"{opening}{pad}{place}\n"
            f"{pad}const int to = {self.start} + {self._place};\n"
            f"{self._whole(threads, pad)}{closing}"
        )

    def _whole(self, threads: int, pad: str) -> str:
        """Copies of all rows of a tile."""
        return (
            f"{pad}const unsigned short* from =\n"
            f"{pad}    {self.tensor} + (long long)({self.first} + tile_row) * {self._from} + piece * 8;\n"
            f"{self._rows_copied(range(self.rows), threads, pad)}"
        )

    def _rows_copied(self, rows: range, threads: int, pad: str) -> str:
        """Copies of some rows, the first of which has the address ``from`` in memory."""
        row_pieces = self._pieces_of_a_row(threads)
        return "".join(
            f"{pad[2:]}{self._copied(row, row - rows.start, piece)}\n"
            for row in rows[:: threads // row_pieces]
            for piece in range(0, self.width // 8, row_pieces)
        )

    def _guarded(self, is_fallback: bool) -> str:
        """Copies piece by piece, zeros beyond the rows and the columns that there are."""
        inside = [f"row < {self.bound}"] * self.is_bounded
        inside += [f"piece < {self.width // 8}"] * (self.width != padded(self.width))
        inside += [f"{self.column} + piece * 8 < {self.last_column}"] * bool(self.last_column)
        copied, condition = ("copy_async_16_guarded", f", {' && '.join(inside)}") if inside else ("copy_async_16", "")
        # Addresses of a whole tile step by step would take the registers of the loop that they are computed in.
        is_partly = self.is_swizzled or (self.is_walked and (self.is_grouped or self.apart > 0))
        unrolled = " 1" if is_fallback else " 4" if is_partly else ""
        return f"""\
    constexpr int PIECES = {self.full} / 8, COUNT = {self.rows} * PIECES;
#pragma unroll{unrolled}
    for (int first = 0; first < COUNT; first += THREADS) {{
      const int at = first + thread, tile_row = at / PIECES, piece = at % PIECES, row = {self.first} + tile_row;
      const int to = {self.start} + {self._place};
      if (COUNT % THREADS == 0 || at < COUNT)
        {copied}(shared, to, {self.tensor} + (long long){self._row_place} * {self._from} + piece * 8{condition});
    }}
"""
