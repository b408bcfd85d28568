"""The operator of a bundle, read back from its manifest."""

from __future__ import annotations

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
        "shapes": _read_shapes(record, _read_ranks(text)),
        "name": record.name,
        "accumulate": record.accumulate,
        "allow_tf32": record.allow_tf32,
    }
    return operator_from_data(data)


def _read_shapes(record: Manifest, ranks: dict[str, int]) -> dict[str, list[int]]:
    """Shapes of the inputs as the statements read them.

    The manifest has the shapes that callers give, which may have dimensions of one besides: the filters of a depthwise
    convolution are (c, 1, kh, kw) to a caller and (c, kh, kw) to the statements.
    """
    shapes = {}
    for argument in record.arguments:
        if argument.role == "input" and argument.name in ranks:
            whole = len(argument.shape) == ranks[argument.name]
            shapes[argument.name] = [size for size in argument.shape if whole or size != 1]
    return {name: shape for name, shape in shapes.items() if shape}


def _read_ranks(text: str) -> dict[str, int]:
    """Dimensions of every tensor that a program reads, by its first read.

    The only place that recovers ranks: a manifest has no field for them.

    >>> _read_ranks("D[c,h] = sum(kh, A[c,2*h + kh|pad=0] * W[c,kh])")
    {'A': 2, 'W': 2}
    """
    ranks: dict[str, int] = {}
    for load in parse_tree(text).find_data("load"):
        tensor, indices = load.children[:2]
        ranks.setdefault(str(tensor), len(indices.children))  # type: ignore[union-attr]
    return ranks
