"""Where the time of a step goes: CPU and GPU side by side (thesis 4.6.2), the critical path, phases, layers, kernels.

All times are microseconds. Everything is worked out from unions of intervals, so tasks that run at the same time are
not counted twice, and a step takes what overlaps its window, whichever step launched it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from daydream.graph.graph import Mark, Phase, TaskGraph, TaskKind, ThreadKind
from daydream.graph.simulate import Timeline
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError, listed


class Resource(IntEnum):
    """Resource that a task occupies, and that may be the bottleneck of a step."""

    CPU = 0
    COMPUTE = 1
    COPY = 2
    COMMUNICATION = 3
    LOADING = 4

    @property
    def label(self) -> str:
        """As people call it."""
        return ("CPU", "GPU compute", "memory copy", "communication", "data loading")[self]


_OF_KIND = np.zeros(len(TaskKind), np.int64)
for _kind, _resource in (
    (TaskKind.CPU, Resource.CPU),
    (TaskKind.KERNEL, Resource.COMPUTE),
    (TaskKind.MEMCPY, Resource.COPY),
    (TaskKind.MEMSET, Resource.COPY),
    (TaskKind.DATA_LOADING, Resource.LOADING),
    (TaskKind.COMMUNICATION, Resource.COMMUNICATION),
):
    _OF_KIND[_kind] = _resource


def resources(graph: TaskGraph) -> Ints:
    """The :class:`Resource` of every task."""
    return _OF_KIND[graph.kind]


class Cover:
    """The union of intervals, as a function of time: how much of it lies before.

    >>> cover = Cover(np.array([0.0, 2.0, 8.0]), np.array([3.0, 5.0, 9.0]))
    >>> cover.within(np.array([0.0, 4.0]), np.array([10.0, 6.0])).tolist()
    [6.0, 1.0]
    """

    def __init__(self, start_us: Floats, end_us: Floats) -> None:
        order = np.argsort(start_us, kind="stable")
        start, end = start_us[order], np.maximum.accumulate(end_us[order])
        opens = np.append(True, start[1:] > end[:-1])[: len(start)]
        closes = np.append(opens[1:], True)[: len(start)]
        self.start_us, self.end_us = start[opens], end[closes]
        """The disjoint intervals of the union, in order."""
        length = self.end_us - self.start_us
        before = np.cumsum(length) - length
        self._time = np.column_stack([self.start_us, self.end_us]).ravel()
        self._covered = np.column_stack([before, before + length]).ravel()

    def within(self, begin_us: Floats, end_us: Floats) -> Floats:
        """Covered time between `begin_us` and `end_us`, for each such pair."""
        if not len(self._time):
            return np.zeros(len(begin_us))
        inside = np.interp(end_us, self._time, self._covered) - np.interp(begin_us, self._time, self._covered)
        return np.maximum(inside, 0.0)


@dataclass(frozen=True)
class Busy:
    """A step split by who works, microseconds (4.6.2).

    The CPU is busy in its tasks and in the gaps behind them, not while it waits for the GPU or for another thread:
    so a call that synchronises counts as GPU-only for as long as it waits, as in the thesis. The GPU is busy when any
    stream runs anything, copies included. `communication_us` is the part of `neither_us` in which a channel works.
    """

    cpu_only_us: float
    gpu_only_us: float
    both_us: float
    neither_us: float
    communication_us: float

    @property
    def total_us(self) -> float:
        """Length of the step.

        >>> Busy(1.0, 2.0, 3.0, 4.0, 0.5).total_us
        10.0
        """
        return self.cpu_only_us + self.gpu_only_us + self.both_us + self.neither_us


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """One step of a timeline."""

    index: int
    name: str
    full: bool
    begin_us: float
    end_us: float
    busy: Busy
    critical_us: tuple[float, ...]
    """Time on the critical path within the step, by :class:`Resource`."""

    @property
    def length_us(self) -> float:
        return self.end_us - self.begin_us

    @property
    def bottleneck(self) -> Resource:
        """The resource that most of the critical path runs on."""
        return Resource(int(np.argmax(self.critical_us)))


@dataclass(frozen=True)
class Share:
    """One row of a table: what, how often and how long, per step."""

    name: str
    count: float
    total_us: float
    share: float
    """Of the sum over all rows, those left out included."""
    longest_us: float = 0.0


@dataclass(frozen=True)
class PhaseTimes:
    """A phase of the iteration (4.2), per step: time in which CPU or GPU work on it, and its GPU tasks."""

    name: str
    cpu_us: float
    gpu_us: float
    gpu_tasks: float


@dataclass(frozen=True)
class LayerTimes:
    """A layer, per step: GPU time by phase (forward, backward, update, other) and CPU time with gaps."""

    name: str
    gpu_us: tuple[float, float, float, float]
    cpu_us: float
    gpu_tasks: float

    @property
    def total_us(self) -> float:
        return sum(self.gpu_us)


# Steps


def find_step(graph: TaskGraph, number: int) -> int:
    """The index of the step whose name ends in ``#number``, else `number` itself.

    Raises:
        InputError: there is no such step.
    """
    for index, step in enumerate(graph.steps):
        if step.name.endswith(f"#{number}"):
            return index
    if 0 <= number < len(graph.steps):
        return number
    names = [step.name for step in graph.steps]
    choices = listed(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"
    raise InputError("--step", f"there is no step {number}", f"the trace has {choices}")


def chosen_steps(graph: TaskGraph, number: int | None = None) -> tuple[int, ...]:
    """Indices of the steps that tables are about: the one asked for, else all full ones, else all.

    Raises:
        InputError: there is no step `number`.
    """
    if number is not None:
        return (find_step(graph, number),)
    full = tuple(i for i, step in enumerate(graph.steps) if step.full)
    return full or tuple(range(len(graph.steps)))


def windows(graph: TaskGraph, start_us: Floats, end_us: Floats) -> tuple[Floats, Floats]:
    """Begin and end of every step; from the first task to the last where the graph has no marks.

    A step of which a mark is missing gets an empty window.
    """
    count = len(graph.steps)
    if not (graph.mark != Mark.NONE).any():
        end = end_us.max(initial=0.0)
        return np.full(count, start_us.min(initial=end)), np.full(count, end)
    begin, end = np.full(count, np.nan), np.full(count, np.nan)
    for mark, column in ((Mark.STEP_BEGIN, begin), (Mark.STEP_END, end)):
        rows = graph.step_marks[graph.mark[graph.step_marks] == mark]
        column[graph.step[rows]] = start_us[rows]
    missing = np.isnan(begin) | np.isnan(end)
    return np.where(missing, 0.0, begin), np.where(missing, 0.0, end)


def of_steps(graph: TaskGraph, steps: Sequence[int]) -> NDArray[np.bool_]:
    """Which tasks belong to these steps, marks left out; all of them where the graph marks no steps."""
    unmarked = graph.mark == Mark.NONE
    return unmarked if unmarked.all() else unmarked & np.isin(graph.step, list(steps))


# CPU and GPU


def cpu_busy_until(graph: TaskGraph, end_us: Floats) -> Floats:
    """Until when each task keeps its thread busy: with its gap, but for the last one of a thread."""
    return end_us + np.where(graph.following != NONE, graph.gap_us, 0.0)


def _busy(graph: TaskGraph, start_us: Floats, end_us: Floats, begin: Floats, end: Floats) -> list[Busy]:
    busy_until = cpu_busy_until(graph, end_us)
    recorded = np.isfinite(start_us)
    cpu, gpu = graph.on_cpu & graph.working & recorded, graph.on_gpu & recorded
    channel = (graph.thread_kinds[graph.thread] == ThreadKind.CHANNEL) & recorded

    def covered(*parts: tuple[NDArray[np.bool_], Floats]) -> Floats:
        starts = np.concatenate([start_us[chosen] for chosen, _ in parts])
        ends = np.concatenate([until[chosen] for chosen, until in parts])
        return Cover(starts, ends).within(begin, end)

    on_cpu, on_gpu = covered((cpu, busy_until)), covered((gpu, end_us))
    either = covered((cpu, busy_until), (gpu, end_us))
    anyone = covered((cpu, busy_until), (gpu, end_us), (channel, end_us))
    columns = [either - on_gpu, either - on_cpu, on_cpu + on_gpu - either, end - begin - either, anyone - either]
    # Differences of sums leave a rounding error where the answer is zero.
    rows = np.maximum(np.column_stack(columns), 0.0)
    return [Busy(*row) for row in np.where(rows < 1e-6, 0.0, rows).tolist()]


def recorded_busy(graph: TaskGraph, steps: Sequence[int]) -> list[Busy] | None:
    """The breakdown of the recorded times, one per step of `steps`; None where the trace has no times of the steps."""
    start, end = graph.recorded_us, graph.recorded_us + graph.duration_us
    has_time = np.isfinite(start)
    if not has_time.any() or not has_time[graph.mark != Mark.NONE].all():
        return None
    begin, finish = windows(graph, np.where(has_time, start, np.inf), np.where(has_time, end, 0.0))
    busy = _busy(graph, start, end, begin, finish)
    return [busy[index] for index in steps]


# Critical path


def critical_segments(timeline: Timeline) -> tuple[Ints, Floats, Floats]:
    """The tasks of the critical path, and from when until when each holds it up.

    A task holds the path until the next one on it starts: gaps and the lags of its edges are its own.
    """
    rows = timeline.critical_path
    start = timeline.start_us[rows]
    if not len(rows):
        return rows, start, start
    return rows, start, np.append(start[1:], timeline.end_us[rows[-1]])


def _critical(timeline: Timeline, begin: Floats, end: Floats) -> Floats:
    rows, start, until = critical_segments(timeline)
    kinds = resources(timeline.graph)[rows]
    return np.column_stack(
        [Cover(start[kinds == resource], until[kinds == resource]).within(begin, end) for resource in Resource]
    )


def step_breakdowns(timeline: Timeline, steps: Sequence[int]) -> list[StepBreakdown]:
    """Each of these steps of a timeline."""
    graph = timeline.graph
    begin, end = windows(graph, timeline.start_us, timeline.end_us)
    busy = _busy(graph, timeline.start_us, timeline.end_us, begin, end)
    critical = _critical(timeline, begin, end).tolist()
    breakdowns = [
        StepBreakdown(
            index=index,
            name=step.name,
            full=step.full,
            begin_us=begin_us,
            end_us=end_us,
            busy=step_busy,
            critical_us=tuple(critical_us),
        )
        for index, (step, begin_us, end_us, step_busy, critical_us) in enumerate(
            zip(graph.steps, begin.tolist(), end.tolist(), busy, critical, strict=True)
        )
    ]
    return [breakdowns[index] for index in steps]


def operator_text(graph: TaskGraph, row: int) -> str:
    """The innermost CPU operator of a task, or the task's own name."""
    operator = int(graph.operator[row])
    return graph.text(row) if operator == NONE or graph.trace is None else graph.trace.text(operator)


