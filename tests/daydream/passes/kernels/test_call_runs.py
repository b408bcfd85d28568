"""Calls that one kernel can take the place of, and calls that none of ours can."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from daydream.graph.graph import TaskGraph
from daydream.operators.inputs import RecordedTensor
from daydream.passes.kernels.call_runs import CallRuns, is_dense
from daydream.passes.kernels.operator_calls import operator_calls
from daydream.passes.kernels.replace_operator import replaceable
from daydream.tasks.build import build_graph
from tests.daydream.traces import Builder, written

IMAGE, FILTERS, CHANNELS = [1, 3, 9, 9], [5, 3, 3, 3], [5]
OUTPUT = [1, 5, 9, 9]
CONVOLUTION = {
    "op": "conv2d", "n": 1, "c": 3, "h": 9, "w": 9, "f": 5, "groups": 1, "kh": 3, "kw": 3, "stride": 1, "dilation": 1,
    "padding": 1, "dtype": "float32",
}  # fmt: skip
BIAS = {"function": "bias_add", "axis": "f"}


def strides(dims: list[int]) -> list[int]:
    return [1] if len(dims) == 1 else [dims[1] * strides(dims[1:])[0], *strides(dims[1:])]


def recorded(*calls: tuple[str, list[list[int]], list[str]]) -> TaskGraph:
    """Calls one behind the other, 10 µs each with 2 µs between them, all in one step."""
    builder = Builder().step(1, 0.0, 12.0 * len(calls) + 10)
    for number, (name, dims, values) in enumerate(calls):
        given: dict[str, Any] = {
            "types": ["float" if each else "Scalar" for each in dims],
            "Concrete Inputs": values,
            "Input Strides": [strides(each) if each else [] for each in dims],
        }
        builder.operator(name, 5 + 12.0 * number, 10.0, dims=dims, **given)
        builder.operator("aten::inner", 6 + 12.0 * number, 4.0)
    with tempfile.TemporaryDirectory() as folder:
        return build_graph(written(Path(folder) / "trace.json", builder.document()))


def convolved(bias: bool = False) -> tuple[str, list[list[int]], list[str]]:
    dims = [IMAGE, FILTERS, CHANNELS if bias else [], [], [], [], []]
    return "aten::conv2d", dims, ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]


def normed(training: str = "False") -> tuple[str, list[list[int]], list[str]]:
    return (
        "aten::batch_norm",
        [OUTPUT, *[CHANNELS] * 4, [], [], [], []],
        ["", "", "", "", "", training, "0.1", "1e-05", "True"],
    )


def added(other: list[int] = OUTPUT, alpha: str = "1") -> tuple[str, list[list[int]], list[str]]:
    return "aten::add_", [OUTPUT, other, []], ["", "", alpha]


def activated(name: str = "aten::relu_", dims: list[int] = OUTPUT) -> tuple[str, list[list[int]], list[str]]:
    return name, [dims], [""]


def longest(*calls: tuple[str, list[list[int]], list[str]]) -> dict[str, Any] | None:
    graph = recorded(*calls)
    found = CallRuns(graph, operator_calls(graph)).at(0)
    return found[0].data if found else None


def test_a_call_is_its_outermost_operator_with_all_inside() -> None:
    calls = operator_calls(recorded(convolved(), activated()))
    assert [call.name for call in calls] == ["aten::conv2d", "aten::relu_"]
    assert [call.duration_us for call in calls] == pytest.approx([10, 10])
    assert calls[0].tail_us == pytest.approx(2)
    assert [len(call.rows) for call in calls] == [2, 2]


def test_every_prefix_of_a_chain_is_one_too() -> None:
    graph = recorded(convolved(), normed(), added(), activated())
    runs = CallRuns(graph, operator_calls(graph)).at(0)
    assert [len(run.calls) for run in runs] == [4, 3, 2, 1]
    assert [run.data.get("epilogue") for run in runs] == [
        [BIAS, {"function": "residual_add"}, "relu"], [BIAS, {"function": "residual_add"}], [BIAS], None,
    ]  # fmt: skip
    # Four calls of 10 µs, three pauses of 2 µs between them.
    assert runs[0].duration_us == pytest.approx(4 * 10 + 3 * 2)
    assert {key: value for key, value in runs[0].data.items() if key != "epilogue"} == CONVOLUTION


def test_a_batch_norm_adds_no_second_bias() -> None:
    assert longest(convolved(bias=True), normed()) == {**CONVOLUTION, "epilogue": [BIAS]}


@pytest.mark.parametrize(
    "follower",
    [
        normed(training="True"),
        added(other=[1, 5, 1, 1]),
        added(alpha="2"),
        activated(dims=[1, 5, 9, 3]),
        activated("aten::hardtanh_"),
    ],
)
def test_what_does_not_fit_ends_a_chain(follower: Any) -> None:
    assert longest(convolved(), follower) == CONVOLUTION


def test_an_activation_ends_a_chain() -> None:
    assert longest(convolved(), activated(), added()) == {**CONVOLUTION, "epilogue": ["relu"]}


def test_operators_are_listed_once_and_whole_or_call_by_call() -> None:
    graph = recorded(
        convolved(), activated(), convolved(), activated(), ("aten::softmax", [[7, 5], [], []], ["", "-1", ""])
    )
    softmax = {"op": "softmax", "shape": [7, 5], "axis": -1}
    assert replaceable(graph) == [{**CONVOLUTION, "epilogue": ["relu"]}, softmax]
    relu = {"op": "elementwise", "function": "relu", "shape": OUTPUT}
    assert replaceable(graph, fuse=False) == [CONVOLUTION, relu, softmax]


@pytest.mark.parametrize(
    ("call", "data"),
    [
        (("aten::layer_norm", [[4, 7, 5], [], [5], [5], [], []], ["", "[5]", "", "", "1e-06", "True"]),
         {"op": "layer_norm", "shape": [4, 7, 5], "axis": -1, "eps": 1e-06}),
        (("aten::layer_norm", [[4, 7, 5], [], [7, 5], [7, 5], [], []], ["", "[7, 5]", "", "", "1e-06", "True"]), None),
        (("aten::gelu", [[7, 5], []], ["", "tanh"]), None),
        (("aten::gelu", [[7, 5], []], ["", "none"]), {"op": "elementwise", "function": "gelu", "shape": [7, 5]}),
        (("aten::add", [[7, 5], [7, 5], []], ["", "", "1"]), {"op": "elementwise", "function": "add", "shape": [7, 5]}),
        (("aten::add_", [[7, 5], [7, 5], []], ["", "", "1"]), None),
        (("aten::linear", [[2, 7, 5], [11, 5], [11]], ["", "", ""]),
         {"op": "matmul", "m": 14, "n": 11, "k": 5, "dtype": "float32", "transpose_b": True,
          "epilogue": [{"function": "bias_add", "axis": "n"}]}),
    ],
)  # fmt: skip
def test_single_calls(call: Any, data: dict[str, Any] | None) -> None:
    assert longest(call) == data


def test_dense_tensors_may_have_their_last_dimensions_turned() -> None:
    assert is_dense(RecordedTensor((2, 3, 5), "float", (15, 5, 1)))
    assert is_dense(RecordedTensor((2, 3, 5), "float", (15, 1, 3)))
    assert not is_dense(RecordedTensor((2, 3, 5), "float", (15, 1, 3)), turned=False)
    assert not is_dense(RecordedTensor((2, 3, 5), "float", (5, 10, 1)))
    assert not is_dense(RecordedTensor((3, 5), "float", (10, 1)))
    assert is_dense(RecordedTensor((1, 3, 1, 5), "float", (99, 5, 7, 1)))
    assert is_dense(RecordedTensor((3, 5), "float"))
