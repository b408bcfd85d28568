"""The memory of a step, for passes that change it: read from what the trace has, the best source first.

A predicted trace carries the storages of its capture. Memory of a recording is attached to its graph before
any pass (:mod:`daydream.memory.attached`). Of any other recording with sizes the tensors that autograd keeps are worked
out from its forward operators.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from daydream.graph.graph import Phase, TaskGraph
from daydream.graph.memory import Held, HeldMemory, MemoryKind, difference
from daydream.passes.basis.gradients import find_gradients
from daydream.passes.basis.saved import saved_tensors
from daydream.trace.nesting import innermost_of, outermost
from daydream.trace.trace import NONE, Category, Flags, Ints, Trace
from hal.support.errors import InputError

#: Bytes of an optimizer's states over those of the weights.
_STATES = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "lamb": 2, "rmsprop": 1, "adagrad": 1, "lion": 1}


def memory_of(graph: TaskGraph) -> HeldMemory | None:
    """The memory of a step as the passes so far have left it; None where the trace tells no sizes."""
    if graph.memory is not None or graph.trace is None or not len(graph.trace):
        return graph.memory
    for read in (_captured, _estimated):
        memory = read(graph, graph.trace)
        if memory is not None:
            return memory
    return None


def changed_memory(
    graph: TaskGraph, before: HeldMemory | None, after: HeldMemory | None
) -> tuple[TaskGraph, tuple[str, ...], dict[str, float] | None]:
    """The graph with its new memory, what to say about it, and the difference by kind."""
    if graph.trace is None and graph.memory is None:
        return graph, (), None
    if before is None or after is None:
        return graph, ("what that does to memory is unknown: sizes are not recorded",), None
    gain = difference(before, after)
    was = f"{before.peak_bytes / 1e6:.1f} MB"
    now = f"{after.peak_bytes / 1e6:.1f} MB instead of {was}" if gain else f"{was} as before"
    note = f"memory at the peak: {now}, {before.source}"
    return replace(graph, memory=after), (note,), gain


# Storages of a capture


def _captured(graph: TaskGraph, trace: Trace) -> HeldMemory | None:
    """Memory in a predicted trace: bytes, first and last operator, kind and module of every storage."""
    listed = trace.metadata.get("memory")
    if not isinstance(listed, list) or not listed or "predicted" not in trace.metadata:
        return None
    operators = np.flatnonzero((trace.category == Category.OPERATOR) & (trace.external > 0))
    operators = operators[np.argsort(trace.external[operators], kind="stable")]
    layers = {name: index for index, name in enumerate(graph.layers)}
    kinds = {kind.value: kind for kind in MemoryKind}
    holdings = []
    for entry in listed:
        if not (isinstance(entry, list) and len(entry) == 5 and entry[3] in kinds):
            return None
        size, born, died = (float(value) if isinstance(value, int | float) else np.nan for value in entry[:3])
        if not (np.isfinite([size, born, died]).all() and size >= 0 and NONE <= born <= died <= len(operators)):
            return None
        layer = layers.get(str(entry[4]), NONE)
        holdings.append(Held(bytes=size, born=int(born), died=int(died), kind=kinds[entry[3]], layer=layer))
    return replace(blank_memory(graph, 0, "as captured", operators), held=tuple(holdings))


def blank_memory(graph: TaskGraph, step: int, source: str, events: Ints) -> HeldMemory:
    """Moments with the phases and layers of these trace rows, in which nothing is held."""
    row = _tasks_of(graph)[events]
    phase = np.where(row == NONE, int(Phase.NONE), graph.phase[row])
    layer = np.where(row == NONE, NONE, graph.layer[row])
    return HeldMemory(step=step, source=source, events=events, phase=phase, layer=layer, held=())


def _tasks_of(graph: TaskGraph) -> Ints:
    """For every trace row its task, -1 without."""
    assert graph.trace is not None
    tasks = np.full(len(graph.trace), NONE)
    rows = np.flatnonzero(graph.event != NONE)
    tasks[graph.event[rows]] = rows
    return tasks


def chosen_step(graph: TaskGraph) -> int:
    """The last full step: the optimizer has its states by then."""
    return max((i for i, step in enumerate(graph.steps) if step.full), default=0)


def _operators(graph: TaskGraph, trace: Trace) -> tuple[Ints, Flags]:
    """Trace rows of all operators in order of start, and for each whether it is of the chosen step."""
    rows = np.flatnonzero(trace.category == Category.OPERATOR)
    rows = rows[np.argsort(trace.start_us[rows], kind="stable")]
    tasks = _tasks_of(graph)[rows]
    return rows, (tasks != NONE) & (graph.step[tasks] == chosen_step(graph))


# What every source of a recording needs


def resident(graph: TaskGraph, moments: int) -> list[Held]:
    """Memory of a recording's weights throughout, by the sizes of gradients: themselves, and states of the optimizer.

    Gradients are there throughout, too, where a step sets them to zero and does not forget them.
    """
    try:
        gradients = find_gradients(graph)
    except InputError:
        return []
    size = gradients.bytes_of(gradients.largest_step)
    sizes = [(MemoryKind.WEIGHTS, size), (MemoryKind.OPTIMIZER, states_per_weight(graph) * size)]
    if keeps_gradients(graph):
        sizes += [(MemoryKind.GRADIENTS, each.bytes) for each in gradients.steps[gradients.largest_step]]
    return [Held(bytes=each, born=NONE, died=moments, kind=kind) for kind, each in sizes if each]


def keeps_gradients(graph: TaskGraph) -> bool:
    """True if a range of ``zero_grad`` fills tensors: ``set_to_none`` was not asked for, as was usual until 2022."""
    assert graph.trace is not None
    fills, ranges = (
        np.array([pattern.search(name) is not None for name in graph.trace.names] or [False], np.bool_)
        for pattern in (re.compile(r"^aten::(_foreach_)?zero_$"), re.compile(r"zero_grad"))
    )
    around = innermost_of(graph.enclosing, ranges[graph.trace.name])
    return bool((fills[graph.trace.name] & (around != NONE)).any())


def states_per_weight(graph: TaskGraph) -> int:
    """Tensors of a weight's size that the optimizer named in the trace keeps for each.

    SGD keeps one where its update multiplies tensors in place, as momentum does.
    """
    assert graph.trace is not None
    names = graph.trace.names
    optimizer = next((hit[1] for hit in (re.match(r"Optimizer\.step#(\w+)\.step", text) for text in names) if hit), "")
    if optimizer.lower() == "sgd":
        rows = np.flatnonzero(graph.on_cpu & (graph.phase == Phase.UPDATE))
        return int(any(re.search(r"::(_foreach)?_?mul_$", graph.text(row)) for row in rows.tolist()))
    return _STATES.get(optimizer.lower(), 0)


# Estimated


def _estimated(graph: TaskGraph, trace: Trace) -> HeldMemory | None:
    """Inputs and results of forward operators that autograd keeps, and a gradient for every weight."""
    rows, inside = _operators(graph, trace)
    owner = outermost(graph.enclosing, trace.category == Category.OPERATOR)
    events = rows[inside & (owner[rows] == rows)]
    blank = blank_memory(graph, chosen_step(graph), "worked out from the sizes of operators", events)
    forward = blank.moments(Phase.FORWARD)
    moment_of = np.full(len(trace), NONE)
    moment_of[events] = np.arange(len(events))
    backward_of: dict[int, int] = {}
    last: dict[int, int] = {}
    of_step = rows[inside]
    phase = np.where(blank.phase == Phase.BACKWARD, 1, 0)
    for row in of_step[trace.sequence[of_step] >= 0].tolist():
        moment, sequence = int(moment_of[owner[row]]), int(trace.sequence[row])
        if moment != NONE and phase[moment]:
            last[sequence] = max(last.get(sequence, NONE), moment)
    for row in of_step[trace.sequence[of_step] >= 0].tolist():
        moment = int(moment_of[owner[row]])
        if moment != NONE and not phase[moment] and int(trace.sequence[row]) in last:
            backward_of[moment] = max(backward_of.get(moment, NONE), last[int(trace.sequence[row])])
    saved = saved_tensors(trace, events, forward.tolist(), backward_of)
    if not saved:
        return None
    count = len(events)
    kind = MemoryKind.FEATURE_MAPS
    holdings = [
        Held(bytes=each.bytes, born=each.born, died=each.died, kind=kind, layer=int(blank.layer[each.born]))
        for each in saved
    ]
    return replace(blank, held=(*holdings, *resident(graph, count), *_gradients(graph, blank, moment_of[owner])))


def _gradients(graph: TaskGraph, memory: HeldMemory, moment_of: Ints) -> list[Held]:
    """The gradients of the step, from where each is complete; where they are kept, it is added to one that is there."""
    try:
        of_step = find_gradients(graph).steps.get(memory.step, ())
    except InputError:
        return []
    first = int(memory.moments(Phase.BACKWARD).min(initial=len(memory.events)))
    accumulates = keeps_gradients(graph)
    holdings = []
    for gradient in of_step:
        event = int(graph.event[gradient.hook]) if gradient.hook != NONE else NONE
        born = int(moment_of[event]) if event != NONE else NONE
        born = max(born, first)
        until, kind = (born, MemoryKind.TEMPORARY) if accumulates else (len(memory.events), MemoryKind.GRADIENTS)
        holdings.append(Held(bytes=gradient.bytes, born=born, died=until, kind=kind, layer=gradient.layer))
    return holdings
