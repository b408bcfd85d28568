"""Hypothesis strategies for random valid operators, as JSON data (see ``docs/operators.md``).

``operators()`` draws named operators and general expressions with small, mostly odd and unequal sizes, strides,
dilations, groups, paddings, broadcasting and epilogues. Every operator has at most :data:`MAX_POINTS` loop points
per statement, so that the reference evaluator and a kernel on a CPU are both fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data

MAX_POINTS = 60_000

Data = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

SIZES = st.sampled_from([1, 2, 3, 5, 7, 9, 11, 13, 17, 19, 23, 33])
SMALL = st.sampled_from([1, 2, 3, 5])
STRIDES = st.one_of(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=2, max_size=2))
ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid", "silu")


def loop_points(expr: TensorExpr) -> int:
    """Points of the largest statement's loops."""
    counts = []
    for statement in expr.statements:
        axes = statement.axes + (statement.reduction.axes if statement.reduction else ())
        counts.append(math.prod(expr.sizes[axis] for axis in axes))
    return max(counts)


def is_usable(data: Data, max_points: int = MAX_POINTS) -> bool:
    """Whether the operator is valid (a window may not fit into its input) and small enough."""
    try:
        return loop_points(operator_from_data(data)) <= max_points
    except InputError:
        return False


def operators(dtypes: Sequence[str] = ("float32",), max_points: int = MAX_POINTS) -> st.SearchStrategy[Data]:
    """Any valid operator: eleven named ones, and expressions in the language itself."""
    named, general = named_operators(dtypes, max_points), expressions(dtypes, max_points)
    return st.sampled_from([named, named, general]).flatmap(lambda kind: kind)


def named_operators(dtypes: Sequence[str] = ("float32",), max_points: int = MAX_POINTS) -> st.SearchStrategy[Data]:
    """``{"op": ...}`` objects."""
    kinds = [matmuls(), batch_matmuls(), convolutions(), depthwise_convolutions(), pools(), reductions()]
    kinds += [elementwises(), lines(), transposes()]
    return _finished(st.sampled_from(kinds).flatmap(lambda kind: kind), dtypes, max_points)


def _finished(kinds: st.SearchStrategy[Data], dtypes: Sequence[str], max_points: int) -> st.SearchStrategy[Data]:
    @st.composite
    def finished(draw: Draw) -> Data:
        data = dict(draw(kinds))
        dtype = draw(st.sampled_from(list(dtypes)))
        if dtype != "float32":
            data["dtype"] = dtype
        axes = BIAS_AXES.get(data.get("op", ""), ())
        steps = draw(st.lists(_steps(axes), max_size=2)) if draw(st.booleans()) else []
        if steps:
            data["epilogue"] = steps
        return data

    return finished().filter(lambda data: is_usable(data, max_points))


BIAS_AXES = {
    "matmul": ("m", "n"), "batch_matmul": ("b", "n"), "conv2d": ("f",), "depthwise_conv2d": ("c",),
    "avg_pool2d": ("c", "ow"), "max_pool2d": ("c",), "softmax": ("i0",), "layer_norm": ("i0",), "transpose": ("i0",),
}  # fmt: skip


def _steps(axes: Sequence[str]) -> st.SearchStrategy[Any]:
    steps: list[st.SearchStrategy[Any]] = [
        st.sampled_from(ACTIVATIONS),
        st.just({"function": "residual_add"}),
        st.sampled_from([0.5, -1.5, 3.0]).map(lambda value: {"function": "scale", "value": value}),
    ]
    if axes:
        steps.append(st.sampled_from(list(axes)).map(lambda axis: {"function": "bias_add", "axis": axis}))
    return st.one_of(*steps)


def matmuls() -> st.SearchStrategy[Data]:
    """Matrix products with either operand transposed."""
    return st.fixed_dictionaries(
        {"op": st.just("matmul"), "m": SIZES, "n": SIZES, "k": SIZES},
        optional={"transpose_a": st.booleans(), "transpose_b": st.booleans()},
    )


def batch_matmuls() -> st.SearchStrategy[Data]:
    """Matrix products with a batch."""
    return st.fixed_dictionaries(
        {"op": st.just("batch_matmul"), "b": SMALL, "m": SIZES, "n": SIZES, "k": SIZES},
        optional={"transpose_a": st.booleans(), "transpose_b": st.booleans()},
    )


def _window(sizes: st.SearchStrategy[int]) -> dict[str, st.SearchStrategy[Any]]:
    return {"n": st.integers(1, 3), "h": sizes, "w": sizes, "kh": st.integers(1, 4), "kw": st.integers(1, 5)}


def _padding(largest: int) -> st.SearchStrategy[Any]:
    side = st.integers(0, largest)
    return st.one_of(st.sampled_from(["SAME", "VALID"]), side, st.lists(side, min_size=4, max_size=4))


