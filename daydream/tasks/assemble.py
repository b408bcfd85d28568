"""Tasks and dependencies of a trace put into one table (thesis 4.4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from daydream.graph.graph import Dependency, Mark, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.tasks.cpu import CpuTasks, Handoff
from daydream.tasks.gpu import GpuTasks
from daydream.tasks.held import Returns
from daydream.tasks.layers import LayerMap, assign_layers
from daydream.tasks.steps import Steps, span
from daydream.tasks.waits import CallWaits, StreamWaits
from daydream.trace.nesting import innermost_of
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace, looked_up

#: The task, on a thread of its own, that starts every thread at its recorded time.
TRACE_BEGINS = "trace begins"


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskPlan:
    """Everything that a graph is made of, before it stands in one table.

    Attributes:
        trace: what the tasks were made from.
        enclosing: for each row of the trace the innermost CPU event around it, -1 without.
        steps: the trace's training steps.
        cpu: CPU tasks without waiting.
        gpu: GPU tasks with gaps and latencies.
        returns: second halves of calls that wait.
        call_waits: which calls wait for which GPU tasks; the returns do the waiting.
        stream_waits: which GPU tasks wait for which of other streams.
        handoff: dependencies between CPU threads.
        clocked: CPU tasks that start by the clock.
        queue_depth: GPU tasks that may wait for their start before the next launch blocks.
        warnings: what was inferred, or remains unknown, a sentence each.
    """

    trace: Trace
    enclosing: Ints
    steps: Steps
    cpu: CpuTasks
    gpu: GpuTasks
    returns: Returns
    call_waits: CallWaits
    stream_waits: StreamWaits
    handoff: Handoff
    clocked: Flags
    queue_depth: int
    warnings: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Number of tasks: the root, CPU tasks, GPU tasks, returns."""
        return 1, len(self.cpu.start_us), len(self.gpu.start_us), len(self.returns.call)

    def column(self, root: float, of_cpu: Any, of_gpu: Any, of_returns: Any) -> Any:
        """One column of all tasks in the order of `sizes`; each part an array or one number, float if `root` is."""
        kind = np.float64 if isinstance(root, float) else np.int64
        parts = zip((root, of_cpu, of_gpu, of_returns), self.sizes, strict=True)
        return np.concatenate([np.broadcast_to(np.asarray(part, kind), (size,)) for part, size in parts])


class _Edges(NamedTuple):
    """Dependencies, an entry each: rows of the table, :class:`Dependency`, and lag in microseconds."""

    source: Ints
    target: Ints
    kind: Ints
    lag_us: Floats

    def chosen(self, which: Flags) -> _Edges:
        """The edges that `which` is true of."""
        return _Edges(self.source[which], self.target[which], self.kind[which], self.lag_us[which])


class _Lanes(NamedTuple):
    """The graph's threads, and their indices by CPU thread of the trace and by lane of the GPU tasks."""

    threads: tuple[Thread, ...]
    of_cpu: Ints
    of_gpu: Ints


