"""Sums of products in a graph of PyTorch as first statements of an operator: convolutions and matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.support.errors import InputError
from sokoban.language.named import NAMED_OPERATORS
from sokoban.language.named.base import Program
from sokoban.language.operators import operator_from_data

_aten = torch.ops.aten

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
        statement: its text; the value is called ``T``.
        sizes: extents of the axes.
        shapes: of inputs that the text does not tell.
        operands: nodes by the names of their tensors in the text. A kernel reads the elements of each in the order of
            its dimensions.
        dims: every dimension of its value: its axes in the text, outermost first.
        biases: vectors that are added to it along one dimension: the node and the dimension.
        multiply_adds: how many it takes.
    """

    node: Any
    kind: str
    statement: str
    sizes: Mapping[str, int]
    operands: Mapping[str, Any]
    dims: tuple[tuple[str, ...], ...]
    multiply_adds: int
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    biases: tuple[tuple[Any, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of its value."""
        return shape_of(self.node)


def anchor_of(node: Any) -> Anchor:
    """A node as an anchor.

    Raises:
        UnsupportedError: it is none, or one that the language does not say.
    """
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    if rule is None:
        raise UnsupportedError("no sum of products")
    value = node.meta["val"]
    if value.dtype not in DTYPES:
        raise UnsupportedError(f"values of {str(value.dtype).removeprefix('torch.')}")
    return rule(node)


def is_anchor(node: Any) -> bool:
    """True for nodes of the kinds that regions begin with."""
    return node.op == "call_function" and node.target in _RULES


def shape_of(node: Any) -> tuple[int, ...]:
    """Extents of a node's value; sizes that are known as symbols alone become guards of the graph."""
    return tuple(int(extent) for extent in node.meta["val"].shape)


# Matrix products


def _matrix(node: Any, rows: str, columns: str, batch: str = "") -> tuple[str, Any]:
    """Text of the index of a matrix, and what is read: a transpose of what lies dense in memory where it lies, but one
    that never changes as the product has it, along whose columns kernels read fastest."""
    source = None if is_constant(node) else _untransposed(node)
    if source is not None:
        return f"{batch}{columns},{rows}", source
    return f"{batch}{rows},{columns}", node


def _untransposed(node: Any) -> Any:
    """The dense tensor whose last two dimensions a node exchanges; None where it does something else."""
    if node.op != "call_function":
        return None
    if node.target is _aten.t.default:
        is_exchange = True
    elif node.target is _aten.permute.default:
        order = list(range(len(node.args[1])))
        is_exchange = [each % len(order) for each in node.args[1]] == [*order[:-2], order[-1], order[-2]]
    elif node.target is _aten.transpose.int:
        rank = len(shape_of(node))
        is_exchange = {each % rank for each in node.args[1:3]} == {rank - 1, rank - 2}
    else:
        return None
    source = node.args[0]
    return source if is_exchange and source.meta["val"].is_contiguous() else None


def is_constant(node: Any) -> bool:
    """True for a tensor that never changes, such as a frozen parameter."""
    return node.op == "get_attr"


def _product(node: Any, left: Any, right: Any, biases: Sequence[tuple[Any, int]] = ()) -> Anchor:
    batched = len(shape_of(left)) == 3
    (*lead, m, k), n = shape_of(left), shape_of(right)[-1]
    batch = "b," if batched else ""
    a_index, a = _matrix(left, "m", "k", batch)
    b_index, b = _matrix(right, "k", "n", batch)
    axes = (("b",) if batched else ()) + ("m", "n")
    return Anchor(
        node=node,
        kind="batch_matmul" if batched else "matmul",
        statement=f"T[{','.join(axes)}] = sum(k, A[{a_index}] * B[{b_index}])",
        sizes=dict(zip(axes, (*lead, m, n), strict=True)) | {"k": k},
        operands={"A": a, "B": b},
        dims=tuple((axis,) for axis in axes),
        biases=tuple(biases),
        multiply_adds=math.prod((*lead, m, n, k)),
    )


def _mm(node: Any) -> Anchor:
    return _product(node, *node.args[:2])


def _addmm(node: Any) -> Anchor:
    bias, left, right = node.args[:3]
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1 or len(shape_of(bias)) != 1:
        raise UnsupportedError("a sum with factors, or of matrices")
    return _product(node, left, right, [(bias, 1)])


# Convolutions


def _convolution(node: Any) -> Anchor:
    data, weights, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed:
        raise UnsupportedError("a transposed convolution")
    (n, c, *space), (f, _, *window) = shape_of(data), shape_of(weights)
    if len(space) not in (1, 2):
        raise UnsupportedError(f"a convolution over {len(space)} dimensions")
    # Along one dimension: an image of one row.
    (h, w), (kh, kw) = ([1] * (2 - len(space)) + space), ([1] * (2 - len(window)) + window)
    strides, dilations = ([1] * (2 - len(space)) + list(each) for each in (stride, dilation))
    rows, columns = [0] * (2 - len(space)) + list(padding)
    keys = {"n": n, "c": c, "h": h, "w": w, "kh": kh, "kw": kw, "stride": strides, "dilation": dilations}
    keys["padding"] = [rows, columns, rows, columns]
    is_depthwise = groups == c == f and groups > 1
    kind = "depthwise_conv2d" if is_depthwise else "conv2d"
    program = _program({"op": kind, **keys} | ({} if is_depthwise else {"f": f, "groups": groups}))
    channels = ("c",) if is_depthwise else ("g", "f") if groups > 1 else ("f",)
    space_axes = [("oh",), ("ow",)][2 - len(space) :]
    sizes = program.sizes
    return Anchor(
        node=node,
        kind=kind,
        statement=f"T{program.text.removeprefix(program.output)}",
        sizes=sizes,
        shapes={"X": list(program.shapes["X"])},
        operands={"X": data, "W": weights},
        dims=(("n",), channels, *space_axes) if len(space) == 2 else (("n",), channels, ("oh", "ow")),
        biases=() if bias is None else ((bias, 1),),
        multiply_adds=math.prod(sizes.values()),
    )


def _program(data: dict[str, Any]) -> Program:
    """A named operator in the language."""
    try:
        operator_from_data(data)
    except InputError as error:
        raise UnsupportedError(f"{error.field} {error.problem}") from None
    import msgspec

    return msgspec.convert(data, NAMED_OPERATORS[data["op"]]).program()


_RULES: Mapping[Any, Callable[[Any], Anchor]] = {
    _aten.convolution.default: _convolution,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: lambda node: _product(node, *node.args[:2]),
}
