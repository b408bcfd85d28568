"""Restructured batch normalisation."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Phase
from daydream.graph.simulate import simulate
from daydream.passes.kernels.batchnorm import restructure_batchnorm
from hal.support.errors import InputError
from tests.daydream.graphs import graph, launched, pairs

FORWARD = [
    ("scudnn_fprop", 10),
    ("bn_fw_tr_1C11", 8),
    ("clamp_min", 4),
    ("bn_fw_tr_1C11", 8),
    ("add", 4),
    ("clamp_min", 4),
]
BACKWARD = [
    ("threshold_kernel", 6),
    ("bn_bw_1C11", 12),
    ("threshold_kernel", 6),
    ("bn_bw_1C11", 12),
    ("dgrad_engine", 20),
]


def block():
    """conv, bn, relu, bn, add, relu and the way back: 38 µs forward, 56 µs backward."""
    rows = [row for name, duration in FORWARD for row in launched(name, duration, phase=Phase.FORWARD)]
    rows += [row for name, duration in BACKWARD for row in launched(name, duration, phase=Phase.BACKWARD)]
    return graph(rows, pairs(11))


def names(after):
    return [after.text(int(row)) for row in after.select(gpu=True)]


def test_batch_norms_are_halved_and_adjacent_relus_go():
    outcome = restructure_batchnorm(block())
    # One launch, then kernels back to back: 1 + 38 + 56.
    assert simulate(block()).makespan_us == 95
    # Norms 8 + 8 + 12 + 12 become 20; the first ReLU (4) and its gradient, the second threshold (6), go.
    assert simulate(outcome.graph).makespan_us == 95 - 20 - 10
    assert names(outcome.graph).count("clamp_min") == 1
    assert names(outcome.graph)[6:8] == ["bn_bw_1C11", "bn_bw_1C11"]
    assert len(outcome.graph) == 22 - 4
    assert outcome.notes == (
        "4 batch-norm kernels run 2 times as fast: 0.020 ms less",
        "2 of 4 ReLU kernels removed: 0.010 ms less",
    )


def test_every_relu_as_printed_or_none():
    # 4 + 4 + 6 + 6 for all ReLUs.
    assert simulate(restructure_batchnorm(block(), only_adjacent=False).graph).makespan_us == 95 - 20 - 20
    assert simulate(restructure_batchnorm(block(), remove_relu=False).graph).makespan_us == 95 - 20
    assert simulate(restructure_batchnorm(block(), remove_relu=False, batchnorm_factor=4.0).graph).makespan_us == 65


def test_layers_tell_where_names_do_not():
    rows = [*launched("k1", 8, layer="layer1.0.bn1"), *launched("k2", 4, layer="layer1.0.relu")]
    for row in rows:
        row["phase"] = Phase.FORWARD
    after = restructure_batchnorm(graph(rows, pairs(2))).graph
    assert names(after) == ["k1"]
    assert after.duration_us.tolist() == [1, 4]


def test_a_convolution_that_could_apply_a_relu_is_none():
    rows = [
        *launched("bn_fw", 8, phase=Phase.FORWARD),
        *launched("volta_scudnn_128x64_relu_nn", 9, phase=Phase.FORWARD),
    ]
    assert names(restructure_batchnorm(graph(rows, pairs(2)), only_adjacent=False).graph) == [
        "bn_fw",
        "volta_scudnn_128x64_relu_nn",
    ]


def test_without_batch_norm_nothing_changes():
    some = graph(launched("clamp_min", 1), pairs(1))
    assert restructure_batchnorm(some).graph is some


def test_bad_parameters_are_named():
    with pytest.raises(InputError, match=r"^batchnorm-factor: 0 is out of range"):
        restructure_batchnorm(block(), batchnorm_factor=0.0)
    with pytest.raises(InputError, match=r"^host: 'python' is unknown; give launch or operator$"):
        restructure_batchnorm(block(), host="python")
