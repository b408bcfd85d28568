"""The memory of a step with automatic mixed precision: which of it becomes half as large, and what casts add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from daydream.graph.graph import Phase, TaskGraph
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.operators.autocast import LOWER, keeps_single
from daydream.operators.inputs import DTYPES, inputs_of, outputs_of
from daydream.passes.basis.maps import ROUNDING
from daydream.trace.trace import NONE, Trace

#: Operators that autocast runs in half precision, without their overloads, and what carries them out on a board.
_CASTING = frozenset(name.partition(".")[0] for name in LOWER) | {"cudnn_convolution", "_conv_depthwise2d"}

#: Operators that make a tensor of integers or truth values besides their result: whether that is the larger of both.
_INTEGERS_LARGER = {"max_pool2d_with_indices": True, "native_dropout": False}


def halved(graph: TaskGraph, memory: HeldMemory, single: bool) -> HeldMemory:
    """Feature maps and temporaries in half precision, and halves of weights and of the batch besides.

    What operators make that autocast keeps in float32 stays where `single` is true, and so do integers, masks, and what
    the update makes. Autocast holds the halves of weights until the backward pass has ended, those of the batch until
    the gradient of the operator that reads it is made.
    """
    trace = graph.trace
    assert trace is not None
    wide = np.array([single and keeps_single(name) for name in trace.names] or [False], np.bool_)
    of_batch = (MemoryKind.FEATURE_MAPS, MemoryKind.TEMPORARY)
    end = int(memory.moments(Phase.BACKWARD).max(initial=NONE))
    integers = _integers(trace, memory)

    def shrinks(each: Held) -> bool:
        if each.kind not in of_batch or not NONE < each.born <= end or id(each) in integers:
            return False
        return not wide[trace.name[memory.events[each.born]]]

    holdings = [replace(each, bytes=each.bytes / 2) if shrinks(each) else each for each in memory.held]
    weights = sum(each.bytes for each in memory.held if each.kind is MemoryKind.WEIGHTS)
    first = max(int(memory.moments(Phase.FORWARD).min(initial=0)), 0)
    copies = Held(bytes=weights / 2, born=first, died=max(end, first), kind=MemoryKind.WEIGHTS)
    return replace(memory, held=(*holdings, copies, *_casts(trace, memory)))


def _integers(trace: Trace, memory: HeldMemory) -> set[int]:
    """Identities of what holds no floating-point numbers: by recorded types, else by the further results of
    operators."""
    made: dict[int, list[Held]] = {}
    for each in memory.held:
        if each.born != NONE:
            made.setdefault(int(memory.events[each.born]), []).append(each)
    identities_of_integers: set[int] = set()
    for row, results in made.items():
        outputs = outputs_of(trace, row)
        sizes = {tensor.bytes for tensor in outputs if tensor.dtype not in DTYPES}
        sizes -= {tensor.bytes for tensor in outputs if tensor.dtype in DTYPES}
        identities_of_integers |= {id(each) for each in results if each.bytes in sizes}
        larger = _INTEGERS_LARGER.get(trace.text(row).rpartition("::")[2])
        if not outputs and larger is not None and len(results) > 1:
            identities_of_integers.add(id((max if larger else min)(results, key=lambda each: each.bytes)))
    return identities_of_integers


def _casts(trace: Trace, memory: HeldMemory) -> Iterator[Held]:
    """Halves of what exists before the forward pass where an operator casts it, as far as sizes tell."""
    batch = [each for each in memory.held if each.kind is MemoryKind.INPUTS]
    for moment in memory.moments(Phase.FORWARD).tolist():
        row = int(memory.events[moment])
        inputs = inputs_of(trace, row) if batch and trace.text(row).rpartition("::")[2] in _CASTING else None
        tensor = inputs.tensor(0) if inputs is not None else None
        read = [each for each in batch if tensor is not None and 0 <= each.bytes - tensor.bytes < ROUNDING]
        if tensor is None or tensor.dtype != "float" or not read:
            continue
        batch.remove(read[0])
        layer = int(memory.layer[moment])
        until = int(memory.moments(Phase.BACKWARD, (layer,)).max(initial=moment))
        yield Held(bytes=read[0].bytes / 2, born=moment, died=until, kind=MemoryKind.FEATURE_MAPS, layer=layer)
