"""Calls that go element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from bench.kernelbench.problem import Call
from bench.kernelbench.texts import Said, axes_of, broadcast_indices, number_text, read_text, sizes_of


def pointwise(call: Call) -> Said:
    """A call of one of :data:`POINTWISE`."""
    output = call.outputs[0]
    names, operands, tensors = axes_of("i", output), list[str](), 0
    for place, value in enumerate(call.values):
        if value == "" and tensors < len(call.shapes):
            operands.append(read_text(tensors, broadcast_indices(names, call.shapes[tensors], output)))
            tensors += 1
        elif isinstance(number := call.value(place), bool | int | float):
            operands.append(number_text(number))
        elif value not in ("", "None"):
            operands.append(value)
    text = f"{{out}}[{', '.join(names)}] = {POINTWISE[call.stem.removesuffix('_')](*operands)}"
    return Said(
        text=text, sizes=sizes_of(names, output), shapes=call.shapes, output=output,
        is_pointwise=all(shape == output or math.prod(shape) < math.prod(output) for shape in call.shapes),
    )  # fmt: skip


def _with_alpha(sign: str) -> Callable[..., str]:
    return lambda a, b, alpha="1.0": f"({a} {sign} {b})" if alpha == "1.0" else f"({a} {sign} {alpha} * {b})"


def _clamped(x: str, low: str = "", high: str = "") -> str:
    value = f"max({x}, {low})" if low else x
    return f"min({value}, {high})" if high else value


def _gelu(x: str, approximate: str = "none") -> str:
    if approximate == "none":
        return f"gelu({x})"
    return f"0.5 * {x} * (1 + tanh({math.sqrt(2 / math.pi)!r} * ({x} + 0.044715 * {x} * {x} * {x})))"


def _softplus(x: str, beta: str = "1.0", threshold: str = "20.0") -> str:
    return f"select({x} * {beta} > {threshold}, {x}, log(1 + exp(min({x} * {beta}, {threshold}))) / {beta})"


def _elu(x: str, alpha: str = "1.0", scale: str = "1.0", inner: str = "1.0") -> str:
    return f"select({x} > 0, {scale} * {x}, {scale} * {alpha} * (exp(min({x} * {inner}, 0)) - 1))"


def _power(x: str, exponent: str) -> str:
    return f"({x} * {x})" if exponent == "2.0" else f"({x} ** {exponent})"


def _named(function: str) -> Callable[..., str]:
    return lambda x: f"{function}({x})"


#: Functions of one name in both.
_SAME = ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "abs", "silu", "sin", "cos", "floor", "ceil", "erf")

#: Operators element by element: the text of a value from those of the arguments.
POINTWISE: Mapping[str, Callable[..., str]] = {
    **{name: _named(name) for name in _SAME},
    "neg": lambda x: f"(-{x})", "reciprocal": lambda x: f"(1 / {x})", "clone": lambda x, *_: x, "copy": lambda x, y: y,
    "contiguous": lambda x, *_: x, "to_copy": lambda x, *_: x, "_to_copy": lambda x, *_: x,
    "add": _with_alpha("+"), "sub": _with_alpha("-"), "mul": lambda a, b: f"({a} * {b})",
    "div": lambda a, b: f"({a} / {b})",
    "rsub": lambda a, b, alpha="1.0": f"({b} - {alpha} * {a})", "pow": _power, "square": lambda x: f"({x} * {x})",
    "maximum": lambda a, b: f"max({a}, {b})", "minimum": lambda a, b: f"min({a}, {b})",
    "clamp": _clamped, "clamp_min": lambda x, low: f"max({x}, {low})", "clamp_max": lambda x, high: f"min({x}, {high})",
    "hardtanh": lambda x, low="(-1.0)", high="1.0": _clamped(x, low, high), "gelu": _gelu, "softplus": _softplus,
    "elu": _elu, "celu": _elu, "hardsigmoid": lambda x: _clamped(f"({x} / 6 + 0.5)", "0", "1"),
    "hardswish": lambda x: f"({x} * min(max({x} + 3, 0), 6) / 6)",
    "leaky_relu": lambda x, slope="0.01": f"select({x} > 0, {x}, {slope} * {x})",
    "mish": lambda x: f"({x} * tanh(log(1 + exp(min({x}, 30)))))", "log1p": lambda x: f"log(1 + {x})",
    "xlogy": lambda x, y: f"select({x} == 0, 0, {x} * log({y}))",
    "log_sigmoid_forward": lambda x: f"(-log(1 + exp(-{x})))",
    "where": lambda mask, a, b: f"select({mask} != 0, {a}, {b})",
    "masked_fill": lambda x, mask, value: f"select({mask} != 0, {value}, {x})",
}  # fmt: skip
