"""From a trace to its dependency graph (thesis 4.4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, Mark, Step, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.tasks.cpu import CpuTasks, Handoff, cpu_tasks, find_steps, hand_over
from daydream.tasks.gpu import GpuTasks, gpu_tasks, time_launches
from daydream.tasks.layers import LayerMap, assign_layers
from daydream.tasks.waits import Waits, call_ends, explain_late, find_waits, full_queue, join_branches
from daydream.trace.nesting import enclosing_events, innermost_of
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace, looked_up

#: The task, on a thread of its own, that starts every thread at its recorded time.
TRACE_BEGINS = "trace begins"

#: What a synchronising call costs by itself where no call of the trace shows it without waiting.
OWN_COST_US = 2.0


def build_graph(trace: Trace) -> TaskGraph:
    """The dependency graph of a trace: replayed by :func:`daydream.graph.simulate.simulate` it takes the recorded time.

    Waiting is never part of a duration: a synchronising call becomes its own cost and a second task, "(return)",
    that waits for the GPU; a launch held back by a full queue keeps the usual cost; a thread that sleeps while
    another works for it waits for that one. What remains are durations of work, gaps of busy threads, and lags.
    """
    enclosing = enclosing_events(trace)
    steps, step_rows = find_steps(trace)
    cpu = cpu_tasks(trace, enclosing, step_rows)
    gpu = gpu_tasks(trace, cpu)
    waits = find_waits(trace, cpu, gpu)
    returns = _take_waiting_off(trace, cpu, gpu, waits)
    waits.queue_depth = full_queue(trace, cpu, gpu)
    late = time_launches(gpu, cpu, np.array([target for _, target, _ in waits.streams], np.int64))
    explain_late(gpu, late, waits)
    join_branches(gpu, waits)
    handoff = hand_over(cpu, _workers(trace, cpu))
    clocked = _clocked(trace, cpu, gpu, returns)
    cpu.gap_us[clocked] = 0.0
    return _assemble(
        _Parts(
            trace=trace,
            enclosing=enclosing,
            cpu=cpu,
            gpu=gpu,
            waits=waits,
            returns=returns,
            handoff=handoff,
            clocked=clocked,
        ),
        steps,
        step_rows,
    )


def _workers(trace: Trace, cpu: CpuTasks) -> Flags:
    """Threads with operators; one with CUDA calls only polls."""
    event = cpu.event[cpu.event != NONE]
    working = event[trace.category[event] == Category.OPERATOR]
    return np.bincount(trace.thread[working], minlength=len(trace.threads)) > 0


def _clocked(trace: Trace, cpu: CpuTasks, gpu: GpuTasks, returns: _Returns) -> Flags:
    """Tasks of threads that only look at something now and then: no operator, no launch, no wait, no mark.

    They sleep by the clock between their calls (NCCL's watchdog), whatever becomes of the training.
    """
    works = _workers(trace, cpu)
    works[cpu.thread[gpu.launch[gpu.launch != NONE]]] = True
    works[cpu.thread[returns.call]] = True
    works[cpu.thread[cpu.mark != Mark.NONE]] = True
    # Where nothing at all works, as in a recording of annotations alone, nothing polls either.
    return ~works[cpu.thread] & works.any()


@dataclass
class _Returns:
    """Second halves of calls that wait: position of the call, start, duration and gap of the return."""

    call: Ints
    start_us: Floats
    duration_us: Floats
    gap_us: Floats


def _take_waiting_off(trace: Trace, cpu: CpuTasks, gpu: GpuTasks, waits: Waits) -> _Returns:
    """Cuts each waiting call into its own cost and a return that takes what was left after the GPU was done."""
    calls = np.unique(np.array([call for _, call in waits.calls], np.int64))
    ends = gpu.start_us + gpu.duration_us
    cause = np.full(len(cpu.start_us), -np.inf)
    for source, call in waits.calls:
        cause[call] = max(cause[call], ends[source])
    finish = call_ends(trace, cpu)[calls]
    waited = cause[calls] > cpu.start_us[calls]
    own = _own_costs(trace, cpu, calls, waited)
    next_start = cpu.start_us[calls] + cpu.duration_us[calls] + cpu.gap_us[calls]
    woken = np.maximum(np.minimum(cause[calls], finish), cpu.start_us[calls] + own)
    cpu.duration_us[calls] = np.where(waited, own, cpu.duration_us[calls])
    rest = np.where(waited, np.maximum(finish - woken, 0.0), 0.0)
    gap = np.maximum(next_start - finish, 0.0)
    cpu.gap_us[calls] = 0.0
    return _Returns(calls, finish - rest, rest, gap)


def _own_costs(trace: Trace, cpu: CpuTasks, calls: Ints, waited: Flags) -> Floats:
    """What these calls would have cost without waiting: the median of their namesakes that did not, or 2 µs."""
    name = trace.name[cpu.event[calls]]
    own = cpu.duration_us[calls].copy()
    for text in np.unique(name[waited]):
        free = own[(name == text) & ~waited]
        usual = float(np.median(free)) if len(free) else OWN_COST_US
        mine = (name == text) & waited
        own[mine] = np.minimum(own[mine], usual)
    return own


@dataclass(kw_only=True)
class _Parts:
    trace: Trace
    enclosing: Ints
    cpu: CpuTasks
    gpu: GpuTasks
    waits: Waits
    returns: _Returns
    handoff: Handoff
    clocked: Flags

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Number of tasks: the root, CPU tasks, GPU tasks, returns."""
        return 1, len(self.cpu.start_us), len(self.gpu.start_us), len(self.returns.call)

    def column(self, root: float, of_cpu: Any, of_gpu: Any, of_back: Any) -> Any:
        """One column of all tasks in the order of `sizes`; each part an array or one number, float if `root` is."""
        kind = np.float64 if isinstance(root, float) else np.int64
        parts = zip((root, of_cpu, of_gpu, of_back), self.sizes, strict=True)
        return np.concatenate([np.broadcast_to(np.asarray(part, kind), (size,)) for part, size in parts])


def _assemble(parts: _Parts, steps: tuple[Step, ...], step_rows: Ints) -> TaskGraph:
    """Puts all tasks into one table in order of time and translates every edge to its rows."""
    trace, cpu, gpu, returns = parts.trace, parts.cpu, parts.gpu, parts.returns
    polling = set(cpu.thread[parts.clocked].tolist())
    threads, cpu_thread, gpu_thread = _threads(trace, gpu, polling)
    lane = parts.column(
        len(threads), cpu_thread[cpu.thread], gpu_thread[gpu.lane], cpu_thread[cpu.thread[returns.call]]
    )
    order = _order(parts, lane)
    names, name_columns = _names(parts)
    layers = assign_layers(trace, parts.enclosing)
    recorded = parts.column(np.nan, cpu.start_us, gpu.start_us, returns.start_us)
    columns = {
        "name": parts.column(*name_columns),
        "kind": parts.column(TaskKind.CPU, cpu.kind, gpu.kind, cpu.kind[returns.call]),
        "thread": lane,
        "duration_us": parts.column(0.0, cpu.duration_us, gpu.duration_us, returns.duration_us),
        "gap_us": parts.column(0.0, cpu.gap_us, gpu.gap_us, returns.gap_us),
        **_owners(parts, layers, step_rows),
        "mark": parts.column(Mark.NONE, cpu.mark, Mark.NONE, Mark.NONE),
        "event": parts.column(NONE, cpu.event, gpu.event, NONE),
        "bytes": parts.column(np.nan, np.nan, trace.bytes[gpu.event], np.nan),
        "priority": parts.column(0, 0, 0, 0),
        "recorded_us": recorded,
    }
    row = np.empty(len(order), np.int64)
    row[order] = np.arange(len(order))
    (root,), of_cpu, of_gpu, of_back = np.split(row, np.cumsum(parts.sizes)[:-1])
    source, target, kind, lag = _edges(parts, of_cpu, of_gpu, of_back)
    sound = source < target
    source, target, kind, lag = source[sound], target[sound], kind[sound], lag[sound]
    begun = np.union1d(_first_of_threads(lane[order], root, target), of_cpu[parts.clocked])
    origin = trace.start_us.min(initial=0.0) if len(trace) else 0.0
    return TaskGraph(
        names=names,
        threads=(*threads, Thread(kind=ThreadKind.CPU, label="profiler", number=NONE)),
        layers=layers.names,
        steps=steps,
        **{name: values[order] for name, values in columns.items()},
        edge_source=np.concatenate([source, np.full(len(begun), root)]),
        edge_target=np.concatenate([target, begun]),
        edge_kind=np.concatenate([kind, np.full(len(begun), Dependency.HANDOFF)]),
        edge_lag_us=np.concatenate([lag, np.maximum(recorded[order][begun] - origin, 0.0)]),
        queue_depth=parts.waits.queue_depth,
        trace=trace,
        enclosing=parts.enclosing,
        warnings=(*trace.warnings, *_contradictions(sound)),
    )


def _names(parts: _Parts) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """All names of tasks, and which each task has, as :meth:`_Parts.column` takes it."""
    trace, cpu = parts.trace, parts.cpu
    names = {text: i for i, text in enumerate(trace.names)}
    of_back = [names.setdefault(f"{trace.text(cpu.event[c])} (return)", len(names)) for c in parts.returns.call]
    begins, ends, root = [names.setdefault(text, len(names)) for text in ("step begins", "step ends", TRACE_BEGINS)]
    of_cpu = looked_up(trace.name, cpu.event, NONE)
    of_cpu[cpu.mark == Mark.STEP_BEGIN], of_cpu[cpu.mark == Mark.STEP_END] = begins, ends
    return tuple(names), (root, of_cpu, trace.name[parts.gpu.event], np.array(of_back, np.int64))


def _owners(parts: _Parts, layers: LayerMap, step_rows: Ints) -> dict[str, Any]:
    """Operator, layer, phase and step of every task; a GPU task has those of its launch, if the trace has it."""
    trace, cpu, gpu = parts.trace, parts.cpu, parts.gpu
    launched = gpu.launch != NONE

    def column(of_cpu: Ints, of_unlaunched: Ints) -> Any:
        of_gpu = np.where(launched, looked_up(of_cpu, gpu.launch, NONE), of_unlaunched)
        return parts.column(NONE, of_cpu, of_gpu, of_cpu[parts.returns.call])

    innermost = innermost_of(parts.enclosing, trace.category == Category.OPERATOR)
    by_external = _by_external(trace, gpu.event)
    step = np.where(cpu.mark == Mark.NONE, _step_of(trace, step_rows, cpu.start_us), cpu.mark_step)
    return {
        "operator": column(looked_up(innermost, cpu.event, NONE), by_external),
        "layer": column(looked_up(layers.layer, cpu.event, NONE), looked_up(layers.layer, by_external, NONE)),
        "phase": column(looked_up(layers.phase, cpu.event, NONE), looked_up(layers.phase, by_external, NONE)),
        "step": column(step, _step_of(trace, step_rows, gpu.start_us)),
    }


def _order(parts: _Parts, lane: Ints) -> Ints:
    """The tasks in row order: by recorded time, those of a thread in the order in which they ran."""
    cpu, gpu, returns = parts.cpu, parts.gpu, parts.returns
    # A return stands right behind its call, whatever rounding says.
    place = parts.column(-1, 2 * np.arange(parts.sizes[1]), np.arange(parts.sizes[2]), 2 * returns.call + 1)
    # Clocks of CPU and GPU differ a little: no task stands before its launch.
    called = np.maximum(gpu.start_us, looked_up(cpu.start_us, gpu.launch, -np.inf))
    return _time_order(parts.column(-1.0, cpu.start_us, called, returns.start_us), place, lane)


def _time_order(recorded: Floats, place: Ints, lane: Ints) -> Ints:
    """Rows by recorded start; those of a thread in the order of `place` even where a time was rounded."""
    by_lane = np.lexsort((place, lane))
    time = recorded[by_lane]
    # A running maximum per lane: lanes are shifted apart so that one pass serves all of them.
    width = float(time.max(initial=0.0) - time.min(initial=0.0)) + 1.0
    shift = lane[by_lane] * width
    time = np.maximum.accumulate(time + shift) - shift
    steady = np.empty_like(recorded)
    steady[by_lane] = time
    return np.lexsort((place, lane, steady))


def _threads(trace: Trace, gpu: GpuTasks, polling: set[int]) -> tuple[tuple[Thread, ...], Ints, Ints]:
    """The graph's threads, and their indices by CPU thread of the trace and by lane."""
    found: list[Thread] = []
    cpu_index = np.full(len(trace.threads), NONE)
    for index, thread in enumerate(trace.threads):
        if not thread.is_stream:
            cpu_index[index] = len(found)
            label = thread.label or f"thread {thread.number}"
            polls = index in polling
            found.append(
                Thread(
                    kind=ThreadKind.CPU,
                    label=label,
                    number=thread.number,
                    device=NONE,
                    process=thread.process,
                    polls=polls,
                )
            )
    lane_index = np.empty(len(gpu.lanes), np.int64)
    for lane, (index, part) in enumerate(gpu.lanes):
        thread = trace.threads[index]
        lane_index[lane] = len(found)
        label = (thread.label or f"stream {thread.number}") + (f" ({part + 1})" if part else "")
        found.append(
            Thread(
                kind=ThreadKind.STREAM, label=label, number=thread.number, device=thread.device, process=thread.process
            )
        )
    return tuple(found), cpu_index, lane_index


def _by_external(trace: Trace, events: Ints) -> Ints:
    """For GPU events the CPU operator with the same external id, -1 without."""
    operators = np.flatnonzero((trace.category == Category.OPERATOR) & (trace.external > 0))
    if not len(operators) or not len(events):
        return np.full(len(events), NONE)
    operators = operators[np.argsort(trace.external[operators], kind="stable")]
    keys = trace.external[operators]
    at = np.minimum(np.searchsorted(keys, trace.external[events]), len(keys) - 1)
    return np.where((keys[at] == trace.external[events]) & (trace.external[events] > 0), operators[at], NONE)


def _step_of(trace: Trace, step_rows: Ints, time_us: Floats) -> Ints:
    """The step in which each time lies, -1 outside; 0 everywhere where the trace marks none."""
    if not len(step_rows):
        return np.zeros(len(time_us), np.int64)
    begin = trace.start_us[step_rows]
    at = np.searchsorted(begin, time_us, side="right") - 1
    inside = (at >= 0) & (time_us < (begin + trace.duration_us[step_rows])[at])
    return np.where(inside, at, NONE)


def _edges(parts: _Parts, of_cpu: Ints, of_gpu: Ints, of_back: Ints) -> tuple[Ints, Ints, Ints, Floats]:
    gpu, waits, handoff = parts.gpu, parts.waits, parts.handoff
    launched = np.flatnonzero(gpu.launch != NONE)
    back = dict(zip(parts.returns.call.tolist(), of_back.tolist(), strict=True))
    calls = np.array([(of_gpu[source], back[call]) for source, call in waits.calls], np.int64).reshape(-1, 2)
    streams = np.array(waits.streams, np.float64).reshape(-1, 3)
    pairs = streams[:, :2].astype(np.int64)
    # A return comes after its call on the thread, so whatever follows the call there follows the return.
    source = np.concatenate([of_cpu[gpu.launch[launched]], calls[:, 0], of_gpu[pairs[:, 0]], of_cpu[handoff.source]])
    target = np.concatenate([of_gpu[launched], calls[:, 1], of_gpu[pairs[:, 1]], of_cpu[handoff.target]])
    kinds = (Dependency.LAUNCH, Dependency.SYNC, Dependency.SYNC, Dependency.HANDOFF)
    kind = np.repeat(kinds, (len(launched), len(calls), len(pairs), len(handoff.source)))
    lag = np.concatenate([gpu.latency_us[launched], np.zeros(len(calls)), streams[:, 2], handoff.lag_us])
    return source, target, kind, lag


def _contradictions(sound: Flags) -> tuple[str, ...]:
    wrong = int((~sound).sum())
    if not wrong:
        return ()
    return (f"{wrong} dependenc{'y' if wrong == 1 else 'ies'} that the recorded times contradict, left out",)


def _first_of_threads(thread: Ints, root: int, target: Ints) -> Ints:
    """Rows that are first on their thread and that no edge releases; the root itself is not among them."""
    _, first = np.unique(thread, return_index=True)
    return np.setdiff1d(first, np.append(target, root))