def blamed_text(graph: TaskGraph, row: int, delay_us: float) -> str:
    """The operator of a CPU task that held others up for so long, said otherwise where most of that is not its own.

    The rest is the gap behind the task, or the lag until what it set off began.
    """
    text = operator_text(graph, row)
    return f"untraced, after {text}" if delay_us > 2 * graph.duration_us[row] else text


def path_tasks(timeline: Timeline, steps: Sequence[int], limit: int) -> list[tuple[Resource, Share]]:
    """Longest tasks on the critical path within these steps: kernels by name, CPU tasks by operator, per step."""
    graph = timeline.graph
    rows, start, until = critical_segments(timeline)
    begin, end = windows(graph, timeline.start_us, timeline.end_us)
    chosen = sorted(steps, key=lambda index: begin[index])
    steps_cover = Cover(begin[chosen], end[chosen])
    inside = steps_cover.within(start, until)
    length_us = until - start
    rows, inside, length_us = rows[inside > 0], inside[inside > 0], length_us[inside > 0]
    kinds = resources(graph)[rows].tolist()
    on_cpu = graph.on_cpu[rows].tolist()
    texts = [
        blamed_text(graph, row, length) if cpu else graph.text(row)
        for row, cpu, length in zip(rows, on_cpu, length_us, strict=True)
    ]
    place_of: dict[tuple[int, str], int] = {}
    places = np.array([place_of.setdefault(key, len(place_of)) for key in zip(kinds, texts, strict=True)], np.int64)
    table = _table([text for _, text in place_of], places, inside, len(steps), limit)
    return [(Resource(list(place_of)[key][0]), share) for key, share in table]


