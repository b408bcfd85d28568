"""Gradients of attention: the calls compute what the operators of the suite mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.calls.operators import Problem, problem, read_suite
from bench.gpu.correctness import check, random_inputs
from sokoban.kernel.attention_gradient import gradient_flops
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.operators import operator_from_data
from sokoban.language.reference import evaluate

SIZES = {"op": "attention_gradient", "b": 2, "heads": 4, "kv_heads": 2, "queries": 8, "keys": 11, "head_dim": 4,
         "value_dim": 6, "causal": True, "window": 3, "scale": -0.7, "dtype": "float16"}  # fmt: skip
PROBLEMS = [
    *read_suite("gradients", small=True),
    *(
        problem("more", {**SIZES, "of": of, "slopes": slopes, "name": f"{of}-{slopes}"})
        for of in ("queries", "keys") for slopes in (False, True)
    ),
]  # fmt: skip


@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: one.name)
def test_the_call_in_float64_is_the_operator(one: Problem) -> None:
    tensors = {name: tensor.double() for name, tensor in random_inputs(one, one.dtype, "cpu").items()}
    expr = operator_from_data(dict(one.spec))
    assert {tensor.name: tensor.caller_shape for tensor in expr.inputs} == dict(one.inputs)
    assert {tensor.name: tensor.dtype for tensor in expr.inputs} == {name: one.dtype_of(name) for name in one.inputs}
    assert (expr.output.caller_shape, expr.output.dtype) == (one.output, one.output_dtype)
    wanted: Any = evaluate(expr, {name: tensor.numpy() for name, tensor in tensors.items()})
    np.testing.assert_allclose(one.bind(tensors)().numpy(), wanted.reshape(one.output), rtol=1e-9, atol=1e-9)
    operator = expr.operator_as(AttentionGradient)
    assert operator is not None and one.flop == gradient_flops(operator)


@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: one.name)
def test_a_part_of_the_inputs_gives_these_rows_of_the_output(one: Problem) -> None:
    tensors = {name: tensor.double() for name, tensor in random_inputs(one, one.dtype, "cpu").items()}
    torch.testing.assert_close(one.bind(one.part(tensors, 1, one.output[0]))(), one.bind(tensors)()[1:])


@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: one.name)
def test_the_call_in_16_bits_is_near_enough(one: Problem) -> None:
    tensors = random_inputs(one, one.dtype, "cpu")
    assert check(one, tensors, one.bind(tensors)(), one.dtype, 1e9)["passed"]
