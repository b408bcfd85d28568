"""Who waits for whom in a simulated job: meetings as the timeline has them, by rank and by process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from daydream.graph.graph import Mark, TaskGraph, TaskKind
from daydream.graph.ranks import meetings
from daydream.graph.simulate import Timeline
from daydream.report.breakdown import Cover, cpu_busy_until
from daydream.trace.trace import NONE, Flags, Floats, Ints


class Attended(NamedTuple):
    """Members of meetings, a row each, meeting by meeting. Times are microseconds.

    Attributes:
        meeting: row of the graph.
        rank: index into the graph's ranks.
        task: what moves the data.
        arrived_us: when the rank had come; NaN for one that no other waits for.
        begun_us: when it began to move data.
        ended_us: when it was done.
    """

    meeting: Ints
    rank: Ints
    task: Ints
    arrived_us: Floats
    begun_us: Floats
    ended_us: Floats

    def chosen(self, which: Flags | Ints) -> Attended:
        """The rows that `which` is true of, or names."""
        return Attended(
            self.meeting[which],
            self.rank[which],
            self.task[which],
            self.arrived_us[which],
            self.begun_us[which],
            self.ended_us[which],
        )


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Times of a rank in a step, mean of the steps, microseconds.

    Attributes:
        rank: its number.
        step_us: length of a step.
        work_us: time in which it works on something else than communication.
        moving_us: time in which it moves data.
        waited_us: time from when it has come to meetings until they take place.
        last: share of the meetings to which it came last.
        held_up_us: by how much later than the last but one it came to these, added up.
    """

    rank: int
    step_us: float
    work_us: float
    moving_us: float
    waited_us: float
    last: float
    held_up_us: float


@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """Times of a process group's collectives in a step, mean of its ranks and of the steps, microseconds.

    Attributes:
        name: the group.
        ranks: how many.
        count: collectives a step.
        bytes: what a rank puts into all of them together; NaN where that is unknown.
        moving_us: time in which data moves.
        waited_us: time in which ranks that have come wait for others.
        exposed_us: part of both in which the rank works on nothing else.
        skew_us: from when the first rank has come until the last has, mean of the collectives.
    """

    name: str
    ranks: int
    count: float
    bytes: float
    moving_us: float
    waited_us: float
    exposed_us: float
    skew_us: float

    @property
    def exposed(self) -> float:
        """Share of the communication that nothing hides; NaN without any."""
        total_us = self.moving_us + self.waited_us
        return self.exposed_us / total_us if total_us > 0 else float("nan")


def attended(timeline: Timeline) -> Attended:
    """Who attended which meeting, and when."""
    graph = timeline.graph
    met = meetings(graph)
    rank_of = _ranks(graph)
    leaves = np.flatnonzero(met[graph.edge_source])
    comes = np.flatnonzero(met[graph.edge_target])
    task = graph.edge_target[leaves]
    # What a rank does to come stands before what it does there, also where it waits for no other.
    arrived = np.full(len(leaves), np.nan)
    size = len(graph.ranks)
    keys = graph.edge_target[comes] * size + rank_of[graph.edge_source[comes]]
    order = np.argsort(keys, kind="stable")
    wanted = graph.edge_source[leaves] * size + rank_of[task]
    place = np.minimum(np.searchsorted(keys[order], wanted), max(len(order) - 1, 0))
    if len(order):
        attends = keys[order[place]] == wanted
        arrived[attends] = timeline.end_us[graph.edge_source[comes[order[place[attends]]]]]
    rows = np.lexsort((rank_of[task], graph.edge_source[leaves]))
    return Attended(
        meeting=graph.edge_source[leaves][rows],
        rank=rank_of[task][rows],
        task=task[rows],
        arrived_us=arrived[rows],
        begun_us=timeline.start_us[task][rows],
        ended_us=timeline.end_us[task][rows],
    )


