"""Other buckets and workers on gloo: what was recorded of the exchange goes, what is asked for comes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daydream.graph.graph import Phase, TaskGraph, TaskKind
from daydream.graph.ranks import joined
from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.tasks.build import read_graph
from hal.support.errors import InputError
from tests.daydream.hosted_traces import A_BYTES, B_BYTES, CALL_US, IDLE_US, STEP_US, data_parallel_step
from tests.daydream.traces import Builder

#: A step that exchanges nothing and calls nothing.
COMPUTED_US = STEP_US - IDLE_US - 2 * CALL_US


@pytest.fixture
def graph(tmp_path: Path) -> TaskGraph:
    return read_graph(data_parallel_step().write(tmp_path / "trace.json"))


def step_us(graph: TaskGraph, **parameters: float) -> float:
    return float(simulate(registered()["rebucket"](graph, **parameters).graph).step_us[0])


def test_the_recorded_exchange_is_a_dependency(graph: TaskGraph):
    collectives = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION)
    assert len(collectives) == 2
    assert simulate(graph).step_us == pytest.approx([STEP_US])
    without = simulate(graph.with_durations(collectives, 0.0)).step_us[0]
    # The caller's own time behind its wait stays.
    assert without == pytest.approx(STEP_US - IDLE_US + 4)


def test_an_end_that_is_written_down_late_is_the_caller_s_going_on(tmp_path: Path):
    late = read_graph(data_parallel_step(late_end_us=10.0).write(tmp_path / "late.json"))
    assert simulate(late).step_us == pytest.approx([STEP_US])
    assert step_us(late, workers=1) == pytest.approx(COMPUTED_US + CALL_US)


def test_the_recorded_exchange_goes_with_its_calls_and_waits(graph: TaskGraph):
    outcome = registered()["rebucket"](graph, workers=1)
    assert not [name for row, name in enumerate(map(outcome.graph.text, range(len(outcome.graph)))) if "gloo" in name]
    assert simulate(outcome.graph).step_us == pytest.approx([COMPUTED_US + CALL_US])


def test_one_bucket_is_exchanged_behind_the_last_gradient(graph: TaskGraph):
    # Of two workers each sends and receives half twice: the bucket's bytes at 0.1 GB/s.
    expected = COMPUTED_US + CALL_US + (A_BYTES + B_BYTES) / 100 + 2 * 7
    assert step_us(graph, workers=2, bandwidth=0.1, latency_us=7.0) == pytest.approx(expected)


def test_a_bucket_of_each_gradient_overlaps_the_backward_pass(graph: TaskGraph):
    # The first bucket is through before the second gradient is there.
    expected = COMPUTED_US + 2 * CALL_US + A_BYTES / 100
    assert step_us(graph, workers=2, bandwidth=0.1, latency_us=0.0, bucket_mb=0.001) == pytest.approx(expected)


def test_buckets_on_a_slow_network_follow_each_other(graph: TaskGraph):
    # They begin with the first bucket's call, now behind the 40 µs that no event records; the copies begin at 700.
    slow = step_us(graph, workers=2, bandwidth=0.01, latency_us=0.0, bucket_mb=0.001)
    assert slow == pytest.approx(292 + 40 + CALL_US + (A_BYTES + B_BYTES) / 10 + STEP_US - 700)


def test_joined_ranks_wait_for_the_slower(graph: TaskGraph):
    backward = np.flatnonzero(graph.phase == Phase.BACKWARD)
    slower = graph.scaled(backward, 2.0)
    both = joined([graph, slower], (0, 1))
    parameters = {"workers": 2, "bandwidth": 0.1, "latency_us": 0.0}
    assert step_us(both, **parameters) == pytest.approx(step_us(slower, **parameters))
    assert step_us(both, **parameters) > step_us(graph, **parameters) + 100


def test_a_trace_with_a_gpu_is_refused(tmp_path: Path):
    trace = Builder("2026").step(0, 0, 100).operator("aten::mm", 10, 20, external=1)
    trace.launch(15, 5, correlation=9, external=1).kernel("sgemm", 27, 30, correlation=9, external=1)
    graph = read_graph(trace.write(tmp_path / "gpu.json"))
    with pytest.raises(InputError, match="has tasks on a GPU"):
        registered()["rebucket"](graph)


@pytest.mark.parametrize("parameters", [{"workers": 0}, {"bandwidth": 0.0}, {"latency_us": -1.0}, {"bucket_mb": -1.0}])
def test_numbers_out_of_range_are_refused(graph: TaskGraph, parameters: dict[str, float]):
    with pytest.raises(InputError, match=f"rebucket: {next(iter(parameters)).replace('_', '.')}"):
        registered()["rebucket"](graph, **parameters)


def test_a_trace_without_sizes_is_refused(graph: TaskGraph):
    assert graph.trace is not None
    bare = replace(graph, trace=replace(graph.trace, metadata={}, arguments=tuple({} for _ in graph.trace.arguments)))
    with pytest.raises(InputError, match="gradients"):
        registered()["rebucket"](bare)
