"""Schedules against every possible one, and against what is worked out by hand."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest

from daydream.prediction.placing import Placement, greedy, makespan, placed, random_makespan
from daydream.trace.trace import Floats
from hal.support.errors import InputError


def shortest(times: Floats) -> float:
    """The shortest makespan of all schedules there are."""
    jobs, boards = times.shape
    schedules = np.array(list(product(range(boards), repeat=jobs)))
    taken = times[np.arange(jobs), schedules]
    loads = np.stack([np.where(schedules == board, taken, 0.0).sum(axis=1) for board in range(boards)])
    return float(loads.max(axis=0).min())


@pytest.mark.parametrize("block", range(5))
def test_a_hundred_instances_have_the_optimum_of_brute_force(block: int) -> None:
    pytest.importorskip("scipy")
    draw = np.random.default_rng(block)
    for number in range(20):
        # Whole seconds, so that equal is equal. Boards of one kind and of three; jobs that fit on some alone.
        times = draw.integers(1, 1000, (8, 3)).astype(np.float64)
        if number % 3 == 0:
            times = np.repeat(times[:, :1], 3, axis=1)
        elif number % 3 == 1:
            times[draw.random((8, 3)) < 0.3] = np.inf
            times[:, 0] = np.where(np.isfinite(times).any(axis=1), times[:, 0], 50.0)
        answer = placed(times)
        assert answer.makespan == shortest(times) == answer.lower_bound
        assert answer.gap == 0
        assert np.isfinite(times[np.arange(8), answer.board]).all()


def test_the_longest_first_is_not_always_best() -> None:
    pytest.importorskip("scipy")
    # Graham's example: 5 5 4 4 3 3 3 on three machines take 11 greedily and 9 at best.
    times = np.repeat(np.array([[5.0], [5.0], [4.0], [4.0], [3.0], [3.0], [3.0]]), 3, axis=1)
    assert makespan(times, greedy(times)) == 11
    answer = placed(times)
    assert (answer.makespan, answer.lower_bound, answer.gap) == (9, 9, 0)


def test_without_time_the_greedy_schedule_stays_with_a_bound() -> None:
    pytest.importorskip("scipy")
    times = np.random.default_rng(7).uniform(1, 100, (60, 1)) * np.random.default_rng(8).uniform(1, 2, (60, 9))
    answer = placed(times, seconds=0.0)
    assert answer.makespan <= makespan(times, greedy(times))
    assert times.min(axis=1).max() <= answer.lower_bound <= answer.makespan
    assert answer.gap == pytest.approx(1 - answer.lower_bound / answer.makespan, abs=1e-6)


def test_the_jobs_of_a_board_run_shortest_first() -> None:
    times = np.array([[3.0, 9.0], [1.0, 9.0], [9.0, 4.0], [2.0, 9.0]])
    answer = Placement(times=times, board=np.array([0, 0, 1, 0]), lower_bound=4.0)
    assert [answer.order(board) for board in (0, 1)] == [[1, 3, 0], [2]]
    assert answer.makespan == 6 and answer.gap == pytest.approx(1 / 3)


def test_chance_keeps_to_boards_that_can_run_a_job() -> None:
    times = np.array([[2.0, np.inf], [np.inf, 3.0]])
    assert random_makespan(times) == 3
    # Two jobs of a second on two boards: half of the schedules take one, half two.
    assert random_makespan(np.ones((2, 2))) == pytest.approx(1.5, abs=0.15)
    assert random_makespan(np.ones((2, 2))) == random_makespan(np.ones((2, 2)))


def test_a_missing_scipy_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InputError, match=r"needs SciPy; run pip install 'roller\[plan\]'"):
        placed(np.ones((2, 2)))
