"""Functions that LLVM would call libm for, element by element, as arithmetic that runs in vectors.

float32 only, float64 keeps libm's functions. exp by the reduction and the polynomial of Cephes (S. Moshier), within two
units in the last place; tanh and erf by the rational functions of Eigen, within 5e-7.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.tir import values
from codegen.tir.statements import local_buffer
from codegen.tir.values import Expr
from sokoban.language.expression import Call, Load, Value, loads, walk
from sokoban.language.functions import FUNCTIONS, PARAMETERS, with_arguments

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
#: The larger and the smaller of two numbers, NaN where one of them is.
CHOSEN: values.Choices = {each: partial(values.chosen, each) for each in ("max", "min")}
_INSTEAD = {_CHOICE: tirx.Select, **CHOSEN}


@dataclass(frozen=True)
class _Result:
    """A part of a value that is computed before the value.

    Attributes:
        place: a load of no tensor that stands for it in what is computed afterwards.
        function: of :data:`_FUNCTIONS`, written out; empty where the argument itself is the result.
        argument: over loads and places.
        in_register: True if the argument lies in a register.
    """

    place: Load
    function: str
    argument: Value
    in_register: bool


class VectorValue:
    """A value that the lanes of a vector compute, each at a point of its own.

    In float32 every function of `_FUNCTIONS` is written out as arithmetic, in float64 by TVM. Its argument is bound to
    a variable, into which TVM's analyzer substitutes whatever earlier variables are bound to, or read several times:
    nested functions would grow by a factor with every level. So an argument that is itself made by such functions lies
    in a register, a local buffer, of which the analyzer knows nothing; and so does one that a composed function, such
    as GELU, reads several times.

    LLVM takes a branch around each lane of a vector for a selection of which one side alone is computed, so both are
    where neither reads outside of a tensor.

    Args:
        value: the value over axes and loads.
        dtype: computed in.
        lanes: of the vector.
        is_inside: True for a load that may be read at every point of the axes.
    """

    def __init__(self, value: Value, dtype: str, lanes: int, is_inside: Callable[[Load], bool]) -> None:
        value = _with_choices(value, is_inside)
        self.dtype = dtype
        self.value, self._results = _written_out(value) if dtype.startswith("float") else (value, [])
        count = sum(result.in_register for result in self._results)
        self._registers = [local_buffer(f"argument_{number}", lanes, dtype) for number in range(count)]

    def at(self, axes: Mapping[str, Expr], read: Callable[[Load], Expr], lane: Expr) -> Expr:
        """The result of a lane; arguments of functions are stored by statements in front of it.

        Args:
            axes: variables or numbers by axis.
            read: gives the element of a load.
            lane: number of the lane.
        """
        computed: dict[Load, Expr] = {}
        registers = iter(self._registers)

        def evaluated(value: Value) -> Expr:
            return values.evaluate(value, axes, read_or_result, self.dtype, _INSTEAD)

        def read_or_result(load: Load) -> Expr:
            return computed[load] if load in computed else read(load)

        for result in self._results:
            argument = evaluated(result.argument)
            if result.in_register:
                register = next(registers)
                T.buffer_store(register, argument, [lane])
                argument = register[lane]
            computed[result.place] = self._result(result.function, argument)
        return evaluated(self.value)

    def _result(self, function: str, argument: Expr) -> Expr:
        if not function:
            return argument
        if self.dtype == "float32":
            return _FUNCTIONS[function](argument)
        return values.evaluate(Call(function, (_ARGUMENT,)), {}, lambda _: argument, self.dtype)


def _written_out(value: Value) -> tuple[Value, list[_Result]]:
    """A value of primitives over loads and places, and the results that these stand for, in order; equal ones once."""
    results: list[_Result] = []
    prepared: dict[Value, Value] = {}
    arithmetic: set[Load] = set()  # places of what lies in no register

    def has_arithmetic(node: Value) -> bool:
        return any(load in arithmetic for load in loads(node))

    def place_of(argument: Value, function: str = "") -> Load:
        place = Load(f"|{len(results)}", ())
        results.append(_Result(place, function, argument, has_arithmetic(argument)))
        if function:
            arithmetic.add(place)
        return place

    def prepare(node: Value) -> Value:
        if not isinstance(node, Call):
            return node
        if node not in prepared:
            prepared[node] = prepare_call(node)
        return prepared[node]

    def prepare_call(node: Call) -> Value:
        arguments = tuple(map(prepare, node.arguments))
        definition = None if node.function == _CHOICE else FUNCTIONS[node.function].value
        if definition is not None:
            reads = Counter(node for node in walk(definition) if isinstance(node, Load))
            arguments = tuple(
                place_of(argument) if reads[parameter] > 1 and has_arithmetic(argument) else argument
                for parameter, argument in zip(PARAMETERS, arguments, strict=False)
            )
            return prepare(with_arguments(definition, arguments))
        return place_of(arguments[0], node.function) if node.function in _FUNCTIONS else Call(node.function, arguments)

    return prepare(value), results


def _nested(value: Value) -> bool:
    """True if arguments of functions lie in registers."""
    return any(result.in_register for result in _written_out(value)[1])


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
    variable = tirx.Var("held", "float32")
    return tirx.Let(variable, value, body(variable))


def _exp(x: Expr) -> Expr:
    return _with(x, lambda given: tirx.Select(
        given > _number(_EXP_RANGE[1]),
        _number(math.inf),
        _with(values.chosen("max", given, _number(_EXP_RANGE[0])), lambda bounded: _with(
            tirx.floor(bounded * _number(math.log2(math.e)) + _number(0.5)),
            lambda power: _with(bounded - power * _number(_LN2[0]) - power * _number(_LN2[1]), lambda reduced: _scaled(
                _polynomial(_EXP, reduced) * reduced * reduced + reduced + _number(1.0), power
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
    bounded = values.chosen("max", values.chosen("min", x, _number(bound)), _number(-bound))
    return _with(
        bounded,
        lambda limited: _with(
            limited * limited, lambda square: limited * _polynomial(above, square) / _polynomial(below, square)
        ),
    )


#: Stands for the argument of a function.
_ARGUMENT = Load("|argument", ())

_FUNCTIONS: Mapping[str, Callable[[Expr], Expr]] = {
    "exp": _exp,
    "tanh": lambda x: _rational(x, *_TANH),
    "erf": lambda x: _rational(x, *_ERF),
}
