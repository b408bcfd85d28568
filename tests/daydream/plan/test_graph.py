"""Graphs of plans: bubbles, overlap and exposed exchange, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daydream.graph.graph import Phase
from daydream.graph.simulate import simulate
from daydream.plan.costs import Costs, Pass, costs_of
from daydream.plan.graph import plan_graph
from daydream.plan.layout import Layout
from daydream.plan.planned import planned
from daydream.plan.search import outcome
from hal.catalog import load_device
from hal.node_catalog import load_node

pytestmark = pytest.mark.usefixtures("pytorch")

DEVICE, NODE = load_device("h100"), load_node("hgx-h100")


class Fixed(Costs):
    """Costs in whole numbers: a block takes 1 ms forward and 2 backward, all else nothing."""

    gather = reduce = message = lead = 0.0

    def passing(self, members: Any, phase: Phase) -> Pass:
        blocks = sum(not self.units.is_root(unit) for unit in members)
        return Pass(blocks * (1e-3 if phase == Phase.FORWARD else 2e-3), self.lead, 0.0, 0.0)

    def update(self, members: Any) -> Pass:
        return Pass(0.0, 0.0, 0.0, 0.0)

    def exchange(self, collective: str, size: float) -> float:
        return self.gather if collective == "all_gather" else self.reduce

    def hand_over(self, stage: int, other: int) -> float:
        return self.message

    def copied_out(self, unit: int) -> float:
        return 0.0

    copied_in = slowed = copied_out


@pytest.fixture
def fixed(units_of_model: Callable[..., Any]) -> Callable[..., float]:
    """Milliseconds of a step of six blocks and two units around them, by layout and length of its exchanges."""
    costs = costs_of(units_of_model("six"), Layout(), DEVICE, NODE)

    def step(layout: Layout, **seconds: float) -> float:
        each = Fixed(units=costs.units, layout=layout, step=costs.step, node=NODE)
        for name, value in seconds.items():
            object.__setattr__(each, name, value)
        return simulate(plan_graph(each)).makespan_us / 1e3

    return step


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_waits_for_all_stages_but_one(fixed: Callable[..., float], name: str) -> None:
    # Three stages of two blocks: 6 ms for a micro-batch, five of them, and two more to fill and to drain.
    layout = Layout(pipeline=3, micro_batches=5, schedule=name)  # type: ignore[arg-type]
    assert fixed(replace(layout, pipeline=1)) == pytest.approx(5 * 18)
    assert fixed(layout) == pytest.approx(5 * 6 + 2 * 6)


def test_chunks_shorten_the_bubble(fixed: Callable[..., float]) -> None:
    plain = fixed(Layout(pipeline=2, micro_batches=4))
    chunked = fixed(Layout(pipeline=2, micro_batches=4, schedule="interleaved", chunks=3))
    assert plain == pytest.approx(4 * 9 + 9)
    # A third of the bubble with three chunks (Narayanan et al. 2021, section 2.2.2).
    assert chunked == pytest.approx(4 * 9 + 3)


def test_messages_lengthen_what_fills_and_drains(fixed: Callable[..., float]) -> None:
    layout = Layout(pipeline=2, micro_batches=2)
    # F0 of the second stage begins 1 ms later, B0 of the first 1 ms after that.
    assert fixed(layout, message=1e-3) == pytest.approx(fixed(layout) + 2)


def test_a_host_that_waits_launches_behind_the_message(fixed: Callable[..., float]) -> None:
    ahead = Layout(pipeline=2, micro_batches=4)
    assert fixed(replace(ahead, waits=True)) == pytest.approx(fixed(ahead))
    assert fixed(replace(ahead, waits=True), lead=0.5e-3) == pytest.approx(fixed(ahead) + 0.5 * (2 * 4 + 2))


def test_gradients_are_exchanged_during_the_backward_pass(fixed: Callable[..., float]) -> None:
    layout = Layout(data=8, bucket_bytes=1e12)
    # One bucket is full when all is done.
    assert fixed(layout, reduce=5e-3) == pytest.approx(18 + 5)
    assert fixed(replace(layout, overlap=False), reduce=5e-3) == pytest.approx(18 + 5)
    # Blocks have 2.1 MB of gradients and head and embedding 0.5: behind the first block a bucket of 2.5 MB is full, and
    # another is left.
    assert fixed(replace(layout, bucket_bytes=2.5e6), reduce=1e-3) == pytest.approx(18 + 2)


def test_fsdp_hides_what_is_shorter_than_a_block(fixed: Callable[..., float]) -> None:
    # Nothing runs beside the gathers of root and first block, the root's second one, and the two exchanges that are
    # left when the first block is done.
    assert fixed(Layout(data=8, shard="fsdp"), gather=0.5e-3, reduce=0.5e-3) == pytest.approx(18 + 5 * 0.5)


def test_fsdp_waits_for_gathers_that_are_longer(fixed: Callable[..., float]) -> None:
    # Forward the root and six blocks are gathered one after the other, and the last block runs behind them. Backward
    # the root is gathered, then five blocks beside the ones behind them, and the first block runs at the end.
    forward, backward = 7 * 4 + 1, 4 + 5 * 4 + 2
    assert fixed(Layout(data=8, shard="fsdp"), gather=4e-3) == pytest.approx(forward + backward)


def test_micro_batches_exchange_once(fixed: Callable[..., float]) -> None:
    layout = Layout(data=8, micro_batches=3, bucket_bytes=1e12)
    assert fixed(layout, reduce=5e-3) == pytest.approx(3 * 18 + 5)


def test_shares_of_a_stage_add_up(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", tensor=2, dtype="bfloat16")
    step = planned(units, Layout(data=2, tensor=2, pipeline=2, micro_batches=4), DEVICE, NODE)
    for shares in step.shares:
        parts = (shares.kernels, shares.tensor, shares.exposed, shares.waiting)
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0
    assert step.samples == 8 * 2 * 4 and step.samples_per_second == pytest.approx(64 / step.seconds)
    record = step.record()
    assert record["ranks"] == 8 and len(record["stages"]) == 2 and record["fits"] is True


def test_a_thousand_ranks_are_as_many_tasks_as_their_stages(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    few, many = (planned(units, Layout(data=data, shard="fsdp"), DEVICE, NODE) for data in (8, 1024))
    assert len(few.timeline.graph) == len(many.timeline.graph)
    assert many.memory.owners != few.memory.owners


def test_tasks_name_block_and_pass(units_of_model: Callable[..., Any]) -> None:
    graph = planned(units_of_model("six"), Layout(data=8, shard="fsdp"), DEVICE, NODE).timeline.graph
    gathers = [graph.text(row) for row in range(len(graph)) if graph.text(row).startswith("all-gather")]
    assert gathers.count("all-gather blocks.3") == 2 and gathers.count("all-gather blocks.5") == 1
    assert np.isfinite(graph.bytes[[graph.text(row).startswith("reduce-scatter") for row in range(len(graph))]]).all()


def test_exchange_during_products_hides_all_but_the_last_part(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16", tensor=4, sequence=True)
    board, node = load_device("h100-sxm"), load_node("hgx-h100")
    waited = planned(units, Layout(tensor=4, data=2, sequence=True), board, node)
    hidden = planned(units, Layout(tensor=4, data=2, sequence=True, overlap_tensor=True), board, node)
    assert hidden.shares[0].tensor < waited.shares[0].tensor
    assert hidden.flops == waited.flops


def test_zero_two_exchanges_with_every_micro_batch(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    board, node = load_device("h100-sxm"), load_node("hgx-h100")
    counts = []
    for shard in ("zero1", "zero2"):
        layout = Layout(data=8, shard=shard, micro_batches=3, bucket_bytes=2**20)  # type: ignore[arg-type]
        graph = planned(units, layout, board, node).timeline.graph
        counts.append(sum(graph.text(row).startswith("reduce-scatter") for row in range(len(graph))))
    assert counts[1] == 3 * counts[0] > 0


def test_flops_of_the_model_leave_out_what_is_computed_again(units_of_model: Callable[..., Any]) -> None:
    board = load_device("h100-sxm")
    once = planned(units_of_model("six", dtype="bfloat16"), Layout(), board, None)
    again = planned(units_of_model("six", dtype="bfloat16", checkpoint="full"), Layout(), board, None)
    assert again.model_flops == pytest.approx(once.model_flops)
    assert again.flops > 1.1 * once.flops
    # The embedding has no gradient of its input: all products go three ways.
    assert once.model_flops == pytest.approx(once.flops, rel=0.02)
    assert once.usual_utilisation == pytest.approx(once.utilisation)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=8, shard="fsdp", micro_batches=24),
        Layout(data=8, micro_batches=24),
        Layout(data=8, pipeline=2, micro_batches=24),
        Layout(data=8, pipeline=3, schedule="interleaved", chunks=2, micro_batches=24),
    ],
)
def test_a_search_needs_few_micro_batches_to_tell_many(units_of_model: Callable[..., Any], layout: Layout) -> None:
    units = units_of_model("six", dtype="bfloat16")
    full = planned(units, layout, DEVICE, NODE)
    found = outcome(units, layout, DEVICE, NODE)
    assert found.seconds == pytest.approx(full.seconds, rel=1e-3)
    assert found.least == full.memory.least