def assemble(plan: TaskPlan) -> TaskGraph:
    """Puts all tasks into one table in order of time and translates every edge to its rows."""
    trace, cpu, gpu, returns = plan.trace, plan.cpu, plan.gpu, plan.returns
    lanes = _lanes(trace, gpu, polling=set(cpu.thread[plan.clocked].tolist()))
    profiler = len(lanes.threads)
    thread = plan.column(
        profiler, lanes.of_cpu[cpu.thread], lanes.of_gpu[gpu.lane], lanes.of_cpu[cpu.thread[returns.call]]
    )
    order = _order(plan, thread)
    names, name = _names(plan)
    layers = assign_layers(trace, plan.enclosing)
    recorded = plan.column(np.nan, cpu.start_us, gpu.start_us, returns.start_us)
    columns = {
        "name": name,
        "kind": plan.column(TaskKind.CPU, cpu.kind, gpu.kind, cpu.kind[returns.call]),
        "thread": thread,
        "duration_us": plan.column(0.0, cpu.duration_us, gpu.duration_us, returns.duration_us),
        "gap_us": plan.column(0.0, cpu.gap_us, gpu.gap_us, returns.gap_us),
        **_owners(plan, layers),
        "mark": plan.column(Mark.NONE, cpu.mark, Mark.NONE, Mark.NONE),
        "event": plan.column(NONE, cpu.event, gpu.event, NONE),
        "bytes": plan.column(np.nan, np.nan, trace.bytes[gpu.event], np.nan),
        "priority": plan.column(0, 0, 0, 0),
        "recorded_us": recorded,
    }
    row = np.empty(len(order), np.int64)
    row[order] = np.arange(len(order))
    (root,), cpu_rows, gpu_rows, return_rows = np.split(row, np.cumsum(plan.sizes)[:-1])
    every_edge = _edges(plan, cpu_rows, gpu_rows, return_rows)
    sound = every_edge.source < every_edge.target
    edges = every_edge.chosen(sound)
    begun = np.union1d(_first_of_threads(thread[order], root, edges.target), cpu_rows[plan.clocked])
    origin, _ = span(trace)
    return TaskGraph(
        names=names,
        threads=(*lanes.threads, Thread(kind=ThreadKind.CPU, label="profiler", number=NONE)),
        layers=layers.names,
        steps=plan.steps.steps,
        **{name: values[order] for name, values in columns.items()},
        edge_source=np.concatenate([edges.source, np.full(len(begun), root)]),
        edge_target=np.concatenate([edges.target, begun]),
        edge_kind=np.concatenate([edges.kind, np.full(len(begun), Dependency.HANDOFF)]),
        edge_lag_us=np.concatenate([edges.lag_us, np.maximum(recorded[order][begun] - origin, 0.0)]),
        queue_depth=plan.queue_depth,
        trace=trace,
        enclosing=plan.enclosing,
        warnings=(*trace.warnings, *plan.warnings, *_contradictions(sound)),
    )


def _names(plan: TaskPlan) -> tuple[tuple[str, ...], Ints]:
    """All names of tasks, and for each task the index of its own."""
    trace, cpu = plan.trace, plan.cpu
    codes = {text: code for code, text in enumerate(trace.names)}
    returned = [codes.setdefault(f"{trace.text(cpu.event[c])} (return)", len(codes)) for c in plan.returns.call]
    begins, ends, root = [codes.setdefault(text, len(codes)) for text in ("step begins", "step ends", TRACE_BEGINS)]
    of_cpu = looked_up(trace.name, cpu.event, NONE)
    of_cpu[cpu.mark == Mark.STEP_BEGIN], of_cpu[cpu.mark == Mark.STEP_END] = begins, ends
    return tuple(codes), plan.column(root, of_cpu, trace.name[plan.gpu.event], np.array(returned, np.int64))


def _owners(plan: TaskPlan, layers: LayerMap) -> dict[str, Any]:
    """Operator, layer, phase and step of every task; a GPU task has those of its launch, if the trace has it."""
    trace, cpu, gpu = plan.trace, plan.cpu, plan.gpu
    launched = gpu.launch != NONE

    def column(of_cpu: Ints, of_unlaunched: Ints) -> Any:
        of_gpu = np.where(launched, looked_up(of_cpu, gpu.launch, NONE), of_unlaunched)
        return plan.column(NONE, of_cpu, of_gpu, of_cpu[plan.returns.call])

    innermost = innermost_of(plan.enclosing, trace.category == Category.OPERATOR)
    by_external = _by_external(trace, gpu.event)
    step = np.where(cpu.mark == Mark.NONE, plan.steps.step_at(cpu.start_us), cpu.mark_step)
    return {
        "operator": column(looked_up(innermost, cpu.event, NONE), by_external),
        "layer": column(looked_up(layers.layer, cpu.event, NONE), looked_up(layers.layer, by_external, NONE)),
        "phase": column(looked_up(layers.phase, cpu.event, NONE), looked_up(layers.phase, by_external, NONE)),
        "step": column(step, plan.steps.step_at(gpu.start_us)),
    }


def _order(plan: TaskPlan, thread: Ints) -> Ints:
    """The tasks in row order: by recorded time, those of a thread in the order in which they ran."""
    cpu, gpu, returns = plan.cpu, plan.gpu, plan.returns
    # A return stands right behind its call, whatever rounding says.
    place = plan.column(-1, 2 * np.arange(plan.sizes[1]), np.arange(plan.sizes[2]), 2 * returns.call + 1)
    # Clocks of CPU and GPU differ a little: no task stands before its launch.
    called = np.maximum(gpu.start_us, looked_up(cpu.start_us, gpu.launch, -np.inf))
    return _time_order(plan.column(-1.0, cpu.start_us, called, returns.start_us), place, thread)


