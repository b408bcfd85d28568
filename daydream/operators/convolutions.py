"""Recorded convolutions as operators of Roller: which sizes, which gradient, and what the trace does not say.

Traces without "Concrete Inputs" (2021) name neither stride nor padding. The output's size settles both as far as the
price goes, and stands elsewhere: it is the gradient that the backward operator of the same call takes, or the input of
the operator behind it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from daydream.operators.copies import with_copies
from daydream.operators.inputs import DTYPES, Dims, Inputs, RecordedTensor, inputs_of, pair
from daydream.operators.traffic import is_channels_last
from daydream.operators.work import Direction, Work, WorkPart
from daydream.trace.trace import NONE, Ints, Trace
from sokoban.language.expression import DTYPE_BYTES

#: Operators behind a convolution among which its consumer is looked for.
LOOK_AHEAD = 40

# Operator -> where stride, padding, dilation and groups stand among its arguments.
_FORWARD: dict[str, tuple[int, int, int, int]] = {
    "cudnn_convolution": (3, 2, 4, 5),
    "cudnn_convolution_relu": (3, 4, 5, 6),
    "cudnn_convolution_add_relu": (5, 6, 7, 8),
    "miopen_convolution": (4, 3, 5, 6),
    "convolution": (3, 4, 5, 8),
    "_convolution": (3, 4, 5, 8),
    "conv1d": (3, 4, 5, 6),
    "conv2d": (3, 4, 5, 6),
    "_conv_depthwise2d": (4, 5, 6, 99),
    "_slow_conv2d_forward": (4, 5, 99, 99),
    "thnn_conv2d": (4, 5, 99, 99),
}

# Operator -> where input, gradient and weights stand, then as above.
_BACKWARD: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "convolution_backward": (1, 0, 2, 4, 5, 6, 9),
    "convolution_backward_overrideable": (1, 0, 2, 3, 4, 5, 8),
    "cudnn_convolution_backward": (0, 1, 2, 4, 3, 5, 6),
    "miopen_convolution_backward": (0, 1, 2, 4, 3, 5, 6),
    "_slow_conv2d_backward": (1, 0, 2, 4, 5, 99, 99),
    "thnn_conv2d_backward": (1, 0, 2, 4, 5, 99, 99),
}
_MASK_AT = {"convolution_backward": 10}

_CHILDREN: dict[str, Direction] = {
    "backward_input": "backward data",
    "backward_data": "backward data",
    "backward_weight": "backward weights",
}

_TRANSPOSED_AT = {"convolution": 6, "_convolution": 6, "convolution_backward": 7}


def is_convolution(name: str) -> bool:
    """True if an operator of this name launches a convolution's kernels."""
    stem = name.removeprefix("aten::")
    return name.startswith("aten::") and (stem in _FORWARD or stem in _BACKWARD or _child(stem) is not None)


def _child(stem: str) -> Direction | None:
    """The gradient that an operator such as ``cudnn_convolution_backward_weight`` makes."""
    for suffix, direction in _CHILDREN.items():
        if stem.endswith(suffix) and "convolution" in stem:
            return direction
    return None


