"""Predicted steps: when kernels start, how long phases are, what bounds a step; and the trace that says the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daydream.answers import predict, replay, replay_of
from daydream.graph.graph import Phase, TaskKind
from daydream.operators.inputs import Inputs, RecordedTensor, inputs_of, outputs_of
from daydream.prediction.step import LAUNCH_LATENCY
from daydream.prediction.trace import operator_arguments, predicted_trace
from daydream.trace.trace import Category
from daydream.trace.writer import write_trace
from daydream.whatif import parse_pass
from tests.daydream.captures import MATRIX, operator, step_of

LATENCY_US = 1e6 * LAUNCH_LATENCY

TRAINING = [
    operator("aten::mm", module=1),
    operator("aten::view", module=1, launches=False),
    operator("aten::relu", module=2),
    operator("aten::threshold_backward", Phase.BACKWARD, 2, forward=2),
    operator("aten::mm", Phase.BACKWARD, 1, forward=0),
    operator("aten::_foreach_add_", Phase.UPDATE),
]


def test_a_kernel_starts_when_it_is_launched_and_the_one_before_has_ended() -> None:
    step = step_of(TRAINING[:3], (10, 5, 10), ((100,), (), (20, 30)))
    # Launches return at 10 us; at half and at the end of the last operator's ten: 20 and 25.
    assert 1e6 * step.launched == pytest.approx([10, 20, 25])
    begin = 10 + LATENCY_US
    assert 1e6 * step.starts == pytest.approx([begin, begin + 100, begin + 120])
    assert 1e6 * step.step_seconds == pytest.approx(begin + 150)
    assert step.bound == "memory" and step.samples_per_second == pytest.approx(4e6 / (begin + 150))


def test_a_step_of_small_kernels_waits_for_the_host() -> None:
    step = step_of(TRAINING[:3], (100, 50, 100), ((1,), (), (1, 1)))
    assert 1e6 * step.starts == pytest.approx([100 + LATENCY_US, 200 + LATENCY_US, 250 + LATENCY_US])
    assert 1e6 * step.step_seconds == pytest.approx(251 + LATENCY_US)
    assert step.bound == "host" and 1e6 * step.busy_seconds == pytest.approx(3)


def test_a_step_without_kernels_is_the_hosts_time() -> None:
    step = step_of(TRAINING[1:2], (7,), ((),))
    assert 1e6 * step.step_seconds == pytest.approx(7)
    assert len(step.starts) == 0 and step.priced_by == {}


def test_phases_end_with_their_last_kernels() -> None:
    step = step_of(TRAINING, (10,) * 6, ((100,), (), (50,), (30,), (200,), (15,)))
    begin = 10 + LATENCY_US
    assert 1e6 * np.array(step.phases) == pytest.approx([begin + 150, 230, 15])
    assert sum(step.phases) == pytest.approx(step.step_seconds)


def test_inference_is_all_forward() -> None:
    step = step_of(TRAINING[:3], (10, 5, 10), ((100,), (), (20, 30)))
    assert step.phases == (step.step_seconds, 0.0, 0.0)


@pytest.mark.parametrize("host", [1.0, 40.0, 400.0])
def test_the_trace_takes_as_long_when_it_is_replayed(host: float, tmp_path: Path) -> None:
    step = step_of(TRAINING, (host,) * 6, ((100,), (), (50, 3), (30,), (200,), (15,)))
    trace = predicted_trace(step)
    again = replay_of(trace)
    assert again.timeline.step_us == pytest.approx([1e6 * step.step_seconds])
    path = tmp_path / "step.json.gz"
    write_trace(trace, path)
    from_file = replay(path)
    assert from_file.timeline.step_us == pytest.approx([1e6 * step.step_seconds], abs=2e-3)
    assert from_file.graph.warnings == ()


def test_the_trace_knows_phases_layers_and_kernels() -> None:
    graph = replay_of(predicted_trace(step_of(TRAINING, (10,) * 6, ((100,), (), (50,), (30,), (200,), (15,))))).graph
    rows = np.flatnonzero(graph.kind == TaskKind.KERNEL)
    assert [graph.text(row) for row in rows.tolist()] == [f"k_{o.name}" for o in TRAINING if o.name != "aten::view"]
    assert graph.phase[rows].tolist() == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2 + [Phase.UPDATE]
    assert [graph.layers[layer] for layer in graph.layer[rows[:4]].tolist()] == ["0", "1", "1", "0"]
    assert graph.duration_us[rows].tolist() == pytest.approx([100, 50, 30, 200, 15])


def test_passes_change_a_predicted_step() -> None:
    before = replay_of(predicted_trace(step_of(TRAINING, (1,) * 6, ((100,), (), (50,), (30,), (200,), (15,)))))
    after = predict(before, [parse_pass("scale:match=k_aten::mm,factor=0.5")]).after
    # Half of the two products of 300 us.
    assert before.timeline.step_us[0] - after.timeline.step_us[0] == pytest.approx(150)


def test_what_is_written_of_an_operator_is_read_again(tmp_path: Path) -> None:
    half = RecordedTensor((3, 5), "c10::Half", (5, 1))
    inputs = Inputs((MATRIX, None, None), ("", "[2, 2]", ""), ((), (), (half, MATRIX)))
    path = tmp_path / "step.json"
    step = step_of([operator("aten::odd", inputs=inputs, outputs=(half,))], (5,), ((7,),))
    write_trace(predicted_trace(step), path)
    trace = replay(path).graph.trace
    assert trace is not None
    (row,) = np.flatnonzero(trace.category == Category.OPERATOR)
    assert inputs_of(trace, int(row)) == inputs
    assert outputs_of(trace, int(row)) == (half,)
    assert operator_arguments(step.capture.operators[0])["Input Dims"] == [[64, 64], [], [[3, 5], [64, 64]]]
