"""Memory moved to the host over PCIe while the board does not need it: optimizer states, or feature maps of modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, Thread, ThreadKind, matching
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of
from daydream.passes.basis.checks import above_zero, one_of, pattern
from daydream.passes.basis.idioms import launch_latency_us, launch_us
from daydream.passes.basis.maps import without
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError

#: Bytes a microsecond at 1 GB/s.
_BYTES_PER_US = 1e3


@what_if("offload")
def offload(
    graph: TaskGraph,
    *,
    what: str = "optimizer",
    modules: str = "",
    pcie_gbps: float = 12.0,
    state_mb: float = 0.0,
) -> Outcome:
    """Optimizer states, or feature maps, kept in host memory and copied over PCIe at `pcie_gbps` GB/s.

    ``what=optimizer``: the states come to the board when the backward pass has ended, the first kernel of the update
    waits for them, and they go back behind the last one while the next step begins; its states wait for that. Their
    size is that of the trace's optimizer (Adam two tensors for each weight, SGD with momentum one), or `state_mb` MB.

    ``what=feature-maps``: a map is taken to be used last by the layer behind the one whose gradient frees it. It leaves
    the board behind that layer's last forward kernel, and is back before its first backward one; the copy starts when
    the backward call begins that comes before that. `modules` is a regular expression for layers, empty for all. The
    maps of the network's end stay, for they are needed at once.

    Copies each way have a stream of their own and a launch each of the trace's usual duration; PCIe is full duplex, and
    12 GB/s is what version 3.0 x16 gives with pinned memory. Copies of maps do not slow kernels down here.

    Raises:
        InputError: a number out of range, or nothing of known size to move.
    """
    one_of("what", what, ("optimizer", "feature-maps"))
    above_zero("pcie-gbps", pcie_gbps)
    if state_mb:
        above_zero("state-mb", state_mb)
    wanted = pattern("modules", modules)
    if not graph.on_gpu.any():
        raise InputError("offload", "nothing of this trace ran on a GPU", "record a training on a GPU")
    before = memory_of(graph)
    copies = _Copies(Edit(graph), pcie_gbps * _BYTES_PER_US)
    if what == "optimizer":
        return _states(graph, before, copies, state_mb * 1e6)
    return _maps(graph, before, copies, wanted)


class _Copies:
    """Copies between board and host, on two streams."""

    def __init__(self, edit: Edit, rate: float) -> None:
        self.edit, self.rate = edit, rate
        graph = edit.graph
        self._call_us, self._latency_us = launch_us(graph), launch_latency_us(graph)
        last = max((thread.number for thread in graph.threads if thread.kind is ThreadKind.STREAM), default=0)
        device = max((thread.device for thread in graph.threads), default=0)
        self._streams = {
            label: edit.thread(Thread(kind=ThreadKind.STREAM, label=label, number=last + number, device=device))
            for number, label in enumerate(("to host", "to board"), start=1)
        }

    def copy(self, label: str, size: float, *, behind: int, neighbour: int) -> int:
        """A copy that may start when task `behind` has ended (-1: at once), launched next to `neighbour`'s call."""
        graph = self.edit.graph
        place = {
            "phase": int(graph.phase[neighbour]),
            "layer": int(graph.layer[neighbour]),
            "step": int(graph.step[neighbour]),
        }
        side = {"after": neighbour} if behind == neighbour else {"before": neighbour}
        task = self.edit.add(
            f"offload {label}",
            TaskKind.MEMCPY,
            size / self.rate,
            thread=self._streams[label],
            bytes=size,
            **side,
            **place,
        )
        if behind != NONE:
            self.edit.depend(behind, task, Dependency.SYNC)
        call = int(graph.launch[neighbour])
        if call != NONE:
            anchor = {"after": call} if behind == neighbour else {"before": call}
            launch = self.edit.add("cudaMemcpyAsync", TaskKind.CPU, self._call_us, **anchor, **place)
            self.edit.depend(launch, task, Dependency.LAUNCH, self._latency_us)
        return task


# Optimizer states


def _states(graph: TaskGraph, memory: HeldMemory | None, copies: _Copies, size: float) -> Outcome:
    states = [] if memory is None else [each for each in memory.held if each.kind is MemoryKind.OPTIMIZER]
    size = size or sum(each.bytes for each in states)
    if not size:
        raise InputError("state-mb", "the trace does not tell the size of optimizer states", "give it in MB")
    gone = NONE
    count = 0
    for step in range(len(graph.steps)):
        update = _gpu(graph, Phase.UPDATE, step)
        backward = _gpu(graph, Phase.BACKWARD, step)
        if not len(update) or not len(backward):
            continue
        first, last = int(update.min()), int(update.max())
        arrives = copies.copy("to board", size, behind=int(backward.max()), neighbour=first)
        copies.edit.depend(arrives, first, Dependency.SYNC)
        if gone != NONE:
            copies.edit.depend(gone, arrives, Dependency.SYNC)
        gone = copies.copy("to host", size, behind=last, neighbour=last)
        count += 1
    if not count:
        raise InputError("offload", "no step has a backward pass and an update on the GPU", "record a step of training")
    after = None
    if memory is not None:
        begin = int(memory.moments(Phase.BACKWARD).max(initial=NONE)) + 1
        instead = [replace(each, born=max(each.born, begin)) for each in states]
        after = without(memory, states, [each for each in instead if each.born <= each.died])
    changed, memory_notes, gain = changed_memory(copies.edit.apply(), memory, after)
    ms = size / copies.rate / 1e3
    note = f"optimizer states of {size / 1e6:.1f} MB come and go in {count} steps: {ms:.3f} ms each way"
    return Outcome(changed, (note, *memory_notes), gain)


