"""vDNN: feature maps of convolutions offloaded and prefetched."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes.memory.vdnn import vdnn
from daydream.trace.trace import NONE
from hal.support.errors import InputError
from tests.daydream.graphs import graph, launched, pairs
from tests.daydream.passes.traced import traced

LAYERS = ["conv1", "conv2", "conv3"]


def network(**columns):
    """Three convolutions, 10 µs forward and 20 µs backward each, behind six launches of 1 µs."""
    rows = [row for layer in LAYERS for row in launched("fprop", 10, layer=layer, phase=Phase.FORWARD, **columns)]
    for layer in reversed(LAYERS):
        rows += launched("dgrad", 20, layer=layer, phase=Phase.BACKWARD)
    return graph(rows, pairs(6))


def times(outcome, name):
    after, timeline = outcome.graph, simulate(outcome.graph)
    rows = after.select(name=name)
    return [(float(timeline.start_us[row]), float(timeline.end_us[row])) for row in rows]


def test_fast_copies_hide_behind_the_computation():
    # 12 kB at 12 GB/s take 1 µs.
    some, outcome = network(bytes=12e3), vdnn(network(bytes=12e3))
    # One launch, then 30 µs forward and 60 µs backward.
    assert simulate(some).makespan_us == 91
    # Forward ends at 11, 21, 31. The last feature map leaves at 31 and is back at 33, so backward begins then.
    assert times(outcome, "offload") == [(11, 12), (21, 22), (31, 32)]
    # That of conv2 comes with conv3's backward call, whose predecessor ended at 31: its copy goes second, 33-34.
    assert times(outcome, "prefetch") == [(32, 33), (33, 34), (53, 54)]
    assert simulate(outcome.graph).makespan_us == 93
    assert outcome.notes == (
        "3 feature maps of 0.0 MB a step are offloaded and prefetched: 0.003 ms each way at 12 GB/s",
    )
    copies = outcome.graph.select(kind=TaskKind.MEMCPY)
    assert outcome.graph.bytes[copies].tolist() == [12e3] * 6
    assert (outcome.graph.edge_kind == Dependency.LAUNCH).sum() == 12


def test_slow_copies_delay_the_backward_pass():
    # 300 kB at 12 GB/s take 25 µs: offloads 11-36, 36-61, 61-86; prefetches 86-111 (conv3), 111-136 (conv2).
    outcome = vdnn(network(bytes=300e3))
    assert times(outcome, "offload") == [(11, 36), (36, 61), (61, 86)]
    # conv3 backward 111-131; conv1's copy waits for the start of conv2's backward call, 131, and for the bus.
    assert times(outcome, "prefetch") == [(86, 111), (111, 136), (136, 161)]
    # conv2 backward 136-156, conv1 161-181.
    assert simulate(outcome.graph).makespan_us == 181


def test_a_layer_may_wait_until_memory_is_free():
    # Forward 1-11, copy -36, forward -46, copy -71, forward -81, copy -106 (conv3's backward waits), back at 131,
    # 151; conv2's copy 131-156 and backward -176; conv1's copy begins with it, 156-181; backward -201.
    assert simulate(vdnn(network(bytes=300e3), wait_for_offload=True).graph).makespan_us == 201


def test_prefetching_further_ahead_starts_earlier():
    near = vdnn(network(bytes=120e3), pcie_gbps=10.0)
    far = vdnn(network(bytes=120e3), pcie_gbps=10.0, prefetch_distance=2)
    # Copies of 12 µs. Offloads end at 23, 35, 47; conv3 back at 59, conv2 at 71, backward -79 and -99.
    # Near: conv1 from 79 to 91. Far: right behind the others, 71-83. Neither delays conv1 (99-119).
    assert times(near, "prefetch") == [(47, 59), (59, 71), (79, 91)]
    assert times(far, "prefetch") == [(47, 59), (59, 71), (71, 83)]
    assert simulate(near.graph).makespan_us == simulate(far.graph).makespan_us == 119


def test_sizes_come_from_the_recorded_input():
    rows = [*launched("fprop", 10, phase=Phase.FORWARD, operator=0), *launched("dgrad", 20, phase=Phase.BACKWARD)]
    rows[0]["operator"] = 0
    fields = traced(["aten::conv2d"], [NONE], {0: [[2, 3, 10, 10], [8, 3, 3, 3]]})
    after = vdnn(graph(rows, pairs(2), **fields)).graph
    assert after.bytes[after.select(kind=TaskKind.MEMCPY)].tolist() == [2400, 2400]


def test_sizes_come_from_the_element_wise_kernel_before():
    rows = [*launched("relu_elementwise_kernel", 8), *launched("fprop", 10), *launched("fprop", 10)]
    rows += [*launched("dgrad", 20), *launched("dgrad", 20)]
    for row, layer in zip(rows[2:], ["a", "a", "b", "b", "b", "b", "a", "a"], strict=True):
        row["layer"] = layer
    for row, phase in zip(rows, [Phase.FORWARD] * 6 + [Phase.BACKWARD] * 4, strict=True):
        row["phase"] = phase
    outcome = vdnn(graph(rows, pairs(5)), memory_gbps=500.0)
    # 8 µs at 500 GB/s move 4 MB, half of it written. Nothing is known of what the second convolution reads.
    copies = outcome.graph.select(kind=TaskKind.MEMCPY)
    assert outcome.graph.bytes[copies].tolist() == [2e6, 2e6]
    assert outcome.notes[1] == "1 convolutions of unknown input size stay as they are"


def test_without_sizes_or_convolutions():
    with pytest.raises(
        InputError, match=r"^vdnn: the sizes .* are not recorded; record the trace with record_shapes=True$"
    ):
        vdnn(network())
    some = graph(launched("fprop", 1, phase=Phase.FORWARD), pairs(1))
    assert vdnn(some).graph is some


@pytest.mark.parametrize("given", [{"pcie_gbps": 0.0}, {"prefetch_distance": 0}, {"memory_gbps": -1.0}])
def test_bad_parameters_are_named(given):
    with pytest.raises(InputError) as caught:
        vdnn(network(bytes=1.0), **given)
    (name,) = given
    assert str(caught.value).startswith(name.replace("_", "-") + ": ")
