"""Operators that can be judged: those whose result stays where it is when everything in between is rounded.

A sum that cancels has no digits left in any arithmetic of its types, and a plain sum of many equal terms is off by a
part of each of them. A kernel of such an operator is no witness of anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from codegen.tolerance import HALF_UNITS, relative_error
from sokoban.kernel.stages import part_of
from sokoban.language.expression import (
    Call,
    Constant,
    Reduction,
    Scan,
    Statement,
    TensorExpr,
    Value,
    loads,
)
from sokoban.language.functions import FUNCTIONS, expanded
from sokoban.language.gathers import index_tensors
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

#: Units in the last place of types that sums are kept in.
UNITS = {"float64": 2.0**-52}
OTHER_UNIT = 2.0**-23

#: Terms of a sum that are added one after the other at most, which takes memory.
MOST_TERMS = 2**23

#: By how many times what plain sums are off by a kernel's order of terms may be further off.
OTHER_ORDERS = 4.0

Arrays = Mapping[str, Any]


def unit_of(dtype: str) -> float:
    """A unit in the last place of one, of what an operator computes in."""
    return UNITS.get(dtype, OTHER_UNIT)


def shaken(
    expr: TensorExpr, inputs: Arrays, unit: float, seed: int, stored: Mapping[str, float] | None = None
) -> tuple[Any, dict[str, float]]:
    """The output of an operator when inputs and what statements make of them change as rounding changes them, and the
    largest finite number of each statement's tensor.

    A unit of the last place wherever a function gives a value, of a sum of n terms half of sqrt(n) units, and of the
    tensors named in ``stored`` the part of themselves that is given there.
    """
    chance = np.random.default_rng(seed)

    def moved(values: Any, by: float = unit) -> Any:
        return values * (1 + by * chance.uniform(-1, 1, values.shape))

    places = index_tensors(expr.statements)
    parts = stored or {}
    values_by_name = {
        name: values if name in places else moved(values, max(unit, parts.get(name, 0.0)))
        for name, values in inputs.items()
    }
    largest: dict[str, float] = {}
    for statement in expr.statements:
        count = math.prod(expr.sizes[axis] for axis in statement.reduction.axes) if statement.reduction else 1
        count = expr.sizes[statement.scan.axis] if statement.scan else count
        by = max(unit, math.sqrt(count) * unit / 2, parts.get(statement.tensor, 0.0))
        rounded_inside = replace(statement, value=_rounded_inside(statement.value, unit, chance))
        values = evaluate(part_of(expr, (rounded_inside,)), values_by_name)
        largest[statement.tensor] = float(np.max(np.abs(values[np.isfinite(values)]), initial=0.0))
        values_by_name[statement.tensor] = moved(values, by)
    return values_by_name[expr.output.name], largest


def error_of_plain_sums(expr: TensorExpr) -> float:
    """Relative error of the output where every sum adds its terms one after the other in the accumulator's type.

    Terms that are equal are rounded alike: 100,000 of them are off by what no chance evens out.
    """
    values_by_name: dict[str, Any] = dict(random_inputs(expr, 0))
    expected = evaluate(expr, values_by_name)
    for statement in expr.statements:
        plain = _plain_sum(expr, statement, values_by_name)
        values_by_name[statement.tensor] = (
            evaluate(part_of(expr, (statement,)), values_by_name) if plain is None else plain
        )
    return relative_error(values_by_name[expr.output.name], expected)


def _plain_sum(expr: TensorExpr, statement: Statement, values_by_name: Arrays) -> Any:
    """The sums of a statement, term by term; None where it is none, or one of too many terms."""
    reduction = statement.reduction
    if reduction is None or reduction.function != "sum" or not expr.accumulate.startswith("float"):
        return None
    order = (*statement.axes, *reduction.axes)
    shape = tuple(expr.sizes[axis] for axis in order)
    if math.prod(shape) > MOST_TERMS:
        return None
    tensor = replace(expr.tensor_by_name[statement.tensor], shape=shape)
    others = [each for each in expr.tensors if each.name != tensor.name]
    body = Statement(statement.tensor, order, reduction.body)
    terms = evaluate(part_of(expr.rewritten(tensors=(*others, tensor), statements=(body,)), (body,)), values_by_name)
    terms = terms.reshape(*shape[: len(statement.axes)], -1).astype(expr.accumulate)
    with np.errstate(all="ignore"):
        return np.add.accumulate(terms, axis=-1)[..., -1].astype(np.float64)


def multiplied(expr: TensorExpr) -> dict[str, str]:
    """Types of 16 bits that factors of a product by matrix instructions are rounded to, by the statements that make
    them: those of the other factor."""
    made = {statement.tensor for statement in expr.statements}
    dtypes: dict[str, str] = {}
    for statement in expr.statements:
        read = () if statement.reduction is None else loads(statement.value)
        others = [expr.tensor_by_name[load.tensor].dtype for load in read if load.tensor not in made]
        widest = max(others, key=lambda dtype: HALF_UNITS.get(dtype, 0.0), default="")
        if widest in HALF_UNITS:
            dtypes |= {load.tensor: widest for load in read if load.tensor in made}
    return dtypes


def _rounded_inside(value: Value, unit: float, chance: np.random.Generator) -> Value:
    """A value in which every function's result is off by a part of a unit, as rounding has it: 1 + erf(x) of a large
    negative x, in a GELU, has no digits left."""
    if isinstance(value, Reduction | Scan):
        return replace(value, body=_rounded_inside(value.body, unit, chance))
    if not isinstance(value, Call):
        return value
    if FUNCTIONS[value.function].value is not None:
        return _rounded_inside(expanded(value), unit, chance)
    call = Call(value.function, tuple(_rounded_inside(each, unit, chance) for each in value.arguments))
    if not FUNCTIONS[value.function].is_elementwise:
        return call
    return Call("mul", (call, Constant(1 + unit * chance.uniform(-1, 1))))
