"""The memory of a step, for passes that change it: read from what the trace has, the best source first.

A predicted trace carries the storages of its capture. A recording with memory tells allocations and frees. Of any other
with sizes the tensors that autograd keeps are worked out from its forward operators.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from daydream.graph.graph import Phase, TaskGraph
from daydream.graph.memory import Bytes, Held, StepMemory, difference
from daydream.passes.basis.gradients import find_gradients
from daydream.passes.basis.saved import saved_tensors
from daydream.trace.nesting import outermost
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace
from hal.support.errors import InputError

#: Bytes of an optimizer's states over those of the weights.
_STATES = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "lamb": 2, "rmsprop": 1, "adagrad": 1, "lion": 1}


def memory_of(graph: TaskGraph) -> StepMemory | None:
    """The memory of a step as the passes so far have left it; None where the trace tells no sizes."""
    if graph.memory is not None or graph.trace is None or not len(graph.trace):
        return graph.memory
    for read in (_captured, _recorded, _estimated):
        memory = read(graph, graph.trace)
        if memory is not None:
            return memory
    return None


def changed_memory(
    graph: TaskGraph, before: StepMemory | None, after: StepMemory | None
) -> tuple[TaskGraph, tuple[str, ...], dict[str, float] | None]:
    """The graph with its new memory, what to say about it, and the difference by kind."""
    if before is None or after is None:
        return graph, ("what that does to memory is unknown: sizes are not recorded",), None
    gain = difference(before, after)
    note = (
        f"memory at the peak: {after.peak_bytes / 1e6:.1f} MB instead of {before.peak_bytes / 1e6:.1f} MB, "
        f"{before.source}"
    )
    return replace(graph, memory=after), (note,), gain


# Storages of a capture


def _captured(graph: TaskGraph, trace: Trace) -> StepMemory | None:
    """What a predicted trace says: bytes, first and last operator, kind and module of every storage."""
    listed = trace.metadata.get("memory")
    if not isinstance(listed, list) or not listed or "predicted" not in trace.metadata:
        return None
    operators = np.flatnonzero((trace.category == Category.OPERATOR) & (trace.external > 0))
    operators = operators[np.argsort(trace.external[operators], kind="stable")]
    layers = {name: index for index, name in enumerate(graph.layers)}
    kinds = {kind.value: kind for kind in Bytes}
    held = []
    for entry in listed:
        if not (isinstance(entry, list) and len(entry) == 5 and entry[3] in kinds):
            return None
        size, born, died = (float(value) if isinstance(value, int | float) else np.nan for value in entry[:3])
        if not (np.isfinite([size, born, died]).all() and size >= 0 and NONE <= born <= died <= len(operators)):
            return None
        layer = layers.get(str(entry[4]), NONE)
        held.append(Held(bytes=size, born=int(born), died=int(died), kind=kinds[entry[3]], layer=layer))
    return _memory(graph, 0, "as captured", operators, held)


def _memory(graph: TaskGraph, step: int, source: str, events: Ints, held: list[Held]) -> StepMemory:
    row = _tasks_of(graph)[events]
    phase = np.where(row == NONE, int(Phase.NONE), graph.phase[row])
    layer = np.where(row == NONE, NONE, graph.layer[row])
    return StepMemory(step=step, source=source, events=events, phase=phase, layer=layer, held=tuple(held))


def _tasks_of(graph: TaskGraph) -> Ints:
    """For every trace row its task, -1 without."""
    assert graph.trace is not None
    tasks = np.full(len(graph.trace), NONE)
    rows = np.flatnonzero(graph.event != NONE)
    tasks[graph.event[rows]] = rows
    return tasks


def _chosen_step(graph: TaskGraph) -> int:
    """The last full step: the optimizer has its states by then."""
    return max((i for i, step in enumerate(graph.steps) if step.full), default=0)


def _operators(graph: TaskGraph, trace: Trace) -> tuple[Ints, Flags]:
    """Trace rows of all operators in order of start, and for each whether it is of the chosen step."""
    rows = np.flatnonzero(trace.category == Category.OPERATOR)
    rows = rows[np.argsort(trace.start_us[rows], kind="stable")]
    tasks = _tasks_of(graph)[rows]
    return rows, (tasks != NONE) & (graph.step[tasks] == _chosen_step(graph))


# Recorded allocations


def _recorded(graph: TaskGraph, trace: Trace) -> StepMemory | None:
    """Allocations and frees that the profiler saw; every allocation of the step is a moment."""
    events: Any = getattr(trace, "memory", None)
    if events is None or not len(events.time_us):
        return None
    rows, inside = _operators(graph, trace)
    if not inside.any():
        return None
    begin, end = _span(graph, trace, rows[inside])
    chosen = _on_main_device(events)
    order = np.argsort(events.time_us[chosen], kind="stable")
    chosen = chosen[order]
    times, sizes, places = events.time_us[chosen], events.bytes[chosen], events.address[chosen]
    moments = np.flatnonzero((times >= begin) & (times < end) & (sizes > 0))
    if not len(moments):
        return None
    running = _running(graph, trace, rows, times[moments])
    blank = _memory(graph, _chosen_step(graph), "as recorded, above what was there before", running, [])
    held = [*_resident(graph, len(moments)), *_paired(blank, times, sizes, places, moments, end)]
    return replace(blank, held=tuple(held))


def _span(graph: TaskGraph, trace: Trace, rows: Ints) -> tuple[float, float]:
    """Begin and end of the chosen step: its annotation, else its operators."""
    name = graph.steps[_chosen_step(graph)].name
    marks = np.flatnonzero(np.array([text == name for text in trace.names], np.bool_)[trace.name])
    marks = marks[trace.category[marks] == Category.ANNOTATION]
    around = marks if len(marks) else rows
    ends = trace.start_us[around] + trace.duration_us[around]
    return float(trace.start_us[around].min()), float(ends.max())


def _on_main_device(events: Any) -> Ints:
    """The events of the board where there is one, else those of the host."""
    kinds = np.asarray(events.device_type)
    boards = np.flatnonzero(kinds == 1)
    return boards if len(boards) else np.flatnonzero(kinds == 0)


def _running(graph: TaskGraph, trace: Trace, rows: Ints, times: Floats) -> Ints:
    """The innermost operator at each time: the last one that has begun and has not ended."""
    ends = trace.start_us + trace.duration_us
    places = np.searchsorted(trace.start_us[rows], times, side="right") - 1
    running = []
    for place, time in zip(np.maximum(places, 0).tolist(), times.tolist(), strict=True):
        row = int(rows[place])
        while row != NONE and ends[row] < time:
            row = int(graph.enclosing[row])
        while row != NONE and trace.category[row] != Category.OPERATOR:
            row = int(graph.enclosing[row])
        running.append(row if row != NONE else int(rows[place]))
    return np.array(running, np.int64)


def _paired(blank: StepMemory, times: Floats, sizes: Floats, places: Ints, moments: Ints, end: float) -> list[Held]:
    """Every allocation of the step with its free, by address; and what earlier steps left and this one frees."""
    begin = times[moments[0]]
    alive: dict[int, int] = {}
    earlier: set[int] = set()
    made: list[tuple[float, int]] = []
    died: list[int] = []
    held: list[Held] = []
    for time, size, place in zip(times.tolist(), sizes.tolist(), places.tolist(), strict=True):
        if time >= end:
            break
        if size > 0 and time < begin:
            earlier.add(place)
        elif size > 0:
            alive[place] = len(made)
            made.append((size, len(made)))
            died.append(len(moments))
        elif place in alive:
            died[alive.pop(place)] = len(made) - 1
        elif time >= begin:
            # Gradients that are set to None, as a rule.
            held.append(Held(bytes=-size, born=NONE, died=max(len(made) - 1, 0), kind=Bytes.GRADIENTS))
    phases = _Phases.of(blank)
    spans = zip(made, died, strict=True)
    return [*held, *(phases.held(size, born, until, int(blank.layer[born])) for (size, born), until in spans)]


class _Phases:
    """Where the forward and the backward pass of a step end, and what memory of such a life holds."""

    def __init__(self, forward: tuple[int, int], backward: int, count: int) -> None:
        self._forward, self._backward, self._count = forward, backward, count

    @staticmethod
    def of(memory: StepMemory) -> _Phases:
        """Of the moments of a step."""
        forward, backward = memory.moments(Phase.FORWARD), memory.moments(Phase.BACKWARD)
        ends = (int(forward.min(initial=len(memory.events))), int(forward.max(initial=NONE)))
        return _Phases(ends, int(backward.max(initial=NONE)), len(memory.events))

    def held(self, size: float, born: int, died: int, layer: int) -> Held:
        """As :func:`daydream.memory.footprint.allocations` tells kinds."""
        first, last = self._forward
        kind = Bytes.TEMPORARY
        if born < first and died >= first:
            kind = Bytes.INPUTS
        elif born <= last < died:
            kind = Bytes.FEATURE_MAPS if self._backward != NONE else Bytes.TEMPORARY
        elif last < born <= self._backward < died:
            kind = Bytes.GRADIENTS
        elif born > self._backward and died >= self._count:
            kind = Bytes.OPTIMIZER
        return Held(bytes=size, born=born, died=died, kind=kind, layer=layer)


# What every source of a recording needs


def _resident(graph: TaskGraph, moments: int) -> list[Held]:
    """Weights and optimizer states of a recording, by the sizes of its gradients and the optimizer's name."""
    try:
        gradients = find_gradients(graph)
    except InputError:
        return []
    size = gradients.bytes_of(gradients.largest_step)
    states = states_per_weight(graph) * size
    sizes = {Bytes.WEIGHTS: size, Bytes.OPTIMIZER: states}
    return [Held(bytes=each, born=NONE, died=moments, kind=kind) for kind, each in sizes.items() if each]


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


