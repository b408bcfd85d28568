"""Operators as JSON data -> tensor expressions (``docs/operators.md`` describes every one).

A named operator (``{"op": "matmul", ...}``) is shorthand: its class below writes the text of the expression language,
and everything goes through :func:`sokoban.parser.parse_program`. Nothing in the data is ever executed.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from hal import InputError
from sokoban.expression import TensorExpr
from sokoban.parser import (
    MAX_AXIS_SIZE,
    check_accumulate,
    check_dtype,
    check_shape,
    check_sizes,
    parse_program,
    parse_tree,
    shown,
    unused_name,
)

MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_NAME_LENGTH = 100

Size = Annotated[int, Meta(ge=1, le=MAX_AXIS_SIZE)]
Shape = Annotated[tuple[Size, ...], Meta(min_length=1, max_length=8)]
#: One number for rows and columns, or [rows, columns].
Pair = Size | Annotated[tuple[Size, ...], Meta(min_length=2, max_length=2)]
PadSize = Annotated[int, Meta(ge=0, le=MAX_AXIS_SIZE)]
#: "SAME" (output = ceil(input / stride)), "VALID", one number for all sides, or [top, left, bottom, right].
Padding = Literal["SAME", "VALID"] | PadSize | Annotated[tuple[PadSize, ...], Meta(min_length=4, max_length=4)]
Layout = Literal["NCHW", "NHWC"]
DType = Literal["float16", "bfloat16", "float32", "float64"]
Accumulate = Literal["float32", "float64"]
PadValue = float | Literal["inf", "-inf"]
Unary = Literal[
    "abs", "ceil", "cos", "erf", "exp", "floor", "gelu", "log", "neg", "relu", "rsqrt", "sigmoid", "silu", "sin",
    "sqrt", "tanh",
]  # fmt: skip
Binary = Literal["add", "sub", "mul", "div", "pow", "min", "max"]
Activation = Literal["relu", "gelu", "tanh", "sigmoid", "silu"]


class BiasAdd(Struct, tag_field="function", tag="bias_add", forbid_unknown_fields=True, frozen=True):
    """Adds the vector ``bias`` along one axis of the output."""

    axis: str


class ResidualAdd(Struct, tag_field="function", tag="residual_add", forbid_unknown_fields=True, frozen=True):
    """Adds the tensor ``residual``, which has the output's shape."""


class Scale(Struct, tag_field="function", tag="scale", forbid_unknown_fields=True, frozen=True):
    """Multiplies by a number."""

    value: float


EpilogueStep = Activation | BiasAdd | ResidualAdd | Scale


