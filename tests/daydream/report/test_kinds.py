"""Kinds of kernels, by names of NVIDIA's and AMD's libraries and by operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daydream.report.kinds import KernelKind, kernel_kinds, kind_of_name, unknown_share
from daydream.tasks.build import read_graph
from tests.daydream.traces import Builder

NAMES = {
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16": KernelKind.PRODUCT,
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT": KernelKind.PRODUCT,
    "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn": KernelKind.PRODUCT,
    "void cublasLt::splitKreduce_kernel<32, 16, int>": KernelKind.PRODUCT,
    "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>": KernelKind.PRODUCT,
    "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1": KernelKind.CONVOLUTION,
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32": KernelKind.CONVOLUTION,
    "void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5>": KernelKind.CONVOLUTION,
    "attn_fwd": KernelKind.ATTENTION,
    "bwd_kernel_dk_dv": KernelKind.ATTENTION,
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": KernelKind.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": KernelKind.ATTENTION,
    "MIOpenBatchNormFwdTrainSpatial": KernelKind.NORMALISATION,
    "void at::native::vectorized_layer_norm_kernel<float>": KernelKind.NORMALISATION,
    "triton_poi_fused_add_mul_2": KernelKind.ELEMENTWISE,
    "triton_per_fused_native_layer_norm_3": KernelKind.NORMALISATION,
    "void at::native::reduce_kernel<512, 1>": KernelKind.REDUCTION,
    "void (anonymous namespace)::softmax_warp_forward<float>": KernelKind.REDUCTION,
    "batched_transpose_32x32_half": KernelKind.LAYOUT,
    "void cudnn::ops::nchwToNhwcKernel<float>": KernelKind.LAYOUT,
    "multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>": KernelKind.OPTIMIZER,
    "void at::native::embedding_backward_feature_kernel<float>": KernelKind.EMBEDDING,
    "void at::native::index_elementwise_kernel<128, 4>": KernelKind.ELEMENTWISE,
    "max_pool_forward_nhwc": KernelKind.POOLING,
    "SubTensorOpWithScalar1d": KernelKind.ELEMENTWISE,
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>": KernelKind.ELEMENTWISE,
    "void ck::kernel_batched_gemm_softmax_gemm_xdl_cshuffle_v1": KernelKind.ATTENTION,
    "multimem_all_reduce_kernel": KernelKind.COMMUNICATION,
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)": KernelKind.COMMUNICATION,
    "__amd_rocclr_copyBuffer": KernelKind.LAYOUT,
    "my_own_kernel": KernelKind.UNKNOWN,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_its_kind_by_name(name: str) -> None:
    assert kind_of_name(name) is NAMES[name]


def test_an_operator_tells_what_a_name_does_not(tmp_path: Path) -> None:
    builder = Builder().step(0, 0, 100)
    for number, (operator, kernel) in enumerate(
        [("aten::mm", "opaque"), ("aten::cudnn_convolution", "sgemm_128"), ("mine::thing", "other")], start=1
    ):
        start = 20 * number
        builder.operator(operator, start, 10, external=number)
        builder.launch(start + 2, 5, correlation=number, external=number)
        builder.kernel(kernel, start + 8, 2.0 * number, correlation=number, external=number)
    graph = read_graph(builder.write(tmp_path / "trace.json"))
    rows = np.flatnonzero(graph.on_gpu)
    kinds = kernel_kinds(graph)
    assert [KernelKind(kind) for kind in kinds[rows].tolist()] == [
        KernelKind.PRODUCT,
        KernelKind.CONVOLUTION,
        KernelKind.UNKNOWN,
    ]
    assert unknown_share(graph, kinds, rows) == pytest.approx(6 / (2 + 4 + 6))
    assert np.isnan(unknown_share(graph, kinds, rows[:0]))
