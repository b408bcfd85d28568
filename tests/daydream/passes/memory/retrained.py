"""Networks trained plainly, with ``torch.utils.checkpoint`` around their blocks, or with accumulated gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from daydream.graph.graph import TaskGraph
from daydream.memory.attached import with_memory
from daydream.record.record import record
from daydream.tasks.build import read_graph

#: Micro-batches of the accumulated steps.
MICRO_BATCHES = 4

WARM_STEPS = 2


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


class Mixed(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Equal blocks between a first and a last layer."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.Sequential(*blocks), last

    def forward(self, x: Any) -> Any:
        return self.last(self.blocks(self.first(x)))


def resnet(widths: tuple[int, ...] = (32, 64, 96), side: int = 40) -> tuple[nn.Module, Any, Any]:
    """Six basic blocks of ResNet, a batch of images and their classes."""
    return SmallResNet(widths), torch.randn(16, 3, side, side), torch.randint(100, (16,))


def encoder(width: int = 192, tokens: int = 96, layers: int = 4) -> tuple[nn.Module, Any, Any]:
    """Layers of PyTorch's transformer."""
    blocks = [nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(layers)]
    model = Blocks(nn.Linear(64, width), blocks, nn.Sequential(nn.Flatten(), nn.Linear(tokens * width, 10)))
    return model, torch.randn(16, tokens, 64), torch.randint(10, (16,))


def mixer(width: int = 256, samples: int = 1024) -> tuple[nn.Module, Any, Any]:
    """Six residual blocks of linear layers."""
    model = Blocks(nn.Linear(64, width), [Mixed(width) for _ in range(6)], nn.Linear(width, 10))
    return model, torch.randn(samples, 64), torch.randint(10, (samples,))


def step_of(make: Callable[[], tuple[nn.Module, Any, Any]], change: str) -> tuple[nn.Module, Callable[[], None]]:
    """A network, and a training step of it: ``plain``, ``recompute`` or ``accumulate``."""
    torch.manual_seed(0)
    model, inputs, wanted = make()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if change == "recompute":
        for block in model.get_submodule("blocks").children():
            block.forward = _checkpointed(block.forward)
    parts = MICRO_BATCHES if change == "accumulate" else 1

    def step() -> None:
        optimizer.zero_grad()
        for part, target in zip(inputs.chunk(parts), wanted.chunk(parts), strict=True):
            loss = nn.functional.cross_entropy(model(part), target)
            (loss / parts if parts > 1 else loss).backward()
        optimizer.step()

    return model, step


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False)

    return again


def recording(make: Callable[[], tuple[nn.Module, Any, Any]], change: str, path: Path, steps: int) -> TaskGraph:
    """The graph of some recorded steps, with their memory."""
    model, step = step_of(make, change)
    with record(path, steps=steps, warmup=WARM_STEPS, model=model, memory=True) as recorder:
        while recorder.written is None:
            step()
            recorder.step()
    return with_memory(read_graph(path))


CHANGES: Mapping[str, dict[str, Any]] = {"recompute": {}, "accumulate": {"steps": MICRO_BATCHES}}
