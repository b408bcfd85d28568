"""Gradients accumulated over micro-batches (dPRO, section 4): more forward and backward passes, one update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.operators.pricing import device_of
from daydream.passes import Outcome, what_if
from daydream.passes.basis.batches import smaller
from daydream.passes.basis.bytes import changed_memory, memory_of, states_per_weight
from daydream.passes.basis.checks import above_zero, at_least
from daydream.passes.basis.copies import copied
from daydream.passes.basis.gradients import ParameterGradient, find_gradients
from daydream.passes.basis.idioms import launch_us
from daydream.passes.basis.maps import ROUNDING
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError

#: Kinds of memory that grow with the batch; inputs stay where they are until they are used.
_OF_BATCH = (MemoryKind.FEATURE_MAPS, MemoryKind.TEMPORARY, MemoryKind.WORKSPACE)

#: Times that adding a gradient to another one moves it: both are read, one is written. So does an update without
#: states; each state is scaled in place and added to, 2 and 3 times.
_ADD_TRAFFIC, _STATE_TRAFFIC = 3, 5


@what_if("accumulate")
def accumulate(graph: TaskGraph, *, steps: int = 4, grow: bool = False, memory_gbps: float = 0.0) -> Outcome:
    """Forward and backward passes over `steps` micro-batches, then one exchange of gradients and one update.

    The batch of a step stays: a micro-batch is a `steps`-th of it, and its kernels take what the library's models
    give for that batch over what they give for the whole, times what was recorded. Without such a price, what goes
    beyond the shortest kernel of the trace shrinks with the batch. The host launches everything every time; where it
    computes itself, what goes beyond an operator that makes a view shrinks: caches that hold a micro-batch better than
    the batch, and products that are less efficient, are not in it. With `grow` micro-batches are as large as the
    step's batch was, so that a step trains `steps` times as many samples.

    From the second micro-batch on every gradient is added to the one that is there: one kernel each, which moves three
    times the gradient at `memory_gbps` GB/s (0: the board's memory; without a board, what the update's tasks reach).
    Loading, copies to the board and zeroing stay once a step. Collectives run in the last micro-batch
    (``no_sync``); a library that exchanges every time is not meant.

    Assumptions: one micro-batch after the other; batch norms see smaller batches, which changes what is learnt. Put
    passes that replace kernels, and recompute, before this one, for it repeats what it finds.

    Raises:
        InputError: a number out of range, or a graph without a backward pass.
    """
    at_least("steps", steps, 1)
    if memory_gbps:
        above_zero("memory-gbps", memory_gbps)
    if steps == 1:
        return Outcome(graph, ("one micro-batch is the whole batch: nothing changed",))
    rows = _repeated(graph)
    if not all((graph.phase[rows] == phase).any() for phase in (Phase.FORWARD, Phase.BACKWARD)):
        raise InputError("accumulate", "the graph has no forward and backward pass", "record a step of training")
    before = memory_of(graph)
    notes = []
    if not grow:
        less = smaller(graph, rows, steps)
        kernels = rows[graph.on_gpu[rows]]
        took = float((graph.duration_us + graph.gap_us)[rows].sum()), float((less.duration_us + less.gap_us).sum())
        notes.append(
            f"a micro-batch takes {took[1] / took[0]:.3f} of the whole batch's time on threads and streams together"
            + (f"; {less.priced} of {len(kernels)} GPU tasks by the library's models" if len(kernels) else "")
        )
        gaps = graph.gap_us.copy()
        gaps[rows] = less.gap_us
        graph = replace(graph.with_durations(rows, less.duration_us), gap_us=gaps)
    edit = Edit(graph)
    for step in np.unique(graph.step[rows]).tolist():
        _repeat(edit, rows[graph.step[rows] == step], steps - 1)
    adds = _Additions.of(graph, memory_gbps)
    if adds is not None:
        adds.insert(edit, steps - 1)
        notes.append(adds.summary(steps - 1))
    else:
        notes.append("nothing tells the gradients' sizes: adding them costs nothing")
    after = None if before is None else _accumulated(before, 1 if grow else steps)
    changed, memory_notes, gain = changed_memory(edit.apply(), before, after)
    summary = f"{steps} micro-batches a step, " + (
        "as large as the batch was" if grow else f"each 1/{steps} of the batch"
    )
    return Outcome(changed, (summary, *notes, *memory_notes), gain)


def _repeated(graph: TaskGraph) -> Ints:
    """The tasks of forward and backward passes in steps, collectives and their calls left out."""
    wanted = np.isin(graph.phase, (Phase.FORWARD, Phase.BACKWARD)) & (graph.mark == Mark.NONE) & (graph.step != NONE)
    sends = graph.kind == TaskKind.COMMUNICATION
    wanted &= ~sends & (graph.kind != TaskKind.DATA_LOADING)
    wanted[graph.launch[sends & (graph.launch != NONE)]] = False
    return np.flatnonzero(wanted)


def _repeat(edit: Edit, rows: Ints, times: int) -> None:
    """Copies of one step's passes before the recorded ones, so that what waits for these waits for the last."""
    graph = edit.graph
    firsts = {int(thread): int(rows[graph.thread[rows] == thread].min()) for thread in np.unique(graph.thread[rows])}
    chosen = np.zeros(len(graph), np.bool_)
    chosen[rows] = True
    inward = np.flatnonzero(chosen[graph.edge_target] & ~chosen[graph.edge_source])
    # What the last micro-batch alone waits for comes after the first.
    starts = np.array([firsts.get(thread, NONE) for thread in range(len(graph.threads))])
    sources = graph.edge_source[inward]
    earlier_step = graph.step[sources] < graph.step[rows[0]]
    inward = inward[earlier_step | (sources < starts[graph.thread[sources]])]
    ends = list(_last_gradients(graph, rows))
    main = int(rows[graph.on_cpu[rows] & (graph.phase[rows] == Phase.FORWARD)].min())
    # In the order in which the host goes through them, by which launches queue up.
    places = {thread: row if graph.on_gpu[row] else main for thread, row in firsts.items()}
    passes = [copied(edit, rows, places) for _ in range(times)]
    for edge in inward.tolist():
        source, target = int(graph.edge_source[edge]), passes[0][int(graph.edge_target[edge])]
        edit.depend(source, target, graph.edge_kind[edge], float(graph.edge_lag_us[edge]))
    for earlier, later in pairwise(passes):
        for end in ends:
            edit.depend(earlier[end], later[main], Dependency.HANDOFF)
    for end in ends:
        edit.depend(passes[-1][end], main, Dependency.HANDOFF)


