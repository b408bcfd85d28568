"""Gradients accumulated over micro-batches, scheduled and added up by hand."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.answers import replay_of
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.memory import MemoryKind
from daydream.graph.simulate import simulate
from daydream.operators.work import Moved, Work, WorkPart
from daydream.passes.basis.batches import with_batch
from daydream.passes.memory.accumulate import accumulate
from daydream.prediction.trace import predicted_trace
from hal.catalog import load_device
from hal.support.errors import InputError
from tests.daydream.captures import operator, step_of
from tests.daydream.graphs import AUTOGRAD, CHANNEL, MAIN, STREAM, graph, launched, pairs, task
from tests.daydream.passes.held import B, F, U, a_map, memory, of


def step(**fields: object) -> TaskGraph:
    """GPU: f 1-11, b 11-31, update 31-35."""
    tasks = [*launched("f", 10, phase=F), *launched("b", 20, phase=B), *launched("update", 4, phase=U)]
    return graph(tasks, pairs(3), **fields)


def kernels(made: TaskGraph) -> list[str]:
    return [made.text(int(row)) for row in made.select(gpu=True)]


def test_the_batch_in_halves():
    outcome = accumulate(step(), steps=2)
    assert kernels(outcome.graph) == ["f", "b", "f", "b", "update"]
    # Beyond the shortest kernel, 10 µs, half is left: 10 and 15 µs twice, the update once.
    assert simulate(outcome.graph).makespan_us == 1 + 2 * (10 + 15) + 4
    assert outcome.notes[0] == "2 micro-batches a step, each 1/2 of the batch"
    assert outcome.notes[-1] == "nothing tells the gradients' sizes: adding them costs nothing"


def test_growing_repeats_the_passes_as_they_are():
    outcome = accumulate(step(), steps=3, grow=True)
    assert simulate(outcome.graph).makespan_us == 1 + 3 * 30 + 4
    assert (outcome.graph.edge_kind == Dependency.LAUNCH).sum() == 7


def test_gradients_are_exchanged_once_and_the_program_waits_for_every_backward_pass():
    tasks = [
        task("cudaLaunchKernel", MAIN, 1, phase=F), task("f", STREAM, 10, phase=F),
        task("cudaLaunchKernel", AUTOGRAD, 30, phase=B), task("b", STREAM, 20, phase=B),
        task("ncclAllReduce", CHANNEL, 50, kind=TaskKind.COMMUNICATION, phase=B),
        task("cudaLaunchKernel", MAIN, 1, phase=U), task("update", STREAM, 4, phase=U),
    ]  # fmt: skip
    edges = [(0, 1, Dependency.LAUNCH), (2, 3, Dependency.LAUNCH), (5, 6, Dependency.LAUNCH)]
    edges += [(0, 2, Dependency.HANDOFF), (2, 5, Dependency.HANDOFF)]
    edges += [(3, 4, Dependency.COMMUNICATION), (4, 6, Dependency.COMMUNICATION)]
    made = accumulate(graph(tasks, edges), steps=2, grow=True).graph
    timeline = simulate(made)
    assert kernels(made) == ["f", "b", "f", "b", "update"]
    # Host: forward 0-1, backward 1-31, forward 31-32, backward 32-62; b runs 31-51 and 62-82, the exchange until 132.
    assert timeline.start_us[made.select(name="^ncclAllReduce$")].tolist() == [82]
    assert timeline.start_us[made.select(name="^f$")].tolist() == [1, 51]
    assert timeline.makespan_us == 82 + 50 + 4


def test_a_predicted_step_adds_its_gradient():
    backward = operator("aten::mm", Phase.BACKWARD, module=1, forward=0)
    operators = [operator("aten::mm", module=1), backward, operator("aten::add_", U)]
    before = replay_of(predicted_trace(step_of(operators, [5, 5, 5], [[10.0], [20.0], [4.0]]))).graph
    outcome = accumulate(before, steps=2, grow=True)
    adds = outcome.graph.select(name="add to gradient")
    # 64 x 64 floats are read, read and written.
    rate = load_device("v100").dram.bandwidth_bytes_per_second / 1e6
    assert outcome.graph.duration_us[adds] == pytest.approx([3 * 16384 / rate])
    assert any(note.startswith("1 gradients of 0.0 MB are added 1 times a step at ") for note in outcome.notes)
    assert len(outcome.graph.select(name="^k_aten::mm$")) == 4


def test_a_quarter_of_the_maps_and_gradients_that_are_there_already():
    moments = [(F, 0), (F, 0), (B, 0), (B, 0), (U, 0)]
    held = [of(MemoryKind.WEIGHTS, 40, -1, 5), of(MemoryKind.GRADIENTS, 40, -1, 0), a_map(400, 0, 2)]
    held += [of(MemoryKind.GRADIENTS, 40, 3, 5), of(MemoryKind.TEMPORARY, 80, 2, 2), of(MemoryKind.TEMPORARY, 40, 2, 2)]
    before = memory(moments, held)
    assert before.curve.tolist() == [480, 440, 560, 80, 80]
    outcome = accumulate(step(memory=before), steps=4)
    after = outcome.graph.memory
    assert after is not None
    # Weights and gradients 80; a quarter of 400 and of 80; what is as large as the weight stays; a second gradient.
    assert after.curve.tolist() == [180, 180, 240, 120, 120]
    assert outcome.memory_bytes == {"weight gradients": 40, "feature maps": -300, "temporary": -60}
    grown = accumulate(step(memory=before), steps=4, grow=True).graph.memory
    assert grown is not None
    assert grown.curve.tolist() == [480, 480, 600, 120, 120]


def test_the_batch_of_every_kind_of_work_shrinks():
    def of_part(data: dict[str, object], moved: Moved | None = None) -> WorkPart:
        work = Work(kind="", parts=(WorkPart(data, moved=moved),), flops=8.0, bytes=16.0)
        return with_batch(work, 4, frozenset({64 * 10})).parts[0]

    assert of_part({"op": "conv2d", "n": 32, "c": 3}).data == {"op": "conv2d", "n": 8, "c": 3}
    assert of_part({"op": "matmul", "m": 256, "n": 10, "k": 64}).data["m"] == 64
    assert of_part({"op": "matmul", "m": 64, "n": 10, "k": 256}).data["k"] == 64
    assert of_part({"op": "elementwise", "shape": [400]}).data["shape"] == [100]
    moved = of_part({}, Moved(kernel="k", bytes=100.0, outputs=20.0)).moved
    assert moved is not None
    assert (moved.bytes, moved.outputs) == (25.0, 5.0)


def test_one_micro_batch_is_the_batch_and_bad_numbers_are_named():
    some = step()
    assert accumulate(some, steps=1).graph is some
    with pytest.raises(InputError, match="steps: 0 is out of range"):
        accumulate(some, steps=0)
    with pytest.raises(InputError, match="accumulate: the graph has no forward and backward pass"):
        accumulate(graph(launched("f", 1, phase=F), pairs(1)))
    assert np.isfinite(simulate(accumulate(some).graph).makespan_us)
