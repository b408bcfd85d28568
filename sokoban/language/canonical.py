"""Values in a canonical form, in which spellings of one value are alike: what an operator computes, not how it is put.

Statements are written into each other until a value reads inputs alone, and every reduction has axes of its own. Then
a value is a number times powers of factors (:class:`Product`), in which

- differences, quotients and negations are sums and products, numbers among them are one number, and a number before a
  sum stands before each of its terms;
- a sum over axes has its invariant factors in front of it, sums over sums are one, and a maximum or a minimum has the
  size of its number in front of it;
- a comparison of axes says which indices are not negative, and a selection takes its first arm where all are; numbers
  stand in front of a selection whose other arm they leave as it is (0, infinity), and what is added to one that adds 0
  or minus infinity stands inside it.

These are equations of real numbers, of which floating-point ones hold up to rounding. Factors and terms have no order:
:mod:`sokoban.language.matching` compares them in any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sokoban.language.expression import (
    PLACE_REDUCTIONS,
    REDUCTION_IDENTITY,
    AffineIndex,
    AxisValue,
    Call,
    Constant,
    Load,
    Reduction,
    Scan,
    Statement,
    TensorExpr,
    Value,
)

#: Most parts of a canonical value: attention has about a hundred, and what has far more is none.
MOST_PARTS = 2000
#: What separates the name of an axis from the number of the reduction that it belongs to.
_NUMBER = "'"


@dataclass(frozen=True)
class Element:
    """One element of an input; outside the tensor it is ``pad``."""

    tensor: str
    indices: tuple[AffineIndex, ...]
    pad: float | None


@dataclass(frozen=True)
class Position:
    """An index as a number."""

    index: AffineIndex


@dataclass(frozen=True)
class Conditions:
    """Truth of all ``parts`` of a comparison, or of any: that an index is not negative."""

    is_all: bool
    parts: tuple[AffineIndex, ...]


@dataclass(frozen=True)
class Selection:
    """The first value where conditions are true, else the second."""

    conditions: Conditions
    first: Product
    second: Product


@dataclass(frozen=True)
class Sum:
    """The sum of several terms."""

    terms: tuple[Product, ...]


@dataclass(frozen=True)
class Applied:
    """Any other function of values."""

    function: str
    arguments: tuple[Product, ...]


@dataclass(frozen=True)
class Reduced:
    """A reduction over axes that nothing else uses."""

    function: str
    axes: tuple[str, ...]
    body: Product


Factor = Element | Position | Selection | Sum | Applied | Reduced


@dataclass(frozen=True)
class Product:
    """``coefficient`` times factors, each to the power of a whole number."""

    coefficient: float
    factors: tuple[tuple[Factor, int], ...] = ()


def axis_name(axis: str) -> str:
    """The name that an axis has in the expression.

    >>> axis_name("k'3")
    'k'
    """
    return axis.partition(_NUMBER)[0]


class TooLarge(Exception):
    """A canonical value of more than :data:`MOST_PARTS` parts."""


def canonical_value(expr: TensorExpr) -> Product:
    """The output of an operator in canonical form, over the axes of its last statement.

    >>> from sokoban.language.parser import parse_program
    >>> sizes = {"i": 4, "j": 3, "k": 2}
    >>> scaled = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j]) / 8", sizes, {})
    >>> scaling = parse_program("D[i,k] = 0.25 * A[i,k]; C[i,j] = sum(k, D[i,k] * (B[k,j] * 0.5))", sizes, {})
    >>> canonical_value(scaled) == canonical_value(scaling)
    True

    Raises:
        TooLarge: it has more than :data:`MOST_PARTS` parts.
    """
    return _Builder(expr, {statement.tensor: statement for statement in expr.statements}).of(
        expr.statements[-1].value, {}
    )


@dataclass
class _Builder:
    """Canonical values of one expression; axes of reductions are numbered as they are met."""

    expr: TensorExpr
    definitions: Mapping[str, Statement]
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    parts: int = 0

    def of(self, value: Value, axes: Mapping[str, AffineIndex]) -> Product:
        """A value in which ``axes`` stand for indices."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise TooLarge
        if isinstance(value, Constant):
            return Product(value.value)
        if isinstance(value, AxisValue):
            return _position(value.index.substitute(axes))
        if isinstance(value, Load):
            return self._load(value, tuple(index.substitute(axes) for index in value.indices))
        if isinstance(value, Reduction):
            number = next(self.numbers)
            fresh = {axis: f"{axis_name(axis)}{_NUMBER}{number}" for axis in value.axes}
            inner = {**axes, **{axis: AffineIndex.axis(name) for axis, name in fresh.items()}}
            body = self.of(value.body, inner)
            if value.rank is not None:
                rank = _position(AffineIndex.axis(value.rank).substitute(axes))
                ranked = _factor(Applied("rank", (body, rank)))
                return _factor(Reduced(f"{value.function} of rank", tuple(fresh.values()), ranked))
            return _reduced(value.function, tuple(fresh.values()), body, self.expr.sizes)
        if isinstance(value, Scan):
            return self._scan(value, axes)
        return self._call(value, axes)

    def _scan(self, scan: Scan, axes: Mapping[str, AffineIndex]) -> Product:
        """A scan as the reduction, of as many places as its axis has, in which those beyond its own change nothing."""
        name = f"{axis_name(scan.axis)}{_NUMBER}{next(self.numbers)}"
        own, place = axes.get(scan.axis, AffineIndex.axis(scan.axis)), AffineIndex.axis(name)
        before = _minus(place, own) if scan.is_reversed else _minus(own, place)
        seen = Conditions(True, (AffineIndex(before.terms, before.offset - scan.is_exclusive),))
        body = self.of(scan.body, {**axes, scan.axis: place})
        masked = _selected(seen, body, Product(REDUCTION_IDENTITY[scan.function]))
        return _reduced(scan.function, (name,), masked, self.expr.sizes)

    def _load(self, load: Load, indices: tuple[AffineIndex, ...]) -> Product:
        """An element of an input, or the value that a statement gives to one of its own."""
        statement = self.definitions.get(load.tensor)
        if statement is None:
            return _factor(Element(load.tensor, indices, load.pad))
        value = self.of(statement.value, dict(zip(statement.axes, indices, strict=True)))
        if load.pad is None:
            return value
        inside = []
        for before, index, extent in zip(
            load.indices, indices, self.expr.tensor_by_name[load.tensor].shape, strict=True
        ):
            low, high = before.bounds(self.expr.sizes)
            inside += [index] if low < 0 else []
            inside += [_minus(AffineIndex((), extent - 1), index)] if high >= extent else []
        return _selected(Conditions(True, tuple(inside)), value, Product(load.pad))

    def _call(self, call: Call, axes: Mapping[str, AffineIndex]) -> Product:
        """A function of values."""
        if call.function == "select":
            first, second = (self.of(argument, axes) for argument in call.arguments[1:])
            conditions = self._conditions(call.arguments[0], axes)
            if conditions is not None:
                return _selected(conditions, first, second)
            return _factor(Applied("select", (self.of(call.arguments[0], axes), first, second)))
        arguments = tuple(self.of(argument, axes) for argument in call.arguments)
        rule = _RULES.get(call.function)
        return _applied(call.function, arguments) if rule is None else rule(*arguments)

    def _conditions(self, value: Value, axes: Mapping[str, AffineIndex]) -> Conditions | None:
        """The conditions that a truth value stands for; None where it compares anything but axes."""
        if not isinstance(value, Call):
            return None
        if value.function == "not":
            inner = self._conditions(value.arguments[0], axes)
            return None if inner is None else _opposite(inner)
        if value.function in ("and", "or"):
            sides = [self._conditions(argument, axes) for argument in value.arguments]
            is_all = value.function == "and"
            parts: list[AffineIndex] = []
            for side in sides:
                if side is None or (side.is_all != is_all and len(side.parts) > 1):
                    return None
                parts += side.parts
            return Conditions(is_all, tuple(parts))
        minuend, subtrahend = (_index(argument) for argument in value.arguments)
        if minuend is None or subtrahend is None or value.function not in _COMPARISONS:
            return None
        swapped, offset = _COMPARISONS[value.function]
        if swapped:
            minuend, subtrahend = subtrahend, minuend
        difference = _minus(minuend, subtrahend).substitute(axes)
        return Conditions(True, (AffineIndex(difference.terms, difference.offset + offset),))


