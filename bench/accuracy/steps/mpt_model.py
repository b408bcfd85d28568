"""MPT as llm-foundry trained it in 2023, from its published sizes: what its benchmark's options make of a step.

Norms run in 16 bits (``low_precision_layernorm``), the loss is FlashAttention's fused cross entropy, and Composer
computes two metrics of every micro-batch, cross entropy and perplexity, each from the logits in float32. Fused kernels
of the loss cost the bytes that they read and write: they are operators that no rule of ours knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from daydream.capture.pytorch.step import Subject

#: Hidden size, heads, layers.
SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip

VOCABULARY = 50_368

#: Metrics of a micro-batch, each of which makes the loss of the logits anew.
METRICS = 2

_LIBRARY = torch.library.Library("flash_attn", "FRAGMENT")
_LIBRARY.define("cross_entropy(Tensor logits, Tensor labels) -> Tensor")
_LIBRARY.define("cross_entropy_backward(Tensor gradient, Tensor logits, Tensor labels) -> Tensor")
_LIBRARY.impl("cross_entropy", lambda logits, _: torch.empty(len(logits), device=logits.device), "Meta")
_LIBRARY.impl("cross_entropy_backward", lambda _, logits, __: torch.empty_like(logits), "Meta")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(logits, labels)
        return torch.ops.flash_attn.cross_entropy(logits, labels)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.flash_attn.cross_entropy_backward(gradient, *context.saved_tensors), None


def _apply(function: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """The function with its gradient."""
    result: torch.Tensor = function.apply(*tensors)
    return result


class _LowPrecisionNorm(nn.LayerNorm):
    """A norm in the type of autocast, where that is on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled("cuda"):
            return super().forward(x)
        dtype = torch.get_autocast_dtype("cuda")
        x, weight, bias = (each.to(dtype) for each in (x, self.weight, self.bias))
        with torch.autocast("cuda", enabled=False):
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.Wqkv, self.out_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, hidden = x.shape
        parts = self.Wqkv(x).chunk(3, dim=2)
        query, key, value = (each.view(b, s, self.heads, -1).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(b, s, hidden))


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _LowPrecisionNorm(hidden), _LowPrecisionNorm(hidden)
        self.attn = _Attention(hidden, heads)
        self.up_proj, self.down_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.down_proj(functional.gelu(self.up_proj(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT with learned positions, biases and the embedding as head."""

    def __init__(self, name: str, sequence: int) -> None:
        super().__init__()
        hidden, heads, layers = SIZES[name]
        self.wte, self.wpe = nn.Embedding(VOCABULARY, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads) for _ in range(layers))
        self.norm_f = _LowPrecisionNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits as [b, s, vocabulary]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm_f(x), self.wte.weight)


def mpt_subject(name: str, *, sequence: int, batch: int) -> Subject:
    """The model with a micro-batch of tokens, its loss, and the metrics of Composer."""
    with torch.device("meta"):
        model = Mpt(name, sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        rows, labels = logits.flatten(0, 1), tokens.flatten()
        total = _apply(_CrossEntropy, rows, labels).mean()
        with torch.no_grad():
            for _ in range(METRICS):
                functional.cross_entropy(rows, labels, reduction="sum")
        return total

    return Subject(title=f"MPT {name}", model=model, args=(tokens,), loss=loss, batch=batch, optimizer="adamw")
