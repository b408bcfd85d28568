"""A plan simulated: how long its step takes, what each stage does meanwhile, and what a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from daydream.graph.graph import Phase, TaskKind
from daydream.graph.simulate import Timeline, simulate
from daydream.operators.calls import OperatorPrice
from daydream.operators.work import PRODUCT_KINDS
from daydream.plan.balance import balanced_blocks
from daydream.plan.costs import Costs, costs_of
from daydream.plan.experts import divided
from daydream.plan.graph import plan_graph
from daydream.plan.layout import Layout
from daydream.plan.memory import RankMemory, rank_memory
from daydream.report.arithmetic import peak_of
from daydream.trace.trace import Floats
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.operators.part_prices import Implementation
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec
    from hal.spec.node import NodeSpec


@dataclass(frozen=True, kw_only=True)
class StageShares:
    """Activities of a rank of a stage in a step, as shares of it that add up to 1.

    Attributes:
        kernels: it computes.
        tensor: its kernels wait for the exchange of a layer's parts.
        exposed: nothing hides gathers and exchanges of gradients, or messages of other stages.
        waiting: it waits for another stage, or its host.
    """

    kernels: float
    tensor: float
    exposed: float
    waiting: float


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep:
    """A step of many boards.

    Attributes:
        costs: what its parts take.
        device: the board.
        timeline: of one rank of each stage.
    """

    costs: Costs
    device: DeviceSpec
    timeline: Timeline

    @property
    def layout(self) -> Layout:
        """Division of the model."""
        return self.costs.layout

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.timeline.makespan_us / 1e6

    @property
    def samples(self) -> int | None:
        """Of the step on all boards; None where the model does not tell its batch."""
        batch = self.costs.units.capture.batch
        return None if batch is None else batch * self.layout.data * self.layout.micro_batches

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of all boards."""
        return None if self.samples is None else self.samples / self.seconds

    @cached_property
    def flops(self) -> float:
        """Arithmetic of a board in a step, mean of all: products, convolutions and attention, recomputed ones too."""
        units = self.costs.units
        counts = np.bincount(units.captured, minlength=int(units.captured[-1]) + 1)
        flops = np.array([price.flops for price in self.costs.step.prices])
        inside = units.unit >= 0
        total = float((flops[inside] * counts[units.unit[inside]]).sum())
        return total * self.layout.micro_batches / self.layout.pipeline

    @cached_property
    def model_flops(self) -> float:
        """Arithmetic of the model alone on a board, mean of all, of attention what masks leave: three times that of the
        forward pass (once forward, twice backward; once where weights are frozen), nothing computed again."""
        return self._of_forward(lambda price, _: price.work.flops if price.work is not None else 0.0)

    @property
    def utilisation(self) -> float:
        """Model-FLOPs utilisation by :attr:`model_flops`, at the data sheet's peaks of their types."""
        return self._of_forward(lambda price, peak: price.work.flops / peak if price.work else 0.0) / self.seconds

    @property
    def usual_utilisation(self) -> float:
        """Model-FLOPs utilisation as usually given (Chowdhery et al. 2022, appendix B): attention without masks."""
        return self._of_forward(lambda price, peak: price.flops / peak) / self.seconds

    def _of_forward(self, share: Callable[[OperatorPrice, float], float]) -> float:
        units = self.costs.units
        counts = np.bincount(units.captured, minlength=int(units.captured[-1]) + 1)
        total = 0.0
        for row in np.flatnonzero((units.unit >= 0) & (units.phase == Phase.FORWARD)).tolist():
            price = self.costs.step.prices[row]
            if price.work is None or price.work.kind not in PRODUCT_KINDS:
                continue
            peak = peak_of(self.device, price.work, ())
            if peak is not None:
                total += share(price, peak.flops_per_second) * float(counts[units.unit[row]])
        return total * self._passes * self.layout.micro_batches / self.layout.pipeline

    @property
    def _passes(self) -> float:
        """Products of a step over forward ones: gradients of data, and of weights as far as these have one."""
        capture = self.costs.units.capture
        if not capture.training:
            return 1.0
        sizes = [each.tensor.elements for each in capture.parameters]
        trained = [each.tensor.elements for each in capture.parameters if each.trained]
        return 2.0 + sum(trained) / max(sum(sizes), 1)

    @cached_property
    def shares(self) -> tuple[StageShares, ...]:
        """Shares of every stage."""
        return tuple(self._shares(stage) for stage in range(self.layout.pipeline))

    def _shares(self, stage: int) -> StageShares:
        graph, makespan_us = self.timeline.graph, self.timeline.makespan_us
        of_stage = np.array([each.process == stage for each in graph.threads])[graph.thread] & graph.on_gpu
        kernels = of_stage & (graph.kind == TaskKind.KERNEL)
        others = of_stage & (graph.kind == TaskKind.COMMUNICATION)
        busy = float(graph.duration_us[kernels].sum())
        start, end = self.timeline.start_us, self.timeline.end_us
        both = _covered(start[kernels | others], end[kernels | others])
        alone = both - _covered(start[kernels], end[kernels])
        tensor = 1e6 * self._exchanged(stage)
        return StageShares(
            kernels=(busy - tensor) / makespan_us,
            tensor=tensor / makespan_us,
            exposed=alone / makespan_us,
            waiting=max(makespan_us - busy - alone, 0.0) / makespan_us,
        )

    def _exchanged(self, stage: int) -> float:
        """Seconds of a stage's kernels in which tensor ranks exchange parts."""
        layout = self.layout
        runs = self.costs.units.stages(layout.pipeline * layout.chunks, layout.blocks)
        members = [runs[chunk * layout.pipeline + stage] for chunk in range(layout.chunks)]
        passes = [self.costs.passing(part, phase) for part in members for phase in (Phase.FORWARD, Phase.BACKWARD)]
        return sum(each.exchanged for each in passes) * layout.micro_batches

    # Memory

    @cached_property
    def memory(self) -> RankMemory:
        """Of the stage that needs most."""
        return most_memory(self.costs.units, self.layout, self.device)

    @property
    def fits(self) -> bool:
        """True if every board has as much memory as its rank needs."""
        capacity = self.device.dram.capacity_bytes
        return capacity is None or self.memory.on_device <= capacity

    def record(self) -> dict[str, Any]:
        """As JSON."""
        layout, node = self.layout, self.costs.node
        return {
            "model": self.costs.units.capture.title,
            "device": self.device.name,
            "node": None if node is None else node.name,
            "ranks": layout.ranks,
            "data": layout.data,
            "context": layout.context,
            "expert": layout.expert,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "shard": layout.shard,
            "schedule": layout.schedule,
            "micro_batches": layout.micro_batches,
            "step_seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "flops_per_board_second": self.flops / self.seconds,
            "model_flops_per_board_second": self.model_flops / self.seconds,
            "model_flops_utilization": self.utilisation,
            "usual_model_flops_utilization": self.usual_utilisation,
            "stages": [
                {"kernels": each.kernels, "tensor": each.tensor, "exposed": each.exposed, "waiting": each.waiting}
                for each in self.shares
            ],
            "allocated_bytes": self.memory.allocated,
            "reserved_bytes": self.memory.reserved,
            "device_bytes": self.memory.on_device,
            "fits": self.fits,
            "assumed": [*self.costs.units.capture.assumed, *self.layout.assumed],
            "owners_bytes": {kind.value: size for kind, size in self.memory.owners.items()},
        }


