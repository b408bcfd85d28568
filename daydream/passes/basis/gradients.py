"""Gradients of a recorded training step: how large each is, which task completes it, which call hands it over.

Data-parallel training exchanges a gradient as soon as the backward pass has made it (wait-free backpropagation,
thesis 4.4.2 "Communication"). The thesis instruments the framework for sizes and order; here they come from what
the trace has, the best source first (:func:`find_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind
from daydream.passes.basis.communication import MEBIBYTE, all_reduces, message_bytes, recorded_collectives
from daydream.passes.basis.gradient_sources import SOURCES, Anchors, spread
from daydream.passes.basis.gradient_sources import ParameterGradient as ParameterGradient
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError


@dataclass(frozen=True)
class Gradients:
    """The gradients of every step in the order in which they become ready, and where that was read."""

    source: str
    steps: dict[int, tuple[ParameterGradient, ...]]

    def bytes_of(self, step: int) -> float:
        """Bytes of all gradients of a step."""
        return sum(gradient.bytes for gradient in self.steps[step])

    @property
    def largest_step(self) -> int:
        """The step with most bytes: a complete one if any is."""
        return max(self.steps, key=self.bytes_of)

    def summary(self) -> str:
        """One sentence on their number, size and source."""
        of_step = self.steps[self.largest_step]
        size = self.bytes_of(self.largest_step) / 1e6
        return f"{len(of_step)} gradients of {size:.1f} MB a step, {self.source}"


def find_gradients(graph: TaskGraph, gradient_mb: float = 0.0) -> Gradients:
    """The gradients of every step, from the best source that this graph has.

    In order of preference: what the user says (`gradient_mb` mebibytes for all of a step, spread over the layers by
    their backward GPU time); what ``daydream record`` wrote; the shapes that AccumulateGrad recorded; the grids of
    DDP's copies into its buckets; the shapes of weights of forward operators.

    A gradient is complete when the GPU task that autograd's thread launched last before its hook ends: that is what
    DDP's event on the compute stream waits for.

    Raises:
        InputError: no source says anything, or the given size is negative.
    """
    if not (np.isfinite(gradient_mb) and gradient_mb >= 0):
        raise InputError("gradient-mb", f"{gradient_mb} is below 0", "write the size of all gradients in MiB")
    if gradient_mb:
        by_step = spread(graph, gradient_mb * MEBIBYTE)
        if not by_step:
            raise InputError("gradients", "no step has GPU tasks of a backward pass", "record a step of training")
        return Gradients("a total given by the user, spread by backward GPU time", by_step)
    if graph.trace is not None:
        anchors = Anchors(graph, graph.trace)
        for source, read in SOURCES.items():
            by_step = read(anchors)
            if by_step and any(gradient.bytes for gradients in by_step.values() for gradient in gradients):
                return Gradients(source, by_step)
    raise InputError(
        "gradients", "the trace does not say how large they are", "set gradient-mb, or record with daydream record"
    )


def consumers(graph: TaskGraph, step: int, ready: Ints) -> list[int]:
    """The tasks that must wait until a step's gradients are exchanged.

    On each stream that completes gradients (`ready`), and on each that updates parameters later, the first task of
    the step behind them that is not part of the backward pass; the next step's first one where the step has none.
    Where no stream goes on, the mark that ends the step.
    """
    first_rows = []
    gpu = graph.on_gpu & (graph.kind != TaskKind.COMMUNICATION)
    last = int(ready.max(initial=NONE))
    updating = np.unique(graph.thread[gpu & (graph.phase == Phase.UPDATE) & (graph.step == step)])
    for thread in np.union1d(np.unique(graph.thread[ready]), updating):
        of_thread = ready[graph.thread[ready] == thread]
        behind = int(of_thread.max()) if len(of_thread) else last
        later = np.flatnonzero(gpu & (graph.thread == thread) & (graph.phase != Phase.BACKWARD))
        later = later[(later > behind) & ((graph.step[later] >= step) | (graph.step[later] == NONE))]
        if behind == NONE:
            # Nothing says where the backward pass ended.
            later = later[graph.phase[later] == Phase.UPDATE]
        if len(later):
            first_rows.append(int(later[0]))
    if not first_rows:
        first_rows = [int(row) for row in np.flatnonzero((graph.mark == Mark.STEP_END) & (graph.step == step))]
    return first_rows


def tied(graph: TaskGraph, rows: Ints) -> TaskGraph:
    """The graph in which these recorded all-reduces wait for gradients, and parameter updates wait for them.

    A trace shows a wait between streams only where something did wait. What may become slower needs the others too:
    DDP lets an all-reduce wait for all that its thread launched on compute streams before, and whatever follows the
    backward pass wait for all all-reduces. Nothing is added against the recorded times.
    """
    edges = {
        edge for row in rows.tolist() for edge in ((_launched_before(graph, row), row), *_updates_behind(graph, row))
    }
    there = set(zip(graph.edge_source.tolist(), graph.edge_target.tolist(), strict=True))
    added = np.array(sorted(edge for edge in edges - there if NONE not in edge), np.int64).reshape(-1, 2)
    return replace(
        graph,
        edge_source=np.concatenate([graph.edge_source, added[:, 0]]),
        edge_target=np.concatenate([graph.edge_target, added[:, 1]]),
        edge_kind=np.concatenate([graph.edge_kind, np.full(len(added), Dependency.COMMUNICATION)]),
        edge_lag_us=np.concatenate([graph.edge_lag_us, np.zeros(len(added))]),
    )


def _launched_before(graph: TaskGraph, row: int) -> int:
    """The last GPU task on another stream whose call stands before this one's on the same thread, -1 without."""
    call = int(graph.launch[row])
    if call == NONE:
        return NONE
    others = graph.on_gpu & (graph.kind != TaskKind.COMMUNICATION) & (graph.launch != NONE)
    others &= (graph.launch < call) & (graph.thread[graph.launch] == graph.thread[call])
    rows_before = np.flatnonzero(others & (graph.step == graph.step[row]))
    if not len(rows_before):
        return NONE
    last = int(rows_before[np.argmax(graph.launch[rows_before])])
    ends = graph.recorded_us[last] + _recorded_length(graph, last)
    return last if not ends > graph.recorded_us[row] else NONE


