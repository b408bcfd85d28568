"""The operator of a bundle, read back from its manifest."""

from __future__ import annotations

import re
from typing import Any

from codegen.bundle.manifest import Manifest
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data


def operator_of(record: Manifest) -> TensorExpr:
    """The operator of a manifest.

    Raises:
        InputError: its statements are not those of this version of the language.
    """
    data: dict[str, Any] = {
        "expr": "; ".join(record.statements),
        "sizes": record.axes,
        "dtypes": {argument.name: argument.dtype for argument in record.arguments},
        "shapes": _read_shapes(record),
        "name": record.name,
        "accumulate": record.accumulate,
        "allow_tf32": record.allow_tf32,
    }
    return operator_from_data(data)


def _read_shapes(record: Manifest) -> dict[str, list[int]]:
    """The inputs' shapes as the statements read them: a caller's may have dimensions of one besides, such as the
    filters (c, 1, kh, kw) of a depthwise convolution."""
    shapes = {}
    for argument in record.arguments:
        read = re.search(rf"\b{re.escape(argument.name)}\[([^|\]]*)", " ".join(record.statements))
        if argument.role == "input" and read is not None:
            rank = len(read.group(1).split(","))
            whole = len(argument.shape) == rank
            shapes[argument.name] = [size for size in argument.shape if whole or size != 1]
    return {name: shape for name, shape in shapes.items() if shape}
