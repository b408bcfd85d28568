"""Captured operators as TorchInductor lowers them: element by element, reductions by rows or columns, or kept whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

from daydream.capture.captured import CapturedOperator

#: Positions of arguments and results.
Positions = tuple[int, ...]


class Kind(Enum):
    """How a loop runs over its data.

    ``ROWS`` reduces the axes that lie closest in memory, so that a block holds a whole row and goes on with its
    elements; ``COLUMNS`` reduces others (the gradient of a bias), which blocks share: nothing that needs all elements
    again runs in the same kernel.
    """

    POINT = "poi"
    ROWS = "per"
    COLUMNS = "red"
    LIST = "for"
    WHOLE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A loop of an operator.

    Attributes:
        kind: of the loop.
        rows: elements of the result, of a reduction those that it keeps.
        columns: elements reduced into one, 1 without a reduction.
        reads: positions of the tensors that it reads among the operator's; None for all.
        writes: positions of its results; None for all.
        gathers: whether it reads other elements than it writes: what it reads must be in memory.
        picks: whether it reads no more elements of its first argument than it makes.
        constant: whether it reads nothing, so that it is made where it is used.
        sparse: whether it reads one element of a row alone.
    """

    kind: Kind
    rows: int = 0
    columns: int = 1
    reads: Positions | None = None
    writes: Positions | None = None
    gathers: bool = False
    picks: bool = False
    constant: bool = False
    sparse: bool = False


WHOLE = (Part(kind=Kind.WHOLE),)

#: Operators that run element by element without PyTorch's mark of it.
_POINTS = frozenset({
    "_to_copy", "copy", "native_dropout", "hardswish_backward", "hardtanh_backward", "hardsigmoid_backward",
    "elu_backward", "softplus_backward", "leaky_relu_backward", "log_sigmoid_forward", "log_sigmoid_backward",
    "fill", "zero", "masked_fill", "tril", "triu", "bernoulli", "rand", "randn", "rand_like", "randn_like", "normal",
    "uniform", "cat", "stack", "constant_pad_nd", "slice_backward", "select_backward", "repeat", "nll_loss_backward",
    "nll_loss2d_backward", "glu", "glu_backward", "prelu", "_prelu_kernel", "unfold_copy", "native_dropout_backward",
    "mse_loss_backward", "slice_scatter", "select_scatter", "hardswish", "mish_backward", "_prelu_kernel_backward",
    "huber_loss_backward", "smooth_l1_loss_backward", "binary_cross_entropy_backward", "clamp_min_backward",
    "softshrink_backward",
})  # fmt: skip

#: Operators that read nothing.
_CONSTANTS = frozenset({
    "zeros_like", "ones_like", "full_like", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "arange",
    "scalar_tensor", "eye",
})  # fmt: skip

#: Operators that read elements by an index.
_PICKS = frozenset({"embedding", "index", "gather", "index_select"})

#: Operators that read other elements than they write.
_GATHERS = frozenset({
    "roll", "flip", "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool1d", "avg_pool2d",
    "avg_pool2d_backward", "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d",
    "upsample_bicubic2d", "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d", "replication_pad2d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
})  # fmt: skip

_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "var", "var_mean", "std", "any", "all", "prod", "logsumexp", "linalg_vector_norm",
    "norm", "argmax", "argmin", "max", "min", "mse_loss", "binary_cross_entropy_with_logits",
    "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
})  # fmt: skip


def parts_of(operator: CapturedOperator) -> tuple[Part, ...]:
    """The loops of an operator; :data:`WHOLE` for one that Inductor leaves to a library or a kernel of its own."""
    stem = operator.name.partition("::")[2]
    if operator.name.startswith("aten::_foreach_"):
        return (Part(kind=Kind.LIST),)
    if not operator.name.startswith("aten::") or not operator.outputs:
        return WHOLE
    if "norm" in stem and (norm := _norm(operator, stem)) is not None:
        return norm
    if "softmax" in stem:
        return _softmax(operator, stem)
    if stem in ("nll_loss_forward", "nll_loss2d_forward"):
        target = operator.inputs.tensors[1]
        return (Part(kind=Kind.COLUMNS, rows=1, columns=target.elements if target else 1, sparse=True),)
    elements = max(output.elements for output in operator.outputs)
    if stem in _GATHERS or stem in _PICKS:
        return (Part(kind=Kind.POINT, rows=elements, gathers=True, picks=stem in _PICKS),)
    if stem in _CONSTANTS:
        return (Part(kind=Kind.POINT, rows=elements, constant=True),)
    if stem.removesuffix("_") in _POINTS or _is_pointwise(stem, operator.overload):
        return (Part(kind=Kind.POINT, rows=elements),)
    return _reduction(operator) if stem in _REDUCTIONS else WHOLE


