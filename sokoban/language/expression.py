"""Tensor expressions: affine accesses, statements, and the operator they form together (thesis 5.5.1, 6.3.1).

An operator is a short list of statements. Every statement defines one tensor, element by element, over named axes::

    C[i, j] = sum(k, A[i, k] * B[k, j])
    D[i, j] = relu(C[i, j] + bias[j])

A finished :class:`TensorExpr` is normalised: a statement is either *one* reduction (its value is a
:class:`Reduction`) or point-wise (no reduction anywhere inside). Everything is frozen and hashable, so that results
can be cached by the expression itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from hal.spec.parts import DTYPE_BYTES

#: Element types of tensors: floats and integers that arithmetic takes.
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
INTEGER_DTYPES = ("int8", "int32")
#: Eight-bit floats: storage of a matrix product's operands, in which nothing is computed.
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOAT_DTYPES, *INTEGER_DTYPES, *FLOAT8_DTYPES)
#: Dtype of what an operator makes of dtypes too narrow for results, by default.
RESULT_DTYPE = {"int8": "int32", "float8_e4m3fn": "float32", "float8_e5m2": "float32"}

#: Reduction name -> the value that changes nothing.
REDUCTION_IDENTITY: Mapping[str, float] = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
#: Reductions whose result is a place along the one axis that they reduce: of the largest and of the smallest value.
PLACE_REDUCTIONS = ("argmax", "argmin")
#: Reductions that order values, so that they have one of every rank, and whether the first rank is the largest.
RANKED_REDUCTIONS: Mapping[str, bool] = {"max": True, "min": False, "argmax": True, "argmin": False}
#: Word of a scan -> what it accumulates by.
SCANS: Mapping[str, str] = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min"}


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop axis: ``name`` counts 0 … ``size`` - 1."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class AffineIndex:
    """``offset + sum(coefficient * axis)`` with integer coefficients, none of them zero, axes sorted by name.

    >>> index = AffineIndex.of({"h": 2, "k": 1}, offset=-1)
    >>> str(index), index.bounds({"h": 4, "k": 3})
    ('2*h + k - 1', (-1, 7))
    >>> str(index.substitute({"h": AffineIndex.of({"i": 1}, 3)}))
    '2*i + k + 5'
    """

    terms: tuple[tuple[str, int], ...] = ()
    offset: int = 0

    @staticmethod
    def of(terms: Mapping[str, int], offset: int = 0) -> AffineIndex:
        """The index with these coefficients by axis; zeros are left out."""
        return AffineIndex(tuple(sorted((a, c) for a, c in terms.items() if c)), offset)

    @staticmethod
    def axis(name: str) -> AffineIndex:
        """The index that is one axis."""
        return AffineIndex(((name, 1),))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that the index depends on."""
        return tuple([axis for axis, _ in self.terms])

    @property
    def is_plain_axis(self) -> bool:
        """True if the index is a single axis: coefficient one, no offset."""
        return self.offset == 0 and len(self.terms) == 1 and self.terms[0][1] == 1

    def coefficient(self, axis: str) -> int:
        """By how much the index grows along ``axis``; 0 where it does not depend on it."""
        for term_axis, coefficient in self.terms:
            if term_axis == axis:
                return coefficient
        return 0

    def bounds(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Smallest and largest value over the box 0 <= axis < sizes[axis], both inclusive (interval algebra)."""
        low = high = self.offset
        for axis, coefficient in self.terms:
            reach = coefficient * (sizes[axis] - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high

    def substitute(self, replacements: Mapping[str, AffineIndex]) -> AffineIndex:
        """Every axis named in ``replacements`` replaced by an index: ``2*h + 1`` with h -> ``i + 3`` is ``2*i + 7``."""
        terms: dict[str, int] = {}
        offset = self.offset
        for axis, coefficient in self.terms:
            index = replacements.get(axis, AffineIndex.axis(axis))
            offset += coefficient * index.offset
            for inner, inner_coefficient in index.terms:
                terms[inner] = terms.get(inner, 0) + coefficient * inner_coefficient
        return AffineIndex.of(terms, offset)

    def __str__(self) -> str:
        parts = [axis if c == 1 else f"{c}*{axis}" for axis, c in self.terms]
        if self.offset or not parts:
            parts.append(str(self.offset))
        return " + ".join(parts).replace("+ -", "- ")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredIndex(AffineIndex):
    """The number that an integer tensor holds, as an index of another one: ``I[t]`` in ``E[I[t], d]``.

    As an affine index it is what data tiles and transactions are counted by: rows that are read in the order of the
    numbers, each its own.

    Attributes:
        place: the read of the integer tensor.
        low, high: what smaller and larger numbers are taken for: the first and last element of the dimension, or one
            outside on either side where the read has a pad.
    """

    place: Load
    low: int = 0
    high: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that the number depends on."""
        return tuple(dict.fromkeys(axis for index in self.place.indices for axis in index.axes))

    @property
    def is_plain_axis(self) -> bool:
        """False: no two of its values need to differ."""
        return False

    def bounds(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Smallest and largest value."""
        return self.low, self.high

    def substitute(self, replacements: Mapping[str, AffineIndex]) -> GatheredIndex:
        """The number read at other axes."""
        counted = AffineIndex(self.terms, self.offset).substitute(replacements)
        place = replace(self.place, indices=tuple(index.substitute(replacements) for index in self.place.indices))
        return replace(self, terms=counted.terms, offset=counted.offset, place=place)

    def __str__(self) -> str:
        return value_text(self.place)


@dataclass(frozen=True, slots=True)
class Constant:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class AxisValue:
    """An affine index used as a number (masks, window counts)."""

    index: AffineIndex


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a tensor. Outside the tensor it is ``pad``; with ``pad`` None it is never outside."""

    tensor: str
    indices: tuple[AffineIndex, ...]
    pad: float | None = None

    @property
    def places(self) -> tuple[Load, ...]:
        """The reads that say which element it is; none where axes do."""
        return tuple([index.place for index in self.indices if isinstance(index, GatheredIndex)])


@dataclass(frozen=True, slots=True)
class Call:
    """A function of :data:`sokoban.language.functions.FUNCTIONS` applied to values.

    Comparisons give truth values, which only select, and, or, not take.
    """

    function: str
    arguments: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """``function`` (of :data:`REDUCTION_IDENTITY` or :data:`PLACE_REDUCTIONS`) of ``body`` over ``axes``.

    Attributes:
        function: its word.
        axes: what it reduces.
        body: the value that is reduced.
        rank: an axis of the statement that counts values in their order, the largest or smallest first, of equals the
            first place; NaN come before all. None where the first alone is the result.
    """

    function: str
    axes: tuple[str, ...]
    body: Value
    rank: str | None = None

    @property
    def is_place(self) -> bool:
        """True if its result is a place along its axis."""
        return self.function in PLACE_REDUCTIONS


@dataclass(frozen=True, slots=True)
class Scan:
    """``function`` of ``body`` over all places of ``axis`` up to the statement's own, itself included.

    Attributes:
        function: what accumulates, of :data:`REDUCTION_IDENTITY`.
        axis: an axis of the statement.
        body: the value that is accumulated, over the statement's axes.
        is_reversed: places from the end of the axis on to the statement's own.
        is_exclusive: the statement's own place is left out; its first value is the function's identity.
    """

    function: str
    axis: str
    body: Value
    is_reversed: bool = False
    is_exclusive: bool = False


Value = Constant | AxisValue | Load | Call | Reduction | Scan


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the statements index it.

    ``external_shape`` is how the caller shapes it where the two differ (a grouped convolution sees its channels as
    groups x channels per group); same element order, same element count.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    external_shape: tuple[int, ...] | None = None

    @property
    def caller_shape(self) -> tuple[int, ...]:
        """The shape of the caller's array."""
        return self.shape if self.external_shape is None else self.external_shape

    @property
    def element_count(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.element_count * self.element_bytes


@dataclass(frozen=True, slots=True)
class Statement:
    """``tensor[axes] = value``; the tensor's shape is the sizes of ``axes``, each used once."""

    tensor: str
    axes: tuple[str, ...]
    value: Value

    @property
    def reduction(self) -> Reduction | None:
        """The reduction that the statement is; None for a point-wise one."""
        return self.value if isinstance(self.value, Reduction) else None

    @property
    def scan(self) -> Scan | None:
        """The scan that the statement is; None for any other."""
        return self.value if isinstance(self.value, Scan) else None

    @property
    def is_pointwise(self) -> bool:
        """True if it neither reduces nor scans."""
        return not isinstance(self.value, Reduction | Scan)

    @property
    def is_of_lines(self) -> bool:
        """True if it goes along one axis in order: a scan, a place of the largest or smallest value, values by rank."""
        reduction = self.reduction
        return self.scan is not None or (reduction is not None and (reduction.is_place or reduction.rank is not None))


_Operator = TypeVar("_Operator")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The named operator that statements compute.

    Attributes:
        operator: the operator, a frozen value of :data:`sokoban.language.named.NamedOperator`.
        result: the tensor of the operator's result; statements behind it are an epilogue.
        names: pairs of a tensor or an axis of the operator's own program and its name in the expression; none where
            the operator wrote the expression itself.
    """

    operator: object
    result: str
    names: tuple[tuple[str, str], ...] = ()

    def name(self, program_name: str) -> str:
        """The expression's name of a tensor or an axis of the operator's program."""
        return dict(self.names).get(program_name, program_name)


#: The primes that occur in tiles: a number of rows with none of them ends within a tile of whatever size.
_TILE_PRIMES = math.prod((2, 3, 5, 7, 11, 13))

#: Fewest multiples of rows that a kernel is written for, so that no axis is of one element.
_LEAST_ROWS = 17


@dataclass(frozen=True)
class LaunchSize:
    """A size that is known at launch.

    Attributes:
        axis: its axis.
        most: the largest.
        multiple: of which every size is one.
    """

    axis: str
    most: int
    multiple: int = 1

    def problem(self, size: int) -> str:
        """Problem of a size at launch; empty where it is one of those that were promised.

        >>> LaunchSize("m", 64, 8).problem(20)
        'm = 20 is no multiple of 8'
        """
        if not 0 < size <= self.most:
            return f"{self.axis} = {size} is not between 1 and {self.most}"
        return f"{self.axis} = {size} is no multiple of {self.multiple}" if size % self.multiple else ""

    def reach(self, last: int) -> int:
        """The size that a kernel for sizes up to ``last`` is written for: the next that no tile divides, so that every
        edge that some size has is guarded, and no vector is wider than all sizes allow.

        >>> LaunchSize("m", 8192).reach(8192), LaunchSize("m", 8192, 8).reach(64)
        (8201, 136)
        """
        count = max(-(-last // self.multiple), _LEAST_ROWS)
        while math.gcd(count, _TILE_PRIMES) > 1:
            count += 1
        return count * self.multiple


@dataclass(frozen=True, kw_only=True)
class TensorExpr:
    """One operator: statements in order; the last one defines the output.

    ``tensors`` holds the inputs in order of first use, then every statement's tensor in statement order.
    ``accumulate`` is the dtype in which values are computed and reduced. With ``allow_tf32`` a product of float32
    matrices may round its operands to TensorFloat-32, of ten bits of mantissa. ``origin`` is the named operator that
    wrote the statements, or that they were recognised as; None for any other expression. ``launch_size`` is a size that
    is known at launch, whose axis has the largest; None where all sizes are known.
    """

    name: str
    axes: tuple[Axis, ...]
    tensors: tuple[Tensor, ...]
    statements: tuple[Statement, ...]
    accumulate: str
    allow_tf32: bool = False
    origin: Origin | None = None
    launch_size: LaunchSize | None = None

    def operator_as(self, kind: type[_Operator]) -> _Operator | None:
        """The named operator of a ``kind`` that the expression is, an epilogue or none behind it; None where it is
        anything else."""
        operator = None if self.origin is None else self.origin.operator
        return operator if isinstance(operator, kind) else None

    @property
    def epilogue(self) -> tuple[Statement, ...]:
        """The statements behind the result of the named operator that the expression is."""
        if self.origin is None:
            return ()
        written = [statement.tensor for statement in self.statements]
        return self.statements[written.index(self.origin.result) + 1 :]

    def operands(self, names: Iterable[str]) -> tuple[Tensor, ...]:
        """The tensors that have these ``names`` in the program of the named operator that the expression is."""
        assert self.origin is not None
        return tuple(self.tensor_by_name[self.origin.name(name)] for name in names)

    def rewritten(self, **changes: Any) -> TensorExpr:
        """The expression with other axes, tensors or statements, which no named operator wrote."""
        return replace(self, origin=None, **changes)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Elements of every axis."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def tensor_by_name(self) -> Mapping[str, Tensor]:
        """All tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that no statement defines, in order of first use."""
        written = {statement.tensor for statement in self.statements}
        return tuple(tensor for tensor in self.tensors if tensor.name not in written)

    @property
    def output(self) -> Tensor:
        """The tensor that the last statement defines."""
        return self.tensor_by_name[self.statements[-1].tensor]

    @property
    def final_dtype(self) -> str:
        """The dtype in which the last statement is computed.

        That is ``accumulate``, or float32 where sums of integers are stored as floats.
        """
        return "float32" if self.accumulate == "int32" and self.output.dtype != "int32" else self.accumulate


def walk(value: Value) -> Iterator[Value]:
    """``value`` and everything inside it, outermost first."""
    yield value
    if isinstance(value, Call):
        for argument in value.arguments:
            yield from walk(argument)
    elif isinstance(value, Reduction | Scan):
        yield from walk(value.body)
    elif isinstance(value, Load):
        yield from value.places


def loads(value: Value) -> tuple[Load, ...]:
    """The distinct loads inside ``value`` in order of first use."""
    return tuple(dict.fromkeys(node for node in walk(value) if isinstance(node, Load)))


def used_axes(values: Iterable[Value]) -> tuple[str, ...]:
    """Names of the axes that indices inside ``values`` use, in order of first use."""
    names: dict[str, None] = {}
    for value in values:
        for node in walk(value):
            if isinstance(node, Load):
                names.update(dict.fromkeys(axis for index in node.indices for axis in index.axes))
            elif isinstance(node, AxisValue):
                names.update(dict.fromkeys(node.index.axes))
    return tuple(names)


def rewrite(value: Value, replacements: Mapping[Value, Value]) -> Value:
    """``value`` with every sub-value that ``replacements`` has exchanged, outermost match first.

    >>> x, y = Load("X", ()), Load("Y", ())
    >>> value_text(rewrite(Call("mul", (x, Call("exp", (x,)))), {x: y}))
    '(Y[] * exp(Y[]))'
    """
    if value in replacements:
        return replacements[value]
    if isinstance(value, Call):
        return Call(value.function, tuple(rewrite(argument, replacements) for argument in value.arguments))
    if isinstance(value, Reduction | Scan):
        return replace(value, body=rewrite(value.body, replacements))
    if isinstance(value, Load) and value.places:
        return with_places(value, lambda place: rewrite(place, replacements))
    return value


def with_places(load: Load, changed: Callable[[Load], Value]) -> Load:
    """``load`` with other reads that say which element it is."""
    indices = []
    for index in load.indices:
        if isinstance(index, GatheredIndex):
            place = changed(index.place)
            assert isinstance(place, Load)
            index = replace(index, place=place)
        indices.append(index)
    return replace(load, indices=tuple(indices))


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "and": "and", "or": "or",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip


def value_text(value: Value) -> str:
    """A value in the expression language, fully bracketed: ``(A[m, k] * B[k, n])``."""
    if isinstance(value, Constant):
        return _number_text(value.value)
    if isinstance(value, AxisValue):
        return f"({value.index})"
    if isinstance(value, Load):
        pad = "" if value.pad is None else f" | pad={_number_text(value.pad)}"
        return f"{value.tensor}[{', '.join(map(str, value.indices))}{pad}]"
    if isinstance(value, Reduction):
        rank = "" if value.rank is None else f", {value.rank}"
        return f"{value.function}([{', '.join(value.axes)}], {value_text(value.body)}{rank})"
    if isinstance(value, Scan):
        word = next(word for word, function in SCANS.items() if function == value.function)
        options = ", reverse" * value.is_reversed + ", exclusive" * value.is_exclusive
        return f"{word}({value.axis}, {value_text(value.body)}{options})"
    arguments = [value_text(argument) for argument in value.arguments]
    if value.function in _INFIX:
        return f"({arguments[0]} {_INFIX[value.function]} {arguments[1]})"
    if value.function == "neg":
        return f"(-{arguments[0]})"
    return f"{value.function}({', '.join(arguments)})"


def _number_text(number: float) -> str:
    """The shortest text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def statement_text(statement: Statement) -> str:
    """A statement in the expression language: ``C[m, n] = sum([k], (A[m, k] * B[k, n]))``."""
    return f"{statement.tensor}[{', '.join(statement.axes)}] = {value_text(statement.value)}"
