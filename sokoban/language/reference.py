"""The value of any tensor expression in NumPy float64, against which kernels are checked.

Every load is a strided view of its tensor over the loop axes, so that a sum of products is one ``einsum`` and any
other value is ordinary array arithmetic over blocks of the reduction's points.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from hal.support.errors import InputError
from sokoban.language.expression import (
    FLOAT8_DTYPES,
    INTEGER_DTYPES,
    RANKED_REDUCTIONS,
    AffineIndex,
    AxisValue,
    Call,
    Constant,
    GatheredIndex,
    Load,
    Reduction,
    Scan,
    Statement,
    Tensor,
    TensorExpr,
    Value,
)
from sokoban.language.functions import expanded
from sokoban.language.scatter import Scatter, scatter_of

Array = NDArray[Any]

#: Elements of one block of a reduction: 32 MiB of float64.
BLOCK_ELEMENTS = 2**22
#: Most elements of an einsum operand, which NumPy may copy.
MAX_EINSUM_ELEMENTS = 2**25


def evaluate(expr: TensorExpr, inputs: Mapping[str, Array]) -> NDArray[np.float64]:
    """The output of ``expr`` in float64, of shape ``expr.output.shape``; nothing in between is rounded.

    >>> from sokoban.language.parser import parse_program
    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 1, "j": 2, "k": 3}, {})
    >>> evaluate(product, {"A": np.array([[1, 2, 3]]), "B": np.array([[1, 0], [0, 1], [1, 1]])}).tolist()
    [[4.0, 5.0]]

    Args:
        expr: the operator.
        inputs: one array per input tensor, in the tensor's own or in the caller's shape.

    Raises:
        InputError: an input is missing or has another element count.
    """
    values: dict[str, Array] = {}
    for tensor in expr.inputs:
        values[tensor.name] = _input_array(tensor, inputs)
    with np.errstate(all="ignore"):
        for statement in expr.statements:
            values[statement.tensor] = _statement(expr, statement, values)
    return values[expr.output.name]


def _input_array(tensor: Tensor, inputs: Mapping[str, Array]) -> Array:
    if tensor.name not in inputs:
        raise InputError(f"inputs.{tensor.name}", "is missing", f"give an array of shape {list(tensor.caller_shape)}")
    array = np.asarray(inputs[tensor.name], dtype=np.float64)
    if array.shape not in (tensor.shape, tensor.caller_shape):
        wanted = f"give {list(tensor.caller_shape)}"
        raise InputError(f"inputs.{tensor.name}", f"an array of shape {list(array.shape)}", wanted)
    return np.ascontiguousarray(array).reshape(tensor.shape)


def _statement(expr: TensorExpr, statement: Statement, values: Mapping[str, Array]) -> Array:
    """All elements of one statement's tensor."""
    shape = tuple(expr.sizes[axis] for axis in statement.axes)
    reduction = statement.reduction
    if statement.scan is not None:
        return _scan(expr, statement, statement.scan, values)
    if reduction is not None and reduction.rank is not None:
        return _ranked(expr, statement, reduction, reduction.rank, values)
    if reduction is not None and reduction.is_place:
        return _place(expr, statement, reduction, values)
    if reduction is None:
        value = _Block(expr.sizes, statement.axes, {}, values).evaluate(statement.value)
        return np.array(np.broadcast_to(value, shape), dtype=np.float64)
    scatter = scatter_of(statement, expr.tensor_by_name)
    if scatter is not None and scatter.place.tensor in {tensor.name for tensor in expr.inputs}:
        return _scattered(expr, statement, scatter, reduction.axes[0], values)
    if reduction.function == "sum":
        product = _sum_of_product(expr, statement, reduction, values)
        if product is not None:
            return product
    return _reduce_in_blocks(expr, statement, reduction, values)


# Along one axis, in order


def _scan(expr: TensorExpr, statement: Statement, scan: Scan, values: Mapping[str, Array]) -> Array:
    """Values accumulated along an axis, one after the other."""
    ufunc, identity = _REDUCERS[scan.function]
    position = statement.axes.index(scan.axis)
    shape = tuple(expr.sizes[axis] for axis in statement.axes)
    body = np.broadcast_to(_Block(expr.sizes, statement.axes, {}, values).evaluate(scan.body), shape)
    if scan.is_reversed:
        body = np.flip(body, position)
    result: Array = ufunc.accumulate(np.asarray(body, np.float64), axis=position)
    if scan.is_exclusive:
        first = np.full_like(np.take(result, [0], position), identity)
        result = np.concatenate([first, np.delete(result, -1, position)], axis=position)
    return np.ascontiguousarray(np.flip(result, position) if scan.is_reversed else result)


