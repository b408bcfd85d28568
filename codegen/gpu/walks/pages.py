"""Pages and lengths in texts of attention: the table that says which row of the pool a key is, tiles copied through it,
and how many keys a sequence has.

A number outside of the pool stands for its first or last page, as :mod:`sokoban.language.gathers` says, so that nothing
beyond the pool is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.gpu.walks.staged_tiles import StagedTile
from sokoban.kernel.attention import AttentionKernel
from sokoban.kernel.pages import rows_in_a_page, rows_of_a_lookup
from sokoban.language.expression import Tensor
from sokoban.language.named.pages import Pages

#: The function of a text that says which row of a head's keys a key is.
ROW_OF_KEY = "row_of_key"
#: Most pages that are looked up before the first copy, so that their reads are under way together: each is a register.
LOOKUPS_AHEAD = 8
_CONTIGUOUS = """\
  const unsigned short* keys = {keys}_ptr + (long long)problem * KEYS_HELD * HEAD_DIM;
  const unsigned short* values = {values}_ptr + (long long)problem * KEYS_HELD * VALUE_DIM;"""
_TABLE = "  const int* table = {table}_ptr + problem / KEY_HEADS * PAGES;"
_PAGED = f"""\
{_TABLE}
  const unsigned short* keys = {{keys}}_ptr + problem % KEY_HEADS * PAGE * HEAD_DIM;
  const unsigned short* values = {{values}}_ptr + problem % KEY_HEADS * PAGE * VALUE_DIM;
  // A page has the rows of all heads, a head after the other.
  auto {ROW_OF_KEY} = [=](int key) {{{{
    return {{page}} * (KEY_HEADS * PAGE) + key % PAGE;
  }}}};"""


def page_sizes(kernel: AttentionKernel) -> dict[str, int]:
    """Sizes of pages as names of the text; none where keys are contiguous."""
    pages = kernel.attention.pages
    if pages is None:
        return {}
    return {
        "KEY_HEADS": kernel.attention.key_heads, "PAGE": pages.tokens, "PAGES": pages.per_sequence, "POOL": pages.pool
    }  # fmt: skip


def pointers(kernel: AttentionKernel) -> str:
    """Where keys and values of a problem begin, and which row a key is where they lie in pages."""
    keys, values, table = kernel.inputs[1], kernel.inputs[2], kernel.table
    if table is None:
        return _CONTIGUOUS.format(keys=keys.name, values=values.name)
    page = in_pool("table[key / PAGE]", "POOL - 1")
    return _PAGED.format(keys=keys.name, values=values.name, table=table.name, page=page)


def in_pool(page: str, last: str) -> str:
    """The page that a number of the table stands for, with the ``last`` one of the pool."""
    return f"min(max({page}, 0), {last})"


def table_pointer(table: Tensor) -> str:
    """Where the numbers of a sequence's pages begin."""
    return _TABLE.format(table=table.name)


def length(kernel: AttentionKernel) -> str:
    """Number of keys of the sequence of a ``problem``, between the fewest and the most that there can be."""
    attention, lengths = kernel.attention, kernel.lengths
    assert lengths is not None
    return (
        f"min(max({lengths.name}_ptr[problem / {attention.key_heads}], {attention.least_keys}), {attention.key_count})"
    )


def own_keys(kernel: AttentionKernel) -> str:
    """The sizes that follow from a length, by the names that they have as constants elsewhere."""
    return f"""\
  const int KEYS_ALL = {length(kernel)};
  const int AHEAD = KEYS_ALL - {kernel.attention.queries};"""


def element_type(tensor: Tensor) -> str:
    """Type of a tensor's elements where those of floats have 16 bits."""
    return "int" if tensor.dtype == "int32" else "unsigned short"


def numbered_row(pages: Pages, table: str, key_heads: int) -> str:
    """The row of the pool that ``row`` of a tile is, by numbers: of the head ``problem % key_heads``."""
    page = f"{table}_ptr[problem / {key_heads} * {pages.per_sequence} + row / {pages.tokens}]"
    head = f"{in_pool(page, str(pages.pool - 1))} * {key_heads} + problem % {key_heads}"
    return f"({head}) * {pages.tokens} + row % {pages.tokens}"


@dataclass(frozen=True, kw_only=True)
class PagedTile(StagedTile):
    """A tile of keys or values whose rows lie where the table of pages says.

    Attributes:
        page: tokens of a page.
    """

    page: int

    @property
    def _row_place(self) -> str:
        """Which row in memory ``row`` is; behind the last one that of the last, which is read from no table."""
        return f"{ROW_OF_KEY}({f'min(row, {self.bound} - 1)' if self.is_bounded else 'row'})"

    def _whole(self, threads: int, pad: str) -> str:
        """Copies of all rows of a tile: a place for as many rows as a thread finds in one page, and constants from
        there."""
        each = rows_of_a_lookup(self.width, self.rows, self.page, threads)
        starts = range(0, self.rows, each)
        if len(starts) > LOOKUPS_AHEAD:
            rows = [(f"({self._lookup(start, each)})", start) for start in starts]
            return "".join(self._page_copied(row, start, each, threads, pad) for row, start in rows)
        names = "".join(f"{pad}const int row_{start} = {self._lookup(start, each)};\n" for start in starts)
        return names + "".join(self._page_copied(f"row_{start}", start, each, threads, pad) for start in starts)

    def _lookup(self, start: int, each: int) -> str:
        """The row in memory of a thread's first among ``each`` rows from ``start`` on. Where they are of one page, all
        threads read the same element of the table."""
        if rows_in_a_page(self.rows, self.page) % each:
            return f"{ROW_OF_KEY}({self.first} + {start} + tile_row)"
        return f"{ROW_OF_KEY}({self.first} + {start}) + tile_row"

    def _page_copied(self, row: str, start: int, each: int, threads: int, pad: str) -> str:
        """The copies of ``each`` rows from ``start`` on, the first of which is ``row`` in memory."""
        copies = self._rows_copied(range(start, start + each), threads, f"{pad}  ")
        return (
            f"{pad}{{\n{pad}  const unsigned short* from = "
            f"{self.tensor} + (long long){row} * {self._from} + piece * 8;\n{copies}{pad}}}\n"
        )