LAYOUTS = st.sampled_from(["NCHW", "NHWC"])


@st.composite
def convolutions(draw: Draw) -> Data:
    """Convolutions with 1 to 3 groups."""
    data = draw(
        st.fixed_dictionaries(
            {"op": st.just("conv2d"), **_window(st.integers(1, 15)), "c": SMALL, "f": SMALL},
            optional={"stride": STRIDES, "dilation": STRIDES, "padding": _padding(3), "layout": LAYOUTS},
        )
    )
    groups = draw(st.integers(1, 3))
    return {**data, "c": data["c"] * groups, "f": data["f"] * groups, "groups": groups}


def depthwise_convolutions() -> st.SearchStrategy[Data]:
    """One window per channel."""
    return st.fixed_dictionaries(
        {"op": st.just("depthwise_conv2d"), **_window(st.integers(1, 17)), "c": SIZES},
        optional={"stride": STRIDES, "dilation": STRIDES, "padding": _padding(3), "layout": LAYOUTS},
    )


def pools() -> st.SearchStrategy[Data]:
    """Both pools, padded less than their window."""
    window = {**_window(st.integers(1, 17)), "c": SIZES, "stride": STRIDES}
    average = st.fixed_dictionaries(
        {"op": st.just("avg_pool2d"), **window},
        optional={"padding": _padding(2), "layout": LAYOUTS, "count_include_pad": st.booleans()},
    )
    largest = st.fixed_dictionaries(
        {"op": st.just("max_pool2d"), **window},
        optional={"padding": _padding(2), "layout": LAYOUTS, "dilation": STRIDES},
    )
    return st.one_of(average, largest)


def shapes(min_rank: int = 1, max_rank: int = 4) -> st.SearchStrategy[list[int]]:
    """Extents of one tensor."""
    return st.lists(SIZES, min_size=min_rank, max_size=max_rank)


@st.composite
def reductions(draw: Draw) -> Data:
    """Sum, mean, max or min over some dimensions, perhaps all."""
    shape = draw(shapes())
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    axes = [axis - len(shape) if draw(st.booleans()) else axis for axis in axes]
    function = draw(st.sampled_from(["sum", "mean", "max", "min"]))
    return {"op": "reduce", "function": function, "shape": shape, "axes": axes}


@st.composite
def elementwises(draw: Draw) -> Data:
    """Unary functions, and binary ones of equal shapes, broadcast shapes, or a number."""
    shape = draw(shapes())
    if draw(st.booleans()):
        unary = (
            "abs",
            "cos",
            "erf",
            "exp",
            "gelu",
            "log",
            "neg",
            "relu",
            "rsqrt",
            "sigmoid",
            "silu",
            "sin",
            "sqrt",
            "tanh",
        )
        return {"op": "elementwise", "function": draw(st.sampled_from(unary)), "shape": shape}
    data: Data = {
        "op": "elementwise",
        "function": draw(st.sampled_from(["add", "sub", "mul", "div", "pow", "min", "max"])),
    }
    kind = draw(st.sampled_from(["equal", "scalar", "broadcast"]))
    if kind == "equal":
        return {**data, "shape": shape}
    if kind == "scalar":
        value = draw(st.sampled_from([None, 0.5, 3.0, -2.0]))
        return {**data, "shape": shape, "scalar": True} | ({} if value is None else {"value": value})
    pair = [[1 if draw(st.booleans()) else extent for extent in shape] for _ in range(2)]
    pair[1] = pair[1][draw(st.integers(0, len(shape) - 1)) :]
    return {**data, "shapes": pair if draw(st.booleans()) else pair[::-1]}