@dataclass(frozen=True, eq=False)
class Convolutions:
    """The convolutions of a trace; ``enclosing`` gives for each row the innermost CPU event around it."""

    trace: Trace
    enclosing: Ints

    def describe(self, row: int) -> Work | str:
        """The work of this operator, or in words why it is unknown.

        The work of a whole backward operator has the parts ``backward data`` and ``backward weights``, in the order
        in which PyTorch launches them; the first is missing where the operator says that it is not needed.
        """
        stem = self.trace.text(row).removeprefix("aten::")
        direction = _child(stem)
        if direction is not None:
            parent = self._backward_around(row)
            work = self.describe(parent) if parent != NONE else "no operator around it says the sizes"
            return work if isinstance(work, str) else only(work, direction) or f"its operator makes no {direction}"
        inputs = inputs_of(self.trace, row)
        if inputs is None:
            return "input sizes not recorded; record with record_shapes=True"
        if stem in _BACKWARD:
            return _backward(stem, inputs)
        data, weights = inputs.tensor(0), inputs.tensor(1)
        if data is None or weights is None or inputs.value(_FORWARD[stem][0]) is not None:
            return _forward(stem, inputs)
        return _forward(stem, inputs, *self._output(row, data.dims, weights.dims))

    def _backward_around(self, row: int) -> int:
        event = int(self.enclosing[row]) if row < len(self.enclosing) else NONE
        while event != NONE and self.trace.text(event).removeprefix("aten::") not in _BACKWARD:
            event = int(self.enclosing[event])
        return event

    def _output(self, row: int, data: Dims, weights: Dims) -> tuple[Dims | None, str]:
        """Dimensions of the output and where they were found."""
        outputs = self._outputs.get((data, weights))
        if outputs:
            output = outputs.get(self._sequence(row))
            return output or Counter(outputs.values()).most_common(1)[0][0], "gradient"
        follower = self._consumer(row, data, weights)
        return follower, "consumer" if follower is not None else ""

    @cached_property
    def _outputs(self) -> dict[tuple[Dims, Dims], dict[int, Dims]]:
        """Input and weights -> autograd's sequence number -> output, from every backward operator."""
        outputs: dict[tuple[Dims, Dims], dict[int, Dims]] = {}
        stems = [name.removeprefix("aten::") for name in self.trace.names]
        for code in (code for code, stem in enumerate(stems) if stem in _BACKWARD):
            for row in np.flatnonzero(self.trace.name == code).tolist():
                inputs = inputs_of(self.trace, row)
                if inputs is None:
                    continue
                data, gradient, weights = (inputs.tensor(place) for place in _BACKWARD[stems[code]][:3])
                if data is not None and gradient is not None and weights is not None:
                    calls = outputs.setdefault((data.dims, weights.dims), {})
                    calls[self._sequence(row)] = gradient.dims
        return outputs

    def _sequence(self, row: int) -> int:
        event = row
        while event != NONE and self.trace.sequence[event] == NONE:
            event = int(self.enclosing[event]) if event < len(self.enclosing) else NONE
        return int(self.trace.sequence[event]) if event != NONE else NONE

    def _consumer(self, row: int, data: Dims, weights: Dims) -> Dims | None:
        """The first input behind the call that has its images and as many channels as it has filters."""
        trace, seen = self.trace, 0
        end = trace.start_us[row] + trace.duration_us[row]
        for after in range(row + 1, len(trace)):
            if trace.thread[after] != trace.thread[row] or trace.start_us[after] < end:
                continue
            seen += 1
            if seen > LOOK_AHEAD:
                return None
            inputs = inputs_of(trace, after)
            first = inputs.tensor(0) if inputs is not None else None
            if first is not None and len(first.dims) == len(data) and first.dims[:2] == (data[0], weights[0]):
                return first.dims
        return None


def describe_convolution(name: str, inputs: Inputs, outputs: Sequence[RecordedTensor]) -> Work | str:
    """The work of a captured convolution, whose stride and padding are known, or in words why it is unknown.

    What PyTorch adds to it in kernels of its own, a bias and the bias's gradient, are parts of the work.
    """
    stem = name.removeprefix("aten::")
    backward = stem in _BACKWARD
    work = _backward(stem, inputs) if backward else _forward(stem, inputs)
    if isinstance(work, str):
        return work
    part = _bias_gradient(inputs, work) if backward else _bias(inputs, outputs, work)
    return _laid_out(inputs, backward, work if part is None else replace(work, parts=(*work.parts, part)))


def _laid_out(inputs: Inputs, backward: bool, work: Work) -> Work:
    """The work in the layout that PyTorch takes: channels last where data or weights lie so.

    Activations that do not fill their memory in that order, slices of channels included, are copied before.
    """
    *activations, weights = (inputs.tensor(place) for place in ((0, 1, 2) if backward else (0, 1)))
    data = activations[-1]
    if weights is None or data is None:
        return work
    is_last = is_channels_last(data) or is_channels_last(weights)
    if is_last:
        parts = tuple(replace(part, channels_last="conv2d" in part.data.get("op", "")) for part in work.parts)
        work = replace(work, parts=parts)
    return with_copies(work, activations, channels_last=is_last)


