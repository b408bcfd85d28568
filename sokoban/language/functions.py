"""The point-wise functions of the language, each defined once: its value from primitives, and its derivatives.

A *primitive* is what every backend has to know: a line in its table of instructions or of its own words. A *composed*
function is written from others here, and a backend that knows nothing of it computes those; one that has an instruction
for it (a near sigmoid, an inverse root) keeps an entry of its own. Costs follow the same way
(:func:`sokoban.kernel.instructions.value_instructions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from sokoban.language.expression import Call, Constant, Load, Value, rewrite, walk

#: What definitions are written over: the first, the second and the third argument.
X, Y, Z = PARAMETERS = (Load("$0", ()), Load("$1", ()), Load("$2", ()))

ZERO, ONE = Constant(0.0), Constant(1.0)


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function.

    Attributes:
        name: its word in expressions.
        arity: how many arguments it takes.
        value: what it is, over :data:`PARAMETERS`; None for a primitive.
        derivatives: after each argument, over :data:`PARAMETERS`; empty for zero, as frameworks have it of functions
            that round or compare. A composed function without any is differentiated as what it is composed of.
        positive: places of arguments that have to be above zero.
        is_elementwise: whether the named operator ``elementwise`` takes it.
        is_activation: whether it is a step of an epilogue.
    """

    name: str
    arity: int = 1
    value: Value | None = None
    derivatives: tuple[Value, ...] = ()
    positive: tuple[int, ...] = ()
    is_elementwise: bool = True
    is_activation: bool = False


def call(function: str, *arguments: Value | float) -> Call:
    """A call, numbers taken as constants.

    >>> from sokoban.language.expression import value_text
    >>> value_text(call("max", Load("A", ()), 0.0))
    'max(A[], 0)'
    """
    return Call(function, tuple(Constant(a) if isinstance(a, float) else a for a in arguments))


def _step(comparison: str, a: Value, b: Value | float, otherwise: float = 0.0) -> Value:
    return call("select", call(comparison, a, b), 1.0, otherwise)


def _primitives() -> Iterator[Function]:
    """Functions that backends know."""
    yield Function(name="add", arity=2, derivatives=(ONE, ONE))
    yield Function(name="sub", arity=2, derivatives=(ONE, Constant(-1.0)))
    yield Function(name="mul", arity=2, derivatives=(Y, X))
    quotient = call("neg", call("div", X, call("mul", Y, Y)))
    yield Function(name="div", arity=2, derivatives=(call("div", 1.0, Y), quotient), positive=(1,))
    yield Function(name="neg", derivatives=(Constant(-1.0),))
    power = call("mul", Y, call("pow", X, call("sub", Y, 1.0)))
    exponent = call("mul", call("pow", X, Y), call("log", X))
    yield Function(name="pow", arity=2, derivatives=(power, exponent), positive=(0, 1))
    yield Function(name="min", arity=2, derivatives=(_step("le", X, Y), _step("lt", Y, X)))
    yield Function(name="max", arity=2, derivatives=(_step("ge", X, Y), _step("gt", Y, X)))
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or"):
        yield Function(name=name, arity=2, is_elementwise=False)
    yield Function(name="not", is_elementwise=False)
    yield Function(name="select", arity=3, is_elementwise=False)
    yield Function(name="abs", derivatives=(_step("ge", X, 0.0, -1.0),))
    yield Function(name="exp", derivatives=(call("exp", X),))
    yield Function(name="log", derivatives=(call("div", 1.0, X),), positive=(0,))
    yield Function(name="sqrt", derivatives=(call("mul", 0.5, call("rsqrt", X)),), positive=(0,))
    tanh = call("tanh", X)
    yield Function(name="tanh", derivatives=(call("sub", 1.0, call("mul", tanh, tanh)),), is_activation=True)
    bell = call("exp", call("neg", call("mul", X, X)))
    yield Function(name="erf", derivatives=(call("mul", 2 / math.sqrt(math.pi), bell),))
    yield Function(name="sin", derivatives=(call("cos", X),))
    yield Function(name="cos", derivatives=(call("neg", call("sin", X)),))
    yield Function(name="floor")
    yield Function(name="ceil")


def _composed() -> Iterator[Function]:
    """Functions written from primitives: a new function is a line here."""
    yield Function(
        name="rsqrt", value=call("div", 1.0, call("sqrt", X)), positive=(0,),
        derivatives=(call("div", call("mul", -0.5, call("rsqrt", X)), X),),
    )  # fmt: skip
    yield Function(name="relu", value=call("max", X, 0.0), derivatives=(_step("gt", X, 0.0),), is_activation=True)
    raised = call("add", 1.0, call("exp", call("neg", X)))
    sigmoid = call("sigmoid", X)
    slope = call("mul", sigmoid, call("sub", 1.0, sigmoid))
    yield Function(name="sigmoid", value=call("div", 1.0, raised), derivatives=(slope,), is_activation=True)
    yield Function(
        name="silu", value=call("div", X, raised), is_activation=True,
        derivatives=(call("add", sigmoid, call("mul", X, slope)),),
    )  # fmt: skip
    # The exact one: the normal distribution's share below x; its derivative has that and the density.
    below = call("add", 1.0, call("erf", call("mul", X, math.sqrt(0.5))))
    density = call("mul", 1 / math.sqrt(2 * math.pi), call("exp", call("mul", -0.5, call("mul", X, X))))
    yield Function(
        name="gelu", value=call("mul", call("mul", 0.5, X), below), is_activation=True,
        derivatives=(call("add", call("mul", 0.5, below), call("mul", X, density)),),
    )  # fmt: skip


#: Every function by its name: the whole vocabulary of :class:`sokoban.language.expression.Call`.
FUNCTIONS: Mapping[str, Function] = {function.name: function for function in (*_primitives(), *_composed())}


def with_arguments(definition: Value, arguments: Sequence[Value]) -> Value:
    """A definition over :data:`PARAMETERS` with ``arguments`` in their places."""
    return rewrite(definition, dict(zip(PARAMETERS, arguments, strict=False)))


def expanded(value: Call) -> Value:
    """A call of a composed function as what it is composed of, a call of a primitive as it is.

    >>> from sokoban.language.expression import value_text
    >>> value_text(expanded(call("relu", Load("A", ()))))
    'max(A[], 0)'
    """
    definition = FUNCTIONS[value.function].value
    return value if definition is None else with_arguments(definition, value.arguments)


@cache
def primitives_of(function: str) -> frozenset[str]:
    """The primitives that a function is composed of; itself where it is one.

    >>> sorted(primitives_of("gelu"))
    ['add', 'erf', 'mul']
    """
    definition = FUNCTIONS[function].value
    if definition is None:
        return frozenset({function})
    called = {node.function for node in walk(definition) if isinstance(node, Call)}
    return frozenset().union(*map(primitives_of, called))


def place_of(parameter: Load) -> int:
    """Which argument a parameter of a definition stands for, from 0."""
    return int(parameter.tensor[1:])
