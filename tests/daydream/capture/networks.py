"""Small networks of five kinds, on whatever device is the default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Convolutional(nn.Module):
    """Convolutions with batch norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, groups=2), nn.BatchNorm2d(16), nn.SiLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.head(self.pool(self.body(self.stem(images))).flatten(1))
        return features


class Encoder(nn.Module):
    """A layer of attention with dropout, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, width = tokens.shape
        heads = self.mix(self.norms[0](tokens)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0))
        tokens = tokens + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return tokens + self.drop(self.narrow(functional.gelu(self.wide(self.norms[1](tokens)))))


class Recurrent(nn.Module):
    """Two layers of an LSTM over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(12, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(sequence)[0])
        return scores


class Causal(nn.Module):
    """A language model whose last product uses the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.queries, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        heads = self.queries(self.norm(hidden)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        scores = self.head(hidden + self.out(mixed.transpose(1, 2).flatten(2)))
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class UNet(nn.Module):
    """Convolutions with group norm, down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.last = nn.Conv2d(11, 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        small = functional.silu(self.norm(self.down(images)))
        large = functional.interpolate(functional.avg_pool2d(small, 2), scale_factor=2.0, mode="nearest")
        joined: torch.Tensor = self.last(torch.cat([self.up(small + large), images], 1))
        return joined


#: Network, and its input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "convolutional": (Convolutional, lambda: torch.zeros(2, 3, 16, 16)),
    "encoder": (Encoder, lambda: torch.zeros(2, 8, 32)),
    "recurrent": (Recurrent, lambda: torch.zeros(2, 6, 12)),
    "causal": (Causal, lambda: torch.zeros(2, 8, dtype=torch.long)),
    "u-net": (UNet, lambda: torch.zeros(2, 3, 16, 16)),
}
