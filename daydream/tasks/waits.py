"""Who waits for whom: synchronising calls, waits of streams, and full launch queues (thesis 4.4.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from daydream.tasks.cpu import CpuTasks
from daydream.tasks.gpu import USUAL_LATENCY_US, GpuTasks
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace, looked_up

#: GPU tasks that CUDA lets wait for their start; the next launch blocks. Read off traces whose CPU runs ahead.
QUEUE_DEPTH = 1022

_DEVICE_SYNC = re.compile(r"^(cuda|hip)DeviceSynchronize$|^cuCtxSynchronize$|^cudaThreadSynchronize$")
_STREAM_SYNC = re.compile(r"^(cuda|hip)StreamSynchronize$|^cuStreamSynchronize$")
_EVENT_SYNC = re.compile(r"^(cuda|hip)EventSynchronize$|^cuEventSynchronize$")
_COPY = re.compile(r"^(cuda|hip)Mem(cpy|set)|^cuMem(cpy|set)")
_FREE = re.compile(r"^(cuda|hip)(Free|Malloc|HostAlloc|FreeHost|MallocHost|HostFree|HostMalloc)$")
_WAIT_EVENT = re.compile(r"^(cuda|hip)StreamWaitEvent$|^cuStreamWaitEvent$")
_RECORD_EVENT = re.compile(r"^(cuda|hip)EventRecord|^cuEventRecord")

#: A start this soon after an end may be its consequence.
_NEAR_US = 20.0


@dataclass
class Waits:
    """What was found: pairs (GPU position, CPU position) of calls that wait, pairs of GPU positions across streams."""

    calls: list[tuple[int, int]] = field(default_factory=list)
    streams: list[tuple[int, int, float]] = field(default_factory=list)
    queue_depth: int = QUEUE_DEPTH


@dataclass
class _Launched:
    """GPU tasks in the order in which they were launched: call times, positions, and lanes."""

    called_us: Floats
    position: Ints
    lane: Ints

    def last_before(self, time_us: float, lanes: Ints | None = None) -> list[int]:
        """Of each lane (or of these) the last task launched before this time."""
        until = int(np.searchsorted(self.called_us, time_us))
        found = []
        for lane in np.unique(self.lane) if lanes is None else lanes:
            mine = np.searchsorted(self._of(int(lane)), until)
            if mine:
                found.append(int(self.position[self._of(int(lane))[mine - 1]]))
        return found

    def first_after(self, time_us: float, lane: int) -> int:
        """The first task of a lane launched at this time or later, -1 without."""
        rows = self._of(lane)
        at = np.searchsorted(rows, np.searchsorted(self.called_us, time_us))
        return int(self.position[rows[at]]) if at < len(rows) else NONE

    def _of(self, lane: int) -> Ints:
        if not hasattr(self, "_lanes"):
            self._lanes: dict[int, Ints] = {}
        if lane not in self._lanes:
            self._lanes[lane] = np.flatnonzero(self.lane == lane)
        return self._lanes[lane]


def find_waits(trace: Trace, cpu: CpuTasks, gpu: GpuTasks) -> Waits:
    """Finds every wait of the trace.

    What a call waited for follows from its kind and, where the trace records it (`cuda_sync` events), from the
    stream or event named; elsewhere from what was launched before it. A task that had not ended when the call
    returned can't be what it waited for.
    """
    waits = Waits()
    if not len(gpu.event):
        return waits
    finder = _Finder(trace, cpu, gpu)
    finder.of_calls(waits)
    finder.of_streams(waits)
    return waits


class _Finder:
    """The trace as the two kinds of waits look at it."""

    def __init__(self, trace: Trace, cpu: CpuTasks, gpu: GpuTasks) -> None:
        self.trace, self.cpu, self.gpu = trace, cpu, gpu
        known = np.flatnonzero(gpu.launch != NONE)
        called = cpu.start_us[gpu.launch[known]]
        order = np.argsort(called, kind="stable")
        self.launched = _Launched(called[order], known[order], gpu.lane[known[order]])
        self.ends = gpu.start_us + gpu.duration_us
        self.syncs = _recorded_syncs(trace)
        self.records = _record_times(trace, cpu)
        threads = [trace.threads[thread] for thread, _ in gpu.lanes]
        self.streams = np.array([thread.number for thread in threads], np.int64)
        self.devices = np.array([thread.device for thread in threads], np.int64)

    def said(self, call: int) -> dict[str, object]:
        """What the trace records of a call's wait; empty where it doesn't."""
        return self.syncs.get(int(self.trace.correlation[self.cpu.event[call]]), {})

    def lanes(self, said: dict[str, object], key: str) -> Ints:
        """The lanes of the stream that `said` names under this key; streams of two devices may share a number."""
        stream, device = _number(said.get(key)), _number(said.get("device"))
        fits = (self.streams == stream) & (stream != NONE)
        return np.flatnonzero(fits & ((self.devices == device) | (device == NONE)))

    def recorded(self, said: dict[str, object]) -> float | None:
        """When the event that was waited for had been recorded, if the trace says so."""
        return self.records.get(_number(said.get("wait_on_cuda_event_record_corr_id")))

    def of_calls(self, waits: Waits) -> None:
        """Synchronising calls, copies and frees that returned only when the GPU was done."""
        cpu, gpu, ends = self.cpu, self.gpu, self.ends
        returned = call_ends(self.trace, cpu)
        for kind, pattern in enumerate((_DEVICE_SYNC, _STREAM_SYNC, _EVENT_SYNC)):
            for call in _runtime_tasks(self.trace, cpu, pattern):
                begin, lanes = cpu.start_us[call], None
                if kind:
                    said = self.said(call)
                    named = self.lanes(said, "stream" if kind == 1 else "wait_on_stream")
                    lanes = named if len(named) else None
                    recorded = self.recorded(said)
                    begin = begin if recorded is None else min(begin, recorded)
                sources = [s for s in self.launched.last_before(begin, lanes) if ends[s] <= returned[call] + OVERRUN_US]
                if kind and lanes is None and sources:
                    # Nothing says which stream: the one that was busy last fits the return best.
                    sources = [max(sources, key=lambda s: ends[s])]
                waits.calls += [(source, int(call)) for source in sources]
        # Copies within the device return at once.
        crossing = ~np.array(["DtoD" in name or "Memset" in name for name in self.trace.names], np.bool_)
        own = np.flatnonzero((gpu.launch != NONE) & crossing[self.trace.name[gpu.event]])
        copies = set(_runtime_tasks(self.trace, cpu, _COPY).tolist())
        for position in own:
            call = int(gpu.launch[position])
            # A copy that had ended when its call returned held the call back (pageable memory, or to the host).
            if call in copies and gpu.start_us[position] < ends[position] <= returned[call] + OVERRUN_US:
                waits.calls.append((int(position), call))
        for call in _runtime_tasks(self.trace, cpu, _FREE):
            for source in self.launched.last_before(cpu.start_us[call]):
                if cpu.start_us[call] < ends[source] <= returned[call]:
                    waits.calls.append((source, int(call)))

    def of_streams(self, waits: Waits) -> None:
        """Edges between streams from `cudaStreamWaitEvent`, recorded or, in older traces, inferred.

        Where the trace does not name the streams, the waiting one is that of the next launch of the calling thread,
        and the event that of the latest record before the wait on another stream.
        """
        cpu, gpu, launched = self.cpu, self.gpu, self.launched
        if len(gpu.lanes) < 2:
            return
        times = np.array(sorted(self.records.values()))
        by_thread = _launches_by_thread(cpu, gpu, launched)
        found: dict[tuple[int, int], None] = {}
        for call in _runtime_tasks(self.trace, cpu, _WAIT_EVENT):
            time, said = float(cpu.start_us[call]), self.said(call)
            sources, record = self.lanes(said, "wait_on_stream"), self.recorded(said)
            if len(sources) and record is not None and "stream" in said:
                for lane in self.lanes(said, "stream"):
                    target = launched.first_after(time, int(lane))
                    found |= dict.fromkeys((source, target) for source in launched.last_before(record, sources))
                continue
            called, positions = by_thread.get(int(cpu.thread[call]), (np.empty(0), np.empty(0, np.int64)))
            at = int(np.searchsorted(called, time))
            if at == len(called) or not len(times) or times[0] > time:
                continue
            target = int(positions[at])
            until = float(times[np.searchsorted(times, time, side="right") - 1])
            others = [s for s in launched.last_before(until) if gpu.lane[s] != gpu.lane[target]]
            if others:
                found[max(others, key=lambda s: cpu.start_us[gpu.launch[s]]), target] = None
        for source, target in found:
            # What had not ended when the task started can't have been waited for.
            if target != NONE and source != target and self.ends[source] <= gpu.start_us[target] + OVERRUN_US:
                waits.streams.append((source, target, 0.0))


def _recorded_syncs(trace: Trace) -> dict[int, dict[str, object]]:
    """What `cuda_sync` events say, by the correlation of the call."""
    rows = np.flatnonzero(trace.category == Category.SYNC)
    return {int(trace.correlation[row]): trace.arguments[row] for row in rows if trace.correlation[row] > 0}


def _number(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62:
        return value
    return NONE


def _names(trace: Trace, pattern: re.Pattern[str]) -> Flags:
    return np.array([pattern.search(name) is not None for name in trace.names], np.bool_)


def _runtime_tasks(trace: Trace, cpu: CpuTasks, pattern: re.Pattern[str]) -> Ints:
    """Positions of CPU tasks that are CUDA calls of these names, in order of time."""
    event = cpu.event
    chosen = looked_up(trace.category, event, NONE) == Category.RUNTIME
    chosen &= looked_up(_names(trace, pattern)[trace.name], event, False)
    rows = np.flatnonzero(chosen)
    return rows[np.argsort(cpu.start_us[rows], kind="stable")]


#: How much later than a call's return its cause may end: clocks are rounded to microseconds.
OVERRUN_US = 2.0


def call_ends(trace: Trace, cpu: CpuTasks) -> Floats:
    """When each CPU task's event ended, or the next of its thread started, microseconds."""
    event = cpu.event
    end = np.where(event == NONE, cpu.start_us, looked_up(trace.start_us + trace.duration_us, event, 0.0))
    after = cpu.following()
    return np.where(after == NONE, end, np.minimum(end, cpu.start_us[after]))


