"""Convolutions and pooling of the suites as PyTorch calls, padding done beforehand where no argument says it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.calls.problem import Problem, Spec, Tensor, epilogue_of, functional_module, torch_module


@dataclass(frozen=True)
class _Sides:
    """Padding of rows and columns: before and after."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def symmetric(self) -> tuple[int, int] | None:
        """What the library's own argument says, or None where it cannot."""
        equal = self.rows[0] == self.rows[1] and self.columns[0] == self.columns[1]
        return (self.rows[0], self.columns[0]) if equal else None

    def applied(self, x: Tensor, value: float) -> Tensor:
        return functional_module().pad(x, (*self.columns, *self.rows), value=value)


def pair(value: Any) -> tuple[int, int]:
    """A number for rows and one for columns, from both or from one for both."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _sides(spec: Spec, stride: tuple[int, int], dilation: tuple[int, int]) -> _Sides:
    padding = spec.get("padding", "VALID")
    if padding == "VALID":
        return _Sides((0, 0), (0, 0))
    if isinstance(padding, int):
        return _Sides((padding, padding), (padding, padding))
    if padding != "SAME":
        top, left, bottom, right = padding
        return _Sides((top, bottom), (left, right))

    def same(extent: int, taps: int, step: int, spread: int) -> tuple[int, int]:
        total = max((math.ceil(extent / step) - 1) * step + spread * (taps - 1) + 1 - extent, 0)
        return total // 2, total - total // 2

    return _Sides(
        same(spec["h"], spec["kh"], stride[0], dilation[0]), same(spec["w"], spec["kw"], stride[1], dilation[1])
    )


def _extents(spec: Spec, sides: _Sides, stride: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, int]:
    height = (spec["h"] + sum(sides.rows) - dilation[0] * (spec["kh"] - 1) - 1) // stride[0] + 1
    width = (spec["w"] + sum(sides.columns) - dilation[1] * (spec["kw"] - 1) - 1) // stride[1] + 1
    return height, width


def conv2d_problem(suite: str, spec: Spec) -> Problem:
    """A convolution, depthwise or not, and its epilogue."""
    depthwise = spec["op"] == "depthwise_conv2d"
    n, c, h, w, kh, kw = (spec[key] for key in ("n", "c", "h", "w", "kh", "kw"))
    f, groups = (c, c) if depthwise else (spec["f"], spec.get("groups", 1))
    stride, dilation = pair(spec.get("stride", 1)), pair(spec.get("dilation", 1))
    sides = _sides(spec, stride, dilation)
    oh, ow = _extents(spec, sides, stride, dilation)
    first = spec.get("layout", "NCHW") == "NCHW"
    channels = "c" if depthwise else "f"
    axes = ("n", channels, "oh", "ow") if first else ("n", "oh", "ow", channels)
    epilogue = epilogue_of(spec, axes)
    output = (n, f, oh, ow) if first else (n, oh, ow, f)

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        x = tensors["X"] if first else tensors["X"].permute(0, 3, 1, 2)
        weights = tensors["W"]
        if not first:
            weights = weights.permute(2, 3, 0, 1) if depthwise else weights.permute(3, 2, 0, 1)
            weights = weights.contiguous(memory_format=torch_module().channels_last)
        padding = sides.symmetric
        if padding is None:
            x, padding = sides.applied(x, 0.0), (0, 0)
        fused = epilogue.bias_first and epilogue.bias == axes.index(channels)
        bias, conv2d = (tensors["bias"] if fused else None), functional_module().conv2d

        def run() -> Tensor:
            value = conv2d(x, weights, bias, stride, padding, dilation, groups)
            value = value if first else value.permute(0, 2, 3, 1)
            return epilogue.apply(value, tensors, skip_bias=fused)

        return run

    if depthwise:
        kernel = (c, 1, kh, kw) if first else (kh, kw, c, 1)
    else:
        kernel = (f, c // groups, kh, kw) if first else (kh, kw, c // groups, f)
    inputs = {"X": (n, c, h, w) if first else (n, h, w, c), "W": kernel}
    return Problem(
        suite=suite,
        spec=spec,
        inputs=inputs | epilogue.inputs(output),
        output=output,
        leading={"X": 0, "W": None} | epilogue.leading(),
        flop=2.0 * math.prod(output) * (c // groups) * kh * kw,
        run=bind,
    )


def pool_problem(suite: str, spec: Spec) -> Problem:
    """Pooling by the average or the maximum."""
    n, c, h, w, kh, kw = (spec[key] for key in ("n", "c", "h", "w", "kh", "kw"))
    stride, dilation = pair(spec["stride"]), pair(spec.get("dilation", 1))
    sides = _sides(spec, stride, dilation)
    oh, ow = _extents(spec, sides, stride, dilation)
    first = spec.get("layout", "NCHW") == "NCHW"
    average, counted = spec["op"] == "avg_pool2d", bool(spec.get("count_include_pad"))

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        x = tensors["X"] if first else tensors["X"].permute(0, 3, 1, 2)
        pool = _average if average else _maximum
        call = pool(x, (kh, kw), stride, dilation, sides, counted)
        return call if first else lambda: call().permute(0, 2, 3, 1)

    output = (n, c, oh, ow) if first else (n, oh, ow, c)
    inputs = {"X": (n, c, h, w) if first else (n, h, w, c)}
    return Problem(
        suite=suite,
        spec=spec,
        inputs=inputs,
        output=output,
        leading={"X": 0},
        flop=float(math.prod(output)) * kh * kw,
        run=bind,
    )


def _average(
    x: Tensor, window: tuple[int, int], stride: tuple[int, int], _: tuple[int, int], sides: _Sides, counted: bool
) -> Callable[[], Tensor]:
    pool, padding = functional_module().avg_pool2d, sides.symmetric
    inside = padding is not None and 2 * padding[0] <= window[0] and 2 * padding[1] <= window[1]
    if inside:
        return lambda: pool(x, window, stride, padding, count_include_pad=counted)
    padded = sides.applied(x, 0.0)
    if counted:
        return lambda: pool(padded, window, stride)
    ones = sides.applied(torch_module().ones_like(x[:1, :1]), 0.0)
    share = pool(ones, window, stride)
    return lambda: pool(padded, window, stride) / share


def _maximum(
    x: Tensor, window: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], sides: _Sides, _: bool
) -> Callable[[], Tensor]:
    pool, padding = functional_module().max_pool2d, sides.symmetric
    if padding is not None and 2 * padding[0] <= window[0] and 2 * padding[1] <= window[1]:
        return lambda: pool(x, window, stride, padding, dilation)
    padded = sides.applied(x, -math.inf)
    return lambda: pool(padded, window, stride, 0, dilation)
