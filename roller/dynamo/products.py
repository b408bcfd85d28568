"""Matrix products of a graph as anchors, their weights in panels where they never change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from roller.dynamo.orders import Packing
from roller.dynamo.sums import Anchor, UnsupportedError, is_constant, panel_widths, shape_of

_aten = torch.ops.aten


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


def _product(node: Any, left: Any, right: Any, lanes: int, biases: Sequence[tuple[Any, int]] = ()) -> Iterator[Anchor]:
    batched = len(shape_of(left)) == 3
    (*lead, m, k), n = shape_of(left), shape_of(right)[-1]
    batch = "b," if batched else ""
    a_index, a = _matrix(left, "m", "k", batch)
    b_index, b = _matrix(right, "k", "n", batch)
    axes = (("b",) if batched else ()) + ("m", "n")
    in_order = Anchor(
        node=node,
        kind="batch_matmul" if batched else "matmul",
        axes=axes,
        terms=f"sum(k, A[{a_index}] * B[{b_index}])",
        sizes=dict(zip(axes, (*lead, m, n), strict=True)) | {"k": k},
        operands={"A": a, "B": b},
        dims=tuple((axis,) for axis in axes),
        biases=tuple(biases),
        multiply_adds=math.prod((*lead, m, n, k)),
    )
    yield in_order
    if is_constant(b) and not batched:
        # Row by row of its transpose, as linear layers store it: what is left where no panels divide the columns.
        if b_index == "k,n" and lanes and not panel_widths(n, lanes):
            turned = Packing((k, n), (1, 0))
            yield replace(in_order, terms=f"sum(k, A[{a_index}] * B[n,k])", packings={"B": turned})
        for width in panel_widths(n, lanes):
            # Columns of a panel lie together, one row after another, as the innermost loop reads them.
            in_rows = Packing((k, n // width, width), (1, 0, 2))
            in_columns = Packing((n // width, width, k), (0, 2, 1))
            yield replace(
                in_order,
                axes=("m", "p", "n"),
                terms=f"sum(k, A[{a_index}] * B[p,k,n])",
                sizes={"m": m, "p": n // width, "n": width, "k": k},
                dims=(("m",), ("p", "n")),
                packings={"B": in_rows if b_index == "k,n" else in_columns},
            )


def matrix_products(node: Any, lanes: int) -> Iterator[Anchor]:
    return _product(node, node.args[0], node.args[1], lanes)


def sums_of_products(node: Any, lanes: int) -> Iterator[Anchor]:
    bias, left, right = node.args[:3]
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1 or len(shape_of(bias)) != 1:
        raise UnsupportedError("a sum with factors, or of matrices")
    return _product(node, left, right, lanes, [(bias, 1)])
