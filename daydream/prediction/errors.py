"""Errors of each kind of model where it could be compared with measurements (docs/accuracy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ModelError(NamedTuple):
    """Known error of a kind of model.

    Attributes:
        title: the kind in words.
        mean: mean error of single calls, a share; None where nothing was measured.
        measured: on what.
    """

    title: str
    mean: float | None
    measured: str


#: Kind of model, as :class:`daydream.operators.calls.KernelPrice` names it -> its error. The larger one where boards or
#: types differ.
MODEL_ERRORS: Mapping[str, ModelError] = {
    "products": ModelError("matrix products", 0.14, "float32 on six boards, 16 bits on A100, H100, L40S, B200"),
    "attention": ModelError("attention", 0.085, "FlashAttention in 16 bits on A100, H100, L40S, B200"),
    "convolutions": ModelError("convolutions", 0.19, "float32 3x3 on six boards; in 16 bits whole networks alone"),
    "element-wise": ModelError("element-wise", 0.08, "float32 on five boards"),
    "row-wise": ModelError("softmax and norms", 0.14, "float32 on five boards"),
    "streams": ModelError("streams", None, "known kernels at the rate of copies, within whole models alone"),
    "collectives": ModelError("collectives", 0.09, "inside a node of A100, H100, B200"),
    "bytes": ModelError("bytes alone", None, "no model: every byte once, at the rate of copies"),
}
