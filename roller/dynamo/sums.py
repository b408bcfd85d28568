"""Sums of products in a graph of PyTorch as first statements of operators of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roller.dynamo.orders import FIRST, Packing

#: PyTorch's dtypes by the names that both have.
DTYPES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32")}


class UnsupportedError(ValueError):
    """A node that no kernel of ours computes; the message says why."""


@dataclass(frozen=True)
class Anchor:
    """The sum of products that a region begins with.

    Attributes:
        node: of the graph.
        kind: word for its kind, such as ``conv2d``.
        axes: of its value, in the order in which its elements lie.
        terms: text of the sum.
        sizes: extents of the axes.
        shapes: of inputs that the text does not tell.
        operands: nodes by the names of their tensors in the text.
        formats: orders of the operands that lie in another one than that of their dimensions.
        packings: of the operands that never change.
        dims: its dimensions, or several taken as one: the axes of each, outermost first.
        biases: vectors that are added to it along one of `dims`: the node and its place.
        multiply_adds: how many it takes.
        memory_format: order of its value.
    """

    node: Any
    kind: str
    axes: tuple[str, ...]
    terms: str
    sizes: Mapping[str, int]
    operands: Mapping[str, Any]
    dims: tuple[tuple[str, ...], ...]
    multiply_adds: int
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    formats: Mapping[str, Any] = field(default_factory=dict)
    packings: Mapping[str, Packing] = field(default_factory=dict)
    biases: tuple[tuple[Any, int], ...] = ()
    memory_format: Any = FIRST

    @property
    def statement(self) -> str:
        """Its text; the value is called ``T``."""
        return f"T[{','.join(self.axes)}] = {self.terms}"

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of its value along `dims`."""
        return tuple(math.prod(self.sizes[axis] for axis in axes) for axes in self.dims)


def shape_of(node: Any) -> tuple[int, ...]:
    """Extents of a node's value; sizes that are known as symbols alone become guards of the graph."""
    return tuple(int(extent) for extent in node.meta["val"].shape)


def is_constant(node: Any) -> bool:
    """True for a tensor that never changes, such as a frozen parameter."""
    return node.op == "get_attr"


def panel_widths(extent: int, lanes: int) -> list[int]:
    """Widths of the panels that weights are packed into, from one vector to four, and eight."""
    widths = (vectors * lanes for vectors in (1, 2, 3, 4, 8))
    return [width for width in widths if width and extent % width == 0 < extent - width]
