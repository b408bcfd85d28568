"""Costs of the passes of a stage: kernels and launches of every unit, and every collective of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.graph.graph import Phase
from daydream.memory.narrow import ELEMENT_BYTES, weight_copies
from daydream.operators.calls import KernelPrice, OperatorPrice, operator_prices
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.plan.context import share_attention
from daydream.plan.experts import add_exchange
from daydream.plan.layout import Layout
from daydream.plan.offload import HostUpdate
from daydream.plan.sizes import Sizes
from daydream.prediction.step import LAUNCH_LATENCY, PredictedStep, predicted
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import Ints
from hal.spec.power import settled

if TYPE_CHECKING:
    from daydream.capture.captured import Capture, CapturedOperator
    from daydream.operators.part_prices import Implementation
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec
    from hal.spec.node import NodeSpec

#: Collectives of tensor ranks by the operators that a capture has for them.
_COLLECTIVES = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
}

#: Multiprocessors that NCCL's kernels occupy within a node, a block of a channel each: the channels that it opens among
#: eight A100 or H100 behind NVSwitch (``24 coll channels`` of its log: nccl-tests issue 100, nccl issue 1259).
CHANNELS = 24

#: Operators within which an exchange has the product that it feeds, or that feeds it.
_NEIGHBOURS = 8

#: What an update of parameters in float32 is recorded as.
_FULL, _FULL_BYTES = "float", 4


class Pass(NamedTuple):
    """A unit going one way, in seconds.

    Attributes:
        device: of its kernels, one after the other, and the collectives that they wait for.
        lead: from when the host begins with it until its first kernel can run.
        host: until the host has launched everything.
        exchanged: of the device's seconds, those of collectives.
    """

    device: float
    lead: float
    host: float
    exchanged: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Costs:
    """Times of a plan's parts on a board in a node.

    Attributes:
        units: of the captured step of one rank.
        layout: the plan.
        step: the captured step priced, collectives of tensor ranks with it.
        node: where the boards are; None for one board.
    """

    units: Units
    layout: Layout
    step: PredictedStep
    node: NodeSpec | None

    @cached_property
    def _seconds(self) -> np.ndarray:
        return np.array([price.seconds for price in self.step.prices], np.float64)

    @cached_property
    def _exchanged(self) -> np.ndarray:
        """Of every operator's seconds, those of collectives."""
        return np.array([
            sum(kernel.seconds for kernel in price.kernels if kernel.model == "collectives")
            for price in self.step.prices
        ], np.float64)  # fmt: skip

    def passing(self, members: Sequence[int], phase: Phase) -> Pass:
        """Some units in a row going one way; backward, the last of them is first."""
        key = tuple(members), phase
        known = self._passing.get(key)
        if known is None:
            known = self._passing[key] = self._passed(*key)
        return known

    @cached_property
    def _passing(self) -> dict[tuple[tuple[int, ...], Phase], Pass]:
        return {}

    def _passed(self, members: Sequence[int], phase: Phase) -> Pass:
        order = members if phase == Phase.FORWARD else members[::-1]
        passes = [self.of_unit[int(self.units.captured[unit]), phase] for unit in order]
        device, _, host, exchanged = (sum(column) for column in zip(*passes, strict=True))
        lead = next((each.lead for each in passes if each.device), 0.0)
        return Pass(device, lead, host, exchanged)

    @cached_property
    def of_unit(self) -> dict[tuple[int, Phase], Pass]:
        return {key: self._pass(rows) for key, rows in self.units.rows.items()}

    def _pass(self, rows: Ints) -> Pass:
        seconds, host = self._seconds[rows], self.step.host[rows]
        busy = np.flatnonzero(seconds > 0)
        lead = float(host[: busy[0] + 1].sum()) + LAUNCH_LATENCY if len(busy) else 0.0
        exchanged = float(self._exchanged[rows].sum())
        return Pass(float(seconds.sum()), lead, float(host.sum()), exchanged)

    def update(self, members: Sequence[int]) -> Pass:
        """The update of some units' parameters, as far as the rank keeps them."""
        full_pass = self._pass(np.flatnonzero(self.units.phase == Phase.UPDATE))
        captured = sum(each.tensor.elements for each in self.units.capture.parameters if each.trained)
        trained = float(self.units.trained[list(members)].sum())
        share = trained / captured if captured else 0.0
        device = full_pass.device * share + self._copied(members)
        return Pass(device, min(full_pass.lead, full_pass.host * share), full_pass.host * share, 0.0)

    def _copied(self, members: Sequence[int]) -> float:
        """Seconds in which gradients of 16 bits become float32 and parameters are copied back from float32."""
        layout = self.layout
        sizes = [element_bytes(each.tensor.dtype) for each in self.units.capture.parameters if each.trained]
        if layout.shard == "fsdp" or not layout.master or not sizes or min(sizes) >= _FULL_BYTES:
            return 0.0
        moved = 2 * self.kept(members) * (min(sizes) + _FULL_BYTES)
        return moved / self.step.device.dram.bandwidth_bytes_per_second

    def kept(self, members: Sequence[int]) -> float:
        """Elements of some units' parameters that the rank updates: its part where ranks share states."""
        total = 0.0
        for unit in members:
            trained = self.units.sizes(unit, lambda each: each.tensor.elements * each.trained)
            shared, experts = (self.layout.group(experts=kind) for kind in (False, True))
            divided = self.layout.shard != "none"
            total += trained.shared / (shared if divided else 1) + trained.experts / (experts if divided else 1)
        return total

    @cached_property
    def host_update(self) -> HostUpdate | None:
        """The update in the host's memory; None where it is on the board."""
        if self.layout.offload == "none" or self.node is None or self.node.host is None:
            return None
        return HostUpdate(host=self.node.host, ranks=min(self.layout.ranks, self.node.boards))

    @cached_property
    def element_bytes(self) -> tuple[float, float]:
        """Bytes of an element of a gradient as it is exchanged, and of a parameter, of the widest that are trained."""
        sizes = [element_bytes(each.tensor.dtype) for each in self.units.capture.parameters if each.trained]
        size = max(sizes, default=_FULL_BYTES)
        return self.layout.reduce_bytes or size, size

    @cached_property
    def states(self) -> int:
        """States of the optimizer for every parameter."""
        capture = self.units.capture
        trained = sum(each.tensor.bytes for each in capture.parameters if each.trained)
        total = sum(each.bytes for each in capture.storages if each.kind == "optimizer")
        return total // trained if trained else 0

    # Collectives between ranks

    def exchange(self, collective: str, size: Sizes) -> float:
        """Seconds of a collective of the data direction; experts are exchanged by those that have the same ones."""
        if self.node is None:
            return 0.0
        total = 0.0
        for part, experts in ((size.shared, False), (size.experts, True)):
            ranks = self.layout.group(experts=experts)
            if ranks > 1 and part >= 1:
                total += _seconds(
                    collective, part, ranks, self.node, self.layout.data_per_node(self.node, experts=experts)
                )
        return total

    def copied_out(self, unit: int) -> float:
        """Seconds in which FSDP copies a unit's parameters out of the array that was gathered."""
        return 2 * self.unit_bytes(unit).total / self.step.device.dram.bandwidth_bytes_per_second

    def copied_in(self, unit: int) -> float:
        """Seconds in which FSDP copies a unit's gradients into the array that is sent, in the type of the exchange."""
        trained = self.units.sizes(unit, lambda each: each.tensor.bytes * each.trained)
        moved = trained.plus(self.gradient_bytes(unit)).total
        return moved / self.step.device.dram.bandwidth_bytes_per_second

    def slowed(self, exchanged: float) -> float:
        """Seconds that kernels lose to concurrent collectives, which take multiprocessors of their own."""
        return exchanged * min(CHANNELS / self.step.device.unit_count, 1.0)

    def hand_over(self, stage: int, other: int) -> float:
        """Seconds in which a micro-batch's result goes from one stage to another."""
        size = self.boundary_bytes
        if self.node is None or size < 1 or stage == other:
            return 0.0
        per_node = 2 if self.layout.same_node(stage, other, self.node) else 1
        return _seconds("send", size, 2, self.node, min(per_node, self.node.boards))

    @cached_property
    def boundary_bytes(self) -> float:
        """Bytes that one block hands to the next: what the first of them makes last and the second reads."""
        units = self.units
        if units.count < 4:
            return 0.0
        first, second = units.rows[1, Phase.FORWARD], units.rows[2, Phase.FORWARD]
        operators = units.capture.operators
        made = {storage: row for row in first.tolist() for storage in operators[row].made}
        read = [storage for row in second.tolist() for storage in operators[row].read if storage in made]
        if not read:
            return 0.0
        return float(units.capture.storages[max(read, key=made.__getitem__)].bytes)

    def unit_bytes(self, unit: int) -> Sizes:
        """Bytes of a unit's parameters as the step computes with them, and as they are gathered."""
        narrow = self._gathered_bytes
        return self.units.sizes(
            unit,
            lambda each: each.tensor.elements * narrow[each.storage] if each.storage in narrow else each.tensor.bytes,
        )

    @cached_property
    def _gathered_bytes(self) -> Mapping[int, float]:
        """Bytes per element of parameters that are gathered in narrow numbers, by storage."""
        if not self.layout.narrow:
            return {}
        capture = self.units.capture
        return dict.fromkeys(weight_copies(capture), ELEMENT_BYTES.get(capture.precision, 0.0))

    def gradient_bytes(self, unit: int) -> Sizes:
        """Bytes of a unit's gradients as they are exchanged."""
        return self.units.sizes(
            unit,
            lambda each: each.trained * each.tensor.elements
            * (self.layout.reduce_bytes or element_bytes(each.tensor.dtype)),
        )  # fmt: skip