def _time_order(recorded: Floats, place: Ints, thread: Ints) -> Ints:
    """Rows by recorded start; those of a thread in the order of `place` even where a time was rounded."""
    by_thread = np.lexsort((place, thread))
    time = recorded[by_thread]
    # A running maximum per thread: their times are shifted so far from each other that one pass serves all of them.
    width = float(time.max(initial=0.0) - time.min(initial=0.0)) + 1.0
    shift = thread[by_thread] * width
    time = np.maximum.accumulate(time + shift) - shift
    steady = np.empty_like(recorded)
    steady[by_thread] = time
    return np.lexsort((place, thread, steady))


def _lanes(trace: Trace, gpu: GpuTasks, polling: set[int]) -> _Lanes:
    """The CPU threads of a trace, of which `polling` only look at something by the clock, and the lanes of its GPUs."""
    threads: list[Thread] = []
    of_cpu = np.full(len(trace.threads), NONE)
    for index, recorded in enumerate(trace.threads):
        if not recorded.is_stream:
            of_cpu[index] = len(threads)
            threads.append(
                Thread(
                    kind=ThreadKind.CPU,
                    label=recorded.label or f"thread {recorded.number}",
                    number=recorded.number,
                    device=NONE,
                    process=recorded.process,
                    polls=index in polling,
                )
            )
    of_gpu = np.arange(len(gpu.lanes)) + len(threads)
    for index, part in gpu.lanes:
        recorded = trace.threads[index]
        threads.append(
            Thread(
                kind=ThreadKind.STREAM,
                label=(recorded.label or f"stream {recorded.number}") + (f" ({part + 1})" if part else ""),
                number=recorded.number,
                device=recorded.device,
                process=recorded.process,
            )
        )
    return _Lanes(tuple(threads), of_cpu, of_gpu)


def _by_external(trace: Trace, events: Ints) -> Ints:
    """For GPU events the CPU operator with the same external id, -1 without."""
    operators = np.flatnonzero((trace.category == Category.OPERATOR) & (trace.external > 0))
    if not len(operators) or not len(events):
        return np.full(len(events), NONE)
    operators = operators[np.argsort(trace.external[operators], kind="stable")]
    keys = trace.external[operators]
    place = np.minimum(np.searchsorted(keys, trace.external[events]), len(keys) - 1)
    joined = (keys[place] == trace.external[events]) & (trace.external[events] > 0)
    return np.where(joined, operators[place], NONE)


def _edges(plan: TaskPlan, cpu_rows: Ints, gpu_rows: Ints, return_rows: Ints) -> _Edges:
    """Launches, waits of calls, waits of streams, and hand-overs, in this order."""
    gpu, calls, streams, handoff = plan.gpu, plan.call_waits, plan.stream_waits, plan.handoff
    launched = np.flatnonzero(gpu.launch != NONE)
    # A return comes after its call on the thread, so whatever follows the call there follows the return.
    waiting_rows = return_rows[np.searchsorted(plan.returns.call, calls.call)]
    pairs = (
        (cpu_rows[gpu.launch[launched]], gpu_rows[launched]),
        (gpu_rows[calls.source], waiting_rows),
        (gpu_rows[streams.source], gpu_rows[streams.target]),
        (cpu_rows[handoff.source], cpu_rows[handoff.target]),
    )
    kinds = (Dependency.LAUNCH, Dependency.SYNC, Dependency.SYNC, Dependency.HANDOFF)
    return _Edges(
        source=np.concatenate([source for source, _ in pairs]),
        target=np.concatenate([target for _, target in pairs]),
        kind=np.repeat(kinds, [len(source) for source, _ in pairs]),
        lag_us=np.concatenate([gpu.latency_us[launched], np.zeros(len(calls.call)), streams.lag_us, handoff.lag_us]),
    )


def _contradictions(sound: Flags) -> tuple[str, ...]:
    """A warning about edges that are not sound; empty where all are."""
    wrong = int((~sound).sum())
    if not wrong:
        return ()
    return (f"{wrong} dependenc{'y' if wrong == 1 else 'ies'} that the recorded times contradict, left out",)


def _first_of_threads(thread: Ints, root: int, target: Ints) -> Ints:
    """Rows that are first on their thread and that no edge releases; the root itself is not among them."""
    _, first = np.unique(thread, return_index=True)
    return np.setdiff1d(first, np.append(target, root))
