"""Words for what goes along an axis in order: cumulative sums and their kin, places of largest and smallest values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.language.canonical import canonical_value
from sokoban.language.expression import Scan, TensorExpr, statement_text
from sokoban.language.matching import Correspondence, correspondences
from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.reference import evaluate

X = np.array([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]])


def program(text: str, **options: Any) -> TensorExpr:
    return parse_program(text, {"i": 2, "j": 3}, {}, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Y[i,j] = cumsum(j, X[i,j])", [[1, 3, 6], [4, -1, 5]]),
        ("Y[i,j] = cumsum(j, X[i,j], reverse)", [[6, 5, 3], [5, 1, 6]]),
        ("Y[i,j] = cumsum(j, X[i,j], exclusive)", [[0, 1, 3], [0, 4, -1]]),
        ("Y[i,j] = cumsum(j, X[i,j], exclusive, reverse)", [[5, 3, 0], [1, 6, 0]]),
        ("Y[i,j] = cumsum(i, X[i,j])", [[1, 2, 3], [5, -3, 9]]),
        ("Y[i,j] = cumprod(j, X[i,j], exclusive)", [[1, 1, 2], [1, 4, -20]]),
        ("Y[i,j] = cummax(j, X[i,j])", [[1, 2, 3], [4, 4, 6]]),
        ("Y[i,j] = cummin(j, -X[i,j], reverse)", [[-3, -3, -3], [-6, -6, -6]]),
        ("Y[j,i] = cumsum(j, X[i,j] * i) + 1", [[1, 5], [1, 0], [1, 6]]),
        ("Y[i] = sum(j, cumsum(j, X[i,j]))", [10, 8]),
        ("Y[i] = argmax(j, X[i,j])", [2, 2]),
        ("Y[j] = argmin([i], X[i,j])", [0, 1, 0]),
        ("Y[i] = argmax(j, X[i,j] * 0)", [0, 0]),
    ],
)
def test_values(text: str, expected: list[Any]) -> None:
    assert evaluate(program(text), {"X": X}).tolist() == expected


def test_the_first_nan_is_the_largest_and_the_smallest() -> None:
    values = np.array([[1.0, np.nan, np.nan], [np.inf, -np.inf, 2.0]])
    for function, places in (("argmax", [1, 0]), ("argmin", [1, 1])):
        assert evaluate(program(f"Y[i] = {function}(j, X[i,j])"), {"X": values}).tolist() == places


def test_places_are_integers_and_scans_keep_the_type_of_sums() -> None:
    places = program("Y[i] = argmax(j, X[i,j])", default_dtype="bfloat16")
    assert (places.output.dtype, places.accumulate) == ("int32", "float32")
    between = program("P[i] = argmax(j, X[i,j]); Y[i] = P[i] / 2", default_dtype="float16")
    assert [tensor.dtype for tensor in between.tensors] == ["float16", "int32", "float16"]
    halves = program("C[i,j] = cumsum(j, X[i,j]); Y[i,j] = C[i,j] / 2", default_dtype="float16")
    assert [tensor.dtype for tensor in halves.tensors] == ["float16", "float32", "float16"]
    whole = program("Y[i,j] = cumsum(j, X[i,j])", default_dtype="int8")
    assert (whole.output.dtype, whole.accumulate) == ("int32", "int32")


def test_scans_inside_of_values_are_statements_of_their_own_and_read_back_as_they_are_written() -> None:
    expr = program("Y[i,j] = relu(cumsum(j, X[i,j], reverse, exclusive)) * cumsum(j, X[i,j], reverse, exclusive)")
    texts = [statement_text(statement) for statement in expr.statements]
    assert texts[0] == "Y_sum[i, j] = cumsum(j, X[i, j], reverse, exclusive)" and len(texts) == 2
    again = program("; ".join(texts))
    assert again.statements == expr.statements
    assert expr.statements[0].scan == Scan("sum", "j", expr.statements[0].scan.body, True, True)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("scan", "written_out"),
    [
        ("cumsum(j, X[i,j])", "sum(k, select(k <= j, X[i,k], 0))"),
        ("cumsum(j, 2 * X[i,j], exclusive)", "2 * sum(k, select(k < j, X[i,k], 0))"),
        ("cumsum(j, X[i,j], reverse)", "sum(k, select(j <= k, X[i,k], 0))"),
        ("cummax(j, X[i,j])", "max([k], select(j >= k, X[i,k], -inf))"),
    ],
)
def test_a_scan_is_the_reduction_that_leaves_later_places_out(scan: str, written_out: str) -> None:
    pattern = canonical_value(program(f"Y[i,j] = {scan}"))
    value = canonical_value(parse_program(f"Y[i,j] = {written_out}", {"i": 2, "j": 3, "k": 3}, {}))
    assert any(correspondences(pattern, value, Correspondence(axes={"i": "i", "j": "j"})))


def test_a_positive_factor_moves_no_place() -> None:
    values = [canonical_value(program(f"Y[i] = argmax(j, {body})")) for body in ("X[i,j]", "3 * X[i,j]", "-X[i,j]")]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Y[i] = cumsum(j, X[i,j])", "axis 'j' is neither on the left-hand side nor reduced"),
        ("Y[i,j] = cumsum([j], X[i,j])", "cumsum goes along one axis; write cumsum(axis, value)"),
        ("Y[i,j] = cumsum(j)", "cumsum goes along one axis"),
        ("Y[i,j] = cumsum(k, X[i,j])", "axis 'k' of statement Y has no size"),
        ("Y[i,j] = cumsum(j, X[i,j], backwards)", "options are reverse and exclusive"),
        ("Y[i,j] = cumsum(j, X[i,j], reverse, reverse)", "options are reverse and exclusive"),
        ("Y[i,j] = cummax(j, X[i,j], exclusive)", "of no values there is no max; remove exclusive"),
        ("Y[i,j] = cumsum(j, X[i,j] > 0)", "use select(condition, 1, 0)"),
        ("Y[j] = argmax([i,j], X[i,j])", "argmax is a place along one axis, not along 2"),
        ("Y[i,j] = argmax(j, X[i,j])", "axis 'j' is reduced and also on the left-hand side"),
    ],
)
def test_errors_are_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        program(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_named_operators() -> None:
    scan = operator_from_data({"op": "scan", "function": "prod", "shape": [4, 5], "axis": 0, "reverse": True})
    assert scan.name == "scan_prod_4x5_axis0_reverse"
    assert statement_text(scan.statements[0]) == "Y[i0, i1] = cumprod(i0, X[i0, i1], reverse)"
    line = operator_from_data({"op": "scan", "function": "sum", "shape": [7], "exclusive": True, "dtype": "float16"})
    assert (line.name, line.output.dtype) == ("scan_sum_7_axis0_exclusive_float16", "float16")
    place = operator_from_data({"op": "reduce", "function": "argmin", "shape": [4, 5], "axes": [-1]})
    assert statement_text(place.statements[0]) == "Y[i0] = argmin([i1], X[i0, i1])"
    assert place.output.dtype == "int32"
    for data, message in (
        ({"op": "scan", "function": "max", "shape": [4], "exclusive": True}, "exclusive: of no values there is no max"),
        ({"op": "scan", "function": "mean", "shape": [4]}, "function: unknown function 'mean'"),
        ({"op": "reduce", "function": "argmax", "shape": [4, 5], "axes": [0, 1]}, "axes: argmax is a place along one"),
    ):
        with pytest.raises(InputError) as caught:
            operator_from_data(data)
        assert str(caught.value).startswith(message)