@dataclass(frozen=True)
class Program:
    """What a named operator writes: a text of the language and what the text does not say.

    ``bias_axes`` maps an axis name of the interface to the axes that index it, where a grouped operator splits it.
    """

    text: str
    sizes: Mapping[str, int]
    output: str
    axes: tuple[str, ...]
    stem: str
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    external_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    bias_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class _Operator(Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Keys that every operator takes."""

    name: str | None = None
    dtype: DType = "float32"
    accumulate: Accumulate | None = None
    epilogue: tuple[EpilogueStep, ...] = ()

    def program(self) -> Program:
        """The operator in the expression language; raises InputError where the keys contradict each other."""
        raise NotImplementedError


# Matrix products


class MatMul(_Operator, tag="matmul", kw_only=True, frozen=True):
    """``C[m,n] = sum(k, A[m,k] * B[k,n])``; a transposed operand is stored the other way around."""

    m: Size
    n: Size
    k: Size
    transpose_a: bool = False
    transpose_b: bool = False

    def program(self) -> Program:
        a, b = _matmul_operands(self.transpose_a, self.transpose_b)
        stem = f"matmul_{self.m}x{self.n}x{self.k}" + "_ta" * self.transpose_a + "_tb" * self.transpose_b
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        return Program(f"C[m,n] = sum(k, A[{a}] * B[{b}])", sizes, "C", ("m", "n"), stem)


class BatchMatMul(_Operator, tag="batch_matmul", kw_only=True, frozen=True):
    """``C[b,m,n] = sum(k, A[b,m,k] * B[b,k,n])``; a transposed operand swaps its last two dimensions."""

    b: Size
    m: Size
    n: Size
    k: Size
    transpose_a: bool = False
    transpose_b: bool = False

    def program(self) -> Program:
        a, b = _matmul_operands(self.transpose_a, self.transpose_b)
        flags = "_ta" * self.transpose_a + "_tb" * self.transpose_b
        stem = f"batch_matmul_{self.b}x{self.m}x{self.n}x{self.k}{flags}"
        sizes = {"b": self.b, "m": self.m, "n": self.n, "k": self.k}
        return Program(f"C[b,m,n] = sum(k, A[b,{a}] * B[b,{b}])", sizes, "C", ("b", "m", "n"), stem)


def _matmul_operands(transpose_a: bool, transpose_b: bool) -> tuple[str, str]:
    return "k,m" if transpose_a else "m,k", "n,k" if transpose_b else "k,n"


# Windows: convolutions and pooling


@dataclass(frozen=True)
class _Window:
    """One spatial dimension of a sliding window: position ``stride*out + dilation*tap - before``."""

    extent: int
    taps: int
    stride: int
    dilation: int
    before: int
    after: int
    out: int

    def index(self, out_axis: str, tap_axis: str) -> str:
        """``2*oh + kh - 1``"""
        text = f"{_times(self.stride, out_axis)} + {_times(self.dilation, tap_axis)}"
        return f"{text} - {self.before}" if self.before else text


def _times(factor: int, axis: str) -> str:
    return axis if factor == 1 else f"{factor}*{axis}"


def _window(
    extent: int, taps: int, stride: int, dilation: int, padding: str | tuple[int, int], tap_key: str, extent_key: str
) -> _Window:
    """Padding and output size of one dimension; SAME as TensorFlow defines it."""
    reach = dilation * (taps - 1) + 1
    if padding == "SAME":
        total = max((math.ceil(extent / stride) - 1) * stride + reach - extent, 0)
        before, after = total // 2, total - total // 2
    else:
        before, after = (0, 0) if isinstance(padding, str) else padding
    room = extent + before + after - reach
    if room < 0:
        raise InputError(
            tap_key,
            f"the window covers {reach} elements, the padded input {extent + before + after}",
            f"pad more, or use a smaller {tap_key} or dilation, or a larger {extent_key}",
        )
    return _Window(extent, taps, stride, dilation, before, after, room // stride + 1)


def _windows(
    height: int, width: int, kh: int, kw: int, stride: Any, dilation: Any, padding: Any
) -> tuple[_Window, _Window]:
    """The rows' and the columns' window; ``padding`` as in :data:`Padding`, the pairs as in :data:`Pair`."""
    (stride_y, stride_x), (dilation_y, dilation_x) = _pair(stride), _pair(dilation)
    rows = columns = padding
    if isinstance(padding, int):
        rows = columns = (padding, padding)
    elif isinstance(padding, tuple):
        top, left, bottom, right = padding
        rows, columns = (top, bottom), (left, right)
    return (
        _window(height, kh, stride_y, dilation_y, rows, "kh", "h"),
        _window(width, kw, stride_x, dilation_x, columns, "kw", "w"),
    )


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _window_suffix(stride: Any, dilation: Any, padding: Any, layout: str) -> str:
    """The part of a default name that tells windows apart: ``_s2_d1x2_same_nhwc``."""
    parts = [f"_{key}{_by(value)}" for key, value in (("s", stride), ("d", dilation)) if _pair(value) != (1, 1)]
    if padding == "SAME" or (padding != "VALID" and padding not in (0, (0, 0, 0, 0))):
        parts.append("_same" if padding == "SAME" else f"_p{_by(padding)}")
    return "".join(parts) + ("_nhwc" if layout == "NHWC" else "")


def _by(value: int | Sequence[int]) -> str:
    return str(value) if isinstance(value, int) else "x".join(map(str, value))


class Conv2d(_Operator, tag="conv2d", kw_only=True, frozen=True):
    """Cross-correlation over rows and columns, as deep-learning frameworks define convolution."""

    n: Size
    c: Size
    h: Size
    w: Size
    f: Size
    kh: Size
    kw: Size
    stride: Pair = 1
    dilation: Pair = 1
    padding: Padding = "VALID"
    groups: Size = 1
    layout: Layout = "NCHW"

    def program(self) -> Program:
        rows, columns = _windows(self.h, self.w, self.kh, self.kw, self.stride, self.dilation, self.padding)
        groups = self.groups
        for key, channels in (("c", self.c), ("f", self.f)):
            if channels % groups:
                raise InputError(
                    "groups", f"{groups} groups do not divide {key} = {channels}", f"change groups or {key}"
                )
        sizes = {"n": self.n, "f": self.f // groups, "oh": rows.out, "ow": columns.out}
        sizes |= {"c": self.c // groups, "kh": self.kh, "kw": self.kw} | ({"g": groups} if groups > 1 else {})
        y, x = rows.index("oh", "kh"), columns.index("ow", "kw")
        if self.layout == "NCHW":
            data, weights, axes = ["n", "g", "c", y, x], ["g", "f", "c", "kh", "kw"], ("n", "g", "f", "oh", "ow")
        else:
            data, weights, axes = ["n", y, x, "g", "c"], ["kh", "kw", "c", "g", "f"], ("n", "oh", "ow", "g", "f")
        if groups == 1:
            data, weights, axes = ([i for i in part if i != "g"] for part in (data, weights, axes))  # type: ignore[assignment]
        extents = sizes | {y: self.h, x: self.w}
        text = f"Y[{','.join(axes)}] = sum([c,kh,kw], X[{', '.join(data)} | pad=0] * W[{', '.join(weights)}])"
        stem = f"conv2d_{self.n}x{self.c}x{self.h}x{self.w}_{self.f}x{self.kh}x{self.kw}"
        stem += _window_suffix(self.stride, self.dilation, self.padding, self.layout) + (
            f"_g{groups}" if groups > 1 else ""
        )
        external = {}
        if groups > 1:
            merged = extents | {"c": self.c, "f": self.f}
            external = {
                "X": [merged[i] for i in data if i != "g"],
                "W": [{**extents, "f": self.f}[i] for i in weights if i != "g"],
                "Y": [merged[i] for i in axes if i != "g"],
            }
        return Program(
            text, sizes, "Y", tuple(axes), stem,
            shapes={"X": [extents[i] for i in data], "W": [extents[i] for i in weights]},
            external_shapes=external,
            bias_axes={"f": ("g", "f"), "g": ()} if groups > 1 else {},
        )  # fmt: skip


class DepthwiseConv2d(_Operator, tag="depthwise_conv2d", kw_only=True, frozen=True):
    """Every channel convolved with its own window; one output channel per input channel."""

    n: Size
    c: Size
    h: Size
    w: Size
    kh: Size
    kw: Size
    stride: Pair = 1
    dilation: Pair = 1
    padding: Padding = "VALID"
    layout: Layout = "NCHW"

    def program(self) -> Program:
        rows, columns = _windows(self.h, self.w, self.kh, self.kw, self.stride, self.dilation, self.padding)
        y, x = rows.index("oh", "kh"), columns.index("ow", "kw")
        sizes = {"n": self.n, "c": self.c, "oh": rows.out, "ow": columns.out, "kh": self.kh, "kw": self.kw}
        if self.layout == "NCHW":
            axes, data, weights = ("n", "c", "oh", "ow"), f"n, c, {y}, {x}", "c, kh, kw"
            shape, external = [self.n, self.c, self.h, self.w], [self.c, 1, self.kh, self.kw]
        else:
            axes, data, weights = ("n", "oh", "ow", "c"), f"n, {y}, {x}, c", "kh, kw, c"
            shape, external = [self.n, self.h, self.w, self.c], [self.kh, self.kw, self.c, 1]
        stem = f"depthwise_conv2d_{self.n}x{self.c}x{self.h}x{self.w}_{self.kh}x{self.kw}"
        stem += _window_suffix(self.stride, self.dilation, self.padding, self.layout)
        text = f"Y[{','.join(axes)}] = sum([kh,kw], X[{data} | pad=0] * W[{weights}])"
        return Program(text, sizes, "Y", axes, stem, {"X": shape}, {"W": external})


class _Pool(_Operator, kw_only=True, frozen=True):
    """What both pools share; ``stride`` has no default because libraries disagree on it."""

    n: Size
    c: Size
    h: Size
    w: Size
    kh: Size
    kw: Size
    stride: Pair
    padding: Padding = "VALID"
    layout: Layout = "NCHW"

    kind: ClassVar[str] = ""

    def windows(self, dilation: Any) -> tuple[_Window, _Window]:
        """The rows' and the columns' window, none of them wholly in the padding."""
        rows, columns = _windows(self.h, self.w, self.kh, self.kw, self.stride, dilation, self.padding)
        for window, key in ((rows, "kh"), (columns, "kw")):
            reach = window.dilation * (window.taps - 1) + 1
            if max(window.before, window.after) >= reach:
                raise InputError(
                    "padding",
                    f"{max(window.before, window.after)} is not smaller than the window of {reach} ({key})",
                    "pad less; a window wholly outside the input has no value",
                )
        return rows, columns

    def pooled(self, rows: _Window, columns: _Window, reduce: str, pad: str, finish: str) -> Program:
        """``Y[...] = reduce([kh,kw], X[... | pad=...]) finish``"""
        y, x = rows.index("oh", "kh"), columns.index("ow", "kw")
        channels_first = self.layout == "NCHW"
        axes = ("n", "c", "oh", "ow") if channels_first else ("n", "oh", "ow", "c")
        data = f"n, c, {y}, {x}" if channels_first else f"n, {y}, {x}, c"
        shape = [self.n, self.c, self.h, self.w] if channels_first else [self.n, self.h, self.w, self.c]
        sizes = {"n": self.n, "c": self.c, "oh": rows.out, "ow": columns.out, "kh": self.kh, "kw": self.kw}
        stem = f"{self.kind}_{self.n}x{self.c}x{self.h}x{self.w}_{self.kh}x{self.kw}"
        stem += _window_suffix(self.stride, (rows.dilation, columns.dilation), self.padding, self.layout)
        text = f"Y[{','.join(axes)}] = {reduce}([kh,kw], X[{data} | pad={pad}]){finish}"
        return Program(text, sizes, "Y", axes, stem, {"X": shape})


class AvgPool2d(_Pool, tag="avg_pool2d", kw_only=True, frozen=True):
    """The mean of every window; what falls into the padding counts only with ``count_include_pad``."""

    count_include_pad: bool = False

    kind: ClassVar[str] = "avg_pool2d"

    def program(self) -> Program:
        rows, columns = self.windows(1)
        count = str(self.kh * self.kw)
        if not self.count_include_pad:
            count = f"({_inside(rows, 'oh')}) * ({_inside(columns, 'ow')})"
            if not (rows.before or rows.after or columns.before or columns.after):
                count = str(self.kh * self.kw)
        result = self.pooled(rows, columns, "sum", "0", f" / ({count})")
        return replace(result, stem=result.stem + "_padcount") if self.count_include_pad else result


def _inside(window: _Window, axis: str) -> str:
    """How many taps of an undilated window lie inside the input."""
    start = f"{_times(window.stride, axis)} - {window.before}"
    return f"min({start} + {window.taps}, {window.extent}) - max({start}, 0)"


class MaxPool2d(_Pool, tag="max_pool2d", kw_only=True, frozen=True):
    """The largest element of every window; padding never wins."""

    dilation: Pair = 1

    kind: ClassVar[str] = "max_pool2d"

    def program(self) -> Program:
        return self.pooled(*self.windows(self.dilation), "max", "-inf", "")


# Operators on a shape; their axes are i0, i1, ...


class Reduce(_Operator, tag="reduce", kw_only=True, frozen=True):
    """``function`` over ``axes`` of a tensor; the reduced dimensions are gone from the output."""

    function: Literal["sum", "mean", "max", "min"]
    shape: Shape
    axes: Annotated[tuple[int, ...], Meta(min_length=1)]

    def program(self) -> Program:
        names = _axis_names(self.shape)
        reduced = [_dimension(axis, self.shape, f"axes[{i}]") for i, axis in enumerate(self.axes)]
        if len(set(reduced)) < len(reduced):
            raise InputError("axes", f"{list(self.axes)} names a dimension twice", "name every dimension once")
        sizes = dict(zip(names, self.shape, strict=True))
        kept = tuple(name for dimension, name in enumerate(names) if dimension not in reduced)
        if not kept:
            sizes["one"], kept = 1, ("one",)
        over = ",".join(names[dimension] for dimension in sorted(reduced))
        text = f"Y[{','.join(kept)}] = {self.function}([{over}], X[{','.join(names)}])"
        stem = f"reduce_{self.function}_{_by(self.shape)}_axis{_by(sorted(reduced))}"
        return Program(text, sizes, "Y", kept, stem)


class Elementwise(_Operator, tag="elementwise", kw_only=True, frozen=True):
    """A function of each element, of two tensors' elements (NumPy broadcasting), or of element and number."""

    function: Unary | Binary
    shape: Shape | None = None
    shapes: Annotated[tuple[Shape, ...], Meta(min_length=1, max_length=2)] | None = None
    scalar: bool = False
    value: float | None = None

    def program(self) -> Program:
        shapes = self._input_shapes()
        out = _broadcast(shapes)
        names = _axis_names(out)
        operands = [
            f"{tensor}[{_broadcast_index(shape, out)}]" for tensor, shape in zip(("X", "X2"), shapes, strict=False)
        ]
        stem = f"elementwise_{self.function}_" + "_".join(_by(shape) for shape in dict.fromkeys(shapes))
        if self.scalar:
            value = 2.0 if self.value is None else self.value
            operands.append(f"{value!r}")
            stem += f"_scalar{value:g}".replace("+", "")
        text = f"Y[{','.join(names)}] = {self.function}({', '.join(operands)})"
        return Program(text, dict(zip(names, out, strict=True)), "Y", names, stem)

    def _input_shapes(self) -> list[tuple[int, ...]]:
        binary = self.function in typing.get_args(Binary)
        if (self.shape is None) == (self.shapes is None):
            raise InputError(
                "shape", "exactly one of shape and shapes is needed", "write shape for operands of one shape"
            )
        if not binary and self.scalar:
            raise InputError("scalar", f"{self.function} takes one operand", "remove scalar")
        if self.value is not None and not self.scalar:
            raise InputError("value", "is only used with a scalar operand", 'add "scalar": true or remove value')
        count = 2 if binary and not self.scalar else 1
        if self.shapes is None:
            assert self.shape is not None
            return [self.shape] * count
        if len(self.shapes) != count:
            raise InputError("shapes", f"{self.function} reads {count} tensor(s), got {len(self.shapes)} shape(s)")
        return list(self.shapes)


class Softmax(_Operator, tag="softmax", kw_only=True, frozen=True):
    """``exp(x - max) / sum(exp(x - max))`` along one dimension."""

    shape: Shape
    axis: int = -1

    def program(self) -> Program:
        line = _line(self.shape, self.axis)
        text = (
            f"Peak[{line.left}] = max({line.axis}, X[{line.full}])\n"
            f"E[{line.full}] = exp(X[{line.full}] - Peak[{line.read}])\n"
            f"Total[{line.left}] = sum({line.axis}, E[{line.full}])\n"
            f"Y[{line.full}] = E[{line.full}] / Total[{line.read}]"
        )
        stem = f"softmax_{_by(self.shape)}_axis{line.dimension}"
        return Program(text, line.sizes, "Y", line.names, stem)


class LayerNorm(_Operator, tag="layer_norm", kw_only=True, frozen=True):
    """``(x - mean) / sqrt(variance + eps) * gamma + beta`` along one dimension."""

    shape: Shape
    axis: int = -1
    eps: Annotated[float, Meta(ge=0)] = 1e-5

    def program(self) -> Program:
        line = _line(self.shape, self.axis)
        axis, count = line.axis, self.shape[line.dimension]
        text = (
            f"Sum[{line.left}] = sum({axis}, X[{line.full}])\n"
            f"Centred[{line.full}] = X[{line.full}] - Sum[{line.read}] / {count}\n"
            f"Squares[{line.left}] = sum({axis}, Centred[{line.full}] * Centred[{line.full}])\n"
            f"Y[{line.full}] = Centred[{line.full}] * rsqrt(Squares[{line.read}] / {count} + {self.eps!r})"
            f" * gamma[{axis}] + beta[{axis}]"
        )
        stem = f"layer_norm_{_by(self.shape)}_axis{line.dimension}"
        return Program(text, line.sizes, "Y", line.names, stem)


class Transpose(_Operator, tag="transpose", kw_only=True, frozen=True):
    """``Y`` has dimension ``perm[d]`` of ``X`` as its dimension ``d``, as in NumPy; i0, i1, ... are Y's axes."""

    shape: Shape
    perm: tuple[int, ...]

    def program(self) -> Program:
        if sorted(self.perm) != list(range(len(self.shape))):
            wanted = f"use each of 0 to {len(self.shape) - 1} once"
            raise InputError("perm", f"{list(self.perm)} does not order the {len(self.shape)} dimensions", wanted)
        names = _axis_names(self.shape)
        sizes = {names[i]: self.shape[source] for i, source in enumerate(self.perm)}
        index = [names[self.perm.index(dimension)] for dimension in range(len(self.shape))]
        text = f"Y[{','.join(names)}] = X[{','.join(index)}]"
        return Program(text, sizes, "Y", names, f"transpose_{_by(self.shape)}_perm{_by(self.perm)}")


def _axis_names(shape: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"i{dimension}" for dimension in range(len(shape)))


def _dimension(axis: int, shape: Sequence[int], where: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise InputError(where, f"dimension {axis} of a tensor with {len(shape)}", f"use 0 to {len(shape) - 1}")
    return axis % len(shape)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    out = tuple(max(extents) for extents in zip(*aligned, strict=True))
    if any(extent not in (1, size) for shape in aligned for extent, size in zip(shape, out, strict=True)):
        first, second = (list(shape) for shape in shapes)
        raise InputError(
            "shapes", f"{first} and {second} do not broadcast", "from the right, extents must be equal or one of them 1"
        )
    return out


def _broadcast_index(shape: tuple[int, ...], out: tuple[int, ...]) -> str:
    skipped = len(out) - len(shape)
    return ",".join(
        "0" if extent == 1 and out[skipped + d] != 1 else f"i{skipped + d}" for d, extent in enumerate(shape)
    )


@dataclass(frozen=True)
class _Line:
    """Names for a reduction along one dimension whose result is read back for every element."""

    names: tuple[str, ...]
    dimension: int
    sizes: Mapping[str, int]

    @property
    def axis(self) -> str:
        return self.names[self.dimension]

    @property
    def full(self) -> str:
        return ",".join(self.names)

    @property
    def left(self) -> str:
        """Left-hand side of the reduction's result."""
        return ",".join(name for name in self.names if name != self.axis) or "one"

    @property
    def read(self) -> str:
        """Index that reads the reduction's result."""
        return "0" if self.left == "one" else self.left


def _line(shape: tuple[int, ...], axis: int) -> _Line:
    dimension = _dimension(axis, shape, "axis")
    names = _axis_names(shape)
    sizes = dict(zip(names, shape, strict=True))
    return _Line(names, dimension, sizes if len(shape) > 1 else {**sizes, "one": 1})


# The general form


class Expr(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """An operator written in the expression language."""

    expr: str
    sizes: dict[str, Size]
    dtypes: dict[str, DType] = {}
    shapes: dict[str, Shape] = {}
    pad: dict[str, PadValue] = {}
    name: str | None = None
    dtype: DType = "float32"
    accumulate: Accumulate | None = None
    epilogue: tuple[EpilogueStep, ...] = ()


_NAMED: tuple[type[_Operator], ...] = (
    MatMul, BatchMatMul, Conv2d, DepthwiseConv2d, AvgPool2d, MaxPool2d,
    Reduce, Elementwise, Softmax, LayerNorm, Transpose,
)  # fmt: skip
NAMED_OPERATORS: Mapping[str, type[_Operator]] = {str(cls.__struct_config__.tag): cls for cls in _NAMED}


# Epilogues


def _with_epilogue(program: Program, steps: Sequence[EpilogueStep]) -> Program:
    """The program with one more statement ``Out[...] = ...`` that applies ``steps`` in order to its output."""
    if not steps:
        return program
    taken = set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", program.text)) | set(program.sizes)
    axes = ",".join(program.axes)
    value = f"{program.output}[{axes}]"
    external = dict(program.external_shapes)
    words = []
    for position, step in enumerate(steps):
        if isinstance(step, BiasAdd):
            split = program.bias_axes.get(step.axis, (step.axis,) if step.axis in program.axes else ())
            if not split:
                usable = ", ".join(
                    axis for axis in program.axes if axis not in program.bias_axes or program.bias_axes[axis]
                )
                raise InputError(f"epilogue[{position}].axis", f"no axis {step.axis!r}", f"use one of {usable}")
            tensor = _taken_name("bias", taken)
            value = f"{value} + {tensor}[{','.join(split)}]"
            if len(split) > 1:
                external[tensor] = [math.prod(program.sizes[axis] for axis in split)]
        elif isinstance(step, ResidualAdd):
            tensor = _taken_name("residual", taken)
            value = f"{value} + {tensor}[{axes}]"
            if program.output in external:
                external[tensor] = external[program.output]
        else:
            value = f"({value}) * {step.value!r}" if isinstance(step, Scale) else f"{step}({value})"
        words.append(
            step if isinstance(step, str) else {"bias_add": "bias", "residual_add": "residual"}.get(_tag(step), "scale")
        )
    output = _taken_name("Out", taken)
    if program.output in external:
        external[output] = external.pop(program.output)
    return replace(
        program, text=f"{program.text}\n{output}[{axes}] = {value}", output=output,
        external_shapes=external, stem="_".join([program.stem, *words]),
    )  # fmt: skip


def _tag(step: Struct) -> str:
    return str(step.__struct_config__.tag)


def _taken_name(stem: str, taken: set[str]) -> str:
    name = unused_name(stem, taken)
    taken.add(name)
    return name


# One JSON value -> one expression

_T = typing.TypeVar("_T", bound=Struct)


def operator_from_data(data: object) -> TensorExpr:
    """One decoded JSON object -> its expression; ``name`` is the given or the derived one.

    Raises:
        InputError: ``field`` is the path inside the object (``stride``, ``sizes.k``), empty for the object itself.
    """
    if not isinstance(data, dict):
        raise InputError("", f"expected an object, got {_json_type(data)}", 'write {"op": ...} or {"expr": ...}')
    if ("op" in data) == ("expr" in data):
        problem = "has both op and expr" if "op" in data else "has neither op nor expr"
        raise InputError("", problem, 'write {"op": ...} or {"expr": ...}')
    if "expr" in data:
        return _from_expr(data)
    op = data["op"]
    if not isinstance(op, str) or op not in NAMED_OPERATORS:
        close = difflib.get_close_matches(str(op), NAMED_OPERATORS, 1) if isinstance(op, str) else []
        known = ", ".join(NAMED_OPERATORS)
        shown = repr(op) if isinstance(op, str) else _json_type(op)
        raise InputError(
            "op", f"unknown operator {shown}", (f"did you mean {close[0]!r}? " if close else "") + f"known: {known}"
        )
    operator = _convert(data, NAMED_OPERATORS[op])
    _check_operator_name(operator.name)
    program = _with_epilogue(operator.program(), operator.epilogue)
    stem = program.stem + ("" if operator.dtype == "float32" else f"_{operator.dtype}")
    check_accumulate(operator.accumulate or "float64", operator.dtype)
    try:
        return parse_program(
            program.text, program.sizes, {}, operator.accumulate, operator.name or _short(stem),
            program.shapes, default_dtype=operator.dtype, external_shapes=program.external_shapes,
        )  # fmt: skip
    except InputError as error:  # the text is ours, so what is wrong with it is the operator as a whole
        tensor = f"tensor {error.field.removeprefix('shapes.')}: " if error.field.startswith("shapes.") else ""
        raise InputError("", tensor + error.problem, error.remedy) from error


def _from_expr(data: dict[str, Any]) -> TensorExpr:
    if isinstance(data["expr"], str):
        parse_tree(data["expr"])  # first, so that text which is no program is called that
    _check_maps(data)
    operator = _convert(data, Expr)
    _check_operator_name(operator.name)
    pads = {tensor: float(value) for tensor, value in operator.pad.items()}
    tree = parse_tree(operator.expr)
    last = tree.children[-1]
    output, left = str(last.children[0]), last.children[1]  # type: ignore[union-attr]
    axes = tuple(str(index.children[0]) for index in left.children)  # type: ignore[union-attr]
    stem = f"expr_{output}_" + _by([operator.sizes.get(axis, 0) for axis in axes])
    program = _with_epilogue(Program(operator.expr, operator.sizes, output, axes, stem), operator.epilogue)
    stem = program.stem + ("" if operator.dtype == "float32" else f"_{operator.dtype}")
    dtypes = dict(operator.dtypes)
    if program.output != output and output in dtypes:
        dtypes.setdefault(program.output, dtypes[output])
    return parse_program(
        program.text, operator.sizes, dtypes, operator.accumulate, operator.name or _short(stem),
        operator.shapes, pads, operator.dtype,
    )  # fmt: skip


def _check_maps(data: dict[str, Any]) -> None:
    """Checks of ``sizes``, ``dtypes`` and ``shapes`` that name the key, which msgspec's messages do not."""
    for key in ("sizes", "dtypes", "shapes", "pad"):
        if not isinstance(data.get(key, {}), dict):
            raise InputError(key, f"expected an object, got {_json_type(data[key])}")
    check_sizes(data.get("sizes", {}))
    for tensor, dtype in data.get("dtypes", {}).items():
        check_dtype(dtype, f"dtypes.{tensor}")
    for tensor, shape in data.get("shapes", {}).items():
        if not isinstance(shape, list):
            raise InputError(f"shapes.{tensor}", f"expected a list of extents, got {_json_type(shape)}")
        check_shape(tensor, shape)
    for tensor, pad in data.get("pad", {}).items():
        if isinstance(pad, bool) or not (isinstance(pad, int | float) or pad in ("inf", "-inf")):
            raise InputError(f"pad.{tensor}", f"expected a number, got {shown(pad)}", 'write a number, "inf" or "-inf"')


def _convert(data: dict[str, Any], cls: type[_T]) -> _T:
    """``data`` as an instance of ``cls``; every complaint becomes an InputError with the key's path."""
    known = [*cls.__struct_fields__, *(["op"] if cls is not Expr else [])]
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            remedy = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise InputError("", f"unknown key {key!r}", remedy)
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), data, cls) from None
    except RecursionError:
        raise InputError("", "nested too deep") from None


def _validation_error(message: str, data: dict[str, Any], cls: type[Struct]) -> InputError:
    problem, _, path = message.partition(" - at `$")
    where = path.rstrip("`").lstrip(".")
    problem = problem.replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\w+)", problem)
    if missing:
        key = missing[1]
        return InputError(f"{where}.{key}" if where else key, "is missing", f'add "{key}"')
    key = re.split(r"[.\[]", where)[0]
    if problem.startswith("Invalid "):
        options = _literals(typing.get_type_hints(cls).get(key)) or []
        found = re.search(r"'.*'|-?\d+$", problem)
        if key == "epilogue":
            options += [_tag_of(step) for step in (BiasAdd, ResidualAdd, Scale)]
        if key == "padding":
            options += ["a number", "[top, left, bottom, right]"]
        what = f"unknown {key} {found[0] if found else ''}".strip()
        return InputError(where, what, f"use one of {', '.join(options)}" if options else "")
    return InputError(where, problem[:1].lower() + problem[1:])


