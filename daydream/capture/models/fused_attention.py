"""Fused attention for models of transformers whose own choice is attention written out.

Models with sinks (GPT-OSS) have no ``scaled_dot_product_attention``; frameworks train them by FlashAttention or cuDNN
with a window and a number a head that joins the softmax's sum. That number costs the kernels nothing that is priced.
"""

from __future__ import annotations

from typing import Any

import torch

#: What the function is registered with transformers as.
NAME = "daydream_fused"


def fused_attention(
    module: Any, query: Any, key: Any, value: Any, _: Any, scaling: float | None = None,
    sliding_window: int | None = None, **__: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attention of ``[batch, heads, tokens, width]`` by one causal kernel, with a window where the module has one."""
    turned = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    tokens = query.shape[2]
    windows: dict[str, int] = {}
    if sliding_window:
        windows = {"window_size_left": sliding_window - 1, "window_size_right": 0}
    result = torch.ops.aten._flash_attention_forward.default(
        *turned, None, None, tokens, tokens, 0.0, True, False, scale=scaling, **windows
    )
    return result[0], None


def fused_if_written_out(builder: Any, attention: str) -> str | None:
    """The registered name where fused attention is asked for and the class would write it out; else None.

    Args:
        builder: class of the model.
        attention: one of :data:`daydream.operators.variants.VERSIONS`.
    """
    fused = attention in ("flash", "flash2", "flash3", "cudnn")
    if not fused or getattr(builder, "_supports_sdpa", True) or not getattr(builder, "_supports_flash_attn", False):
        return None
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, fused_attention)
    return NAME