def most_memory(units: Units, layout: Layout, device: DeviceSpec) -> RankMemory:
    """Memory of a rank of the stage that needs most: the first holds most micro-batches, the last the logits."""
    stages = sorted({0, layout.pipeline - 1})
    return max((rank_memory(units, layout, stage, device) for stage in stages), key=lambda each: each.least)


def planned(
    units: Units,
    layout: Layout,
    device: DeviceSpec,
    node: NodeSpec | None,
    implementation: Implementation = "library",
    host: float = 1.0,
    processor: str = "",
    *,
    balances: bool = False,
) -> PlannedStep:
    """A plan's step, simulated; arguments are those of :func:`daydream.plan.costs.costs_of`.

    Stages get blocks of equal cost where ``balances`` says so.

    Raises:
        InputError: the layout fits neither the node nor the model.
    """
    layout.check(node)
    if layout.ranks > 1 and node is None:
        raise InputError("--node", f"{device.name} has no usual node", "name one (roller devices), or describe one")
    costs = costs_of(divided(units, layout.expert), layout, device, node, implementation, host, processor)
    if balances:
        costs = replace(costs, layout=replace(layout, blocks=balanced_blocks(costs)))
    return PlannedStep(costs=costs, device=device, timeline=simulate(plan_graph(costs)))


def _covered(start: Floats, end: Floats) -> float:
    """Length of the union of intervals.

    >>> _covered(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0]))
    4.0
    """
    if not len(start):
        return 0.0
    order = np.argsort(start)
    start, end = start[order], end[order]
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())
