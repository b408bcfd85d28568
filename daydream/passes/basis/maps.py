"""Feature maps of single calls: which memory of a step is the input of a layer, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from daydream.graph.graph import Phase, TaskGraph
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.passes.basis.idioms import LayerRun, operators_named, outermost_operator, tensors
from daydream.trace.trace import NONE

#: Allocators round sizes up by less than this.
_ROUNDING = 512


def input_bytes(graph: TaskGraph, runs: Sequence[LayerRun], operators: str) -> list[float]:
    """Bytes of the first tensor that each call's operator (a regular expression of names) got; 0 where unknown."""
    firsts = np.array([run.first for run in runs], np.int64)
    owners = outermost_operator(graph, firsts, operators_named(graph, operators))
    sizes = []
    for owner in owners.tolist():
        inputs = tensors(graph, owner)
        sizes.append(float(inputs[0].bytes) if inputs else 0.0)
    return sizes


def map_of(memory: HeldMemory, layer: int, size: float) -> Held | None:
    """The feature map of this size that is there when a layer's forward call ends, the last one made."""
    forward, backward = memory.moments(Phase.FORWARD, (layer,)), memory.moments(Phase.BACKWARD, (layer,))
    if layer == NONE or not len(forward) or not len(backward):
        return None
    end, again = int(forward.max()), int(backward.min())
    fitting = [
        each for each in memory.held
        if each.kind is MemoryKind.FEATURE_MAPS and 0 <= each.bytes - size < _ROUNDING
        and each.born <= end and each.died >= again
    ]  # fmt: skip
    return max(fitting, key=lambda each: each.born, default=None)


def without(memory: HeldMemory, gone: Iterable[Held], instead: Iterable[Held] = ()) -> HeldMemory:
    """The memory with some of it replaced."""
    identities = {id(each) for each in gone}
    kept = (each for each in memory.held if id(each) not in identities)
    return replace(memory, held=(*kept, *instead))


def encoded(memory: HeldMemory, maps: Iterable[tuple[int, float, float]]) -> HeldMemory:
    """Maps (layer, bytes, what remains of them) held smaller between forward and backward pass, whole while in use."""
    for layer, size, share in maps:
        each = map_of(memory, layer, size)
        if each is not None:
            again = int(memory.moments(Phase.BACKWARD, (layer,)).min())
            whole = replace(each, born=again, died=again, bytes=each.bytes * (1 - share), kind=MemoryKind.TEMPORARY)
            memory = without(memory, [each], [replace(each, bytes=each.bytes * share), whole])
    return memory


def away(memory: HeldMemory, maps: Iterable[tuple[int, float, int]]) -> HeldMemory:
    """Maps (layer, bytes, layer whose backward call brings them back, -1 the first of all) on the host meanwhile."""
    for layer, size, trigger in maps:
        each = map_of(memory, layer, size)
        if each is None:
            continue
        end = int(memory.moments(Phase.FORWARD, (layer,)).max())
        calls = memory.moments(Phase.BACKWARD, None if trigger == NONE else (trigger,))
        back = int(calls.min()) if len(calls) else each.died
        memory = without(memory, [each], [replace(each, died=end), replace(each, born=max(back, end + 1))])
    return memory