def _place(expr: TensorExpr, statement: Statement, reduction: Reduction, values: Mapping[str, Array]) -> Array:
    """Place of the largest or smallest value along an axis: of equals the first, and the first NaN if any."""
    order = (*statement.axes, *reduction.axes)
    shape = tuple(expr.sizes[axis] for axis in order)
    body = np.broadcast_to(_Block(expr.sizes, order, {}, values).evaluate(reduction.body), shape)
    chosen = np.argmax if reduction.function == "argmax" else np.argmin
    return np.asarray(chosen(body, axis=-1), dtype=np.float64)


def _ranked(
    expr: TensorExpr, statement: Statement, reduction: Reduction, rank: str, values: Mapping[str, Array]
) -> Array:
    """Values along an axis, or their places, in their order: NaN before all, of equals the first."""
    rows = tuple(axis for axis in statement.axes if axis != rank)
    order = (*rows, *reduction.axes)
    shape = tuple(expr.sizes[axis] for axis in order)
    body = np.broadcast_to(_Block(expr.sizes, order, {}, values).evaluate(reduction.body), shape)
    is_nan = np.isnan(body)
    key = np.where(is_nan, 0.0, -body if RANKED_REDUCTIONS[reduction.function] else body)
    places = np.lexsort((key, ~is_nan), axis=-1)[..., : expr.sizes[rank]]
    result = places if reduction.is_place else np.take_along_axis(body, places, axis=-1)
    return np.ascontiguousarray(np.moveaxis(result, -1, statement.axes.index(rank)), dtype=np.float64)


def _scattered(
    expr: TensorExpr, statement: Statement, scatter: Scatter, along: str, values: Mapping[str, Array]
) -> Array:
    """Rows added to those that places name, in their order."""
    order = (along, *scatter.columns)
    shape = tuple(expr.sizes[axis] for axis in order)
    rows = np.broadcast_to(_Block(expr.sizes, order, {}, values).evaluate(scatter.value), shape)
    places = values[scatter.place.tensor][: expr.sizes[along]]
    is_row = (places >= 0) & (places < expr.sizes[scatter.row])
    result = np.zeros((expr.sizes[scatter.row], *shape[1:]))
    np.add.at(result, places[is_row].astype(np.int64), rows[is_row])
    return np.ascontiguousarray(np.moveaxis(result, 0, statement.axes.index(scatter.row)))


# Any value over a block of points


_REDUCERS: Mapping[str, tuple[np.ufunc, float]] = {
    "sum": (np.add, 0.0),
    "prod": (np.multiply, 1.0),
    "max": (np.maximum, -math.inf),
    "min": (np.minimum, math.inf),
}


def _reduce_in_blocks(
    expr: TensorExpr, statement: Statement, reduction: Reduction, values: Mapping[str, Array]
) -> Array:
    """The reduction as array arithmetic, over blocks of at most :data:`BLOCK_ELEMENTS` points where outputs allow."""
    order = (*statement.axes, *reduction.axes)
    shape = tuple(expr.sizes[axis] for axis in statement.axes)
    ufunc, identity = _REDUCERS[reduction.function]
    result = np.full(shape, identity)
    views: dict[Load, Array | None] = {}
    reduced = tuple(range(len(statement.axes), len(order)))
    for ranges in _blocks([expr.sizes[axis] for axis in reduction.axes], max(math.prod(shape), 1)):
        block = _Block(expr.sizes, order, dict(zip(reduction.axes, ranges, strict=True)), values, views)
        points = np.broadcast_to(block.evaluate(reduction.body), shape + tuple(r.stop - r.start for r in ranges))
        result = ufunc(result, ufunc.reduce(points, axis=reduced))
    return result


