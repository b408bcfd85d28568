"""GPU tasks of a trace: streams, launches, and how long a launch and a change of kernel take (thesis 4.4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daydream.graph.graph import TaskKind
from daydream.tasks.cpu import CpuTasks
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace, looked_up

#: Tasks of one stream that overlap by more ran at the same time (branches of a CUDA graph); by less, the profiler
#: rounded their times.
OVERLAP_US = 2.0

#: From a launch call's end to the task's start where no task of the trace found its stream idle.
USUAL_LATENCY_US = 5.0

_KINDS = {
    Category.KERNEL: TaskKind.KERNEL,
    Category.MEMCPY: TaskKind.MEMCPY,
    Category.MEMSET: TaskKind.MEMSET,
}


@dataclass(kw_only=True)
class GpuTasks:
    """GPU tasks, stream by stream in order of start. `lane` numbers streams, split where tasks overlap."""

    event: Ints
    lane: Ints
    lanes: tuple[tuple[int, int], ...]
    """For each lane the trace's thread and which of that stream's lanes it is, from 0."""
    kind: Ints
    start_us: Floats
    duration_us: Floats
    gap_us: Floats
    launch: Ints
    """Position of the CPU task that launches it, -1 where the trace has none."""
    latency_us: Floats
    """From the end of the launch to the earliest possible start."""

    def before(self) -> Ints:
        """Position of the task before it on its lane, -1 without."""
        at = np.arange(-1, len(self.lane) - 1)
        if len(at):
            at[np.append(True, self.lane[1:] != self.lane[:-1])] = NONE
        return at

    def first_of_launch(self) -> Flags:
        """Which tasks started before all others of the same call; those of a CUDA graph share one call."""
        order = np.lexsort((self.start_us, self.launch))
        first = np.ones(len(order), np.bool_)
        first[order[1:]] = self.launch[order[1:]] != self.launch[order[:-1]]
        return first | (self.launch == NONE)


def gpu_tasks(trace: Trace, cpu: CpuTasks) -> GpuTasks:
    """Kernels, copies and sets of every stream with their launches; durations cut where rounding lets them overlap."""
    rows = np.flatnonzero(np.isin(trace.category, list(_KINDS)))
    rows = rows[np.argsort(trace.thread[rows], kind="stable")]
    part = _parts(trace.thread[rows], trace.start_us[rows], trace.start_us[rows] + trace.duration_us[rows])
    lanes, lane = np.unique(np.stack([trace.thread[rows], part], axis=1).reshape(-1, 2), axis=0, return_inverse=True)
    lane = lane.reshape(-1)
    order = np.argsort(lane, kind="stable")
    rows, lane = rows[order], lane[order]
    start, duration = trace.start_us[rows], trace.duration_us[rows].copy()
    same = lane[1:] == lane[:-1]
    duration[:-1][same] = np.minimum(duration[:-1], start[1:] - start[:-1])[same]
    collective = np.array([name.lower().startswith(("nccl", "rccl", "onecclk")) for name in trace.names], np.bool_)
    kind = np.array([_KINDS.get(Category(c), TaskKind.KERNEL) for c in range(len(Category))])[trace.category[rows]]
    kind = np.where(collective[trace.name[rows]], TaskKind.COMMUNICATION, kind)
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
        launch=_launches(trace, cpu, rows),
        latency_us=zeros.copy(),
    )


def _parts(thread: Ints, start: Floats, end: Floats) -> Ints:
    """For tasks in thread and start order, the first lane of their stream that is free when they start."""
    part = np.zeros(len(thread), np.int64)
    inside = thread[1:] == thread[:-1]
    if not (inside & (start[1:] < end[:-1] - OVERLAP_US)).any():
        # The latest end so far, not only the last task's, decides; without any overlap they are the same.
        return part
    busy: list[float] = []
    stream = NONE
    for at, (lane, begin, finish) in enumerate(zip(thread.tolist(), start.tolist(), end.tolist(), strict=True)):
        if lane != stream:
            busy, stream = [], lane
        free = [number for number, until in enumerate(busy) if until <= begin + OVERLAP_US]
        if not free:
            busy.append(0.0)
            free = [len(busy) - 1]
        part[at] = free[0]
        busy[free[0]] = finish
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
    for at in np.flatnonzero(high - low > 1):
        earlier = np.searchsorted(trace.start_us[calls[low[at] : high[at]]], trace.start_us[rows[at]], side="right")
        chosen[at] = low[at] + max(int(earlier) - 1, 0)
    found = (high > low) & (trace.correlation[rows] > 0)
    return np.where(found, cpu.task_of[calls[chosen]], NONE)


def time_launches(gpu: GpuTasks, cpu: CpuTasks, waiting: Ints) -> Flags:
    """Sets latencies of launches and gaps of streams so that the recorded starts follow from them.

    A task that its stream was still busy for waited for its predecessor: the time between them is the stream's gap.
    One that found its stream idle waited for its launch: the time since the call is the latency. What the other of
    the two would have been can't be seen; it gets the trace's typical value, or less where that would be too late.
    Tasks in `waiting`, which an event of another stream may have held back, do not count for that value. A kernel
    may start before its call returns: the call's task then ends there and the rest of it becomes its gap.

    Returns which tasks waited for something else: neither the launch nor the stream explains their start.
    """
    has_launch = gpu.launch != NONE
    _shorten_launches(gpu, cpu, has_launch)
    before = gpu.before()
    free = looked_up(gpu.start_us + gpu.duration_us, before, -np.inf)
    called = looked_up(cpu.start_us + cpu.duration_us, gpu.launch, -np.inf)
    # Clocks of GPU and CPU differ a little, so a task may seem to start before its call.
    wait, idle = np.maximum(gpu.start_us - called, 0.0), gpu.start_us - free
    from_idle = has_launch & (free <= called) & gpu.first_of_launch()
    from_idle[waiting] = False
    typical = np.full(len(wait), USUAL_LATENCY_US)
    for kind in np.unique(gpu.kind[from_idle]):
        typical[gpu.kind == kind] = np.median(wait[from_idle & (gpu.kind == kind)])
    queued = (before != NONE) & (~has_launch | (free > called + typical))
    short = idle[queued & has_launch & (idle < 10.0)]
    gap = float(np.median(short)) if len(short) else 1.0
    gpu.latency_us = np.where(queued, np.minimum(typical, wait), wait)
    gpu.latency_us[~has_launch] = 0.0
    gaps = np.where(queued, idle, np.minimum(gap, idle))
    inner = before != NONE
    gpu.gap_us[before[inner]] = gaps[inner]
    late = queued & has_launch & (idle > max(20.0, 10 * gap))
    return late | (~queued & has_launch & (wait > 3 * typical + 10.0))


def _shorten_launches(gpu: GpuTasks, cpu: CpuTasks, has_launch: Flags) -> None:
    earliest = np.full(len(cpu.start_us), np.inf)
    np.minimum.at(earliest, gpu.launch[has_launch], gpu.start_us[has_launch])
    end = cpu.start_us + cpu.duration_us
    early = np.flatnonzero(earliest < end)
    over = end[early] - np.maximum(earliest[early], cpu.start_us[early])
    cpu.duration_us[early] -= over
    cpu.gap_us[early] += over