#: Comparison -> whether its sides change places, and what is added to their difference, which is then not negative.
_COMPARISONS = {"ge": (False, 0), "gt": (False, -1), "le": (True, 0), "lt": (True, -1)}


# Indices


def _index(value: Value) -> AffineIndex | None:
    if isinstance(value, AxisValue):
        return value.index
    if isinstance(value, Constant) and value.value.is_integer():
        return AffineIndex((), int(value.value))
    return None


def _minus(first: AffineIndex, second: AffineIndex) -> AffineIndex:
    terms = dict(first.terms)
    for axis, coefficient in second.terms:
        terms[axis] = terms.get(axis, 0) - coefficient
    return AffineIndex.of(terms, first.offset - second.offset)


def _position(index: AffineIndex) -> Product:
    return _factor(Position(index)) if index.terms else Product(float(index.offset))


def _opposite(conditions: Conditions) -> Conditions:
    parts = tuple(_minus(AffineIndex((), -1), part) for part in conditions.parts)
    return Conditions(not conditions.is_all, parts)


# Sums and products


def _factor(factor: Factor) -> Product:
    return Product(1.0, ((factor, 1),))


def _single(product: Product) -> Factor | None:
    """The only factor of a product, to the power of one."""
    if len(product.factors) != 1 or product.factors[0][1] != 1:
        return None
    return product.factors[0][0]