def _ranks(graph: TaskGraph) -> Ints:
    """For every task the index of its rank, -1 for meetings."""
    index = {rank: place for place, rank in enumerate(graph.ranks)}
    threads = [NONE if thread.is_meeting else index[thread.process] for thread in graph.threads]
    return np.array(threads, np.int64)[graph.thread]


def step_lengths_by_rank(timeline: Timeline) -> Floats:
    """Length of every step (column) on every rank (row), microseconds; NaN where a rank has none."""
    graph = timeline.graph
    rank = _ranks(graph)
    lengths = np.full((len(graph.ranks), len(graph.steps)), np.nan)
    if not (graph.mark != Mark.NONE).any():
        since, until = np.full(len(graph.ranks), np.inf), np.full(len(graph.ranks), -np.inf)
        # What begins a recording stands at 0, wherever its rank begins.
        recorded = graph.working & (rank != NONE) & ((graph.event != NONE) | (graph.duration_us > 0))
        np.minimum.at(since, rank[recorded], timeline.start_us[recorded])
        np.maximum.at(until, rank[recorded], timeline.end_us[recorded])
        return np.broadcast_to((until - since)[:, None], lengths.shape).copy()
    begins, ends = (np.flatnonzero(graph.mark == mark) for mark in (Mark.STEP_BEGIN, Mark.STEP_END))
    lengths[rank[ends], graph.step[ends]] = timeline.start_us[ends]
    lengths[rank[begins], graph.step[begins]] -= timeline.start_us[begins]
    return lengths


def skews(rows: Attended) -> tuple[Ints, Ints, Floats, Floats]:
    """Of every meeting to which two ranks came or more: its row, who came last, how much later than the first, and how
    much later than the last but one, microseconds."""
    came = rows.chosen(~np.isnan(rows.arrived_us))
    came = came.chosen(np.lexsort((came.rank, came.arrived_us, came.meeting)))
    first = np.flatnonzero(np.diff(came.meeting, prepend=-1))
    last = np.append(first[1:], len(came.meeting)) - 1
    several = last > first
    first, last = first[several], last[several]
    arrived = came.arrived_us
    return came.meeting[last], came.rank[last], arrived[last] - arrived[first], arrived[last] - arrived[last - 1]


def rank_times(timeline: Timeline, steps: Sequence[int]) -> list[RankTimes]:
    """Every rank within these steps."""
    graph, count = timeline.graph, max(len(steps), 1)
    rows = _of_steps(graph, attended(timeline), steps)
    lengths = step_lengths_by_rank(timeline)[:, list(steps)]
    size = len(graph.ranks)
    meeting, last, _, behind = skews(rows)
    came_last = np.bincount(last, minlength=size)
    delayed_by_last = np.bincount(last, behind, size)
    waited = np.bincount(rows.rank, np.nan_to_num(rows.begun_us - rows.arrived_us), size)
    moving = np.bincount(rows.rank, rows.ended_us - rows.begun_us, size)
    met = np.bincount(rows.rank[np.isin(rows.meeting, meeting)], minlength=size)
    work = _work(timeline, busy(timeline), steps)
    return [
        RankTimes(
            rank=graph.ranks[index],
            step_us=float(np.nanmean(lengths[index])) if np.isfinite(lengths[index]).any() else float("nan"),
            work_us=float(work[index]) / count,
            moving_us=float(moving[index]) / count,
            waited_us=float(waited[index]) / count,
            last=float(came_last[index] / met[index]) if met[index] else 0.0,
            held_up_us=float(delayed_by_last[index]) / count,
        )
        for index in range(size)
    ]


def delayed_by_last(timeline: Timeline, steps: Sequence[int]) -> Floats:
    """By how much later than the last but one every rank comes to the meetings of these steps, microseconds a step."""
    graph = timeline.graph
    _, last, _, behind = skews(_of_steps(graph, attended(timeline), steps))
    return np.asarray(np.bincount(last, behind, len(graph.ranks)) / max(len(steps), 1), np.float64)