def _updates_behind(graph: TaskGraph, row: int) -> list[tuple[int, int]]:
    """Edges from an all-reduce to the first update of its step on every stream that starts after it ended."""
    ends = graph.recorded_us[row] + _recorded_length(graph, row)
    updates = graph.on_gpu & (graph.phase == Phase.UPDATE) & (graph.step == graph.step[row])
    updates &= (graph.kind != TaskKind.COMMUNICATION) & (graph.recorded_us >= ends)
    rows_behind = np.flatnonzero(updates)
    _, first = np.unique(graph.thread[rows_behind], return_index=True)
    return [(row, int(later)) for later in rows_behind[first]]


def _recorded_length(graph: TaskGraph, row: int) -> float:
    """Microseconds that a task took when it was recorded, whatever passes made of it."""
    if graph.trace is None or graph.event[row] == NONE:
        return float(graph.duration_us[row])
    return float(graph.trace.duration_us[graph.event[row]])


def sized_all_reduces(pass_name: str, graph: TaskGraph) -> tuple[TaskGraph, Ints, Floats, int]:
    """The all-reduces of known size: a graph that recorded ones are tied in, their rows, bytes, and how many have none.

    Raises:
        InputError: there is no all-reduce, or none of known size.
    """
    rows = all_reduces(graph)
    if not len(rows):
        raise InputError(pass_name, "the graph has no all-reduce", "put the pass ddp before it")
    sizes = message_bytes(graph, rows)
    has_size = ~np.isnan(sizes)
    if not has_size.any():
        raise InputError(pass_name, "no all-reduce of known size", "record the trace with shapes")
    rows = rows[has_size]
    return tied(graph, np.intersect1d(rows, recorded_collectives(graph))), rows, sizes[has_size], int((~has_size).sum())


def last_of_threads(graph: TaskGraph, rows: Iterable[int]) -> list[int]:
    """The last of these tasks on each ordered thread: those before it are done by then."""
    last: dict[int, int] = {}
    for row in rows:
        if row != NONE:
            thread = int(graph.thread[row])
            last[thread] = max(last.get(thread, NONE), int(row))
    return sorted(last.values())
