"""Nemotron-4 15B from its published sizes (Parmar et al. 2024): squared ReLU, grouped keys, rotary positions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from daydream.capture.pytorch.step import Subject

#: Hidden size, heads, heads of keys, inner size, layers, tokens.
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, VOCABULARY = 6144, 48, 8, 24_576, 32, 256_000


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * self.width, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * self.width, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.view(*part.shape[:2], -1, self.width).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        tokens = query.shape[2]
        query, key = (_turned(each, cosines[:tokens], sines[:tokens]) for each in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(len(x), tokens, -1))


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(x)).square())


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.feed_forward = _Attention(), _FeedForward()

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), cosines, sines)
        return x + self.feed_forward(self.norm_2(x))


class Nemotron(nn.Module):
    """Nemotron-4 with untied embedding and head."""

    def __init__(self, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for name in ("cosines", "sines"):
            self.register_buffer(name, torch.zeros(sequence, HIDDEN // HEADS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits as [b, s, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines)
        return self.head(self.norm(x))


def nemotron_subject(*, sequence: int, batch: int) -> Subject:
    """The model with a micro-batch of tokens and the loss over logits in float32."""
    with torch.device("meta"):
        model = Nemotron(sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    return Subject(title="Nemotron-4 15B", model=model, args=(tokens,), loss=loss, batch=batch, optimizer="adamw")
