"""Equal ranks are found, and simulated once with the same times."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daydream.graph.graph import TaskGraph
from daydream.graph.ranks import joined, meetings
from daydream.graph.simulate import simulate
from daydream.ranks.equal import equal_ranks, simulate_ranks
from tests.daydream.ranks.jobs import rank_graph

#: How ranks may be divided into groups.
DIVISIONS = (lambda rank: "all", lambda rank: f"pair {rank // 2}", lambda rank: f"stripe {rank % 2}")


def job(works: list[list[float]], divisions: list[int]) -> TaskGraph:
    """Ranks that meet in the group of the n-th division after their n-th work."""
    moves = [2.0] * len(divisions)
    groups = [[DIVISIONS[division](rank) for division in divisions] for rank in range(len(works))]
    parts = [rank_graph(own, group, moves) for own, group in zip(works, groups, strict=True)]
    return joined(parts, tuple(range(len(works))))


@given(
    st.integers(0, 3).flatmap(
        lambda count: st.tuples(
            st.lists(
                st.lists(st.sampled_from((1.0, 4.0)), min_size=count + 1, max_size=count + 1), min_size=2, max_size=6
            ),
            st.lists(st.integers(0, 2), min_size=count + 1, max_size=count + 1),
        )
    )
)
def test_simulating_one_of_a_class_gives_every_time_of_all(drawn: tuple[list[list[float]], list[int]]) -> None:
    graph = job(*drawn)
    once, all_of_them = simulate_ranks(graph), simulate(graph)
    assert np.array_equal(once.start_us, all_of_them.start_us)
    assert np.array_equal(once.end_us, all_of_them.end_us)
    reasons = once.cause[once.cause >= 0]
    assert np.array_equal(once.end_us[reasons], once.start_us[once.cause >= 0])


def test_ranks_that_meet_others_are_not_equal() -> None:
    alike = [[1.0, 1.0]] * 4
    assert equal_ranks(job(alike, [1, 0])).tolist() == [0, 0, 0, 0]
    # The first pair waits for a slow member; the others do the same by themselves, but do not wait.
    assert equal_ranks(job([[1.0, 1.0], [5.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [1, 1])).tolist() == [0, 1, 2, 2]


def test_stages_of_a_pipeline_are_a_class_each() -> None:
    graph = job([[1.0], [2.0], [1.0], [2.0]], [1])
    assert equal_ranks(graph).tolist() == [0, 1, 0, 1]
    assert np.array_equal(simulate_ranks(graph).start_us, simulate(graph).start_us)


def test_a_meeting_that_takes_time_folds_nothing() -> None:
    graph = job([[1.0], [1.0]], [0])
    slow = graph.with_durations(np.flatnonzero(meetings(graph)), 1.0)
    assert equal_ranks(slow).tolist() == [0, 1]
