"""Gist: encoding behind ReLUs, decoding in the backward pass."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase
from daydream.graph.simulate import simulate
from daydream.passes.memory.gist import gist
from hal.support.errors import InputError
from tests.daydream.graphs import graph, launched, pairs
from tests.daydream.recorded import operator, recorded

FORWARD = [("fprop", "conv1", 20), ("relu", "relu1", 4), ("fprop", "conv2", 20), ("relu", "relu2", 6)]
FORWARD += [("max_pool", "pool", 5), ("sgemm", "fc", 9)]
BACKWARD = [("sgemm", "fc", 18), ("max_pool_backward", "pool", 5), ("threshold", "relu2", 6), ("dgrad", "conv2", 40)]
BACKWARD += [("threshold", "relu1", 4), ("wgrad", "conv1", 20)]


def network():
    """conv1, relu1, conv2, relu2, pool, fc and back: 64 µs forward, 93 µs backward."""
    rows = []
    for part, phase in ((FORWARD, Phase.FORWARD), (BACKWARD, Phase.BACKWARD)):
        for name, layer, duration in part:
            rows += launched(name, duration, layer=layer, phase=phase)
    return graph(rows, pairs(12))


def names(graph):
    return [graph.text(int(row)) for row in graph.select(gpu=True)]


def test_relus_before_convolutions_and_pooling_are_coded():
    outcome = gist(network())
    # relu1 (4) is encoded behind conv2 and decoded before its gradient; relu2 (6) behind pool, before its own.
    assert names(outcome.graph) == [
        "fprop", "relu", "fprop", "Gist SSDC encode", "relu", "max_pool", "Gist binarize", "sgemm",
        "sgemm", "max_pool_backward", "Gist binarize decode", "threshold", "Gist SSDC decode", "dgrad", "threshold",
        "wgrad",
    ]  # fmt: skip
    assert simulate(network()).makespan_us == 1 + 64 + 93
    assert simulate(outcome.graph).makespan_us == 158 + 2 * 4 + 2 * 6
    assert (outcome.graph.edge_kind == Dependency.LAUNCH).sum() == 16
    assert outcome.notes == (
        "inserted 1 SSDC decode, 1 SSDC encode, 1 binarize, 1 binarize decode",
        "0.020 ms of GPU time added in all steps",
    )


def test_factors_scale_the_kernels():
    after = gist(network(), encode_factor=2.0, decode_factor=0.5).graph
    # Encoding 2 * (4 + 6), decoding 0.5 * (4 + 6).
    assert simulate(after).makespan_us == 158 + 20 + 5


def test_lossy_reduces_what_is_not_coded():
    outcome = gist(network(), lossy=True, dpr_factor=0.5)
    # conv1 alone is left: half of the nearest ReLU (4), once each way.
    assert simulate(outcome.graph).makespan_us == 178 + 2 * 2
    assert names(outcome.graph)[1] == "Gist DPR"
    assert names(outcome.graph)[-2:] == ["Gist DPR decode", "wgrad"]


def test_pooling_before_a_convolution_is_stored_sparse_too():
    rows = [*launched("relu", 4), *launched("max_pool", 5), *launched("fprop", 20)]
    for row in rows:
        row["phase"] = Phase.FORWARD
    after = gist(graph(rows, pairs(3))).graph
    assert names(after) == ["relu", "max_pool", "Gist binarize", "fprop", "Gist SSDC encode"]
    # Binarising goes over the ReLU's map, the sparse code over a quarter of it.
    assert after.duration_us[after.select(name="Gist")].tolist() == [4, 1]


def test_a_pooled_map_takes_its_recorded_share_of_the_relu():
    operators = [
        operator("aten::relu", [[8, 64, 12, 12]], kernels=[("relu", 9)], phase=Phase.FORWARD),
        operator("aten::max_pool2d", [[8, 64, 12, 12]], kernels=[("max_pool", 5)], phase=Phase.FORWARD),
        operator("aten::conv2d", [[8, 64, 4, 4], [64, 64, 3, 3]], kernels=[("fprop", 20)], phase=Phase.FORWARD),
    ]
    after = gist(recorded(operators)).graph
    # 4 x 4 of 12 x 12: a ninth.
    assert after.duration_us[after.select(name="Gist SSDC encode")].tolist() == pytest.approx([1])


def test_without_relu_nothing_changes():
    some = graph(launched("sgemm", 1, phase=Phase.FORWARD), pairs(1))
    assert gist(some).graph is some


@pytest.mark.parametrize("name", ["encode_factor", "decode_factor", "dpr_factor"])
def test_bad_parameters_are_named(name):
    with pytest.raises(InputError) as caught:
        gist(network(), **{name: -1.0})
    assert str(caught.value).startswith(name.replace("_", "-") + ": -1 is out of range")
