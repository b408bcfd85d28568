"""What a step holds, from every source that a trace may have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daydream.answers import replay_of
from daydream.graph.graph import Phase
from daydream.graph.memory import MemoryKind
from daydream.memory.attached import with_memory
from daydream.memory.footprint import footprint
from daydream.passes.basis.bytes import memory_of
from daydream.prediction.trace import predicted_trace
from daydream.tasks.build import read_graph
from tests.daydream.captures import operator, step_of
from tests.daydream.graphs import graph, launched, pairs
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import Builder


def training() -> Builder:
    """Linear, ReLU, linear, and back; float32."""
    builder = Builder()
    builder.step(0, 0, 900)
    forward = [("linear", [[4, 8], [16, 8], [16]]), ("relu", [[4, 16]]), ("linear", [[4, 16], [2, 16], [2]])]
    for number, (name, dims) in enumerate(forward):
        types = ["float"] * len(dims)
        builder.operator(f"aten::{name}", 10 + 50 * number, 40, sequence=number + 1, dims=dims, types=types)
    for number, name in ((3, "Addmm"), (2, "Relu"), (1, "Addmm")):
        around = f"autograd::engine::evaluate_function: {name}Backward0"
        builder.operator(around, 400 - 50 * number, 40, sequence=number, forward_thread=1, thread=101)
    return builder


def test_of_a_plain_recording_what_autograd_keeps_is_worked_out(tmp_path: Path):
    made = read_graph(training().write(tmp_path / "trace.json"))
    memory = memory_of(made)
    assert memory is not None
    assert memory.source == "worked out from the sizes of operators"
    # The first product's argument, 4 x 8, and what ReLU writes, 4 x 16, which the second product reads.
    assert sorted(each.bytes for each in memory.held) == [128, 256]
    assert {each.kind for each in memory.held} == {MemoryKind.FEATURE_MAPS}
    # Operators 0 to 2 and 3 to 5: ReLU's result is needed until its own gradient, the argument until the last.
    assert sorted((each.born, each.died) for each in memory.held) == [(0, 5), (1, 4)]
    assert memory.curve.tolist() == [128, 384, 384, 384, 384, 128]


@pytest.mark.parametrize("fill", ["aten::zero_", "aten::_foreach_zero_", ""])
def test_gradients_that_are_set_to_zero_are_there_throughout(fill: str, tmp_path: Path):
    builder = training().annotation("Optimizer.zero_grad#SGD.zero_grad", 700, 50)
    builder.forward_backward(10, 350, backward_thread=101).forward_backward(110, 250, backward_thread=101)
    if fill:
        builder.operator(fill, 710, 10)
    memory = memory_of(read_graph(builder.write(tmp_path / "trace.json")))
    assert memory is not None
    gradients = [each for each in memory.held if each.kind is MemoryKind.GRADIENTS]
    # Weights of 16 x 8 and 2 x 16 with their biases.
    assert sum(each.bytes for each in gradients) == 4 * (16 * 9 + 2 * 17)
    assert all((each.born == -1) == bool(fill) for each in gradients)


def test_a_prediction_carries_its_captures_storages():
    made = (operator("aten::mm", made=(1,)), operator("aten::mm", Phase.BACKWARD, forward=0, freed=(1,)))
    step = step_of(made, [5, 5], [[10.0], [20.0]])
    capture = replace(step.capture, storages=(*step.capture.storages, replace(step.capture.storages[0], kind="step")))
    step = replace(step, capture=capture)
    memory = memory_of(replay_of(predicted_trace(step)).graph)
    assert memory is not None
    assert memory.curve.tolist() == footprint(capture).allocated.tolist() == [32768, 32768]
    assert memory.at_peak()[MemoryKind.FEATURE_MAPS] == 16384
    assert memory.phase.tolist() == [Phase.FORWARD, Phase.BACKWARD]


def test_malformed_storages_of_a_prediction_are_passed_over():
    step = step_of([operator("aten::mm")], [5], [[10.0]])
    trace = predicted_trace(step)
    for wrong in ([["x", 0, 0, "weights", ""]], [[1, 0, 0, "gold", ""]], [[1, 5, 2, "weights", ""]], [3], "no"):
        changed = replace(trace, metadata={**trace.metadata, "memory": wrong})
        memory = memory_of(replay_of(changed).graph)
        assert memory is None or memory.source != "as captured"


def test_recorded_allocations_are_put_next_to_the_graph(tmp_path: Path):
    builder = training()
    builder.memory(20, 1000, address=1).memory(70, 500, address=2)
    builder.memory(380, -1000, address=1, thread=101).memory(390, -500, address=2, thread=101)
    plain = read_graph(builder.write(tmp_path / "trace.json"))
    made = with_memory(plain)
    assert made.memory is not None
    assert made.memory.peak_bytes == 1500
    assert made.memory.at_peak()[MemoryKind.FEATURE_MAPS] == 1500
    assert memory_of(made) is made.memory
    assert with_memory(made) is made


def test_without_sizes_nothing_is_known():
    assert memory_of(graph(launched("f", 1), pairs(1))) is None


def test_the_estimate_is_near_what_a_recorded_training_held():
    made = read_graph(recorded_trace("resnet50_v100_nw0"))
    recorded, estimate = with_memory(made).memory, memory_of(made)
    assert recorded is not None
    assert estimate is not None
    # 2,792 MB above the step's begin, and 102 MB each of weights, momentum, and gradients, which steps set to zero.
    assert recorded.peak_bytes == pytest.approx(2792e6 + 3 * 102.2e6, rel=0.001)
    assert estimate.peak_bytes == pytest.approx(recorded.peak_bytes, rel=0.03)
