"""Derivatives of point-wise values: ``gelu(x + b)`` after ``x``, as a value of the same language."""

from __future__ import annotations

from sokoban.language.expression import Call, Load, Value
from sokoban.language.functions import FUNCTIONS, ONE, PARAMETERS, ZERO, with_arguments


def derivative(value: Value, load: Load) -> Value:
    """The derivative of a point-wise value after one of its loads; ``Constant(0)`` where it does not depend on it.

    >>> from sokoban.language.expression import AffineIndex, Constant, value_text
    >>> x = Load("X", (AffineIndex.axis("i"),))
    >>> value_text(derivative(Call("mul", (Constant(3.0), Call("exp", (x,)))), x))
    '(3 * exp(X[i]))'
    """
    if value == load:
        return ONE
    if not isinstance(value, Call):
        return ZERO
    if value.function == "select":
        condition, first, second = value.arguments
        inner = derivative(first, load), derivative(second, load)
        return inner[0] if inner[0] == inner[1] else Call("select", (condition, *inner))
    total: Value = ZERO
    for position, argument in enumerate(value.arguments):
        inside = derivative(argument, load)
        if inside != ZERO:
            total = _add(total, _multiply(_outer(value, position), inside))
    return total


def _outer(value: Call, position: int) -> Value:
    """The derivative of a function after one of its arguments."""
    function = FUNCTIONS[value.function]
    if function.derivatives:
        return with_arguments(function.derivatives[position], value.arguments)
    if function.value is None:
        return ZERO
    return with_arguments(derivative(function.value, PARAMETERS[position]), value.arguments)


def _add(a: Value, b: Value) -> Value:
    return b if a == ZERO else a if b == ZERO else Call("add", (a, b))


def _multiply(a: Value, b: Value) -> Value:
    if ZERO in (a, b):
        return ZERO
    return b if a == ONE else a if b == ONE else Call("mul", (a, b))
