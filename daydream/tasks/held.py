"""Waiting taken off CPU tasks: calls that wait are cut in two, launches before a full queue get their usual cost.

What is taken off comes back in the simulation, from whatever the call waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from daydream.tasks.cpu import CpuTasks
from daydream.tasks.gpu import GpuTasks
from daydream.tasks.waits import CallWaits, call_ends
from daydream.trace.trace import NONE, Flags, Floats, Ints, Trace

#: What a synchronising call costs by itself where no call of the trace shows it without waiting, microseconds.
LAUNCH_COST_US = 2.0

#: GPU tasks that CUDA lets wait for their start; the next launch blocks. Read off traces whose CPU runs ahead.
QUEUE_DEPTH = 1022

#: A launch with this many places left in the queue may have waited already: times are rounded.
_NEARLY_FULL = 4

#: What a launch costs where the queue was full at every call of its name, microseconds.
_USUAL_LAUNCH_US = 10.0


@dataclass(frozen=True)
class Returns:
    """Second halves of calls that wait.

    Attributes:
        call: position of the first half among the CPU tasks, each once, ascending.
        start_us: when the return began in the trace.
        duration_us: from the end of what the call waited for to the call's own end.
        gap_us: from the call's end to the next task of its thread.
    """

    call: Ints
    start_us: Floats
    duration_us: Floats
    gap_us: Floats


def cut_waiting_calls(trace: Trace, cpu: CpuTasks, gpu: GpuTasks, waits: CallWaits) -> tuple[CpuTasks, Returns]:
    """Cuts each waiting call into its own cost and a return that takes what was left after the GPU was done."""
    calls = np.unique(waits.call)
    gpu_done = np.full(len(cpu.start_us), -np.inf)
    np.maximum.at(gpu_done, waits.call, (gpu.start_us + gpu.duration_us)[waits.source])
    done, start, finish = gpu_done[calls], cpu.start_us[calls], call_ends(trace, cpu)[calls]
    waited = done > start
    cost = _costs_without_waiting(trace, cpu, calls, waited)
    woken = np.maximum(np.minimum(done, finish), start + cost)
    remainder = np.where(waited, np.maximum(finish - woken, 0.0), 0.0)
    next_start = start + cpu.duration_us[calls] + cpu.gap_us[calls]
    duration, gap = cpu.duration_us.copy(), cpu.gap_us.copy()
    duration[calls] = np.where(waited, cost, duration[calls])
    gap[calls] = 0.0
    returns = Returns(calls, finish - remainder, remainder, np.maximum(next_start - finish, 0.0))
    return replace(cpu, duration_us=duration, gap_us=gap), returns


def _costs_without_waiting(trace: Trace, cpu: CpuTasks, calls: Ints, waited: Flags) -> Floats:
    """Cost of these calls without waiting: the median of their namesakes that did not wait, or 2 µs."""
    name = trace.name[cpu.event[calls]]
    cost = cpu.duration_us[calls].copy()
    for code in np.unique(name[waited]):
        unhindered = cost[(name == code) & ~waited]
        usual = float(np.median(unhindered)) if len(unhindered) else LAUNCH_COST_US
        hindered = (name == code) & waited
        cost[hindered] = np.minimum(cost[hindered], usual)
    return cost


def release_full_queue(trace: Trace, cpu: CpuTasks, gpu: GpuTasks) -> tuple[CpuTasks, int]:
    """Takes the waiting off launches that a full queue held back; also returns the queue's depth in GPU tasks.

    Counts, for every launch, the earlier GPU tasks of its stream that had not started. Where that number reaches the
    depth, a call that took longer than usual waited: its task keeps the usual duration, the wait comes back in the
    simulation (:attr:`daydream.graph.graph.TaskGraph.queue`).
    """
    queues = list(_queues(cpu, gpu))
    deepest = max((int(waiting.max()) for _, waiting in queues), default=0)
    depth = max(QUEUE_DEPTH, deepest)
    if deepest < QUEUE_DEPTH - _NEARLY_FULL:
        return cpu, depth
    duration = cpu.duration_us.copy()
    calls = np.concatenate([each for each, _ in queues])
    full = np.concatenate([waiting for _, waiting in queues]) >= depth - _NEARLY_FULL
    name = trace.name[cpu.event[calls]]
    for code in np.unique(name[full]):
        blocked, free = calls[(name == code) & full], calls[(name == code) & ~full]
        usual = float(np.median(duration[free])) if len(free) else _USUAL_LAUNCH_US
        duration[blocked] = np.minimum(duration[blocked], usual)
    return replace(cpu, duration_us=duration), depth


def _queues(cpu: CpuTasks, gpu: GpuTasks) -> Iterator[tuple[Ints, Ints]]:
    """For each stream its launches in order of time, and how many earlier ones of its tasks had not started then."""
    streams = np.array([thread for thread, _ in gpu.lanes], np.int64)[gpu.lane]
    for stream in np.unique(streams):
        launched = np.flatnonzero((gpu.launch != NONE) & (streams == stream))
        calls, first = np.unique(gpu.launch[launched], return_index=True)
        if len(calls):
            calls = calls[np.argsort(cpu.start_us[calls], kind="stable")]
            started = np.sort(gpu.start_us[launched[first]])
            yield calls, np.arange(len(calls)) - np.searchsorted(started, cpu.start_us[calls])