def _gpu(graph: TaskGraph, phase: Phase, step: int) -> Ints:
    wanted = graph.on_gpu & (graph.phase == phase) & (graph.step == step) & (graph.mark == Mark.NONE)
    return np.flatnonzero(wanted & (graph.kind != TaskKind.COMMUNICATION))


# Feature maps


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer, the maps that go behind it, and by step its last forward GPU task and its first backward one."""

    layer: int
    held: tuple[Held, ...]
    rows: dict[int, tuple[int, int]]

    @property
    def bytes(self) -> float:
        """Of all its maps."""
        return sum(each.bytes for each in self.held)


def _maps(graph: TaskGraph, memory: HeldMemory | None, copies: _Copies, wanted: str | None) -> Outcome:
    layers = [] if memory is None else list(_layers(graph, memory, wanted))
    if memory is None or len(layers) < 2:
        raise InputError("offload", "fewer than two layers have maps of known size", "record_shapes=True records sizes")
    for step in range(len(graph.steps)):
        of_step = [each for each in layers if step in each.rows]
        ordered = sorted(of_step, key=lambda each: each.rows[step][1])
        outward = {each.layer: _away(copies, each, step) for each in of_step if each is not ordered[0]}
        for before, each in pairwise(ordered):
            trigger, first = before.rows[step][1], each.rows[step][1]
            task = copies.copy("to board", each.bytes, behind=_preceding(graph, trigger), neighbour=trigger)
            copies.edit.depend(outward[each.layer], task, Dependency.SYNC)
            copies.edit.depend(task, first, Dependency.SYNC)
    moved = sorted(layers, key=lambda each: min(row for _, row in each.rows.values()))
    after = memory
    for trigger_layer, each in pairwise(moved):
        back = int(memory.moments(Phase.BACKWARD, (trigger_layer.layer,)).min())
        end = int(memory.moments(Phase.FORWARD, (each.layer,)).max())
        pieces = [
            piece for one in each.held for piece in (replace(one, died=end), replace(one, born=max(back, end + 1)))
        ]
        after = without(after, each.held, [piece for piece in pieces if piece.born <= piece.died])
    size = sum(each.bytes for each in moved[1:])
    changed, memory_notes, gain = changed_memory(copies.edit.apply(), memory, after)
    ms = size / copies.rate / 1e3
    note = f"maps of {len(moved) - 1} layers, {size / 1e6:.1f} MB a step, come and go: {ms:.3f} ms each way"
    return Outcome(changed, (note, *memory_notes), gain)


def _away(copies: _Copies, each: _Layer, step: int) -> int:
    last = each.rows[step][0]
    return copies.copy("to host", each.bytes, behind=last, neighbour=last)


def _preceding(graph: TaskGraph, row: int) -> int:
    """The task before this one on its stream, -1 without."""
    before = np.flatnonzero(graph.following == row)
    return int(before[0]) if len(before) else NONE


def _following(graph: TaskGraph, memory: HeldMemory) -> dict[int, int]:
    """For each layer the next one of the forward pass of which moments in both passes are known."""
    order = list(dict.fromkeys(graph.layer[_gpu(graph, Phase.FORWARD, memory.step)].tolist()))
    following: dict[int, int] = {}
    after = NONE
    for layer in reversed(order):
        if layer == NONE:
            continue
        if after != NONE:
            following[layer] = after
        if all(len(memory.moments(phase, (layer,))) for phase in (Phase.FORWARD, Phase.BACKWARD)):
            after = layer
    return following


def _layers(graph: TaskGraph, memory: HeldMemory, wanted: str | None) -> Iterator[_Layer]:
    """The layers behind which maps can go, with those maps, and GPU tasks in both passes."""
    fitting = set(np.flatnonzero(matching(graph.layers, wanted or "")).tolist())
    behind = _following(graph, memory)
    maps_by_layer: dict[int, list[Held]] = {}
    for each in memory.held:
        freeing = int(memory.layer[each.died]) if each.died < len(memory.events) else NONE
        if each.kind is MemoryKind.FEATURE_MAPS and each.born != NONE and freeing in fitting and freeing in behind:
            maps_by_layer.setdefault(behind[freeing], []).append(each)
    rows: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
    for step in range(len(graph.steps)):
        for place, phase in enumerate((Phase.FORWARD, Phase.BACKWARD)):
            for row in _gpu(graph, phase, step).tolist():
                rows.setdefault(int(graph.layer[row]), {}).setdefault(step, ([], []))[place].append(row)
    for layer, maps in maps_by_layer.items():
        ends = {
            step: (max(first), min(second)) for step, (first, second) in rows.get(layer, {}).items() if first and second
        }
        moments = [memory.moments(phase, (layer,)) for phase in (Phase.FORWARD, Phase.BACKWARD)]
        if not ends or not all(len(each) for each in moments):
            continue
        end, again = int(moments[0].max()), int(moments[1].min())
        movable = tuple(each for each in maps if each.born <= end and each.died >= again)
        if movable:
            yield _Layer(layer=layer, held=movable, rows=ends)
