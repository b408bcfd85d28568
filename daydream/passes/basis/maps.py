"""Feature maps of single calls: which memory of a step is the input of a layer, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.passes.basis.idioms import LayerRun, operators_named, outermost_operator, tensors
from daydream.trace.trace import NONE

#: Allocators round sizes up by less than this.
ROUNDING = 512


def input_bytes(graph: TaskGraph, runs: Sequence[LayerRun], operators: str) -> list[float]:
    """Bytes of the first tensor that each call's operator (a regular expression of names) got; 0 where unknown."""
    firsts = np.array([run.first for run in runs], np.int64)
    owners = outermost_operator(graph, firsts, operators_named(graph, operators))
    sizes = []
    for owner in owners.tolist():
        inputs = tensors(graph, owner)
        sizes.append(float(inputs[0].bytes) if inputs else 0.0)
    return sizes


@dataclass(frozen=True)
class Absence:
    """A map's time between its uses.

    Attributes:
        bytes: of the map.
        begin: the first moment of the forward call.
        end: its last moment.
        again: the first moment of the backward call.
    """

    bytes: float
    begin: int
    end: int
    again: int


def absence(graph: TaskGraph, memory: HeldMemory, size: float, forward: LayerRun, backward: LayerRun) -> Absence | None:
    """Time between two calls in which a map of this size is not in use; None outside the step whose memory is known."""
    if not size or forward.step != memory.step or graph.trace is None:
        return None
    operators = [int(graph.operator[row]) for row in (forward.first, forward.last, backward.first)]
    if NONE in operators:
        return None
    begins = np.maximum.accumulate(graph.trace.start_us[memory.events])
    ends = graph.trace.start_us + graph.trace.duration_us
    begin, again = np.searchsorted(begins, graph.trace.start_us[[operators[0], operators[2]]], side="left").tolist()
    end = int(np.searchsorted(begins, ends[operators[1]], side="left")) - 1
    return Absence(bytes=size, begin=begin, end=end, again=again) if 0 <= end < again else None


def map_of(memory: HeldMemory, away: Absence, *, made: bool = False) -> Held | None:
    """The feature map of this size that is held all the while: the last one made before the call.

    Args:
        memory: of the step.
        away: the map's size and calls.
        made: whether what the call itself makes counts, too.
    """
    until = away.end + 1 if made else away.begin
    fitting = [
        each for each in memory.held
        if each.kind is MemoryKind.FEATURE_MAPS and 0 <= each.bytes - away.bytes < ROUNDING
        and each.born < until and each.died >= away.again
    ]  # fmt: skip
    return max(fitting, key=lambda each: each.born, default=None)


def without(memory: HeldMemory, gone: Iterable[Held], instead: Iterable[Held] = ()) -> HeldMemory:
    """The memory with some of it replaced."""
    identities = {id(each) for each in gone}
    remaining = (each for each in memory.held if id(each) not in identities)
    return replace(memory, held=(*remaining, *instead))


def encoded(memory: HeldMemory, maps: Iterable[tuple[Absence, float]]) -> HeldMemory:
    """Maps, and what remains of each, held smaller between forward and backward call, whole while in use."""
    for away, share in maps:
        each = map_of(memory, away)
        if each is not None:
            less = replace(each, bytes=each.bytes * share)
            remainder = replace(each, born=away.again, died=away.again, bytes=each.bytes * (1 - share))
            memory = without(memory, [each], [less, replace(remainder, kind=MemoryKind.TEMPORARY)])
    return memory


def elsewhere(memory: HeldMemory, maps: Iterable[Absence]) -> HeldMemory:
    """Maps that are not held between their two calls."""
    for away in maps:
        each = map_of(memory, away)
        if each is not None:
            memory = without(memory, [each], [replace(each, died=away.end), replace(each, born=away.again)])
    return memory
