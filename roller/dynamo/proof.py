"""Kernels on numbers of their regions' own sizes, held against PyTorch before a graph calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roller.dynamo.constants import constant_of, on_real_tensors
from roller.dynamo.kernels import ON_PROCESSOR
from roller.dynamo.orders import Operand
from roller.dynamo.regions import Region
from roller.dynamo.sums import is_constant

#: Largest error that a region may have against PyTorch's own operators, relative to the largest of their results, by
#: the dtype of its result: sums in another order, and of 16 bits one rounding where PyTorch has several.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def fault_of(module: Any, region: Region, operands: Sequence[Operand], op: Any) -> str:
    """The fault of a kernel, by its results on random numbers of the region's own sizes; empty where it has none.

    On a machine without the device nothing is run: there, new kernels were proved by the emulator.
    """
    value = region.result.meta["val"]
    if value.device.type != ON_PROCESSOR and not torch.cuda.is_available():
        return ""
    with on_real_tensors():
        generator = torch.Generator(device=value.device).manual_seed(0)
        values = {operand.node: numbers(module, operand.node, generator) for operand in operands}
        result = op(*(operand.arranged(values[operand.node]) for operand in operands))
        expected = _evaluated(module, region.result, values)
        largest = expected.abs().max().item()
        error = (result.double() - expected.double()).abs().max().item() / (largest or 1.0)
    tolerance = TOLERANCES[value.dtype]
    if not error <= tolerance:
        return f"its results are off by {error:.1e} of the largest, and {tolerance:g} is allowed"
    return ""


def numbers(module: Any, node: Any, generator: Any) -> Any:
    """A tensor of a node's shape and dtype: the constant that it is, or random numbers."""
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
        known = node.meta.get("val")
        if is_constant(node):
            values[node] = constant_of(module, node)
        elif isinstance(known, int | torch.SymInt):
            # A size that the graph is handed, or computes: kernels are of the sizes that it was captured with.
            values[node] = int(known)
        else:
            arguments = _evaluated(module, node.args, values)
            keywords = {name: _evaluated(module, each, values) for name, each in node.kwargs.items()}
            values[node] = node.target(*arguments, **keywords)
    return values[node]
