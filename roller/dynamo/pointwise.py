"""Point-wise functions of PyTorch as texts of the expression language.

Graphs that reach a backend are decomposed: an activation is a few of these nodes. A rule gets the texts of a node's
arguments, each in brackets where it needs them, and gives the text of its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Text of a node's value from the texts of its arguments.
Rule = Callable[..., str]

_aten, _prims = torch.ops.aten, torch.ops.prims


def number(value: float) -> str:
    """A number as the language writes it, negative ones in brackets.

    >>> number(2), number(-0.5), number(float("-inf"))
    ('2.0', '(-0.5)', '(-inf)')

    Raises:
        ValueError: the language has no such number.
    """
    value = float(value)
    if math.isnan(value):
        raise ValueError("not a number")
    text = repr(abs(value))
    return text if math.copysign(1.0, value) > 0 else f"(-{text})"


def _binary(sign: str) -> Rule:
    return lambda a, b: f"({a} {sign} {b})"


def _call(name: str) -> Rule:
    return lambda *values: f"{name}({', '.join(values)})"


def _sum(sign: str) -> Rule:
    def rule(a: str, b: str, alpha: str = "1.0") -> str:
        return f"({a} {sign} {b})" if alpha == "1.0" else f"({a} {sign} {alpha} * {b})"

    return rule


def _divided(a: str, b: str, rounding_mode: str | None = None) -> str:
    if rounding_mode is not None:
        raise ValueError("a quotient that is rounded")
    return f"({a} / {b})"


def _gelu(a: str, approximate: str = "none") -> str:
    if approximate != "none":
        raise ValueError("the approximate gelu")
    return f"gelu({a})"


def _power(a: str, exponent: str) -> str:
    return f"({a} * {a})" if exponent == "2.0" else f"pow({a}, {exponent})"


def _clamp(a: str, least: str | None = None, most: str | None = None) -> str:
    value = a if least is None else f"max({a}, {least})"
    return value if most is None else f"min({value}, {most})"


def _same(a: str, *_: Any, **__: Any) -> str:
    return a


#: Functions of one name in both.
_UNARY = (
    "abs",
    "ceil",
    "cos",
    "erf",
    "exp",
    "floor",
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
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def _rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {getattr(_aten, name).default: _call(name) for name in _UNARY}
    for form in ("Tensor", "Scalar"):
        rules |= {
            getattr(_aten.add, form): _sum("+"),
            getattr(_aten.sub, form): _sum("-"),
            getattr(_aten.mul, form): _binary("*"),
            getattr(_aten.div, form): _divided,
        }
        rules |= {getattr(getattr(_aten, name), form): _binary(sign) for name, sign in _COMPARISONS.items()}
    return rules | {
        _aten.gelu.default: _gelu,
        _aten.pow.Tensor_Scalar: _power,
        _aten.expm1.default: lambda a: f"(exp({a}) - 1.0)",
        _aten.log1p.default: lambda a: f"log(1.0 + {a})",
        _aten.reciprocal.default: lambda a: f"(1.0 / {a})",
        _aten.square.default: lambda a: f"({a} * {a})",
        _aten.maximum.default: _call("max"),
        _aten.minimum.default: _call("min"),
        _aten.clamp_min.default: _call("max"),
        _aten.clamp_max.default: _call("min"),
        _aten.clamp.default: _clamp,
        _aten.hardtanh.default: lambda a, least="(-1.0)", most="1.0": _clamp(a, least, most),
        _aten.where.self: _call("select"),
        # Values between statements are of the arithmetic's dtype, whatever PyTorch would round them to.
        _prims.convert_element_type.default: _same,
        _aten._to_copy.default: _same,
    }


#: Functions point by point -> rule.
RULES: Mapping[Any, Rule] = _rules()

#: Nodes whose value has the elements of their first argument in the same order.
RESHAPES = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.alias.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.squeeze.default,
    }
)
