"""Outputs are compared with a float64 reference, wholly or in evenly spaced parts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bench.calls.operators import Problem, problem
from bench.gpu.correctness import check, parts, random_inputs


def product(m: int = 40, **more: Any) -> Problem:
    return problem("x", {"op": "matmul", "name": "p", "m": m, "n": 6, "k": 5, **more})


def test_a_right_output_passes_with_its_error() -> None:
    what = product()
    inputs = random_inputs(what, "float32", "cpu")
    found = check(what, inputs, what.bind(inputs)(), "float32", 1e9)
    assert found["passed"] and found["share"] == 1.0 and 0 <= found["relative_error"] < 1e-6


@pytest.mark.parametrize(("row", "passed"), [(0, False), (39, False), (17, False)])
def test_one_wrong_element_fails_wherever_it_is(row: int, passed: bool) -> None:
    what = product()
    inputs = random_inputs(what, "float32", "cpu")
    out = what.bind(inputs)()
    out[row, 2] += 0.1
    assert check(what, inputs, out, "float32", 1e9)["passed"] is passed


def test_an_output_that_was_not_written_fails_without_an_error() -> None:
    what = product()
    inputs = random_inputs(what, "float32", "cpu")
    out = torch.full(what.output, float("nan"))
    found = check(what, inputs, out, "float32", 1e9)
    assert (found["passed"], found["relative_error"]) == (False, None)


def test_half_precision_is_held_to_its_own_tolerance() -> None:
    what = product(dtype="float16")
    inputs = random_inputs(what, "float16", "cpu")
    found = check(what, inputs, what.bind(inputs)(), "float16", 1e9)
    assert found["passed"] and 1e-5 < found["relative_error"] < found["tolerance"] == 2e-2
    assert not check(what, inputs, what.bind(inputs)(), "float32", 1e9)["passed"]


def test_a_reference_that_would_take_too_long_is_compared_in_spaced_parts() -> None:
    what = product(m=1000)
    per_row = 2 * 6 * 5
    found = parts(what, 100 * per_row)
    assert found[0][0] == 0 and found[-1][1] == 1000
    assert sum(stop - start for start, stop in found) <= 100
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))
    share = check(what, random_inputs(what, "float32", "cpu"), torch.zeros(1000, 6), "float32", 100 * per_row)["share"]
    assert 0.05 < share <= 0.1


def test_an_operator_that_cannot_be_taken_apart_is_compared_wholly() -> None:
    what = problem("x", {"op": "softmax", "name": "s", "shape": [7, 5], "axis": 0})
    assert parts(what, 1.0) == [(0, 7)]


def test_an_output_of_another_shape_is_refused() -> None:
    what = product()
    with pytest.raises(ValueError, match=r"the output has shape \(6, 40\), not \(40, 6\)"):
        check(what, random_inputs(what, "float32", "cpu"), torch.zeros(6, 40), "float32", 1e9)


def test_functions_that_need_positive_inputs_get_them() -> None:
    what = problem("x", {"op": "elementwise", "name": "r", "function": "rsqrt", "shape": [50]})
    assert bool((random_inputs(what, "float32", "cpu")["X"] > 0).all())