def _last_gradients(graph: TaskGraph, rows: Ints) -> Iterator[int]:
    """The last backward CPU task of every thread on which no forward one runs: the program waits for it."""
    hosts = rows[graph.on_cpu[rows]]
    forward = set(graph.thread[hosts[graph.phase[hosts] == Phase.FORWARD]].tolist())
    for thread in sorted(set(graph.thread[hosts].tolist()) - forward):
        yield int(hosts[graph.thread[hosts] == thread].max())


@dataclass(frozen=True, kw_only=True)
class _Additions:
    """The additions of gradients to those that are there.

    Attributes:
        gradients: of every step.
        rate: bytes moved a microsecond.
        call_us: host time of one, in addition.
    """

    gradients: dict[int, tuple[ParameterGradient, ...]]
    rate: float
    call_us: float

    @staticmethod
    def of(graph: TaskGraph, memory_gbps: float) -> _Additions | None:
        """Of a graph; None where sizes or the rate are unknown."""
        try:
            gradients = find_gradients(graph)
        except InputError:
            return None
        rate = (
            memory_gbps * 1e3 or _board_rate(graph) or _update_rate(graph, gradients.bytes_of(gradients.largest_step))
        )
        if not rate:
            return None
        hosts = graph.duration_us[graph.on_cpu & (graph.phase == Phase.BACKWARD)]
        call = launch_us(graph) if graph.on_gpu.any() else float(np.median(hosts))
        return _Additions(gradients=gradients.steps, rate=rate, call_us=call)

    def insert(self, edit: Edit, times: int) -> None:
        """The additions of all micro-batches but the first, where the last one's gradients are complete."""
        graph = edit.graph
        for of_step in self.gradients.values():
            for gradient in of_step:
                length = _ADD_TRAFFIC * gradient.bytes / self.rate * times
                place: dict[str, Any] = {"phase": Phase.BACKWARD, "layer": gradient.layer, "step": gradient.step}
                name = "add to gradient"
                if gradient.ready != NONE and graph.on_gpu[gradient.ready]:
                    edit.add_kernel(name, length, after=gradient.ready, launch_us=self.call_us * times, **place)
                elif gradient.hook != NONE:
                    edit.add(name, TaskKind.CPU, length + self.call_us * times, after=gradient.hook, **place)

    def summary(self, times: int) -> str:
        """One sentence."""
        count = max(len(of_step) for of_step in self.gradients.values())
        size = max(sum(each.bytes for each in of_step) for of_step in self.gradients.values())
        return (
            f"{count} gradients of {size / 1e6:.1f} MB are added {times} times a step at {self.rate / 1e3:.0f} GB/s: "
            f"{times * _ADD_TRAFFIC * size / self.rate / 1e3:.3f} ms"
        )


