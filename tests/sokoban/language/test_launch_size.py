"""Sizes that are known at launch: how they are written, where they may stand, and the operator of one size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.language.expression import LaunchSize
from sokoban.language.launch_size import at_size, has_rows
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

PRODUCT = {"op": "matmul", "m": {"up to": 48, "multiple": 4}, "n": 6, "k": 5, "epilogue": ["relu"]}


def test_a_named_operator_knows_its_size_at_launch() -> None:
    expr = operator_from_data(PRODUCT)
    assert expr.launch_size == LaunchSize("m", 48, 4) and expr.sizes == {"m": 48, "n": 6, "k": 5}
    assert [tensor.name for tensor in expr.tensors if has_rows(expr, tensor)] == ["A", "C", "Out"]


def test_an_expression_does_too() -> None:
    expr = operator_from_data({"expr": "Y[i,j] = relu(X[i,j])", "sizes": {"i": {"up to": 9}, "j": 3}})
    assert expr.launch_size == LaunchSize("i", 9)


def test_the_first_extent_of_a_shape_may_be_left_to_the_launch() -> None:
    expr = operator_from_data({"op": "layer_norm", "shape": [{"up to": 9}, 2, 3]})
    assert expr.launch_size == LaunchSize("i0", 9)
    assert at_size(expr, 4).tensors == operator_from_data({"op": "layer_norm", "shape": [4, 2, 3]}).tensors


def test_places_have_a_size_that_the_tensor_read_there_has_not() -> None:
    data = {"expr": "Y[t,d] = E[I[t], d]", "sizes": {"t": {"up to": 9}, "d": 3}, "shapes": {"E": [5, 3]}}
    expr = operator_from_data(data)
    assert {tensor.name for tensor in expr.tensors if has_rows(expr, tensor)} == {"I", "Y"}
    assert at_size(expr, 4).tensor_by_name["E"].shape == (5, 3)


def test_the_operator_of_one_size_is_that_of_a_number() -> None:
    small = at_size(operator_from_data(PRODUCT), 8)
    same = operator_from_data({**PRODUCT, "m": 8})
    assert small.launch_size is None and small.tensors == same.tensors and small.axes == same.axes
    inputs = random_inputs(same, 0)
    assert np.array_equal(evaluate(small, inputs), evaluate(same, inputs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": {"up to": 10, "multiple": 4}}, "m.up to: 10 is no multiple of 4; round it up"),
        ({"m": {"up to": 0}}, "m.up to: 0 is not between 1 and 2147483647"),
        ({"m": {"up to": 4, "least": 1}}, "m.least: is no key of a size that is known at launch"),
        ({"n": {"up to": 6}}, "m and n are both left to the launch"),
        ({"m": 4, "n": {"up to": 6}}, "n: cannot be left to the launch: n is not the first dimension of B"),
        ({"m": 4, "k": {"up to": 6}}, "k: cannot be left to the launch: C is summed, or goes, along k"),
        ({"transpose_a": True}, "m: cannot be left to the launch: m is not the first dimension of A"),
        ({"m": {"most": 4}}, "m: expected `?int`?, got `?object`?"),
    ],
)
def test_where_no_such_size_may_stand_a_line_says_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        operator_from_data({**PRODUCT, **changes})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([4, {"up to": 6}], r"shape\[1\]: cannot be left to the launch: Peak is summed, or goes, along i1"),
        ([{"up to": 4}, {"up to": 6}], r"shape\[0\] and shape\[1\] are both left to the launch"),
        ([{"most": 4}, 6], r"shape\[0\].most: is no key of a size that is known at launch"),
    ],
)
def test_where_an_extent_may_not_be_left_to_the_launch_a_line_says_so(shape: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        operator_from_data({"op": "softmax", "shape": shape})


def test_sizes_that_others_follow_from_are_refused() -> None:
    convolution = {"op": "conv2d", "n": 2, "c": 4, "h": {"up to": 8}, "w": 8, "f": 4, "kh": 3, "kw": 3}
    with pytest.raises(InputError, match="h: cannot be left to the launch"):
        operator_from_data(convolution)


def test_a_size_is_checked_at_launch() -> None:
    size = LaunchSize("m", 48, 4)
    assert [size.problem(each) for each in (4, 48)] == ["", ""]
    assert size.problem(52) == "m = 52 is not between 1 and 48" and "no multiple" in size.problem(6)


def test_kernels_are_written_for_a_size_that_no_tile_divides() -> None:
    reach = LaunchSize("m", 8192).reach(8192)
    assert reach >= 8192 and all(reach % tile for tile in range(2, 17))
