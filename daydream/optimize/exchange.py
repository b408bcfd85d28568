"""A step's gradients exchanged in given buckets: the graph of it, and what the exchange of every bucket takes.

A bucket is a stretch of gradients in the order in which they become ready, so a list of buckets is the positions of
their last gradients: ``(2, 5)`` are two buckets of three gradients each. All-reduces run on one channel in the order in
which DDP launches them, which is that of the buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.passes.basis.communication import all_reduces, recorded_collectives
from daydream.passes.basis.gradients import Gradients, ParameterGradient, consumers, find_gradients, last_of_threads
from daydream.passes.distributed.ddp import NETWORK, AllReduceCost, Grouping
from daydream.trace.trace import NONE, Floats
from hal.support.errors import InputError

#: Positions of the last gradient of every bucket.
Ends = tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """Gradients that a training exchanges, and the network.

    Attributes:
        graph: the training without any exchange of gradients.
        gradients: of every step.
        step: index of the step that answers are about, the one with most bytes.
        cost: of an all-reduce.
        call_us: CPU time of the call that launches one.
    """

    graph: TaskGraph
    gradients: Gradients
    step: int
    cost: AllReduceCost
    call_us: float

    @staticmethod
    def of(graph: TaskGraph, cost: AllReduceCost, call_us: float, gradient_mb: float = 0.0) -> Exchange:
        """The exchange of a graph's gradients. All-reduces that were recorded are taken out; their calls stay.

        Raises:
            InputError: no source tells the gradients' sizes, the exchange is among one worker, or a pass has put
                communication on a channel.
        """
        if cost.workers < 2:
            raise InputError("--workers", "1 worker has no other to exchange gradients with", "write 2 or more")
        if not all(thread.ordered for thread in graph.threads):
            raise InputError("--pass", "the graph already has an exchange on a channel", "leave passes like ddp out")
        gradients = find_gradients(graph, gradient_mb)
        has_calls = graph.trace is not None and "c10d::allreduce_" in graph.trace.names
        recorded = np.intersect1d(all_reduces(graph), recorded_collectives(graph))
        if len(recorded):
            edit = Edit(graph)
            edit.remove(recorded)
            graph = edit.apply()
            gradients = find_gradients(graph, gradient_mb)
        return Exchange(graph, gradients, gradients.largest_step, cost, 0.0 if has_calls else call_us)

    @property
    def of_step(self) -> tuple[ParameterGradient, ...]:
        """The gradients of the step that answers are about, in the order in which they become ready."""
        return self.gradients.steps[self.step]

    def usual(self, first_mb: float = 1.0, later_mb: float = 0.0) -> Ends:
        """DDP's own buckets: as recorded where the trace lists them, else by its limits in MiB."""
        return ends_of(Grouping.of(self.graph, first_mb, later_mb)(self.of_step), self.of_step)

    def took_us(self) -> Floats:
        """Microseconds of a bucket from gradient i to gradient j at [i, j]; infinite where i is behind j."""
        total = np.concatenate([[0.0], np.cumsum([gradient.bytes for gradient in self.of_step])])
        sizes = total[None, 1:] - total[:-1, None]
        return np.where(sizes > 0, self.cost.each_us(np.maximum(sizes, 0.0)), np.inf)

    # The graph

    def waiting(self, gradients: Sequence[ParameterGradient]) -> list[int]:
        """The tasks that wait until these gradients of a step are exchanged: of a step on the CPU, its update."""
        graph, step = self.graph, gradients[0].step
        if not graph.on_gpu.any():
            updates = np.flatnonzero((graph.phase == Phase.UPDATE) & (graph.step == step))
            behind = updates[updates > max(gradient.hook for gradient in gradients)]
            if len(behind):
                return [int(behind[0])]
        last = last_of_threads(graph, (gradient.ready for gradient in gradients))
        return consumers(graph, step, np.array(last, np.int64))

    def with_buckets(self, ends: Ends, *, every_step: bool = True) -> TaskGraph:
        """The graph that exchanges gradients in these buckets, in every step or in the one that answers are about.

        A bucket's all-reduce waits for its gradients, for the call behind its last gradient's hook, and for the bucket
        before it. What follows the backward pass waits for all. A step of which only a part was recorded exchanges
        what it shows.
        """
        edit = Edit(self.graph)
        buckets = {gradient.name: number for gradient, number in zip(self.of_step, _numbers(ends), strict=True)}
        for step, gradients in self.gradients.steps.items():
            if step == self.step or every_step:
                numbers = _numbers(ends)
                if len(gradients) != len(numbers):
                    numbers = [buckets.get(gradient.name, len(ends) - 1) for gradient in gradients]
                self._insert(edit, _grouped(gradients, numbers))
        return replace(edit.apply(), workers=self.cost.workers)

    def _insert(self, edit: Edit, groups: Sequence[Sequence[ParameterGradient]]) -> None:
        everything = [gradient for group in groups for gradient in group]
        waiting = self.waiting(everything)
        before = NONE
        for number, group in enumerate(groups):
            size = sum(gradient.bytes for gradient in group)
            task = edit.add(
                f"ncclAllReduce bucket {number}",
                TaskKind.COMMUNICATION,
                self.cost.us(size),
                thread=edit.thread(NETWORK),
                phase=Phase.BACKWARD,
                step=group[0].step,
                layer=group[-1].layer,
                bytes=size,
                priority=-number,
            )
            sources = [
                *last_of_threads(self.graph, (gradient.ready for gradient in group)),
                *self._callers(edit, group),
            ]
            for row in [*sources, *([before] if before != NONE else [])]:
                edit.depend(row, task, Dependency.COMMUNICATION)
            for row in waiting:
                edit.depend(task, row, Dependency.COMMUNICATION)
            before = task

    def _callers(self, edit: Edit, group: Sequence[ParameterGradient]) -> Iterator[int]:
        """The hooks of a bucket, and the call behind the last one."""
        yield from last_of_threads(self.graph, (gradient.hook for gradient in group))
        if self.call_us and group[-1].hook != NONE:
            yield edit.add("c10d::allreduce_", TaskKind.CPU, self.call_us, after=group[-1].hook, phase=Phase.BACKWARD)


def ends_of(groups: Sequence[Sequence[ParameterGradient]], gradients: Sequence[ParameterGradient]) -> Ends:
    """The positions of the last gradient of every group. Groups that are no stretches are made such by their first."""
    places = {id(gradient): place for place, gradient in enumerate(gradients)}
    firsts = sorted(min(places[id(gradient)] for gradient in group) for group in groups)
    return (*(first - 1 for first in firsts[1:]), len(gradients) - 1)


def _numbers(ends: Ends) -> list[int]:
    """The bucket of every gradient.

    >>> _numbers((2, 4))
    [0, 0, 0, 1, 1]
    """
    return np.searchsorted(np.array(ends), np.arange(ends[-1] + 1)).tolist()


def _grouped(gradients: Sequence[ParameterGradient], numbers: Sequence[int]) -> list[list[ParameterGradient]]:
    groups: dict[int, list[ParameterGradient]] = {}
    for gradient, number in zip(gradients, numbers, strict=True):
        groups.setdefault(number, []).append(gradient)
    return [groups[number] for number in sorted(groups)]
