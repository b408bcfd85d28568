"""Orders of elements over a graph: images whose channels lie last, and weights packed as kernels read them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch.fx.node import map_arg

#: Elements of an image that one place has in every channel lie together, or places of one channel do.
LAST, FIRST = torch.channels_last, torch.contiguous_format

_aten = torch.ops.aten


@dataclass(frozen=True)
class Packing:
    """Order of the elements of a tensor that never changes.

    Attributes:
        extents: what its dimensions are cut into.
        order: places of those in the packed tensor, outermost first.

    >>> Packing((3, 2, 4), (1, 0, 2)).packed(torch.zeros(3, 8)).shape
    torch.Size([2, 3, 4])
    """

    extents: tuple[int, ...]
    order: tuple[int, ...]

    def packed(self, tensor: Any) -> Any:
        """A tensor in this order, dense."""
        return tensor.reshape(self.extents).permute(self.order).contiguous()


@dataclass(frozen=True)
class Operand:
    """A node of a graph, and the order in which a kernel reads its elements.

    Attributes:
        node: of the graph.
        memory_format: `LAST` for images whose channels lie last, `FIRST` for dense tensors in the order of their
            dimensions.
        packing: of a node that never changes.
    """

    node: Any
    memory_format: Any = FIRST
    packing: Packing | None = None

    def arranged(self, tensor: Any) -> Any:
        """A tensor of the node's shape, dense and in this order."""
        if self.packing is not None:
            return self.packing.packed(tensor)
        return tensor.contiguous(memory_format=self.memory_format)

    def elements(self, tensor: Any) -> Any:
        """The elements of a tensor of the node's shape, in this order; shape (elements,)."""
        return in_memory(self.arranged(tensor)) if self.packing is None else self.arranged(tensor).flatten()


def in_memory(tensor: Any) -> Any:
    """Elements of a dense tensor as they lie in memory; shape (elements,)."""
    return tensor.permute(0, 2, 3, 1).flatten() if has_last_channels(tensor) else tensor.flatten()


def has_last_channels(value: Any) -> bool:
    """True for images whose channels lie last, and that are no dense tensors in the order of their dimensions."""
    is_image = value.dim() == 4
    return is_image and value.is_contiguous(memory_format=LAST) and not value.is_contiguous()


def refresh(graph: Any, *, adjust: Callable[[Any, Any], Any] = lambda _, value: value, before: Any = None) -> None:
    """Work out anew the shapes and orders of all values of a graph, which changed or will.

    Args:
        graph: of PyTorch's functions.
        adjust: from a node and its value to the value that it will have.
        before: called with every node before its value is worked out, to put others in front of it.
    """
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if mode is None:
        return
    with mode, torch.no_grad():
        for node in list(graph.nodes):
            if before is not None:
                before(node)
            if node.op == "call_function" and _is_pure(node.target):
                arguments, keywords = map_arg((node.args, node.kwargs), lambda other: other.meta.get("val"))
                node.meta["val"] = adjust(node, node.target(*arguments, **keywords))


def _is_pure(target: Any) -> bool:
    """True for functions whose value follows from their arguments' and that write to none of them."""
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable and target.namespace in ("aten", "prims", "roller_regions")
    return target is operator.getitem


@contextmanager
def orders_of_outputs(graph: Any) -> Iterator[None]:
    """A block that may change the orders of a graph's values: its outputs are copied into those that they had."""
    outputs = _outputs(graph)
    had_last = [has_last_channels(node.meta["val"]) for node in outputs]
    were_dense = [node.meta["val"].is_contiguous() or last for node, last in zip(outputs, had_last, strict=True)]
    yield
    (end,) = [node for node in graph.nodes if node.op == "output"]
    for node, last, dense in zip(_outputs(graph), had_last, were_dense, strict=True):
        memory_format = LAST if last else FIRST
        if dense and not node.meta["val"].is_contiguous(memory_format=memory_format):
            with graph.inserting_before(end):
                copied = dense_copy(graph, node, memory_format)
            end.replace_input_with(node, copied)


def _outputs(graph: Any) -> list[Any]:
    """Tensors that a graph gives."""
    (end,) = [node for node in graph.nodes if node.op == "output"]
    return [node for node in _flat(end.args) if isinstance(node.meta.get("val"), torch.Tensor)]


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from _flat(argument)
        elif hasattr(argument, "meta"):
            yield argument


def dense_copy(graph: Any, node: Any, memory_format: Any) -> Any:
    """A copy of a node's value in an order, put where the graph inserts."""
    copied = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": memory_format})
    copied.meta = {"val": node.meta["val"].contiguous(memory_format=memory_format)}
    return copied


def arranged_constant(graph: Any, operand: Operand) -> Any:
    """A node that gives a constant the order in which a kernel reads it; the constant itself where it has that."""
    node, packing = operand.node, operand.packing
    value = node.meta["val"]
    if packing is None and value.is_contiguous(memory_format=operand.memory_format):
        return node
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    if packing is not None:
        calls += [
            (_aten.reshape.default, (list(packing.extents),), {}),
            (_aten.permute.default, (list(packing.order),), {}),
        ]
    calls.append((_aten.clone.default, (), {"memory_format": operand.memory_format}))
    for function, arguments, keywords in calls:
        with graph.inserting_after(node):
            following = graph.call_function(function, (node, *arguments), keywords)
        following.meta = {"val": function(node.meta["val"], *arguments, **keywords)}
        node = following
    return node
