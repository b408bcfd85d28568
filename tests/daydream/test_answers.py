"""The way from a trace file to an answer, for scripts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import daydream
from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, TaskGraph
from daydream.whatif import PassRequest
from hal.support.errors import InputError
from tests.daydream.traces import Builder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two whole steps of 100 µs with a kernel of 50 µs each, which the CPU waits for."""
    builder = Builder()
    for step in (0, 1):
        begin = 100 * step
        builder.step(step, begin, 100)
        builder.launch(begin + 5, 5, correlation=step + 1).kernel("sgemm", begin + 20, 50, correlation=step + 1)
        builder.launch(begin + 12, 60, correlation=step + 11, name="cudaDeviceSynchronize")
    return builder.write(tmp_path / "trace.json")


def request(function: object) -> PassRequest:
    return PassRequest(text="own", name="own", function=function, parameters={}, defaults={})  # type: ignore[arg-type]


def test_a_replay_takes_the_recorded_time(trace: Path) -> None:
    answer = daydream.replay(trace)
    assert answer.steps == (0, 1)
    assert answer.graph is answer.timeline.graph
    assert answer.analysis().mean_us == pytest.approx(100)


def test_one_step_can_be_asked_for(trace: Path) -> None:
    assert daydream.replay(trace, 1).steps == (1,)
    with pytest.raises(InputError, match="there is no step 7"):
        daydream.replay(trace, 7)


def test_a_prediction_keeps_both_sides(trace: Path) -> None:
    before = daydream.replay(trace)

    def instant(graph: TaskGraph) -> TaskGraph:
        return graph.scaled(graph.select(gpu=True), 0.0)

    prediction = daydream.predict(before, [request(instant)])
    assert prediction.before is before
    assert [applied.name for applied in prediction.applied] == ["own"]
    saved = before.timeline.step_us - prediction.after.timeline.step_us
    assert saved == pytest.approx(np.full(2, 50.0))


def test_a_pass_that_ties_a_knot_is_named(trace: Path) -> None:
    def knot(graph: TaskGraph) -> TaskGraph:
        edit = Edit(graph)
        edit.depend(len(graph) - 1, 0, Dependency.SYNC)
        return edit.apply()

    with pytest.raises(InputError, match=r"--pass: .* wait for each other"):
        daydream.predict(daydream.replay(trace), [request(knot)])


def test_an_unchanged_graph_changes_nothing(trace: Path) -> None:
    before = daydream.replay(trace)
    after = daydream.predict(before, [request(lambda graph: replace(graph))]).after
    assert after.timeline.start_us.tolist() == before.timeline.start_us.tolist()
