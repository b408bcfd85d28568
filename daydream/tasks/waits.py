"""Who waits for whom: synchronising calls and waits of streams for events (thesis 4.4.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daydream.tasks.cpu import CpuTasks
from daydream.tasks.gpu import GpuTasks
from daydream.tasks.inferred_waits import InferredWaits
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace, looked_up

#: How much later than a call's return its cause may end: clocks are rounded to microseconds.
OVERRUN_US = 2.0

_DEVICE_SYNC = re.compile(r"^(cuda|hip)DeviceSynchronize$|^cuCtxSynchronize$|^cudaThreadSynchronize$")
_STREAM_SYNC = re.compile(r"^(cuda|hip)StreamSynchronize$|^cuStreamSynchronize$")
_EVENT_SYNC = re.compile(r"^(cuda|hip)EventSynchronize$|^cuEventSynchronize$")
_COPY = re.compile(r"^(cuda|hip)Mem(cpy|set)|^cuMem(cpy|set)")
_FREE = re.compile(r"^(cuda|hip)(Free|Malloc|HostAlloc|FreeHost|MallocHost|HostFree|HostMalloc)$")
_WAIT_EVENT = re.compile(r"^(cuda|hip)StreamWaitEvent$|^cuStreamWaitEvent$")
_RECORD_EVENT = re.compile(r"^(cuda|hip)EventRecord|^cuEventRecord")


@dataclass(frozen=True)
class CallWaits:
    """CPU calls that returned only when a GPU task was done, a pair an entry; one call may wait for several.

    Attributes:
        source: positions of the GPU tasks.
        call: positions of the CPU tasks that waited for them.
    """

    source: Ints
    call: Ints


@dataclass(frozen=True)
class StreamWaits:
    """GPU tasks that started only when a task of another stream was done, a pair an entry.

    Attributes:
        source: positions of the GPU tasks waited for.
        target: positions of the GPU tasks that waited.
        lag_us: from the source's end to the earliest start of the target, microseconds.
    """

    source: Ints
    target: Ints
    lag_us: Floats


@dataclass(frozen=True)
class Waits:
    """The waits of a trace, by who waits: calls of the CPU, and streams; `warnings` says how many are inferred."""

    calls: CallWaits
    streams: StreamWaits
    warnings: tuple[str, ...] = ()


def find_waits(trace: Trace, enclosing: Ints, cpu: CpuTasks, gpu: GpuTasks) -> Waits:
    """Finds every wait of the trace.

    What a call waited for follows from its kind and, where the trace records it (`cuda_sync` events), from the
    stream or event named; elsewhere from what was launched before it. A task that had not ended when the call
    returned can't be what it waited for. Lags of waits between streams are 0 here;
    :func:`daydream.tasks.lags.explain_late` sets them.
    """
    finder = _WaitFinder(trace, enclosing, cpu, gpu) if len(gpu.event) else None
    calls = list(finder.call_waits()) if finder is not None else []
    streams = list(finder.stream_waits()) if finder is not None else []
    call_source, call = np.array(calls, np.int64).reshape(-1, 2).T
    stream_source, target = np.array(streams, np.int64).reshape(-1, 2).T
    stream_waits = StreamWaits(stream_source, target, np.zeros(len(target)))
    return Waits(CallWaits(call_source, call), stream_waits, finder.inferences() if finder is not None else ())


def call_ends(trace: Trace, cpu: CpuTasks) -> Floats:
    """When each CPU task's event ended, or the next of its thread started, microseconds."""
    event = cpu.event
    end = np.where(event == NONE, cpu.start_us, looked_up(trace.start_us + trace.duration_us, event, 0.0))
    after = cpu.following()
    return np.where(after == NONE, end, np.minimum(end, cpu.start_us[after]))