def _bias(inputs: Inputs, outputs: Sequence[RecordedTensor], work: Work) -> WorkPart | None:
    """The addition of a bias."""
    if inputs.tensor(2) is None or not outputs:
        return None
    shape = [outputs[0].elements]
    return WorkPart({"op": "elementwise", "function": "add", "shape": shape, "scalar": True, "dtype": work.dtype})


def _bias_gradient(inputs: Inputs, work: Work) -> WorkPart | None:
    """The sum of the incoming gradient over images and pixels, where it is wanted."""
    mask, gradient = inputs.value(_MASK_AT["convolution_backward"]), inputs.tensor(0)
    if gradient is None or not isinstance(mask, list) or len(mask) < 3 or mask[2] is not True:
        return None
    n, f, pixels = gradient.dims[0], gradient.dims[1], math.prod(gradient.dims[2:])
    return WorkPart({"op": "reduce", "function": "sum", "shape": [n, f, pixels], "axes": [0, 2], "dtype": work.dtype})


def _forward(stem: str, inputs: Inputs, output: Dims | None = None, how: str = "") -> Work | str:
    data, weights = inputs.tensor(0), inputs.tensor(1)
    if data is None or weights is None:
        return "sizes of its operands not recorded"
    recorded = _key(tuple(inputs.value(position) for position in _FORWARD[stem]))
    if inputs.value(_TRANSPOSED_AT.get(stem, 99)) is not True:
        return _work(data.dims, weights.dims, data.dtype, output, how, recorded)
    # A transposed convolution is what makes the gradient of a convolution's data.
    larger = _transposed_dims(data.dims, weights.dims, recorded, inputs.value(_TRANSPOSED_AT[stem] + 1))
    work = _work(larger, weights.dims, data.dtype, data.dims, "input", recorded) if larger else "no sizes of its result"
    return work if isinstance(work, str) else replace(work, parts=(replace(work.parts[0], direction="backward data"),))


def _backward(stem: str, inputs: Inputs) -> Work | str:
    places = _BACKWARD[stem]
    data, gradient, weights = (inputs.tensor(place) for place in places[:3])
    if data is None or gradient is None or weights is None:
        return "sizes of its operands not recorded"
    recorded = _key(tuple(inputs.value(place) for place in places[3:]))
    transposed = inputs.value(_TRANSPOSED_AT.get(stem, 99)) is True
    if transposed:
        data, gradient = gradient, data
    work = _work(data.dims, weights.dims, data.dtype, gradient.dims, "gradient", recorded)
    if isinstance(work, str):
        return work
    mask = inputs.value(_MASK_AT.get(stem, 99))
    wanted = mask if isinstance(mask, list) and len(mask) >= 2 else [True, True]
    ways: tuple[Direction, Direction] = ("forward" if transposed else "backward data", "backward weights")
    parts = tuple(
        replace(work.parts[0], direction=way) for way, is_wanted in zip(ways, wanted, strict=False) if is_wanted
    )
    if not parts:
        return "a gradient of the bias alone"
    return replace(work, parts=parts, flops=work.flops * len(parts), bytes=work.bytes * len(parts))


def _numbers(values: Sequence[Any]) -> bool:
    return all(type(value) is int for value in values)


def _transposed_dims(data: Dims, weights: Dims, recorded: tuple[Any, ...], added: Any) -> Dims | None:
    """The dimensions of a transposed convolution's result; None where values are missing.

    (size - 1) stride - 2 padding + dilation (taps - 1) + added + 1 in each direction.
    """
    rank = len(data) - 2
    given = (*recorded[:3], added or 0)
    moves = [tuple(value) if isinstance(value, tuple | list) else (value,) * rank for value in given]
    moves = [value * rank if len(value) == 1 else value for value in moves]
    groups = recorded[3] if type(recorded[3]) is int else 1
    if rank < 1 or len(weights) != rank + 2 or any(len(value) != rank or not _numbers(value) for value in moves):
        return None
    sides = zip(data[2:], weights[2:], *moves, strict=True)
    made = ((size - 1) * step - 2 * pad + wide * (taps - 1) + more + 1 for size, taps, step, pad, wide, more in sides)
    return (data[0], weights[1] * groups, *made)