def _tag_of(cls: type[Struct]) -> str:
    return str(cls.__struct_config__.tag)


def _literals(annotation: Any) -> list[str]:
    """The words that an annotation's Literals allow, wherever they are nested in it."""
    if typing.get_origin(annotation) is Literal:
        return [str(word) for word in typing.get_args(annotation)]
    return [word for part in typing.get_args(annotation) for word in _literals(part)]


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _check_operator_name(name: str | None) -> None:
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) or len(name) > MAX_NAME_LENGTH:
        raise InputError(
            "name", f"{name!r} cannot name a folder",
            f"use 1 to {MAX_NAME_LENGTH} of A-Z a-z 0-9 . _ -, not starting with a dot",
        )  # fmt: skip


def _short(stem: str) -> str:
    """A derived name cut to the allowed length, kept distinct by a hash of the whole."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", stem)
    limit = MAX_NAME_LENGTH - 4  # room for the number of a duplicate
    if len(stem) <= limit:
        return stem
    return f"{stem[: limit - 9]}_{hashlib.sha256(stem.encode()).hexdigest()[:8]}"


# Files


def load_operators(path: str | Path) -> list[TensorExpr]:
    """The operators of a JSON file: one object, or a list of them.

    Raises:
        InputError: the file cannot be read, or something in it cannot be used (``ops.json[3].stride``).
    """
    source = str(path)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(source, f"cannot be read: {error.strerror or error}", "") from None
    except ValueError as error:
        raise InputError(source, f"cannot be read: {error}", "") from None
    return operators_from_json(text, source)


def operators_from_json(text: bytes, source_name: str) -> list[TensorExpr]:
    """JSON text -> expressions with distinct names; ``source_name`` starts the field of every error.

    Raises:
        InputError: broken or too large JSON, or an operator that cannot be used.
    """
    data = _decode(text, source_name)
    if isinstance(data, list):
        if not data:
            raise InputError(source_name, "an empty list", "write at least one operator")
        items = [(f"{source_name}[{position}]", item) for position, item in enumerate(data)]
    else:
        items = [(source_name, data)]
    expressions: list[TensorExpr] = []
    given: dict[str, str] = {}
    for where, item in items:
        try:
            expression = operator_from_data(item)
        except InputError as error:
            raise error.within(where) from error.__cause__
        except RecursionError:
            raise InputError(where, "brackets nested too deep") from None
        if isinstance(item, dict) and item.get("name") is not None:
            if expression.name in given:
                raise InputError(
                    f"{where}.name",
                    f"{expression.name!r} is already used by {given[expression.name]}",
                    "rename one of them",
                )
            given[expression.name] = where
        expressions.append(expression)
    taken = set(given)
    for position, ((_, item), expression) in enumerate(zip(items, expressions, strict=True)):
        if item.get("name") is None:
            expressions[position] = replace(expression, name=_taken_name(expression.name, taken))
    return expressions


def _decode(text: bytes, source_name: str) -> object:
    if len(text) > MAX_FILE_BYTES:
        raise InputError(source_name, f"larger than {MAX_FILE_BYTES // 2**20} MiB", "split the list into several files")
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise InputError(
            source_name, "brackets nested too deep", "an operator is an object, a suite a list of them"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(source_name, f"not UTF-8 text: {error.reason}", "save the file as UTF-8") from None
    except msgspec.DecodeError as error:
        message = str(error).removeprefix("JSON is malformed: ")
        found = re.search(r" \(byte (\d+)\)$", message)
        if not found and "truncated" not in message:
            raise InputError(source_name, f"broken JSON: {message.split(' - at ')[0].lower()}") from None
        position = int(found[1]) if found else len(text)
        line = text.count(b"\n", 0, position) + 1
        column = position - (text.rfind(b"\n", 0, position) + 1) + 1
        problem = message[: found.start()] if found else "it ends too early"
        raise InputError(source_name, f"broken JSON at line {line}, column {column}: {problem}") from None


def operator_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of an operator file."""
    hook: Callable[[type], dict[str, Any]] | None = None
    schemas, components = msgspec.json.schema_components(
        [*_NAMED, Expr], schema_hook=hook, ref_template="#/$defs/{name}"
    )
    components["Operator"] = {"anyOf": list(schemas)}
    item = {"$ref": "#/$defs/Operator"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Operators",
        "anyOf": [item, {"type": "array", "items": item, "minItems": 1}],
        "$defs": components,
    }
