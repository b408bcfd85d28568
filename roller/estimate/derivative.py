"""Derivatives of point-wise values: ``gelu(x + b)`` after ``x``, as a value of the same language."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from sokoban.language.expression import Call, Constant, Load, Value

#: Values that sums and products of derivatives are simplified by.
ZERO, ONE = Constant(0.0), Constant(1.0)


def derivative(value: Value, load: Load) -> Value:
    """The derivative of a point-wise value after one of its loads; ``Constant(0)`` where it does not depend on it.

    >>> from sokoban.language.expression import AffineIndex, value_text
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


def _outer(call: Call, position: int) -> Value:
    """The derivative of a function after one of its arguments."""
    if len(call.arguments) == 1:
        rule = _UNARY.get(call.function)
        return ZERO if rule is None else rule(call.arguments[0])
    a, b = call.arguments
    pair = _BINARY.get(call.function)
    return ZERO if pair is None else pair[position](a, b)


def _add(a: Value, b: Value) -> Value:
    return b if a == ZERO else a if b == ZERO else Call("add", (a, b))


def _multiply(a: Value, b: Value) -> Value:
    if ZERO in (a, b):
        return ZERO
    return b if a == ONE else a if b == ONE else Call("mul", (a, b))


def _call(function: str, *arguments: Value | float) -> Value:
    return Call(function, tuple(Constant(a) if isinstance(a, float) else a for a in arguments))


def _gelu(x: Value) -> Value:
    """The normal distribution's share below x, plus x times its density: the derivative of the exact gelu."""
    below = _call("mul", 0.5, _call("add", 1.0, _call("erf", _call("mul", math.sqrt(0.5), x))))
    density = _call("mul", 1 / math.sqrt(2 * math.pi), _call("exp", _call("mul", -0.5, _call("mul", x, x))))
    return _call("add", below, _call("mul", x, density))


def _sigmoid(x: Value) -> Value:
    return _call("mul", _call("sigmoid", x), _call("sub", 1.0, _call("sigmoid", x)))


def _step(comparison: str, a: Value, b: Value | float, otherwise: float = 0.0) -> Value:
    return _call("select", _call(comparison, a, b), 1.0, otherwise)


#: Function of one argument -> its derivative. Functions that are missing, those that round, have derivative zero, as in
#: the frameworks.
_UNARY: Mapping[str, Callable[[Value], Value]] = {
    "neg": lambda x: Constant(-1.0),
    "abs": lambda x: _step("ge", x, 0.0, -1.0),
    "relu": lambda x: _step("gt", x, 0.0),
    "exp": lambda x: _call("exp", x),
    "log": lambda x: _call("div", 1.0, x),
    "sqrt": lambda x: _call("mul", 0.5, _call("rsqrt", x)),
    "rsqrt": lambda x: _call("div", _call("mul", -0.5, _call("rsqrt", x)), x),
    "tanh": lambda x: _call("sub", 1.0, _call("mul", _call("tanh", x), _call("tanh", x))),
    "sigmoid": _sigmoid,
    "silu": lambda x: _call("add", _call("sigmoid", x), _call("mul", x, _sigmoid(x))),
    "gelu": _gelu,
    "erf": lambda x: _call("mul", 2 / math.sqrt(math.pi), _call("exp", _call("neg", _call("mul", x, x)))),
    "sin": lambda x: _call("cos", x),
    "cos": lambda x: _call("neg", _call("sin", x)),
}

_Rule = Callable[[Value, Value], Value]

#: Function of two arguments -> its derivatives after the first and after the second.
_BINARY: Mapping[str, tuple[_Rule, _Rule]] = {
    "add": (lambda a, b: ONE, lambda a, b: ONE),
    "sub": (lambda a, b: ONE, lambda a, b: Constant(-1.0)),
    "mul": (lambda a, b: b, lambda a, b: a),
    "div": (lambda a, b: _call("div", 1.0, b), lambda a, b: _call("neg", _call("div", a, _call("mul", b, b)))),
    "pow": (
        lambda a, b: _call("mul", b, _call("pow", a, _call("sub", b, 1.0))),
        lambda a, b: _call("mul", _call("pow", a, b), _call("log", a)),
    ),
    "min": (lambda a, b: _step("le", a, b), lambda a, b: _step("lt", b, a)),
    "max": (lambda a, b: _step("ge", a, b), lambda a, b: _step("gt", b, a)),
}
