"""Tensor ranks: which layers are divided, what is exchanged, and what cannot be divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daydream.graph.graph import Phase
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")


def exchanges(units: Any) -> Counter[tuple[str, int]]:
    return Counter(
        (each.name.removeprefix("_c10d_functional::"), int(each.phase))
        for each in units.capture.operators
        if each.name.startswith("_c10d_functional::")
    )


def test_a_pair_of_layers_is_exchanged_once_each_way(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("three", tensor=2)
    # Forward behind the second half of three blocks and the embedding, backward in front of their first and the head.
    assert exchanges(units) == {("all_reduce", Phase.FORWARD): 4, ("all_reduce", Phase.BACKWARD): 4}
    sizes = {each.name: each.tensor.dims for each in units.capture.parameters}
    assert sizes["blocks.0.up.weight"] == (512, 256) and sizes["blocks.0.up.bias"] == (512,)
    assert sizes["blocks.0.down.weight"] == (256, 512) and sizes["blocks.0.down.bias"] == (256,)
    assert sizes["embed.weight"] == sizes["head.weight"] == (256, 256) and sizes["blocks.0.norm.weight"] == (256,)


def test_parts_of_the_sequence_are_gathered_and_scattered(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("three", tensor=2, sequence=True)
    assert exchanges(units) == {
        ("reduce_scatter_tensor", Phase.FORWARD): 4, ("all_gather_into_tensor", Phase.FORWARD): 4,
        ("reduce_scatter_tensor", Phase.BACKWARD): 4, ("all_gather_into_tensor", Phase.BACKWARD): 4,
    }  # fmt: skip
    norm = next(each for each in units.capture.operators if each.name == "aten::native_layer_norm")
    assert norm.outputs[0].dims == (8, 32, 256)


def test_the_work_of_two_ranks_is_that_of_one(units_of_model: Callable[..., Any]) -> None:
    from daydream.prediction.step import predicted
    from hal.catalog import load_device

    flops = []
    for tensor in (1, 2, 4):
        (step,) = predicted(units_of_model("three", tensor=tensor).capture, [load_device("h100")])
        flops.append(tensor * step.flops)
    assert flops == pytest.approx([flops[0]] * 3)


BAD = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.blocks = nn.ModuleList(Odd(layers, width) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def odd():
    return Model(3, 8), (torch.zeros(2, 8),)


def seven():
    return Model(2, 7), (torch.zeros(2, 7),)


def none():
    return nn.Linear(8, 8), (torch.zeros(2, 8),)
"""


@pytest.mark.parametrize(
    ("name", "said"), [("odd", "do not come in pairs"), ("seven", "has 7, which 2 ranks"), ("none", "repeats no block")]
)
def test_what_cannot_be_divided_is_refused(name: str, said: str, tmp_path: Path) -> None:
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    path = tmp_path / "bad.py"
    path.write_text(BAD)
    with pytest.raises(InputError, match=said):
        planned_units(f"{path}:{name}", CaptureOptions(), tensor=2)


def test_heads_of_a_library_model_are_divided(tmp_path: Path) -> None:
    import json

    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "intermediate_size": 128,
                "vocab_size": 1000,
            }
        )
    )
    units = planned_units(f"hf:{path}", CaptureOptions(batch=2, sequence=16, dtype="bfloat16"), tensor=4)
    attention = next(each for each in units.capture.operators if "flash_attention" in each.name)
    assert attention.outputs[0].dims[1] == 2 and len(units.blocks) == 4
    assert exchanges(units)["all_reduce", Phase.FORWARD] == 1 + 2 * 3
    options = CaptureOptions(batch=2, sequence=16, dtype="bfloat16")
    parted = planned_units(f"hf:{path}", options, tensor=4, sequence_parallel=True)
    norm = next(each for each in parted.capture.operators if each.module >= 0 and each.name == "aten::mean")
    assert norm.outputs[0].dims == (2, 4, 1)
    # Parts that are read where they arrive are not put next to each other: the exchanges stay, and the copies go.
    read = planned_units(f"hf:{path}", options, tensor=4, sequence_parallel=True, in_place=True)
    assert exchanges(read) == exchanges(parted)
    copies = [sum(op.name == "aten::cat" for op in each.capture.operators) for each in (parted, read)]
    gathers = [value for (name, _), value in exchanges(parted).items() if name != "all_reduce"]
    assert copies[0] - copies[1] == sum(gathers)


IN_BLOCK = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixed, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        b, s, _ = x.shape
        query, key, value = (t.view(b, s, -1, 16).transpose(1, 2) for t in self.mixed(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(b, s, -1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(128, 64), nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def make(batch=2):
    return Model(), (torch.zeros(batch, 32, dtype=torch.long),)
"""


def test_attention_within_a_block_that_counts_its_tokens_is_refused_in_one_line(tmp_path: Path) -> None:
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    path = tmp_path / "inside.py"
    path.write_text(IN_BLOCK)
    options = CaptureOptions(batch=2)
    assert exchanges(planned_units(f"{path}:make", options, tensor=2))
    with pytest.raises(InputError, match="--sequence-parallel: the model counts tokens") as refused:
        planned_units(f"{path}:make", options, tensor=2, sequence_parallel=True)
    assert "\n" not in str(refused.value) and "module of its own" in refused.value.remedy
