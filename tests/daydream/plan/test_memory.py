"""Memory of ranks: parts of the model, gathered parameters, micro-batches under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daydream.graph.memory import MemoryKind
from daydream.plan.costs import costs_of
from daydream.plan.layout import Layout
from daydream.plan.memory import rank_memory
from hal.catalog import load_device
from hal.node_catalog import usual_node

pytestmark = pytest.mark.usefixtures("pytorch")

DEVICE = load_device("h100")

#: Elements of a block and of what lies around the blocks.
BLOCK, ROOT = 2 * 256 + 2 * 4 * 256 * 256 + 5 * 256, 512 * 256 + 512 * 256 + 512


def kept(memory: Any, kind: MemoryKind) -> int:
    """Bytes of a kind that are there before the step begins."""
    return sum(each.bytes for each in memory.main.held if each.born == -1 and each.kind is kind)


def test_what_ranks_share_is_divided(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    elements = 6 * BLOCK + ROOT
    plain = rank_memory(units, Layout(), 0, DEVICE)
    # In 16 bits, and in float32 with two states of the optimizer and a step counter of each of its tensors.
    counters = 4 * (6 * 6 + 3)
    assert kept(plain, MemoryKind.WEIGHTS) == 2 * elements
    assert kept(plain, MemoryKind.OPTIMIZER) == 12 * elements + counters
    sharded = rank_memory(units, Layout(data=4, shard="fsdp"), 0, DEVICE)
    assert kept(sharded, MemoryKind.WEIGHTS) == elements
    assert kept(sharded, MemoryKind.OPTIMIZER) == 2 * elements + counters
    states = rank_memory(units, Layout(data=4, shard="zero1", overlap=False), 0, DEVICE)
    assert kept(states, MemoryKind.WEIGHTS) == 2 * elements
    assert kept(states, MemoryKind.OPTIMIZER) == 3 * elements + counters


def test_without_a_copy_in_full_states_have_the_parameters_type(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    memory = rank_memory(units, Layout(master=False), 0, DEVICE)
    assert kept(memory, MemoryKind.OPTIMIZER) == 4 * (6 * BLOCK + ROOT) + 4 * (6 * 6 + 3)


def test_fsdp_gathers_and_gives_up(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    memory = rank_memory(units, Layout(data=4, shard="fsdp", reduce_bytes=4), 0, DEVICE)
    gathered = [each for each in memory.collectives.held if each.kind is MemoryKind.TEMPORARY]
    # Six blocks forward, five backward, and embedding and head both times.
    table, head = 2 * 512 * 256, 2 * (512 * 256 + 512)
    assert sorted(each.bytes for each in gathered) == sorted([2 * BLOCK] * 11 + [table, head] * 2)
    # What is left is a quarter of every gradient in float32.
    left = [each for each in memory.collectives.held if each.kind is MemoryKind.GRADIENTS]
    assert sum(each.bytes for each in left) == 6 * BLOCK + ROOT
    assert all(each.died == memory.collectives.operators for each in left)
    # Gradients of 16 bits are gone as soon as they are sent.
    assert not [
        each for each in memory.main.held if each.kind is MemoryKind.GRADIENTS and each.died == memory.main.operators
    ]
    # Never more than two blocks and the root are there at a time.
    parameters = [each for each in memory.main.held if each.kind is MemoryKind.WEIGHTS and each.born >= 0]
    most = max(
        sum(each.bytes for each in parameters if each.born <= moment <= each.died)
        for moment in range(memory.main.operators)
    )
    assert most <= 2 * (2 * BLOCK + ROOT)


def test_a_stage_holds_as_many_micro_batches_as_are_under_way(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six")

    def held(layout: Layout, stage: int) -> int:
        memory = rank_memory(units, layout, stage, DEVICE)
        return max(memory.main.by_kind(MemoryKind.FEATURE_MAPS).tolist())

    layout = Layout(pipeline=3, micro_batches=8)
    alone = held(Layout(pipeline=3, micro_batches=1), 1)
    # The second of three stages goes ahead by one micro-batch: two are under way, and a third as it comes.
    # The one that is on its way back has given up a little.
    assert 1.9 * alone < held(layout, 1) < 2.1 * alone
    assert 7.6 * alone < held(Layout(pipeline=3, micro_batches=8, schedule="gpipe"), 1) < 8 * alone
    # More micro-batches hold no more.
    assert held(Layout(pipeline=3, micro_batches=64), 1) == held(layout, 1)


def test_gradients_of_micro_batches_are_added_up(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six")
    once, often = (
        rank_memory(units, Layout(micro_batches=count), 0, DEVICE).main.by_kind(MemoryKind.GRADIENTS)
        for count in (1, 2)
    )
    assert once[-1] == often[-1] == 4 * (6 * BLOCK + ROOT)


def test_ddp_has_buckets(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six")
    alone, many = (rank_memory(units, Layout(data=data), 0, DEVICE).main.peak_bytes for data in (1, 8))
    assert many - alone == 4 * (6 * BLOCK + ROOT)


def gradients(memory: Any) -> int:
    """Bytes of gradients at the end of the step."""
    last = memory.main.operators
    return sum(
        each.bytes
        for each in memory.main.held
        if each.kind is MemoryKind.GRADIENTS and each.died == last and each.bytes
    )


def test_gradients_stay_in_the_type_of_their_exchange(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    elements = 6 * BLOCK + ROOT
    # Megatron's gradients lie in the buffer that is exchanged: no copies in buckets.
    states = Layout(data=4, shard="zero1")
    assert gradients(rank_memory(units, states, 0, DEVICE)) == 2 * elements
    assert gradients(rank_memory(units, replace(states, reduce_bytes=4), 0, DEVICE)) == 4 * elements
    # DDP has both.
    assert gradients(rank_memory(units, Layout(data=4), 0, DEVICE)) == 4 * elements


def test_zero_two_keeps_a_part_of_the_gradients(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    first, second = (rank_memory(units, Layout(data=4, shard=shard), 0, DEVICE) for shard in ("zero1", "zero2"))
    assert kept(first, MemoryKind.OPTIMIZER) == kept(second, MemoryKind.OPTIMIZER)
    assert gradients(second) == pytest.approx(gradients(first) / 4, rel=1e-3)


def test_attention_alone_is_computed_again(tmp_path: Path) -> None:
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units
    from tests.daydream.plan.test_context import ATTENDING

    path = tmp_path / "model.py"
    path.write_text(ATTENDING)

    def memory(checkpoint: str) -> tuple[int, int]:
        options = CaptureOptions(batch=2, sequence=512, dtype="bfloat16", attention="math", checkpoint=checkpoint)
        units = planned_units(f"{path}:attending", options)
        softmaxes = sum(
            "softmax" in each.name and "backward" not in each.name for each in units.capture.operators if each.launches
        )
        return softmaxes, rank_memory(units, Layout(), 0, DEVICE).least

    (kept_count, kept_bytes), (again_count, again_bytes) = memory("none"), memory("attention")
    # Three captured blocks, forward; the second time backward.
    assert (kept_count, again_count) == (3, 6)
    # Softmaxes of two samples and eight heads, 512 x 512 in float32 or their 16 bits, are not kept for four blocks.
    assert kept_bytes - again_bytes > 3 * 2 * 8 * 512 * 512 * 2


def test_narrow_layers_keep_a_byte_of_what_they_read(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    narrow = replace(units, capture=replace(units.capture, precision="fp8-tensorwise"))
    wide_bytes, narrow_bytes = (
        sum(each.bytes for each in rank_memory(each, Layout(), 0, DEVICE).main.held if each.kind is kind)
        for kind in (MemoryKind.FEATURE_MAPS,)
        for each in (units, narrow)
    )
    # Of each block the results of the norm and of GELU, 512 rows of 256 and 1024 columns, are kept in a byte.
    assert wide_bytes - narrow_bytes == 6 * 512 * (256 + 1024)
    weights = [kept(rank_memory(each, Layout(), 0, DEVICE), MemoryKind.WEIGHTS) for each in (units, narrow)]
    assert weights[1] - weights[0] == 6 * 2 * 2 * 4 * 256 * 256
    # Without the copies in 16 bits, what is gathered is a byte an element of them, too.
    layout = Layout(data=4, shard="zero1", narrow=True)
    alone = kept(rank_memory(narrow, layout, 0, DEVICE), MemoryKind.WEIGHTS)
    assert weights[1] - alone == 6 * 2 * 4 * 256 * 256 * 2
    node = usual_node(DEVICE)
    plans = (replace(layout, narrow=False), layout)
    gathered = [costs_of(narrow, each, DEVICE, node).unit_bytes(1).total for each in plans]
    assert gathered[0] - gathered[1] == 2 * 4 * 256 * 256
