"""Kernels of a board where PyTorch decomposes tensors without data: fused attention, dropout, recurrent layers.

Operators that PyTorch composes of others choose their parts by the device. For ``meta`` tensors they get the parts that
a CUDA board has, registered with the dispatcher, so that it does not matter from where a model calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from daydream.capture.pytorch.recurrent import BOARD_RECURRENCE, META_RECURRENCE

_HALVES = (torch.float16, torch.bfloat16)

#: The dispatcher comes by this key with and without gradients.
_KEY = "AutogradMeta"


def scaled_dot_product(attention: str) -> Callable[..., Any]:
    """``aten::scaled_dot_product_attention`` on ``meta``: ``flash``, ``fused``, ``efficient`` or ``eager``, by name.

    Where the kernel does not take the call the next slower one does, as in ``_fused_sdp_choice_cuda``: flash attention
    takes halves without a mask in heads of equal width up to 256, memory-efficient attention takes every mask but no
    grouped heads. ``fused`` are kernels that also take keys longer than values, as latent attention has them:
    FlashAttention 3 and cuDNN's.
    """

    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        grouped = key.dim() == query.dim() and key.shape[1] != query.shape[1]
        masked = attn_mask is not None or (is_causal and query.shape[-2] != key.shape[-2])
        width = query.shape[-1]
        kernel = attention
        if query.dim() != 4 or query.dtype not in (*_HALVES, torch.float32):
            kernel = "eager"
        elif kernel in ("flash", "fused") and (masked or query.dtype not in _HALVES or width > 256):
            kernel = "efficient"
        elif kernel in ("flash", "fused") and width != value.shape[-1]:
            kernel = "longer keys" if kernel == "fused" and width > value.shape[-1] else "efficient"
        if kernel == "eager" or (kernel == "efficient" and grouped):
            return torch.ops.aten._scaled_dot_product_attention_math.default(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        scale = scale if scale is not None else width**-0.5
        if kernel == "longer keys":
            needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
            return torch.ops.aten._scaled_dot_product_cudnn_attention.default(
                query, key, value, None, needs_gradient, dropout_p, is_causal, False, scale=scale
            )[0]
        if kernel in ("flash", "fused"):
            query, key, value = (_padded(tensor) for tensor in (query, key, value))
            result = torch.ops.aten._scaled_dot_product_flash_attention.default(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return result[..., :width] if result.shape[-1] != width else result
        needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        return torch.ops.aten._scaled_dot_product_efficient_attention.default(
            query, key, value, _additive(attn_mask, query, key), needs_gradient, dropout_p, is_causal, scale=scale
        )[0]

    return attend


def _padded(tensor: Any) -> Any:
    """Heads of a width that is a multiple of eight."""
    beyond = -tensor.shape[-1] % 8
    return torch.ops.aten.constant_pad_nd.default(tensor, [0, beyond]) if beyond else tensor


def _additive(mask: Any, query: Any, key: Any) -> Any:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    beyond = -key.shape[2] % 8
    if beyond:
        # Kernels read the mask in vectors: PyTorch pads it and takes a part.
        mask = torch.ops.aten.constant_pad_nd.default(mask, [0, beyond])[..., : key.shape[2]]
    return mask.expand(sizes)


def _dropout(tensor: Any, p: float, train: bool) -> Any:
    if not train or p == 0:
        return tensor
    return torch.ops.aten.native_dropout.default(tensor, p, True)[0] if p < 1 else tensor * 0.0


def _softmax(name: str) -> Callable[..., Any]:
    """Softmax of halves with a result in float32: boards cast while they read."""
    operator = getattr(torch.ops.aten, name).default

    def softmax(tensor: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
        if tensor.dtype == torch.float16 and dtype == torch.float32:
            return operator(tensor, dim, True)
        return operator(tensor if dtype is None else tensor.to(dtype), dim, False)

    return softmax


def _convolution(*arguments: Any) -> Any:
    """A convolution's result in the layout that cuDNN gives it: channels last where either operand has them so.

    PyTorch's own kernel for ``meta`` cannot know the board and leaves all results in NCHW.
    """
    from torch._meta_registrations import meta_conv
    from torch._prims_common import suggest_memory_format

    result = meta_conv(*arguments)
    layouts = {suggest_memory_format(tensor) for tensor in arguments[:2]}
    for layout in (torch.channels_last, torch.channels_last_3d):
        if layout in layouts and result.dim() == (4 if layout is torch.channels_last else 5):
            return torch.empty_like(result, memory_format=layout)
    return result


def _nothing(*_: Any, **__: Any) -> None:
    """An operator that writes into its arguments alone."""


def _grouped_products(mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """``aten::_grouped_mm`` of all types; PyTorch's own for ``meta`` takes bfloat16 alone."""
    if mat_a.dim() == mat_b.dim() == 2:
        sizes = [offs.shape[0], mat_a.shape[0], mat_b.shape[1]]
    elif mat_a.dim() == 2:
        sizes = [mat_a.shape[0], mat_b.shape[-1]]
    else:
        sizes = [*(mat_a.shape[1:2] if mat_b.dim() == 2 else mat_a.shape[:2]), mat_b.shape[-1]]
    return mat_a.new_empty(sizes, dtype=out_dtype or mat_a.dtype)


def _filled(tensor: Any, mask: Any, value: Any) -> Any:
    """``aten::masked_fill`` by a number that lies on the host, which boards take."""
    if value.is_meta:
        return torch.ops.aten.masked_fill.Tensor(tensor, mask, value)
    return torch.ops.aten.masked_fill.Scalar(tensor, mask, value.item())


#: What is run in the place of operators whose own kernels for ``meta`` take less than a board's.
SHAPE_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_products,
    torch.ops.aten.masked_fill.Tensor: _filled,
}


class ShapeFunctions(TorchDispatchMode):
    """Within, operators on ``meta`` take what they take on a board."""

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, or what stands in its place."""
        return SHAPE_FUNCTIONS.get(function, function)(*args, **(kwargs or {}))


@contextmanager
def board_kernels(attention: str) -> Iterator[None]:
    """Within, composed operators on ``meta`` have the parts that they have on a board."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", scaled_dot_product(attention), _KEY)
        library.impl("dropout", _dropout, _KEY)
        library.impl("softmax.int", _softmax("_softmax"), _KEY)
        library.impl("log_softmax.int", _softmax("_log_softmax"), _KEY)
        for name, kernel in BOARD_RECURRENCE.items():
            library.impl(name, kernel, _KEY)
        for name, kernel in META_RECURRENCE.items():
            library.impl(name, kernel, "Meta")
        library.impl("_fused_sgd_", _nothing, "Meta")
        library.impl("convolution", _convolution, "Meta")
        yield
    finally:
        library._destroy()
