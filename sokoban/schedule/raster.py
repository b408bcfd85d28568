"""Axes along which the blocks of a launch may run in bands."""

from __future__ import annotations

from collections.abc import Mapping


def raster_axes(grid: Mapping[str, int]) -> tuple[str, str] | None:
    """The axes that a band goes down and across: the last two with several blocks; None where there are no two.

    ``grid``: blocks by axis, in output order.

    >>> raster_axes({"b": 4, "m": 8, "c": 1, "n": 3})
    ('m', 'n')
    """
    divided = [axis for axis, blocks in grid.items() if blocks > 1]
    return (divided[-2], divided[-1]) if len(divided) > 1 else None
