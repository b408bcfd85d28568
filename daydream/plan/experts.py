"""Experts divided among ranks: what a rank holds of them, and what carrying tokens to them and back costs.

Ranks of the data and context directions share the experts of every layer (Lepikhin et al. 2021, "GShard", section 3.2).
A rank's tokens go to the ranks of their experts, are multiplied there and come back: two exchanges forward, two
backward, and two more where the layer is computed again. Ranks with the same experts alone exchange their gradients.

NCCL's exchange is an all-to-all of every pair of a token and an expert. DeepEP's kernels send a token once to every
node that has one of its experts and once to every rank there (its README; DeepSeek-V3's report, section 3.2.2), so that
fewer bytes leave a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.operators.calls import KernelPrice, OperatorPrice
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.trace.trace import NONE
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.capture.captured import Capture, CapturedOperator
    from daydream.plan.layout import Layout
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec
    from hal.spec.node import NodeSpec

#: Operators that multiply tokens by the weights of their experts.
GROUPED = "aten::_grouped_mm"

#: What a path has where experts are that see every token.
SHARED = "shared_expert"

#: Share of a board's links that DeepEP's kernels reach within a node: 153 of H800's 200 GB/s one way (its README).
DEEPEP_LINK_SHARE = 0.77

#: Multiprocessors that carry tokens next to another micro-batch's kernels (DeepSeek-V3's report, section 3.2.2).
CARRYING_UNITS = 20


def expert_counts(capture: Capture) -> frozenset[int]:
    """Numbers of experts of a model's layers; none where it has no grouped ones."""
    storages = _expert_storages(capture)
    return frozenset(each.tensor.dims[0] for each in capture.parameters if each.storage in storages)


