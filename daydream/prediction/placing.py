"""Jobs on boards for the shortest makespan (DNNAbacus, section 4.3), as a mixed-integer linear program.

A board runs its jobs one after the other, as in the paper's figure 14; memory decides which boards can run a job at
all. With ``x[j, b]`` one where job ``j`` is on board ``b`` and zero elsewhere::

    minimise T
    subject to  sum over b of x[j, b] = 1               for every job
                sum over j of times[j, b] x[j, b] <= T  for every board

The paper searches with a genetic algorithm. A solver does the same and also proves how much better any schedule can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daydream.trace.trace import Floats, Ints
from hal.support.errors import InputError

#: Schedules whose mean makespan is what chance gives, as many as the paper's.
RANDOM_TRIALS = 100

#: The solver's tolerance: bounds closer than this share are equal.
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """A schedule.

    Attributes:
        times: seconds of every job (rows) on every board (columns), infinite where it cannot run.
        board: of every job.
        lower_bound: seconds that no schedule of these jobs can fall below.
    """

    times: Floats
    board: Ints
    lower_bound: float

    @property
    def makespan(self) -> float:
        """When the last board is done, seconds."""
        return makespan(self.times, self.board)

    @property
    def gap(self) -> float:
        """Share of this schedule's makespan by which another might be shorter; 0 where it is an optimum."""
        gap = 1 - self.lower_bound / self.makespan
        return gap if gap > TOLERANCE else 0.0

    def order(self, board: int) -> list[int]:
        """The jobs of a board, the shortest first: any order takes as long, in this one they are done earliest in the
        mean."""
        jobs = np.flatnonzero(self.board == board)
        return [int(job) for job in jobs[np.argsort(self.times[jobs, board], kind="stable")]]


def makespan(times: Floats, board: Ints) -> float:
    """When the last board is done, seconds.

    >>> makespan(np.array([[2.0, 9.0], [3.0, 9.0], [9.0, 4.0]]), np.array([0, 0, 1]))
    5.0
    """
    return float(np.bincount(board, times[np.arange(len(board)), board], times.shape[1]).max())


def placed(times: Floats, seconds: float = 30.0) -> Placement:
    """The best schedule that the solver finds.

    Args:
        times: seconds of every job (rows) on every board (columns), infinite where it cannot run; every job can run
            somewhere, and takes some time.
        seconds: how long the solver may try.

    Raises:
        InputError: SciPy is missing.
    """
    start = greedy(times)
    # Times are shares of a makespan that is known to do: the solver's tolerances are absolute.
    scale = makespan(times, start)
    board, bound = _solved(times / scale, seconds)
    # The longest job takes what its fastest board needs.
    trivial = float(times.min(axis=1).max())
    best = start if board is None or makespan(times, board) >= scale else board
    shortest = makespan(times, best)
    lower = max(trivial, bound * scale)
    return Placement(times=times, board=best, lower_bound=shortest if lower > (1 - TOLERANCE) * shortest else lower)


def _solved(times: Floats, seconds: float) -> tuple[Ints | None, float]:
    """The board of every job, None where the solver finds no schedule in time, and its lower bound.

    One schedule has a makespan of 1. Unknowns are ``x``, job by job, and the makespan.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array, hstack, vstack
    except ImportError:
        raise InputError("daydream place", "needs SciPy", "run pip install 'roller[plan]'") from None

    jobs, boards = times.shape
    runs = np.isfinite(times)
    places = np.arange(jobs * boards)
    shape = (boards, jobs * boards)
    load = csr_array((np.where(runs, times, 0.0).ravel(), (np.tile(np.arange(boards), jobs), places)), shape=shape)
    once = csr_array((np.ones(jobs * boards), (places // boards, places)), shape=(jobs, jobs * boards + 1))
    within = hstack([load, -np.ones((boards, 1))])
    # Of boards that are alike the first has most to do: schedules that only swap them are one.
    alike = [board for board in range(boards - 1) if np.array_equal(times[:, board], times[:, board + 1])]
    descending = hstack([load[[board + 1 for board in alike]] - load[alike], csr_array((len(alike), 1))])
    answer = milp(
        np.append(np.zeros(jobs * boards), 1.0),
        integrality=np.append(np.ones(jobs * boards), 0),
        bounds=Bounds(0, np.append(runs.ravel().astype(np.float64), 1.0)),
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(vstack([within, descending]), -np.inf, 0)],
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    bound = 0.0 if answer.mip_dual_bound is None else float(answer.mip_dual_bound)
    if answer.x is None:
        return None, bound
    return np.asarray(answer.x[:-1].reshape(jobs, boards).argmax(axis=1), np.int64), bound


def greedy(times: Floats) -> Ints:
    """The board of every job by longest processing time first: the longest job goes where it ends first, then the next
    (Graham 1969). A job is as long as on its fastest board.

    >>> greedy(np.array([[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])).tolist()
    [1, 1, 0]
    """
    ends = np.zeros(times.shape[1])
    board = np.zeros(len(times), np.int64)
    for job in np.argsort(-times.min(axis=1), kind="stable"):
        board[job] = np.argmin(ends + times[job])
        ends[board[job]] += times[job, board[job]]
    return board


def random_makespan(times: Floats) -> float:
    """Mean makespan where every job goes to any board that can run it, seconds."""
    draws = np.random.default_rng(0).random((RANDOM_TRIALS, *times.shape))
    draws[:, ~np.isfinite(times)] = -1
    return float(np.mean([makespan(times, board) for board in draws.argmax(axis=2)]))
