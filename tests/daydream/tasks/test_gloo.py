"""Collectives on threads of gloo: tied to the call, waited for by what follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daydream.graph.graph import TaskGraph, TaskKind
from daydream.graph.simulate import simulate
from daydream.tasks.build import read_graph
from tests.daydream.ranks.jobs import gloo_trace


@pytest.fixture
def graph(tmp_path: Path) -> TaskGraph:
    return read_graph(gloo_trace(tmp_path, 0, work_us=1000.0, end_us=5000.0))


def test_a_recording_on_gloo_is_replayed(graph: TaskGraph) -> None:
    assert simulate(graph).step_us.tolist() == pytest.approx([5200.0])
    assert not any(thread.polls for thread in graph.threads)


def test_a_shorter_collective_shortens_the_step(graph: TaskGraph) -> None:
    (row,) = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION)
    assert graph.text(int(row)) == "gloo:all_reduce"
    assert graph.duration_us[row] == pytest.approx(5000.0 - 1070.0)
    faster = graph.with_durations(np.array([row]), float(graph.duration_us[row]) - 3000.0)
    assert simulate(faster).step_us.tolist() == pytest.approx([2200.0])


def test_a_later_call_delays_the_collective(graph: TaskGraph) -> None:
    (work,) = graph.select(name="aten::linear")
    slower = graph.with_durations(np.array([work]), 1500.0)
    assert simulate(slower).step_us.tolist() == pytest.approx([5700.0])
