"""A graph of PyTorch with operators of ours in place of its regions, each held against PyTorch's own first."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._inductor.fx_passes.post_grad import view_to_reshape

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.dynamo.constants import constant_of, on_real_tensors
from roller.dynamo.convolutions import writes_last_channels
from roller.dynamo.kernels import ON_PROCESSOR, Kernel, KernelShelf, is_processor
from roller.dynamo.operators import region_operator
from roller.dynamo.orders import LAST, Operand, arranged_constant, dense_copy, orders_of_outputs, refresh
from roller.dynamo.prices import VIEWS, GraphPrice, bandwidth_for, graph_price
from roller.dynamo.regions import Region, regions_of
from roller.dynamo.streaming import reading_bandwidth
from roller.dynamo.sums import is_constant, shape_of
from roller.library.operators import library_time

log = logging.getLogger("roller.backend")

#: Largest error that a region may have against PyTorch's own operators, relative to the largest of their results, by
#: the dtype of its result: sums in another order, and of 16 bits one rounding where PyTorch has several.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A sum of products of a graph, and what became of it.

    Attributes:
        name: of the kernel, or of the node that has none.
        functions: the operators of PyTorch that it stands for.
        shape: extents of its result.
        multiply_adds: of the product; 0 where it is none of ours.
        seconds: how long the kernel is expected to take; NaN without one.
        reason: why PyTorch's own operators stay; empty where the kernel is taken.
        has_failed: whether the kernel was to be taken and could not be.
    """

    name: str
    functions: str
    shape: tuple[int, ...]
    multiply_adds: int = 0
    seconds: float = math.nan
    reason: str = ""
    has_failed: bool = False

    @property
    def is_taken(self) -> bool:
        """True if the kernel takes the place of PyTorch's operators."""
        return not self.reason


def rewrite(module: Any, shelf: KernelShelf, *, emulated: bool = False, competes: bool = True) -> list[Decision]:
    """Put kernels into a graph module, in place; the decisions in the order of the graph. Where kernels compete, one is
    put in unless the library's is expected to take less time.

    An operator that cannot be compiled, loaded or that gives other numbers than PyTorch stays with PyTorch, and a line
    of warning says so.
    """
    graph = module.graph
    with orders_of_outputs(graph):
        decisions = _rewritten(module, shelf, emulated, competes)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return decisions


@dataclass(frozen=True)
class Plan:
    """Regions of a graph, each with its weights in the fastest order, before anything is compiled.

    Attributes:
        regions: in the order of the graph.
        refused: decisions about sums of products that are no region.
        dearer: kernels that are expected to take longer than the library's, by name, with the reason.
    """

    regions: tuple[Region, ...]
    refused: tuple[Decision, ...]
    dearer: Mapping[str, str]


def plan(module: Any, shelf: KernelShelf, *, competes: bool = True) -> Plan:
    """Regions of a graph module for which kernels of ours are to be put in; orders of its values change to theirs."""
    graph, lanes = module.graph, shelf.lanes
    if any(writes_last_channels(node, lanes) for node in graph.nodes):
        # What views of dense tensors give may need a copy now.
        view_to_reshape(module)
        refresh(graph, adjust=lambda node, value: _with_last_channels(node, value, lanes))
    regions: list[Region] = []
    refused: list[Decision] = []
    for each in regions_of(graph, lanes):
        if isinstance(each, Region):
            regions.append(shelf.fastest(each))
        else:
            node, reason = each
            refused.append(Decision(name=node.name, functions=str(node.target), shape=shape_of(node), reason=reason))
    # What a library does faster is not compiled.
    dearer = _dearer_than_library(regions, shelf) if competes else {}
    return Plan(tuple(regions), tuple(refused), dearer)


def predicted(
    module: Any, shelf: KernelShelf, *, parameters: int, competes: bool = True
) -> tuple[list[Decision], GraphPrice]:
    """Decisions about a graph module for a processor and the time of a call of it, before anything is compiled; guards
    are of so many parameters."""
    planned = plan(module, shelf, competes=competes)
    decisions, taken, stays = list(planned.refused), {}, {}
    for region in planned.regions:
        seconds, name = _seconds(region, shelf), shelf.name_of(region.expr)
        reason = planned.dearer.get(name, "") if seconds else "no kernel"
        decisions.append(region_decision(region, name, seconds, reason))
        if reason:
            stays[region] = packed_seconds(region, seconds, shelf.device)
        else:
            taken[region] = seconds
    return decisions, graph_price(module.graph, taken, stays, shelf.device, parameters)


def region_decision(region: Region, name: str, seconds: float, reason: str, has_failed: bool = False) -> Decision:
    """The decision about a region."""
    return Decision(
        name=name,
        functions=region.functions,
        shape=region.shape,
        multiply_adds=region.anchor.multiply_adds,
        seconds=seconds,
        reason=reason,
        has_failed=has_failed,
    )


