"""Layouts: what they refuse, who shares a node, and the order of micro-batches on a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daydream.plan.layout import Layout, orders
from hal.node_catalog import load_node
from hal.support.errors import InputError

NODE = load_node("hgx-h100")


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout(data=0), "--data"),
        (Layout(data=12), "--data"),
        (Layout(tensor=3, data=8), "--tensor"),
        (Layout(pipeline=2, schedule="interleaved"), "--schedule"),
        (Layout(pipeline=2, chunks=2), "--chunks"),
        (Layout(pipeline=2, schedule="interleaved", chunks=2, micro_batches=3), "--micro-batches"),
    ],
)
def test_an_impossible_layout_is_refused(layout: Layout, field: str) -> None:
    with pytest.raises(InputError) as caught:
        layout.check(NODE)
    assert field in caught.value.field


def test_neighbours_share_layers_then_come_copies_then_stages() -> None:
    layout = Layout(data=4, tensor=4, pipeline=2)
    assert layout.ranks == 32 and layout.tensor_per_node(NODE) == 4
    # Four of eight boards of a node share layers, so that it holds two copies of the model.
    assert layout.data_per_node(NODE) == 2
    assert not layout.same_node(0, 1, NODE)
    small = Layout(data=2, pipeline=4)
    assert [small.same_node(stage, stage + 1, NODE) for stage in range(3)] == [True, True, True]


def schedule(layout: Layout, stage: int) -> str:
    return " ".join(f"{'F' if forward else 'B'}{number}" for forward, number, _ in orders(layout, stage))


def test_schedules_are_those_of_the_papers() -> None:
    layout = Layout(pipeline=3, micro_batches=4)
    assert schedule(layout, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert schedule(layout, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert schedule(replace(layout, schedule="gpipe"), 1) == "F0 F1 F2 F3 B0 B1 B2 B3"


def test_the_interleaved_schedule_is_megatrons() -> None:
    layout = Layout(pipeline=2, schedule="interleaved", chunks=2, micro_batches=4)
    first = [(forward, number, chunk) for forward, number, chunk in orders(layout, 0)]
    # Stage 0 goes ahead by 2 (2 - 0 - 1) + (2 - 1) 2 = 4 passes: both micro-batches of a turn through both chunks.
    assert first[:4] == [(True, 0, 0), (True, 1, 0), (True, 0, 1), (True, 1, 1)]
    assert first[4:6] == [(True, 2, 0), (False, 0, 1)]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["gpipe", "1f1b", "interleaved"]))
def test_every_pass_runs_once_and_forward_first(stages: int, turns: int, chunks: int, name: str) -> None:
    interleaved = name == "interleaved"
    layout = Layout(
        pipeline=stages,
        micro_batches=turns * stages,
        schedule=name,
        chunks=chunks if interleaved else 1,  # type: ignore[arg-type]
    )
    for stage in range(stages):
        passes = orders(layout, stage)
        assert len(set(passes)) == len(passes) == 2 * layout.micro_batches * layout.chunks
        places = {each: place for place, each in enumerate(passes)}
        assert all(places[True, number, chunk] < places[False, number, chunk] for _, number, chunk in passes)