def _times(*products: Product) -> Product:
    """The product of products."""
    coefficient = math.prod(product.coefficient for product in products)
    powers: dict[Factor, int] = {}
    for product in products:
        for factor, power in product.factors:
            powers[factor] = powers.get(factor, 0) + power
    result = Product(coefficient, tuple((factor, power) for factor, power in powers.items() if power))
    single = _single(result)
    if isinstance(single, Sum) and coefficient != 1:
        return _plus(*(_times(Product(coefficient), term) for term in single.terms))
    if isinstance(single, Selection) and coefficient < 0:
        sign = Product(-1.0)
        arms = _times(sign, single.first), _times(sign, single.second)
        return _times(Product(-coefficient), _selected(single.conditions, *arms))
    return result


def _plus(*products: Product) -> Product:
    """The sum of products."""
    terms: list[Product] = []
    for product in products:
        single = _single(product)
        terms += single.terms if isinstance(single, Sum) and product.coefficient == 1 else [product]
    number = sum(term.coefficient for term in terms if not term.factors)
    terms = [term for term in terms if term.factors] + ([Product(number)] if number else [])
    for place, term in enumerate(terms):
        mask = _single(term)
        if len(terms) > 1 and isinstance(mask, Selection) and _is_mask(mask):
            others = _plus(*terms[:place], *terms[place + 1 :])
            return _selected(mask.conditions, *(_masked(arm, others) for arm in (mask.first, mask.second)))
    if len(terms) == 1:
        return terms[0]
    return _factor(Sum(tuple(terms))) if terms else Product(0.0)


def _is_mask(selection: Selection) -> bool:
    """True if a selection is either 0 or infinite."""
    arms = (selection.first, selection.second)
    return not any(arm.factors for arm in arms) and {math.fabs(arm.coefficient) for arm in arms} == {0.0, math.inf}


def _masked(arm: Product, others: Product) -> Product:
    return arm if math.isinf(arm.coefficient) else others


def _divided(first: Product, second: Product) -> Product:
    return _times(first, _power(second, -1))


def _power(base: Product, exponent: int) -> Product:
    """A whole power of a product, where its number has that power."""
    try:
        coefficient = base.coefficient**exponent
    except ArithmeticError:
        return _factor(Applied("pow", (base, Product(float(exponent)))))
    return Product(coefficient, tuple((factor, power * exponent) for factor, power in base.factors))


def _raised(base: Product, exponent: Product) -> Product:
    if not base.factors or exponent.factors or not exponent.coefficient.is_integer():
        return _applied("pow", (base, exponent))
    return _power(base, int(exponent.coefficient))


_RULES: Mapping[str, Callable[..., Product]] = {
    "add": _plus,
    "sub": lambda first, second: _plus(first, _times(Product(-1.0), second)),
    "neg": lambda value: _times(Product(-1.0), value),
    "mul": _times,
    "div": _divided,
    "pow": _raised,
}

#: Functions of numbers that are worked out.
_NUMBERS: Mapping[str, Callable[..., float]] = {
    "sqrt": math.sqrt, "rsqrt": lambda number: 1 / math.sqrt(number), "pow": math.pow, "exp": math.exp,
    "log": math.log,
}  # fmt: skip


