"""Recomputation, scheduled and added up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daydream.graph.graph import Dependency, Phase, TaskGraph
from daydream.graph.simulate import simulate
from daydream.passes.memory.recompute import recompute
from hal.support.errors import InputError
from tests.daydream.graphs import MAIN, graph, launched, pairs, task
from tests.daydream.passes.held import B, F, a_map, memory
from tests.daydream.passes.traced import traced
from tests.daydream.recorded import operator, recorded

FORWARD = [("f0", "blocks.0.fc", 10), ("f1", "blocks.1.fc", 12), ("fh", "head", 5)]
BACKWARD = [("bh", "head", 5), ("b1", "blocks.1.fc", 20), ("b0", "blocks.0.fc", 20)]


def network(**fields: object) -> TaskGraph:
    """Two blocks and a head: 1 µs to the first kernel, 27 forward, 45 backward."""
    rows = []
    for part, phase in ((FORWARD, Phase.FORWARD), (BACKWARD, Phase.BACKWARD)):
        for name, layer, duration in part:
            rows += launched(name, duration, layer=layer, phase=phase)
    return graph(rows, pairs(6), **fields)


def kernels(made: TaskGraph) -> list[str]:
    return [made.text(int(row)) for row in made.select(gpu=True)]


def test_blocks_run_again_right_before_their_gradients():
    assert simulate(network()).makespan_us == 73
    outcome = recompute(network(), host_us=0.0)
    assert kernels(outcome.graph) == ["f0", "f1", "fh", "bh", "f1", "b1", "f0", "b0"]
    assert simulate(outcome.graph).makespan_us == 73 + 12 + 10
    assert (outcome.graph.edge_kind == Dependency.LAUNCH).sum() == 8
    again = outcome.graph.select(name="^f[01]$", phase=Phase.BACKWARD)
    assert outcome.graph.duration_us[again].tolist() == [12, 10]
    assert outcome.notes == ("2 of 2 blocks a step run forward again: 2 GPU tasks of 0.022 ms, 0.002 ms of host time",)


def test_every_second_block_named_modules_and_segments():
    assert kernels(recompute(network(), every=2).graph).count("f1") == 1
    assert kernels(recompute(network(), modules="head").graph) == ["f0", "f1", "fh", "fh", "bh", "b1", "b0"]
    # 27 µs forward in three: 10 is past the first 9, 22 past the second 18; the head is the last and stays.
    assert kernels(recompute(network(), segments=3).graph).count("fh") == 1


def test_the_host_pays_for_every_block():
    made = recompute(network(), host_us=30.0).graph
    rows = made.select(name="checkpoint")
    assert sorted(made.duration_us[rows].tolist()) == pytest.approx([9, 9, 21, 21])
    assert sorted(made.phase[rows].tolist()) == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2


def test_on_the_cpu_tasks_are_repeated_with_what_no_event_records():
    rows = [task("f", MAIN, 10, gap_us=5, phase=F, layer="a.0"), task("g", MAIN, 4, phase=F, layer="a.1")]
    rows += [task("bg", MAIN, 8, phase=B, layer="a.1"), task("bf", MAIN, 20, phase=B, layer="a.0")]
    assert simulate(recompute(graph(rows), host_us=0.0).graph).makespan_us == 47 + 4 + 15


def test_what_no_gradient_needs_is_not_repeated():
    sizes = [[4, 8]]
    names = ["aten::layer_norm", "aten::linear", "aten::gelu", "aten::linear", "aten::add"]
    some = [operator(name, sizes, kernels=[(f"k{i}", 1)], phase=F) for i, name in enumerate(names)]
    bare = recorded([*some, operator("bwd", kernels=[("back", 1)], phase=B)])
    made = replace(bare, layers=("block",), layer=np.zeros_like(bare.layer))
    # The sum is nobody's need; the last product needs its argument alone, which GELU makes.
    assert kernels(recompute(made, modules="block", host_us=0.0).graph)[5:] == ["k0", "k1", "k2", "back"]
    assert kernels(recompute(made, modules="block", host_us=0.0, early_stop=False).graph)[5:-1] == [
        "k0", "k1", "k2", "k3", "k4",
    ]  # fmt: skip


def test_maps_live_twice_and_the_blocks_result_all_along():
    # Two blocks of two operators: 100 bytes inside each, 10 of result, which the next block reads.
    moments = [(F, 0), (F, 0), (F, 1), (F, 1), (B, 1), (B, 0)]
    held = [a_map(100, 0, 5), a_map(10, 1, 4), a_map(100, 2, 4), a_map(10, 3, 4)]
    before = memory(moments, held)
    assert before.curve.tolist() == [100, 110, 210, 220, 220, 100]
    outcome = recompute(network(memory=before, **traced(["aten::linear"] * 6, [-1] * 6)), host_us=0.0)
    after = outcome.graph.memory
    assert after is not None
    assert after.curve.tolist() == [100, 110, 110, 120, 120, 100]
    assert outcome.memory_bytes == {"feature maps": -100}
    assert "memory at the peak: 0.0 MB instead of 0.0 MB, by hand" in outcome.notes


def test_without_blocks_or_with_bad_numbers_it_says_what_to_write():
    with pytest.raises(
        InputError, match="modules: the trace names no repeated modules; name modules, or give segments"
    ):
        recompute(graph(launched("f", 1, layer="conv2d_0", phase=F), pairs(1)))
    with pytest.raises(InputError, match="modules: no module of the forward pass fits"):
        recompute(network(), modules="nothing")
    with pytest.raises(InputError, match="every: 0 is out of range"):
        recompute(network(), every=0)
    with pytest.raises(InputError, match=r"modules: '\(' is no regular expression"):
        recompute(network(), modules="(")
