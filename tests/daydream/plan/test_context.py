"""Samples that ranks share: what each sees of attention, and what they exchange for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from daydream.graph.graph import Phase
from daydream.operators.attention import attention_sides, is_attention, resized, seen_pairs
from daydream.plan.context import gathered_bytes
from daydream.plan.layout import Layout
from daydream.plan.planned import planned
from hal.catalog import load_device
from hal.node_catalog import load_node
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")

DEVICE, NODE = load_device("h100"), load_node("hgx-h100")

ATTENDING = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.take, self.give = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (8, 64)).transpose(1, 2) for each in self.take(x).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.give(seen.transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def attending(batch=2, sequence=2048):
    return Model(), (torch.zeros(batch, sequence, 512),)
"""


@pytest.fixture(scope="module")
def attending(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    path = tmp_path_factory.mktemp("context") / "model.py"
    path.write_text(ATTENDING)

    def units(sequence: int, attention: str = "flash2") -> Any:
        options = CaptureOptions(
            batch=2, sequence=sequence, dtype="bfloat16", optimizer="adamw", implementation="fused", attention=attention
        )
        return planned_units(f"{path}:attending", options)

    return units


def attention_rows(units: Any) -> list[int]:
    return [row for row, each in enumerate(units.capture.operators) if is_attention(each.name)]


def test_resized_attention_has_other_lengths_and_heads(attending: Callable[..., Any]) -> None:
    units = attending(2048)
    for row in attention_rows(units):
        operator = units.capture.operators[row]
        sides = attention_sides(operator.name, operator.inputs)
        assert sides is not None and (sides.queries, sides.keys, sides.heads, sides.causal) == (2048, 2048, 8, True)
        other = resized(operator.name, operator.inputs, keys=1024, parts=2, causal=False)
        changed = attention_sides(operator.name, other)
        assert changed == sides._replace(keys=1024, heads=4, kv_heads=4, causal=False)


@pytest.mark.parametrize("way", ["ring", "all-gather", "ulysses"])
def test_ranks_see_equal_parts_of_a_causal_sample(attending: Callable[..., Any], way: Any) -> None:
    whole_sample = planned(attending(8192), Layout(), DEVICE, NODE)
    parts = planned(attending(2048), Layout(context=4, exchange_context=way), DEVICE, NODE)
    seen = [step.costs.step.prices[attention_rows(step.costs.units)[0]] for step in (whole_sample, parts)]
    assert seen[0].work is not None and seen[1].work is not None
    # Of 8192 x 8193 / 2 pairs a rank sees a quarter, the diagonals of its pieces aside.
    assert seen[1].work.flops == pytest.approx(seen[0].work.flops / 4, rel=1e-3)
    kernels = sum(each.seconds for each in seen[1].kernels if each.model != "collectives")
    assert 0.2 < kernels / seen[0].seconds < 0.6
    exchanged = parts.costs.passing([2], Phase.FORWARD).exchanged
    assert exchanged >= 0 and (way == "ring" or exchanged > 0)


def test_a_ring_step_sees_half_of_the_pairs() -> None:
    own, queries = seen_pairs(2048, 2048, 0, causal=True), 2048
    assert own + 3 * queries * 1024 == pytest.approx(seen_pairs(8192, 8192, 0, causal=True) / 4, rel=1e-3)


def test_keys_of_other_ranks_take_memory(attending: Callable[..., Any]) -> None:
    operator = attending(2048).capture.operators[attention_rows(attending(2048))[0]]
    own = 2 * 2 * 8 * 2048 * 64 * 2
    layout = Layout(context=4)
    assert gathered_bytes(operator, layout) == 2 * own
    assert gathered_bytes(operator, replace(layout, exchange_context="all-gather")) == 4 * own
    assert gathered_bytes(operator, Layout()) == 0


def test_ranks_of_a_sample_exchange_its_gradients(attending: Callable[..., Any]) -> None:
    costs = planned(attending(2048), Layout(context=4, data=2), DEVICE, NODE).costs
    alone = planned(attending(2048), Layout(data=8), DEVICE, NODE).costs
    assert costs.exchange("all_reduce", costs.gradient_bytes(2)) == alone.exchange(
        "all_reduce", alone.gradient_bytes(2)
    )


def test_what_cannot_be_shared_is_refused(attending: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="8 heads"):
        planned(attending(256), Layout(context=16, exchange_context="ulysses"), DEVICE, NODE)
    with pytest.raises(InputError, match="no fused operator"):
        planned(attending(2048, "math"), Layout(context=4), DEVICE, NODE)
