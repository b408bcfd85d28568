"""Experts that ranks share: what each holds, and what carrying tokens costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daydream.graph.graph import Phase
from daydream.plan.experts import GROUPED, deepep_seconds, divided
from daydream.plan.layout import Layout
from daydream.plan.memory import rank_memory
from daydream.plan.planned import planned
from hal.catalog import load_device
from hal.node_catalog import load_node
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")

DEVICE, NODE = load_device("h100"), load_node("hgx-h100")

#: Experts, experts of a token, width, width within, tokens.
EXPERTS, TOP, WIDTH, WITHIN, TOKENS = 16, 2, 256, 384, 2048

ROUTED = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(16, 256, 384)), nn.Parameter(torch.zeros(16, 384, 256))

    def forward(self, x, chosen):
        order = chosen.flatten().sort()[1]
        ends = torch.zeros(16, dtype=torch.int32, device=x.device)
        y = torch._grouped_mm(torch._grouped_mm(x[order // 2], self.up, offs=ends).relu(), self.down, offs=ends)
        return y[order].unflatten(0, (-1, 2)).sum(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(256, 16), Experts()

    def forward(self, x):
        weights, chosen = self.router(x).topk(2)
        return x + self.experts(x, chosen) * weights.sum(-1, keepdim=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def routed(batch=1):
    return Model(), (torch.zeros(2048, 256),)
"""


#: The same, whose router looks at three of each group first, as DeepSeek-V3's at two.
IN_GROUPS = ROUTED.replace(
    "weights, chosen = self.router(x).topk(2)",
    "scores = self.router(x)\n"
    "        groups = scores.unflatten(-1, (4, 4)).topk(3)[0].sum((-1, -2))\n"
    "        weights, chosen = (scores + groups[:, None]).topk(2)",
)


def captured(path: Path, text: str) -> Any:
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    path.write_text(text)
    options = CaptureOptions(batch=1, dtype="bfloat16", optimizer="adamw", implementation="fused")
    return planned_units(f"{path}:routed", options)


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return captured(tmp_path_factory.mktemp("experts") / "model.py", ROUTED)


