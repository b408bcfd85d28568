"""Values and places by rank: the first few of a line in their order, and the operator that is named after them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.language.canonical import canonical_value
from sokoban.language.expression import TensorExpr, statement_text
from sokoban.language.named.expressions import renamed
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

X = np.array([[1.0, 2.0, 2.0, 0.0], [3.0, -1.0, 3.0, 7.0]])


def program(text: str, **dtypes: str) -> TensorExpr:
    return parse_program(text, {"i": 2, "j": 4, "r": 3}, dtypes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Y[i,r] = max(j, X[i,j], r)", [[2, 2, 1], [7, 3, 3]]),
        ("Y[i,r] = argmax(j, X[i,j], r)", [[1, 2, 0], [3, 0, 2]]),
        ("Y[i,r] = min([j], X[i,j], r)", [[0, 1, 2], [-1, 3, 3]]),
        ("Y[r,i] = argmin([j], X[i,j], r)", [[3, 1], [0, 0], [1, 2]]),
        ("Y[i,r] = max(j, -X[i,j], r) + r", [[0, 0, 0], [1, -2, -1]]),
    ],
)
def test_values(text: str, expected: list[Any]) -> None:
    assert evaluate(program(text), {"X": X}).tolist() == expected


def test_nan_come_before_all_and_of_equals_the_first() -> None:
    values = np.array([[np.inf, np.nan, 1.0, np.nan], [5.0, 5.0, -np.inf, 5.0]])
    for function, places in (("argmax", [[1, 3, 0], [0, 1, 3]]), ("argmin", [[1, 3, 2], [2, 0, 1]])):
        assert evaluate(program(f"Y[i,r] = {function}(j, X[i,j], r)"), {"X": values}).tolist() == places


def test_places_are_integers_and_values_keep_their_type() -> None:
    places = program("Y[i,r] = argmax(j, X[i,j], r)", X="float16")
    values = program("Y[i,r] = max(j, X[i,j], r)", X="int8", Y="int32")
    assert (places.output.dtype, values.output.dtype, values.accumulate) == ("int32", "int32", "int32")


def test_ranks_stay_where_expressions_are_rewritten() -> None:
    expr = program("Y[i,r] = max(j, X[i,j], r)")
    assert statement_text(expr.statements[0]) == "Y[i, r] = max([j], X[i, j], r)"
    assert statement_text(renamed(expr, {"r": "k"}).statements[0]) == "Y[i, k] = max([j], X[i, j], k)"
    first = parse_program("Y[i] = max(j, X[i,j])", {"i": 2, "j": 4}, {})
    assert canonical_value(expr) != canonical_value(first)


def test_test_data_have_equal_values_and_none_that_are_nearly() -> None:
    expr = parse_program("Y[i,r] = argmax(j, X[i,j], r)", {"i": 4, "j": 500, "r": 3}, {})
    (values,) = random_inputs(expr, 0).values()
    differences = np.diff(np.sort(np.where(np.isfinite(values), values, 0.0)))
    assert (differences == 0).sum() > 1000 and differences[differences > 0].min() == 1 / 64


def test_test_data_have_numbers_of_all_kinds_where_places_alone_follow_from_them() -> None:
    sizes = {"i": 4, "j": 500, "r": 3}
    (values,) = random_inputs(parse_program("Y[i,r] = argmin(j, X[i,j], r)", sizes, {}), 0).values()
    for kind in (np.isnan, np.isposinf, np.isneginf):
        assert 2 <= kind(values).sum() <= 30
    for text in (
        "Y[i,r] = max(j, X[i,j], r)",
        "P[i,r] = argmax(j, X[i,j], r); S[i] = sum(j, X[i,j]); Y[i,r] = P[i,r] + S[i]",
        "Y[i,r] = argmax(j, exp(X[i,j]), r)",
    ):
        assert all(np.isfinite(values).all() for values in random_inputs(parse_program(text, sizes, {}), 0).values())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Y[i,r] = max(j, X[i,j], q)", "max has one value, and an axis of ranks behind it"),
        ("Y[r,i] = max([j], X[i,j] * r, r)", "ranks values that are others for every r"),
        ("Y[r] = max([i,j], X[i,j], r)", "ranks values along one axis, not along 2"),
        ("Y[j,r] = argmax(i, X[i,j], r)", "3 ranks of 2 values along i; use a size of r up to 2"),
        ("Y[i,r] = sum(j, X[i,j], r)", "sum reduces one value over axes"),
    ],
)
def test_errors(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        program(text)


def test_the_named_operator_writes_values_or_places() -> None:
    data = {"op": "topk", "shape": [5, 40, 3], "axis": 1, "k": 8, "dtype": "bfloat16"}
    values = operator_from_data(data)
    assert (values.name, values.output.shape, values.output.dtype) == (
        "topk_5x40x3_axis1_k8_bfloat16",
        (5, 8, 3),
        "bfloat16",
    )
    assert statement_text(values.statements[0]) == "Y[i0, r, i2] = max([i1], X[i0, i1, i2], r)"
    places = operator_from_data({**data, "largest": False, "result": "indices"})
    assert places.output.dtype == "int32"
    assert statement_text(places.statements[0]) == "Y[i0, r, i2] = argmin([i1], X[i0, i1, i2], r)"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"k": 9}, "k: 9 of 8 elements along dimension 1; use 1 to 8"),
        ({"k": 0}, "k: expected int >= 1"),
        ({"axis": 2}, "axis: dimension 2 of a tensor with 2"),
        ({"result": "both"}, "result: unknown result 'both'; use one of values, indices"),
    ],
)
def test_errors_of_the_named_operator(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        operator_from_data({"op": "topk", "shape": [4, 8], "k": 2} | changes)


@pytest.mark.parametrize("length", [100, 1000, 100_000])
def test_first_ranks_of_drawn_lines_differ_and_lie_anywhere(length: int) -> None:
    # Where all of them were equal, whatever a kernel finds would be right.
    data = {"op": "topk", "shape": [4, length], "k": 30}
    for largest in (True, False):
        values = operator_from_data(data | {"largest": largest})
        ranked = evaluate(values, random_inputs(values, 0)).reshape(4, 30)
        assert all(8 <= np.unique(line).size < 30 for line in ranked)
        places = operator_from_data(data | {"largest": largest, "result": "indices"})
        inputs = random_inputs(places, 0)
        found = evaluate(places, inputs).reshape(4, 30)
        assert all(np.ptp(line) > 0.4 * length for line in found)
        assert all((np.diff(np.sort(line)) == 1).sum() >= 5 for line in found), "some are neighbours"
        assert 1 <= np.isnan(inputs["X"]).sum() <= 40


def test_first_ranks_of_integers_differ_too() -> None:
    expr = parse_program("Y[i,r] = max(j, X[i,j], r)", {"i": 4, "j": 50_000, "r": 30}, {"X": "int8", "Y": "int32"})
    values = random_inputs(expr, 0)["X"]
    assert np.array_equal(values, np.rint(values)) and np.abs(values).max() <= 127
    assert all(np.unique(line).size > 10 for line in evaluate(expr, {"X": values}))
