"""The two networks of the loop on the CPU: as their authors would write them, in evaluation mode, random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """A basic block of ResNet: two 3x3 convolutions and the way around them."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != filters:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters)
            )

    def forward(self, x: Any) -> Any:
        around = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += around
        return self.relu(y)


class SmallResNet(nn.Module):
    """Stages of two basic blocks behind a 3x3 stem; the mean over the image, a linear classifier."""

    def __init__(self, widths: tuple[int, ...] = (64, 96, 128), classes: int = 100) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        channels, blocks = widths[0], []
        for stage, filters in enumerate(widths):
            blocks += [Block(channels, filters, 1 if stage == 0 else 2), Block(filters, filters, 1)]
            channels = filters
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.pool(x), 1))


class Layer(nn.Module):
    """A layer of a transformer, norms first: attention as two batched products, a GELU in the middle of the rest."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        tokens, width = x.shape
        split = self.qkv(self.norm1(x)).view(tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(1, 2, 0, 3).contiguous().unbind(0)
        weights = torch.softmax(torch.bmm(q * self.scale, k.transpose(1, 2)), -1)
        mixed = torch.bmm(weights, v).transpose(0, 1).reshape(tokens, width)
        x = x + self.out(mixed)
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class SmallTransformer(nn.Sequential):
    """Layers over tokens that are embedded already."""

    def __init__(self, layers: int = 4, width: int = 384, heads: int = 6) -> None:
        super().__init__(*(Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width))


def small_resnet(size: int = 56, widths: tuple[int, ...] = (64, 96, 128)) -> tuple[Any, tuple[Any, ...]]:
    """The network, its batch norms with statistics as after some training, and an image for it."""
    torch.manual_seed(0)
    model = SmallResNet(widths).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.8, 1.2)
    return model, (torch.randn(1, 3, size, size),)


def small_transformer(
    tokens: int = 128, layers: int = 4, width: int = 384, heads: int = 6
) -> tuple[Any, tuple[Any, ...]]:
    """The network and a sequence for it."""
    torch.manual_seed(0)
    return SmallTransformer(layers, width, heads).eval(), (torch.randn(tokens, width),)
