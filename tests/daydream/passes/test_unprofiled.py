"""The profiler's own cost taken off: so much before every event, never more than there is."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.passes.unprofiled import unprofiled
from daydream.tasks.build import build_graph
from hal.support.errors import InputError
from tests.daydream.traces import Builder, written


def recorded(**metadata: object) -> TaskGraph:
    """A step of 100 µs: an operator of 40 µs with another inside after 5 µs, then one of 30 µs 10 µs later."""
    builder = Builder().step(1, 0.0, 100.0)
    builder.operator("aten::a", 10, 40).operator("aten::b", 15, 30).operator("aten::c", 60, 30)
    builder.head["daydream"] = metadata
    with tempfile.TemporaryDirectory() as folder:
        return build_graph(written(Path(folder) / "trace.json", builder.document()))


def durations(graph: TaskGraph) -> dict[str, tuple[float, float]]:
    rows = graph.select()
    return {graph.text(row): (graph.duration_us[row], graph.gap_us[row]) for row in rows.tolist()}


def test_every_event_costs_the_same() -> None:
    # The step's range, a, b and c: 4 events in 100 µs, of which 92 are left.
    found = unprofiled(recorded(timed_seconds=[92e-6, 92e-6, 300e-6]))
    assert simulate(found.graph).step_us.tolist() == pytest.approx([92])
    assert found.notes == (
        "steps of 0.100 ms recorded, 0.092 ms without the profiler",
        "4 events a step cost 2.67 µs each, 8 µs in all",
    )


def test_what_is_no_profilers_is_another_pace() -> None:
    found = unprofiled(recorded(), step_ms=0.05)
    assert simulate(found.graph).step_us.tolist() == pytest.approx([50])
    assert "10.00 µs each" in found.notes[1]
    assert found.notes[2].startswith("the rest is another pace of the machine: all CPU times multiplied by 0.")


def test_steps_that_were_faster_with_the_profiler_are_stretched() -> None:
    graph = recorded()
    found = unprofiled(graph, step_ms=0.11)
    assert simulate(found.graph).step_us.tolist() == pytest.approx([110])
    before, after = durations(graph), durations(found.graph)
    assert after["aten::c"][0] == pytest.approx(1.1 * before["aten::c"][0])


def test_a_trace_without_timed_steps_needs_a_length() -> None:
    with pytest.raises(InputError, match="step-ms: the trace holds no steps that were timed without the profiler"):
        unprofiled(recorded())
