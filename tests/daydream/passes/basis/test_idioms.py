"""Kernels recognised by name, operator and layer."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.graph.graph import Dependency, Phase
from daydream.passes.basis.idioms import (
    Role,
    backward_of,
    host_of,
    is_batchnorm,
    is_compute_bound,
    is_convolution,
    is_elementwise,
    is_fused_optimizer,
    is_gemm,
    is_pooling,
    is_relu,
    launch_us,
    layer_runs,
    operands,
    preceding,
    roles,
    tensors,
)
from daydream.trace.trace import NONE, Category
from tests.daydream.graphs import MAIN, graph, launched, pairs, task
from tests.daydream.passes.traced import traced

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*, 3> >"
CLAMP = "void at::native::vectorized_elementwise_kernel<4, at::native::clamp_min_scalar_kernel_impl, Array<char*, 2> >"
SCUDNN = "volta_scudnn_128x64_relu_interior_nn_v1"


@pytest.mark.parametrize(
    ("name", "predicates"),
    [
        (SCUDNN, {is_convolution}),
        ("void cudnn::detail::dgrad_engine<float, 512>", {is_convolution}),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_kernel_cudnn", {is_convolution}),
        ("ampere_gcgemm_64x64_nt", {is_convolution}),
        ("volta_sgemm_64x64_nt", {is_gemm}),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>", {is_gemm}),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", {is_gemm}),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", {is_batchnorm}),
        ("void cudnn::bn_bw_1C11_singleread<float, 512>", {is_batchnorm}),
        ("void batch_norm_collect_statistics_kernel", {is_batchnorm}),
        (CLAMP, {is_relu, is_elementwise}),
        (ADD, {is_elementwise}),
        ("void at::native::max_pool_forward_nchw<float>", {is_pooling}),
        ("void permute_pooled_embs_kernel<float>", set()),
        (
            "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
            {is_elementwise, is_fused_optimizer},
        ),
        ("void layer_norm_grad_input_kernel<float>", set()),
    ],
)
def test_kernels_are_recognised_by_name(name, predicates):
    every = {
        is_convolution, is_gemm, is_batchnorm, is_relu, is_elementwise, is_pooling, is_fused_optimizer
    }  # fmt: skip
    assert {predicate for predicate in every if predicate(name)} == predicates


def test_transformations_around_a_convolution_are_not_compute_bound():
    assert is_compute_bound(SCUDNN)
    assert is_compute_bound("volta_sgemm_64x64_nt")
    assert is_compute_bound("flash_fwd_kernel<...>")
    assert not is_compute_bound("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>")
    assert not is_compute_bound("void splitKreduce_kernel<float>")
    assert not is_compute_bound("void nchwToNhwcKernel<float>")
    assert not is_compute_bound(ADD)


def test_operands_stand_in_the_name_of_atens_kernels():
    assert operands(ADD) == 3
    assert operands(CLAMP) == 2
    assert operands("PointwiseApply2<TensorAddOp>") == 3
    assert operands("PointwiseApply1<Sqrt>") == 2


def test_roles_by_name_and_without_operator_by_the_innermost_module():
    tasks = [
        *launched("kernel", 1, layer="conv_block.bn1"),
        *launched("kernel", 1, layer="layer1.0.conv2"),
        *launched(SCUDNN, 1, layer="block.relu"),
        *launched("kernel", 1, layer="features.relu"),
        *launched("kernel", 1, layer="max_pool2d_3"),
        *launched("kernel", 1, layer="convert"),
    ]
    found = roles(graph(tasks, pairs(6)))
    wanted = [Role.BATCHNORM, Role.CONVOLUTION, Role.CONVOLUTION, Role.RELU, Role.POOLING, Role.OTHER]
    assert found[1::2].tolist() == wanted
    assert not found[::2].any()


def nested():
    """aten::conv2d(row 0) > aten::_convolution(1); autograd wrapper(2) > aten::add(3); aten::relu(4) > clamp_min(5)."""
    tasks = [
        task("aten::conv2d", MAIN, 1, operator=0),
        task("aten::_convolution", MAIN, 1, operator=1),
        *launched("volta_sgemm_64x64_nt", 5, layer="conv2d_0", operator=1),
        *launched("add", 5, layer="conv2d_0", operator=3),
        task("aten::relu", MAIN, 1, operator=4),
        task("aten::empty", MAIN, 1, operator=6),
        *launched("clamp", 5, layer="relu_0", operator=5),
    ]
    rows = [(2, 3), (4, 5), (8, 9)]
    names = [
        "aten::conv2d",
        "aten::_convolution",
        "autograd::engine::evaluate_function: ConvolutionBackward0",
        "aten::add",
        "aten::relu",
        "aten::clamp_min",
        "aten::empty",
    ]
    dims = {0: [[2, 3, 4], [], [5]], 4: [[7]]}
    fields = traced(names, [NONE, 0, NONE, 2, NONE, 4, 4], dims)
    return graph(tasks, [(a, b, Dependency.LAUNCH) for a, b in rows], **fields)


def test_the_operator_decides_before_the_layer():
    some = nested()
    assert roles(some)[[3, 5, 9]].tolist() == [Role.CONVOLUTION, Role.OTHER, Role.RELU]


def test_a_clamp_is_a_relu_only_where_the_operator_says_so():
    rows = [part for row in range(2) for part in launched(CLAMP, 1, operator=row)]
    some = graph(rows, pairs(2), **traced(["aten::clamp", "aten::clamp_min"], [NONE, NONE]))
    assert roles(some)[1::2].tolist() == [Role.OTHER, Role.RELU]


def test_the_host_time_of_a_removed_operation_is_all_of_its_operator():
    some = nested()
    assert host_of(some, np.array([9])).tolist() == [6, 7, 8]
    assert host_of(some, np.array([], np.int64)).tolist() == []


def test_recorded_tensors():
    some = nested()
    assert [tensor.elements for tensor in tensors(some, 0)] == [24, 5]
    assert tensors(some, 1) == []
    assert tensors(some, NONE) == []
    assert some.trace is not None and some.trace.category[0] == Category.OPERATOR


def test_the_backward_pass_meets_the_calls_of_a_layer_in_reverse():
    forward = [*launched("bn_fw", 1, layer="a"), *launched("x", 1), *launched("bn_fw", 1, layer="a")]
    backward = [*launched("bn_bw", 1, layer="a"), *launched("x", 1), *launched("bn_bw", 1, layer="a")]
    for row in forward:
        row["phase"] = Phase.FORWARD
    for row in backward:
        row["phase"] = Phase.BACKWARD
    some = graph([*forward, *backward], pairs(6))
    there = layer_runs(some, roles(some), Role.BATCHNORM, Phase.FORWARD)
    back = layer_runs(some, roles(some), Role.BATCHNORM, Phase.BACKWARD)
    assert [run.first for run in there] == [1, 5]
    assert [run.first for run in backward_of(there, back) if run is not None] == [11, 7]


def test_nothing_answers_before_it_is_asked():
    rows = [*launched("bn_bw", 1, layer="a", phase=Phase.BACKWARD), *launched("bn_fw", 1, layer="a")]
    some = graph([*rows[:2], *({**row, "phase": Phase.FORWARD} for row in rows[2:])], pairs(2))
    there = layer_runs(some, roles(some), Role.BATCHNORM, Phase.FORWARD)
    back = layer_runs(some, roles(some), Role.BATCHNORM, Phase.BACKWARD)
    assert len(there) == len(back) == 1
    assert backward_of(there, back) == [None]


def test_calls_without_layers_are_matched_when_there_are_equally_many():
    rows = [*launched("bn_fw", 1), *launched("x", 1), *launched("bn_fw", 1), *launched("bn_bw", 1)]
    for row, phase in zip(rows, [0] * 6 + [1] * 2, strict=True):
        row["phase"] = Phase(phase)
    some = graph(rows, pairs(4))
    there = layer_runs(some, roles(some), Role.BATCHNORM, Phase.FORWARD)
    back = layer_runs(some, roles(some), Role.BATCHNORM, Phase.BACKWARD)
    assert backward_of(there, back) == [None, None]
    assert [run.first for run in backward_of(there[:1], back) if run is not None] == [7]


def test_typical_launch_and_predecessors():
    some = graph([*launched("a", 1, call_us=2), *launched("b", 1, call_us=6), *launched("c", 1, call_us=4)], pairs(3))
    assert launch_us(some) == 4
    assert launch_us(graph([task("x", MAIN, 1)]), default=7.0) == 7
    assert preceding(some).tolist() == [NONE, NONE, 0, 1, 2, 3]
