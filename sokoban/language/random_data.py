"""Test data of an operator: an array per input that its kernels cannot get right by chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sokoban.language.expression import (
    FLOAT8_DTYPES,
    INTEGER_DTYPES,
    AxisValue,
    Call,
    Constant,
    GatheredIndex,
    Load,
    Tensor,
    TensorExpr,
    Value,
    loads,
    walk,
)
from sokoban.language.functions import FUNCTIONS
from sokoban.language.gathers import gathers
from sokoban.language.reference import factors_of, round_to_dtype


def random_inputs(expr: TensorExpr, seed: int) -> dict[str, NDArray[np.float64]]:
    """An array per input tensor, uniform in [-1, 1] and rounded to the tensor's dtype.

    What reaches a logarithm, a root, a power or a denominator is drawn from [0.5, 1.5] instead, so that every function
    stays in range. Integers are drawn from -127 to 127, from 1 on below one of those functions, and up to 7 where
    float16 has to hold their sums. Rows of which the largest element is taken have one that stands out, so that it
    matters who is asked; where it is subtracted before an exponential, every other row's is so high that this would
    overflow otherwise. Values that are ranked are multiples of :data:`_RANKED_STEP`, some equal and none nearly, and
    the fewer the farther from the middle, so that the first ranks of a line differ however long it is, and half of a
    line is in their order, so that some of the ranks are neighbours and others lie anywhere; where their places alone
    are asked for, a few are NaN or infinite. Places that another tensor is read at are places of it, one of
    :data:`_OUTSIDE_PLACES` outside. Counts that are cut at a number are up to it, one of :data:`_WHOLE_COUNTS` is it or
    more and as many are none or fewer. Of the queries and keys of a softmax one of :data:`_LONG_ROWS` is long: logits
    of both stand far above or below the others of a row, so that its largest comes anywhere, and other rows add up all
    keys alike.
    """
    ranges, peaks, ranked = input_ranges(expr), _peaks(expr), _ranked_inputs(expr)
    result = {}
    softmax = _softmax_rows(expr)
    extents, counts = _extents_of_places(expr), dict(_cut_counts(expr))
    for position, tensor in enumerate(expr.inputs):
        generator = np.random.default_rng([seed, position])
        if tensor.name in extents:
            result[tensor.name] = _places(generator, tensor, extents[tensor.name])
            continue
        if tensor.name in counts:
            result[tensor.name] = _counts(generator, tensor, counts[tensor.name])
            continue
        low, high = ranges[tensor.name]
        values = generator.uniform(low, high, tensor.shape)
        if tensor.name in ranked:
            step = 1 if tensor.dtype in INTEGER_DTYPES else _RANKED_STEP
            values = np.rint(_sparse_at_ends(values, low, high) / step) * step
            values = _half_in_order(values, _ranked_dimension(expr, tensor.name), generator)
            if ranked[tensor.name]:
                # Of a long line more than a few would take all of its ranks.
                one_of = max(_UNUSUAL_VALUES, max(tensor.shape) // 2)
                for number in (np.nan, np.inf, -np.inf):
                    values[generator.integers(0, one_of, tensor.shape) == 0] = number
        if tensor.name in peaks:
            _add_peaks(values, *peaks[tensor.name], generator)
        if softmax is not None and tensor.name in softmax.names:
            values = softmax.rows((values - (low + high) / 2) / (high - low), tensor, generator)
        result[tensor.name] = round_to_dtype(values, tensor.dtype)
    return result


#: One of so many queries and of so many keys is long, so that logits of both have this standard deviation: some differ
#: by more than sixteen powers of two, which float16 ends at, and float32 has all to a hundred-thousandth.
_LONG_ROWS, _SPREAD = (2, 24), 12.0
#: Most times that a long row is as long as another, and the least of integers, which have -1, 0 and 1 then.
_MOST_LENGTH, _LEAST_LENGTH = 64.0, 3.0
#: One of so many queries has all of its logits so far below others, further than float32 has exponentials (-87.3).
_LOW_QUERIES, _LOW = 4, 110.0
#: The first element of every key, but for an eighth of what others vary, and the most that one of a query is.
_FIRST_OF_KEYS, _MOST_FIRST = 0.5, 8192.0


@dataclass(frozen=True)
class _SoftmaxRows:
    """Inputs whose rows are multiplied for the logits of a softmax.

    Attributes:
        names: of both, queries first.
        length: of a long row.
        first: what the first element of a low query has less than others; 0 where none is low.
        are_integers: whether one of them is, all of whose rows are long: others would be rounded to 0.
    """

    names: tuple[str, str]
    length: float
    first: float
    are_integers: bool

    def rows(self, values: NDArray[np.float64], tensor: Tensor, generator: np.random.Generator) -> NDArray[np.float64]:
        """Rows of elements uniform over a width of one around 0, some of them long or, of 16 bits and more, low."""
        if self.are_integers:
            return values * max(self.length, _LEAST_LENGTH)
        position = self.names.index(tensor.name)
        shape = (*values.shape[:-1], 1)
        is_long = generator.integers(0, _LONG_ROWS[position], shape) == 0
        result: NDArray[np.float64] = values * np.where(is_long, self.length, 1.0)
        if position and self.first:
            result[..., 0] = _FIRST_OF_KEYS + values[..., 0] / 8
        elif tensor.dtype not in FLOAT8_DTYPES:
            result[..., :1] -= np.where(generator.integers(0, _LOW_QUERIES, shape) == 0, self.first, 0.0)
        return result


def _softmax_rows(expr: TensorExpr) -> _SoftmaxRows | None:
    """Inputs whose rows are multiplied for the logits of a softmax; None where there are none."""
    by_tensor = {statement.tensor: statement for statement in expr.statements}
    calls = [node for statement in expr.statements for node in walk(statement.value) if isinstance(node, Call)]
    for statement in expr.statements if any(call.function == "exp" for call in calls) else ():
        if statement.reduction is None or statement.reduction.function != "max":
            continue
        value, scale = statement.reduction.body, 1.0
        while True:
            scale *= math.prod(abs(node.value) for call in walk(value) for node in _multipliers(call))
            reached = [by_tensor[load.tensor] for load in loads(value) if load.tensor in by_tensor]
            if len(reached) != 1 or reached[0].reduction is not None:
                break
            value = reached[0].value
        product = reached[0].reduction if len(reached) == 1 else None
        if product is None or product.function != "sum":
            continue
        factors = [factor for factor in factors_of(product.body) or () if isinstance(factor, Load)]
        names = [factor.tensor for factor in factors]
        dtypes = [tensor.dtype for tensor in expr.inputs if tensor.name in names]
        if len(names) == len(dtypes) == 2:
            # Elements are uniform over a width of one: the variance of a product of two is a twelfth of a twelfth.
            usual = scale * math.sqrt(math.prod(expr.sizes[axis] for axis in product.axes)) / 12
            length = math.sqrt(_SPREAD / max(usual, _SPREAD / _MOST_LENGTH**2))
            first = _LOW / max(scale * _FIRST_OF_KEYS, _LOW / _MOST_FIRST)
            if any(set(product.axes).isdisjoint(dict(factor.indices[-1].terms)) for factor in factors):
                first = 0.0  # what lies in a row is not what is summed over
            are_integers = any(dtype in INTEGER_DTYPES for dtype in dtypes)
            return _SoftmaxRows((names[0], names[1]), max(1.0, length), first, are_integers)
    return None


def _multipliers(value: Value) -> Iterator[Constant]:
    """Numbers that a value is multiplied by."""
    if isinstance(value, Call) and value.function == "mul":
        yield from (argument for argument in value.arguments if isinstance(argument, Constant))


#: Differences of values of which several are looked for in their order.
_RANKED_STEP = 1 / 64


#: Of values of which places are looked for, one of so many is NaN, and one each of the two infinities, or one of half
#: as many as the longest dimension has.
_UNUSUAL_VALUES = 24


def _sparse_at_ends(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Uniform numbers as such whose logarithm is uniform: half as many for every equal step from the middle to either
    end, which about one of them all reaches."""
    middle, half = (low + high) / 2, (high - low) / 2
    from_middle = (values - middle) / half
    octaves = math.log2(max(values.size, 2))
    far = -np.log2(np.maximum(1 - np.abs(from_middle), 2.0**-octaves)) / octaves
    return middle + half * np.sign(from_middle) * far