def _estimated(graph: TaskGraph, trace: Trace) -> StepMemory | None:
    """What autograd keeps of the inputs and results of forward operators, and a gradient for every weight."""
    rows, inside = _operators(graph, trace)
    owner = outermost(graph.enclosing, trace.category == Category.OPERATOR)
    events = rows[inside & (owner[rows] == rows)]
    blank = _memory(graph, _chosen_step(graph), "worked out from the sizes of operators", events, [])
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
    kept = saved_tensors(trace, events, forward.tolist(), backward_of)
    if not kept:
        return None
    count = len(events)
    held = [
        Held(
            bytes=each.bytes, born=each.born, died=each.died, kind=Bytes.FEATURE_MAPS, layer=int(blank.layer[each.born])
        )
        for each in kept
    ]
    return replace(blank, held=(*held, *_resident(graph, count), *_gradients(graph, blank, moment_of[owner])))


def _gradients(graph: TaskGraph, memory: StepMemory, moment_of: Ints) -> list[Held]:
    """The gradients of the step, from where each is complete."""
    try:
        of_step = find_gradients(graph).steps.get(memory.step, ())
    except InputError:
        return []
    first = int(memory.moments(Phase.BACKWARD).min(initial=len(memory.events)))
    held = []
    for gradient in of_step:
        event = int(graph.event[gradient.hook]) if gradient.hook != NONE else NONE
        born = int(moment_of[event]) if event != NONE else NONE
        moment = max(born, first)
        held.append(
            Held(bytes=gradient.bytes, born=moment, died=len(memory.events), kind=Bytes.GRADIENTS, layer=gradient.layer)
        )
    return held
