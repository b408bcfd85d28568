"""Regions of a graph that one kernel of ours computes: a sum of products, and the point-wise functions behind it.

A region grows from its anchor over nodes whose tensors are its own values or come from elsewhere, as long as one value
alone leaves it: what else would be stored twice. Nodes that only give a value another shape belong to it, since a
kernel writes elements in their order whatever the shape is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hal.support.errors import InputError
from roller.dynamo.anchors import anchors_of, is_anchor
from roller.dynamo.orders import FIRST, LAST, Operand
from roller.dynamo.pointwise import RESHAPES, RULES, number
from roller.dynamo.sums import DTYPES, Anchor, UnsupportedError, shape_of
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data

#: Nodes that a region has at most: longer chains are rare, and every one is read by a compiler.
MOST_NODES = 24


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """Nodes that one kernel takes the place of.

    Attributes:
        anchor: the sum of products.
        nodes: in the order of the graph, the anchor first; the value of the last one leaves.
        expr: what the kernel computes.
        operands: nodes in the order of its inputs.
        orders: the sum with its weights in other orders.
    """

    anchor: Anchor
    nodes: tuple[Any, ...]
    expr: TensorExpr
    operands: tuple[Operand, ...]
    orders: tuple[Anchor, ...] = ()

    def in_order(self, number: int) -> Region:
        """The same with its weights in the order of a number: 0 is this one, others follow those of `orders`."""
        return self if not number else _written(self.orders[number - 1], self.nodes)

    @property
    def others(self) -> tuple[Region, ...]:
        """The same with its weights in all other orders."""
        return tuple(self.in_order(number + 1) for number in range(len(self.orders)))

    @property
    def memory_format(self) -> Any:
        """The order in which the kernel writes the value that leaves."""
        return self.anchor.memory_format if len(self.shape) == 4 else FIRST

    @property
    def result(self) -> Any:
        """The node whose value the kernel writes."""
        return self.nodes[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of that value."""
        return shape_of(self.result)

    @property
    def functions(self) -> str:
        """The operators of PyTorch that it stands for."""
        return " ".join(str(node.target).removeprefix("aten.").split(".")[0] for node in self.nodes)


def regions_of(graph: Any, lanes: int = 0) -> Iterator[Region | tuple[Any, str]]:
    """Regions of a graph in its order; for anchors that cannot be one, the node and the reason.

    Args:
        graph: of PyTorch's functions.
        lanes: elements of a vector of the processor that kernels are for, which weights that never change are packed
            for; 0 for GPUs.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    taken: set[Any] = set()
    for node in graph.nodes:
        if not is_anchor(node):
            continue
        try:
            region = _region(anchors_of(node, lanes), order, taken)
        except UnsupportedError as error:
            yield node, str(error)
            continue
        taken.update(region.nodes)
        yield region


def _region(anchors: Sequence[Anchor], order: Mapping[Any, int], taken: set[Any]) -> Region:
    """The longest region of an anchor that the language says."""
    anchor, *others = anchors
    for nodes in reversed(_prefixes(anchor.node, order, taken)):
        try:
            return replace(_written(anchor, nodes), orders=tuple(others))
        except UnsupportedError:
            if len(nodes) == 1:
                raise
    raise AssertionError("an anchor alone is a prefix")


def _prefixes(anchor: Any, order: Mapping[Any, int], taken: set[Any]) -> list[tuple[Any, ...]]:
    """Sets of nodes from an anchor on that a single value leaves, the shortest first."""
    inside, prefixes = [anchor], [(anchor,)]
    members = {anchor}
    while len(inside) < MOST_NODES:
        users = {user for node in inside for user in node.users if user not in members}
        following = [user for user in users if user not in taken and _may_join(user, members)]
        if not following:
            break
        node = min(following, key=order.__getitem__)
        inside.append(node)
        members.add(node)
        leaving = [each for each in inside if not each.users or any(user not in members for user in each.users)]
        if leaving == [node]:
            prefixes.append(tuple(sorted(inside, key=order.__getitem__)))
    return prefixes


def _may_join(node: Any, members: set[Any]) -> bool:
    """True for a point-wise function or another shape of values that are there before the region is."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.target in RESHAPES:
        return node.args[0] in members
    return node.target in RULES and node.meta["val"].dtype in (*DTYPES, torch.bool)


# Text


@dataclass
class _Text:
    """Statements of a region as they are written."""

    anchor: Anchor
    statements: list[str]
    values: dict[Any, str]
    operands: dict[str, Operand]
    dtypes: dict[str, str]
    names: dict[tuple[Any, tuple[str, ...]], str] = field(default_factory=dict)

    @property
    def axes(self) -> str:
        """Axes of the value."""
        return ",".join(self.anchor.axes)

    def read(self, node: Any, shape: Sequence[int]) -> str:
        """A tensor from outside as it is broadcast to a value of some shape.

        Raises:
            UnsupportedError: the language has no such index.
        """
        value = node.meta["val"]
        if value.dtype not in DTYPES:
            raise UnsupportedError(f"an operand of {value.dtype}")
        return self.indexed(node, self._axes_of(shape_of(node), shape))

    def indexed(self, node: Any, axes: tuple[str, ...]) -> str:
        """Read of a tensor along axes."""
        if not axes:
            raise UnsupportedError("an operand of one element")
        key = (node, axes)
        name = self.names.setdefault(key, f"E{len(self.names) + 1}")
        # Images are read in the order in which they are written.
        self.operands[name] = Operand(node, self.anchor.memory_format if len(shape_of(node)) == 4 else FIRST)
        self.dtypes[name] = DTYPES[node.meta["val"].dtype]
        return f"{name}[{','.join(axes)}]"

    def _axes_of(self, extents: Sequence[int], shape: Sequence[int]) -> tuple[str, ...]:
        """Axes of the text that index a tensor of some extents, broadcast to a shape of the region's value."""
        groups = _groups(shape, self.anchor.extents)
        if self.anchor.memory_format is LAST and len(extents) == 3 and sum(extent > 1 for extent in extents) > 1:
            raise UnsupportedError("an operand of fewer dimensions than the images that it is added to")
        extents = (1,) * (len(shape) - len(extents)) + tuple(extents)
        axes: list[str] = []
        for dims, group in zip(groups, self.anchor.dims, strict=True):
            present = [extents[dim] == shape[dim] for dim in dims if shape[dim] != 1]
            if all(present) and present:
                axes += group
            elif any(present):
                raise UnsupportedError("an operand that is broadcast along a part of a dimension")
        return tuple(sorted(axes, key=self.anchor.axes.index))


