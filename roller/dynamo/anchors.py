"""Nodes of a graph that regions begin with: products and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from roller.dynamo.convolutions import convolutions
from roller.dynamo.products import matrix_products, sums_of_products
from roller.dynamo.sums import DTYPES, Anchor, UnsupportedError

_aten = torch.ops.aten

_RULES: Mapping[Any, Callable[[Any, int], Iterator[Anchor]]] = {
    _aten.convolution.default: convolutions,
    _aten.mm.default: matrix_products,
    _aten.addmm.default: sums_of_products,
    _aten.bmm.default: matrix_products,
}


def anchors_of(node: Any, lanes: int = 0) -> tuple[Anchor, ...]:
    """A node as an anchor, in every order of its weights that kernels read well.

    Args:
        node: of the graph.
        lanes: elements of a vector of the processor that it runs on; 0 where weights stay as they are.

    Raises:
        UnsupportedError: it is none, or one that the language does not say.
    """
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    if rule is None:
        raise UnsupportedError("no sum of products")
    dtype = node.meta["val"].dtype
    # Kernels of processors multiply no bfloat16.
    if dtype not in DTYPES or (lanes and dtype is torch.bfloat16):
        raise UnsupportedError(f"values of {str(dtype).removeprefix('torch.')}")
    return tuple(rule(node, lanes))


def is_anchor(node: Any) -> bool:
    """True for nodes of the kinds that regions begin with."""
    return node.op == "call_function" and node.target in _RULES
