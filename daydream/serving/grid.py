"""Seconds on a grid of rows of queries and of keys, and between its points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from daydream.trace.trace import Floats


class Grid(NamedTuple):
    """Seconds of attention by rows of queries and by the keys that each of these sees, both ascending."""

    rows: Floats
    keys: Floats
    seconds: Any


def interpolated(grid: Grid, row: float, key: float) -> float:
    """Seconds of so many rows and keys; traffic and arithmetic, rows times keys, are exact between points.

    >>> import numpy as np
    >>> grid = Grid(np.array([1.0, 4.0]), np.array([8.0, 16.0]), np.array([[9.0, 17.0], [33.0, 65.0]]))
    >>> float(interpolated(grid, 2.0, 12.0)), float(interpolated(grid, 1.0, 4.0))
    (25.0, 5.0)
    """
    i, j = before(grid.rows, row), before(grid.keys, key)
    share = (key - grid.keys[j]) / (grid.keys[j + 1] - grid.keys[j])
    near = grid.seconds[i, j] + share * (grid.seconds[i, j + 1] - grid.seconds[i, j])
    if len(grid.rows) < 2 or row <= grid.rows[i]:
        return near
    far = grid.seconds[i + 1, j] + share * (grid.seconds[i + 1, j + 1] - grid.seconds[i + 1, j])
    return near + (row - grid.rows[i]) / (grid.rows[i + 1] - grid.rows[i]) * (far - near)


def before(points: Floats, value: float) -> int:
    """The last point but one at most that lies before a value, the first where none does."""
    place = 0
    while place < len(points) - 2 and points[place + 1] < value:
        place += 1
    return place
