"""Operators of the suites as PyTorch calls: their inputs, the library's call, how to take a part of the output.

Only the named operators of the suites are known; their keys are those of docs/operators.md. ``bind`` does beforehand
what a network would do once (weights in the library's layout, padding that the library has no argument for), so that a
time is the library's own.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.support.errors import InputError

Tensor = Any
Spec = Mapping[str, Any]
SUITES = Path(__file__).parents[1] / "suites"

#: Kinds for which torch.compile generates code of its own; the others it leaves to the library.
GENERATED = ("elementwise", "reduce", "softmax", "layer_norm", "transpose", "avg_pool2d", "max_pool2d")
CONTRACTIONS = ("matmul", "batch_matmul", "conv2d", "depthwise_conv2d")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An operator with its sizes.

    Attributes:
        inputs: shape of each input as a bundle's kernel takes it, in the kernel's order.
        output: its shape.
        leading: per input the dimension that belongs to the output's first one, None where all of it is needed; None
            instead of the whole if the output cannot be taken apart.
        flop: multiplications and additions; one per element of the output where there is no sum.
    """

    suite: str
    spec: Spec
    inputs: Mapping[str, tuple[int, ...]]
    output: tuple[int, ...]
    leading: Mapping[str, int | None] | None
    flop: float
    run: Callable[[Mapping[str, Tensor]], Callable[[], Tensor]] = field(repr=False)

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def op(self) -> str:
        return str(self.spec["op"])

    @property
    def dtype(self) -> str:
        return str(self.spec.get("dtype", "float32"))

    @property
    def compulsory_bytes(self) -> int:
        """Inputs and output once, in the operator's own type."""
        size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]
        return size * sum(map(math.prod, (*self.inputs.values(), self.output)))

    def bind(self, tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        """The library's call on these tensors, which may be a part along the first dimension; gives the output."""
        return self.run(tensors)

    def part(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        """The inputs of rows `start` to `stop` of the output."""
        assert self.leading is not None
        found = {}
        for name, tensor in tensors.items():
            dimension = self.leading[name]
            found[name] = tensor if dimension is None else tensor.narrow(dimension, start, stop - start)
        return found


def read_suite(name: str, *, small: bool = False) -> list[Problem]:
    """The operators of a suite; `small` cuts every size down to a few elements."""
    specs = json.loads((SUITES / f"{name}.json").read_bytes())
    return [problem(name, shrunk(spec) if small else spec) for spec in specs]


def problem(suite: str, spec: Spec) -> Problem:
    """One operator of a suite.

    Raises:
        InputError: no PyTorch call is written for its kind or its epilogue.
    """
    if spec.get("op") not in _KINDS:
        raise InputError(suite, f"has no PyTorch call for operator {spec.get('op', 'expr')!r}", "leave it out")
    return _KINDS[str(spec["op"])](suite, spec)


def by_turns(problems: Sequence[Problem]) -> list[Problem]:
    """Round-robin over kinds and suites, so that a harvest that is cut short has some of each."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for one in problems:
        groups.setdefault((one.suite, one.op), []).append(one)
    longest = max(map(len, groups.values()), default=0)
    return [group[i] for i in range(longest) for group in groups.values() if i < len(group)]


def shrunk(spec: Spec) -> dict[str, Any]:
    """The operator with every size cut down, windows and strides as they are."""
    small = dict(spec)
    for key, most in (("m", 7), ("n", 5), ("k", 9), ("b", 2)):
        if key in small:
            small[key] = min(small[key], most)
    for size, window in (("h", "kh"), ("w", "kw")):
        if size in small:
            dilation = _pair(spec.get("dilation", 1))[size == "w"]
            small[size] = min(spec[size], dilation * (spec[window] - 1) + 4)
    if "groups" in spec:
        groups = small["groups"] = min(spec["groups"], 2)
        small["c"], small["f"] = 2 * groups, 3 * groups
    for key in ("c", "f"):
        small.update({key: min(small[key], 4)} if key in small and "groups" not in spec else {})
    if "shape" in small:
        small["shape"] = [min(extent, 6) for extent in small["shape"]]
    if "shapes" in small:
        small["shapes"] = [[min(extent, 6) for extent in shape] for shape in small["shapes"]]
    return small


def _torch() -> Any:
    return importlib.import_module("torch")


def _functional() -> Any:
    return importlib.import_module("torch.nn.functional")


# Epilogues


@dataclass(frozen=True)
class _Epilogue:
    """What follows a product or a convolution; `bias` is the output's dimension that a bias runs along."""

    steps: tuple[Any, ...]
    bias: int | None
    residual: bool

    def inputs(self, output: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        found = {} if self.bias is None else {"bias": (output[self.bias],)}
        return found | ({"residual": output} if self.residual else {})

    def leading(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {} if self.bias is None else {"bias": 0 if self.bias == 0 else None}
        return found | ({"residual": 0} if self.residual else {})

    def apply(self, value: Tensor, tensors: Mapping[str, Tensor], skip_bias: bool) -> Tensor:
        """The steps one after another; a bias that the library has added already is left out."""
        for step in self.steps:
            if isinstance(step, str):
                value = _function(step)(value)
            elif step["function"] == "bias_add" and not skip_bias:
                assert self.bias is not None
                value = value + tensors["bias"].view(-1, *[1] * (value.dim() - 1 - self.bias))
            elif step["function"] == "residual_add":
                value = value + tensors["residual"]
            elif step["function"] == "scale":
                value = value * step["value"]
        return value

    @property
    def bias_first(self) -> bool:
        return bool(self.steps) and not isinstance(self.steps[0], str) and self.steps[0]["function"] == "bias_add"


def _epilogue(spec: Spec, axes: Sequence[str]) -> _Epilogue:
    steps = tuple(spec.get("epilogue", ()))
    named = [step for step in steps if not isinstance(step, str)]
    biases = [step["axis"] for step in named if step["function"] == "bias_add"]
    residuals = [step for step in named if step["function"] == "residual_add"]
    if len(biases) > 1 or len(residuals) > 1:
        raise InputError("epilogue", "has two biases or two residuals", "measure such an operator in two steps")
    return _Epilogue(steps, axes.index(biases[0]) if biases else None, bool(residuals))


def _function(name: str) -> Callable[..., Tensor]:
    torch, functional = _torch(), _functional()
    if name in ("relu", "gelu", "silu"):
        return getattr(functional, name)
    known = {"min": "minimum", "max": "maximum"}
    return getattr(torch, known.get(name, name))


# Products


def _matmul(suite: str, spec: Spec) -> Problem:
    m, n, k = spec["m"], spec["n"], spec["k"]
    ta, tb = bool(spec.get("transpose_a")), bool(spec.get("transpose_b"))
    batch = (spec["b"],) if spec["op"] == "batch_matmul" else ()
    first = len(batch)
    epilogue = _epilogue(spec, ("b", "m", "n") if batch else ("m", "n"))
    output = (*batch, m, n)

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        a = tensors["A"].transpose(-1, -2) if ta else tensors["A"]
        b = tensors["B"].transpose(-1, -2) if tb else tensors["B"]
        matmul, addmm = _torch().matmul, _torch().addmm
        fused = epilogue.bias_first and epilogue.bias == 1 and not batch

        def run() -> Tensor:
            value = addmm(tensors["bias"], a, b) if fused else matmul(a, b)
            return epilogue.apply(value, tensors, skip_bias=fused)

        return run

    inputs = {"A": (*batch, *((k, m) if ta else (m, k))), "B": (*batch, *((n, k) if tb else (k, n)))}
    leading = {"A": 0 if first else int(ta), "B": 0 if first else None}
    return Problem(
        suite=suite,
        spec=spec,
        inputs=inputs | epilogue.inputs(output),
        output=output,
        leading=leading | epilogue.leading(),
        flop=2.0 * math.prod(output) * k,
        run=bind,
    )


# Windows


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
        return _functional().pad(x, (*self.columns, *self.rows), value=value)


def _pair(value: Any) -> tuple[int, int]:
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


def _conv2d(suite: str, spec: Spec) -> Problem:
    depthwise = spec["op"] == "depthwise_conv2d"
    n, c, h, w, kh, kw = (spec[key] for key in ("n", "c", "h", "w", "kh", "kw"))
    f, groups = (c, c) if depthwise else (spec["f"], spec.get("groups", 1))
    stride, dilation = _pair(spec.get("stride", 1)), _pair(spec.get("dilation", 1))
    sides = _sides(spec, stride, dilation)
    oh, ow = _extents(spec, sides, stride, dilation)
    first = spec.get("layout", "NCHW") == "NCHW"
    channels = "c" if depthwise else "f"
    axes = ("n", channels, "oh", "ow") if first else ("n", "oh", "ow", channels)
    epilogue = _epilogue(spec, axes)
    output = (n, f, oh, ow) if first else (n, oh, ow, f)

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        x = tensors["X"] if first else tensors["X"].permute(0, 3, 1, 2)
        weights = tensors["W"]
        if not first:
            weights = weights.permute(2, 3, 0, 1) if depthwise else weights.permute(3, 2, 0, 1)
            weights = weights.contiguous(memory_format=_torch().channels_last)
        padding = sides.symmetric
        if padding is None:
            x, padding = sides.applied(x, 0.0), (0, 0)
        fused = epilogue.bias_first and epilogue.bias == axes.index(channels)
        bias, conv2d = (tensors["bias"] if fused else None), _functional().conv2d

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


def _pool(suite: str, spec: Spec) -> Problem:
    n, c, h, w, kh, kw = (spec[key] for key in ("n", "c", "h", "w", "kh", "kw"))
    stride, dilation = _pair(spec["stride"]), _pair(spec.get("dilation", 1))
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
    pool, padding = _functional().avg_pool2d, sides.symmetric
    inside = padding is not None and 2 * padding[0] <= window[0] and 2 * padding[1] <= window[1]
    if inside:
        return lambda: pool(x, window, stride, padding, count_include_pad=counted)
    padded = sides.applied(x, 0.0)
    if counted:
        return lambda: pool(padded, window, stride)
    ones = sides.applied(_torch().ones_like(x[:1, :1]), 0.0)
    share = pool(ones, window, stride)
    return lambda: pool(padded, window, stride) / share


def _maximum(
    x: Tensor, window: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], sides: _Sides, _: bool
) -> Callable[[], Tensor]:
    pool, padding = _functional().max_pool2d, sides.symmetric
    if padding is not None and 2 * padding[0] <= window[0] and 2 * padding[1] <= window[1]:
        return lambda: pool(x, window, stride, padding, dilation)
    padded = sides.applied(x, -math.inf)
    return lambda: pool(padded, window, stride, 0, dilation)


# Tensors of any shape


def _elementwise(suite: str, spec: Spec) -> Problem:
    binary = spec["function"] in ("add", "sub", "mul", "div", "pow", "min", "max")
    count = 2 if binary and not spec.get("scalar") else 1
    shapes = [tuple(shape) for shape in spec.get("shapes") or [spec["shape"]] * count]
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    output = tuple(map(max, zip(*aligned, strict=True)))
    names = ("X", "X2")[:count]

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        function = _function(spec["function"])
        operands = [tensors[name] for name in names]
        if spec.get("scalar"):
            operands.append(_torch().tensor(spec.get("value", 2.0)).to(operands[0]))
        return lambda: function(*operands)

    inputs = dict(zip(names, shapes, strict=True))
    leading = {name: 0 if len(shape) == rank and shape[0] == output[0] else None for name, shape in inputs.items()}
    return Problem(
        suite=suite, spec=spec, inputs=inputs, output=output, leading=leading, flop=float(math.prod(output)), run=bind
    )


def _reduce(suite: str, spec: Spec) -> Problem:
    shape = tuple(spec["shape"])
    axes = tuple(sorted(axis % len(shape) for axis in spec["axes"]))
    kept = [axis for axis in range(len(shape)) if axis not in axes]

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        names = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}
        function = getattr(_torch(), names[spec["function"]])
        # Without a dimension kept, kernels of a bundle write a vector of one element.
        return lambda: function(tensors["X"], axes) if kept else function(tensors["X"], axes).view(1)

    output = tuple(shape[axis] for axis in kept) or (1,)
    leading = {"X": kept[0]} if kept else None
    return Problem(
        suite=suite,
        spec=spec,
        inputs={"X": shape},
        output=output,
        leading=leading,
        flop=float(math.prod(shape)),
        run=bind,
    )


def _rows(suite: str, spec: Spec) -> Problem:
    shape = tuple(spec["shape"])
    axis = spec.get("axis", -1) % len(shape)
    norm = spec["op"] == "layer_norm"

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        x = tensors["X"]
        if not norm:
            softmax = _torch().softmax
            return lambda: softmax(x, axis)
        layer_norm, last = _functional().layer_norm, x.movedim(axis, -1)
        gamma, beta, eps = tensors["gamma"], tensors["beta"], spec.get("eps", 1e-5)
        return lambda: layer_norm(last, (shape[axis],), gamma, beta, eps).movedim(-1, axis)

    line = (shape[axis],)
    inputs = {"X": shape, "gamma": line, "beta": line} if norm else {"X": shape}
    leading = {name: 0 if name == "X" else None for name in inputs} if axis != 0 else None
    return Problem(
        suite=suite, spec=spec, inputs=inputs, output=shape, leading=leading, flop=5.0 * math.prod(shape), run=bind
    )


def _transpose(suite: str, spec: Spec) -> Problem:
    shape, perm = tuple(spec["shape"]), tuple(spec["perm"])

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        view = tensors["X"].permute(perm)
        if view.is_contiguous():  # by chance; it has to be copied too
            return lambda: view.clone()
        return lambda: view.contiguous()

    output = tuple(shape[axis] for axis in perm)
    return Problem(
        suite=suite,
        spec=spec,
        inputs={"X": shape},
        output=output,
        leading={"X": perm[0]},
        flop=float(math.prod(output)),
        run=bind,
    )


_KINDS: Mapping[str, Callable[[str, Spec], Problem]] = {
    "matmul": _matmul, "batch_matmul": _matmul, "conv2d": _conv2d, "depthwise_conv2d": _conv2d,
    "avg_pool2d": _pool, "max_pool2d": _pool, "elementwise": _elementwise, "reduce": _reduce,
    "softmax": _rows, "layer_norm": _rows, "transpose": _transpose,
}  # fmt: skip