def _table(names: Sequence[str], places: Ints, amount: Floats, steps: int, limit: int) -> list[tuple[int, Share]]:
    """Amounts added up by place in `names`, the largest first, with that place."""
    total = np.bincount(places, amount, len(names))
    count = np.bincount(places, minlength=len(names))
    longest = np.zeros(len(names))
    np.maximum.at(longest, places, amount)
    everything, steps = float(total.sum()) or 1.0, max(steps, 1)
    order = np.argsort(-total, kind="stable")
    order = order[count[order] > 0][:limit]
    shares = []
    for i in order.tolist():
        total_us = float(total[i])
        shares.append(
            (i, Share(names[i], float(count[i]) / steps, total_us / steps, total_us / everything, float(longest[i])))
        )
    return shares


# Tables


def top_kernels(graph: TaskGraph, steps: Sequence[int], limit: int = 15) -> list[Share]:
    """GPU tasks (copies too) by name, per step: share is of the sum of all GPU tasks."""
    # What only arrives at a collective is no kernel.
    runs = (graph.duration_us > 0) | (graph.event != NONE)
    rows = np.flatnonzero(of_steps(graph, steps) & graph.on_gpu & runs)
    shares = _table(graph.names, graph.name[rows], graph.duration_us[rows], len(steps), limit)
    return [share for _, share in shares]


