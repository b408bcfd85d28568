"""What a board runs where PyTorch takes tensors without data apart: fused attention, dropout, recurrent layers.

Operators that PyTorch composes of others choose their parts by the device. For ``meta`` tensors they get the parts that
a CUDA board has, registered with the dispatcher, so that it does not matter from where a model calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def scaled_dot_product(attention: str) -> Callable[..., Any]:
    """``aten::scaled_dot_product_attention`` on ``meta``: ``flash``, ``efficient`` or ``eager`` kernels, by name."""

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
        half = query.dtype in (torch.float16, torch.bfloat16) or torch_autocasts()
        if attention == "eager":
            return torch.ops.aten._scaled_dot_product_attention_math.default(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        if attention == "flash" and half and attn_mask is None:
            return torch.ops.aten._scaled_dot_product_flash_attention.default(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mask = None if attn_mask is None else _additive(attn_mask, query, key)
        return torch.ops.aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]

    return attend


def _additive(mask: Any, query: Any, key: Any) -> Any:
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def torch_autocasts() -> bool:
    """Whether halves will reach the kernel although its arguments are in float32."""
    return _AUTOCASTS[0]


_AUTOCASTS = [False]


def _dropout(tensor: Any, p: float, train: bool) -> Any:
    return torch.ops.aten.native_dropout.default(tensor, p, True)[0] if train and p > 0 else tensor


@contextmanager
def board_kernels(attention: str, autocasts: bool) -> Iterator[None]:
    """Within, composed operators on ``meta`` have the parts that they have on a board."""
    library = torch.library.Library("aten", "IMPL")
    before = _AUTOCASTS[0]
    _AUTOCASTS[0] = autocasts
    try:
        # Without gradients the dispatcher comes by this key, too.
        library.impl("scaled_dot_product_attention", scaled_dot_product(attention), "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
        yield
    finally:
        _AUTOCASTS[0] = before
        library._destroy()
