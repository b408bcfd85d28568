"""Least time and memory of a layout, in closed form: what a search need not simulate.

A stage has to run every pass of its micro-batches, its first one behind those of the stages before it and its last one
before theirs. A rank has to hold its part of the model and what the micro-batches under way keep for their backward
passes. Neither exchanges that something might hide nor memory of passing use are counted, so that no layout takes less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daydream.graph.graph import Phase
from daydream.memory.device import context_bytes, handle_bytes
from daydream.plan.costs import Costs
from daydream.plan.layout import Layout
from daydream.plan.memory import FULL_BYTES, narrow_units
from daydream.plan.moments import lives
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import NONE, Floats


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of all layouts with the same tensor, context and experts' ranks.

    Attributes:
        costs: of one of them.
    """

    costs: Costs

    # Seconds

    def seconds(self, layout: Layout) -> float:
        """Seconds that a step takes at least."""
        runs = self._runs(layout)
        passes = np.array([[self._passes[run].sum(axis=0) for run in chunks] for chunks in runs])
        # Of the device and of the host by stage and chunk.
        busy = passes.sum(axis=1)
        ahead = np.cumsum(passes[:, 0], axis=0) - passes[:, 0]
        # A host launches what its device will wait for.
        ahead[:, 1] = 0.0
        return float((layout.micro_batches * busy + ahead).max())

    @cached_property
    def _passes(self) -> Floats:
        """Seconds of the device and of the host for both passes of every unit."""
        units = self.costs.units
        captured = range(int(units.captured[-1]) + 1)
        both = [[self.costs.of_unit[unit, phase] for phase in (Phase.FORWARD, Phase.BACKWARD)] for unit in captured]
        sums = [[sum(each.device for each in pair), sum(each.host for each in pair)] for pair in both]
        return np.array(sums)[units.captured]

    def _runs(self, layout: Layout) -> list[list[list[int]]]:
        """Units of every stage's chunks."""
        runs = self.costs.units.stages(layout.pipeline * layout.chunks, layout.blocks)
        return [runs[stage :: layout.pipeline] for stage in range(layout.pipeline)]

    # Bytes

    def bytes(self, layout: Layout) -> float:
        """Bytes that the board of a rank needs at least, of the first stage or the last."""
        runs = self._runs(layout)
        return self._around + max(self._stage(layout, stage, runs[stage]) for stage in {0, layout.pipeline - 1})

    def _stage(self, layout: Layout, stage: int, runs: list[list[int]]) -> float:
        elements, trained = self._elements[[unit for run in runs for unit in run]].sum(axis=0)
        weight, full = self._sizes(layout)
        ranks = np.array([layout.group(), layout.group(experts=True)], np.float64)
        each = {"none": 1.0, "zero1": 1.0, "zero2": layout.sharers, "fsdp": ranks}[layout.shard]
        # Narrow numbers alone are a byte of four bits at least, twice.
        held = min(weight, 1.0) if layout.narrow else weight
        resident = float((elements * (held / (ranks if layout.shard == "fsdp" else 1.0))).sum())
        if layout.offload == "none":
            # States of the optimizer, and a copy in full precision, which FSDP keeps in place of the parameters.
            copy = full - weight if layout.shard == "fsdp" else full * (full > weight)
            states = trained * (full * self.costs.states + copy)
            resident += float((states / (1.0 if layout.shard == "none" else ranks)).sum())
        exchanged = weight if layout.shard == "none" else layout.reduce_bytes or weight
        gradients = float((trained * exchanged / each).sum())
        under_way, goes_on = self._under_way(layout, stage, [float(self._kept[run].sum()) for run in runs])
        # Gradients of the first micro-batch are there when later ones are under way.
        return resident + (under_way + gradients if goes_on else max(under_way, gradients))

    @staticmethod
    def _under_way(layout: Layout, stage: int, kept: list[float]) -> tuple[float, bool]:
        """Bytes that micro-batches keep when a stage's first backward pass begins, and whether others follow."""
        count, stages = layout.micro_batches, layout.pipeline
        if layout.schedule == "gpipe":
            return count * kept[0], False
        if layout.schedule == "interleaved":
            ahead = 2 * (stages - stage - 1) + (layout.chunks - 1) * stages + 1
            passes = min(ahead, count * layout.chunks)
            group = stages * layout.chunks
            return sum(kept[step % group // stages] for step in range(passes)), passes < count * layout.chunks
        return min(stages - stage, count) * kept[0], count > stages - stage

    def _sizes(self, layout: Layout) -> tuple[float, float]:
        """Bytes of an element of the narrowest parameter, and of what the optimizer keeps it as."""
        sizes = [element_bytes(each.tensor.dtype) for each in self.costs.units.capture.parameters]
        weight = min(sizes, default=0)
        return weight, max(FULL_BYTES, weight) if layout.master else weight

    @cached_property
    def _elements(self) -> Floats:
        """Elements of every unit's parameters and of those that are trained, shared ones and experts'."""
        units = self.costs.units
        sizes = [
            [units.sizes(unit, lambda each: each.tensor.elements),
             units.sizes(unit, lambda each: each.tensor.elements * each.trained)]
            for unit in range(units.count)
        ]  # fmt: skip
        return np.array([[[each.shared, each.experts] for each in pair] for pair in sizes], np.float64)

    @cached_property
    def _kept(self) -> Floats:
        """Bytes that every unit's forward pass keeps for its backward pass."""
        layout = self.costs.layout
        made = lives(
            narrow_units(self.costs.units), Layout(context=layout.context, exchange_context=layout.exchange_context)
        )
        kept = (made.is_forward == 1) & (made.dies_forward == 0) & (made.died != NONE) & (made.born == made.died)
        return np.asarray(np.bincount(made.born[kept], made.bytes[kept], self.costs.units.count), np.float64)

    @cached_property
    def _around(self) -> float:
        device = self.costs.step.device
        return float(handle_bytes(self.costs.units.capture, device) + context_bytes(device))
