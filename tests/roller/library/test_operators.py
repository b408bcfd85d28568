"""Operators as library calls: recognised by what they compute, priced together, and their way back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.suites import suite_names, suite_path
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_calls, library_time, library_times
from roller.library.calls import KINDS, price
from roller.library.named_calls import named_calls
from roller.library.products.gemm import choose_gemm
from roller.library.recognise import recognise
from roller.library.streaming.elementwise import Direction
from sokoban.language.operators import operator_from_data

V100 = load_device("v100-pcie")
#: Attention and products of groups and scales have tests of their own, on boards that have them.
SUITES = [
    operator
    for name in suite_names()
    for operator in json.loads(suite_path(name).read_bytes())
    if "op" in operator and not operator["op"].startswith(("attention", "grouped", "scaled"))
]
OTHERS: list[dict[str, Any]] = [
    {"op": "conv2d", "n": 2, "c": 8, "h": 9, "w": 11, "f": 16, "kh": 3, "kw": 1, "stride": 2, "padding": [1, 0, 0, 0],
     "groups": 2, "epilogue": [{"function": "bias_add", "axis": "f"}, "relu"]},
    {"op": "conv2d", "n": 2, "c": 8, "h": 9, "w": 11, "f": 16, "kh": 3, "kw": 3, "dilation": 2, "layout": "NHWC"},
    {"op": "conv2d", "n": 2, "c": 8, "h": 9, "w": 11, "f": 16, "kh": 3, "kw": 3, "dtype": "float64"},
    {"op": "depthwise_conv2d", "n": 2, "c": 8, "h": 9, "w": 11, "kh": 5, "kw": 5, "padding": "SAME", "layout": "NHWC"},
    {"op": "avg_pool2d", "n": 2, "c": 8, "h": 9, "w": 11, "kh": 1, "kw": 1, "stride": 3, "layout": "NHWC"},
    {"op": "max_pool2d", "n": 2, "c": 8, "h": 9, "w": 11, "kh": 2, "kw": 2, "stride": 2, "dilation": 2},
    {"op": "batch_matmul", "b": 1, "m": 5, "n": 6, "k": 7, "transpose_b": True},
    {"op": "matmul", "m": 5, "n": 6, "k": 7, "transpose_a": True,
     "epilogue": [{"function": "bias_add", "axis": "n"}, "gelu", {"function": "residual_add"}]},
    {"op": "matmul", "m": 5, "n": 60, "k": 7, "epilogue": [{"function": "bias_add", "axis": "m"}]},
    {"op": "elementwise", "function": "add", "shapes": [[128, 1, 64], [32, 1]]},
    {"op": "elementwise", "function": "pow", "shape": [7, 9], "scalar": True},
    {"op": "elementwise", "function": "floor", "shape": [7, 9]},
    {"op": "softmax", "shape": [4, 5, 6], "axis": 1},
    {"op": "transpose", "shape": [4, 5], "perm": [0, 1]},
    {"op": "reduce", "function": "max", "shape": [4, 5], "axes": [0, 1]},
    {"op": "scan", "function": "max", "shape": [7, 5, 3], "axis": 1, "reverse": True},
    {"op": "scan", "function": "prod", "shape": [7, 5, 3], "axis": -1, "exclusive": True, "dtype": "float16"},
    {"op": "scan", "function": "sum", "shape": [1, 5, 1], "axis": 1, "epilogue": ["relu"]},
    {"op": "topk", "shape": [7, 50, 3], "k": 4, "axis": 1, "largest": False, "result": "indices"},
]  # fmt: skip


@pytest.mark.parametrize("data", [*SUITES, *OTHERS], ids=lambda data: data.get("name", data["op"]))
def test_a_named_operator_and_its_expression_are_the_same_calls(data: dict[str, Any]) -> None:
    # Of a product with a bias the expression says how the second operand is stored.
    stated = {"transpose_b": False} | data if data["op"] == "matmul" else data
    named = named_calls(stated)
    assert named is not None
    assert named == recognise(operator_from_data(stated))


def test_a_product_with_a_bias_is_a_linear_layer_unless_its_layout_is_given() -> None:
    data = {"op": "matmul", "m": 5, "n": 6, "k": 7, "epilogue": [{"function": "bias_add", "axis": "n"}]}
    assert [library_calls(data | more)[0].variant for more in ({}, {"transpose_b": True}, {"transpose_b": False})] == [
        "linear", "linear", "addmm",
    ]  # fmt: skip


def kinds(data: dict[str, Any]) -> list[tuple[str, str, tuple[float, ...]]]:
    return [(call.kind, call.variant, call.sizes) for call in library_calls(data)]


def test_a_product_is_recognised_however_it_is_written() -> None:
    sizes = {"i": 4, "j": 5, "k": 6}
    plain = {"expr": "D[i,j] = sum(k, Q[i,k] * R[j,k])", "sizes": sizes}
    assert kinds(plain) == [("gemm", "matmul", (1, 4, 5, 6))]
    linear = {"expr": "T[i,j] = sum(k, Q[i,k] * R[k,j]); D[i,j] = relu(T[i,j] + bias[j])", "sizes": sizes}
    assert kinds(linear) == [("gemm", "addmm", (1, 4, 5, 6)), ("elementwise", "relu", (20,))]
    text = "T[i,j] = sum(k, Q[i,k] * R[j,k]); D[i,j] = relu(T[i,j] + bias[j])"
    assert kinds({"expr": text, "sizes": sizes})[0] == ("gemm", "linear", (1, 4, 5, 6)), "as modules store weights"
    batched = {"expr": "D[b,i,j] = sum(k, Q[b,k,i] * R[b,k,j])", "sizes": sizes | {"b": 3}}
    assert kinds(batched) == [("gemm", "bmm", (3, 4, 5, 6))]
    vector = {"expr": "D[i] = sum(k, Q[i,k] * R[k])", "sizes": {"i": 4, "k": 6}}
    assert kinds(vector) == [("gemm", "matmul", (1, 4, 1, 6))]


def test_a_convolution_in_one_dimension_is_recognised() -> None:
    data = {
        "expr": "Y[n,f,o] = sum((c,t), X[n,c,2*o + t] * W[f,c,t])",
        "sizes": {"n": 2, "f": 3, "o": 10, "c": 4, "t": 5},
    }
    (call,) = library_calls(data)
    assert dict(zip(KINDS["convolution"], call.sizes, strict=True)) == {
        "n": 2, "c": 4, "f": 3, "h": 1, "w": 23, "kh": 1, "kw": 5, "stride": pytest.approx(2**0.5), "groups": 1,
        "out_h": 1, "out_w": 10, "dilation": 1, "volume": 0,
    }  # fmt: skip


def test_softmax_and_layer_norm_are_recognised() -> None:
    sizes = {"i": 4, "j": 9}
    softmax = "P[i] = max(j, X[i,j]); E[i,j] = exp(X[i,j] - P[i]); S[i] = sum(j, E[i,j]); Y[i,j] = E[i,j] / S[i]"
    assert kinds({"expr": softmax, "sizes": sizes}) == [("softmax", "", (4, 9))]
    norm = (
        "M[i] = mean(j, X[i,j]); V[i] = mean(j, (X[i,j] - M[i]) * (X[i,j] - M[i])); "
        "Y[i,j] = (X[i,j] - M[i]) / sqrt(V[i] + 0.001)"
    )
    assert kinds({"expr": norm, "sizes": sizes}) == [("layer_norm", "", (4, 9))]


def scan_calls(direction: Direction = "forward", **keys: Any) -> list[str]:
    data = {"op": "scan", "function": "sum", "shape": [64, 128]} | keys
    return [call.variant for call in library_calls(data, direction)]


def test_scans_are_the_kernels_that_pytorch_has() -> None:
    assert scan_calls() == ["cumsum"]
    assert scan_calls(reverse=True) == ["flip_kernel", "cumsum", "flip_kernel"]
    assert scan_calls(exclusive=True) == ["CatArrayBatchedCopy", "cumsum"]
    assert scan_calls(shape=[128]) == ["DeviceScanInitKernel", "DeviceScanKernel"]
    assert scan_calls(shape=[128], function="max") == ["cummax"], "CUB keeps no places"
    values, places = (library_calls({"op": "scan", "shape": [64, 128], "function": name})[0] for name in ("sum", "max"))
    assert values.sizes == (64, 128, 1, 64 * 128 * 8)
    assert places.sizes == (64, 128, 1, 64 * 128 * 16)


def test_values_by_rank_and_scattered_rows_are_pytorchs_calls() -> None:
    ranks = {"op": "topk", "shape": [64, 128], "k": 8}
    assert kinds(ranks) == [("topk", "", (64, 128, 8))]
    back = library_calls(ranks, "backward")
    assert [call.variant for call in back] == ["copy", "scatter_gather_elementwise_kernel"]
    assert [call.sizes[0] for call in back] == [64 * 128, 64 * 8 * (4 + 8 + 4)]
    rows = {"op": "scatter_add", "rows": 10, "columns": 16, "count": 30}
    assert [call.variant for call in library_calls(rows)] == ["copy", "indexFuncLargeIndex"]
    assert [call.sizes[0] for call in library_calls(rows)] == [160, 3 * 480 * 4]
    assert [call.variant for call in library_calls(rows, "backward")] == ["indexSelectLargeIndex"]


def test_a_masked_scan_is_a_product_and_a_scan() -> None:
    masked = {"expr": "Y[i,j] = cumsum(j, X[i,j] * M[i,j])", "sizes": {"i": 4, "j": 9}}
    assert [(call.kind, call.variant) for call in library_calls(masked)] == [
        ("elementwise", "mul"), ("scan", "cumsum"),
    ]  # fmt: skip


def test_gradients_of_scans_are_scans_from_the_end() -> None:
    flipped = ["flip_kernel", "cumsum", "flip_kernel"]
    assert scan_calls("backward") == flipped
    assert scan_calls("backward", shape=[128]) == ["flip_kernel", *scan_calls(shape=[128]), "flip_kernel"]
    assert scan_calls("backward", function="prod")[3:] == [*flipped, "div"]
    assert scan_calls("backward", function="min") == ["copy", "scatter_gather_elementwise_kernel"]


def test_other_expressions_are_rooflines_and_say_so() -> None:
    sizes = {"i": 64, "j": 64, "k": 64, "l": 64}
    chain = {"expr": "C[i,j] = sum(k, A[i,k] * B[k,j]); D[i,l] = sum(j, C[i,j] * E[j,l])", "sizes": sizes}
    found = library_time(chain, V100)
    assert (found.kernel, len(found.parts)) == ("roofline", 1)
    (call,) = library_calls(chain)
    assert call.sizes == (4 * 4 * 64 * 64, 64 * 64, 4 * 64**3)


def test_element_wise_expressions_run_function_by_function() -> None:
    data = {"expr": "Y[i] = tanh(X[i] * Z[i] + 2)", "sizes": {"i": 1000}}
    assert [call.label for call in library_calls(data)] == ["mul", "add (number)", "tanh"]
    assert [call.label for call in library_calls(data, "backward")] == [
        "gradient of tanh", "gradient of add (number)", "gradient of mul",
    ]  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.slow
def test_many_cost_what_each_costs(direction: str) -> None:
    operators = [*SUITES, *OTHERS]
    together = library_times(operators, V100, direction)
    for found, operator in zip(together, operators, strict=True):
        alone = library_time(operator, V100, direction)
        assert (found.kernel, found.bound, found.kernels) == (alone.kernel, alone.bound, alone.kernels)
        assert (found.seconds, found.call_seconds) == pytest.approx((alone.seconds, alone.call_seconds))
        assert found.seconds == pytest.approx(sum(part.seconds for part in found.parts))
        assert found.call_seconds >= 0 and found.kernels >= 0


def test_a_batched_product_has_the_time_of_the_gemm_model() -> None:
    found = library_time({"op": "batch_matmul", "b": 16, "m": 128, "n": 256, "k": 64}, V100)
    model = choose_gemm(16, 128, 256, 64, V100)
    assert (found.seconds, found.call_seconds) == (model.kernel_seconds[0], model.call_seconds[0])
    assert found.parts[0].tile == model.launch.tile_names[0].partition("_")[0]


def test_a_single_product_without_bias_costs_the_host_less_than_a_linear_layer() -> None:
    product = {"op": "matmul", "m": 64, "n": 64, "k": 64}
    linear = product | {"epilogue": [{"function": "bias_add", "axis": "n"}]}
    assert library_time(product, V100).call_seconds < library_time(linear, V100).call_seconds
    assert library_time(product, V100).seconds <= library_time(linear, V100).seconds


def test_the_way_back_of_a_product_is_two_products() -> None:
    calls = library_calls({"op": "matmul", "m": 4, "n": 5, "k": 6}, "backward")
    assert [call.sizes for call in calls] == [(1, 4, 6, 5), (1, 6, 5, 4)]
    bias = {"op": "matmul", "m": 4, "n": 5, "k": 6, "epilogue": [{"function": "bias_add", "axis": "n"}]}
    assert [call.kind for call in library_calls(bias, "backward")] == ["gemm", "gemm", "stream"]


def test_the_way_back_of_an_addition_launches_nothing() -> None:
    found = library_time({"op": "elementwise", "function": "add", "shape": [512, 512]}, V100, "backward")
    assert (found.seconds, found.call_seconds, found.kernels, found.kernel, found.bound) == (0, 0, 0, "none", "none")


def test_each_operator_may_have_its_own_direction() -> None:
    operator = {"op": "softmax", "shape": [4096, 512]}
    both = library_times([operator, operator], V100, ["forward", "backward"])
    assert both == [library_time(operator, V100), library_time(operator, V100, "backward")]
    assert both[0].seconds < both[1].seconds


@pytest.mark.parametrize(
    ("operators", "device", "direction", "message"),
    [
        ([{"op": "matmul", "m": 4, "n": 5}], "v100", "forward", '[0].k: is missing; add "k"'),
        ([{"op": "matmul", "m": 4, "n": 5, "k": 6}], "v100", "back", "[0].direction: there is no 'back'"),
        ([{"op": "matmul", "m": 4, "n": 5, "k": 6}], "v100", ["forward"] * 2, "direction: 2 for 1 operators"),
        ([{"op": "matmul", "m": 4, "n": 5, "k": 6}], "mi50", "forward", "--device: mi50 runs no cuBLAS"),
    ],
)
def test_bad_input_names_its_place(operators: Any, device: str, direction: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        library_times(operators, load_device(device), direction)
    assert str(error.value).startswith(message)


def test_nothing_to_price_is_nothing() -> None:
    assert price([], V100) == [] and library_times([], V100) == []


def test_halves_run_at_the_rate_of_matrix_units_or_of_float32() -> None:
    data = {"op": "matmul", "m": 4096, "n": 4096, "k": 4096}
    p4 = load_device("p4")
    half, single = (library_time(data | {"dtype": dtype}, p4) for dtype in ("float16", "float32"))
    assert half.seconds == single.seconds
    tensor = library_time(data | {"dtype": "float16"}, V100)
    assert tensor.seconds < 0.5 * library_time(data, V100).seconds and tensor.kernel.startswith("mma.sync_")


@pytest.mark.parametrize("name", ["a100-sxm", "h100-nvl", "l40s", "rtx-3090", "rtx-4090", "rtx-pro-6000", "b200"])
def test_boards_whose_framework_calls_nobody_measured_are_priced(name: str) -> None:
    device = load_device(name)
    assert device.framework is None
    halves, singles = (
        library_time({"op": "matmul", "m": 4096, "n": 4096, "k": 4096, "dtype": dtype}, device).seconds
        for dtype in ("bfloat16", "float32")
    )
    assert 0 < halves < singles
