"""torchtitan's Llama 3.1, from its published sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from daydream.capture.pytorch.step import Subject

#: Hidden size, layers, heads, heads of keys, inner size.
SIZES = {"llama3.1_8b": (4096, 32, 32, 8, 14_336), "llama3.1_70b": (8192, 80, 64, 8, 28_672)}

VOCABULARY = 128_256


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.wq = nn.Linear(hidden, heads * self.width, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.wo = nn.Linear(heads * self.width, hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        query, key, value = (layer(x).view(b, s, -1, self.width) for layer in (self.wq, self.wk, self.wv))
        query, key = _turned(query, angles), _turned(key, angles)
        times = query.shape[2] // key.shape[2]
        key, value = _repeated(key, times), _repeated(value, times)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.wo(mixed.transpose(1, 2).contiguous().view(b, s, -1))


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    b, s, heads, width = x.shape
    return x[:, :, :, None, :].expand(b, s, heads, times, width).reshape(b, s, heads * times, width)


class _FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(hidden, heads, kv_heads), _FeedForward(hidden, inner)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Llama with untied embedding and head."""

    def __init__(self, name: str, sequence: int) -> None:
        super().__init__()
        hidden, layers, heads, kv_heads, inner = SIZES[name]
        self.tok_embeddings = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(_Block(hidden, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, VOCABULARY, bias=False)
        self.register_buffer("angles", torch.zeros(sequence, hidden // heads // 2, dtype=torch.complex64))

    def forward(self, tokens: torch.Tensor) -> Any:
        """Logits as [b, s, vocabulary]."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def llama_subject(name: str, *, sequence: int, batch: int) -> Subject:
    """The model with a batch of tokens and torchtitan's loss, over logits in float32."""
    with torch.device("meta"):
        model = Llama(name, sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return Subject(title=name, model=model, args=(tokens,), loss=loss, batch=batch, optimizer="adamw")