def _applied(function: str, arguments: Sequence[Product]) -> Product:
    """A function of values, worked out where they are numbers."""
    if function in _NUMBERS and not any(argument.factors for argument in arguments):
        try:
            return Product(float(_NUMBERS[function](*(argument.coefficient for argument in arguments))))
        except (ArithmeticError, ValueError):
            pass
    return _factor(Applied(function, tuple(arguments)))


# Selections and reductions


def _selected(conditions: Conditions, first: Product, second: Product) -> Product:
    """A selection, of all conditions where it can be, with the size of its number in front of it."""
    if not conditions.is_all:
        conditions, first, second = _opposite(conditions), second, first
    if len(conditions.parts) == 1 and _is_neutral(first) and not _is_neutral(second):
        conditions, first, second = _opposite(conditions), second, first
        conditions = Conditions(True, conditions.parts)
    inner = _single(first)
    if isinstance(inner, Selection) and inner.second == second and (first.coefficient == 1 or _is_neutral(second)):
        conditions = Conditions(True, (*conditions.parts, *inner.conditions.parts))
        first = _times(Product(first.coefficient), inner.first)
    size = math.fabs(first.coefficient)
    if first.factors and _is_neutral(second) and size and math.isfinite(size):
        return _times(Product(size), _factor(Selection(conditions, _sign_of(first), second)))
    return _factor(Selection(conditions, first, second))


def _sign_of(value: Product) -> Product:
    """A value whose number is 1 or -1."""
    return Product(math.copysign(1.0, value.coefficient), value.factors)


def _is_neutral(value: Product) -> bool:
    """True if a value is a number that positive factors leave as it is."""
    return not value.factors and (value.coefficient == 0 or math.isinf(value.coefficient))


def _reduced(function: str, axes: tuple[str, ...], body: Product, sizes: Mapping[str, int]) -> Product:
    """A reduction with what it leaves alone in front of it."""
    if function == "sum":
        return _summed(axes, body, sizes)
    size = math.fabs(body.coefficient)
    if function in PLACE_REDUCTIONS and body.factors and size and math.isfinite(size):
        return _factor(Reduced(function, axes, _sign_of(body)))
    if function in ("max", "min") and body.factors and size and math.isfinite(size):
        return _times(Product(size), _factor(Reduced(function, axes, _sign_of(body))))
    return _factor(Reduced(function, axes, body))


def _summed(axes: tuple[str, ...], body: Product, sizes: Mapping[str, int]) -> Product:
    """A sum with its invariant factors in front of it, and a sum inside it as a part of it."""
    over = set(axes)
    outside = [(factor, power) for factor, power in body.factors if over.isdisjoint(_axes(factor))]
    inside = [(factor, power) for factor, power in body.factors if not over.isdisjoint(_axes(factor))]
    used = {axis for factor, _ in inside for axis in _axes(factor)}
    repeats = math.prod(sizes[axis_name(axis)] for axis in axes if axis not in used)
    axes = tuple(axis for axis in axes if axis in used)
    front = Product(body.coefficient * repeats, tuple(outside))
    if not inside:
        return front
    inner = _single(Product(1.0, tuple(inside)))
    if isinstance(inner, Reduced) and inner.function == "sum":
        return _times(front, _factor(Reduced("sum", (*axes, *inner.axes), inner.body)))
    return _times(front, _factor(Reduced("sum", axes, Product(1.0, tuple(inside)))))


def _axes(factor: Factor) -> set[str]:
    """Axes that a factor uses, those of reductions inside it included: nothing else uses these."""
    if isinstance(factor, Element):
        return {axis for index in factor.indices for axis in index.axes}
    if isinstance(factor, Position):
        return set(factor.index.axes)
    if isinstance(factor, Selection):
        conditions = {axis for part in factor.conditions.parts for axis in part.axes}
        return conditions | _product_axes((factor.first, factor.second))
    if isinstance(factor, Sum):
        return _product_axes(factor.terms)
    return _product_axes(factor.arguments if isinstance(factor, Applied) else (factor.body,))


def _product_axes(products: Iterable[Product]) -> set[str]:
    return {axis for product in products for factor, _ in product.factors for axis in _axes(factor)}
