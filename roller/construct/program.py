"""What construction proposes: a schedule, the tiles it came from, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hal.spec.device import DeviceSpec
from roller.construct.rtile import RTile
from sokoban.kernel.form import KernelForm
from sokoban.model.estimates import Estimate
from sokoban.schedule.tile import TileSchedule

if TYPE_CHECKING:
    from roller.algorithms.chain import Considered


@dataclass(frozen=True, kw_only=True)
class RProgram:
    """One program: a schedule, the tiles it came from, what it is expected to take, and why it is so.

    ``policy`` says how it was found: by which walk of construction, or by ``"search"``.
    """

    schedule: TileSchedule
    estimate: Estimate
    register_tile: RTile | None
    shared_tile: RTile | None
    policy: str
    epsilon: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True)
class Construction:
    """The ranked programs of one operator on one device.

    Attributes:
        programs: best first by predicted time, all different.
        considered: how many candidates were scored.
        epsilon: the largest tensor padding that had to be allowed.
        seconds: time the construction took.
        searched: how many schedules exhaustive search scored besides; 0 where there was none.
        search_seconds: time the search took.
        algorithms: what other algorithms than a single kernel make of the operator; empty where none was asked for.
        algorithm_seconds: time that took.
    """

    form: KernelForm
    device: DeviceSpec
    programs: tuple[RProgram, ...]
    considered: int
    epsilon: float
    seconds: float
    searched: int = 0
    search_seconds: float = 0.0
    algorithms: tuple[Considered, ...] = ()
    algorithm_seconds: float = 0.0


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
