"""Axes along which the blocks of a launch may run in bands."""

from __future__ import annotations

from collections.abc import Mapping


def raster_axes(grid: Mapping[str, int]) -> tuple[str, str] | None:
    """The axes that a band goes down and across: the last two with several tiles, ``grid`` being tiles by axis in
    output order; None where there are no two."""
    several = [axis for axis, count in grid.items() if count > 1]
    return (several[-2], several[-1]) if len(several) > 1 else None
