"""Operators that slide a window over rows and columns: convolutions and pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from hal.support.errors import InputError
from sokoban.language.checks import MAX_AXIS_SIZE
from sokoban.language.named.base import Operator, Program, Size, by

#: One number for rows and columns, or [rows, columns].
Pair = Size | Annotated[tuple[Size, ...], Meta(min_length=2, max_length=2)]
PadSize = Annotated[int, Meta(ge=0, le=MAX_AXIS_SIZE)]
#: "SAME" (output = ceil(input / stride)), "VALID", one number for all sides, or [top, left, bottom, right].
Padding = Literal["SAME", "VALID"] | PadSize | Annotated[tuple[PadSize, ...], Meta(min_length=4, max_length=4)]
Layout = Literal["NCHW", "NHWC"]

# Positions, padding and output sizes


@dataclass(frozen=True, kw_only=True)
class _Window:
    """One spatial dimension of a sliding window: output ``o`` reads position ``stride*o + dilation*tap - before``.

    Attributes:
        extent: elements of the input.
        taps: elements of the window.
        stride: input elements between neighbouring windows.
        dilation: input elements between neighbouring taps.
        before: elements of padding in front of the input.
        after: elements of padding behind it.
        out: windows, elements of the output.
    """

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
    """Padding and output size of one dimension; SAME as TensorFlow defines it.

    >>> _window(5, taps=3, stride=2, dilation=1, padding="SAME", tap_key="kh", extent_key="h").out
    3
    """
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
    return _Window(
        extent=extent, taps=taps, stride=stride, dilation=dilation, before=before, after=after, out=room // stride + 1
    )


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
    parts = [f"_{key}{by(value)}" for key, value in (("s", stride), ("d", dilation)) if _pair(value) != (1, 1)]
    if padding == "SAME" or (padding != "VALID" and padding not in (0, (0, 0, 0, 0))):
        parts.append("_same" if padding == "SAME" else f"_p{by(padding)}")
    return "".join(parts) + ("_nhwc" if layout == "NHWC" else "")


# Convolutions


class Conv2d(Operator, tag="conv2d", kw_only=True, frozen=True):
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
            text=text, sizes=sizes, output="Y", axes=tuple(axes), stem=stem,
            shapes={"X": [extents[i] for i in data], "W": [extents[i] for i in weights]},
            external_shapes=external,
            bias_axes={"f": ("g", "f"), "g": ()} if groups > 1 else {},
        )  # fmt: skip


class DepthwiseConv2d(Operator, tag="depthwise_conv2d", kw_only=True, frozen=True):
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
        channels_first = self.layout == "NCHW"
        weights = "c, kh, kw" if channels_first else "kh, kw, c"
        external = [self.c, 1, self.kh, self.kw] if channels_first else [self.kh, self.kw, self.c, 1]
        value = f"sum([kh,kw], {{image}} * W[{weights}])"
        program = _by_channel(self, "depthwise_conv2d", (rows, columns), self.dilation, value, "0")
        return replace(program, external_shapes={"W": external})


# Pooling


class _Pool(Operator, kw_only=True, frozen=True):
    """Common keys of both pools; ``stride`` has no default because libraries disagree on it."""

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
        dilation = (rows.dilation, columns.dilation)
        value = f"{reduce}([kh,kw], {{image}}){finish}"
        return _by_channel(self, self.kind, (rows, columns), dilation, value, pad)


def _by_channel(
    given: DepthwiseConv2d | _Pool, kind: str, windows: tuple[_Window, _Window], dilation: Any, value: str, pad: str
) -> Program:
    """An operator whose windows lie within a channel: ``Y[...] = value``, where ``{image}`` stands for the element that
    a window reads, ``pad`` outside of the image."""
    rows, columns = windows
    y, x = rows.index("oh", "kh"), columns.index("ow", "kw")
    sizes = {"n": given.n, "c": given.c, "oh": rows.out, "ow": columns.out, "kh": given.kh, "kw": given.kw}
    axes, data = ("n", "c", "oh", "ow"), f"n, c, {y}, {x}"
    shape = [given.n, given.c, given.h, given.w]
    if given.layout == "NHWC":
        axes, data, shape = ("n", "oh", "ow", "c"), f"n, {y}, {x}, c", [given.n, given.h, given.w, given.c]
    stem = f"{kind}_{given.n}x{given.c}x{given.h}x{given.w}_{given.kh}x{given.kw}"
    stem += _window_suffix(given.stride, dilation, given.padding, given.layout)
    text = f"Y[{','.join(axes)}] = {value.format(image=f'X[{data} | pad={pad}]')}"
    return Program(text=text, sizes=sizes, output="Y", axes=axes, stem=stem, shapes={"X": shape})


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
    """Number of taps of an undilated window that lie inside the input."""
    start = f"{_times(window.stride, axis)} - {window.before}"
    return f"min({start} + {window.taps}, {window.extent}) - max({start}, 0)"


class MaxPool2d(_Pool, tag="max_pool2d", kw_only=True, frozen=True):
    """The largest element of every window; padding never wins."""

    dilation: Pair = 1

    kind: ClassVar[str] = "max_pool2d"

    def program(self) -> Program:
        return self.pooled(*self.windows(self.dilation), "max", "-inf", "")