def _record_times(trace: Trace, cpu: CpuTasks) -> dict[int, float]:
    calls = _runtime_tasks(trace, cpu, _RECORD_EVENT)
    return {int(trace.correlation[cpu.event[call]]): float(cpu.start_us[call]) for call in calls}


def _launches_by_thread(cpu: CpuTasks, gpu: GpuTasks, launched: _Launched) -> dict[int, tuple[Floats, Ints]]:
    thread = cpu.thread[gpu.launch[launched.position]]
    found = {}
    for number in np.unique(thread):
        mine = thread == number
        found[int(number)] = (launched.called_us[mine], launched.position[mine])
    return found


def explain_late(gpu: GpuTasks, late: Flags, waits: Waits) -> None:
    """Turns the latency or gap of tasks that waited for another stream into the lag of that dependency.

    `late` are the tasks that neither launch nor stream explains (:func:`daydream.tasks.gpu.time_launches`). Where a
    found wait ended just before such a task started, it is the cause: the lag is what is left, and the latency or
    gap that stood in for it becomes the trace's usual one.
    """
    ends = gpu.start_us + gpu.duration_us
    before = gpu.before()
    plain = gpu.launch != NONE
    plain[[target for _, target, _ in waits.streams]] = False
    usual_latency = float(np.median(gpu.latency_us[plain])) if plain.any() else USUAL_LATENCY_US
    usual_gap = float(np.median(gpu.gap_us)) if len(gpu.gap_us) else 0.0
    for at, (source, target, _) in enumerate(waits.streams):
        lag = float(max(gpu.start_us[target] - ends[source], 0.0))
        if not late[target] or lag > _NEAR_US:
            continue
        waits.streams[at] = (source, target, lag)
        gpu.latency_us[target] = min(gpu.latency_us[target], usual_latency)
        if before[target] != NONE:
            gpu.gap_us[before[target]] = min(gpu.gap_us[before[target]], usual_gap)


