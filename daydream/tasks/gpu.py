"""GPU tasks of a trace: kernels, copies and sets of every stream, and the calls that launch them (thesis 4.4.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from daydream.graph.graph import TaskKind
from daydream.tasks.cpu import CpuTasks
from daydream.trace.collectives import is_collective, is_collective_name
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace, looked_up

#: Tasks of one stream that overlap by more ran at the same time (branches of a CUDA graph); by less, the profiler
#: rounded their times.
OVERLAP_US = 2.0

#: From a launch call's end to the task's start where no task of the trace found its stream idle, microseconds.
USUAL_LATENCY_US = 5.0

#: Calls that return when everything launched before is done, and by how much clocks of CPU and GPU may differ.
_DEVICE_SYNC = re.compile(r"^(cuda|hip)DeviceSynchronize$|^cuCtxSynchronize$")
_SKEW_US = 100.0

#: Calls that set a GPU task off.
_LAUNCH = re.compile(r"Launch|Mem(cpy|set)", re.IGNORECASE)

_KINDS = {
    Category.KERNEL: TaskKind.KERNEL,
    Category.MEMCPY: TaskKind.MEMCPY,
    Category.MEMSET: TaskKind.MEMSET,
}


#: AMD's runtime copies and fills within a board by kernels of its own.
_COPYING_KERNELS = {"__amd_rocclr_copyBuffer": TaskKind.MEMCPY, "__amd_rocclr_fillBuffer": TaskKind.MEMSET}


@dataclass(frozen=True, kw_only=True)
class GpuTasks:
    """GPU tasks, stream by stream in order of start, one array entry each. Times are microseconds.

    Attributes:
        event: row of the trace.
        lane: number of its lane: a stream, or a part of one whose tasks overlap.
        lanes: for each lane the trace's thread and which of that stream's lanes it is, from 0.
        kind: a :class:`daydream.graph.graph.TaskKind`.
        start_us: start in the trace.
        duration_us: how long it occupies its lane.
        gap_us: how long its lane then stays busy with the change to the next task.
        launch: position of the CPU task that launches it, -1 where the trace has none.
        latency_us: from the end of the launch to the earliest possible start.
        warnings: what was mended or is missing, a sentence each.
    """

    event: Ints
    lane: Ints
    lanes: tuple[tuple[int, int], ...]
    kind: Ints
    start_us: Floats
    duration_us: Floats
    gap_us: Floats
    launch: Ints
    latency_us: Floats
    warnings: tuple[str, ...] = ()

    def before(self) -> Ints:
        """Position of the task before it on its lane, -1 without."""
        previous = np.arange(-1, len(self.lane) - 1)
        if len(previous):
            previous[np.append(True, self.lane[1:] != self.lane[:-1])] = NONE
        return previous

    def first_of_launch(self) -> Flags:
        """Which tasks started before all others of the same call; those of a CUDA graph share one call."""
        order = np.lexsort((self.start_us, self.launch))
        first = np.ones(len(order), np.bool_)
        first[order[1:]] = self.launch[order[1:]] != self.launch[order[:-1]]
        return first | (self.launch == NONE)


def gpu_tasks(trace: Trace, cpu: CpuTasks) -> GpuTasks:
    """Kernels, copies and sets of every stream with their launches; durations cut where rounding lets them overlap.

    Gaps and latencies are 0 here; :func:`daydream.tasks.lags.time_launches` sets them.
    """
    rows = np.flatnonzero(np.isin(trace.category, list(_KINDS)))
    rows = rows[np.argsort(trace.thread[rows], kind="stable")]
    launch = _launches_by_external(trace, cpu, rows, _launches(trace, cpu, rows))
    duration = _cut_overflows(trace, cpu, rows, launch)
    part = _parts(trace.thread[rows], trace.start_us[rows], trace.start_us[rows] + duration)
    lanes, lane = np.unique(np.stack([trace.thread[rows], part], axis=1).reshape(-1, 2), axis=0, return_inverse=True)
    lane = lane.reshape(-1)
    order = np.argsort(lane, kind="stable")
    overflown = duration < trace.duration_us[rows] - OVERLAP_US
    excess_us = float((trace.duration_us[rows] - duration)[overflown].sum())
    rows, lane, launch, duration = rows[order], lane[order], launch[order], duration[order]
    start = trace.start_us[rows]
    same = lane[1:] == lane[:-1]
    duration[:-1][same] = np.minimum(duration[:-1], start[1:] - start[:-1])[same]
    kind = np.array([_KINDS.get(Category(c), TaskKind.KERNEL) for c in range(len(Category))])[trace.category[rows]]
    kind = np.where(_collective(trace, rows), TaskKind.COMMUNICATION, kind)
    for begin, meant in _COPYING_KERNELS.items():
        copying = np.array([name.startswith(begin) for name in trace.names], np.bool_)
        kind[copying[trace.name[rows]]] = meant
    named = tuple((int(thread), int(number)) for thread, number in lanes)
    zeros = np.zeros(len(rows))
    return GpuTasks(
        event=rows,
        lane=lane,
        lanes=named,
        kind=kind,
        start_us=start,
        duration_us=duration,
        gap_us=zeros,
        launch=launch,
        latency_us=zeros.copy(),
        warnings=(*_overflow_warning(int(overflown.sum()), excess_us), *_unlaunched_warning(trace, launch)),
    )


def _cut_overflows(trace: Trace, cpu: CpuTasks, rows: Ints, launch: Ints) -> Floats:
    """Durations of GPU events, in order of stream and start, cut where the next of their stream starts.

    Only tasks of one call (a CUDA graph) run at the same time on a stream. Two with calls of their own can't: the first
    one's recorded end is wrong. So is an end long after the CPU had waited for the whole device.
    """
    duration = trace.duration_us[rows].copy()
    thread, start = trace.thread[rows], trace.start_us[rows]
    is_separate = (
        (thread[1:] == thread[:-1]) & (launch[1:] != launch[:-1]) & (launch[1:] != NONE) & (launch[:-1] != NONE)
    )
    duration[:-1] = np.where(is_separate, np.minimum(duration[:-1], start[1:] - start[:-1]), duration[:-1])
    waiting = np.array([_DEVICE_SYNC.match(name) is not None for name in trace.names], np.bool_)
    calls = np.flatnonzero(waiting[trace.name] & (trace.category == Category.RUNTIME))
    called = looked_up(cpu.start_us, launch, np.inf)
    place = np.searchsorted(trace.start_us[calls], called)
    returned = np.append((trace.start_us + trace.duration_us)[calls], np.inf)[place]
    late = (start < returned) & (start + trace.duration_us[rows] > returned + _SKEW_US)
    return np.where(late, np.minimum(duration, returned - start), duration)


def _overflow_warning(count: int, excess_us: float) -> tuple[str, ...]:
    if not count:
        return ()
    return (
        f"{count} GPU task{'s' * (count != 1)} reach{'es' * (count == 1)} over the start of the next on the same stream"
        f" or over a wait for the board: cut there, {excess_us / 1000:.2f} ms in all",
    )


def _unlaunched_warning(trace: Trace, launch: Ints) -> tuple[str, ...]:
    """A warning where the trace has calls of the CPU but hardly a launch of a GPU task."""
    without = int((launch == NONE).sum())
    if 2 * without <= len(launch) or not np.isin(trace.category, (Category.OPERATOR, Category.RUNTIME)).any():
        return ()
    return (
        f"{without} of {len(launch)} GPU tasks have no launch in the trace: they start by the clock or behind others of"
        " their stream, and nothing that changes on the CPU changes them",
    )


def _collective(trace: Trace, rows: Ints) -> Flags:
    """Which of these rows are kernels of collectives, by what the profiler says of them or by name."""
    by_name = np.array([is_collective_name(name) for name in trace.names], np.bool_)[trace.name[rows]]
    kernels = trace.category[rows] == Category.KERNEL
    said = np.array(["Collective name" in trace.arguments[row] for row in rows.tolist()], np.bool_)
    for place in np.flatnonzero(said & kernels & ~by_name).tolist():
        row = int(rows[place])
        by_name[place] = is_collective(trace.text(row), trace.arguments[row])
    return by_name & kernels


def _parts(thread: Ints, start: Floats, end: Floats) -> Ints:
    """For tasks in thread and start order, the first lane of their stream that is free when they start."""
    part = np.zeros(len(thread), np.int64)
    same_stream = thread[1:] == thread[:-1]
    if not (same_stream & (start[1:] < end[:-1] - OVERLAP_US)).any():
        # The latest end so far, not only the last task's, decides; without any overlap they are the same.
        return part
    busy_until: list[float] = []
    current = NONE
    for task, (stream, begin, finish) in enumerate(zip(thread.tolist(), start.tolist(), end.tolist(), strict=True)):
        if stream != current:
            busy_until, current = [], stream
        free = [lane for lane, until in enumerate(busy_until) if until <= begin + OVERLAP_US]
        if not free:
            busy_until.append(0.0)
            free = [len(busy_until) - 1]
        part[task] = free[0]
        busy_until[free[0]] = finish
    return part


def _launches(trace: Trace, cpu: CpuTasks, rows: Ints) -> Ints:
    """The CPU task that launched each GPU event, by correlation; of several calls the last before the start.

    Correlations are unique within a process only while it is not forked or restarted, so an earlier namesake may
    exist. One call may have launched many (a CUDA graph).
    """
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0) & (cpu.task_of != NONE))
    if not len(calls) or not len(rows):
        return np.full(len(rows), NONE)
    calls = calls[np.lexsort((trace.start_us[calls], trace.correlation[calls]))]
    keys = trace.correlation[calls]
    low = np.searchsorted(keys, trace.correlation[rows], side="left")
    high = np.searchsorted(keys, trace.correlation[rows], side="right")
    chosen = np.minimum(low, len(calls) - 1)
    for task in np.flatnonzero(high - low > 1):
        namesakes = trace.start_us[calls[low[task] : high[task]]]
        earlier = np.searchsorted(namesakes, trace.start_us[rows[task]], side="right")
        chosen[task] = low[task] + max(int(earlier) - 1, 0)
    launched = (high > low) & (trace.correlation[rows] > 0)
    return np.where(launched, cpu.task_of[calls[chosen]], NONE)


def _launches_by_external(trace: Trace, cpu: CpuTasks, rows: Ints, launch: Ints) -> Ints:
    """The launches completed by external ids, for events and calls without correlation.

    The calls of an operator are joined in order with what it set off, provided they are equally many.
    """
    alone = (trace.correlation == NONE) & (trace.external > 0)
    launching = np.array([_LAUNCH.search(name) is not None for name in trace.names], np.bool_)
    calls = np.flatnonzero(alone & (trace.category == Category.RUNTIME) & launching[trace.name] & (cpu.task_of != NONE))
    open_places = np.flatnonzero((launch == NONE) & alone[rows])
    if not len(calls) or not len(open_places):
        return launch
    tasks = rows[open_places]
    calls = calls[np.lexsort((trace.start_us[calls], trace.external[calls]))]
    order = np.lexsort((trace.start_us[tasks], trace.external[tasks]))
    called, count = np.unique(trace.external[calls], return_counts=True)
    wanted, needed = np.unique(trace.external[tasks], return_counts=True)
    common, of_calls, of_tasks = np.intersect1d(called, wanted, return_indices=True)
    even = common[count[of_calls] == needed[of_tasks]]
    chosen = order[np.isin(trace.external[tasks[order]], even)]
    completed = launch.copy()
    completed[open_places[chosen]] = cpu.task_of[calls[np.isin(trace.external[calls], even)]]
    return completed