def _blocks(sizes: Sequence[int], outputs: int) -> Iterator[tuple[slice, ...]]:
    """Boxes that tile ``sizes``, the last axes whole first; points of a box times ``outputs`` stay within the limit."""
    budget = max(BLOCK_ELEMENTS // outputs, 1)
    steps: list[int] = []
    for size in reversed(sizes):
        steps.insert(0, min(size, budget))
        budget = max(budget // size, 1)
    spans = (
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(sizes, steps, strict=True)
    )
    yield from itertools.product(*spans)


class _Block:
    """Values over a box of axes: every array has one dimension per axis of ``order`` (extent 1 where unused)."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        order: Sequence[str],
        ranges: Mapping[str, slice],
        values: Mapping[str, Array],
        views: dict[Load, Array | None] | None = None,
    ) -> None:
        self.order = order
        self.ranges = {axis: ranges.get(axis, slice(0, sizes[axis])) for axis in order}
        self.sizes = sizes
        self.values = values
        self.views = {} if views is None else views  # shared by the blocks of one statement
        self.done: dict[Value, Array] = {}

    def evaluate(self, value: Value) -> Array:
        """``value`` at every point of the box, broadcastable over ``order``."""
        if isinstance(value, Constant):
            return np.full((1,) * len(self.order), value.value)
        if value not in self.done:
            self.done[value] = self._evaluate(value)
        return self.done[value]

    def _evaluate(self, value: Value) -> Array:
        if isinstance(value, AxisValue):
            return self._index(value.index).astype(np.float64)
        if isinstance(value, Load):
            return self._load(value)
        assert isinstance(value, Call), "a normalised statement has no inner reduction"
        if value.function not in _FUNCTIONS:
            return self.evaluate(expanded(value))
        return _FUNCTIONS[value.function](*[self.evaluate(argument) for argument in value.arguments])

    def _index(self, index: AffineIndex) -> Array:
        """The integers an index takes over the box."""
        if isinstance(index, GatheredIndex):
            return np.clip(self.evaluate(index.place), index.low, index.high).astype(np.int64)
        total = np.full((1,) * len(self.order), index.offset, dtype=np.int64)
        for axis, coefficient in index.terms:
            span = self.ranges[axis]
            shape = [1] * len(self.order)
            shape[self.order.index(axis)] = span.stop - span.start
            total = total + coefficient * np.arange(span.start, span.stop, dtype=np.int64).reshape(shape)
        return total

    def _load(self, load: Load) -> Array:
        array = self.values[load.tensor]
        if load not in self.views:
            self.views[load] = None if load.places else strided_view(array, load, self.order, self.sizes)
        view = self.views[load]
        if view is not None:
            box = (self.ranges[axis] if view.shape[d] != 1 else slice(None) for d, axis in enumerate(self.order))
            return np.asarray(view[tuple(box)])
        indices = [self._index(index) for index in load.indices]
        is_inside = np.ones((1,) * len(self.order), dtype=bool)
        for index, extent in zip(indices, array.shape, strict=True):
            is_inside = is_inside & (index >= 0) & (index < extent)
        clipped = tuple(np.clip(index, 0, extent - 1) for index, extent in zip(indices, array.shape, strict=True))
        elements = np.asarray(array[clipped])
        return elements if load.pad is None else np.where(is_inside, elements, load.pad)


def strided_view(array: Array, load: Load, order: Sequence[str], sizes: Mapping[str, int]) -> Array | None:
    """Elements that ``load`` reads over all axes of ``order`` as a view of ``array``.

    The view has one dimension per axis of ``order``: as many elements as ``sizes`` says, 1 for axes that the load does
    not use. A padded load looks into a padded copy; None if that copy would be much larger than the tensor.

    >>> windows = Load("X", (AffineIndex.of({"i": 1, "k": 1}),))  # X[i + k]
    >>> strided_view(np.arange(4.0), windows, ("i", "k"), {"i": 3, "k": 2}).tolist()
    [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]

    Raises:
        ValueError: a load without a pad leaves the tensor.
    """
    low_high = [index.bounds(sizes) for index in load.indices]
    before = [max(-low, 0) for low, _ in low_high]
    after = [max(high - extent + 1, 0) for (_, high), extent in zip(low_high, array.shape, strict=True)]
    if any(before) or any(after):
        if load.pad is None:
            raise ValueError(f"{load.tensor} of shape {array.shape} is read at {low_high} without a pad")
        grown = math.prod(b + extent + a for b, extent, a in zip(before, array.shape, after, strict=True))
        if grown > 4 * array.size + 2**20:
            return None
        array = np.pad(array, list(zip(before, after, strict=True)), constant_values=load.pad)
    origin = tuple(index.offset + b for index, b in zip(load.indices, before, strict=True))
    strides = {axis: 0 for axis in order}
    for index, stride in zip(load.indices, array.strides, strict=True):
        for axis, coefficient in index.terms:
            strides[axis] += coefficient * stride
    walked = {axis for index in load.indices for axis in index.axes}
    from_origin = array[tuple(slice(offset, None) for offset in origin)]
    shape = tuple(sizes[axis] if axis in walked else 1 for axis in order)
    return as_strided(from_origin, shape, tuple(strides[axis] for axis in order), writeable=False)


def _erf(x: Array) -> Array:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), dtype=np.float64)


#: What NumPy has of the language's functions; the others are composed of these.
_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "pow": np.power,
    "min": np.minimum, "max": np.maximum, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or,
    "not": np.logical_not, "select": np.where, "abs": np.abs, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "tanh": np.tanh, "erf": _erf, "sin": np.sin, "cos": np.cos, "floor": np.floor, "ceil": np.ceil,
}  # fmt: skip


# Sums of products


def _sum_of_product(
    expr: TensorExpr, statement: Statement, reduction: Reduction, values: Mapping[str, Array]
) -> Array | None:
    """``sum(axes, A[...] * B[...] * number)`` by einsum over strided views; None for any other body."""
    factors = factors_of(reduction.body)
    if factors is None:
        return None
    operands = [factor for factor in factors if isinstance(factor, Load)]
    if any(load.places for load in operands):
        return None
    order = (*statement.axes, *reduction.axes)
    if not _suits_einsum(operands, order, reduction.axes):
        return None
    arguments: list[Any] = []
    labels: set[int] = set()
    for load in operands:
        view = strided_view(values[load.tensor], load, order, expr.sizes)
        if view is None or (len(operands) > 1 and view.size > MAX_EINSUM_ELEMENTS):
            return None
        used = _used_dimensions(load, order)
        arguments += [view[tuple(slice(None) if d in used else 0 for d in range(view.ndim))], used]
        labels.update(used)
    scale = math.prod(factor.value for factor in factors if isinstance(factor, Constant))
    present = sorted(label for label in labels if label < len(statement.axes))
    total = np.einsum(*arguments, present, optimize=len(operands) > 1) * scale
    shape = [expr.sizes[axis] if d in present else 1 for d, axis in enumerate(statement.axes)]
    full = tuple(expr.sizes[axis] for axis in statement.axes)
    return np.array(np.broadcast_to(np.reshape(total, shape), full))


def _suits_einsum(operands: Sequence[Load], order: Sequence[str], reduced: Sequence[str]) -> bool:
    """True if einsum has letters for all axes, and operands that have all reduced ones."""
    walked = {axis for load in operands for index in load.indices for axis in index.axes}
    return 1 <= len(operands) <= 3 and len(order) <= 26 and walked.issuperset(reduced)


def _used_dimensions(load: Load, order: Sequence[str]) -> list[int]:
    """Positions in ``order`` of the axes that a load walks."""
    return [d for d, axis in enumerate(order) if any(axis in index.axes for index in load.indices)]


def factors_of(value: Value) -> list[Load | Constant] | None:
    """The factors of a product of loads and numbers, None if it is anything else."""
    if isinstance(value, Load | Constant):
        return [value]
    if isinstance(value, Call) and value.function == "mul":
        first, second = factors_of(value.arguments[0]), factors_of(value.arguments[1])
        return None if first is None or second is None else first + second
    return None


def round_to_dtype(array: Array, dtype: str) -> NDArray[np.float64]:
    """``array`` rounded to the nearest values of ``dtype`` (ties to even), as float64.

    >>> round_to_dtype(np.array([1 + 2.0**-8, 1 + 2.0**-7]), "bfloat16").tolist()  # seven bits of mantissa
    [1.0, 1.0078125]
    """
    if dtype == "bfloat16":
        bits = np.asarray(array, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isfinite(array), rounded.astype(np.uint32).view(np.float32), array).astype(np.float64)
    if dtype in FLOAT8_DTYPES:
        import ml_dtypes

        return np.asarray(array).astype(getattr(ml_dtypes, dtype)).astype(np.float64)
    if dtype in INTEGER_DTYPES:
        return np.asarray(np.rint(array), dtype=dtype).astype(np.float64)
    return np.asarray(array, dtype=dtype).astype(np.float64)
