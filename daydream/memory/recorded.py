"""Memory of a recording: its allocations paired with their frees, and whose they are.

Every allocation and every free is a moment. :class:`daydream.memory.footprint.Footprint` counts in moments here where
it counts in operators for captured steps, so that both are printed and drawn alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daydream.graph.graph import Phase
from daydream.memory.allocator import CachingAllocator
from daydream.memory.footprint import Allocation, Footprint, MemoryKind, Replayed
from daydream.tasks.layers import LayerMap, assign_layers
from daydream.tasks.steps import find_steps
from daydream.trace.nesting import CPU_CATEGORIES, enclosing_events, innermost_of, outermost
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, MemoryEvents, Trace

#: Operators whose libraries ask for scratch memory: what is allocated and freed inside one is workspace.
_WITH_WORKSPACE = re.compile(
    r"^aten::(\w*conv\w*|\w*(cudnn|miopen|mkldnn)_\w+|mm|addmm|bmm|baddbmm|_scaled_mm|_addmm_activation)$"
)
_ZERO_GRAD = re.compile(r"zero_grad$")


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """A training step among the moments of a recording.

    Attributes:
        index: of the step in the graph.
        name: ``ProfilerStep#5``.
        begin, end: its first moment, and that behind its last.
        begin_us: when it began, microseconds from the trace's first event.
        start_bytes: in use when it begins, of what the recording knows.
        peak: the moment behind which most is in use; -1 where nothing is allocated in it.
        peak_bytes: in use then.
    """

    index: int
    name: str
    begin: int
    end: int
    begin_us: float
    start_bytes: int
    peak: int
    peak_bytes: int

    @property
    def above_start(self) -> int:
        """Bytes of the peak above what was in use when the step began."""
        return self.peak_bytes - self.start_bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedMemory:
    """The memory of a device in a recording.

    Attributes:
        device: its number, -1 for the host.
        time_us: of every moment, microseconds from the trace's first event.
        thread: of every moment, index into the trace's threads, -1 where that is unknown.
        footprint: what is held from moment to moment, as far as the recording saw it allocated or freed.
        layers: names that the allocations' ``module`` points at.
        before_bytes: in use before the recording and never freed in it: weights and optimizer states as a rule; None
            where the trace does not tell.
        reserved: bytes that the allocator held behind every moment, -1 where not recorded.
        steps: in their order.
        by_address: whether frees were paired by addresses; else by sizes, the latest of a size first.
    """

    device: int
    time_us: Floats
    thread: Ints
    footprint: Footprint
    layers: tuple[str, ...]
    before_bytes: int | None
    reserved: Ints
    steps: tuple[StepMemory, ...]
    by_address: bool

    @property
    def title(self) -> str:
        """The device in words."""
        return "the CPU" if self.device == NONE else f"GPU {self.device}"

    @cached_property
    def by_kind(self) -> dict[MemoryKind, Ints]:
        """Bytes behind every moment by kind, of the kinds that there are."""
        curves = {kind: self.footprint.by_kind(kind) for kind in MemoryKind}
        return {kind: curve for kind, curve in curves.items() if curve.any()}

    def kinds_at(self, moment: int) -> dict[MemoryKind, int]:
        """Bytes held behind a moment by kind, of the kinds that there are; -1 is before the recording."""
        if moment == NONE:
            existing = [each for each in self.footprint.held if each.born == NONE]
            sizes = {kind: sum(each.bytes for each in existing if each.kind is kind) for kind in self.by_kind}
        else:
            sizes = {kind: int(curve[moment]) for kind, curve in self.by_kind.items()}
        return {kind: size for kind, size in sizes.items() if size}

    @cached_property
    def replayed(self) -> Replayed | None:
        """PyTorch's caching allocator on the same sequence, begun empty but for what was in use; None for the host."""
        return _replayed(self) if self.device != NONE else None


def recorded_memory(trace: Trace) -> tuple[RecordedMemory, ...]:
    """The memory of every GPU that a trace tells allocations of; the host's where it tells of no other."""
    memory = trace.memory
    if memory is None:
        return ()
    devices = np.unique(memory.device[memory.device != NONE]).tolist() or [NONE]
    calls = _Calls(trace)
    return tuple(_of_device(trace, calls, memory, device) for device in devices)