def _rewritten(module: Any, shelf: KernelShelf, emulated: bool, competes: bool) -> list[Decision]:
    planned = plan(module, shelf, competes=competes)
    regions, dearer, decisions = planned.regions, planned.dearer, list(planned.refused)
    kernels = shelf.kernels([region.expr for region in regions if shelf.name_of(region.expr) not in dearer])
    rewriting = _Rewriting(module, emulated)
    for region in regions:
        name = shelf.name_of(region.expr)
        kernel = kernels.get(name, "")
        reason, fault = dearer.get(name, ""), ""
        if not reason:
            fault = rewriting.put(region, kernel) if isinstance(kernel, Kernel) else kernel
            if fault:
                log.warning("%s stays with PyTorch: %s", name, fault)
        seconds = kernel.seconds if isinstance(kernel, Kernel) else math.nan
        decisions.append(region_decision(region, name, seconds, reason or fault, has_failed=bool(fault)))
    rewriting.settle()
    return decisions


def _with_last_channels(node: Any, value: Any, lanes: int) -> Any:
    """A value as kernels of ours are to write it."""
    return value.contiguous(memory_format=LAST) if writes_last_channels(node, lanes) else value


def _dearer_than_library(regions: Sequence[Region], shelf: KernelShelf) -> dict[str, str]:
    """Kernels that are expected to take longer than the library's for the same operators, by name, with both times."""
    if is_processor(shelf.device):
        return _dearer_on_processor({region: _seconds(region, shelf) for region in regions}, shelf)
    ours = {region: shelf.seconds(region.expr) for region in regions}
    dearer = {}
    for region, seconds in ours.items():
        with suppress(InputError):  # an operator that no library is known for
            library = library_time(region.expr, shelf.device)
            if library.seconds < seconds:
                times = f"{library.seconds * 1e6:.1f} µs, {seconds * 1e6:.1f} µs the kernel"
                dearer[shelf.name_of(region.expr)] = f"{library.kernel} is expected to take {times}"
    return dearer


def _dearer_on_processor(ours: Mapping[Region, float], shelf: KernelShelf) -> dict[str, str]:
    """All kernels of weights that never change, or none: a library that packs weights keeps what lies between its
    operators in an order of its own, and every change between its kernels and ours costs a copy."""
    frozen = [region for region in ours if any(map(is_constant, region.anchor.operands.values()))]
    theirs = sum(packed_seconds(region, ours[region], shelf.device) for region in frozen)
    total = sum(ours[region] for region in frozen)
    if total <= CERTAIN * theirs:
        return {}
    reason = (
        f"oneDNN on packed weights is expected to take {theirs * 1e3:.2f} ms for the graph, {total * 1e3:.2f} ms ours"
    )
    return {shelf.name_of(region.expr): reason for region in frozen}


#: Share of a processor's peak that oneDNN's products and dense convolutions reach besides what they read and write, on
#: weights that were packed before: ViT-small and ResNet-50, as Inductor runs them frozen on two cores of a Xeon with
#: AVX-512, by their time over that of our kernels in the same turns and what is predicted for those.
PACKED_SHARES = {"matmul": 0.85, "conv2d": 0.75}

#: Times within so much of each other are alike as far as they are predicted: kernels of ours are taken then, since
#: those were held against PyTorch's and leave nothing behind them to loops of their own.
CERTAIN = 1.03

#: Time of oneDNN's depthwise and grouped convolutions as a multiple of ours: the less of the two orders of images, 4.6
#: and 2.5 times (docs/bench-cpu.md's processor), less what a network's own order of images spares it.
GROUPED_TIMES = 2.0


def packed_seconds(region: Region, ours_seconds: float, device: DeviceSpec) -> float:
    """Time of a library's product or convolution on weights that never change: the arithmetic of all cores, and what it
    reads and writes, weights from memory; of convolutions in groups by ours. Functions behind it are a loop of
    Inductor's."""
    anchor = region.anchor
    following = _loop_seconds(region, device)
    if anchor.kind not in PACKED_SHARES or "g" in anchor.sizes:
        return GROUPED_TIMES * ours_seconds + following
    arithmetic = 2 * anchor.multiply_adds / (PACKED_SHARES[anchor.kind] * device.peak_flops("float32"))
    changing = [node for node in anchor.operands.values() if not is_constant(node)]
    moved = 4 * (math.prod(region.shape) + sum(math.prod(shape_of(node)) for node in changing))
    return arithmetic + moved / bandwidth_for(moved, device) + _weight_seconds(region, device) + following


def _loop_seconds(region: Region, device: DeviceSpec) -> float:
    """Time of the functions behind a sum of products as a loop of its own; 0 where there are none."""
    if all(node.target in VIEWS for node in region.nodes[1:]):
        return 0.0
    others = {operand.node for operand in region.operands} - set(region.anchor.operands.values())
    moved = 4 * (2 * math.prod(region.shape) + sum(math.prod(shape_of(node)) for node in others))
    return moved / bandwidth_for(moved, device)


def _seconds(region: Region, shelf: KernelShelf) -> float:
    """Expected time of a region's kernel in a network; 0 where it has none."""
    seconds = shelf.seconds(region.expr)
    return max(seconds, _weight_seconds(region, shelf.device)) if seconds else 0.0


