"""Steps trained on the CPU under the profiler against the same steps captured: as many bytes at the peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from daydream.capture.pytorch.step import Subject, capture  # noqa: E402
from daydream.memory.footprint import MemoryKind, footprint  # noqa: E402
from daydream.memory.owners import layers_at  # noqa: E402
from daydream.memory.recorded import RecordedMemory, recorded_memory  # noqa: E402
from daydream.record.record import record  # noqa: E402
from daydream.trace.files import read_trace  # noqa: E402
from daydream.trace.trace import NONE  # noqa: E402

#: What the profiler does not see on the CPU, since it was there before.
BEFORE = (MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER, MemoryKind.INPUTS)


class Attention(nn.Module):
    """Embedded tokens, a head of attention without a fused kernel, a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
        self.mix, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.feed = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: Any) -> Any:
        embedded = self.embed(tokens)
        query, key, value = self.mix(self.norm(embedded)).chunk(3, -1)
        embedded = embedded + self.out(torch.softmax(query @ key.transpose(1, 2) / 8, -1) @ value)
        return self.head(embedded + self.feed(embedded)).flatten(0, 1)


def perceptron() -> Any:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))


def convolutional() -> Any:
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 10))


def images(device: str) -> Any:
    return torch.zeros(8, 3, 32, 32, device=device)


def vectors(device: str) -> Any:
    return torch.zeros(64, 256, device=device)


def tokens(device: str) -> Any:
    return torch.zeros(4, 32, dtype=torch.long, device=device)


def recorded(make: Callable[[], Any], inputs: Any, samples: int, update: Any, path: Path) -> RecordedMemory:
    model, targets = make(), torch.zeros(samples, dtype=torch.long)
    optimizer = update(model.parameters(), 0.01, foreach=True)
    with record(path, steps=2, warmup=1, model=model, memory=True) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            # The captured step forgets it there, too.
            del loss
            optimizer.step()
            recorder.step()
    (memory,) = recorded_memory(read_trace(path))
    return memory


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("make", "inputs", "samples"), [(perceptron, vectors, 64), (convolutional, images, 8), (Attention, tokens, 128)]
)
def test_the_peak_of_a_captured_step(
    make: Callable[[], Any], inputs: Callable[[str], Any], samples: int, optimizer: str, tmp_path: Path
) -> None:
    update = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    memory = recorded(make, inputs("cpu"), samples, update, tmp_path / "step.json")
    with torch.device("meta"):
        model, targets = make(), torch.zeros(samples, dtype=torch.long)

    def loss(scores: Any) -> Any:
        return functional.cross_entropy(scores, targets)

    subject = Subject(title="model", model=model, args=(inputs("meta"),), loss=loss, optimizer=optimizer)
    predicted = footprint(capture(subject, training=True))
    expected = predicted.peak_bytes - sum(predicted.owners()[kind] for kind in BEFORE)
    # The profiler goes on to tell of frees at addresses that it met in this process' earlier recordings.
    own = replace(memory.footprint, held=tuple(each for each in memory.footprint.held if each.born != NONE)).allocated
    peaks = [int(own[step.begin : step.end].max()) for step in memory.steps]
    assert peaks == pytest.approx([expected, expected], rel=0.02)
    # The second step finds the gradients of the first.
    gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    assert own[memory.steps[1].begin - 1] == gradients


def test_kinds_and_layers_of_a_recorded_step(tmp_path: Path) -> None:
    memory = recorded(convolutional, images("cpu"), 8, torch.optim.SGD, tmp_path / "step.json")
    kinds = memory.kinds_at(memory.steps[0].peak)
    assert max(kinds, key=lambda kind: kinds[kind]) is MemoryKind.FEATURE_MAPS
    sizes = {layer.name: layer.by_kind for layer in layers_at(memory.footprint, memory.steps[0].peak, memory.layers)}
    # The result of the first convolution: 8 x 16 x 32 x 32 numbers.
    assert sizes["0"][MemoryKind.FEATURE_MAPS] == 8 * 16 * 32 * 32 * 4
    made = [each for each in memory.footprint.held if each.born != NONE]
    gradients = [each for each in made if each.kind is MemoryKind.GRADIENTS]
    trained = sum(each.numel() for each in convolutional().parameters())
    assert sum(each.bytes for each in gradients) == 2 * 4 * trained