@dataclass(frozen=True)
class _Launched:
    """GPU tasks in the order in which they were launched: call times, positions, and lanes."""

    called_us: Floats
    position: Ints
    lane: Ints

    def last_before(self, time_us: float, lanes: Ints | None = None) -> list[int]:
        """The last task of each lane (or of each of these) launched before this time."""
        until = int(np.searchsorted(self.called_us, time_us))
        tasks = []
        for lane in self._lanes if lanes is None else lanes.tolist():
            entries = self._entries(lane)
            count = np.searchsorted(entries, until)
            if count:
                tasks.append(int(self.position[entries[count - 1]]))
        return tasks

    def first_after(self, time_us: float, lane: int) -> int:
        """The first task of a lane launched at this time or later, -1 without."""
        entries = self._entries(lane)
        place = np.searchsorted(entries, np.searchsorted(self.called_us, time_us))
        return int(self.position[entries[place]]) if place < len(entries) else NONE

    def _entries(self, lane: int) -> Ints:
        return self._lanes.get(lane, np.empty(0, np.int64))

    @cached_property
    def _lanes(self) -> dict[int, Ints]:
        """Entries of these columns by lane, lanes in ascending order."""
        return {lane: np.flatnonzero(self.lane == lane) for lane in np.unique(self.lane).tolist()}