@st.composite
def lines(draw: Draw) -> Data:
    """Softmax and layer_norm along any dimension."""
    shape = draw(shapes(max_rank=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return {"op": draw(st.sampled_from(["softmax", "layer_norm"])), "shape": shape, "axis": axis}


@st.composite
def transposes(draw: Draw) -> Data:
    """Any order of up to four dimensions."""
    shape = draw(shapes(min_rank=2))
    return {"op": "transpose", "shape": shape, "perm": draw(st.permutations(range(len(shape))))}


# Expressions in the language


def expressions(dtypes: Sequence[str] = ("float32",), max_points: int = MAX_POINTS) -> st.SearchStrategy[Data]:
    """``{"expr": ...}`` objects: one or two reductions or a point-wise value, then perhaps a point-wise statement."""
    return _finished(_expressions(), dtypes, max_points)


class _Writer:
    """Draws the text of one program and collects the inputs' shapes."""

    def __init__(self, draw: Draw, sizes: dict[str, int]) -> None:
        self.draw = draw
        self.sizes = sizes
        self.shapes: dict[str, list[int]] = {}

    def index(self, axes: Sequence[str]) -> tuple[str, int, int]:
        """An affine index over one or two of ``axes``, with the smallest and the largest value it takes."""
        terms = self.draw(st.lists(st.sampled_from(list(axes)), min_size=1, max_size=2, unique=True))
        factors = [self.draw(st.sampled_from([1, 1, 1, 2, 3, -1])) for _ in terms]
        offset = self.draw(st.sampled_from([0, 0, 0, 1, 2, -1]))
        reach = [factor * (self.sizes[axis] - 1) for axis, factor in zip(terms, factors, strict=True)]
        text = " + ".join(axis if f == 1 else f"{f}*{axis}" for axis, f in zip(terms, factors, strict=True))
        text = f"{text} + {offset}" if offset else text
        return text, offset + sum(min(r, 0) for r in reach), offset + sum(max(r, 0) for r in reach)

    def load(self, axes: Sequence[str], every: Sequence[str] = ()) -> str:
        """A load of a new input; it uses ``every`` as plain axes, and affine indices over ``axes`` besides."""
        tensor = f"T{len(self.shapes)}"
        indices = [(axis, 0, self.sizes[axis] - 1) for axis in every]
        wanted = self.draw(st.integers(0 if every else 1, 2)) if axes else 0
        indices += [self.index(axes) for _ in range(wanted)]
        outside = any(low < 0 for _, low, _ in indices) or self.draw(st.integers(0, 3)) == 0
        shape = [max(high + 1, 1) for _, _, high in indices]
        if outside:
            shape = [max(extent - self.draw(st.integers(0, 2)), 1) for extent in shape]
        self.shapes[tensor] = shape
        pad = f" | pad={self.draw(st.sampled_from(['0', '-0.5', '1']))}" if outside else ""
        return f"{tensor}[{', '.join(text for text, _, _ in indices)}{pad}]"

    def value(self, axes: Sequence[str], depth: int) -> str:
        """A value over ``axes`` that is smooth enough to compare in lower precision."""
        kind = self.draw(st.integers(0, 7)) if depth else self.draw(st.integers(0, 2))
        if kind <= 1:
            return self.load(axes)
        if kind == 2:
            return str(self.draw(st.sampled_from(["2", "0.25", f"({axes[0]} + 1) / 8"])))
        if kind == 3:
            return f"{self.draw(st.sampled_from(ACTIVATIONS))}({self.value(axes, depth - 1)})"
        if kind == 4:
            left = self.draw(st.sampled_from(list(axes)))
            test = f"{left} {self.draw(st.sampled_from(['<', '>=', '==', '!=']))} {self.draw(st.integers(0, 3))}"
            return f"select({test}, {self.value(axes, depth - 1)}, {self.value(axes, depth - 1)})"
        if kind == 5:
            extreme = self.draw(st.sampled_from(["max", "min"]))
            return f"{extreme}(0.5*{self.load(axes)}, {self.value(axes, depth - 1)})"
        return f"({self.value(axes, depth - 1)} {self.draw(st.sampled_from('+-*'))} {self.value(axes, depth - 1)})"

    def reduction(self, spatial: Sequence[str], reduced: Sequence[str]) -> str:
        """``sum([r, s], T0[r, s, ...] * value)``"""
        function = self.draw(st.sampled_from(["sum", "sum", "sum", "max", "min", "mean"]))
        every = self.load(spatial, every=reduced)
        rest = self.value([*spatial, *reduced], 1)
        return f"{function}([{', '.join(reduced)}], {every} * {rest})"


@st.composite
def _expressions(draw: Draw) -> Data:
    sizes = {axis: draw(SMALL) + draw(st.integers(0, 4)) for axis in ("i", "j", "r", "s")}
    spatial = ["i", "j"][: draw(st.integers(1, 2))]
    reduced = ["r", "s"][: draw(st.integers(0, 2))]
    left = ", ".join(spatial)
    writer = _Writer(draw, sizes)
    value = writer.reduction(spatial, reduced) if reduced else writer.value(spatial, 2)
    if reduced and draw(st.integers(0, 3)) == 0:
        value = f"{value} + {writer.value(spatial, 1)}"
    statements = [f"C[{left}] = {value}"]
    form = draw(st.integers(0, 3))
    if form == 1:
        statements.append(f"D[{left}] = C[{left}] * {writer.value(spatial, 1)}")
    elif form == 2:
        shifted = ", ".join([f"{spatial[0]} - 1", *spatial[1:]])
        statements.append(f"D[{left}] = C[{left}] - 0.5*C[{shifted} | pad=1]")
    elif form == 3 and len(spatial) == 2:
        statements.append("D[i] = sum(j, C[i, j] * C[i, j])")
    used = [*spatial, *reduced]
    return {
        "expr": "\n".join(statements),
        "sizes": {axis: sizes[axis] for axis in used},
        "shapes": writer.shapes,
    }