def _weight_seconds(region: Region, device: DeviceSpec) -> float:
    """Time in which a region's weights come from memory: those of a whole network leave caches between two calls."""
    weights = [math.prod(shape_of(node)) for node in region.anchor.operands.values() if is_constant(node)]
    return 4 * max(weights, default=0) / reading_bandwidth(device)


@dataclass
class _Rewriting:
    """A graph module on its way.

    Attributes:
        faults: what is wrong with an operator, by itself; empty where nothing is.
        replaced: results of regions -> the nodes that stand in their place.
        constants: nodes that arrange constants, by node and order.
        formats: orders in which operators of ours read their operands, by node.
    """

    module: Any
    emulated: bool
    faults: dict[Any, str] = field(default_factory=dict)
    replaced: dict[Any, Any] = field(default_factory=dict)
    constants: dict[Operand, Any] = field(default_factory=dict)
    formats: dict[Any, tuple[Any, ...]] = field(default_factory=dict)

    def put(self, region: Region, kernel: Kernel) -> str:
        """Put a kernel in the place of its region; why not, where it is wrong or cannot be loaded."""
        formats = tuple(operand.memory_format for operand in region.operands)
        try:
            op = region_operator(kernel.bundle, region.shape, region.memory_format, formats, emulated=self.emulated)
        except InputError as error:
            return str(error)
        operands = [replace(operand, node=self.replaced.get(operand.node, operand.node)) for operand in region.operands]
        if op not in self.faults:
            try:
                self.faults[op] = _fault(self.module, region, operands, op)
            except Exception as error:  # whatever keeps a kernel from running must not keep the model from it
                self.faults[op] = f"it does not run here: {type(error).__name__}: {error}"
        if self.faults[op]:
            return self.faults[op]
        graph, result = self.module.graph, region.result
        arguments = tuple(map(self._argument, operands))
        with graph.inserting_before(result):
            called = graph.call_function(op, arguments)
        called.meta = dict(result.meta)
        called.meta["val"] = result.meta["val"].new_empty(region.shape).contiguous(memory_format=region.memory_format)
        result.replace_all_uses_with(called)
        self.replaced[result] = called
        self.formats[called] = formats
        for node in reversed(region.nodes):
            graph.erase_node(node)
        return ""

    def settle(self) -> None:
        """Give every operator of ours its operands in the orders in which it reads them: copies, where they lie in
        others."""
        graph = self.module.graph

        def copy_operands(node: Any) -> None:
            for place, memory_format in enumerate(self.formats.get(node, ())):
                operand = node.args[place]
                if not operand.meta["val"].is_contiguous(memory_format=memory_format):
                    with graph.inserting_before(node):
                        node.update_arg(place, dense_copy(graph, operand, memory_format))

        refresh(graph, before=copy_operands)

    def _argument(self, operand: Operand) -> Any:
        """The node that an operator of ours reads, for a constant one that gives it the order that it reads."""
        if not is_constant(operand.node):
            return operand.node
        if operand not in self.constants:
            self.constants[operand] = arranged_constant(self.module.graph, operand)
        return self.constants[operand]


# Proof


def _fault(module: Any, region: Region, operands: Sequence[Operand], op: Any) -> str:
    """What is wrong with a kernel's results on random numbers of the region's own sizes; empty where nothing is.

    On a machine without the device nothing is run: there, new kernels were proved by the emulator.
    """
    value = region.result.meta["val"]
    if value.device.type != ON_PROCESSOR and not torch.cuda.is_available():
        return ""
    with on_real_tensors():
        generator = torch.Generator(device=value.device).manual_seed(0)
        values = {operand.node: _numbers(module, operand.node, generator) for operand in operands}
        result = op(*(operand.arranged(values[operand.node]) for operand in operands))
        expected = _evaluated(module, region.result, values)
        largest = expected.abs().max().item()
        error = (result.double() - expected.double()).abs().max().item() / (largest or 1.0)
    tolerance = TOLERANCES[value.dtype]
    if not error <= tolerance:
        return f"its results are off by {error:.1e} of the largest, and {tolerance:g} is allowed"
    return ""


def _numbers(module: Any, node: Any, generator: Any) -> Any:
    if is_constant(node):
        return constant_of(module, node)
    value = node.meta["val"]
    shape = [int(extent) for extent in value.shape]
    return torch.randn(shape, generator=generator, device=value.device).to(value.dtype)


def _evaluated(module: Any, node: Any, values: dict[Any, Any]) -> Any:
    """The value of a node, by PyTorch."""
    if isinstance(node, list | tuple):
        return [_evaluated(module, each, values) for each in node]
    if not hasattr(node, "op"):
        return node
    if node not in values:
        if is_constant(node):
            values[node] = constant_of(module, node)
        else:
            arguments = _evaluated(module, node.args, values)
            keywords = {name: _evaluated(module, each, values) for name, each in node.kwargs.items()}
            values[node] = node.target(*arguments, **keywords)
    return values[node]