@cache
def _is_pointwise(stem: str, overload: str) -> bool:
    for name in (stem, stem.removesuffix("_")):
        packet = getattr(torch.ops.aten, name, None)
        marked = getattr(packet, overload, None) if packet is not None else None
        if marked is not None and torch.Tag.pointwise in marked.tags:
            return True
    return False


def _reduction(operator: CapturedOperator) -> tuple[Part, ...]:
    tensor = operator.inputs.tensors[0]
    if tensor is None:
        return WHOLE
    rows = max(operator.outputs[0].elements, 1)
    columns = max(tensor.elements // rows, 1)
    position = 2 if operator.name.endswith("norm") else 1
    axes = operator.inputs.value(position)
    reduced = {axis % len(tensor.dims) for axis in axes} if isinstance(axes, list) and tensor.dims else set()
    if isinstance(axes, int) and not isinstance(axes, bool) and tensor.dims:
        reduced = {axes % len(tensor.dims)}
    by_rows = bool(reduced) and rows > 1 and _closest(tensor.dims, tensor.strides, reduced)
    return (Part(kind=Kind.ROWS if by_rows else Kind.COLUMNS, rows=rows, columns=columns),)


def _closest(dims: tuple[int, ...], strides: tuple[int, ...], reduced: set[int]) -> bool:
    """Whether the reduced axes are those with the smallest strides.

    >>> _closest((8, 16, 32), (512, 32, 1), {2}), _closest((8, 16, 32), (512, 32, 1), {0, 1})
    (True, False)
    """
    kept = [strides[axis] for axis in range(len(dims)) if axis not in reduced and dims[axis] > 1 and strides[axis] > 0]
    away = [strides[axis] for axis in reduced if dims[axis] > 1]
    return not kept or not away or max(away) < min(kept)


def _softmax(operator: CapturedOperator, stem: str) -> tuple[Part, ...]:
    tensor = operator.inputs.tensors[0]
    axis = operator.inputs.value(2 if stem.endswith("backward_data") else 1)
    if tensor is None or not tensor.dims or not isinstance(axis, int):
        return WHOLE
    columns = tensor.dims[axis % len(tensor.dims)]
    rows = tensor.elements // max(columns, 1)
    if _closest(tensor.dims, tensor.strides, {axis % len(tensor.dims)}):
        return (Part(kind=Kind.ROWS, rows=rows, columns=columns),)
    # Sums of columns first, then all elements again.
    return (Part(kind=Kind.COLUMNS, rows=rows, columns=columns, writes=()), Part(kind=Kind.POINT, rows=tensor.elements))


def _norm(operator: CapturedOperator, stem: str) -> tuple[Part, ...] | None:
    """Norms: statistics and elements in one loop over rows; gradients of scale and bias in one of their own."""
    tensor = operator.inputs.tensors[0]
    if tensor is None:
        return None
    elements = tensor.elements
    if "batch_norm" in stem:
        return _batch_norm(operator, stem, elements)
    if "layer_norm" in stem or "rms_norm" in stem:
        shape = operator.inputs.value(2 if stem.endswith("backward") else 1)
        columns = math.prod(shape) if isinstance(shape, list) else 1
        rows, scales = elements // max(columns, 1), columns
    elif "group_norm" in stem:
        groups = operator.inputs.value(8 if stem.endswith("backward") else 6)
        rows = tensor.dims[0] * (groups if isinstance(groups, int) else 1)
        columns, scales = elements // max(rows, 1), tensor.dims[1]
    else:
        return None
    if not stem.endswith("backward"):
        return (Part(kind=Kind.ROWS, rows=rows, columns=columns),)
    first = tuple(range(sum(output.elements == elements for output in operator.outputs)))[:1]
    others = tuple(range(len(first), len(operator.outputs)))
    parts = []
    if first:
        parts.append(Part(kind=Kind.ROWS, rows=rows, columns=columns, writes=first))
    if others:
        parts.append(Part(kind=Kind.COLUMNS, rows=scales, columns=elements // max(scales, 1), writes=others))
    return tuple(parts)


def _batch_norm(operator: CapturedOperator, stem: str, elements: int) -> tuple[Part, ...] | None:
    trains = operator.inputs.value(7 if stem.endswith("backward") else 5)
    apply = Part(kind=Kind.POINT, rows=elements, writes=(0,))
    channels = operator.inputs.tensors[0].dims[1] if operator.inputs.tensors[0] else 1
    others = tuple(range(1, len(operator.outputs)))
    sums = Part(kind=Kind.COLUMNS, rows=channels, columns=elements // max(channels, 1), writes=others)
    if "no_training" in stem or (trains is False and not stem.endswith("backward")):
        return (Part(kind=Kind.POINT, rows=elements),)
    if not others:
        return (apply,)
    return (sums, apply)