def _board_rate(graph: TaskGraph) -> float:
    try:
        return device_of(graph)[0].dram.bandwidth_bytes_per_second / 1e6
    except InputError:
        return 0.0


def _update_rate(graph: TaskGraph, size: float) -> float:
    """Rate of a host: the bytes that an update moves, as far as they go by the gradients' size, over its time."""
    rows = np.flatnonzero((graph.phase == Phase.UPDATE) & (graph.mark == Mark.NONE))
    longest = max(
        np.bincount(np.maximum(graph.step[rows], 0), (graph.duration_us + graph.gap_us)[rows]).tolist(), default=0.0
    )
    traffic = _ADD_TRAFFIC + _STATE_TRAFFIC * (states_per_weight(graph) if graph.trace is not None else 0)
    return traffic * size / longest if longest else 0.0


# Memory


def _accumulated(memory: HeldMemory, parts: int) -> HeldMemory:
    """The last micro-batch: what the batch makes is smaller, and the gradients of those before it are there already."""
    holdings = []
    count = len(memory.events)
    # An allocator rounds up what a recording tells of.
    sizes = {each.bytes for each in memory.held if each.kind is MemoryKind.GRADIENTS}
    weights = sizes | {float(-(-size // ROUNDING) * ROUNDING) for size in sizes}
    backward = int(memory.moments(Phase.BACKWARD).max(initial=NONE))
    for each in memory.held:
        if each.kind is MemoryKind.GRADIENTS and each.born == NONE and each.died < count:
            # What the step before left is gone before the first micro-batch.
            continue
        if each.kind is MemoryKind.GRADIENTS and each.born != NONE:
            holdings.append(replace(each, born=NONE))
            holdings.append(replace(each, died=min(each.born + 1, each.died), kind=MemoryKind.TEMPORARY))
        elif each.kind in _OF_BATCH and NONE < each.born <= backward and not _of_weights(each, weights):
            holdings.append(replace(each, bytes=each.bytes / parts))
        else:
            holdings.append(each)
    return replace(memory, held=tuple(holdings))


def _of_weights(each: Held, weights: set[float]) -> bool:
    """True if it is as large as a gradient, and so no part of the batch."""
    return each.kind is MemoryKind.TEMPORARY and each.bytes in weights