def costs_of(
    units: Units,
    layout: Layout,
    device: DeviceSpec,
    node: NodeSpec | None,
    implementation: Implementation = "library",
    host: float = 1.0,
    processor: str = "",
) -> Costs:
    """Times of a plan's parts.

    Args:
        units: of the captured step of one rank.
        layout: the plan.
        device: the board.
        node: where the boards are; None for one board.
        implementation: of kernels.
        host: what the host takes for its calls over what PyTorch's own modules take.
        processor: that launches, by its name; empty for the board's usual one.

    Raises:
        InputError: the board runs no such library.
    """
    capture = units.capture
    # A job of many boards runs for hours.
    device = settled(device)
    changed = replace(capture, operators=tuple(_part_of_rank(each, units, layout) for each in capture.operators))
    (step,) = predicted(changed, [device], implementation, processor)
    prices = list(step.prices)
    for row, operator in enumerate(capture.operators):
        if operator.name in _COLLECTIVES:
            seconds = _tensor_seconds(operator, layout, node)
            if layout.overlap_tensor:
                seconds = _exposed(
                    seconds, _adjacent_product_seconds(prices, row), _COLLECTIVES[operator.name], layout.tensor
                )
            kernel = KernelPrice(f"nccl {_COLLECTIVES[operator.name]}", seconds, "links", "collectives")
            prices[row] = OperatorPrice(kernels=(kernel,))
    if node is not None:
        _share_context(prices, capture, layout, device, node)
    add_exchange(prices, units, layout, node, device)
    step = replace(step, prices=tuple(prices), host=step.host * host)
    return Costs(units=units, layout=layout, step=step, node=node)


