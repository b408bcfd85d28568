"""Kinds of GPU tasks: what a kernel does, by its name, and where that says nothing by the operator that launched it.

Names are those of cuBLAS, cuDNN, CUTLASS, ATen, Triton and FBGEMM, and of AMD's Tensile, MIOpen, composable kernels and
AOTriton.
"""

from __future__ import annotations

import re
from enum import IntEnum

import numpy as np

from daydream.graph.graph import TaskGraph, TaskKind
from daydream.passes.basis.idioms import (
    is_batchnorm,
    is_convolution,
    is_elementwise,
    is_fused_optimizer,
    is_gemm,
    operators_named,
    outermost_operator,
)
from daydream.trace.trace import NONE, Ints


class KernelKind(IntEnum):
    """The purpose of a GPU task."""

    UNKNOWN = 0
    PRODUCT = 1
    CONVOLUTION = 2
    ATTENTION = 3
    NORMALISATION = 4
    ELEMENTWISE = 5
    REDUCTION = 6
    POOLING = 7
    EMBEDDING = 8
    INDEXING = 9
    LAYOUT = 10
    OPTIMIZER = 11
    COMMUNICATION = 12
    COPY = 13
    SET = 14

    @property
    def label(self) -> str:
        """As people call it."""
        return _LABELS.get(self, self.name.lower())


_LABELS = {
    KernelKind.PRODUCT: "matrix product",
    KernelKind.ELEMENTWISE: "element-wise",
    KernelKind.LAYOUT: "change of layout",
    KernelKind.COPY: "memory copy",
    KernelKind.SET: "memory set",
}

