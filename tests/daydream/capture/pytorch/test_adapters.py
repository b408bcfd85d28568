"""Low-rank adapters: what is trained, what is computed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from daydream.graph.graph import Phase
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")

#: Tokens, columns of a block's layers, columns between them, blocks, rank.
TOKENS, WIDTH, WIDER, BLOCKS, RANK = 48, 64, 96, 3, 4


def step(lora: str) -> Any:
    import torch
    from torch import nn

    from daydream.capture.options import CaptureOptions
    from daydream.capture.pytorch.step import Subject
    from daydream.capture.sources import captured

    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)) for _ in range(BLOCKS)]
        model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 7))
        tokens = torch.empty(TOKENS, WIDTH)
    return captured(Subject(title="a model", model=model, args=(tokens,)), CaptureOptions(optimizer="adamw", lora=lora))


def test_adapters_alone_are_trained() -> None:
    capture = step("rank=4")
    trained = [each for each in capture.parameters if each.trained]
    assert {each.name.split(".")[-2] for each in trained} == {"lora_A", "lora_B"}
    assert sum(each.tensor.elements for each in trained) == BLOCKS * 2 * RANK * (WIDTH + WIDER)
    # Two states and no counter on the device of each: AdamW's are as large as what is trained.
    states = sum(each.bytes for each in capture.storages if each.kind == "optimizer")
    assert states >= 2 * 4 * BLOCKS * 2 * RANK * (WIDTH + WIDER)


def test_frozen_weights_have_no_gradient() -> None:
    full, adapted = step(""), step("rank=4,modules=0")
    products = [
        [each for each in capture.operators if each.phase == Phase.BACKWARD and each.name == "aten::mm"]
        for capture in (full, adapted)
    ]
    # Layers have two gradients each, but the first layer's data none.
    assert len(products[0]) == 2 * (2 * BLOCKS + 1) - 1
    # Those called 0 have adapters: a gradient of their data each but the first block's, two of A, two of B, and again
    # none of the first one's data; those called 1 and the head have one of their data.
    assert len(products[1]) == (BLOCKS - 1) + (4 * BLOCKS - 1) + BLOCKS + 1


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("4", "rank=16"),
        ("rank=0", "rank"),
        ("rank=4,modules=", "rank=16"),
        ("rank=4,rank=8", "rank=16"),
        ("rank=4,modules=q_proj", "called 0, 1"),
        ("alpha=4", "rank=16"),
    ],
)
def test_what_names_no_adapters_is_refused(lora: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        step(lora)
    assert said in str(caught.value)
