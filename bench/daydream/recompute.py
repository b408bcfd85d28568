"""``python -m bench.daydream.recompute``: recomputation and accumulation, predicted from a plain recording, then done.

Three networks are trained on one core: plainly, with ``torch.utils.checkpoint`` around their blocks, and with gradients
accumulated over micro-batches. The step's time and the peak of its memory are predicted from a recording of the
plain training alone, and compared. Times are of the processor, which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.daydream.cpu_models import SmallResNet
from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.memory.beside import with_memory
from daydream.passes import registered
from daydream.passes.basis.bytes import memory_of
from daydream.passes.unprofiled import unprofiled
from daydream.record.record import record
from daydream.tasks.build import read_graph

#: What is promised: off by so much at most, of times and of peaks.
TIME_LIMIT, PEAK_LIMIT = 0.08, 0.05

#: Micro-batches of the accumulated steps.
MICRO_BATCHES = 4

WARM_STEPS = 2


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


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "resnet": resnet,
    "encoder": encoder,
    "mixer": mixer,
}


@dataclass(frozen=True)
class Row:
    """A change of a network: seconds and bytes of a step as measured and as predicted."""

    model: str
    change: str
    seconds: float
    predicted_seconds: float
    peak: float
    predicted_peak: float

    @property
    def time_error(self) -> float:
        """Predicted over measured time, less one."""
        return self.predicted_seconds / self.seconds - 1

    @property
    def peak_error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_peak / self.peak - 1


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


def in_turns(steps: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of the processor that every kind of step takes, in rounds in which each has its turn.

    The median of the first kind; of another one that times the median of its ratio to the first in the same round,
    since a machine whose pace changes does so for both.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + WARM_STEPS):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if number >= WARM_STEPS:
                times[name].append(time.process_time() - began)
    first = next(iter(times.values()))
    ratios = {
        name: statistics.median(seconds / other for seconds, other in zip(some, first, strict=True))
        for name, some in times.items()
    }
    return {name: ratio * statistics.median(first) for name, ratio in ratios.items()}


CHANGES: Mapping[str, dict[str, Any]] = {"recompute": {}, "accumulate": {"steps": MICRO_BATCHES}}


def measured(name: str, rounds: int, folder: Path) -> list[Row]:
    """Every change of a network, predicted and done."""
    make = MODELS[name]
    recorded = recording(make, "plain", folder / f"{name}-plain.json", max(rounds // 4, 3))
    seconds = in_turns({change: step_of(make, change)[1] for change in ("plain", *CHANGES)}, rounds)
    clean = unprofiled(recorded, step_ms=1e3 * seconds["plain"]).graph
    rows = [_row(name, "plain", seconds["plain"], clean, recorded)]
    for change, parameters in CHANGES.items():
        outcome = registered()[change](clean, **parameters)
        done = recording(make, change, folder / f"{name}-{change}.json", 3)
        rows.append(_row(name, change, seconds[change], outcome.graph, done))
    return rows


def _row(name: str, change: str, seconds: float, predicted: TaskGraph, done: TaskGraph) -> Row:
    full = [index for index, step in enumerate(predicted.steps) if step.full]
    step_us = statistics.median(simulate(predicted).step_us[full].tolist())
    peaks = [memory.peak_bytes if (memory := memory_of(graph)) is not None else 0.0 for graph in (done, predicted)]
    return Row(name, change, seconds, step_us * 1e-6, *peaks)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--models", default=",".join(MODELS), show_default=True, metavar="NAME,NAME", help="Which networks.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Turns of each step.")
def main(models: str, rounds: int) -> None:
    """Predict recomputation and accumulation from plain recordings, and do them."""
    torch.set_num_threads(1)
    heads = ("network", "change", "ms", "predicted", "", "peak MB", "predicted", "")
    click.echo(("{:<10}{:<12}" + "{:>10}" * 6).format(*heads))
    met = True
    with tempfile.TemporaryDirectory() as folder:
        for name in models.split(","):
            for row in measured(name, rounds, Path(folder)):
                times = f"{row.seconds * 1e3:>10.1f}{row.predicted_seconds * 1e3:>10.1f}{row.time_error:>+10.1%}"
                peaks = f"{row.peak / 1e6:>10.2f}{row.predicted_peak / 1e6:>10.2f}{row.peak_error:>+10.1%}"
                click.echo(f"{row.model:<10}{row.change:<12}{times}{peaks}")
                met &= abs(row.time_error) <= TIME_LIMIT and abs(row.peak_error) <= PEAK_LIMIT
    click.echo(f"times within {TIME_LIMIT:.0%} and peaks within {PEAK_LIMIT:.0%}: {'yes' if met else 'no'}")


if __name__ == "__main__":
    main()
