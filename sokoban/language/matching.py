"""Canonical values compared: which axes and tensors of one stand for which of the other, operands in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sokoban.language.canonical import Applied, Conditions, Element, Factor, Position, Product, Reduced, Selection, Sum
from sokoban.language.expression import AffineIndex, GatheredIndex

#: Relative difference of numbers that count as one: roundings of a product of several.
SAME = 1e-9
#: Functions whose arguments may change places.
COMMUTATIVE = frozenset({"min", "max", "eq", "ne", "and", "or"})

_Part = TypeVar("_Part")


@dataclass(frozen=True)
class Correspondence:
    """Names and numbers of another value that a pattern's stand for, numbers where these may be any.

    Attributes:
        axes: the value's axes by the pattern's.
        tensors: the value's inputs by the pattern's.
        numbers: the value's numbers by the pattern's, one or several; None where they have to be equal.
    """

    axes: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[float, tuple[float, ...]] | None = None

    def with_axis(self, pattern: str, axis: str) -> Correspondence | None:
        """One more axis, or None where either has another partner."""
        pairs = _with_pair(self.axes, pattern, axis)
        return None if pairs is None else replace(self, axes=pairs)

    def with_tensor(self, pattern: str, tensor: str) -> Correspondence | None:
        """One more input, or None where either has another partner."""
        pairs = _with_pair(self.tensors, pattern, tensor)
        return None if pairs is None else replace(self, tensors=pairs)

    def with_number(self, pattern: float, number: float) -> Correspondence | None:
        """One more number, or None where it has to be the pattern's and is not."""
        if self.numbers is None:
            return self if pattern == number or math.isclose(pattern, number, rel_tol=SAME) else None
        met = self.numbers.get(pattern, ())
        return self if number in met else replace(self, numbers={**self.numbers, pattern: (*met, number)})


def _with_pair(pairs: Mapping[str, str], key: str, value: str) -> Mapping[str, str] | None:
    if key in pairs:
        return pairs if pairs[key] == value else None
    return None if value in pairs.values() else {**pairs, key: value}


def correspondences(pattern: Product, value: Product, start: Correspondence) -> Iterator[Correspondence]:
    """All ways in which a canonical value is a ``pattern``, beyond what ``start`` says already.

    >>> from sokoban.language.canonical import canonical_value
    >>> from sokoban.language.parser import parse_program
    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 4, "j": 3, "k": 2}, {})
    >>> other = parse_program("Y[m,n] = sum(d, W[d,n] * X[m,d])", {"m": 4, "n": 3, "d": 2}, {})
    >>> values = canonical_value(product), canonical_value(other)
    >>> [dict(each.tensors) for each in correspondences(*values, Correspondence())]
    [{'A': 'X', 'B': 'W'}]
    """
    if len(pattern.factors) != len(value.factors):
        return
    begun = start.with_number(pattern.coefficient, value.coefficient)
    if begun is not None:
        yield from _in_any_order(pattern.factors, value.factors, _powers, begun)


def _in_any_order(
    patterns: Sequence[_Part],
    values: Sequence[_Part],
    compare: Callable[[_Part, _Part, Correspondence], Iterator[Correspondence]],
    start: Correspondence,
) -> Iterator[Correspondence]:
    """All ways in which every value is one of the patterns."""
    if not patterns:
        yield start
        return
    first, *others = patterns
    for place, value in enumerate(values):
        for begun in compare(first, value, start):
            yield from _in_any_order(others, [*values[:place], *values[place + 1 :]], compare, begun)


def _in_order(
    patterns: Sequence[Product], values: Sequence[Product], start: Correspondence
) -> Iterator[Correspondence]:
    """All ways in which values are the patterns, one by one."""
    if not patterns:
        yield start
        return
    for begun in correspondences(patterns[0], values[0], start):
        yield from _in_order(patterns[1:], values[1:], begun)