def _groups(shape: Sequence[int], target: Sequence[int]) -> list[list[int]]:
    """For every dimension of the target, the dimensions of a shape that it is cut into.

    Raises:
        UnsupportedError: the shape cuts across the target's dimensions.
    """
    groups: list[list[int]] = []
    position = 0
    for number_of, extent in enumerate(target):
        dims: list[int] = []
        product = 1
        while position < len(shape) and (product < extent or (shape[position] == 1 and extent == 1 and not dims)):
            product *= shape[position]
            dims.append(position)
            position += 1
        if number_of == len(target) - 1:
            while position < len(shape) and shape[position] == 1:
                dims.append(position)
                position += 1
        if product != extent:
            raise UnsupportedError("another shape that cuts across dimensions")
        groups.append(dims)
    if position != len(shape):
        raise UnsupportedError("another shape that cuts across dimensions")
    return groups


def _written(anchor: Anchor, nodes: Sequence[Any]) -> Region:
    """Nodes as an operator of ours.

    Raises:
        UnsupportedError: the language does not say it.
    """
    dtypes = {name: DTYPES.get(node.meta["val"].dtype, "") for name, node in anchor.operands.items()}
    if not all(dtypes.values()):
        raise UnsupportedError("operands that are no floats")
    operands_by_name = {
        name: Operand(node, anchor.formats.get(name, FIRST), anchor.packings.get(name))
        for name, node in anchor.operands.items()
    }
    text = _Text(anchor, [anchor.statement], {}, operands_by_name, dtypes)
    value = f"T[{text.axes}]"
    for bias, dim in anchor.biases:
        value = f"({value} + {text.indexed(bias, anchor.dims[dim])})"
    text.values[anchor.node] = value
    for node in nodes[1:]:
        text.values[node] = _value(text, node)
    result = nodes[-1]
    dtype = DTYPES.get(result.meta["val"].dtype)
    if dtype is None:
        raise UnsupportedError(f"a result of {result.meta['val'].dtype}")
    if len(nodes) > 1 or anchor.biases:
        text.statements.append(f"Y[{text.axes}] = {text.values[result]}")
    output = "Y" if len(text.statements) > 1 else "T"
    data = {
        "expr": "\n".join(text.statements),
        "sizes": dict(anchor.sizes),
        "shapes": {name: list(shape) for name, shape in anchor.shapes.items()},
        "dtypes": text.dtypes | {output: dtype},
        "dtype": dtype,
    }
    try:
        expr = operator_from_data(data)
    except InputError as error:
        raise UnsupportedError(f"{error.field} {error.problem}") from None
    operands = tuple(text.operands[tensor.name] for tensor in expr.inputs)
    for tensor, operand in zip(expr.inputs, operands, strict=True):
        assert math.prod(tensor.caller_shape) == math.prod(shape_of(operand.node)), f"{tensor.name} of {expr.name}"
    return Region(anchor=anchor, nodes=tuple(nodes), expr=expr, operands=operands)


def _value(text: _Text, node: Any) -> str:
    """Text of a node's value; one that is used more than once is a statement of its own."""
    shape = shape_of(node)
    if node.target in RESHAPES:
        _groups(shape, text.anchor.extents)
        if text.anchor.memory_format is LAST and shape != shape_of(text.anchor.node):
            raise UnsupportedError("another shape of images whose channels lie last")
        value = text.values[node.args[0]]
    else:
        arguments = [_argument(text, each, shape) for each in node.args]
        keywords = {name: _argument(text, each, shape) for name, each in node.kwargs.items() if name in _KEYWORDS}
        try:
            value = RULES[node.target](*arguments, **keywords)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"{node.target}: {error}") from None
    if len(node.users) > 1 and "(" in value:
        name = f"V{len(text.statements)}"
        text.statements.append(f"{name}[{text.axes}] = {value}")
        value = f"{name}[{text.axes}]"
    return value


#: Keywords of PyTorch's functions that change their value.
_KEYWORDS = frozenset({"alpha", "approximate", "rounding_mode", "min", "max"})


def _argument(text: _Text, argument: Any, shape: Sequence[int]) -> Any:
    """An argument as a rule takes it: text of a value or a number, a word, or None."""
    if argument in text.values if hasattr(argument, "op") else False:
        if shape_of(argument) != tuple(shape):
            raise UnsupportedError("a value that is broadcast")
        return text.values[argument]
    if hasattr(argument, "op"):
        return text.read(argument, shape)
    if isinstance(argument, bool) or argument is None or isinstance(argument, str | torch.dtype):
        return argument
    if isinstance(argument, int | float):
        try:
            return number(argument)
        except ValueError as error:
            raise UnsupportedError(str(error)) from None
    raise UnsupportedError(f"an argument of type {type(argument).__name__}")