class _WaitFinder:
    """The trace as the two kinds of waits look at it."""

    def __init__(self, trace: Trace, enclosing: Ints, cpu: CpuTasks, gpu: GpuTasks) -> None:
        self.trace, self.cpu, self.gpu = trace, cpu, gpu
        self.unrecorded = InferredWaits(trace, enclosing, cpu, gpu)
        self.calls_without_record = self.pairs_without_record = 0
        launched = np.flatnonzero(gpu.launch != NONE)
        called = cpu.start_us[gpu.launch[launched]]
        order = np.argsort(called, kind="stable")
        self.launched = _Launched(called[order], launched[order], gpu.lane[launched[order]])
        self.ends = gpu.start_us + gpu.duration_us
        self.returned = call_ends(trace, cpu)
        self.syncs = _recorded_syncs(trace)
        self.records = _record_times(trace, cpu)
        threads = [trace.threads[thread] for thread, _ in gpu.lanes]
        self.streams = np.array([thread.number for thread in threads], np.int64)
        self.devices = np.array([thread.device for thread in threads], np.int64)

    # What the trace itself says of a wait

    def recorded_sync(self, call: int) -> dict[str, object]:
        """Wait of a call as the trace records it; empty where it doesn't."""
        return self.syncs.get(int(self.trace.correlation[self.cpu.event[call]]), {})

    def recorded_lanes(self, sync: dict[str, object], key: str) -> Ints:
        """The lanes of the stream that `sync` names under this key; streams of two devices may share a number."""
        stream, device = _number(sync.get(key)), _number(sync.get("device"))
        fits = (self.streams == stream) & (stream != NONE)
        return np.flatnonzero(fits & ((self.devices == device) | (device == NONE)))

    def event_recorded_us(self, sync: dict[str, object]) -> float | None:
        """When the event that was waited for had been recorded, if the trace says so."""
        return self.records.get(_number(sync.get("wait_on_cuda_event_record_corr_id")))

    def inferences(self) -> tuple[str, ...]:
        """A sentence where waits were inferred from order and starts, since the trace has no record of their events."""
        if not self.calls_without_record:
            return ()
        return (
            f"{self.calls_without_record} waits between streams without a record of their event (cudaEventRecord):"
            f" whom {self.pairs_without_record} wait for is inferred from the order of calls and from what starts when",
        )

    # Calls

    def call_waits(self) -> Iterator[tuple[int, int]]:
        """Pairs (GPU task, CPU task) of calls that returned only when the GPU was done."""
        yield from self._device_syncs()
        yield from self._named_syncs(_STREAM_SYNC, "stream")
        yield from self._named_syncs(_EVENT_SYNC, "wait_on_stream")
        yield from self._copies()
        yield from self._frees()

    def _device_syncs(self) -> Iterator[tuple[int, int]]:
        """Calls that wait for everything launched before them."""
        for call in _runtime_tasks(self.trace, self.cpu, _DEVICE_SYNC).tolist():
            for source in self._done_at_return(call, float(self.cpu.start_us[call]), None):
                yield source, call

    def _named_syncs(self, pattern: re.Pattern[str], stream_key: str) -> Iterator[tuple[int, int]]:
        """Calls that wait for one stream or event, which `cuda_sync` events name under `stream_key`."""
        for call in _runtime_tasks(self.trace, self.cpu, pattern).tolist():
            sync = self.recorded_sync(call)
            lanes, recorded_us = self.recorded_lanes(sync, stream_key), self.event_recorded_us(sync)
            called_us = float(self.cpu.start_us[call])
            begin_us = called_us if recorded_us is None else min(called_us, recorded_us)
            sources = self._done_at_return(call, begin_us, lanes if len(lanes) else None)
            if not len(lanes) and sources:
                # Nothing says which stream: the one that was busy last fits the return best.
                sources = [max(sources, key=lambda source: self.ends[source])]
            for source in sources:
                yield source, call

    def _done_at_return(self, call: int, launched_before_us: float, lanes: Ints | None) -> list[int]:
        """The last task of each lane launched before this time, if it had ended when the call returned."""
        latest_us = self.returned[call] + OVERRUN_US
        return [
            source for source in self.launched.last_before(launched_before_us, lanes) if self.ends[source] <= latest_us
        ]

    def _copies(self) -> Iterator[tuple[int, int]]:
        """Copies that held back their own call: pageable memory, or to the host."""
        gpu = self.gpu
        # Copies within the device return at once.
        crossing = ~np.array(["DtoD" in name or "Memset" in name for name in self.trace.names], np.bool_)
        calls = set(_runtime_tasks(self.trace, self.cpu, _COPY).tolist())
        for task in np.flatnonzero((gpu.launch != NONE) & crossing[self.trace.name[gpu.event]]).tolist():
            call = int(gpu.launch[task])
            if call in calls and gpu.start_us[task] < self.ends[task] <= self.returned[call] + OVERRUN_US:
                yield task, call

    def _frees(self) -> Iterator[tuple[int, int]]:
        """Allocations and frees, which wait for what runs."""
        for call in _runtime_tasks(self.trace, self.cpu, _FREE).tolist():
            called_us = self.cpu.start_us[call]
            for source in self.launched.last_before(called_us):
                if called_us < self.ends[source] <= self.returned[call]:
                    yield source, call

    # Streams

    def stream_waits(self) -> Iterator[tuple[int, int]]:
        """Pairs of GPU tasks of two streams from `cudaStreamWaitEvent`, recorded or, in older traces, inferred."""
        if len(self.gpu.lanes) < 2:
            return
        record_times = np.array(sorted(self.records.values()))
        by_thread = _launches_by_thread(self.cpu, self.gpu, self.launched)
        pairs: dict[tuple[int, int], None] = {}
        for call in _runtime_tasks(self.trace, self.cpu, _WAIT_EVENT).tolist():
            waits = self._recorded_pairs(call)
            if waits is None:
                waits = self._inferred_pairs(call, record_times, by_thread)
                if not any(self._possible(*pair) for pair in waits):
                    # The latest record was of another event.
                    waits = [pair] if (pair := self.unrecorded.by_starts(float(self.cpu.start_us[call]))) else []
            pairs |= dict.fromkeys(waits)
        yield from (pair for pair in pairs if self._possible(*pair))

    def _possible(self, source: int, target: int) -> bool:
        """True if a task can have waited for another: what had not ended when it started was not waited for."""
        if target == NONE or source == target:
            return False
        return bool(self.ends[source] <= self.gpu.start_us[target] + OVERRUN_US)

    def _recorded_pairs(self, call: int) -> list[tuple[int, int]] | None:
        """Pairs that the trace names for a call of `cudaStreamWaitEvent`; None where it doesn't."""
        sync, called_us = self.recorded_sync(call), float(self.cpu.start_us[call])
        source_lanes, recorded_us = self.recorded_lanes(sync, "wait_on_stream"), self.event_recorded_us(sync)
        if not len(source_lanes) or recorded_us is None or "stream" not in sync:
            return None
        sources = self.launched.last_before(recorded_us, source_lanes)
        targets = [self.launched.first_after(called_us, lane) for lane in self.recorded_lanes(sync, "stream").tolist()]
        return [(source, target) for target in targets for source in sources]

    def _inferred_pairs(
        self, call: int, record_times: Floats, by_thread: dict[int, tuple[Floats, Ints]]
    ) -> list[tuple[int, int]]:
        """The likely pair of a call of `cudaStreamWaitEvent` in a trace that does not name the streams.

        The waiting stream is that of the next launch of the calling thread, the event that of the latest record
        before the wait on another stream; without record :class:`daydream.tasks.inferred_waits.InferredWaits` says.
        """
        called_us = float(self.cpu.start_us[call])
        if not len(record_times) or record_times[0] > called_us:
            pair = self.unrecorded.pair(call)
            self.calls_without_record += 1
            self.pairs_without_record += pair is not None
            return [pair] if pair is not None else []
        launched_us, tasks = by_thread.get(int(self.cpu.thread[call]), (np.empty(0), np.empty(0, np.int64)))
        following = int(np.searchsorted(launched_us, called_us))
        if following == len(launched_us):
            return []
        target = int(tasks[following])
        recorded_us = float(record_times[np.searchsorted(record_times, called_us, side="right") - 1])
        lane = self.gpu.lane
        others = [source for source in self.launched.last_before(recorded_us) if lane[source] != lane[target]]
        if not others:
            return []
        return [(max(others, key=lambda source: self.cpu.start_us[self.gpu.launch[source]]), target)]


