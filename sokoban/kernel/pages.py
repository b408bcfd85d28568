"""Tiles of keys that lie in pages: which rows of a step follow each other, and how often a thread looks for a page."""

from __future__ import annotations

import math

from sokoban.kernel.attention import AttentionKernel

#: Rows after which the permutation of pieces in a panel begins again: copies in bulk take whole ones.
PANEL_ROWS = 8
#: Elements of 16 bits of a piece of 16 bytes, which a thread copies at a time.
PIECE_ELEMENTS = 8


def rows_in_a_page(step: int, page: int) -> int:
    """Rows of a step that lie in one page, whichever step it is.

    >>> rows_in_a_page(64, 16), rows_in_a_page(32, 64), rows_in_a_page(48, 64)
    (16, 32, 16)
    """
    return math.gcd(step, page)


def pieces_at_once(width: int, threads: int) -> int:
    """Pieces of 16 bytes of a row of ``width`` elements of 16 bits that threads copy at once."""
    return math.gcd(width // PIECE_ELEMENTS, threads)


def rows_of_a_lookup(width: int, step: int, page: int, threads: int) -> int:
    """Rows of a step for which a thread looks once: those of a page where threads copy no more rows at once, else
    those that they copy at once.

    >>> rows_of_a_lookup(128, 64, 16, 128), rows_of_a_lookup(128, 64, 4, 128)
    (16, 8)
    """
    at_once, together = threads // pieces_at_once(width, threads), rows_in_a_page(step, page)
    return at_once if together % at_once else together


def bulk_misfit(kernel: AttentionKernel, step: int) -> str | None:
    """Why copies in bulk bring no tile of ``step`` rows; None where they do.

    One copy takes rows that follow each other, out of pages as many as a panel permutes together or a multiple of it,
    all of them keys: what lies behind the last key of a sequence may be no number, and no copy in bulk leaves it out.
    """
    pages = kernel.attention.pages
    if kernel.lengths is not None:
        return "copies in bulk take whole tiles, and sequences end where their lengths say"
    if pages is None:
        return None
    rows = rows_in_a_page(step, pages.tokens)
    if rows % PANEL_ROWS:
        return f"copies in bulk take {PANEL_ROWS} rows of a page together, and a step has {rows}"
    if pages.keys % rows:
        return f"copies in bulk take {rows} rows of a page together, and {pages.keys} keys end between"
    return None