_COMMUNICATION = re.compile(
    r"^(nccl|rccl|onecclk)|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|all2all|cross_device_reduce|multimem"
    r"|deep_?ep::|nvshmem|mscclpp?|sendrecv",
    re.I,
)
_ATTENTION = re.compile(
    r"flash_?(fwd|bwd|attn|attention|mla)|fmha|attention|attn_(fwd|bwd)|\battn_|_attn|compute_attn|_mha\b|mha_(fwd|bwd)"
    r"|bwd_(kernel_(dk|dq)|preprocess)|sdpa|mla_(fwd|decode)|gemm_softmax_gemm|gated_delta|selective_s(can|tate)"
    r"|chunk_(scan|state|fwd|bwd)|ssd_chunk",
    re.I,
)
#: Element-wise kernels whose names say embedding, or TensorOp as CUTLASS's do.
_ELEMENTWISE_ALTHOUGH = re.compile(r"rotary|rope(?![a-z])|sub_?tensor_?op", re.I)
_LAYOUT = re.compile(
    r"nchw_?to_?nhwc|nhwc_?to_?nchw|transpose(?!_?conv)|permute|catarray|tensor_?transform|_cast_|CastTensor"
    r"|scalepackedtensor|pad(ded|ding)?_kernel|unrolled_cat|recat|copy_async|swizzle|copy_?buffer|copydevice",
    re.I,
)
_NORMALISATION = re.compile(
    r"batch_?norm|layer_?norm|group_?norm|rms_?norm|bn_(fw|bw|inf)|miopenspatial|gammabeta", re.I
)
_REDUCTION = re.compile(
    r"reduce|softmax|triton_(red|per)_|nll_?loss|classnll|cross_entropy|loss_(forward|backward|kernel)|dot_kernel"
    r"|argm(ax|in)|norm_kernel|l2norm|lpnorm|logsumexp|cunn_|welford",
    re.I,
)
_POOLING = re.compile(r"pool(?!ed)|upsample|interpolate|roi_?align", re.I)
_EMBEDDING = re.compile(
    r"embedding|permute_(2d|indices|pooled)|_offsets_range|linearize_index|fbgemm_gpu|bounds_check|krn_partial", re.I
)
_INDEXING = re.compile(
    r"index|gather(?!v)|scatter|sort|scan|cub::|rocprim|thrust|topk|unique|nonzero|masked_?(fill|select)|cumsum|searchsorted"
    r"|bitonic|radix|histogram|one_?hot|triu|tril|compute_(num|grad|cuda)|moe_align|routing|reshape_and_cache|sampl",
    re.I,
)
_OPTIMIZER = re.compile(
    r"adam|sgd(?!w?rad)|lamb|adagrad|lion\b|optimi[sz]er|amp_(update|non_finite)|unscale|clip_grad", re.I
)
_PRODUCT = re.compile(
    r"gemm|gemv|nvjet|Cijk_|splitk|cublas|wgmma|tensorop|bmm|_mm_|matmul|ck::.*xdl|hipblaslt|cutlass|fused_moe|marlin"
    r"|exllama|_linear_",
    re.I,
)
_CONVOLUTION = re.compile(
    r"miopen.*conv|conv.*miopen|gridwise_convolution|igemm|naive_conv|winograd|sp3asm|gcnasm|transpose_?conv|im2d2col"
    r"|im2col|col2im",
    re.I,
)
_ELEMENTWISE = re.compile(
    r"triton_(poi|for|unk)_|elementwise|pointwise|fill|distribution|dropout|philox|rand|arange|range_|activation|gelu|silu"
    r"|relu|swiglu|geglu|act_and_mul|threshold|op\w{0,2}_?tensor|multi_?tensor|foreach|copy_kernel|addcmul|lerp|clamp"
    r"|epilogue|bias|_add_|_mul_|where|quant|cast",
    re.I,
)
#: By name, the first that fits: kernels of a fused operator are what takes most of their time.
_BY_NAME = (
    (KernelKind.COMMUNICATION, _COMMUNICATION),
    (KernelKind.ELEMENTWISE, _ELEMENTWISE_ALTHOUGH),
    (KernelKind.ATTENTION, _ATTENTION),
    (KernelKind.EMBEDDING, _EMBEDDING),
    (KernelKind.LAYOUT, _LAYOUT),
    (KernelKind.CONVOLUTION, _CONVOLUTION),
    (KernelKind.PRODUCT, _PRODUCT),
    (KernelKind.NORMALISATION, _NORMALISATION),
    (KernelKind.POOLING, _POOLING),
    (KernelKind.OPTIMIZER, _OPTIMIZER),
    (KernelKind.REDUCTION, _REDUCTION),
    (KernelKind.ELEMENTWISE, _ELEMENTWISE),
    (KernelKind.INDEXING, _INDEXING),
)

_BY_OPERATOR = (
    (KernelKind.ATTENTION, re.compile(r"attention|attn|sdpa", re.I)),
    (KernelKind.CONVOLUTION, re.compile(r"conv(?!ert)", re.I)),
    (KernelKind.PRODUCT, re.compile(r"(^|::)_?(scaled_|grouped_)?(add)?b?(mm|mv)\b|linear|matmul|einsum", re.I)),
    (KernelKind.NORMALISATION, re.compile(r"norm(?!al)", re.I)),
    (KernelKind.EMBEDDING, re.compile(r"embedding", re.I)),
    (KernelKind.POOLING, re.compile(r"pool|upsample", re.I)),
    (KernelKind.OPTIMIZER, re.compile(r"^Optimizer\.|optim|_fused_|_amp_", re.I)),
    (KernelKind.REDUCTION, re.compile(r"softmax|loss|::(sum|mean|max|min|norm|all|any|prod|var|std|arg\w+)\b", re.I)),
    (KernelKind.INDEXING, re.compile(r"index|gather|scatter|sort|topk|unique|nonzero|select|cumsum|masked", re.I)),
    (KernelKind.LAYOUT, re.compile(r"::(cat|stack|contiguous|clone|_to_copy|copy_|to_\w+|transpose|permute)\b", re.I)),
    (
        KernelKind.ELEMENTWISE,
        re.compile(
            r"::(_?foreach_\w+|add|sub|mul|div|pow|exp|log|sqrt|rsqrt|relu|gelu|silu|sigmoid|tanh|fill|zero|where|neg|abs|eq|ne"
            r"|lt|gt|le|ge|clamp\w*|threshold\w*|dropout|native_dropout|bernoulli|uniform|normal|random|ones_like|addc\w+"
            r"|lerp|leaky_relu|hardswish|hardtanh|elu|isfinite|isnan|bitwise_\w+|logical_\w+)(_backward)?_?\b",
            re.I,
        ),
    ),
)  # fmt: skip