def _half_in_order(values: NDArray[np.float64], dimension: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Values of which those of half a line, from anywhere on, descend along a dimension."""
    lines = np.moveaxis(values, dimension, -1)
    length = lines.shape[-1]
    at = (generator.integers(0, length, (*lines.shape[:-1], 1)) + np.arange(length // 2)) % length
    descending = -np.sort(-np.take_along_axis(lines, at, -1), -1)
    np.put_along_axis(lines, at, descending, -1)
    return np.moveaxis(lines, -1, dimension)


def _ranked_dimension(expr: TensorExpr, tensor: str) -> int:
    """The first dimension of a tensor along which its elements are ranked."""
    for statement in expr.statements:
        reduction = statement.reduction
        if reduction is not None and reduction.rank is not None:
            for load in loads(reduction.body):
                along = [index.coefficient(reduction.axes[0]) != 0 for index in load.indices]
                if load.tensor == tensor and any(along):
                    return along.index(True)
    return -1


def _ranked_inputs(expr: TensorExpr) -> dict[str, bool]:
    """Inputs whose elements are ranked, and whether they have a NaN and nothing but places comes of them."""
    inputs = {tensor.name for tensor in expr.inputs}
    floats = {tensor.name for tensor in expr.inputs if tensor.dtype not in INTEGER_DTYPES}
    ranked: dict[str, bool] = {}
    for statement in expr.statements:
        reduction = statement.reduction
        if reduction is not None and reduction.rank is not None:
            places = reduction.function in ("argmax", "argmin") and isinstance(reduction.body, Load)
            ranked |= {each.tensor: places for each in loads(reduction.body) if each.tensor in inputs}
    uses = Counter(load.tensor for statement in expr.statements for load in loads(statement.value))
    return {name: places and uses[name] == 1 and name in floats for name, places in ranked.items()}


#: Of places that are drawn, one of so many lies outside of the tensor that is read there.
_OUTSIDE_PLACES = 16


def _extents_of_places(expr: TensorExpr) -> dict[str, int]:
    """Tensor of places -> elements of the shortest dimension that is read, or named by an axis, there."""
    extents: dict[str, int] = {}
    for load in gathers(expr):
        for index, extent in zip(load.indices, expr.tensor_by_name[load.tensor].shape, strict=True):
            if isinstance(index, GatheredIndex):
                name = index.place.tensor
                extents[name] = min(extent, extents.get(name, extent))
    for name, axis in _compared_places(expr):
        extents[name] = min(expr.sizes[axis], extents.get(name, expr.sizes[axis]))
    return extents


def _cut_counts(expr: TensorExpr) -> Iterator[tuple[str, int]]:
    """Inputs of int32 whose elements are cut to a positive number, as counts are, and the number."""
    integers = {tensor.name for tensor in expr.inputs if tensor.dtype == "int32"}
    for node in (node for statement in expr.statements for node in walk(statement.value)):
        match node:
            case Call(
                function="min",
                arguments=(Call(function="max", arguments=(Load(tensor=tensor), _)), Constant(value=most)),
            ):
                if tensor in integers and most > 0:
                    yield tensor, int(most)


def _compared_places(expr: TensorExpr) -> Iterator[tuple[str, str]]:
    """Inputs of int32 whose elements are asked whether they are numbers of an axis, and the axis."""
    integers = {tensor.name for tensor in expr.inputs if tensor.dtype == "int32"}
    for node in (node for statement in expr.statements for node in walk(statement.value)):
        if isinstance(node, Call) and node.function == "eq":
            for place, axis in (node.arguments, node.arguments[::-1]):
                match place, axis:
                    case Load(tensor=tensor), AxisValue(index=index) if tensor in integers and index.is_plain_axis:
                        yield tensor, index.axes[0]


def _places(generator: np.random.Generator, tensor: Tensor, extent: int) -> NDArray[np.float64]:
    """Places in a dimension of ``extent`` elements, a few of them before or behind it."""
    inside = generator.integers(0, extent, tensor.shape)
    beyond = np.where(generator.integers(0, 2, tensor.shape) == 0, -1 - inside % 3, extent + inside % 3)
    return np.where(generator.integers(0, _OUTSIDE_PLACES, tensor.shape) == 0, beyond, inside).astype(np.float64)


#: Of counts that are cut, one of so many is as large as it can be, or larger, and one as small.
_WHOLE_COUNTS = 6


def _counts(generator: np.random.Generator, tensor: Tensor, most: int) -> NDArray[np.float64]:
    """Counts of 1 to ``most``, some beyond either end."""
    values = generator.integers(1, most + 1, tensor.shape)
    kinds, beyond = generator.integers(0, _WHOLE_COUNTS, tensor.shape), values % 3
    return np.where(kinds == 0, most + beyond, np.where(kinds == 1, -beyond, values)).astype(np.float64)


#: Heights of peaks: over numbers of at most 1.5, and above 88.7, the largest number whose exponential float32 holds.
_PEAKS, _HIGH_PEAK = (1.0, 3.0), 100.0


def _peaks(expr: TensorExpr) -> Mapping[str, tuple[tuple[int, ...], bool]]:
    """Floating-point inputs of which largest elements are taken: the dimensions of a row, and whether an exponential
    is taken of what is left when those are subtracted."""
    subtracted = {
        load.tensor
        for statement in expr.statements
        for node in walk(statement.value)
        if isinstance(node, Call) and node.function == "exp"
        for load in loads(node)
    }
    floats = {tensor.name for tensor in expr.inputs if tensor.dtype not in INTEGER_DTYPES}
    peaks = {}
    for statement in expr.statements:
        reduction = statement.reduction
        if reduction is None or reduction.rank is not None or reduction.function not in ("max", "argmax"):
            continue
        for load in loads(reduction.body):
            row = tuple(d for d, index in enumerate(load.indices) if set(index.axes) & set(reduction.axes))
            if load.tensor in floats and row:
                peaks[load.tensor] = (row, statement.tensor in subtracted)
    return peaks


def _add_peaks(values: NDArray[np.float64], row: Sequence[int], high: bool, generator: np.random.Generator) -> None:
    """A peak in every row, whose elements lie along the dimensions ``row``; high ones in every other row only.

    Places go through a row in odd strides of its golden section, so that few rows have them in all parts of a row and
    at all places within vectors and warps.
    """
    first = values.ndim - len(row)
    rows = np.moveaxis(values, row, range(first, values.ndim))
    length = math.prod(rows.shape[first:])
    stride, start = int(0.618 * length) | 1, int(generator.integers(length))
    for number, at in enumerate(np.ndindex(rows.shape[:first])):
        if not high or number % 2:
            turn = number // 2 if high else number
            place = np.unravel_index((start + turn * stride) % length, rows.shape[first:])
            rows[at][place] += _HIGH_PEAK if high else generator.uniform(*_PEAKS)


def input_ranges(expr: TensorExpr) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of test data for every input tensor; see :func:`random_inputs`."""
    positive = _positive_tensors(expr)
    # Sums of some thousand products have to stay finite in the output's dtype.
    largest = 7.0 if expr.output.dtype == "float16" else 127.0
    floats, integers = ((-1.0, 1.0), (0.5, 1.5)), ((-largest, largest), (1.0, largest))
    places = {name: (0.0, extent - 1.0) for name, extent in _extents_of_places(expr).items()}
    return places | {
        tensor.name: (integers if tensor.dtype in INTEGER_DTYPES else floats)[tensor.name in positive]
        for tensor in expr.inputs
        if tensor.name not in places
    }


def _positive_tensors(expr: TensorExpr) -> set[str]:
    """Tensors that reach a function of positive arguments, directly or through other statements."""
    positive: set[str] = set()
    for statement in reversed(expr.statements):
        if statement.tensor in positive:
            positive.update(load.tensor for load in loads(statement.value))
        for node in walk(statement.value):
            if isinstance(node, Call):
                for argument in FUNCTIONS[node.function].positive:
                    positive.update(load.tensor for load in loads(node.arguments[argument]))
    return positive
