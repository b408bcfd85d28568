"""What construction proposes: a schedule, the tiles it came from, and the reasons."""

from __future__ import annotations

from typing import NamedTuple

from sokoban import TileSchedule


class Reason(NamedTuple):
    """One step of the construction: what was done at which layer, to which tile, and the ``numbers`` behind it.

    ``tile`` is a shape over the axes of the operator's :class:`TileSpace`, or text where there is no such tile.
    """

    layer: str
    action: str
    tile: str | tuple[int, ...]
    numbers: tuple[tuple[str, float], ...] = ()


class Candidate(NamedTuple):
    """A program that may be ranked. ``epsilon`` is the tensor padding it was allowed; the tiles are shapes over the
    axes of the operator's :class:`TileSpace`, None where the program was not grown from tiles."""

    schedule: TileSchedule
    policy: str
    epsilon: float
    reasons: tuple[Reason, ...]
    register_shape: tuple[int, ...] | None = None
    shared_shape: tuple[int, ...] | None = None
