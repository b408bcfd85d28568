"""A small model of equal blocks, captured as plans need it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks, width=256, tokens=512):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parts(blocks, batch):
    tokens = torch.zeros(batch, 64, dtype=torch.long)
    return Model(blocks), (tokens,), lambda out: functional.cross_entropy(out.flatten(0, 1), tokens.flatten())


def six(batch=8):
    return parts(6, batch)


def three(batch=8):
    return parts(3, batch)
"""


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="session")
def units_of_model(model_file: Path) -> Callable[..., Any]:
    """Captures the model: ``units_of_model("six", dtype="bfloat16", tensor=2)``; equal ones once."""
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    @cache
    def units(
        name: str = "six", *, tensor: int = 1, sequence: bool = False, compiles: bool = False, **options: Any
    ) -> Any:
        captured = CaptureOptions(**({"batch": 8, "optimizer": "adamw", "implementation": "fused"} | options))
        return planned_units(
            f"{model_file}:{name}", captured, tensor=tensor, sequence_parallel=sequence, compiles=compiles
        )

    return units
