"""A graph of PyTorch with operators of ours in place of its regions, each held against PyTorch's own first."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch._inductor.fx_passes.post_grad import view_to_reshape

from hal.support.errors import InputError
from roller.dynamo.convolutions import writes_last_channels
from roller.dynamo.kernels import Kernel, KernelShelf, is_processor
from roller.dynamo.operators import region_operator
from roller.dynamo.orders import LAST, Operand, arranged_constant, dense_copy, orders_of_outputs, refresh
from roller.dynamo.packed import dearer_than_packed, packed_seconds, seconds_in_network
from roller.dynamo.prices import GraphPrice, graph_price
from roller.dynamo.proof import fault_of
from roller.dynamo.regions import Region, regions_of
from roller.dynamo.sums import is_constant, shape_of
from roller.library.operators import library_time

log = logging.getLogger("roller.backend")


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


def plan(module: Any, shelf: KernelShelf, *, competes: bool = True, tries: bool = False) -> Plan:
    """Regions of a graph module for which kernels of ours are to be put in; orders of its values change to theirs.

    On a processor kernels and the library are timed for those that are in doubt, where it tries them.
    """
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
    dearer = _dearer_than_library(module, regions, shelf, tries) if competes else {}
    return Plan(tuple(regions), tuple(refused), dearer)


def predicted(
    module: Any, shelf: KernelShelf, *, parameters: int, competes: bool = True
) -> tuple[list[Decision], GraphPrice]:
    """Decisions about a graph module for a processor and the time of a call of it, before anything is compiled; guards
    are of so many parameters."""
    planned = plan(module, shelf, competes=competes)
    decisions, taken, stays = list(planned.refused), {}, {}
    for region in planned.regions:
        seconds, name = seconds_in_network(region, shelf), shelf.name_of(region.expr)
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
    planned = plan(module, shelf, competes=competes, tries=not emulated)
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


def _dearer_than_library(module: Any, regions: Sequence[Region], shelf: KernelShelf, tries: bool) -> dict[str, str]:
    """Kernels that take longer than the library's for the same operators, by name, with both times."""
    if is_processor(shelf.device):
        return dearer_than_packed(regions, shelf, module if tries else None)
    ours = {region: shelf.seconds(region.expr) for region in regions}
    dearer = {}
    for region, seconds in ours.items():
        with suppress(InputError):  # an operator that no library is known for
            library = library_time(region.expr, shelf.device)
            if library.seconds < seconds:
                times = f"{library.seconds * 1e6:.1f} µs, {seconds * 1e6:.1f} µs the kernel"
                dearer[shelf.name_of(region.expr)] = f"{library.kernel} is expected to take {times}"
    return dearer


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
                self.faults[op] = fault_of(self.module, region, operands, op)
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