def join_branches(gpu: GpuTasks, waits: Waits) -> None:
    """Dependencies inside a CUDA graph, whose tasks share one launch.

    A profiler shows the tasks of a graph but not its edges. One whose predecessor on its lane belongs to something
    else, or ended well before, is taken to follow the task of the graph that ended last before it started.
    """
    first = gpu.first_of_launch()
    ends = gpu.start_us + gpu.duration_us
    before = gpu.before()
    inner = np.flatnonzero(~first)
    alone = (before[inner] == NONE) | (gpu.launch[before[inner]] != gpu.launch[inner])
    alone |= gpu.start_us[inner] - ends[before[inner]] > _NEAR_US
    by_end = np.lexsort((ends, gpu.launch))
    # Calls are whole numbers and times shifted by them, so that one sorted column serves all graphs.
    width = float(ends.max(initial=0.0)) + 1.0
    keys = gpu.launch[by_end] * width + ends[by_end]
    for task in inner[alone]:
        at = int(np.searchsorted(keys, gpu.launch[task] * width + gpu.start_us[task] + OVERRUN_US, side="right")) - 1
        if at >= 0 and by_end[at] == task:
            at -= 1
        if at < 0 or gpu.launch[by_end[at]] != gpu.launch[task]:
            continue
        source = int(by_end[at])
        waits.streams.append((source, int(task), float(max(gpu.start_us[task] - ends[source], 0.0))))
        if before[task] != NONE:
            gpu.gap_us[before[task]] = min(gpu.gap_us[before[task]], 1.0)
    starters = np.flatnonzero(first & (gpu.launch != NONE))
    latency = np.zeros(int(gpu.launch.max(initial=0)) + 1)
    latency[gpu.launch[starters]] = gpu.latency_us[starters]
    gpu.latency_us[inner] = np.minimum(gpu.latency_us[inner], latency[gpu.launch[inner]])