def _powers(pattern: tuple[Factor, int], value: tuple[Factor, int], start: Correspondence) -> Iterator[Correspondence]:
    if pattern[1] == value[1] and type(pattern[0]) is type(value[0]):
        yield from _factors(pattern[0], value[0], start)


def _factors(pattern: Factor, value: Factor, start: Correspondence) -> Iterator[Correspondence]:
    """All ways in which a factor is another one of its type."""
    match pattern, value:
        case Element(), Element() if pattern.pad == value.pad and len(pattern.indices) == len(value.indices):
            begun = start.with_tensor(pattern.tensor, value.tensor)
            if begun is not None:
                yield from _indices(pattern.indices, value.indices, begun)
        case Position(), Position():
            yield from _index(pattern.index, value.index, start)
        case Sum(), Sum() if len(pattern.terms) == len(value.terms):
            yield from _in_any_order(pattern.terms, value.terms, correspondences, start)
        case Reduced(), Reduced() if pattern.function == value.function and len(pattern.axes) == len(value.axes):
            for begun in correspondences(pattern.body, value.body, start):
                if {begun.axes.get(axis) for axis in pattern.axes} == set(value.axes):
                    yield begun
        case Applied(), Applied() if pattern.function == value.function:
            if pattern.function in COMMUTATIVE:
                yield from _in_any_order(pattern.arguments, value.arguments, correspondences, start)
            else:
                yield from _in_order(pattern.arguments, value.arguments, start)
        case Selection(), Selection():
            for begun in _in_order((pattern.first, pattern.second), (value.first, value.second), start):
                yield from _conditions(pattern.conditions, value.conditions, begun)


def _conditions(pattern: Conditions, value: Conditions, start: Correspondence) -> Iterator[Correspondence]:
    if pattern.is_all == value.is_all and len(pattern.parts) == len(value.parts):
        yield from _in_any_order(pattern.parts, value.parts, _index, start)


def _indices(
    patterns: Sequence[AffineIndex], values: Sequence[AffineIndex], start: Correspondence
) -> Iterator[Correspondence]:
    if not patterns:
        yield start
        return
    for begun in _index(patterns[0], values[0], start):
        yield from _indices(patterns[1:], values[1:], begun)


def _index(pattern: AffineIndex, value: AffineIndex, start: Correspondence) -> Iterator[Correspondence]:
    """All ways in which an index is a pattern: as many terms of the same coefficients, and the offset; or read from a
    tensor at the same places."""
    if isinstance(pattern, GatheredIndex) or isinstance(value, GatheredIndex):
        if isinstance(pattern, GatheredIndex) and isinstance(value, GatheredIndex):
            yield from _places(pattern, value, start)
        return
    if start.numbers is None and pattern.offset != value.offset:
        return
    begun = start.with_number(pattern.offset, value.offset)
    if begun is not None and len(pattern.terms) == len(value.terms):
        yield from _in_any_order(pattern.terms, value.terms, _term, begun)


def _places(pattern: GatheredIndex, value: GatheredIndex, start: Correspondence) -> Iterator[Correspondence]:
    """All ways in which an index that is read is a pattern."""
    begun = start.with_tensor(pattern.place.tensor, value.place.tensor)
    if begun is not None and pattern.place.pad == value.place.pad:
        yield from _indices(pattern.place.indices, value.place.indices, begun)


def _term(pattern: tuple[str, int], value: tuple[str, int], start: Correspondence) -> Iterator[Correspondence]:
    """The way in which a term is a pattern: a coefficient that is a size, such as that of a page, is a number like any
    other; one alone or its negative says no more than the sign."""
    if abs(pattern[1]) == 1:
        begun = start if pattern[1] == value[1] else None
    else:
        begun = start.with_number(pattern[1], value[1])
    begun = None if begun is None else begun.with_axis(pattern[0], value[0])
    if begun is not None:
        yield begun