def only(work: Work, direction: Direction) -> Work | None:
    """The part of a convolution's backward work that makes this gradient; None where there is none."""
    parts = tuple(part for part in work.parts if part.direction == direction)
    share = len(parts) / len(work.parts)
    return replace(work, parts=parts, flops=work.flops * share, bytes=work.bytes * share) if parts else None


def _key(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


class _Window(NamedTuple):
    """Movement of a convolution's window, each in direction y and x; `assumed` says in words what was guessed."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    assumed: str = ""


@lru_cache(maxsize=65536)
def _work(data: Dims, weights: Dims, kind: str, output: Dims | None, how: str, recorded: tuple[Any, ...]) -> Work | str:
    """The forward work of a convolution from its tensors and the values given (None where not recorded)."""
    dtype = DTYPES.get(kind)
    if dtype is None:
        return f"elements of type {kind or 'unknown'}"
    if len(data) == 5 and len(weights) == 5 and recorded[0] is not None:
        return _over_volumes(data, weights, kind, recorded)
    if len(data) == 3 and len(weights) == 3:
        data, weights, output, recorded = _over_planes(data, weights, output, recorded)
    if len(data) != 4 or len(weights) != 4:
        return f"a convolution over {max(len(data) - 2, 0)} dimensions"
    (n, c, h, w), (f, per_group, kh, kw) = data, weights
    no_convolution = f"operands of {list(data)} and {list(weights)} do not make a convolution"
    if not n * c * h * w * f * per_group * kh * kw or c % per_group:
        return no_convolution
    window = _window(data, weights, output if output is not None and len(output) == 4 else None, how, recorded)
    if isinstance(window, str):
        return window
    oh, ow = (
        _output_side(size, taps, *sides) for size, taps, *sides in zip((h, w), (kh, kw), *window[:3], strict=True)
    )
    if oh < 1 or ow < 1 or f % (c // per_group):
        return no_convolution
    flops = 2.0 * n * f * oh * ow * per_group * kh * kw
    moved = (n * c * h * w + f * per_group * kh * kw + n * f * oh * ow) * DTYPE_BYTES[dtype]
    part = WorkPart(_operator(data, weights, window, dtype))
    return Work(kind="convolution", parts=(part,), flops=flops, bytes=float(moved), dtype=dtype, assumed=window.assumed)


def _over_volumes(data: Dims, weights: Dims, kind: str, recorded: tuple[Any, ...]) -> Work | str:
    """A convolution over volumes as one over planes whose channels are those of all planes that its window covers.

    The arithmetic is the same; a plane that several windows cover lies there once for each.
    """
    moves = [value * 3 if isinstance(value, tuple) and len(value) == 1 else value for value in recorded[:3]]
    if not all(isinstance(value, tuple) and len(value) == 3 for value in moves):
        return "stride and padding of its three dimensions not recorded"
    (stride, *strides), (padding, *paddings), (dilation, *dilations) = moves
    planes = _output_side(data[2], weights[2], stride, padding, dilation)
    if planes < 1:
        return f"operands of {list(data)} and {list(weights)} do not make a convolution"
    work = _work(
        (data[0] * planes, data[1] * weights[2], *data[3:]), (weights[0], weights[1] * weights[2], *weights[3:]), kind,
        None, "", (tuple(strides), tuple(paddings), tuple(dilations), *recorded[3:]),
    )  # fmt: skip
    if isinstance(work, str):
        return work
    sides = zip(data[3:], weights[3:], strides, paddings, dilations, strict=True)
    rows, columns = (_output_side(*side) for side in sides)
    sizes = {
        "n": data[0], "c": data[1], "f": weights[0], "h": data[2] * data[3], "w": data[4],
        "kh": weights[2] * weights[3], "kw": weights[4], "stride": math.sqrt(stride * math.prod(strides)),
        "groups": data[1] // weights[1], "out_h": planes * rows, "out_w": columns,
        "dilation": max(dilation, *dilations), "volume": 1,
    }  # fmt: skip
    moved = math.prod(data) + math.prod(weights) + data[0] * weights[0] * planes * rows * columns
    part = replace(work.parts[0], sizes=tuple(float(size) for size in sizes.values()))
    return replace(
        work, parts=(part,), bytes=float(moved * DTYPE_BYTES[work.dtype]), assumed="planes of volumes taken for images"
    )


def _over_planes(
    data: Dims, weights: Dims, output: Dims | None, recorded: tuple[Any, ...]
) -> tuple[Dims, Dims, Dims | None, tuple[Any, ...]]:
    """The dimensions and values of a convolution over lines as those of one over planes one element high."""
    stride, padding, dilation = (
        (across, value[0]) if isinstance(value, tuple) and len(value) == 1 else value
        for across, value in zip((1, 0, 1), recorded[:3], strict=True)
    )
    recorded = (stride, padding, dilation, *recorded[3:])
    if output is not None and len(output) == 3:
        output = (*output[:2], 1, output[2])
    return (*data[:2], 1, data[2]), (*weights[:2], 1, weights[2]), output, recorded


def _window(data: Dims, weights: Dims, output: Dims | None, how: str, recorded: tuple[Any, ...]) -> _Window | str:
    """The recorded stride, padding and dilation, or those that make `output`; in words why there are none.

    `how` says where the output's size was found; empty where it wasn't.
    """
    stride, padding, dilation = (pair(value) for value in recorded[:3])
    dilation = dilation or (1, 1)
    if stride is not None:
        return _Window(stride, padding or (0, 0), dilation)
    sides = [infer_side(data[axis], weights[axis], output[axis] if output else None) for axis in (2, 3)]
    vertical, horizontal = sides
    if vertical is None or horizontal is None:
        return f"no stride and padding make {list(output or ())} of {list(data)} and {list(weights)}"
    assumed = f"stride and padding from the size of its {how}" if how else "stride 1 and padding that keeps the size"
    return _Window((vertical[0], horizontal[0]), (vertical[1], horizontal[1]), dilation, assumed)


def _output_side(size: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    """Output elements in one direction; 0 with stride 0.

    >>> _output_side(224, 7, stride=2, padding=3, dilation=1)
    112
    """
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1 if stride else 0


def _operator(data: Dims, weights: Dims, window: _Window, dtype: str) -> dict[str, Any]:
    """The convolution as in op.json."""
    (n, c, h, w), (f, per_group, kh, kw) = data, weights
    top, left = window.padding
    sizes = {"n": n, "c": c, "h": h, "w": w}
    # Written as people write them, so that derived names are those of their op.json.
    moves: dict[str, Any] = {
        "kh": kh,
        "kw": kw,
        "stride": _one_or_both(window.stride),
        "dilation": _one_or_both(window.dilation),
    }
    moves |= {"padding": top if top == left else [top, left, top, left], "dtype": dtype}
    groups = c // per_group
    if groups == c == f > 1:
        return {"op": "depthwise_conv2d", **sizes, **moves}
    return {"op": "conv2d", **sizes, "f": f, "groups": groups, **moves}


def _one_or_both(values: tuple[int, int]) -> int | list[int]:
    return values[0] if values[0] == values[1] else list(values)


def infer_side(size: int, taps: int, output: int | None) -> tuple[int, int] | None:
    """Stride and padding (the same at both ends, no dilation) by which a window makes ``output`` of ``size``.

    output = floor((size + 2 padding - taps) / stride) + 1. Of several pairs the one whose padding is nearest to
    floor(taps / 2), then the smaller padding, then the smaller stride; without output stride 1. None if there is none.

    >>> infer_side(224, 7, 112)
    (2, 3)
    >>> infer_side(8, 3, 9) is None
    True
    """
    if output is None:
        return 1, taps // 2
    near = sorted(range(taps), key=lambda padding: (abs(padding - taps // 2), padding))
    guess = max(size // max(output, 1), 1)
    for padding in near:
        for stride in range(max(guess - 1, 1), guess + 3):
            span = size + 2 * padding - taps
            if span >= 0 and span // stride + 1 == output:
                return stride, padding
    return None
