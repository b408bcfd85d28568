"""What must hold for every simulation, on random graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daydream.graph.graph import Dependency, TaskGraph, ThreadKind, TrainingStep
from daydream.graph.simulate import simulate
from tests.daydream.graphs import AUTOGRAD, CHANNEL, MAIN, STREAM, STREAM2

THREADS = (MAIN, AUTOGRAD, STREAM, STREAM2, CHANNEL)
#: Rounding of sums of a few hundred microseconds.
EXACT = 1e-6


@st.composite
def random_graphs(draw: st.DrawFn) -> TaskGraph:
    """Up to 60 tasks on five threads with edges that only lead to later rows, so that no cycle can arise."""
    count = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.floats(0, 3))
    source = rng.integers(0, count, int(density * count))
    target = rng.integers(0, count, int(density * count))
    forward = source < target
    none, zero = np.full(count, -1), np.zeros(count, np.int64)
    # Whole numbers and zeros make ties, where schedulers err.
    duration = np.where(rng.random(count) < 0.3, 0.0, rng.integers(0, 20, count).astype(float))
    gap = np.where(rng.random(count) < 0.5, 0.0, rng.integers(0, 5, count).astype(float))
    edges = int(forward.sum())
    return TaskGraph(
        names=("task",),
        threads=THREADS,
        layers=(),
        steps=(TrainingStep("step 0", 0.0),),
        name=zero,
        kind=zero,
        thread=rng.integers(0, len(THREADS), count),
        duration_us=duration,
        gap_us=gap,
        layer=none,
        phase=none,
        step=zero,
        mark=zero,
        operator=none,
        event=none,
        bytes=np.full(count, np.nan),
        priority=rng.integers(0, 3, count),
        recorded_us=np.full(count, np.nan),
        edge_source=source[forward],
        edge_target=target[forward],
        edge_kind=np.full(edges, Dependency.SYNC),
        edge_lag_us=np.where(rng.random(edges) < 0.5, 0.0, rng.integers(0, 6, edges).astype(float)),
    )


def shuffled_edges(graph: TaskGraph, order: np.ndarray) -> TaskGraph:
    return replace(
        graph,
        edge_source=graph.edge_source[order],
        edge_target=graph.edge_target[order],
        edge_kind=graph.edge_kind[order],
        edge_lag_us=graph.edge_lag_us[order],
    )


@settings(deadline=None)
@given(random_graphs())
def test_no_task_starts_before_what_it_depends_on_has_ended(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    source, target, _, lag = graph.dependencies()
    assert (timeline.start_us[target] >= timeline.end_us[source] + lag - EXACT).all()


@settings(deadline=None)
@given(random_graphs())
def test_tasks_of_a_thread_never_overlap(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    for thread in range(len(graph.threads)):
        rows = np.flatnonzero(graph.thread == thread)
        # A task without duration may start with the next one.
        rows = rows[np.lexsort((timeline.end_us[rows], timeline.start_us[rows]))]
        busy_until = timeline.end_us[rows] + graph.gap_us[rows]
        if graph.threads[thread].kind is not ThreadKind.CHANNEL:
            assert (np.diff(rows) > 0).all() or (timeline.start_us[rows][1:] == timeline.start_us[rows][:-1]).any()
        assert (timeline.start_us[rows][1:] >= timeline.end_us[rows][:-1] - EXACT).all()
        strict = np.flatnonzero(np.diff(timeline.start_us[rows]) > EXACT)
        assert (timeline.start_us[rows][strict + 1] >= busy_until[strict] - EXACT).all()


@settings(deadline=None)
@given(random_graphs(), st.integers(0, 2**32 - 1))
def test_the_order_of_the_edges_does_not_matter(graph: TaskGraph, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(graph.edge_source))
    again = simulate(shuffled_edges(graph, order))
    assert again.start_us.tolist() == simulate(graph).start_us.tolist()


@settings(deadline=None)
@given(random_graphs(), st.integers(0, 2**32 - 1))
def test_the_order_of_rows_of_different_threads_does_not_matter(graph: TaskGraph, seed: int) -> None:
    # Any merge of the threads' sequences is the same graph; channels break ties by row, so they go without.
    ordered = replace(graph, thread=graph.thread % 4)
    rng = np.random.default_rng(seed)
    slots = np.sort(rng.random(len(ordered)))
    place = np.empty(len(ordered))
    for thread in range(4):
        rows = np.flatnonzero(ordered.thread == thread)
        place[rows] = np.sort(rng.choice(slots, len(rows), replace=False)) + 1e-9 * rng.random(len(rows)).cumsum()
    order = np.argsort(place, kind="stable")
    new = np.empty(len(order), np.int64)
    new[order] = np.arange(len(order))
    columns = {name: getattr(ordered, name)[order] for name in ("thread", "duration_us", "gap_us", "priority")}
    moved = replace(ordered, **columns, edge_source=new[ordered.edge_source], edge_target=new[ordered.edge_target])
    assert simulate(moved).start_us[new].tolist() == simulate(ordered).start_us.tolist()


@settings(deadline=None)
@given(random_graphs(), st.floats(0.125, 64))
def test_scaling_all_times_scales_the_result(graph: TaskGraph, factor: float) -> None:
    slower = replace(
        graph,
        duration_us=graph.duration_us * factor,
        gap_us=graph.gap_us * factor,
        edge_lag_us=graph.edge_lag_us * factor,
    )
    # On channels rounding may turn a tie around, so only threads in fixed order scale exactly.
    graph, slower = (replace(each, thread=each.thread % 4) for each in (graph, slower))
    assert simulate(slower).makespan_us == pytest.approx(factor * simulate(graph).makespan_us, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(random_graphs())
def test_the_makespan_is_no_less_than_any_path(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    source, target, _, lag = graph.dependencies()
    longest = graph.duration_us.copy()
    order = np.argsort(source, kind="stable")
    # Rows are in topological order, so one sweep finds the longest chain of durations and lags.
    for edge in order:
        a, b = source[edge], target[edge]
        longest[b] = max(longest[b], longest[a] + lag[edge] + graph.duration_us[b])
    assert timeline.makespan_us >= longest.max() - EXACT


@settings(deadline=None)
@given(random_graphs())
def test_the_critical_path_explains_the_makespan(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    path = timeline.critical_path
    assert timeline.end_us[path[-1]] == timeline.makespan_us
    assert timeline.start_us[path[0]] == 0
    # Each step of the path is a dependency that was met in that moment, or the thread that became free then.
    for before, after in pairwise(path):
        same = graph.thread[before] == graph.thread[after]
        freed = timeline.end_us[before] + graph.gap_us[before]
        edges = (graph.edge_source == before) & (graph.edge_target == after)
        met = timeline.end_us[before] + graph.edge_lag_us[edges]
        arrivals = np.append(met, freed) if same else met
        assert abs(arrivals - timeline.start_us[after]).min() <= EXACT


@settings(deadline=None)
@given(random_graphs())
def test_a_written_out_schedule_gives_what_the_default_does(graph: TaskGraph) -> None:
    def earliest(graph: TaskGraph, ready: list[int], start: list[float]) -> int:
        # A channel chooses last among those who could start now: another's end may still offer it something.
        on_channel = graph.thread_kinds[graph.thread[ready]] == ThreadKind.CHANNEL
        return min(range(len(ready)), key=lambda i: (start[i], on_channel[i], -graph.priority[ready[i]], ready[i]))

    assert simulate(graph, earliest).start_us == pytest.approx(simulate(graph).start_us)


@settings(max_examples=20, deadline=None)
@given(random_graphs())
@pytest.mark.slow
def test_machine_code_gives_the_same_bits(graph: TaskGraph) -> None:
    slow, fast = simulate(graph, compiled=False), simulate(graph, compiled=True)
    assert fast.start_us.tolist() == slow.start_us.tolist()
    assert fast.cause.tolist() == slow.cause.tolist()