def phase_times(timeline: Timeline, steps: Sequence[int]) -> list[PhaseTimes]:
    """Every phase that has a task in these steps, mean of the steps."""
    graph = timeline.graph
    begin, end = windows(graph, timeline.start_us, timeline.end_us)
    begin, end = begin[list(steps)], end[list(steps)]
    busy_until = cpu_busy_until(graph, timeline.end_us)
    chosen = of_steps(graph, steps)
    phases = []
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.NONE):
        of_phase = graph.phase == phase
        if not (of_phase & chosen).any():
            continue
        cpu, gpu = of_phase & graph.on_cpu & graph.working, of_phase & graph.on_gpu
        on_cpu = Cover(timeline.start_us[cpu], busy_until[cpu]).within(begin, end).mean()
        on_gpu = Cover(timeline.start_us[gpu], timeline.end_us[gpu]).within(begin, end).mean()
        count = int((gpu & chosen).sum()) / len(steps)
        name = "other" if phase == Phase.NONE else phase.name.lower()
        phases.append(PhaseTimes(name, float(on_cpu), float(on_gpu), count))
    return phases


def layer_times(graph: TaskGraph, steps: Sequence[int], limit: int = 15) -> list[LayerTimes]:
    """The layers with most GPU time, and of those without any with most CPU time, per step."""
    chosen = of_steps(graph, steps) & (graph.layer != NONE)
    gpu, cpu = np.flatnonzero(chosen & graph.on_gpu), np.flatnonzero(chosen & graph.on_cpu)
    count, steps_count = len(graph.layers), max(len(steps), 1)
    # Phase NONE is -1: the last of four columns.
    cells = graph.layer[gpu] * 4 + graph.phase[gpu] % 4
    by_phase = np.bincount(cells, graph.duration_us[gpu], 4 * count).reshape(count, 4) / steps_count
    tasks = np.bincount(graph.layer[gpu], minlength=count) / steps_count
    on_cpu = np.bincount(graph.layer[cpu], graph.duration_us[cpu] + graph.gap_us[cpu], count) / steps_count
    order = np.lexsort((-on_cpu, -by_phase.sum(axis=1)))[:limit].tolist()
    return [
        LayerTimes(graph.layers[i], tuple(by_phase[i].tolist()), float(on_cpu[i]), float(tasks[i]))
        for i in order
        if tasks[i] or on_cpu[i]
    ]
