"""Convolutions as TorchInductor changes them before it fuses: without their biases, and with channels last.

A bias becomes an addition of its own, which joins the loops behind (``torch/_inductor/kernel/conv.py``), and graphs for
which ``GraphLowering.decide_layout_opt`` says so have their images in NHWC.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daydream.capture.captured import Capture, CapturedOperator
from daydream.operators.inputs import RecordedTensor
from daydream.trace.trace import NONE

_CONVOLUTION, _GRADIENT = "aten::convolution", "aten::convolution_backward"

#: Times of channels last over channels first by kind of convolution, with which the rule for inference weighs FLOPs.
_WEIGHTS = {"grouped": 1.358, "default": 0.823, "in_out": 0.725, "small": 0.783}

#: Nodes of a graph per convolution from which on it keeps its layout, and channels that are few.
_MOST_NODES, _FEW = 300, 64


def lowered(capture: Capture, regions: Sequence[int] | None) -> tuple[Capture, list[int] | None]:
    """The step with its convolutions as Inductor lowers them, and the regions of its operators."""
    capture, regions = _without_biases(capture, regions)
    inside = [
        index for index in range(len(capture.operators)) if regions is None or regions[index] != NONE
    ]  # fmt: skip
    last = _wants_channels_last([capture.operators[index] for index in inside], training=capture.training)
    return (_channels_last(capture, set(inside)) if last else capture), regions


# Biases


def _without_biases(capture: Capture, regions: Sequence[int] | None) -> tuple[Capture, list[int] | None]:
    operators: list[CapturedOperator] = []
    places: list[int] = []
    kept: list[int] = []
    for index, operator in enumerate(capture.operators):
        places.append(len(operators))
        is_compiled = regions is None or regions[index] != NONE
        made = _peeled(operator) if is_compiled else (operator,)
        operators += made
        kept += [regions[index] if regions is not None else 0] * len(made)
    moved = tuple(
        replace(each, forward=places[each.forward]) if each.forward != NONE else each for each in operators
    )  # fmt: skip
    return replace(capture, operators=moved), kept if regions is not None else None


def _peeled(operator: CapturedOperator) -> tuple[CapturedOperator, ...]:
    """A convolution and the addition of its bias, which it has no more."""
    bias = operator.inputs.tensor(2)
    is_known = len(operator.read) == 3 and len(operator.written) == 1 and len(operator.outputs) == 1
    if operator.name != _CONVOLUTION or bias is None or not is_known:
        return (operator,)
    output = operator.outputs[0]
    tensors = (*operator.inputs.tensors[:2], None, *operator.inputs.tensors[3:])
    alone = replace(operator, inputs=replace(operator.inputs, tensors=tensors), read=operator.read[:2], freed=())
    rank = len(output.dims) - 2
    row = RecordedTensor((*bias.dims, *(1,) * rank), bias.dtype, (1,) * (rank + 1))
    values = ("", "", "1")
    added = replace(
        operator,
        name="aten::add",
        overload="Tensor",
        inputs=replace(operator.inputs, tensors=(output, row, None), values=values, lists=()),
        read=(operator.written[0], operator.read[2]),
        made=(),
    )
    return alone, added


# Layout


@dataclass(frozen=True)
class _Window:
    """A convolution's kind by the rules, and its arithmetic."""

    kind: str
    flops: float


def _wants_channels_last(operators: Sequence[CapturedOperator], *, training: bool) -> bool:
    """Whether a graph of these operators has its images in NHWC."""
    windows = [_window(each) for each in operators if each.name == _CONVOLUTION and each.inputs.tensor(1) is not None]
    if not windows or len(operators) >= _MOST_NODES * len(windows):
        return False
    if training:
        kinds = [window.kind for window in windows]
        return "grouped" not in kinds and "in_out" not in kinds and any(kind != "small" for kind in kinds)
    return sum(_WEIGHTS[each.kind] * each.flops for each in windows) <= sum(each.flops for each in windows)


def _window(operator: CapturedOperator) -> _Window:
    weights = operator.inputs.tensor(1)
    assert weights is not None
    groups = operator.inputs.value(8)
    filters, channels, *sides = weights.dims
    kind = "default"
    if isinstance(groups, int) and groups > 1 and channels > 1:
        kind = "grouped"
    elif filters <= _FEW and channels <= _FEW:
        kind = "small"
    elif filters * 2 <= channels and sides and sides[0] > 1:
        kind = "in_out"
    data = operator.inputs.tensor(0)
    is_transposed = operator.inputs.value(6) is True
    image = data if is_transposed and data is not None else operator.outputs[0]
    return _Window(kind, 2.0 * image.dims[0] * math.prod(image.dims[2:]) * math.prod(weights.dims))


def _channels_last(capture: Capture, inside: set[int]) -> Capture:
    """The step with its convolutions of planes in NHWC; what comes from outside is as it was, and so are results."""
    written: set[int] = set()
    operators = []
    last = len(capture.operators) - 1
    for index, operator in enumerate(capture.operators):
        if operator.name in (_CONVOLUTION, _GRADIENT) and index in inside and not _is_depthwise(operator):
            operators.append(_laid_out(operator, written))
            if index == last and operator.name == _CONVOLUTION and len(operator.outputs[0].dims) == 4:
                operators.append(_returned(operator))
        else:
            operators.append(operator)
        written.update(operator.written)
    return replace(capture, operators=tuple(operators))


def _is_depthwise(operator: CapturedOperator) -> bool:
    """Whether there is a channel per group, which kernels of PyTorch take as they lie."""
    weights = operator.inputs.tensor(1 if operator.name == _CONVOLUTION else 2)
    return weights is not None and weights.dims[1] == 1 and operator.inputs.value(8) not in (1, None)


def _laid_out(operator: CapturedOperator, written: set[int]) -> CapturedOperator:
    # Inputs of the step come first among those that nothing wrote, and stay in NCHW.
    is_first = bool(operator.read) and operator.read[0] not in written
    data, *others = operator.inputs.tensors
    tensors = (data if is_first else _last(data), *(_last(tensor) for tensor in others))
    outputs = tuple(_last(tensor) or tensor for tensor in operator.outputs)
    return replace(operator, inputs=replace(operator.inputs, tensors=tensors), outputs=outputs)


def _returned(operator: CapturedOperator) -> CapturedOperator:
    """The copy of a result into the layout that the step returns."""
    output = _last(operator.outputs[0])
    return replace(
        operator,
        name="aten::clone",
        inputs=replace(operator.inputs, tensors=(output, None), values=("", ""), lists=()),
        read=operator.written[:1],
        made=(),
    )


def _last(tensor: RecordedTensor | None) -> RecordedTensor | None:
    """A tensor of planes with its channels last."""
    if tensor is None or len(tensor.dims) != 4:
        return tensor
    n, c, h, w = tensor.dims
    del n
    return replace(tensor, strides=(c * h * w, 1, w * c, c))