def _share_context(
    prices: list[OperatorPrice], capture: Capture, layout: Layout, device: DeviceSpec, node: NodeSpec
) -> None:
    """Attention and its exchanges where ranks share samples."""
    per_node = layout.context_per_node(node)

    def priced(operator: CapturedOperator, inputs: Inputs) -> OperatorPrice:
        (price,) = operator_prices(
            [(operator.name, inputs, operator.outputs)], device, "library", attention=capture.attention
        )
        return price

    def exchanged(collective: str, size: float) -> float:
        if collective == "send":
            # One of the ring's neighbours is in another node where it does not fit in one.
            return _seconds("send", size, 2, node, 2 if per_node == layout.context else 1)
        return _seconds(collective, size, layout.context, node, per_node)

    bandwidth = device.dram.bandwidth_bytes_per_second
    share_attention(prices, capture.operators, layout, priced, exchanged, bandwidth)


def _adjacent_product_seconds(prices: Sequence[OperatorPrice], row: int) -> float:
    """Seconds of the product next to an exchange: the nearest on either side."""
    for distance in range(1, _NEIGHBOURS):
        for place in (row - distance, row + distance):
            if 0 <= place < len(prices):
                work = prices[place].work
                if work is not None and work.kind == "matrix product":
                    return prices[place].seconds
    return 0.0


