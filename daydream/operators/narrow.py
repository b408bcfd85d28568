"""Products of two matrices in eight and four bits, as training frameworks run linear layers.

Every product's activations, or gradients, are quantised before it. Products whose sides are no multiples of 16 stay as
they are: matrix units do not take them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from daydream.operators.work import Work, WorkPart
from sokoban.language.layers import SCALED_PRECISIONS

#: Names of ``--precision``: 16 bits, and those of narrow linear layers.
PRECISIONS = ("16-bit", *SCALED_PRECISIONS)

#: Multiple that rows and columns of narrow operands must be.
_SIDE = 16

_WIDE = ("bfloat16", "float16")


def narrowed(work: Work, precision: str) -> Work:
    """The work of an operator in a precision: products of two matrices in it, all else as it is."""
    if work.kind != "matrix product":
        return work
    return replace(work, parts=tuple(_narrowed(part, precision) for part in work.parts))


def _narrowed(part: WorkPart, precision: str) -> WorkPart:
    data: dict[str, Any] = part.data
    if data.get("op") != "matmul" or data.get("dtype") not in _WIDE:
        return part
    sizes = {name: data[name] for name in ("m", "n", "k")}
    if any(size % _SIDE for size in sizes.values()):
        return part
    return replace(part, data={"op": "scaled_matmul", **sizes, "precision": precision, "kernels": "training"})
