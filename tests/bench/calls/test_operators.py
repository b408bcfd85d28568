"""The library's calls compute what the operators of the suites mean."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from bench.calls.operators import Problem, by_turns, problem, read_suite, shrunk
from hal.support.errors import InputError
from sokoban.language.operators import operators_from_json
from sokoban.language.reference import evaluate

EXTRA: list[dict[str, Any]] = [
    {"op": "matmul", "m": 4, "n": 3, "k": 5, "transpose_a": True, "epilogue": [{"function": "bias_add", "axis": "m"}]},
    {"op": "matmul", "m": 4, "n": 3, "k": 5, "epilogue": ["relu", {"function": "residual_add"}]},
    {"op": "batch_matmul", "b": 2, "m": 4, "n": 3, "k": 5, "epilogue": [{"function": "scale", "value": 0.5}, "silu"]},
    {"op": "conv2d", "n": 2, "c": 4, "h": 7, "w": 6, "f": 6, "kh": 3, "kw": 2, "stride": 2, "padding": "SAME",
     "groups": 2, "layout": "NHWC", "epilogue": [{"function": "bias_add", "axis": "f"}]},
    {"op": "conv2d", "n": 2, "c": 4, "h": 7, "w": 6, "f": 3, "kh": 3, "kw": 2, "padding": [1, 0, 2, 1]},
    {"op": "depthwise_conv2d", "n": 2, "c": 3, "h": 7, "w": 6, "kh": 3, "kw": 3, "layout": "NHWC", "padding": 1},
    {"op": "avg_pool2d", "n": 2, "c": 3, "h": 6, "w": 7, "kh": 3, "kw": 3, "stride": 2, "padding": "SAME"},
    {"op": "avg_pool2d", "n": 2, "c": 3, "h": 6, "w": 6, "kh": 3, "kw": 3, "stride": 2, "padding": "SAME",
     "count_include_pad": True},
    {"op": "max_pool2d", "n": 2, "c": 3, "h": 6, "w": 6, "kh": 2, "kw": 2, "stride": 2, "padding": [0, 0, 1, 1],
     "layout": "NHWC"},
    {"op": "elementwise", "function": "div", "shape": [3, 4], "scalar": True, "value": 3.0},
    {"op": "reduce", "function": "min", "shape": [3, 4], "axes": [0, 1]},
    {"op": "softmax", "shape": [3, 4, 5], "axis": 0},
    {"op": "layer_norm", "shape": [3, 4, 5], "axis": 1},
]  # fmt: skip


def small_problems() -> list[Problem]:
    suites = [one for name in ("along", "roller119", "modern", "attention") for one in read_suite(name, small=True)]
    distinct = {json.dumps({**one.spec, "name": "", "dtype": ""}, sort_keys=True): one for one in suites}
    return [*distinct.values(), *(problem("extra", {**spec, "name": f"extra{i}"}) for i, spec in enumerate(EXTRA))]


def random_inputs(one: Problem) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randint(0, one.numbers[name], shape, generator=generator)
        if name in one.numbers
        else torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in one.inputs.items()
    }


@pytest.mark.parametrize("one", small_problems(), ids=lambda one: one.name)
def test_the_librarys_call_computes_the_operator(one: Problem) -> None:
    text = json.dumps({**one.spec, "dtype": "float64", "accumulate": None, "name": "x"}).replace("null", '"float64"')
    (expr,) = operators_from_json(text.encode(), "ops.json")
    tensors = random_inputs(one)
    assert {tensor.name: tensor.caller_shape for tensor in expr.inputs} == dict(one.inputs)
    assert expr.output.caller_shape == one.output
    wanted = evaluate(expr, {name: tensor.numpy() for name, tensor in tensors.items()})
    found = one.bind(tensors)()
    assert tuple(found.shape) == one.output
    np.testing.assert_allclose(found.numpy(), wanted.reshape(one.output), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("one", small_problems(), ids=lambda one: one.name)
def test_a_part_of_the_inputs_gives_these_rows_of_the_output(one: Problem) -> None:
    tensors = random_inputs(one)
    whole = one.bind(tensors)()
    if one.leading is None or one.output[0] < 2:
        assert one.op in ("softmax", "reduce", "scan", "scatter_add") or one.output[0] == 1
        return
    rows = one.bind(one.part(tensors, 1, one.output[0]))()
    torch.testing.assert_close(rows, whole[1:])


def test_operators_take_turns_by_kind() -> None:
    first = by_turns(read_suite("roller119"))[:6]
    assert [one.op for one in first] == [
        "matmul", "conv2d", "depthwise_conv2d", "elementwise", "avg_pool2d", "reduce",
    ]  # fmt: skip
    assert sorted(one.name for one in by_turns(read_suite("modern"))) == sorted(
        one.name for one in read_suite("modern")
    )


def test_work_and_bytes_of_a_product() -> None:
    one = problem("x", {"op": "matmul", "name": "p", "m": 7, "n": 37, "k": 91, "dtype": "float16"})
    assert one.flop == 2 * 7 * 37 * 91
    assert one.compulsory_bytes == 2 * (7 * 91 + 91 * 37 + 7 * 37)


def test_work_of_a_grouped_convolution() -> None:
    spec = {"op": "conv2d", "name": "g", "n": 2, "c": 8, "h": 5, "w": 7, "f": 12, "kh": 3, "kw": 1, "groups": 4}
    assert problem("x", spec).flop == 2 * (2 * 12 * 3 * 7) * (8 // 4) * 3 * 1


def test_an_operator_is_cut_down_to_a_few_elements_with_its_window() -> None:
    spec = {"op": "conv2d", "n": 64, "c": 64, "h": 224, "w": 9, "f": 64, "kh": 7, "kw": 5, "stride": 2, "dilation": 2}
    small = shrunk(spec)
    assert small == {**spec, "n": 5, "c": 4, "h": 2 * 6 + 4, "w": 9, "f": 4}
    assert shrunk({"op": "softmax", "shape": [9, 3]})["shape"] == [6, 3]


def test_an_unknown_operator_is_refused() -> None:
    paged = {"op": "attention", "b": 1, "heads": 1, "queries": 8, "head_dim": 8, "page": 4, "pool": 2}
    with pytest.raises(InputError, match="attention over pages of a pool"):
        problem("suite", paged)
    with pytest.raises(InputError, match="attention of sequences with lengths"):
        problem("suite", {"op": "attention", "b": 1, "heads": 1, "queries": 8, "head_dim": 8, "lengths": True})
    with pytest.raises(InputError, match="operator 'expr'"):
        problem("x", {"expr": "C[i] = A[i]"})