def _recorded_syncs(trace: Trace) -> dict[int, dict[str, object]]:
    """Arguments of `cuda_sync` events, by the correlation of the call."""
    rows = np.flatnonzero(trace.category == Category.SYNC)
    return {int(trace.correlation[row]): trace.arguments[row] for row in rows if trace.correlation[row] > 0}


def _number(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62:
        return value
    return NONE


def _has_name(trace: Trace, pattern: re.Pattern[str]) -> Flags:
    """For every name of the trace whether the pattern is found in it."""
    return np.array([pattern.search(name) is not None for name in trace.names], np.bool_)


def _runtime_tasks(trace: Trace, cpu: CpuTasks, pattern: re.Pattern[str]) -> Ints:
    """Positions of CPU tasks that are CUDA calls of these names, in order of time."""
    event = cpu.event
    chosen = looked_up(trace.category, event, NONE) == Category.RUNTIME
    chosen &= looked_up(_has_name(trace, pattern)[trace.name], event, False)
    tasks = np.flatnonzero(chosen)
    return tasks[np.argsort(cpu.start_us[tasks], kind="stable")]


def _record_times(trace: Trace, cpu: CpuTasks) -> dict[int, float]:
    """When each event was recorded, microseconds, by the correlation of the recording call."""
    calls = _runtime_tasks(trace, cpu, _RECORD_EVENT)
    return {int(trace.correlation[cpu.event[call]]): float(cpu.start_us[call]) for call in calls}


def _launches_by_thread(cpu: CpuTasks, gpu: GpuTasks, launched: _Launched) -> dict[int, tuple[Floats, Ints]]:
    """Call times and GPU tasks of the launches of every CPU thread, in order of time."""
    thread = cpu.thread[gpu.launch[launched.position]]
    launches = {}
    for number in np.unique(thread).tolist():
        of_thread = thread == number
        launches[number] = (launched.called_us[of_thread], launched.position[of_thread])
    return launches