def _exposed(seconds: float, product: float, collective: str, ranks: int) -> float:
    """Seconds of an exchange that its product does not hide, both in as many parts as there are ranks.

    A gather begins with the part that a rank has, so that ``ranks - 1`` parts arrive during products; a sum ends with a
    part that is sent behind the last product (Wang et al., "Overlap Communication with Dependent Computation via
    Decomposition in Large Deep Learning Models", ASPLOS 2023, section 5). An all-reduce is a sum and a gather.

    >>> _exposed(4.0, 8.0, "all_gather", 4), _exposed(4.0, 8.0, "reduce_scatter", 4)
    (0.0, 1.0)
    """
    if collective == "all_reduce":
        return sum(_exposed(seconds / 2, product, each, ranks) for each in ("all_gather", "reduce_scatter"))
    part, work = seconds / ranks, product / ranks
    late = (ranks - 1) * max(part - work, 0.0)
    return late if collective == "all_gather" else late + part


def _tensor_seconds(operator: CapturedOperator, layout: Layout, node: NodeSpec | None) -> float:
    """Seconds of a collective among tensor ranks; sizes are those of the whole array."""
    sizes = [each.bytes for each in (*operator.inputs.tensors, *operator.outputs) if each is not None]
    if node is None or layout.tensor == 1 or not sizes:
        return 0.0
    return _seconds(_COLLECTIVES[operator.name], max(sizes), layout.tensor, node, layout.tensor_per_node(node))


@lru_cache(maxsize=4096)
def _seconds(collective: str, size: float, ranks: int, node: NodeSpec, per_node: int) -> float:
    from roller.library.collectives import collective_seconds

    return float(collective_seconds(collective, size, ranks, node, per_node=per_node).kernel_seconds)


def _part_of_rank(operator: CapturedOperator, units: Units, layout: Layout) -> CapturedOperator:
    """An operator of the update over the part of the parameters that a rank keeps, in full precision."""
    if operator.phase != Phase.UPDATE:
        return operator

    def part(tensor: RecordedTensor) -> RecordedTensor:
        if not tensor.dims or tensor.elements == 1:
            return tensor
        ranks = layout.group(experts=tensor.dims in units.expert_dims) if layout.shard != "none" else 1
        # Sizes of one row keep equal parameters equal.
        dtype = _FULL if layout.master and element_bytes(tensor.dtype) < element_bytes(_FULL) else tensor.dtype
        return RecordedTensor((ceil(tensor.elements / ranks),), dtype, (1,))

    inputs = operator.inputs
    tensors = tuple(part(each) if each is not None else None for each in inputs.tensors)
    lists = tuple(tuple(part(each) for each in members) for members in inputs.lists)
    outputs = tuple(part(each) for each in operator.outputs)
    return replace(operator, inputs=Inputs(tensors, inputs.values, lists), outputs=outputs)