class _Calls:
    """Activity by time: operators around moments, layers and phases, and where phases follow each other."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.enclosing = enclosing_events(trace)
        self.map: LayerMap = assign_layers(trace, self.enclosing)
        self.end_us = trace.start_us + trace.duration_us
        self.scratch = innermost_of(self.enclosing, self._named(_WITH_WORKSPACE))
        self.zero_grad = innermost_of(self.enclosing, self._named(_ZERO_GRAD))
        self.upload = self._uploads()
        marked = find_steps(trace, self.enclosing)
        self.steps, threads = marked.steps, marked.thread
        self.begin_us = marked.begin_us if len(threads) else np.array([-np.inf])
        phase, operator = self.map.phase, trace.category == Category.OPERATOR
        # Threads that load data have operators of their own while the backward pass runs.
        stepping = np.isin(trace.thread, threads) if len(threads) else np.full(len(trace), True)
        self.forward_us = trace.start_us[operator & (phase == Phase.FORWARD)]
        self.backward_us = trace.start_us[operator & (phase == Phase.BACKWARD)]
        self.other_us = trace.start_us[operator & (phase != Phase.BACKWARD) & stepping]

    def _named(self, pattern: re.Pattern[str]) -> Flags:
        """Operators and ranges of such a name."""
        trace = self.trace
        named = np.array([pattern.search(name) is not None for name in trace.names], np.bool_)[trace.name]
        return named & np.isin(trace.category, (Category.OPERATOR, Category.ANNOTATION))

    def _uploads(self) -> Ints:
        """For each row the outermost operator around it where that copies from the host to a GPU, -1 elsewhere."""
        trace = self.trace
        operator = trace.category == Category.OPERATOR
        copies = np.array(["HtoD" in name for name in trace.names], np.bool_)[trace.name]
        copied = np.unique(trace.correlation[copies & (trace.category == Category.MEMCPY)])
        calls = (trace.category == Category.RUNTIME) & np.isin(trace.correlation, copied[copied != NONE])
        owner = outermost(self.enclosing, operator)
        around = innermost_of(self.enclosing, operator)
        top = np.where(around == NONE, NONE, owner[around])
        return np.where(np.isin(top, top[calls]), top, NONE)

    def step_of(self, time_us: Floats) -> Ints:
        """The step that each time is in; what comes before the first counts for that."""
        return np.maximum(np.searchsorted(self.begin_us, time_us, side="right") - 1, 0)

    def innermost(self, time_us: Floats, thread: Ints) -> Ints:
        """The innermost CPU event around each moment on its thread, -1 without."""
        trace, around = self.trace, np.full(len(time_us), NONE)
        on_cpu = np.isin(trace.category, CPU_CATEGORIES)
        for lane in np.unique(thread[thread != NONE]).tolist():
            moments, rows = np.flatnonzero(thread == lane), np.flatnonzero(on_cpu & (trace.thread == lane))
            last = np.searchsorted(trace.start_us[rows], time_us[moments], side="right") - 1
            around[moments] = np.where(last < 0, NONE, rows[last] if len(rows) else NONE)
        # One level at a time out of what has ended.
        over = np.flatnonzero(around != NONE)
        while len(over):
            over = over[self.end_us[around[over]] < time_us[over]]
            around[over] = self.enclosing[around[over]]
            over = over[around[over] != NONE]
        return around


def _of_device(trace: Trace, calls: _Calls, memory: MemoryEvents, device: int) -> RecordedMemory:
    rows = np.flatnonzero(memory.device == device)
    time_us, size, address = memory.time_us[rows], memory.bytes[rows], memory.address[rows]
    pairs = list(_pairs(size.tolist(), address.tolist()))
    footprint = _footprint(calls, time_us, memory.thread[rows], pairs)
    allocated = footprint.allocated
    total = int(memory.allocated[rows[0]])
    # The host's total counts from the profiler's first begin.
    before = max(total - int(allocated[0]), 0) if total != NONE else 0 if device == NONE else None
    return RecordedMemory(
        device=device,
        time_us=time_us,
        thread=memory.thread[rows],
        footprint=footprint,
        layers=calls.map.names,
        before_bytes=before,
        reserved=memory.reserved[rows],
        steps=tuple(_steps(calls, time_us, allocated, footprint)),
        by_address=bool((address != NONE).all()),
    )


@dataclass(frozen=True)
class _Pair:
    """An allocation: bytes, its moment (-1 before the recording) and that of its free (the last one + 1 without)."""

    bytes: int
    born: int
    freed: int


def _pairs(sizes: list[int], addresses: list[int]) -> Iterator[_Pair]:
    """Allocations with their frees: by address, without addresses the latest of the same size.

    What is freed without having been allocated existed before. An address that is allocated again without a free in
    between, of which the event was lost, was free by then.
    """
    waiting: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for moment, (size, address) in enumerate(zip(sizes, addresses, strict=True)):
        has_address = address != NONE
        same = waiting.setdefault((has_address, address if has_address else abs(size)), [])
        if size > 0:
            if has_address and same:
                yield _Pair(*same.pop(), moment)
            same.append((size, moment))
        elif same:
            yield _Pair(*same.pop(), moment)
        else:
            yield _Pair(-size, NONE, moment)
    for same in waiting.values():
        for size, moment in same:
            yield _Pair(size, moment, len(sizes))


def _footprint(calls: _Calls, time_us: Floats, thread: Ints, pairs: list[_Pair]) -> Footprint:
    """The allocations with kind and layer, in the order in which they are made."""
    pairs = sorted(pairs, key=lambda pair: (pair.born, pair.freed))
    born = np.array([pair.born for pair in pairs], np.int64)
    freed = np.array([pair.freed for pair in pairs], np.int64)
    around = calls.innermost(time_us, thread)
    kinds = _kinds(calls, time_us, around, born, freed)
    rows = np.where(born == NONE, NONE, around[born])
    module = np.where(rows == NONE, NONE, calls.map.layer[rows])
    allocations = [
        # It is held up to the moment before the one that frees it.
        Allocation(pair.bytes, pair.born, pair.freed - 1, kind, layer)
        for pair, kind, layer in zip(pairs, kinds, module.tolist(), strict=True)
    ]
    return Footprint(len(time_us), tuple(allocations))


def _kinds(calls: _Calls, time_us: Floats, around: Ints, born: Ints, freed: Ints) -> list[MemoryKind]:
    """Kind of each allocation, by when it is made and how long it lives.

    Workspace is freed by the operator that asked for it, inputs are copied from the host or are there before the
    forward pass. What the forward pass makes and the backward pass finds are feature maps, what the backward pass
    leaves behind are gradients, what the update leaves behind are states.
    """
    before = born == NONE
    row = np.where(before, NONE, around[born])
    begin, end = np.where(before, -np.inf, time_us[born]), np.append(time_us, np.inf)[freed]
    next_step = np.append(calls.begin_us, np.inf)[calls.step_of(begin) + 1]

    def of(column: Ints, rows: Ints) -> Ints:
        return np.where(rows == NONE, NONE, column[rows])

    def lasts_until(times: Floats) -> Flags:
        """Which are still held when the next operator of some begins within the step."""
        following = np.append(times, np.inf)[np.searchsorted(times, begin, side="right")]
        return (following <= end) & (following < next_step)

    phase, scratch, upload = of(calls.map.phase, row), of(calls.scratch, row), of(calls.upload, row)
    outside = (phase == Phase.NONE) & ~before
    dropped = before & (of(calls.zero_grad, of(np.append(around, NONE), freed)) != NONE)
    rules: list[tuple[MemoryKind, Flags]] = [
        (MemoryKind.WORKSPACE, (scratch != NONE) & (end <= calls.end_us[scratch])),
        (MemoryKind.INPUTS, (upload != NONE) & (end > calls.end_us[upload])),
        (MemoryKind.INPUTS, outside & lasts_until(calls.forward_us)),
        (MemoryKind.FEATURE_MAPS, (phase == Phase.FORWARD) & lasts_until(calls.backward_us)),
        (MemoryKind.GRADIENTS, (phase == Phase.BACKWARD) & (lasts_until(calls.other_us) | (end >= next_step))),
        (MemoryKind.GRADIENTS, dropped),
        (MemoryKind.OPTIMIZER, (phase == Phase.UPDATE) & (end >= next_step)),
    ]
    codes = np.select([rule for _, rule in rules], range(len(rules)), len(rules))
    kinds = [*(kind for kind, _ in rules), MemoryKind.TEMPORARY]
    return [kinds[code] for code in codes.tolist()]


def _steps(calls: _Calls, time_us: Floats, allocated: Ints, footprint: Footprint) -> Iterator[StepMemory]:
    """Every step, up to the begin of the next."""
    bounds = np.append(np.searchsorted(time_us, calls.begin_us), len(time_us)).tolist()
    existing = sum(each.bytes for each in footprint.held if each.born == NONE)
    for index, step in enumerate(calls.steps):
        begin, end = bounds[index], bounds[index + 1]
        start = int(allocated[begin - 1]) if begin else existing
        inside = allocated[begin:end]
        peak = begin + int(inside.argmax()) if len(inside) else NONE
        yield StepMemory(
            index=index,
            name=step.name,
            begin=begin,
            end=end,
            begin_us=max(float(calls.begin_us[index]), 0.0),
            start_bytes=start,
            peak=peak,
            peak_bytes=max(int(inside.max(initial=0)), start),
        )


def _replayed(memory: RecordedMemory) -> Replayed:
    allocator = CachingAllocator()
    if memory.before_bytes:
        allocator.allocate(memory.before_bytes)
    frees: dict[int, list[Allocation]] = {}
    births: dict[int, Allocation] = {}
    blocks = {}
    for each in memory.footprint.held:
        if each.born == NONE:
            blocks[id(each)] = allocator.allocate(each.bytes)
        else:
            births[each.born] = each
        frees.setdefault(each.died + 1, []).append(each)
    curves = []
    for moment in range(memory.footprint.operators):
        for each in frees.get(moment, ()):
            allocator.free(blocks.pop(id(each)))
        if moment in births:
            blocks[id(births[moment])] = allocator.allocate(births[moment].bytes)
        curves.append((allocator.allocated, allocator.reserved))
    columns = np.array(curves, np.int64).reshape(-1, 2)
    return Replayed(columns[:, 0], columns[:, 1], *columns.max(axis=0, initial=0).tolist())
