"""Functions that LLVM would call libm for, element by element, as arithmetic that runs in vectors.

float32 only, float64 keeps libm's functions. exp by the reduction and the polynomial of Cephes (S. Moshier), within two
units in the last place; tanh and erf by the rational functions of Eigen, within 5e-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.tir import values
from codegen.tir.statements import local_buffer
from codegen.tir.values import Expr
from sokoban.language.expression import Call, Load, Value, loads, walk
from sokoban.language.functions import FUNCTIONS, expanded, primitives_of

#: exp(r) = 1 + r + r^2 * polynomial(r), highest power first, for |r| <= ln(2) / 2.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
#: ln(2) as a number of few digits, whose multiples are exact, and the rest.
_LN2 = (0.693359375, -2.12194440e-4)
#: Beyond these exp is infinite, or smaller than any normal number.
_EXP_RANGE = (-87.3365478515625, 88.72283172607422)
#: tanh and erf as x * p(x^2) / q(x^2) up to where a float32 rounds them to one: (bound, p, q).
_TANH = (
    7.99881172180175781,
    (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-8,
     1.48572235717979e-5, 6.37261928875436e-4, 4.89352455891786e-3),
    (1.19825839466702e-6, 1.18534705686654e-4, 2.26843463243900e-3, 4.89352518554385e-3),
)  # fmt: skip
_ERF = (
    4.0,
    (-2.72614225801306e-10, 2.77068142495902e-8, -2.10102402082508e-6, -5.69250639462346e-5,
     -7.34990630326855e-4, -2.95459980854025e-3, -1.60960333262415e-2),
    (-1.45660718464996e-5, -2.13374055278905e-4, -1.68282697438203e-3, -7.37332916720468e-3,
     -1.42647390514189e-2),
)  # fmt: skip


#: The function of a choice between two values that may both be computed, so that lanes of a vector choose each.
_CHOICE = "choice"
_INSTEAD = {_CHOICE: tirx.Select}


class VectorValue:
    """A value that the lanes of a vector compute, each at a point of its own.

    In float32 every function of `_FUNCTIONS` is written out as arithmetic. Its argument is bound to a variable, into
    which TVM's analyzer substitutes whatever earlier variables are bound to: nested functions would grow by a factor
    with every level. So an argument that is itself made by such functions lies in a register, a local buffer, of which
    the analyzer knows nothing.

    LLVM takes a branch around each lane of a vector for a selection of which one side alone is computed, so both are
    where neither reads outside of a tensor.

    Args:
        value: the value over axes and loads.
        dtype: computed in.
        lanes: of the vector.
        is_inside: True for a load that may be read at every point of the axes.
    """

    def __init__(self, value: Value, dtype: str, lanes: int, is_inside: Callable[[Load], bool]) -> None:
        self.value, self.dtype = _with_choices(value, is_inside), dtype
        count = _nested(self.value) if dtype == "float32" else 0
        self._registers = [local_buffer(f"argument_{number}", lanes, dtype) for number in range(count)]

    def at(self, axes: Mapping[str, Expr], read: Callable[[Load], Expr], lane: Expr) -> Expr:
        """The result of a lane; arguments of functions are stored by statements in front of it.

        Args:
            axes: variables or numbers by axis.
            read: gives the element of a load.
            lane: number of the lane.
        """
        if self.dtype != "float32":
            return values.evaluate(self.value, axes, read, self.dtype, _INSTEAD)
        written_out: dict[Load, Expr] = {}
        registers = iter(self._registers)

        def prepared(node: Value) -> Value:
            if not isinstance(node, Call):
                return node
            if node.function != _CHOICE and FUNCTIONS[node.function].value is not None:
                return prepared(expanded(node))
            node = Call(node.function, tuple(map(prepared, node.arguments)))
            if node.function not in _FUNCTIONS:
                return node
            argument = values.evaluate(node.arguments[0], axes, read_or_result, self.dtype, _INSTEAD)
            if any(load in written_out for load in loads(node.arguments[0])):
                register = next(registers)
                T.buffer_store(register, argument, [lane])
                argument = register[lane]
            # A load that is of no tensor stands for the result.
            place = Load(f"|{len(written_out)}", ())
            written_out[place] = _FUNCTIONS[node.function](argument)
            return place

        def read_or_result(load: Load) -> Expr:
            return written_out[load] if load in written_out else read(load)

        return values.evaluate(prepared(self.value), axes, read_or_result, self.dtype, _INSTEAD)


def _nested(value: Value) -> int:
    """Number of functions written out whose argument others of them are in."""
    if not isinstance(value, Call):
        return 0
    if value.function != _CHOICE and FUNCTIONS[value.function].value is not None:
        return _nested(expanded(value))
    is_nested = value.function in _FUNCTIONS and any(map(_is_written_out, walk(value.arguments[0])))
    return is_nested + sum(map(_nested, value.arguments))


def _is_written_out(node: Value) -> bool:
    return isinstance(node, Call) and not _FUNCTIONS.keys().isdisjoint(
        {_CHOICE} if node.function == _CHOICE else primitives_of(node.function)
    )


def _with_choices(value: Value, is_inside: Callable[[Load], bool]) -> Value:
    """A value whose selections are choices where both sides may be computed: reads outside cost a branch each, and
    registers are set whatever is selected."""
    if not isinstance(value, Call):
        return value
    arguments = tuple(_with_choices(argument, is_inside) for argument in value.arguments)
    is_choice = value.function == "select" and (
        all(map(is_inside, (*loads(arguments[1]), *loads(arguments[2])))) or any(map(_nested, arguments[1:]))
    )
    return Call(_CHOICE if is_choice else value.function, arguments)


def _number(value: float) -> Expr:
    return tirx.const(value, "float32")


def _polynomial(coefficients: Sequence[float], x: Expr) -> Expr:
    total = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + _number(coefficient)
    return total


def _with(value: Expr, body: Callable[[Any], Expr]) -> Expr:
    """``body`` of a value that is computed once."""
    held = tirx.Var("held", "float32")
    return tirx.Let(held, value, body(held))


def _exp(x: Expr) -> Expr:
    return _with(x, lambda given: tirx.Select(
        given > _number(_EXP_RANGE[1]),
        _number(math.inf),
        _with(tirx.max(given, _number(_EXP_RANGE[0])), lambda bounded: _with(
            tirx.floor(bounded * _number(math.log2(math.e)) + _number(0.5)),
            lambda power: _with(bounded - power * _number(_LN2[0]) - power * _number(_LN2[1]), lambda rest: _scaled(
                _polynomial(_EXP, rest) * rest * rest + rest + _number(1.0), power
            )),
        )),
    ))  # fmt: skip


def _scaled(value: Expr, power: Expr) -> Expr:
    """``value`` times two to a whole ``power`` of at most 128, the exponent written into the bits of a float32."""
    half = _number(0.5)
    bits = (power.astype("int32") + 126) << 23
    return value * tirx.reinterpret("float32", bits) / half


def _rational(x: Expr, bound: float, above: Sequence[float], below: Sequence[float]) -> Expr:
    """x * p(x^2) / q(x^2), for x beyond the bound its value there."""
    bounded = tirx.max(tirx.min(x, _number(bound)), _number(-bound))
    return _with(
        bounded,
        lambda held: _with(held * held, lambda square: held * _polynomial(above, square) / _polynomial(below, square)),
    )


_FUNCTIONS: Mapping[str, Callable[[Expr], Expr]] = {
    "exp": _exp,
    "tanh": lambda x: _rational(x, *_TANH),
    "erf": lambda x: _rational(x, *_ERF),
}
