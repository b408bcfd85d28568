"""Stages of equal cost, by hand, and sends that block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daydream.plan.balance import least_dear
from daydream.plan.layout import Layout
from daydream.plan.planned import planned
from hal.catalog import load_device
from hal.node_catalog import load_node
from hal.support.errors import InputError

DEVICE, NODE = load_device("h100"), load_node("hgx-h100")


def dearest(seconds: list[float], ends: tuple[int, ...]) -> float:
    """The dearest part of blocks that end there."""
    blocks, begin, worst = seconds[1:-1], 0, 0.0
    for end in ends:
        around = seconds[0] * (begin == 0) + seconds[-1] * (end == len(blocks))
        worst, begin = max(worst, sum(blocks[begin:end]) + around), end
    return worst


@given(st.lists(st.integers(0, 20).map(float), min_size=5, max_size=9), st.integers(2, 3))
def test_no_other_division_has_a_cheaper_dearest_part(seconds: list[float], parts: int) -> None:
    sizes = least_dear(seconds, parts)
    count = len(seconds) - 2
    assert sum(sizes) == count and len(sizes) == parts and min(sizes) >= 1
    ends = tuple(sum(sizes[: place + 1]) for place in range(parts))
    others = [(*cut, count) for cut in combinations(range(1, count), parts - 1)]
    assert dearest(seconds, ends) == min(dearest(seconds, each) for each in others)


@pytest.mark.usefixtures("pytorch")
def test_stages_get_the_blocks_that_are_asked_for(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    assert [len(run) for run in units.stages(2, (4, 2))] == [5, 3]
    with pytest.raises(InputError, match="2 parts of 5 blocks, but 2 parts share 6"):
        units.stages(2, (3, 2))
    layout = Layout(pipeline=2, micro_batches=4)
    balanced = planned(units, layout, DEVICE, NODE, balances=True).layout.blocks
    # The head and its loss take longer than the embedding.
    assert sum(balanced) == 6 and balanced[0] >= balanced[1]


@pytest.mark.usefixtures("pytorch")
def test_sends_that_block_lengthen_a_step(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six", dtype="bfloat16")
    layout = Layout(pipeline=2, micro_batches=4)
    free, blocking, waiting = (
        planned(units, each, DEVICE, NODE, host=0.01).seconds
        for each in (layout, replace(layout, blocking=True), replace(layout, waits=True))
    )
    assert free < blocking and free < waiting
