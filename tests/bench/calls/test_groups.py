"""Products of groups and of eight bits: the library's calls compute what the operators of the suite mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.calls.operators import Problem, problem, read_suite
from bench.gpu.correctness import check, random_inputs
from hal.support.errors import InputError
from sokoban.language.operators import operator_from_data
from sokoban.language.reference import evaluate

ROWS_OF_ODD_COUNTS: list[dict[str, Any]] = [
    {"op": "grouped_matmul", "sizes": [5, 0, 17], "tile": 8, "n": 24, "k": 16},
    {"op": "scaled_matmul", "precision": "fp8-block", "m": 3, "n": 256, "k": 384},
]
SMALL = [*read_suite("groups", small=True), *(problem("odd", {**one, "name": one["op"]}) for one in ROWS_OF_ODD_COUNTS)]


def reference(one: Problem, tensors: dict[str, torch.Tensor]) -> Any:
    """The operator in float64."""
    expr = operator_from_data(dict(one.spec))
    assert {tensor.name: tensor.caller_shape for tensor in expr.inputs} == dict(one.inputs)
    assert {tensor.name: tensor.dtype for tensor in expr.inputs} == {name: one.dtype_of(name) for name in one.inputs}
    assert (expr.output.caller_shape, expr.output.dtype) == (one.output, one.output_dtype)
    arrays = {
        each.name: (tensors[each.name] if each.name in one.numbers else tensors[each.name].double()).numpy()
        for each in expr.inputs
    }
    return evaluate(expr, {each.name: arrays[each.name].reshape(each.shape) for each in expr.inputs})


@pytest.mark.parametrize("one", SMALL, ids=lambda one: f"{one.suite}-{one.name}")
def test_the_call_in_float64_is_the_operator(one: Problem) -> None:
    tensors = random_inputs(one, one.dtype, "cpu")
    found = one.bind({name: tensor.double() for name, tensor in tensors.items()})()
    np.testing.assert_allclose(found.numpy(), reference(one, tensors).reshape(one.output), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("one", SMALL, ids=lambda one: f"{one.suite}-{one.name}")
def test_a_part_of_the_inputs_gives_these_rows_of_the_output(one: Problem) -> None:
    tensors = {name: tensor.double() for name, tensor in random_inputs(one, one.dtype, "cpu").items()}
    torch.testing.assert_close(one.bind(one.part(tensors, 1, one.output[0]))(), one.bind(tensors)()[1:])


@pytest.mark.parametrize("one", [one for one in SMALL if one.dtype == "bfloat16"], ids=lambda one: one.name)
def test_groups_of_16_bits_are_pytorchs_product(one: Problem) -> None:
    tensors = random_inputs(one, one.dtype, "cpu")
    assert check(one, tensors, one.bind(tensors)(), one.dtype, 1e9)["passed"]


def test_tiles_of_a_group_follow_each_other() -> None:
    for one in SMALL:
        groups = random_inputs(one, one.dtype, "cpu").get("G", torch.zeros(1))
        assert (groups.diff() >= 0).all()


def test_groups_of_eight_bits_have_no_call_of_pytorchs() -> None:
    (one,) = (one for one in SMALL if one.name == "experts_gate_e4m3")
    with pytest.raises(InputError, match="groups of rows with scales of blocks"):
        one.bind(random_inputs(one, one.dtype, "cpu"))


@pytest.mark.parametrize(
    "one", [one for one in read_suite("groups") if one.op == "scaled_matmul"], ids=lambda one: one.name
)
def test_scales_of_blocks_lie_as_pytorch_asks(one: Problem) -> None:
    """By its own checks of shapes and strides, which need no numbers."""
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, one.dtype_of(name)), device="meta")
        for name, shape in one.inputs.items()
    }
    found = one.bind(tensors)()
    assert (tuple(found.shape), found.dtype) == (one.output, torch.bfloat16)


def test_other_precisions_have_no_call() -> None:
    with pytest.raises(InputError, match="no PyTorch call for products of nvfp4"):
        problem("x", {"op": "scaled_matmul", "name": "s", "m": 4, "n": 128, "k": 256, "precision": "nvfp4"})


def test_groups_without_sizes_are_refused() -> None:
    spec = {"op": "grouped_matmul", "name": "g", "m": 64, "groups": 4, "n": 8, "k": 8, "distribution": "power_law_1.2"}
    with pytest.raises(InputError, match="groups by a power law"):
        problem("x", spec)


def test_bytes_of_each_input_are_of_its_type() -> None:
    one = problem("x", {"op": "scaled_matmul", "precision": "fp8-block", "name": "s", "m": 4, "n": 128, "k": 256})
    assert one.compulsory_bytes == 4 * 256 + 128 * 256 + 4 * (2 * 4 + 2) + 2 * 4 * 128
    assert one.flop == 2 * 4 * 128 * 256
