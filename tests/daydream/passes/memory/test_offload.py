"""Copies to the host and back, scheduled and added up by hand."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Phase, TaskGraph
from daydream.graph.memory import MemoryKind
from daydream.graph.simulate import simulate
from daydream.passes.memory.offload import offload
from hal.support.errors import InputError
from tests.daydream.graphs import MAIN, graph, launched, pairs, task
from tests.daydream.passes.held import B, F, U, a_map, memory, of


def two_steps(**fields: object) -> TaskGraph:
    """GPU: f 1-11, b 11-31, update 31-36, and the same again behind it."""
    tasks = []
    for number in range(2):
        for name, duration, phase in (("f", 10, F), ("b", 20, B), ("update", 5, U)):
            tasks += launched(name, duration, phase=phase, step=number, layer="fc")
    return graph(tasks, pairs(6), **fields)


def times(made: TaskGraph, name: str) -> list[tuple[float, float]]:
    timeline = simulate(made)
    return [(timeline.start_us[row], timeline.end_us[row]) for row in made.select(name=name)]


def test_states_come_for_the_update_and_go_behind_it():
    moments = [(F, 0), (B, 0), (U, 0)]
    before = memory(moments, [of(MemoryKind.OPTIMIZER, 24e3, -1, 3), a_map(60e3, 0, 1)])
    outcome = offload(two_steps(memory=before))
    # 24 kB at 12 GB/s are 2 µs: there at 33, back from 38 on, while the next step runs.
    assert times(outcome.graph, "to board") == [(31, 33), (68, 70)]
    assert times(outcome.graph, "to host") == [(38, 40), (75, 77)]
    assert times(outcome.graph, "^update$") == [(33, 38), (70, 75)]
    assert outcome.notes[0] == "optimizer states of 0.0 MB come and go in 2 steps: 0.002 ms each way"
    after = outcome.graph.memory
    assert after is not None
    assert after.curve.tolist() == [60e3, 60e3, 24e3]
    assert outcome.memory_bytes == {"optimizer states": -24e3}


def test_states_of_a_size_that_the_user_gives():
    outcome = offload(two_steps(), state_mb=0.024)
    assert times(outcome.graph, "to board")[0] == (31, 33)
    assert outcome.memory_bytes is None
    with pytest.raises(
        InputError, match="state-mb: the trace does not tell the size of optimizer states; give it in MB"
    ):
        offload(two_steps())


def test_maps_go_behind_the_layer_that_uses_them_last_and_come_back_for_its_gradient():
    names = [("f0", F, "a"), ("f1", F, "b"), ("f2", F, "c"), ("b2", B, "c"), ("b1", B, "b"), ("b0", B, "a")]
    tasks = [each for name, phase, layer in names for each in launched(name, 10, phase=phase, layer=layer)]
    moments = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)]
    # What "a" frees "b" uses last, what "b" frees "c".
    before = memory(moments, [a_map(24e3, 0, 5, 0), a_map(12e3, 1, 4, 1), a_map(6e3, 2, 3, 2)])
    outcome = offload(graph(tasks, pairs(6), memory=before), what="feature-maps")
    # Those behind "c" stay, for its gradient comes first; 24 kB leave behind f1 and are back when b2 has run.
    assert times(outcome.graph, "to host") == [(21, 23)]
    assert times(outcome.graph, "to board") == [(31, 33)]
    assert times(outcome.graph, "^b1$") == [(41, 51)]
    after = outcome.graph.memory
    assert after is not None
    assert before.curve.tolist() == [24e3, 36e3, 42e3, 42e3, 36e3, 24e3]
    assert after.curve.tolist() == [24e3, 36e3, 18e3, 42e3, 36e3, 24e3]


def test_what_cannot_be_moved_is_said():
    with pytest.raises(InputError, match="fewer than two layers have maps of known size"):
        offload(two_steps(), what="feature-maps")
    with pytest.raises(InputError, match="offload: nothing of this trace ran on a GPU"):
        offload(graph([task("f", MAIN, 1, phase=Phase.FORWARD)]))
    with pytest.raises(InputError, match="what: 'weights' is unknown; give optimizer or feature-maps"):
        offload(two_steps(), what="weights")
    with pytest.raises(InputError, match="pcie-gbps: 0 is out of range"):
        offload(two_steps(), pcie_gbps=0.0)
