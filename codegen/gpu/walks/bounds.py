"""Bounds of a walk as text: by the names that a kernel has for its sizes, or by their numbers."""

from __future__ import annotations

from collections.abc import Mapping

from sokoban.kernel.block_range import Bound


def named(bound: Bound, row: str, then: str = "") -> str:
    """A bound by names of sizes, ``then`` done with it where a mask sets it.

    >>> from sokoban.kernel.block_range import KEYS_OF_QUERIES
    >>> named(KEYS_OF_QUERIES[1], "last_query")
    'CAUSAL ? min(last_query + AHEAD + 1, KEYS_ALL) : KEYS_ALL'
    """
    moved = "".join([row, *(f" {sign} {name}" for sign, name in bound.terms)])
    cut = f"{'max' if bound.limit == '0' else 'min'}({moved}, {bound.limit})"
    scaled = f" * {bound.scale}" if bound.scale else ""
    return f"{bound.option} ? {cut}{scaled}{then} : {bound.otherwise}"


def numbered(bound: Bound, row: str, sizes: Mapping[str, int], then: str = "") -> str:
    """A bound by numbers, ``then`` done with it where a mask sets it.

    >>> from sokoban.kernel.block_range import KEYS_OF_QUERIES
    >>> numbered(KEYS_OF_QUERIES[1], "last", {"CAUSAL": 1, "AHEAD": 4, "1": 1, "KEYS_ALL": 64})
    'last + 5 < 64 ? last + 5 : 64'
    """
    if not sizes[bound.option]:
        return str(sizes[bound.otherwise])
    offset, limit = bound.offset(sizes), sizes[bound.limit]
    moved = f"{row} + {offset}"
    cut = f"{moved} {'>' if bound.limit == '0' else '<'} {limit} ? {moved} : {limit}"
    if all(sign == "-" for sign, _ in bound.terms):  # what is taken off is compared, not the difference
        cut = f"{row} > {-offset} ? {row} - {-offset} : 0"
    more = (f" * {sizes[bound.scale]}" if bound.scale else "") + then
    return f"({cut}){more}" if more else cut


def inside(text: str) -> str:
    """A bound as a part of other text; what is done with one has put it into parentheses already."""
    return f"({text})" if " ? " in text and not text.startswith("(") else text
