"""Test data: repeatable, in range, and such that what a kernel gets wrong shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sokoban.language.operators import operator_from_data
from sokoban.language.parser import parse_program
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate, round_to_dtype


def test_random_inputs_are_repeatable_representable_and_in_range() -> None:
    expr = parse_program(
        "T[i] = A[i] + 1; Y[i] = log(T[i]) / B[i] + C[i]", {"i": 1000}, {"A": "float16", "B": "bfloat16"}
    )
    inputs, again = random_inputs(expr, seed=1), random_inputs(expr, seed=1)
    for tensor in expr.inputs:
        np.testing.assert_array_equal(inputs[tensor.name], again[tensor.name])
        np.testing.assert_array_equal(inputs[tensor.name], round_to_dtype(inputs[tensor.name], tensor.dtype))
    assert min(inputs["A"].min(), inputs["B"].min()) >= 0.5 and inputs["C"].min() < -0.9
    assert not np.array_equal(inputs["C"], random_inputs(expr, seed=2)["C"])


def test_integers_are_drawn_from_all_of_their_range_and_summed_exactly() -> None:
    expr = operator_from_data({"op": "matmul", "m": 20, "n": 30, "k": 4096, "dtype": "int8"})
    inputs = random_inputs(expr, 0)
    assert {float(np.abs(array).max()) for array in inputs.values()} == {127.0}
    exact = inputs["A"].astype(np.int64) @ inputs["B"].astype(np.int64)
    np.testing.assert_array_equal(evaluate(expr, inputs), exact)
    halves = operator_from_data({"op": "matmul", "m": 2, "n": 3, "k": 4096, "dtype": "int8", "output_dtype": "float16"})
    assert np.abs(evaluate(halves, random_inputs(halves, 0))).max() < 65504


def test_rows_whose_largest_element_is_taken_have_one_that_stands_out() -> None:
    softmax = operator_from_data({"op": "softmax", "shape": [6, 50]})
    values = random_inputs(softmax, 3)["X"]
    assert (values.max(axis=1) > 90).tolist() == [False, True] * 3
    assert ((values > 90).sum(axis=1) <= 1).all()
    largest = operator_from_data({"op": "reduce", "function": "max", "shape": [6, 50, 7], "axes": [0, 2]})
    rows = random_inputs(largest, 3)["X"].swapaxes(0, 1).reshape(50, 42)
    assert (np.sort(rows, axis=1)[:, -1] - np.sort(rows, axis=1)[:, -2] > 0.01).mean() > 0.9
    assert (
        random_inputs(operator_from_data({"op": "reduce", "function": "sum", "shape": [6, 50], "axes": [1]}), 3)[
            "X"
        ].max()
        <= 1
    )


@pytest.mark.parametrize(
    "changes", [{}, {"page": 8, "pool": 20}, {"epilogue": ["relu"]}], ids=["plain", "pages", "relu"]
)
def test_the_largest_logit_of_a_row_comes_anywhere(changes: dict[str, Any]) -> None:
    sizes = {"b": 1, "heads": 2, "queries": 128, "head_dim": 16}
    inputs = random_inputs(operator_from_data({"op": "attention", **sizes, **changes}), 0)
    queries, keys = (np.abs(inputs[name]).max(axis=-1).ravel() > 2 for name in "QK")
    assert 0.3 < queries.mean() < 0.7 and 0.01 < keys.mean() < 0.1
    assert np.abs(inputs["V"]).max() <= 1.0


def test_products_without_a_softmax_have_no_long_rows() -> None:
    for text in ("Y[i] = max(j, sum(k, A[i,k] * B[j,k]))", "Y[i,j] = exp(sum(k, A[i,k] * B[j,k]))"):
        expr = parse_program(text, {"i": 16, "j": 16, "k": 8}, {})
        assert all(np.abs(values).max() <= 1.5 for values in random_inputs(expr, 0).values())


def logits_by(dtype: str) -> dict[str, Any]:
    """Inputs of a softmax over logits of ``A`` and ``B``, of which both have the type."""
    text = "S[i,j] = sum(k, A[i,k] * B[j,k]) * 0.125; M[i] = max(j, S[i,j]); E[i,j] = exp(S[i,j] - M[i])"
    text += "; T[i] = sum(j, E[i,j]); Y[i,j] = E[i,j] / T[i]"
    return random_inputs(parse_program(text, {"i": 64, "j": 96, "k": 64}, {"A": dtype, "B": dtype}), 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_logits_of_some_rows_are_lower_than_float32_has_exponentials(dtype: str) -> None:
    inputs = logits_by(dtype)
    short = np.abs(inputs["B"]).max(axis=1) < 2
    largest = (inputs["A"] @ inputs["B"][short].T * 0.125).max(axis=1)
    assert 0.1 < (largest < -87.4).mean() < 0.4


def test_logits_of_narrow_types_are_made_of_numbers_that_these_have() -> None:
    assert all(np.isfinite(values).all() for values in logits_by("float8_e4m3fn").values())
    whole = logits_by("int8")
    logits = whole["A"] @ whole["B"].T * 0.125
    assert 6 < logits.std() < 24 and all(len(np.unique(values)) > 5 for values in whole.values())
