"""The operator of a bundle, read back from its manifest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from codegen.bundle.records import Manifest
from sokoban.language.expression import TensorExpr
from sokoban.language.grammar import parse_tree
from sokoban.language.operators import operator_from_data


def operator_of(record: Manifest) -> TensorExpr:
    """The operator of a manifest.

    Raises:
        InputError: its statements are not those of this version of the language.
    """
    text = "; ".join(record.statements)
    data: dict[str, Any] = {
        "expr": text,
        "sizes": record.axes,
        "dtypes": {argument.name: argument.dtype for argument in record.arguments},
        "shapes": _read_shapes(record, _read_indices(text)),
        "name": record.name,
        "accumulate": record.accumulate,
        "allow_tf32": record.allow_tf32,
    }
    expr = operator_from_data(data)
    given = {argument.name: argument.shape for argument in record.arguments}
    tensors = tuple(
        tensor if given.get(tensor.name, tensor.shape) == tensor.shape
        else replace(tensor, external_shape=given[tensor.name])
        for tensor in expr.tensors
    )  # fmt: skip
    return replace(expr, tensors=tensors)


def _read_shapes(record: Manifest, indices: dict[str, list[str]]) -> dict[str, list[int]]:
    """Shapes of the inputs as the statements read them.

    The manifest has the shapes that callers give, which may have dimensions of one besides, or fewer: the filters of a
    depthwise convolution are (c, 1, kh, kw) to a caller and (c, kh, kw) to the statements; heads of queries are one
    dimension to a caller and two where they share those of keys.
    """
    shapes = {}
    for argument in record.arguments:
        read = indices.get(argument.name)
        if argument.role != "input" or read is None:
            continue
        if len(argument.shape) < len(read) and all(axis in record.axes for axis in read):
            shapes[argument.name] = [record.axes[axis] for axis in read]
        else:
            has_all_dimensions = len(argument.shape) == len(read)
            shapes[argument.name] = [size for size in argument.shape if has_all_dimensions or size != 1]
    return {name: shape for name, shape in shapes.items() if shape}


def _read_indices(text: str) -> dict[str, list[str]]:
    """Indices of every tensor that a program reads, by its first read: axes by name, anything else empty.

    The only place that recovers ranks: a manifest has no field for them.

    >>> _read_indices("D[c,h] = sum(kh, A[c,2*h + kh|pad=0] * W[c,kh])")
    {'A': ['c', ''], 'W': ['c', 'kh']}
    """
    indices_by_tensor: dict[str, list[str]] = {}
    for load in parse_tree(text).find_data("load"):
        tensor, indices = load.children[:2]
        names = [str(index.children[0]) if index.data == "name" else "" for index in indices.children]  # type: ignore
        indices_by_tensor.setdefault(str(tensor), names)
    return indices_by_tensor
