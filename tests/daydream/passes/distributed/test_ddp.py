"""DDP on graphs small enough to schedule by hand, and on a recorded ResNet-50."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.passes.basis.communication import all_reduce_us, all_reduces
from daydream.passes.basis.gradients import ParameterGradient
from daydream.passes.distributed.ddp import buckets
from daydream.tasks.build import read_graph
from hal.node_catalog import load_node
from hal.support.errors import InputError
from roller.library.collectives import collective_seconds
from tests.daydream.graphs import STREAM2, graph, launched, pairs
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import Builder

ddp = registered()["ddp"]

#: GB/s at which 1 MiB takes 30 µs.
MIB_IN_30_US = 2**20 / 30 / 1e3


def step() -> TaskGraph:
    """GPU: f1 1-11, f2 11-21, b2 21-41, b1 41-61, update 61-66."""
    tasks = [
        *launched("f1", 10, phase=Phase.FORWARD, layer="l1"),
        *launched("f2", 10, phase=Phase.FORWARD, layer="l2"),
        *launched("b2", 20, phase=Phase.BACKWARD, layer="l2"),
        *launched("b1", 20, phase=Phase.BACKWARD, layer="l1"),
        *launched("update", 5, phase=Phase.UPDATE),
    ]
    return graph(tasks, pairs(5))


def times(made: TaskGraph) -> dict[str, tuple[float, float]]:
    timeline = simulate(made)
    rows = [*made.select(gpu=True).tolist(), *all_reduces(made).tolist()]
    return {made.text(row): (round(timeline.start_us[row], 6), round(timeline.end_us[row], 6)) for row in rows}


# 2 MiB of gradients, half in each layer: one bucket each. With two workers the ring carries 2 x 1/2 of them.
USUAL = {"workers": 2, "bandwidth": MIB_IN_30_US, "latency_us": 0.0, "gradient_mb": 2.0, "call_us": 0.0,
         "interference": 0.0}  # fmt: skip


def test_all_reduces_overlap_the_backward_pass_and_hold_back_the_update():
    found = times(ddp(step(), **USUAL).graph)
    assert found["ncclAllReduce bucket 0"] == (41, 71)
    # Its gradient is there at 61, but the network is busy until 71.
    assert found["ncclAllReduce bucket 1"] == (71, 101)
    assert found["update"] == (101, 106)


def test_without_overlap_they_start_behind_the_backward_pass():
    found = times(ddp(step(), **USUAL, overlap=False).graph)
    assert found["ncclAllReduce bucket 0"] == (61, 91)
    assert found["update"] == (121, 126)


def test_every_step_of_the_ring_has_its_latency():
    # Two workers make two steps: 2 x 5 µs for each bucket.
    assert times(ddp(step(), **{**USUAL, "latency_us": 5.0}).graph)["update"] == (121, 126)


def test_all_reduces_during_kernels_are_as_much_slower_as_was_measured():
    usual = {key: value for key, value in USUAL.items() if key != "interference"}
    found = times(ddp(step(), **usual).graph)
    # Figure 4.9: 34 % above the formula's 30 µs, 40.2 µs each from 41 on.
    assert found["ncclAllReduce bucket 0"] == (41, 81.2)
    assert found["update"] == (121.4, 126.4)
    # Behind the backward pass nothing runs beside them.
    alone = ddp(step(), **usual, overlap=False)
    assert times(alone.graph)["update"] == (121, 126)
    assert not any("slower while kernels run" in note for note in alone.notes)


def test_interference_lengthens_communication_only():
    found = times(ddp(step(), **{**USUAL, "interference": 0.5}).graph)
    assert found["ncclAllReduce bucket 0"] == (41, 86)
    assert found["b1"] == (41, 61)
    assert found["update"] == (131, 136)


def test_calls_cost_time_on_the_cpu():
    found = times(ddp(step(), **{**USUAL, "call_us": 100.0}).graph)
    # Launches f1 0-1, f2 1-2, b2 2-3; call 3-103; b1 103-104; call 104-204; update 204-205.
    assert found["ncclAllReduce bucket 0"] == (103, 133)
    assert found["b1"] == (104, 124)
    assert found["ncclAllReduce bucket 1"] == (204, 234)
    assert found["update"] == (234, 239)


def test_large_buckets_gather_everything():
    made = ddp(step(), **USUAL, bucket_mb=25.0, first_bucket_mb=25.0).graph
    # One bucket of 2 MiB, complete at 61.
    assert times(made)["ncclAllReduce bucket 0"] == (61, 121)
    assert made.bytes[all_reduces(made)].tolist() == [2 * 2**20]


def test_one_worker_changes_nothing():
    before = step()
    assert ddp(before, workers=1, gradient_mb=2.0).graph is before


def test_every_step_exchanges_its_own_gradients():
    tasks = []
    for number in range(2):
        tasks += launched("b", 10, phase=Phase.BACKWARD, step=number)
        tasks += launched("update", 5, phase=Phase.UPDATE, step=number)
    made = ddp(graph(tasks, pairs(4)), **USUAL).graph
    rows = all_reduces(made)
    assert made.step[rows].tolist() == [0, 1]
    # 2 MiB take 60 µs. b 1-11, all-reduce 11-71, update 71-76, b 76-86, all-reduce 86-146, update 146-151.
    assert simulate(made).start_us[rows] == pytest.approx([11, 86])
    assert simulate(made).makespan_us == pytest.approx(151)


def test_recorded_buckets_are_kept(tmp_path: Path):
    trace = Builder("2024")
    trace.step(1, 0, 1000)
    for place in range(4):
        start = 100 * place
        around = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        trace.operator(around, start, 50, thread=200).operator("torch::autograd::AccumulateGrad", start, 40, thread=200)
        trace.launch(start + 5, 5, correlation=place + 1, thread=200)
        trace.kernel(f"add {place}", start + 20, 60, correlation=place + 1)
    listed = [{"name": f"p{place}", "bytes": 10 * place + 1, "order": place} for place in range(4)]
    trace.head["daydream"] = {"gradients": listed, "buckets": [["p1", "p0"], ["p2"], ["p3"]]}
    built = read_graph(trace.write(tmp_path / "trace.json"))
    made = ddp(built, workers=2).graph
    assert made.bytes[all_reduces(made)].tolist() == [12, 21, 31]
    made = ddp(built, workers=2, bucket_mb=25.0).graph
    assert made.bytes[all_reduces(made)].tolist() == [64]


def gradient(size: float) -> ParameterGradient:
    return ParameterGradient(name="g", bytes=size, step=0, ready=0, hook=0)


def test_a_bucket_closes_with_the_gradient_that_fills_it():
    found = buckets([gradient(size) for size in (3, 9, 4, 4, 4, 30, 1)], 10, 11)
    assert [[g.bytes for g in bucket] for bucket in found] == [[3, 9], [4, 4, 4], [30], [1]]


@settings(deadline=None)
@given(sizes=st.lists(st.floats(1, 1e8), max_size=50), first=st.floats(1, 1e8), later=st.floats(1, 1e8))
def test_buckets_keep_every_gradient_in_order_and_only_the_last_is_not_full(sizes, first, later):
    found = buckets([gradient(size) for size in sizes], first, later)
    assert [g.bytes for bucket in found for g in bucket] == sizes
    for limit, bucket in zip([first, *[later] * len(found)], found[:-1], strict=False):
        assert sum(g.bytes for g in bucket) >= limit > sum(g.bytes for g in bucket[:-1])


@settings(deadline=None)
@given(workers=st.integers(2, 64), slower=st.floats(1, 10))
def test_a_slower_network_never_helps(workers, slower):
    usual = {**USUAL, "workers": workers}
    fast = simulate(ddp(step(), **usual).graph).makespan_us
    slow = simulate(ddp(step(), **{**usual, "bandwidth": MIB_IN_30_US / slower}).graph).makespan_us
    assert simulate(step()).makespan_us <= fast <= slow + 1e-9


def recorded(size: float = 1e6) -> TaskGraph:
    """A kernel 1-11, an all-reduce of 1 MB on a stream of its own 11-31, an update after it 31-36."""
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD),
        *launched("ncclKernel_AllReduce", 20, phase=Phase.BACKWARD, stream=STREAM2, kind=TaskKind.COMMUNICATION),
        *launched("update", 5, phase=Phase.UPDATE),
    ]
    tasks[3]["bytes"] = size
    starts = (0, 1, 1, 11, 2, 31)
    tasks = [{**one, "recorded_us": start} for one, start in zip(tasks, starts, strict=True)]
    return graph(tasks, [*pairs(3), (1, 3, Dependency.SYNC)])


def test_recorded_all_reduces_stay_and_take_the_formulas_time():
    outcome = ddp(recorded(), workers=4, bandwidth=10, latency_us=0, interference=0)
    # 2 x 3/4 x 1 MB / 10 GB/s = 150 µs from 11 on; the update waits although the trace did not show it.
    assert times(outcome.graph) == {"b": (1, 11), "ncclKernel_AllReduce": (11, 161), "update": (161, 166)}
    assert len(outcome.graph) == 6
    assert "already holds 1 all-reduces" in outcome.notes[0]


def test_recorded_all_reduces_may_be_kept():
    kept = ddp(recorded(), workers=4, existing="keep")
    assert times(kept.graph)["update"] == (31, 36)
    assert "stay as recorded" in kept.notes[0]


def test_recorded_all_reduces_of_unknown_size_are_refused():
    with pytest.raises(InputError, match="of unknown size; write existing=keep"):
        ddp(recorded(np.nan))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"workers": 0}, "ddp: workers: 0"),
        ({"bandwidth": 0.0}, "ddp: bandwidth: 0"),
        ({"bucket_mb": -1.0}, "ddp: bucket-mb: -1"),
        ({"interference": -0.1}, "ddp: interference"),
        ({"existing": "drop"}, "write replace or keep"),
        ({"gradient_mb": 0.0}, "set gradient-mb"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(InputError, match=message):
        ddp(step(), **{**USUAL, **parameters})


def test_its_parameters_are_the_users():
    names = [parameter.name for parameter in registered()["ddp"].parameters]
    assert names[:4] == ["workers", "bandwidth", "latency-us", "bucket-mb"]


def test_resnet_50_sends_its_five_buckets_every_step():
    path = recorded_trace("ns_resolution_v100")
    made = ddp(read_graph(path), workers=8, bandwidth=1.25, latency_us=0, interference=0).graph
    rows = all_reduces(made)
    assert np.bincount(made.step[rows]).tolist() == [5] * 5
    network = made.duration_us[rows][made.step[rows] == 2].sum()
    assert network == pytest.approx(all_reduce_us(4 * 25_557_032, 8, 1.25), rel=1e-3)
    # The update waits for the network, and the network for the backward pass: a step takes the forward pass and it.
    assert simulate(made).step_us[2] > network


def test_on_a_node_all_reduces_take_what_the_library_takes():
    node = load_node("hgx-h100")
    outcome = ddp(step(), **USUAL | {"workers": 8}, node="hgx-h100")
    expected = float(collective_seconds("all_reduce", 2**20, 8, node, dtype="float32").kernel_seconds) * 1e6
    durations = outcome.graph.duration_us[all_reduces(outcome.graph)]
    assert durations == pytest.approx([expected, expected])
    assert any(note.endswith("ms a step on the network of hgx-h100") for note in outcome.notes)
    assert ddp(step(), **USUAL | {"workers": 8, "interference": 0.5}, node="hgx-h100").graph.duration_us[
        all_reduces(outcome.graph)
    ] == pytest.approx([1.5 * expected] * 2)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"node": "hgx"}, "ddp: node: no node is called 'hgx'; "),
        ({"node": "pcie-pair", "workers": 4}, "ddp: workers: 4 are beyond the 2 boards of pcie-pair without a network"),
    ],
)
def test_nodes_that_cannot_be_are_refused(parameters: dict[str, Any], message: str):
    with pytest.raises(InputError) as error:
        ddp(step(), **USUAL | parameters)
    assert str(error.value).startswith(message)
