"""A model with compiled kernels in place of its own operators: what a prediction is held against.

The model is traced by `torch.fx` and run once, node by node, under the profiler, so that the plan is made from a trace
as for a simulation. Here, the graph of the model also says whether each call takes the result of the one before it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from codegen.bundle.reader import read_bundle
from codegen.bundle.records import Argument
from daydream.graph.graph import TaskGraph
from daydream.swap.bundles import BundledOperator, Identity
from daydream.swap.operands import Operands, operands_of
from daydream.swap.plan import Replacement, replacements
from daydream.tasks.build import read_graph
from daydream.trace.trace import NONE
from hal.support.errors import InputError

_NODE = "node: "
_UNFIT = re.compile(r"\W", re.ASCII)


@dataclass(frozen=True)
class Swapped:
    """A model with compiled kernels in it.

    Attributes:
        model: a `torch.fx.GraphModule`; its parameters are those of the original, where no batch norm is folded in.
        replaced: what was replaced, in the order in which it runs.
        kept: why some of the plan was left as it was, a sentence each.
    """

    model: Any
    replaced: tuple[Replacement, ...]
    kept: tuple[str, ...]


def swap(
    model: Any,
    inputs: Sequence[Any],
    kernels: Mapping[Identity, BundledOperator],
    *,
    match: str = "",
    namespace: str = "roller",
) -> Swapped:
    """The model with a kernel in place of every run of operators that one of `kernels` computes.

    Args:
        model: a module in evaluation mode, on the CPU, whose control flow does not depend on values.
        inputs: of the sizes that it will be called with.
        kernels: what :func:`daydream.swap.bundles.read_bundles` found.
        match: regular expression over the bundles' names; empty is all.
        namespace: of the operators of PyTorch that the bundles become. PyTorch keeps an operator as long as the
            process, so that other bundles of the same names need another one.

    Raises:
        InputError: the model is in training mode, `torch.fx` cannot trace it, or an operator's name is taken.
    """
    torch, fx = import_module("torch"), import_module("torch.fx")
    if model.training:
        raise InputError("model", "is in training mode", "call model.eval(); kernels have no backward pass")
    try:
        traced = fx.symbolic_trace(model)
    except Exception as error:
        raise InputError("model", f"cannot be traced by torch.fx: {error}", "take its untraceable part out") from None
    graph = _recorded(torch, fx, traced, inputs)
    planned, _ = replacements(graph, kernels, match)
    owners = _nodes_by_call(graph, traced)
    replaced, reasons = [], []
    for replacement in planned:
        nodes = list(dict.fromkeys(owners[call.event] for call in replacement.run.calls))
        reason = _objection(replacement, nodes, owners)
        operands = reason or operands_of(traced, replacement, nodes)
        if isinstance(operands, str):
            reasons.append(f"{replacement.kernel.name}: {operands}")
            continue
        _put(traced, replacement, nodes, operands, _operator(replacement.kernel, namespace))
        replaced.append(replacement)
    traced.graph.lint()
    traced.recompile()
    return Swapped(traced, tuple(replaced), tuple(reasons))


def operator_name(kernel: BundledOperator, namespace: str) -> str:
    """Name of a kernel as an operator of PyTorch, and in traces of it."""
    return f"{namespace}::{_UNFIT.sub('_', kernel.name)}"


def _operator(kernel: BundledOperator, namespace: str) -> Any:
    from codegen.runtime.load import torch_op

    return torch_op(kernel.folder, operator_name(kernel, namespace))


# The model's own trace


def _recorded(torch: Any, fx: Any, traced: Any, inputs: Sequence[Any]) -> TaskGraph:
    """One run of the model with a range around each node."""
    from daydream.record.record import record

    class Interpreter(fx.Interpreter):  # type: ignore[misc]
        def run_node(self, n: Any) -> Any:
            with torch.profiler.record_function(f"{_NODE}{n.name}"):
                return super().run_node(n)

    run = Interpreter(traced).run
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.json"
        with record(path, steps=1, warmup=1, with_modules=False) as recorder:
            for _ in range(2):
                run(*inputs)
                recorder.step()
        return read_graph(path)


def _nodes_by_call(graph: TaskGraph, traced: Any) -> dict[int, Any]:
    """The node that each operator of the trace belongs to, by the operator's row."""
    trace = graph.trace
    assert trace is not None
    by_name = {f"{_NODE}{node.name}": node for node in traced.graph.nodes}
    owners: dict[int, Any] = {}
    for row in range(len(trace)):
        node = by_name.get(trace.text(row))
        above = int(graph.enclosing[row])
        # Ranges stand before what is inside them.
        owners[row] = node if node is not None else owners.get(above) if above != NONE else None
    return owners


def _objection(replacement: Replacement, nodes: Sequence[Any], owners: Mapping[int, Any]) -> str:
    """Why the graph of the model does not allow a replacement that its trace suggests; empty where it does."""
    if None in nodes or len(nodes) != len(replacement.run.calls):
        return "calls and nodes of the model do not match one to one"
    for before, after in pairwise(nodes):
        if list(before.users) != [after]:
            return f"{before.name} has other users than {after.name}"
    for call, node, before in zip(replacement.run.calls, nodes, [None, *nodes[:-1]], strict=True):
        if not call.name.endswith("_"):
            continue
        written = node.args[0]
        if written is not before and list(getattr(written, "users", ())) != [node]:
            return f"{node.name} writes to a tensor that others read"
    return ""


# Nodes


def _put(traced: Any, replacement: Replacement, nodes: Sequence[Any], operands: Operands, op: Any) -> None:
    """Puts a call of the kernel where the run of calls ended, and takes the run's nodes out."""
    graph, last = traced.graph, nodes[-1]
    arguments = read_bundle(replacement.kernel.folder).inputs
    fixed = {name: value for name, value in operands.values.items() if hasattr(value, "data_ptr")}
    moving = [argument for argument in arguments if argument.name not in fixed]
    kernel = _bound(op, [fixed.get(argument.name) for argument in arguments], f"kernel_{last.name}")
    with graph.inserting_before(last):
        called = graph.call_function(kernel, tuple(_shaped(graph, operands, argument) for argument in moving))
        shape = operands.output
        result = called if shape is None else graph.call_method("reshape", (called, shape))
    last.replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)
    for node in operands.dead:
        if not node.users:
            graph.erase_node(node)


def _shaped(graph: Any, operands: Operands, argument: Argument) -> Any:
    """The operand in the shape that the kernel takes."""
    value, shape = operands.values[argument.name], operands.shapes.get(argument.name)
    if shape is None or shape == argument.shape:
        return value
    return graph.call_method("reshape", (value, argument.shape))


def _bound(op: Any, places: Sequence[Any], name: str) -> Any:
    """The kernel as a function of what is None among its inputs: parameters are looked up once, here."""
    free = [place for place, value in enumerate(places) if value is None]

    def kernel(*tensors: Any) -> Any:
        arguments = list(places)
        for place, tensor in zip(free, tensors, strict=True):
            arguments[place] = tensor
        return op(*arguments)

    kernel.__name__ = kernel.__qualname__ = name
    return kernel
