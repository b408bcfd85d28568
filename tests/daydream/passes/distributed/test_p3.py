"""P3 and its plain parameter server, scheduled by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes import registered
from hal.support.errors import InputError
from tests.daydream.graphs import CHANNEL, MAIN, graph, launched, pairs, task

p3 = registered()["p3"]

MIB_IN_30_US = 2**20 / 30 / 1e3


def steps() -> TaskGraph:
    """GPU: f1 1-11, f2 11-21, b2 21-41, b1 41-61, update 61-66, and the next step's f1, f2 66-86."""
    tasks = [
        *launched("f1", 10, phase=Phase.FORWARD, layer="l1"),
        *launched("f2", 10, phase=Phase.FORWARD, layer="l2"),
        *launched("b2", 20, phase=Phase.BACKWARD, layer="l2"),
        *launched("b1", 20, phase=Phase.BACKWARD, layer="l1"),
        *launched("update", 5, phase=Phase.UPDATE),
        *launched("next f1", 10, phase=Phase.FORWARD, layer="l1", step=1),
        *launched("next f2", 10, phase=Phase.FORWARD, layer="l2", step=1),
    ]
    return graph(tasks, pairs(7))


# 1 MiB in each layer, 30 µs on a link. Two workers; two servers of their own are as fast as the workers' links.
USUAL = {"workers": 2, "bandwidth": MIB_IN_30_US, "latency_us": 0.0, "servers": 2, "slice_mb": 0.0, "gradient_mb": 2.0}


def times(made: TaskGraph) -> dict[str, tuple[float, float]]:
    timeline = simulate(made)
    rows = [row for row in range(len(made)) if not made.on_cpu[row]]
    return {made.text(row): (round(timeline.start_us[row], 6), round(timeline.end_us[row], 6)) for row in rows}


def test_the_next_forward_pass_waits_layer_by_layer():
    found = times(p3(steps(), **USUAL).graph)
    assert found["push l2"] == (41, 71)
    # Ready at 61, but the link sends until 71; meanwhile layer 2 is pulled on the other one.
    assert found["push l1"] == (71, 101)
    assert found["pull l2"] == (71, 101)
    assert found["pull l1"] == (101, 131)
    assert found["next f1"] == (131, 141)
    assert found["next f2"] == (141, 151)
    assert "update" not in found


def test_the_host_does_nothing_for_what_servers_update():
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD, layer="l1"),
        # 40 µs of the optimizer's operators on the host; a wait and the launch of a copy stay.
        task("aten::add_", MAIN, 30, gap_us=10, phase=Phase.UPDATE),
        *launched("update", 5, phase=Phase.UPDATE),
        *launched("Memcpy DtoH", 1, phase=Phase.NONE),
        task("cudaStreamSynchronize", MAIN, 3, phase=Phase.UPDATE),
    ]
    edges = [(0, 1, Dependency.LAUNCH), (3, 4, Dependency.LAUNCH), (5, 6, Dependency.LAUNCH), (6, 7, Dependency.SYNC)]
    outcome = p3(graph(tasks, edges), **{**USUAL, "gradient_mb": 1.0})
    hosts = [outcome.graph.text(row) for row in outcome.graph.select(gpu=False) if outcome.graph.on_cpu[row]]
    assert hosts == ["cudaLaunchKernel", "cudaLaunchKernel", "cudaStreamSynchronize"]
    # 30 and 10 µs of the operator, 1 of the launch.
    assert "1 GPU tasks of the update phase are done by servers; 0.041 ms of host time go with them" in outcome.notes


def last_forward(made: TaskGraph) -> tuple[float, float]:
    return times(made)["next f2"]


def test_slices_overtake_by_priority():
    # Slices of 7.5 µs. At 63.5 layer 1, ready since 61, goes before the last slice of layer 2. Its last pull is
    # 93.5-101, so the forward pass runs 101-111 and then, layer 2 being there at 108.5, to 121.
    assert last_forward(p3(steps(), **{**USUAL, "slice_mb": 0.25}).graph) == (111, 121)


def test_without_priority_they_go_in_the_order_of_readiness():
    # Layer 2 is pushed until 71, layer 1 until 101; its last pull ends at 108.5.
    assert last_forward(p3(steps(), **{**USUAL, "slice_mb": 0.25}, priority=False).graph) == (118.5, 128.5)


