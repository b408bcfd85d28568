"""Types to which autocast on CUDA boards casts operators (``aten/src/ATen/autocast_mode.h``), by their schemas."""

from __future__ import annotations

from functools import lru_cache

#: Operators that autocast runs in half precision. The last two are cast where cuDNN's kernels are registered.
LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention", "_cudnn_rnn",
)  # fmt: skip

#: Operators that autocast runs in float32.
SINGLE = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip

#: Operators whose result autocast makes float32, where the call names no other type: they cast while they read.
SINGLE_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip

#: Operators whose arguments autocast brings to the widest type among them.
PROMOTED = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip

#: What operators that stay in float32 are composed of, as far as they have kernels of their own names.
_PARTS = ("_softmax", "_log_softmax", "nll_loss_forward", "nll_loss2d_forward", "native_group_norm", "norm",
          "cross_entropy_loss", "_fused_rms_norm")  # fmt: skip

_SINGLE_STEMS = frozenset(name.partition(".")[0] for name in (*SINGLE, *SINGLE_RESULT, *_PARTS))


@lru_cache(maxsize=65536)
def keeps_single(operator: str) -> bool:
    """True if autocast runs an operator, or the one whose gradient it makes, in float32.

    >>> keeps_single("aten::native_layer_norm_backward"), keeps_single("aten::batch_norm"), keeps_single("aten::add_")
    (True, False, False)
    """
    stem = operator.rpartition("::")[2]
    if stem in _SINGLE_STEMS:
        return True
    for ending in ("_backward_data", "_backward", "_"):
        if stem.endswith(ending) and stem.removesuffix(ending) in _SINGLE_STEMS:
            return True
    return stem.endswith("_backward") and f"{stem.removesuffix('_backward')}_forward" in _SINGLE_STEMS
