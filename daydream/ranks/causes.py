"""Why a rank holds the others up: late compute, late data, a late host, or a slow link.

The job is simulated once for each cause with those tasks alone at the mean of all ranks that do the same
(:func:`daydream.ranks.even.even_load`). The cause of a rank is the one without which it would hold the others up least.
Work that other work hides makes no rank late, which sums of durations would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from daydream.graph.graph import TaskGraph, TaskKind
from daydream.graph.simulate import Timeline
from daydream.ranks.equal import simulate_ranks
from daydream.ranks.even import even_load
from daydream.ranks.skew import GroupTimes, delayed_by_last
from daydream.trace.trace import Flags, Floats

#: Share of the time by which a rank holds the others up that a cause explains at least.
EXPLAINS = 0.25

#: A group whose data moves slower than the median of like groups by this factor has a slow link.
SLOW_LINK = 1.3


class Cause(IntEnum):
    """The reason for which a rank is late."""

    COMPUTE = 0
    DATA = 1
    HOST = 2
    LINK = 3

    @property
    def text(self) -> str:
        """As people call it."""
        return ("late compute", "late data", "late host", "slow link")[self]


@dataclass(frozen=True)
class RankCause:
    """Why a rank holds the others up; `without_us` is by how much less it would without, microseconds a step."""

    cause: Cause
    without_us: float


@dataclass(frozen=True)
class SlowGroup:
    """A process group whose data moves slower than that of groups that do the same, bytes/s of what a rank puts in."""

    name: str
    rate: float
    usual: float


def _compute(graph: TaskGraph) -> Flags:
    return graph.on_gpu & np.isin(graph.kind, (TaskKind.KERNEL, TaskKind.MEMSET))


def _data(graph: TaskGraph) -> Flags:
    return (graph.kind == TaskKind.DATA_LOADING) | (graph.kind == TaskKind.MEMCPY)


def _host(graph: TaskGraph) -> Flags:
    return graph.on_cpu & (graph.kind == TaskKind.CPU)


def _link(graph: TaskGraph) -> Flags:
    return graph.kind == TaskKind.COMMUNICATION


_TASKS: dict[Cause, Callable[[TaskGraph], Flags]] = {
    Cause.COMPUTE: _compute,
    Cause.DATA: _data,
    Cause.HOST: _host,
    Cause.LINK: _link,
}


def rank_causes(timeline: Timeline, steps: Sequence[int], ranks: Sequence[int]) -> dict[int, RankCause]:
    """The cause of each of these ranks (numbers) that has one; the others are late for several reasons.

    Args:
        timeline: of a joined graph.
        steps: indices of the steps that count.
        ranks: that hold the others up.
    """
    if not ranks:
        return {}
    graph = timeline.graph
    index = [graph.ranks.index(rank) for rank in ranks]
    before = delayed_by_last(timeline, steps)[index]
    saved: dict[Cause, Floats] = {}
    for cause, tasks in _TASKS.items():
        chosen = tasks(graph)
        if chosen.any():
            saved[cause] = before - delayed_by_last(simulate_ranks(even_load(graph, chosen)), steps)[index]
    causes = {}
    for place, rank in enumerate(ranks):
        best = max(saved, key=lambda cause: float(saved[cause][place]), default=None)
        if best is not None and saved[best][place] > EXPLAINS * before[place]:
            causes[rank] = RankCause(best, float(saved[best][place]))
    return causes


def slow_groups(groups: Sequence[GroupTimes]) -> list[SlowGroup]:
    """Groups whose data moves slower than that of groups that do the same, the slowest first.

    The same are as many collectives of as many bytes among as many ranks: groups of a model's tensors are no measure of
    those of its data. The usual rate is the median, of two the faster one. Waiting for ranks is no part of moving, so
    that a late rank makes no link slow.
    """
    alike: dict[tuple[int, str, str], dict[str, float]] = {}
    for group in groups:
        if group.bytes > 0 and group.moving_us > 0:
            key = (group.ranks, f"{group.count:.3g}", f"{group.bytes:.3g}")
            alike.setdefault(key, {})[group.name] = group.bytes / group.moving_us * 1e6
    slow = []
    for rates in alike.values():
        usual = sorted(rates.values())[len(rates) // 2]
        slow += [SlowGroup(name, rate, usual) for name, rate in rates.items() if rate * SLOW_LINK < usual]
    return sorted(slow, key=lambda group: (group.rate / group.usual, group.name))
