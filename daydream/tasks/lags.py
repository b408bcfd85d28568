"""Latencies of launches, gaps of streams and lags of waits: together they explain every recorded start of a GPU task.

The three steps stand in the order in which :func:`daydream.tasks.build.build_graph` takes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from daydream.tasks.cpu import CpuTasks
from daydream.tasks.gpu import USUAL_LATENCY_US, GpuTasks
from daydream.tasks.waits import OVERRUN_US, StreamWaits
from daydream.trace.trace import NONE, Flags, Floats, Ints, looked_up

#: A start this soon after an end may be its consequence, microseconds.
_NEAR_US = 20.0

#: From a kernel's end to the start of its successor in a busy stream, where the trace shows none, microseconds.
_USUAL_GAP_US = 1.0


class TimedLaunches(NamedTuple):
    """Tasks whose recorded starts follow from launches and streams.

    Attributes:
        cpu: calls cut where their kernel had started already.
        gpu: with latencies and gaps.
        late: GPU tasks that waited for something else; neither launch nor stream explains their start.
    """

    cpu: CpuTasks
    gpu: GpuTasks
    late: Flags


def time_launches(cpu: CpuTasks, gpu: GpuTasks, waiting: Ints) -> TimedLaunches:
    """Sets latencies of launches and gaps of streams so that the recorded starts follow from them.

    A task that its stream was still busy for waited for its predecessor: the time between them is the stream's gap.
    One that found its stream idle waited for its launch: the time since the call is the latency. What the other of
    the two would have been can't be seen; it gets the trace's typical value, or less where that would be too late.
    Tasks in `waiting`, which an event of another stream may have held back, do not count for that value. A kernel
    may start before its call returns: the call's task then ends there and the rest of it becomes its gap.
    """
    launched = gpu.launch != NONE
    cpu = _shortened_launches(cpu, gpu, launched)
    before = gpu.before()
    free = looked_up(gpu.start_us + gpu.duration_us, before, -np.inf)
    called = looked_up(cpu.start_us + cpu.duration_us, gpu.launch, -np.inf)
    # Clocks of GPU and CPU differ a little, so a task may seem to start before its call.
    wait, idle = np.maximum(gpu.start_us - called, 0.0), gpu.start_us - free
    from_idle = launched & (free <= called) & gpu.first_of_launch()
    from_idle[waiting] = False
    typical = np.full(len(wait), USUAL_LATENCY_US)
    for kind in np.unique(gpu.kind[from_idle]):
        typical[gpu.kind == kind] = np.median(wait[from_idle & (gpu.kind == kind)])
    follows = before != NONE
    queued = follows & (~launched | (free > called + typical))
    short = idle[queued & launched & (idle < 10.0)]
    usual_gap = float(np.median(short)) if len(short) else _USUAL_GAP_US
    latency = np.where(launched, np.where(queued, np.minimum(typical, wait), wait), 0.0)
    gap = gpu.gap_us.copy()
    gap[before[follows]] = np.where(queued, idle, np.minimum(usual_gap, idle))[follows]
    late = queued & launched & (idle > max(20.0, 10 * usual_gap))
    late |= ~queued & launched & (wait > 3 * typical + 10.0)
    return TimedLaunches(cpu, replace(gpu, latency_us=latency, gap_us=gap), late)


def _shortened_launches(cpu: CpuTasks, gpu: GpuTasks, launched: Flags) -> CpuTasks:
    """Launch calls cut where their first kernel started; what is cut off becomes their gap."""
    earliest = np.full(len(cpu.start_us), np.inf)
    np.minimum.at(earliest, gpu.launch[launched], gpu.start_us[launched])
    end = cpu.start_us + cpu.duration_us
    early = np.flatnonzero(earliest < end)
    surplus = end[early] - np.maximum(earliest[early], cpu.start_us[early])
    duration, gap = cpu.duration_us.copy(), cpu.gap_us.copy()
    duration[early] -= surplus
    gap[early] += surplus
    return replace(cpu, duration_us=duration, gap_us=gap)


class TimedStreams(NamedTuple):
    """GPU tasks, and what they wait for on other streams: some latencies and gaps have become lags of waits."""

    gpu: GpuTasks
    waits: StreamWaits


def explain_late(gpu: GpuTasks, waits: StreamWaits, late: Flags) -> TimedStreams:
    """Turns the latency or gap of tasks that waited for another stream into the lag of that dependency.

    `late` are the tasks that neither launch nor stream explains (:func:`time_launches`). Where a wait ended just
    before such a task started, it is the cause: the lag is what is left, and the latency or gap that stood in for
    it becomes the trace's usual one.
    """
    is_simple = gpu.launch != NONE
    is_simple[waits.target] = False
    usual_latency = float(np.median(gpu.latency_us[is_simple])) if is_simple.any() else USUAL_LATENCY_US
    usual_gap = float(np.median(gpu.gap_us)) if len(gpu.gap_us) else 0.0
    lag = _lags(gpu, waits.source, waits.target)
    explained = late[waits.target] & (lag <= _NEAR_US)
    tasks = waits.target[explained]
    latency, gap = gpu.latency_us.copy(), gpu.gap_us.copy()
    latency[tasks] = np.minimum(latency[tasks], usual_latency)
    before = gpu.before()[tasks]
    before = before[before != NONE]
    gap[before] = np.minimum(gap[before], usual_gap)
    timed = replace(waits, lag_us=np.where(explained, lag, waits.lag_us))
    return TimedStreams(replace(gpu, latency_us=latency, gap_us=gap), timed)


def join_branches(gpu: GpuTasks, waits: StreamWaits) -> TimedStreams:
    """Adds the dependencies inside CUDA graphs, whose tasks share one launch.

    A profiler shows the tasks of a graph but not its edges. One whose predecessor on its lane belongs to something
    else, or ended well before, is taken to follow the task of the graph that ended last before it started.
    """
    first, ends, before = gpu.first_of_launch(), gpu.start_us + gpu.duration_us, gpu.before()
    inner = np.flatnonzero(~first)
    detached = (before[inner] == NONE) | (gpu.launch[before[inner]] != gpu.launch[inner])
    detached |= gpu.start_us[inner] - ends[before[inner]] > _NEAR_US
    pairs = _branches(gpu, ends, inner[detached])
    source, target = np.array(pairs, np.int64).reshape(-1, 2).T
    gap = gpu.gap_us.copy()
    predecessor = before[target]
    predecessor = predecessor[predecessor != NONE]
    gap[predecessor] = np.minimum(gap[predecessor], _USUAL_GAP_US)
    joined = StreamWaits(
        np.concatenate([waits.source, source]),
        np.concatenate([waits.target, target]),
        np.concatenate([waits.lag_us, _lags(gpu, source, target)]),
    )
    return TimedStreams(replace(gpu, gap_us=gap, latency_us=_graph_latencies(gpu, first)), joined)


def _branches(gpu: GpuTasks, ends: Floats, tasks: Ints) -> list[tuple[int, int]]:
    """For each of these tasks of CUDA graphs the task of its graph that ended last before it started, if any."""
    by_end = np.lexsort((ends, gpu.launch))
    # Calls are whole numbers and times shifted by them, so that one sorted column serves all graphs.
    width = float(ends.max(initial=0.0)) + 1.0
    keys = gpu.launch[by_end] * width + ends[by_end]
    pairs = []
    for task in tasks.tolist():
        latest = gpu.launch[task] * width + gpu.start_us[task] + OVERRUN_US
        place = int(np.searchsorted(keys, latest, side="right")) - 1
        if place >= 0 and by_end[place] == task:
            place -= 1
        if place >= 0 and gpu.launch[by_end[place]] == gpu.launch[task]:
            pairs.append((int(by_end[place]), task))
    return pairs


def _graph_latencies(gpu: GpuTasks, first: Flags) -> Floats:
    """Latencies in which no task of a CUDA graph waits longer for the launch than the graph's first."""
    latency = gpu.latency_us.copy()
    starters = np.flatnonzero(first & (gpu.launch != NONE))
    inner = np.flatnonzero(~first)
    of_launch = np.zeros(int(gpu.launch.max(initial=0)) + 1)
    of_launch[gpu.launch[starters]] = latency[starters]
    latency[inner] = np.minimum(latency[inner], of_launch[gpu.launch[inner]])
    return latency


def _lags(gpu: GpuTasks, source: Ints, target: Ints) -> Floats:
    """Time from the end of each source to the start of its target, 0 where they overlap, microseconds."""
    ends = gpu.start_us + gpu.duration_us
    return np.maximum(gpu.start_us[target] - ends[source], 0.0)