@lru_cache(maxsize=32)
def divided(units: Units, ranks: int) -> Units:
    """The units of a rank that holds an equal part of every layer's experts.

    Raises:
        InputError: the model has no experts, or they cannot be shared equally.
    """
    if ranks == 1:
        return units
    capture = units.capture
    storages = _expert_storages(capture)
    if not storages:
        raise InputError("--expert", "no layer multiplies by grouped experts", "leave it out")
    dims = {each.tensor.dims for each in capture.parameters if each.storage in storages}
    counts = {each[0] for each in dims}
    for count in counts:
        if count % ranks:
            raise InputError("--expert", f"{ranks} ranks do not divide {count} experts", "write a number that does")
    shapes = {shape for each in dims if len(each) == 3 for shape in (each, (each[0], each[2], each[1]))}

    # Where the rows of every expert end: what says how many there are, where no stack does.
    ends = {(count,) for count in counts}

    def part(tensor: RecordedTensor, *, is_grouped: bool) -> RecordedTensor:
        if tensor.dims not in shapes and not (is_grouped and tensor.dims in ends):
            return tensor
        return replace(tensor, dims=(tensor.dims[0] // ranks, *tensor.dims[1:]))

    gradients = {
        storage
        for operator in capture.operators if any(each.dims in shapes for each in operator.outputs)
        for storage in operator.made
        if capture.storages[storage].bytes in {each.bytes for each in operator.outputs if each.dims in shapes}
    }  # fmt: skip
    parameters = tuple(
        replace(each, tensor=replace(each.tensor, dims=(each.tensor.dims[0] // ranks, *each.tensor.dims[1:])))
        if each.storage in storages else each
        for each in capture.parameters
    )  # fmt: skip
    state_bytes = {each.tensor.bytes for each in capture.parameters if each.storage in storages}
    smaller = storages | gradients
    records = tuple(
        replace(each, bytes=each.bytes // ranks)
        if number in smaller or (each.kind == "optimizer" and each.bytes in state_bytes) else each
        for number, each in enumerate(capture.storages)
    )  # fmt: skip
    operators = tuple(_with_part(each, partial(part, is_grouped=each.name == GROUPED)) for each in capture.operators)
    assumed = (*capture.assumed, f"each of {ranks} ranks holds {min(counts) // ranks} experts of every layer")
    changed = replace(capture, operators=operators, parameters=parameters, storages=records, assumed=assumed)
    return replace(units, capture=changed, experts=frozenset(storages))


def _expert_storages(capture: Capture) -> set[int]:
    """Storages of parameters that are stacks of experts', their biases among them."""
    read = {storage for each in capture.operators if each.name == GROUPED for storage in each.read}
    stacks = [each for each in capture.parameters if each.storage in read and len(each.tensor.dims) == 3]
    owners = {(each.name.rpartition(".")[0], each.tensor.dims[0]) for each in stacks}
    return {
        each.storage
        for each in capture.parameters
        if each.tensor.dims and (each.name.rpartition(".")[0], each.tensor.dims[0]) in owners
    }


def _with_part(operator: CapturedOperator, part: Callable[[RecordedTensor], RecordedTensor]) -> CapturedOperator:
    inputs = operator.inputs
    tensors = tuple(part(each) if each is not None else None for each in inputs.tensors)
    lists = tuple(tuple(part(each) for each in members) for members in inputs.lists)
    outputs = tuple(part(each) for each in operator.outputs)
    if (tensors, lists, outputs) == (inputs.tensors, inputs.lists, operator.outputs):
        return operator
    return replace(operator, inputs=Inputs(tensors, inputs.values, lists), outputs=outputs)


class _Layer(NamedTuple):
    """A layer's grouped products that run one after the other: the unit, the pass, whether gradients, the module."""

    unit: int
    phase: int
    gradients: bool
    module: int


def add_exchange(
    prices: list[OperatorPrice], units: Units, layout: Layout, node: NodeSpec | None, device: DeviceSpec
) -> None:
    """Puts what carrying tokens costs, and what the busiest rank computes more, into prices.

    Where DeepEP carries tokens, one kernel each orders them by experts and adds up what comes back, forward and
    backward (Megatron's fused permutation), in place of the model's own.

    Args:
        prices: of the operators; those of experts are replaced.
        units: of the step.
        layout: of the ranks.
        node: that holds them.
        device: the board.
    """
    if layout.expert == 1 or node is None:
        return
    capture = units.capture
    layers: dict[_Layer, list[int]] = {}
    for row, operator in enumerate(capture.operators):
        if operator.name == GROUPED:
            key = _Layer(int(units.unit[row]), int(operator.phase), operator.forward != NONE, operator.module)
            layers.setdefault(key, []).append(row)
    for layer, rows in layers.items():
        path = capture.modules[layer.module].path if layer.module != NONE else ""
        inside = [
            row for row in np.flatnonzero((units.unit == layer.unit) & (units.phase == layer.phase)).tolist()
            if (capture.operators[row].forward != NONE) == layer.gradients
        ]  # fmt: skip
        carried = _carried(capture, rows)
        seconds = _seconds(capture, carried, inside, layout, node) * layout.imbalance
        hidden = sum(prices[row].seconds for row in inside if SHARED in _path(capture, row))
        exposed = max(seconds - hidden / 2, 0.0) if layout.overlap_experts else seconds
        if layout.overlap_batches:
            # Another micro-batch's kernels of this layer, without the multiprocessors that carry tokens.
            hidden = sum(prices[row].seconds for row in inside)
            exposed = max(seconds - hidden / 2, 0.0) + seconds * min(CARRYING_UNITS / device.unit_count, 1.0)
        for row in inside if path else rows:
            if not path or _path(capture, row).startswith(path):
                prices[row] = _busier(prices[row], layout.imbalance)
        kernels = [KernelPrice(f"{layout.dispatch} all-to-all", exposed, "links", "collectives")]
        if layout.dispatch == "deepep" and carried is not None and path:
            for row in inside:
                if _path(capture, row).startswith(path) and _orders(capture.operators[row], carried):
                    prices[row] = replace(prices[row], kernels=())
            moved = 2 * carried.bytes * layout.imbalance
            moving = moved / device.dram.bandwidth_bytes_per_second
            kernels.append(KernelPrice("permutation", moving, "dram", "streams"))
        # Tokens go before the first product and come back behind the last one.
        prices[rows[0]] = replace(prices[rows[0]], kernels=(*kernels, *prices[rows[0]].kernels))
        prices[rows[-1]] = replace(prices[rows[-1]], kernels=(*prices[rows[-1]].kernels, *kernels))


def _carried(capture: Capture, rows: Sequence[int]) -> RecordedTensor | None:
    """Rows that are carried, one for every pair of token and expert, as the last product makes them or their
    gradients."""
    results = [each for row in rows for each in capture.operators[row].outputs if len(each.dims) == 2]
    return results[-1] if results else None


def _orders(operator: CapturedOperator, carried: RecordedTensor) -> bool:
    """True if an operator puts rows in another order, weighs or adds them: it has them, and nothing larger."""
    tensors = [each for each in (*operator.inputs.tensors, *operator.outputs) if each is not None]
    tensors += [each for members in operator.inputs.lists for each in members]
    if operator.name == GROUPED or not tensors:
        return False
    largest = max(tensors, key=lambda each: each.elements)
    return largest.elements == carried.elements and largest.dims[-1] == carried.dims[-1]


def _path(capture: Capture, row: int) -> str:
    module = capture.operators[row].module
    return capture.modules[module].path if module != NONE else ""


def _busier(price: OperatorPrice, factor: float) -> OperatorPrice:
    if factor == 1:
        return price
    kernels = tuple(replace(each, seconds=each.seconds * factor) for each in price.kernels)
    return replace(price, kernels=kernels)


def _seconds(
    capture: Capture, carried: RecordedTensor | None, inside: Sequence[int], layout: Layout, node: NodeSpec
) -> float:
    """Seconds in which a layer's tokens reach their experts, or come back."""
    if carried is None:
        return 0.0
    size, per_node = float(carried.bytes), layout.expert_per_node(node)
    if layout.dispatch == "nccl":
        from roller.library.collectives import collective_seconds

        return float(collective_seconds("alltoall", size, layout.expert, node, per_node=per_node).kernel_seconds)
    return deepep_seconds(size, _choices(capture, inside, carried.dims[0]), layout.expert, node, per_node)


def _choices(capture: Capture, inside: Sequence[int], pairs: int) -> int:
    """Experts of every token: what the layer's router takes of the largest, after groups where it has some.

    A router of groups takes the largest thrice: in each group, of the groups, and of the experts that are left.
    """
    layer = [capture.operators[row] for row in inside]
    for operators in (layer, capture.operators):
        taken = [each.outputs[0] for each in operators if each.name == "aten::topk" and each.outputs]
        if taken:
            return next((each for each in reversed(taken) if each.elements == pairs), taken[-1]).dims[-1]
    return 1


def deepep_seconds(size: float, choices: int, ranks: int, node: NodeSpec, per_node: int) -> float:
    """Seconds of DeepEP's exchange of so many bytes, each token ``choices`` times.

    Of n places that a token's k experts fall on evenly, n (1 - (1 - 1/n)^k) have one of them at least. A token leaves
    its node once for every other node with one of them, and a node once for every rank; the slower of both counts.
    """
    tokens = size / choices
    nodes = ranks // per_node

    def reached(places: int) -> float:
        return (places - 1) * (1 - (1 - 1 / places) ** choices) if places > 1 else 0.0

    within = tokens * reached(ranks) / (DEEPEP_LINK_SHARE * node.peak_bytes_per_second)
    across = 0.0
    latency = node.collectives.call_seconds
    if nodes > 1 and node.network is not None:
        across = tokens * reached(nodes) / node.network.reached_bytes_per_second
        latency += node.network.latency_seconds
    return latency + max(within, across)
