"""Kernels priced by operator call: grouping, gradients apart, shares, devices, and a real trace."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.operators.families import algorithm_of
from daydream.operators.pricing import bound_of, describe_calls, device_of, heavy_rows, is_auxiliary, price
from daydream.operators.work import Work
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.estimate.operators import Item, estimate_items
from roller.library import library_time
from tests.daydream.graphs import STREAM, graph, task
from tests.daydream.operators.repriced import repriced_table, short_name, totals
from tests.daydream.recorded import operator, recorded, recorded_trace

V100 = load_device("v100")

CONVOLUTION = {"op": "conv2d", "n": 8, "c": 64, "h": 28, "w": 28, "f": 128, "kh": 3, "kw": 3, "padding": 1}
SIZES = [[8, 64, 28, 28], [128, 64, 3, 3]]
GRADIENT = [[8, 64, 28, 28], [8, 128, 28, 28], [128, 64, 3, 3]]


def forward(*kernels):
    return operator("aten::cudnn_convolution", SIZES, kernels=kernels)


def test_one_call_has_one_price_spread_over_its_kernels():
    launched = recorded([forward(("computeOffsetsKernel", 2.0), ("volta_scudnn", 98.0))])
    prices = price(launched, heavy_rows(launched), V100, "library")
    expected = library_time(CONVOLUTION, V100).seconds * 1e6
    assert len(prices.calls) == 1
    assert prices.calls[0].price_us == pytest.approx(expected)
    assert prices.calls[0].main == 3
    np.testing.assert_allclose(prices.microseconds, [0.02 * expected, 0.98 * expected])
    assert prices.operator == (prices.calls[0].text,) * 2
    assert prices.bound == ("compute", "compute")


def test_the_best_price_is_that_of_roller_estimate():
    launched = recorded([forward(("k", 5.0))])
    expected = estimate_items([Item("", CONVOLUTION, "forward")], V100, "best", "roller")[0].seconds
    assert price(launched, heavy_rows(launched), V100).microseconds[0] == pytest.approx(expected * 1e6)


@pytest.mark.parametrize("implementation", ["library", "best"])
def test_the_two_gradients_make_up_the_backward_pass(implementation):
    operators = [
        operator("aten::cudnn_convolution_backward", GRADIENT),
        operator("aten::cudnn_convolution_backward_input", [], kernels=[("dgrad_engine", 5.0)], inside=0),
        operator("aten::cudnn_convolution_backward_weight", [], kernels=[("wgrad_alg0", 5.0)], inside=0),
    ]
    launched = recorded(operators)
    prices = price(launched, heavy_rows(launched), V100, implementation)
    whole = estimate_items([Item("", CONVOLUTION, "backward")], V100, implementation, "roller")[0].seconds
    assert (prices.microseconds > 0).all()
    assert prices.microseconds.sum() == pytest.approx(whole * 1e6)


def test_kernels_of_a_whole_backward_operator_are_distinguished_by_name():
    dims = [GRADIENT[1], GRADIENT[0], GRADIENT[2]]
    kernels = [("computeOffsetsKernel", 1.0), ("dgrad2d", 9.0), ("wgrad_alg0_engine", 8.0), ("reduce_wgrad", 2.0)]
    launched = recorded([operator("aten::convolution_backward", dims, kernels=kernels)])
    calls = price(launched, heavy_rows(launched), V100, "library").calls
    assert [(call.rows.tolist(), call.main) for call in calls] == [([1, 3], 3), ([5, 7], 5)]
    assert [call.work.direction for call in calls] == ["backward data", "backward weights"]
    unnamed = recorded([operator("aten::convolution_backward", dims, kernels=[("sgemm", 9.0), ("sgemm", 8.0)])])
    (together,) = price(unnamed, heavy_rows(unnamed), V100, "library").calls
    assert together.price_us == pytest.approx(sum(call.price_us for call in calls))


def test_what_has_no_price_says_why():
    tasks = [
        operator("aten::cumsum", [[8, 8]], kernels=[("scan", 3.0)]),
        operator("aten::mm", kernels=[("sgemm", 3.0)]),
    ]
    launched = recorded(tasks)
    prices = price(launched, launched.select(gpu=True), V100, "library")
    assert np.isnan(prices.microseconds).all()
    assert prices.reason == (
        "tensor or dimension not recorded",
        "input sizes not recorded; record with record_shapes=True",
    )
    bare = graph([task("k", STREAM, 3)])
    assert price(bare, bare.select(gpu=True), V100).reason == ("the graph was not made from a trace",)
    assert len(heavy_rows(bare)) == 0
    none = price(launched, np.empty(0, np.int64), V100)
    assert (none.calls, len(none.microseconds)) == ((), 0)


def test_tasks_without_operator_stand_alone():
    launched = recorded([forward(("a", 1.0), ("b", 1.0))])
    launched.operator[[1, 3]] = -1
    prices = price(launched, np.array([1, 3]), V100)
    assert prices.reason == ("no operator launched it",) * 2
    assert prices.call.tolist() == [0, 1]


def test_prices_keep_the_order_asked_for():
    products = [
        operator("aten::mm", [[64 * i, 64], [64, 64]], kernels=[("sgemm", 3.0)]) for i in (1, 50)
    ]  # fmt: skip
    launched = recorded(products)
    up, down = (price(launched, np.array(rows), V100, "library").microseconds for rows in ([1, 3], [3, 1]))
    assert up.tolist() == down[::-1].tolist()
    assert up[0] < up[1]


def test_half_precision_is_faster_on_tensor_cores():
    launched = recorded([operator("aten::mm", [[4096, 4096], [4096, 4096]], kernels=[("sgemm", 9.0)])])
    rows = heavy_rows(launched)
    single, half = (price(launched, rows, V100, "library", dtype=dtype).microseconds[0] for dtype in ("", "float16"))
    assert half < single / 3


def test_bad_choices_are_one_line():
    launched = recorded([forward(("k", 5.0))])
    with pytest.raises(InputError, match="implementation: there is no 'fast'; use best or library"):
        price(launched, heavy_rows(launched), V100, "fast")
    with pytest.raises(InputError, match="search: there is no 'deep'"):
        price(launched, heavy_rows(launched), V100, search="deep")
    with pytest.raises(InputError, match="mi50 runs no cuBLAS"):
        price(launched, heavy_rows(launched), load_device("mi50"), "library")


def test_the_roofline_bounds():
    # V100: some 14 TFLOP/s and 0.8 TB/s meet near 16 FLOP a byte.
    assert bound_of(Work(kind="x", parts=(), flops=100.0, bytes=1.0), V100) == "compute"
    assert bound_of(Work(kind="x", parts=(), flops=5.0, bytes=1.0), V100) == "memory"
    halves = Work(kind="matrix product", parts=(), flops=30.0, bytes=1.0, dtype="float16")
    assert bound_of(halves, V100) == "memory"  # Tensor Cores move the ridge beyond 50
    assert bound_of(halves, load_device("p100")) == "compute"
    launched = recorded([forward(("k", 5.0))])
    assert np.isnan(describe_calls(launched, heavy_rows(launched), V100).microseconds).all()


@pytest.mark.parametrize(
    ("recorded_on", "expected"),
    [
        ("Tesla V100-SXM2-32GB", "v100-sxm2-16gb"),
        ("Tesla V100-DGXS-32GB", "v100-sxm2-16gb"),
        ("NVIDIA A100-PG509-200", "a100-pcie-40gb"),
    ],
)
def test_the_recorded_board_is_the_default(recorded_on, expected):
    launched = recorded([forward(("k", 5.0))], [{"id": 0, "name": recorded_on}])
    spec, stands_in = device_of(launched)
    assert spec.name == expected
    assert bool(stands_in) == (recorded_on != "Tesla V100-SXM2-32GB")
    assert device_of(launched, "p100")[0].name == "p100-pcie-16gb"


def test_unknown_boards_are_refused():
    with pytest.raises(InputError, match="device: the trace does not say which board"):
        device_of(recorded([forward(("k", 5.0))], []))
    with pytest.raises(InputError, match="no device file for Quadro 9"):
        device_of(recorded([forward(("k", 5.0))], [{"name": "Quadro 9"}]))


def test_kernels_by_name():
    assert is_auxiliary("cask_cudnn::computeBOffsetsKernel(cask_cudnn::ComputeBOffsetsParams)")
    assert is_auxiliary("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(x)")
    assert not is_auxiliary("volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1")
    assert short_name("void cudnn::cnn::wgrad_alg0_engine<float, 128>(int)") == "wgrad_alg0_engine"
    assert short_name("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm>(x)") == "cutlass_80_tensorop_s1688gemm"
    assert algorithm_of(["cutlass_80_tensorop_s1688gemm", "splitKreduce_kernel"]) == "TF32"
    assert algorithm_of(["winogradForwardData4x4", "volta_sgemm_64x64_nn"]) == "fused Winograd"
    assert algorithm_of(["void cudnn::winograd_nonfused::x", "volta_sgemm_64x64_nn"]) == "non-fused Winograd"
    assert algorithm_of(["computeOffsetsKernel", "volta_scudnn_128x64_relu"]) == "implicit GEMM"


def test_the_table_has_a_row_per_layer_and_direction():
    product = operator("aten::mm", [[64, 64], [64, 64]], kernels=[("sgemm", 30.0)])
    rows = repriced_table(recorded([forward(("k", 40.0)), forward(("k", 60.0)), product]), V100)
    assert [(row.direction, row.calls, row.recorded_us) for row in rows] == [("forward", 2, 50), ("forward", 1, 30)]
    recorded_ms, priced_ms, mean = totals(rows)["forward"]
    assert recorded_ms == pytest.approx(0.1)
    assert mean == pytest.approx(priced_ms / recorded_ms)


def test_every_convolution_and_product_of_a_real_step_has_a_price():
    from daydream.tasks.build import read_graph

    launched = read_graph(recorded_trace("resnet50_v100_nw0"))
    rows = repriced_table(launched, V100)
    assert all(np.isfinite(row.priced_us) for row in rows)
    # ResNet-50: 53 convolutions, the first of which has no gradient of its data; a linear layer is three products.
    assert sum(row.calls for row in rows) == 53 + 52 + 53 + 3
    for _, _, mean in totals(rows).values():
        assert 0.7 < mean < 1.2