_OF_TASK = {
    TaskKind.COMMUNICATION: KernelKind.COMMUNICATION,
    TaskKind.MEMCPY: KernelKind.COPY,
    TaskKind.MEMSET: KernelKind.SET,
}


def kind_of_name(name: str) -> KernelKind:
    """The kind of a kernel by its name alone.

    >>> kind_of_name("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32"), kind_of_name("attn_fwd"), kind_of_name("my_kernel")
    (<KernelKind.PRODUCT: 1>, <KernelKind.ATTENTION: 3>, <KernelKind.UNKNOWN: 0>)
    """
    if is_fused_optimizer(name):
        return KernelKind.OPTIMIZER
    if is_elementwise(name):
        return KernelKind.ELEMENTWISE
    if is_batchnorm(name):
        return KernelKind.NORMALISATION
    others = (_COMMUNICATION, _ELEMENTWISE_ALTHOUGH, _ATTENTION, _LAYOUT)
    if not any(pattern.search(name) for pattern in others):
        if is_convolution(name):
            return KernelKind.CONVOLUTION
        if is_gemm(name):
            return KernelKind.PRODUCT
    return next((kind for kind, pattern in _BY_NAME if pattern.search(name)), KernelKind.UNKNOWN)


def kernel_kinds(graph: TaskGraph) -> Ints:
    """The :class:`KernelKind` of every task; of one that does not run on a GPU it says nothing."""
    kinds = np.full(len(graph), int(KernelKind.UNKNOWN))
    on_gpu = np.flatnonzero(graph.on_gpu)
    # Names of CPU tasks may be many: every iteration of a loop has its own.
    used, place = np.unique(graph.name[on_gpu], return_inverse=True)
    kinds[on_gpu] = np.array([kind_of_name(graph.names[name]) for name in used.tolist()], np.int64)[place.reshape(-1)]
    for task_kind, kind in _OF_TASK.items():
        kinds[graph.kind == task_kind] = kind
    trace = graph.trace
    if trace is None:
        return kinds
    # A GEMM that a convolution launches is the convolution's.
    products = np.flatnonzero(graph.on_gpu & (kinds == KernelKind.PRODUCT))
    convolutions = operators_named(graph, r"conv(?!ert)")
    kinds[products[outermost_operator(graph, products, convolutions) != NONE]] = KernelKind.CONVOLUTION
    by_name: dict[int, KernelKind] = {}
    for row in np.flatnonzero(graph.on_gpu & (kinds == KernelKind.UNKNOWN)).tolist():
        for event in graph.operators(row):
            name = int(trace.name[event])
            if name not in by_name:
                text = trace.names[name]
                by_name[name] = next(
                    (kind for kind, pattern in _BY_OPERATOR if pattern.search(text)), KernelKind.UNKNOWN
                )
            if by_name[name] != KernelKind.UNKNOWN:
                kinds[row] = by_name[name]
                break
    return kinds


def unknown_share(graph: TaskGraph, kinds: Ints, rows: Ints) -> float:
    """Share of the time of these GPU tasks whose kind is not known; NaN where they take none."""
    durations = graph.duration_us[rows]
    total_us = float(durations.sum())
    return float(durations[kinds[rows] == KernelKind.UNKNOWN].sum()) / total_us if total_us else float("nan")
