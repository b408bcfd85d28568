"""Models that the ranks on gloo train: two tiny ones under DDP or FSDP2.

The processor stands in for a board: a block computes little and sleeps for as long as a board would work, so that
ranks which share cores do not slow each other down. What is left on the cores is what a board leaves there too (the
framework, the optimizer), and gloo, whose transfers are copies by the operating system.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job.

    Attributes:
        model: a name of `MODELS`.
        ranks: processes.
        kind: ``ddp``, ``fsdp`` (`fully_shard` around every block and around the whole), or ``plain``.
        bucket_mb: DDP's `bucket_cap_mb`, MiB; 0 for its default.
        buckets: DDP's `bucket_cap_mb_list`, MiB, in place of `bucket_mb`; empty for none.
        work: how long a block sleeps, as a multiple of the model's usual time; 0 for never.
    """

    model: str
    ranks: int
    kind: str = "ddp"
    bucket_mb: float = 0.0
    buckets: tuple[float, ...] = ()
    work: float = 1.0

    @property
    def name(self) -> str:
        """A name for people and files: ``mlp-ddp2``, ``mlp-ddp2-4mb``, ``mlp-fsdp4``."""
        bucket = f"-{self.bucket_mb:g}mb" if self.bucket_mb else ""
        bucket += f"-{len(self.buckets)}listed" if self.buckets else ""
        return f"{self.model}-{self.kind}{self.ranks}{bucket}" + ("" if self.work else "-awake")


class _Sleep(torch.autograd.Function):
    """Nothing but time: `seconds` in the forward pass, twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float) -> Any:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


#: PyTorch's types do not tell what a function of autograd takes.
_SLEEP: Callable[..., Any] = _Sleep.apply


class Block(nn.Module):
    """A layer that takes longer than its arithmetic."""

    def __init__(self, layer: nn.Module, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = layer, seconds

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        return _SLEEP(x, self.seconds) if self.seconds else x


def mlp(work: float) -> tuple[nn.Module, Any, Any]:
    """Six linear layers of 1 MiB each."""
    layers = [Block(nn.Sequential(nn.Linear(512, 512), nn.ReLU()), 20e-3 * work) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(8, 512), torch.randint(10, (8,))


def transformer(work: float) -> tuple[nn.Module, Any, Any]:
    """Four layers of PyTorch's transformer, 0.76 MiB each, between an embedding and its words."""
    layers = [Block(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True), 30e-3 * work) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(1000, 128), *layers, nn.Flatten(0, 1), nn.Linear(128, 1000))
    return model, torch.randint(1000, (2, 16)), torch.randint(1000, (32,))


def tiny(_: float) -> tuple[nn.Module, Any, Any]:
    """Six layers that take no time: what is left is what the framework costs."""
    layers = [Block(nn.Linear(8, 8), 0.0) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(8, 8), torch.randint(8, (8,))


MODELS: dict[str, Callable[[float], tuple[nn.Module, Any, Any]]] = {
    "mlp": mlp,
    "transformer": transformer,
    "tiny": tiny,
}


class Training:
    """A job on this rank.

    Attributes:
        model: as it is wrapped.
    """

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        model, self._inputs, self._wanted = MODELS[job.model](job.work)
        self.model: nn.Module
        if job.kind == "fsdp":
            for block in model.children():
                if isinstance(block, Block):
                    fully_shard(block)
            fully_shard(model)
            self.model = model
        elif job.kind == "plain":
            self.model = model
        else:
            listed: Any = list(job.buckets) or None
            self.model = DistributedDataParallel(model, bucket_cap_mb=job.bucket_mb or None, bucket_cap_mb_list=listed)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self._inputs), self._wanted).backward()
        self._optimizer.step()
