"""The reference evaluator against a second one that walks single points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import sokoban.language.reference
from hal.support.errors import InputError
from sokoban.language.expression import AffineIndex, AxisValue, Constant, Load, Reduction, TensorExpr, Value
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate, round_to_dtype
from tests.sokoban.strategies import operators

SCALAR: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "neg": lambda a: -a, "pow": lambda a, b: a**b, "min": min, "max": max, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b, "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": lambda a: not a,
    "select": lambda c, a, b: a if c else b, "abs": abs, "exp": math.exp, "log": math.log, "sqrt": math.sqrt,
    "rsqrt": lambda a: a**-0.5, "tanh": math.tanh, "sigmoid": lambda a: 1 / (1 + math.exp(-a)), "erf": math.erf,
    "sin": math.sin, "cos": math.cos, "floor": math.floor, "ceil": math.ceil, "relu": lambda a: max(a, 0.0),
    "gelu": lambda a: 0.5 * a * math.erfc(-a / math.sqrt(2)), "silu": lambda a: a / (1 + math.exp(-a)),
}  # fmt: skip
REDUCE: Mapping[str, Callable[..., float]] = {"sum": math.fsum, "prod": math.prod, "max": max, "min": min}


def position(index: AffineIndex, point: Mapping[str, int]) -> int:
    return index.offset + sum(coefficient * point[axis] for axis, coefficient in index.terms)


def value_at(value: Value, point: Mapping[str, int], tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> float:
    """One value at one point, straight from the definitions."""
    if isinstance(value, Constant):
        return value.value
    if isinstance(value, AxisValue):
        return position(value.index, point)
    if isinstance(value, Load):
        array = tensors[value.tensor]
        element = tuple(position(index, point) for index in value.indices)
        if all(0 <= e < extent for e, extent in zip(element, array.shape, strict=True)):
            return float(array[element])
        assert value.pad is not None
        return value.pad
    if isinstance(value, Reduction):
        ranges = [range(sizes[axis]) for axis in value.axes]
        inner = ({**point, **dict(zip(value.axes, at, strict=True))} for at in itertools.product(*ranges))
        return REDUCE[value.function]([value_at(value.body, at, tensors, sizes) for at in inner])
    return float(SCALAR[value.function](*(value_at(argument, point, tensors, sizes) for argument in value.arguments)))


def evaluate_point_by_point(expr: TensorExpr, inputs: Mapping[str, Any]) -> Any:
    tensors = dict(inputs)
    for statement in expr.statements:
        shape = tuple(expr.sizes[axis] for axis in statement.axes)
        array = np.empty(shape)
        for at in np.ndindex(shape):
            array[at] = value_at(statement.value, dict(zip(statement.axes, at, strict=True)), tensors, expr.sizes)
        tensors[statement.tensor] = array
    return tensors[expr.output.name]


@settings(max_examples=60, deadline=None)
@given(operators(max_points=400))
@pytest.mark.slow
def test_agrees_point_by_point(data: dict[str, Any]) -> None:
    expr = operator_from_data(data)
    inputs = random_inputs(expr, seed=3)
    result = evaluate(expr, inputs)
    assert result.shape == expr.output.shape and result.dtype == np.float64
    np.testing.assert_allclose(result, evaluate_point_by_point(expr, inputs), rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(operators(max_points=300))
def test_small_blocks_change_nothing(data: dict[str, Any]) -> None:
    expr = operator_from_data(data)
    inputs = random_inputs(expr, seed=3)
    expected = evaluate(expr, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sokoban.language.reference, "BLOCK_ELEMENTS", 8)
        patch.setattr(sokoban.language.reference, "MAX_EINSUM_ELEMENTS", 0)
        np.testing.assert_allclose(evaluate(expr, inputs), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "Y[i] = prod(k, X[i,k] + 2)",
        "Y[i] = X[i,i] + X[i, 3 - i]",
        "Y[i] = sum(k, X[i,k] * X[k,i] * 3)",
        "Y[i] = sum(k, X[i,k] * (k + 1))",
        "Y[i] = sum(k, X[i - k, 2*k - 3 | pad=0.5])",
        "Y[i] = min(k, X[1000000*i, k | pad=-1])",
        "Y[i] = sum(k, X[k, 0] * X[0, k])",
        "Y[i] = select(i < 2 and not X[i,0] > 0 or i == 3, floor(3*X[i,1]), ceil(3*X[i,2]))",
    ],
)
def test_unusual_accesses(text: str) -> None:
    sizes = {"i": 4, "k": 4} if "k" in text else {"i": 4}
    expr = parse_program(text, sizes, {}, shapes={"X": [4, 4]})
    inputs = random_inputs(expr, seed=5)
    np.testing.assert_allclose(evaluate(expr, inputs), evaluate_point_by_point(expr, inputs), rtol=1e-12)


def test_products_are_computed_as_products() -> None:
    expr = operator_from_data({"op": "matmul", "m": 1021, "n": 1019, "k": 1013})  # point by point: minutes
    inputs = random_inputs(expr, seed=1)
    np.testing.assert_allclose(evaluate(expr, inputs), inputs["A"] @ inputs["B"], rtol=1e-9, atol=1e-9)


def test_inputs_are_checked() -> None:
    expr = parse_program("Y[i] = X[i]", {"i": 3}, {})
    with pytest.raises(InputError) as caught:
        evaluate(expr, {})
    assert str(caught.value) == "inputs.X: is missing; give an array of shape [3]"
    with pytest.raises(InputError) as caught:
        evaluate(expr, {"X": np.zeros(5)})
    assert str(caught.value) == "inputs.X: an array of shape [5]; give [3]"


def test_bfloat16_rounds_to_nearest_even() -> None:
    # bfloat16 keeps 8 significant bits: between 1 and 2 its steps are 2**-7.
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12, -1 - 2**-9, math.inf, 0.0])
    np.testing.assert_array_equal(
        round_to_dtype(values, "bfloat16"), [1.0, 1 + 2 * 2**-7, 1 + 2**-7, -1.0, math.inf, 0.0]
    )


def test_eight_bit_floats_and_integers_round_to_what_they_hold() -> None:
    # Three and two bits of mantissa, ties to even; whole numbers.
    values = np.array([1 + 2**-4, 1 + 3 * 2**-4, -0.3, 2**-9])
    np.testing.assert_array_equal(round_to_dtype(values, "float8_e4m3fn"), [1.0, 1.25, -0.3125, 2**-9])
    np.testing.assert_array_equal(round_to_dtype(values, "float8_e5m2"), [1.0, 1.25, -0.3125, 2**-9])
    np.testing.assert_array_equal(round_to_dtype(np.array([-1.5, 0.4, 126.6]), "int8"), [-2.0, 0.0, 127.0])