def test_a_rank_holds_its_part_of_every_stack(units: Any) -> None:
    part = divided(units, 4)
    stack, router = EXPERTS * WIDTH * WITHIN, EXPERTS * WIDTH + EXPERTS
    assert part.elements[1] == 2 * stack // 4 + router and units.elements[1] == 2 * stack + router
    grouped = [each for each in part.capture.operators if each.name == GROUPED]
    assert {each.inputs.tensors[1].dims[0] for each in grouped if len(each.inputs.tensors[1].dims) == 3} == {
        EXPERTS // 4
    }
    assert {each.inputs.tensors[2].dims for each in grouped} == {(EXPERTS // 4,)}
    assert divided(units, 1) is units


def test_gradients_of_experts_are_exchanged_by_those_that_have_the_same(units: Any) -> None:
    costs = planned(units, Layout(data=8, expert=4, shard="zero1"), DEVICE, NODE).costs
    sizes = costs.gradient_bytes(2)
    assert sizes.experts == 2 * 2 * EXPERTS * WIDTH * WITHIN / 4 and sizes.shared == 2 * (EXPERTS * WIDTH + EXPERTS)
    # Two ranks of eight share states of the same experts, all eight those of the router.
    assert costs.kept([2]) == (2 * EXPERTS * WIDTH * WITHIN / 4) / 2 + (EXPERTS * WIDTH + EXPERTS) / 8


def test_memory_of_experts_is_divided(units: Any) -> None:
    held = [
        sum(each.bytes for each in rank_memory(divided(units, ranks), Layout(data=8, expert=ranks), 0, DEVICE).main.held
            if each.born == -1 and each.kind.value == "optimizer states")
        for ranks in (1, 8)
    ]  # fmt: skip
    stack, router = 4 * 2 * EXPERTS * WIDTH * WITHIN, 4 * (EXPERTS * WIDTH + EXPERTS)
    # A copy in float32 and two states of every element.
    assert held[0] - held[1] == pytest.approx(12 * (stack - stack / 8), rel=1e-3)
    assert held[1] >= 12 * (stack / 8 + router)


def test_tokens_are_carried_twice_each_way(units: Any) -> None:
    step = planned(units, Layout(data=8, expert=8), DEVICE, NODE)
    names = [kernel.name for price in step.costs.step.prices for kernel in price.kernels if "all-to-all" in kernel.name]
    # Three captured blocks, forward and backward.
    assert len(names) == 3 * 2 * 2
    busier = planned(units, Layout(data=8, expert=8, imbalance=1.5), DEVICE, NODE)
    assert busier.costs.passing([2], Phase.FORWARD).device > step.costs.passing([2], Phase.FORWARD).device


def test_deepep_sends_a_token_once_to_a_node() -> None:
    size, choices = float(TOKENS * TOP * WIDTH * 2), 8
    spread = deepep_seconds(size, choices, 32, NODE, 8)
    assert NODE.network is not None
    # Three other nodes, each of which has one of a token's eight experts with 1 - (3/4)^8.
    across = size / choices * 3 * (1 - (3 / 4) ** 8) / NODE.network.reached_bytes_per_second
    assert spread == pytest.approx(NODE.collectives.call_seconds + NODE.network.latency_seconds + across)


def priced(units: Any, **options: Any) -> dict[str, float]:
    """Seconds of a step's kernels by their names, of the captured blocks."""
    step = planned(units, Layout(data=8, expert=8, micro_batches=2, **options), DEVICE, NODE)
    seconds: dict[str, float] = {}
    for kernel in (kernel for price in step.costs.step.prices for kernel in price.kernels):
        seconds[kernel.name] = seconds.get(kernel.name, 0.0) + kernel.seconds
    return seconds


def test_experts_of_a_token_are_those_that_a_router_of_groups_takes_in_the_end(units: Any, tmp_path: Path) -> None:
    in_groups = captured(tmp_path / "groups.py", IN_GROUPS)
    carried = [priced(each, dispatch="deepep")["deepep all-to-all"] for each in (units, in_groups)]
    assert carried[0] == carried[1]


def test_deepep_orders_tokens_by_kernels_of_its_own(units: Any) -> None:
    before, after = priced(units), priced(units, dispatch="deepep")
    rows = TOKENS * TOP * WIDTH * 2 / (2 if units.capture.dtype == "bfloat16" else 1)
    assert "permutation" not in before and "permutation" in after
    assert after["permutation"] > 3 * 2 * 2 * 2 * rows / DEVICE.dram.bandwidth_bytes_per_second * 0.9
    # What the model itself did to order rows is gone.
    assert sum(after.values()) - after["permutation"] < sum(before.values())


def test_tokens_are_carried_during_another_micro_batch(units: Any) -> None:
    alone, overlapped = (
        priced(units, dispatch="deepep", overlap_batches=overlaps)["deepep all-to-all"] for overlaps in (False, True)
    )
    assert overlapped >= alone * 20 / DEVICE.unit_count and overlapped < alone
    with pytest.raises(InputError, match="several micro-batches"):
        planned(units, Layout(data=8, expert=8, overlap_batches=True), DEVICE, NODE)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(data=8, expert=3), "do not divide"),
        (Layout(data=4, imbalance=0.5), "1 or more"),
        (Layout(data=32, expert=32), "16 experts"),
    ],
)
def test_what_cannot_be_divided_is_refused(units: Any, layout: Layout, said: str) -> None:
    with pytest.raises(InputError, match=said):
        planned(units, layout, DEVICE, NODE)


def test_a_model_without_experts_is_refused(units_of_model: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="grouped experts"):
        planned(units_of_model("six"), replace(Layout(data=8), expert=2), DEVICE, NODE)


def test_products_of_experts_run_by_the_kernels_that_are_named(units: Any) -> None:
    batched = replace(units, capture=replace(units.capture, expert_kernels="cublas"))
    names = [
        {kernel.name for op, price in zip(step.costs.units.capture.operators, step.costs.step.prices, strict=True)
         if op.name == GROUPED for kernel in price.kernels if kernel.model == "products"}
        for step in (planned(each, Layout(data=8, expert=4), DEVICE, NODE) for each in (units, batched))
    ]  # fmt: skip
    assert names[0] and names[1] and not names[0] & names[1]