def full_queue(trace: Trace, cpu: CpuTasks, gpu: GpuTasks) -> int:
    """Takes the waiting off launches that a full queue held back, and returns the queue's depth.

    Counts, for every launch, the earlier GPU tasks that had not started. Where that number reaches the depth, a
    call that took longer than usual waited: its task keeps the usual duration, the wait comes back in the
    simulation (:attr:`daydream.graph.graph.TaskGraph.queue`).
    """
    known = np.flatnonzero(gpu.launch != NONE)
    calls, first = np.unique(gpu.launch[known], return_index=True)
    if not len(calls):
        return QUEUE_DEPTH
    order = np.argsort(cpu.start_us[calls], kind="stable")
    calls, started = calls[order], np.sort(gpu.start_us[known[first]])
    waiting = np.arange(len(calls)) - np.searchsorted(started, cpu.start_us[calls])
    deepest = int(waiting.max())
    depth = max(QUEUE_DEPTH, deepest)
    if deepest < QUEUE_DEPTH - 4:
        return depth
    name = trace.name[cpu.event[calls]]
    full = waiting >= depth - 4
    for text in np.unique(name[full]):
        mine = name == text
        usual = float(np.median(cpu.duration_us[calls[mine & ~full]])) if (mine & ~full).any() else 10.0
        held = calls[mine & full]
        cpu.duration_us[held] = np.minimum(cpu.duration_us[held], usual)
    return depth
