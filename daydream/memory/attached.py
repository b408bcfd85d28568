"""Memory of a recording attached to its graph, where what-if passes find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.memory.recorded import RecordedMemory, StepMemory, recorded_memory
from daydream.passes.basis.bytes import blank_memory, chosen_step, resident
from daydream.trace.trace import NONE, Category, Floats, Ints


def with_memory(graph: TaskGraph) -> TaskGraph:
    """The graph with the memory of its last full step, as recorded; the graph itself where none was.

    A predicted trace says more of its storages than its allocations do.
    """
    trace = graph.trace
    if graph.memory is not None or trace is None or trace.memory is None or "predicted" in trace.metadata:
        return graph
    for device in recorded_memory(trace):
        for step in device.steps:
            if step.index == chosen_step(graph) and step.peak != NONE:
                return replace(graph, memory=_of_step(graph, device, step))
    return graph


def _of_step(graph: TaskGraph, device: RecordedMemory, step: StepMemory) -> HeldMemory:
    moments = slice(step.begin, step.end)
    source = "by recorded allocations, and what was there before by the sizes of gradients"
    events = _running(graph, device.time_us[moments], device.thread[moments])
    blank = blank_memory(graph, step.index, source, events)
    additions = list(_holdings(graph, device, step))
    existing = [
        each
        for each in resident(graph, len(events))
        if not any(other.kind is each.kind and other.born == NONE for other in additions)
    ]
    return replace(blank, held=(*existing, *additions))


def _holdings(graph: TaskGraph, device: RecordedMemory, step: StepMemory) -> Iterator[Held]:
    """Memory held in the step, in its moments."""
    layers = {name: index for index, name in enumerate(graph.layers)}
    count = step.end - step.begin
    for each in device.footprint.held:
        if each.born >= step.end or each.died < step.begin:
            continue
        layer = layers.get(device.layers[each.module], NONE) if each.module != NONE else NONE
        yield Held(
            bytes=float(each.bytes),
            born=max(each.born - step.begin, NONE),
            died=min(each.died - step.begin, count),
            kind=MemoryKind(each.kind),
            layer=layer,
        )


def _running(graph: TaskGraph, times: Floats, threads: Ints) -> Ints:
    """The innermost operator around each time on its thread; else the last that began there, or anywhere."""
    trace = graph.trace
    assert trace is not None
    rows = np.flatnonzero(trace.category == Category.OPERATOR)
    rows = rows[np.argsort(trace.start_us[rows], kind="stable")]
    running = np.zeros(len(times), np.int64)
    ends = trace.start_us + trace.duration_us
    for thread in np.unique(threads).tolist():
        candidates = rows[trace.thread[rows] == thread] if thread != NONE else rows
        candidates = candidates if len(candidates) else rows
        moments = np.flatnonzero(threads == thread)
        places = np.searchsorted(trace.start_us[candidates], times[moments], side="right") - 1
        for moment, place in zip(moments.tolist(), np.maximum(places, 0).tolist(), strict=True):
            last = row = int(candidates[place])
            while row != NONE and (ends[row] < times[moment] or trace.category[row] != Category.OPERATOR):
                row = int(graph.enclosing[row])
            running[moment] = row if row != NONE else last
    return running