def group_times(timeline: Timeline, steps: Sequence[int]) -> list[GroupTimes]:
    """Every process group that met within these steps, that with most communication first."""
    graph, count = timeline.graph, max(len(steps), 1)
    rows = _of_steps(graph, attended(timeline), steps)
    meeting, _, skew, _ = skews(rows)
    channel = graph.thread[rows.meeting]
    exposed = _exposed(rows, busy(timeline))
    groups = []
    for thread in np.unique(channel).tolist():
        attendance = rows.chosen(channel == thread)
        members = len(np.unique(attendance.rank))
        of_skew = skew[graph.thread[meeting] == thread]
        groups.append(
            GroupTimes(
                name=graph.threads[thread].label.removeprefix("group "),
                ranks=members,
                count=len(np.unique(attendance.meeting)) / count,
                bytes=float(graph.bytes[attendance.task].sum()) / members / count,
                moving_us=float((attendance.ended_us - attendance.begun_us).sum()) / members / count,
                waited_us=float(np.nan_to_num(attendance.begun_us - attendance.arrived_us).sum()) / members / count,
                exposed_us=float(exposed[channel == thread].sum()) / members / count,
                skew_us=float(of_skew.mean()) if len(of_skew) else 0.0,
            )
        )
    return sorted(groups, key=lambda group: -(group.moving_us + group.waited_us))


def _of_steps(graph: TaskGraph, rows: Attended, steps: Sequence[int]) -> Attended:
    if not (graph.mark != Mark.NONE).any():
        return rows
    return rows.chosen(np.isin(graph.step[rows.task], list(steps)))


def busy(timeline: Timeline) -> list[Cover]:
    """When each rank works on something else than communication: its streams, or its threads where it has none."""
    graph = timeline.graph
    rank = _ranks(graph)
    until = cpu_busy_until(graph, timeline.end_us)
    on_gpu, on_cpu = graph.on_gpu & (graph.duration_us > 0), graph.on_cpu & graph.working
    rows = np.flatnonzero((rank != NONE) & (graph.kind != TaskKind.COMMUNICATION) & (on_gpu | on_cpu))
    rows = rows[np.argsort(rank[rows], kind="stable")]
    bounds = np.searchsorted(rank[rows], np.arange(len(graph.ranks) + 1))
    covers = []
    for index in range(len(graph.ranks)):
        tasks = rows[bounds[index] : bounds[index + 1]]
        streams = tasks[on_gpu[tasks]]
        tasks, end = (streams, timeline.end_us) if len(streams) else (tasks, until)
        covers.append(Cover(timeline.start_us[tasks], end[tasks]))
    return covers


def _work(timeline: Timeline, covers: Sequence[Cover], steps: Sequence[int]) -> Floats:
    """Time within these steps in which each rank works on something else than communication."""
    graph = timeline.graph
    rank = _ranks(graph)
    marks = np.flatnonzero((graph.mark != Mark.NONE) & np.isin(graph.step, list(steps)))
    if not len(marks):
        all_time = np.zeros(1), np.array([timeline.makespan_us])
        return np.array([cover.within(*all_time)[0] for cover in covers])
    begins, ends = marks[graph.mark[marks] == Mark.STEP_BEGIN], marks[graph.mark[marks] == Mark.STEP_END]
    work = np.zeros(len(covers))
    for index, cover in enumerate(covers):
        begin, end = (timeline.start_us[rows[rank[rows] == index]] for rows in (begins, ends))
        count = min(len(begin), len(end))
        work[index] = cover.within(begin[:count], end[:count]).sum()
    return work


def _exposed(rows: Attended, covers: Sequence[Cover]) -> Floats:
    """For every row the time from coming to being done in which its rank works on nothing else."""
    begin = np.where(np.isnan(rows.arrived_us), rows.begun_us, rows.arrived_us)
    hidden = np.zeros(len(begin))
    for index in np.unique(rows.rank).tolist():
        is_of_rank = rows.rank == index
        hidden[is_of_rank] = covers[index].within(begin[is_of_rank], rows.ended_us[is_of_rank])
    return np.asarray(rows.ended_us - begin - hidden, np.float64)
