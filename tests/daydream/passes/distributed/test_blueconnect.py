"""BlueConnect's chains, scheduled by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.passes.basis.communication import all_reduce_us, stage_bytes
from daydream.passes.distributed.blueconnect import blueconnect
from hal.node_catalog import load_node
from hal.support.errors import InputError
from roller.library.collectives import collective_seconds
from tests.daydream.graphs import CHANNEL, STREAM2, graph, launched, pairs, task

ddp = registered()["ddp"]

LEVELS = {"factors": "4x2", "bandwidths": "100x10", "latencies_us": "1", "interference": 0.0}


def inserted(count: int = 1) -> TaskGraph:
    """A kernel 1-11, all-reduces of 8 MB behind it, an update that waits for all of them."""
    tasks = [*launched("b", 10, phase=Phase.BACKWARD), *launched("update", 5, phase=Phase.UPDATE)]
    for rank in range(count):
        name = f"ncclAllReduce bucket {rank}"
        tasks.append(task(name, CHANNEL, 100, kind=TaskKind.COMMUNICATION, bytes=8e6, priority=-rank))
    edges: list[Any] = list(pairs(2))
    for row in range(4, 4 + count):
        edges += [(1, row, Dependency.COMMUNICATION), (row, 3, Dependency.COMMUNICATION)]
    return graph(tasks, edges)


def stages(made: TaskGraph) -> list[tuple[str, float, float]]:
    timeline = simulate(made)
    rows = made.select(name="reduce-scatter|all-gather").tolist()
    return [(made.text(row), round(timeline.start_us[row], 6), round(timeline.end_us[row], 6)) for row in rows]


def test_a_chain_takes_the_place_of_an_all_reduce():
    made = blueconnect(inserted(), **LEVELS).graph
    # Inside 3/4 x 8 MB / 100 GB/s + 3 x 1 µs = 63 µs; outside, of 2 MB, 1/2 x 2 MB / 10 GB/s + 1 µs = 101 µs.
    assert stages(made) == [
        ("reduce-scatter among 4", 11, 74),
        ("reduce-scatter among 2", 74, 175),
        ("all-gather among 2", 175, 276),
        ("all-gather among 4", 276, 339),
    ]
    assert simulate(made).start_us[made.select(name="update")] == pytest.approx([339])
    assert len(made.select(name="ncclAllReduce")) == 0


def test_levels_work_side_by_side_on_different_buckets():
    made = blueconnect(inserted(2), **LEVELS).graph
    # Inside 11-74 for the first, 74-137 for the second bucket. Outside the first bucket has both its turns first:
    # 74-175-276, the second 276-377-478; inside again 276-339 and 478-541.
    assert simulate(made).start_us[made.select(name="update")] == pytest.approx([541])


def test_interference_slows_every_stage():
    made = blueconnect(inserted(), **{**LEVELS, "interference": 1.0}).graph
    assert simulate(made).start_us[made.select(name="update")] == pytest.approx([11 + 2 * 328])


def test_a_recorded_all_reduce_keeps_its_place_on_its_stream():
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD),
        *launched("ncclKernel_AllReduce", 50, stream=STREAM2, kind=TaskKind.COMMUNICATION, bytes=8e6),
        *launched("ncclKernel_SendRecv", 7, stream=STREAM2, kind=TaskKind.COMMUNICATION),
        *launched("update", 5, phase=Phase.UPDATE),
    ]
    edges = [*pairs(4), (1, 3, Dependency.SYNC), (3, 7, Dependency.SYNC)]
    made = blueconnect(graph(tasks, edges), **LEVELS).graph
    timeline = simulate(made)
    assert stages(made)[0] == ("reduce-scatter among 4", 11, 74)
    assert timeline.start_us[made.select(name="update")] == pytest.approx([339])
    assert timeline.start_us[made.select(name="^ncclKernel_SendRecv")] == pytest.approx([339])
    # One call still starts both ends of the chain, and takes no further time.
    assert timeline.end_us[made.select(kind=TaskKind.CPU)].max() == 4


def test_what_ddp_inserted_can_be_decomposed():
    tasks = [*launched("b", 10, phase=Phase.BACKWARD), *launched("update", 5, phase=Phase.UPDATE)]
    whole = ddp(graph(tasks, pairs(2)), workers=8, gradient_mb=8.0).graph
    made = blueconnect(whole, factors="8", bandwidths="12.5").graph
    # One level is an all-reduce in two parts.
    assert simulate(made).makespan_us == pytest.approx(simulate(whole).makespan_us)


@settings(deadline=None)
@given(
    factors=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    size=st.floats(1, 1e9),
    bandwidth=st.floats(1, 300),
)
def test_a_chain_takes_the_time_of_the_hierarchical_formula(factors, size, bandwidth):
    tasks = [task("ncclAllReduce", CHANNEL, 1, kind=TaskKind.COMMUNICATION, bytes=size)]
    text = "x".join(map(str, factors))
    made = blueconnect(graph(tasks), factors=text, bandwidths=str(bandwidth), latencies_us="2", interference=0.0).graph
    # BlueConnect, section 3: an all-reduce of what the levels before have left of the array, level by level.
    stages = zip(stage_bytes(size, factors), factors, strict=True)
    expected = sum(all_reduce_us(left, workers, bandwidth, 2.0) for left, workers in stages)
    assert simulate(made).makespan_us == pytest.approx(expected)


def test_all_reduces_of_unknown_size_stay():
    some = inserted(2)
    some.bytes[5] = np.nan
    outcome = blueconnect(some, **LEVELS)
    assert len(outcome.graph.select(name="ncclAllReduce")) == 1
    assert outcome.notes[-1] == "1 all-reduces of unknown size stay as they were"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"factors": "4.5x2"}, "no whole numbers"),
        ({"factors": "4x"}, "write for example 8x4"),
        ({"bandwidths": "1x2x3"}, "blueconnect: bandwidths: 3 numbers for 2 factors"),
        ({"latencies_us": "1x2x3"}, "blueconnect: latencies-us: 3 numbers"),
        ({"interference": -1.0}, "blueconnect: interference"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(InputError, match=message):
        blueconnect(inserted(), **{**LEVELS, **parameters})


def test_without_all_reduce_ddp_has_to_come_first():
    with pytest.raises(InputError, match="put the pass ddp before it"):
        blueconnect(graph(launched("b", 1), pairs(1)), **LEVELS)
    some = inserted()
    some.bytes[4] = np.nan
    with pytest.raises(InputError, match="no all-reduce of known size"):
        blueconnect(some, **LEVELS)


def test_on_a_node_the_innermost_level_is_the_librarys():
    node = load_node("hgx-h100")
    made = blueconnect(inserted(), **LEVELS, node="hgx-h100").graph
    inside = [
        float(collective_seconds(name, 8e6, 4, node, dtype="float32").kernel_seconds) * 1e6
        for name in ("reduce_scatter", "all_gather")
    ]
    durations = [end - start for _, start, end in stages(made)]
    assert durations == pytest.approx([inside[0], 101, 101, inside[1]])
    with pytest.raises(InputError, match="blueconnect: workers: 4 are beyond the 2 boards of pcie-pair"):
        blueconnect(inserted(), **LEVELS, node="pcie-pair")