def test_latency_delays_and_does_not_occupy():
    # Pushes 41-71 and 71-101 as before; pulls 75-105 and 105-135; 4 µs later the forward pass.
    found = times(p3(steps(), **{**USUAL, "latency_us": 4.0}).graph)
    assert found["pull l1"] == (105, 135)
    assert found["next f2"] == (149, 159)


def test_half_the_servers_take_twice_the_time():
    # One server for two workers: 60 µs each. Pushes 41-101-161, pulls 101-161-221.
    assert last_forward(p3(steps(), **{**USUAL, "servers": 1}).graph) == (231, 241)


def test_servers_on_the_workers_machines_share_their_links():
    found = times(p3(steps(), **{**USUAL, "servers": 0}).graph)
    # Layer 2 is served here: the other worker's half comes in, the result goes out. Layer 1 is served there.
    assert found["push to us l2"] == (41, 71)
    assert found["push l1"] == (61, 91)
    assert found["pull from us l2"] == (91, 121)
    assert found["pull l1"] == (91, 121)
    assert found["next f1"] == (121, 131)


def test_a_slice_waits_for_the_other_workers_slices():
    # Three workers, gradients of 30 µs: layer 2 is served here and takes 2 x 30 µs in (41-101) and out. Layer 1 is
    # pushed 61-91; the third worker's has come in 30 µs later, so it is pulled 121-151.
    found = times(p3(steps(), **{**USUAL, "servers": 0, "workers": 3}).graph)
    assert found["push to us l2"] == (41, 101)
    assert found["pull l1"] == (121, 151)


def test_an_update_by_the_worker_waits_for_everything():
    found = times(p3(steps(), **{**USUAL, "update": "worker"}).graph)
    assert found["update"] == (131, 136)
    assert found["next f2"] == (146, 156)


def test_a_layer_without_forward_task_is_needed_at_once():
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD, layer="lost"),
        *launched("f", 10, phase=Phase.FORWARD, layer="l", step=1),
    ]
    outcome = p3(graph(tasks, pairs(2)), **USUAL)
    # 2 MiB: pushed 11-71, pulled 71-131.
    assert times(outcome.graph)["f"] == (131, 141)
    assert "1 gradients of no known forward layer" in outcome.notes[-1]


def test_the_last_step_has_nobody_to_wait():
    made = p3(graph([*launched("b", 10, phase=Phase.BACKWARD)], pairs(1)), **USUAL).graph
    assert times(made) == {"b": (1, 11), "push b": (11, 71), "pull b": (71, 131)}


def test_all_reduces_are_gone():
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD),
        task("ncclAllReduce bucket 0", CHANNEL, 1000, kind=TaskKind.COMMUNICATION),
        *launched("f", 10, phase=Phase.FORWARD, step=1),
    ]
    edges = [(0, 1, Dependency.LAUNCH), (3, 4, Dependency.LAUNCH), (1, 2, Dependency.COMMUNICATION)]
    outcome = p3(graph(tasks, [*edges, (2, 4, Dependency.COMMUNICATION)]), **USUAL)
    assert times(outcome.graph)["f"] == (131, 141)
    assert outcome.notes[-1] == "1 all-reduces that the graph held are gone"


def test_one_worker_changes_nothing():
    before = steps()
    assert p3(before, workers=1, gradient_mb=2.0).graph is before


@settings(deadline=None)
@given(workers=st.integers(2, 16), servers=st.integers(0, 4), slices=st.sampled_from([0.0, 0.1, 0.3, 5.0]))
def test_every_byte_is_pushed_and_pulled_once(workers, servers, slices):
    made = p3(steps(), **{**USUAL, "workers": workers, "servers": servers, "slice_mb": slices}).graph
    for word in ("push", "pull"):
        assert made.bytes[made.select(name=f"^{word} ")].sum() == pytest.approx(2 * 2**20)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"workers": 0}, "p3: workers: 0"),
        ({"bandwidth": -1.0}, "p3: bandwidth: -1"),
        ({"slice_mb": -1.0}, "p3: slice-mb: -1"),
        ({"servers": -1}, "p3: servers: -1"),
        ({"update": "nobody"}, "write server or worker"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(InputError, match=message):
        p3(steps(), **{**USUAL, **parameters})
