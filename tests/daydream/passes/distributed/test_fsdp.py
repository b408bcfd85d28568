"""Fully sharded training on gloo: a gather in both passes and a reduce-scatter for every unit, each waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daydream.graph.graph import TaskGraph, TaskKind
from daydream.graph.ranks import joined
from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.tasks.build import read_graph
from hal.support.errors import InputError
from tests.daydream.hosted_traces import A_BYTES, B_BYTES, CALL_US, IDLE_US, STEP_US, data_parallel_step

#: A step without exchange: no wait, no calls, no copy out of a bucket.
COMPUTED_US = STEP_US - IDLE_US - 2 * CALL_US - 10


@pytest.fixture
def graph(tmp_path: Path) -> TaskGraph:
    return read_graph(data_parallel_step().write(tmp_path / "trace.json"))


def fsdp(graph: TaskGraph, wrap: str, **parameters: float) -> TaskGraph:
    return registered()["fsdp"](graph, wrap=wrap, **{"copy_gbps": 1e9, "latency_us": 0.0, **parameters}).graph


def step_us(graph: TaskGraph) -> float:
    return float(simulate(graph).step_us[0])


def collectives(graph: TaskGraph) -> list[str]:
    start = simulate(graph).start_us
    rows = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION)
    return [graph.text(row) for row in rows[np.argsort(start[rows], kind="stable")].tolist()]


def test_units_are_gathered_twice_and_reduced_once_in_the_order_of_the_step(graph: TaskGraph):
    names = collectives(fsdp(graph, "[ab]"))
    assert names == [
        "all_gather a", "all_gather b", "all_gather b", "reduce_scatter b", "all_gather a", "reduce_scatter a",
    ]  # fmt: skip


def test_what_no_unit_holds_is_gathered_once(graph: TaskGraph):
    names = collectives(fsdp(graph, "a"))
    assert names == ["all_gather ", "all_gather a", "all_gather a", "reduce_scatter a", "reduce_scatter "]


def test_nothing_overlaps(graph: TaskGraph):
    # Of two workers each holds half: a gather moves half of the bytes at 0.1 GB/s, a reduce-scatter at 0.05.
    gathers, reduced = 2 * (A_BYTES + B_BYTES) / 2 / 100, (A_BYTES + B_BYTES) / 2 / 50
    sharded = fsdp(graph, "[ab]", workers=2, bandwidth=0.1, reduce_bandwidth=0.05)
    # The longer of two updates shrinks to the middle between both.
    assert step_us(sharded) == pytest.approx(COMPUTED_US + gathers + reduced - 10, abs=0.01)


def test_calls_and_copies_hold_up_their_caller(graph: TaskGraph):
    bare = step_us(fsdp(graph, "[ab]", workers=2, bandwidth=1e6))
    called = step_us(fsdp(graph, "[ab]", workers=2, bandwidth=1e6, call_us=5.0))
    assert called == pytest.approx(bare + 6 * 5)
    # A gather copies the own half in and the whole out, a reduce-scatter the whole twice in and the half out.
    copied = step_us(fsdp(graph, "[ab]", workers=2, bandwidth=1e6, copy_gbps=1.0))
    assert copied == pytest.approx(bare + (2 * 1.5 + 2.5) * (A_BYTES + B_BYTES) / 1e3, abs=0.01)


def test_joined_ranks_gather_together(graph: TaskGraph):
    both = joined([graph, graph.scaled(np.flatnonzero(graph.on_cpu), 2.0)], (0, 1))
    sharded = fsdp(both, "[ab]", workers=2, bandwidth=0.1)
    assert sorted(collectives(sharded)) == sorted(2 * collectives(fsdp(graph, "[ab]", workers=2, bandwidth=0.1)))
    assert step_us(sharded) > step_us(fsdp(graph, "[ab]", workers=2, bandwidth=0.1)) + 100


@pytest.mark.parametrize(("wrap", "said"), [("c", "fits no module"), ("(", "no regular expression")])
def test_units_that_nothing_fits_are_refused(graph: TaskGraph, wrap: str, said: str):
    with pytest.raises(InputError, match=said):
        fsdp(graph, wrap)
