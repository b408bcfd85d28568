"""The best list of buckets: exact, by dynamic programming over lists that no other one dominates.

dPRO walks the critical path and decides at every tensor, once, whether to fuse it (algorithm 1). Here every list is
kept until it is known to be worse: of two that end with the same gradient, one is dropped if with the other the
channel is free, every later gradient ready, every later call possible and the step's computation done no later, since
whatever may follow is then no later either. Where calls take no time that leaves one list for every gradient, and the
search takes the square of their number. Dropped are, too, lists that cannot beat the best one known by a bound, those
that theorem 2 says are better fused, and cuts that theorem 3 says are never needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from daydream.optimize.coarse import CoarseStep, Progress
from daydream.optimize.exchange import Ends
from daydream.optimize.theorems import cuts, subadditive, tensor_fusion_pays
from daydream.trace.trace import NONE, Floats, Ints

#: Microseconds by which steps must differ to count as different: sums of many durations are rounded.
SAME_US = 1e-6


@dataclass(frozen=True, kw_only=True)
class Prunings:
    """Lists that a search leaves out; the answer is the same with and without each.

    Attributes:
        bound: lists that cannot beat the best one known.
        tensors: lists whose last two buckets theorem 2 says are better fused.
        groups: cuts that theorem 3 says are never needed.
    """

    bound: bool = True
    tensors: bool = True
    groups: bool = True


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best list of buckets.

    Attributes:
        ends: its buckets.
        length_us: the step's length with them.
        tried: how many lists, or beginnings of lists, were looked at.
        replayed: of how many what follows their last bucket had to be worked out.
    """

    ends: Ends
    length_us: float
    tried: int
    replayed: int


def best_buckets(step: CoarseStep, given_lists: Iterable[Ends] = (), prunings: Prunings | None = None) -> Found:
    """The list of buckets with which the step is shortest; of equal ones the first known, else one of few buckets.

    Args:
        step: the coarsened view.
        given_lists: lists to beat, first the one that a user has.
        prunings: what to leave out, by default everything that may be.
    """
    prunings = prunings or Prunings()
    relaxed = _Relaxed.of(step)
    lists = [*given_lists, relaxed.ends]
    lengths = [step.replay(ends) for ends in lists]
    best = int(np.argmin(np.array(lengths) > min(lengths) + SAME_US))
    result = _search(step, relaxed, lengths[best] if prunings.bound else np.inf, prunings)
    ends, length, tried, replayed = lists[best], lengths[best], result.tried + len(lists), result.replayed
    if result.ends and result.length_us < length - SAME_US:
        ends, length = result.ends, result.length_us
    if ends != lists[0] or lists[0] is relaxed.ends:
        ends, more = _merged(step, ends, length + SAME_US)
        length, tried = step.replay(ends), tried + more
    return Found(ends=ends, length_us=length, tried=tried, replayed=replayed)


@dataclass(eq=False)
class _Lists:
    """Lists that nothing dominates so far, in rows.

    Attributes:
        progress: of each.
        last: the gradient that each ends with, -1 for the empty list.
        parent: the row of the list without its last bucket, -1 for the empty list.
        waiting: when all gradients behind its last bucket are ready, up to the gradient that is looked at.
    """

    progress: Progress
    last: Ints
    parent: Ints
    waiting: Floats
    ends: list[Ends] = field(default_factory=list)

    def add(self, progress: Progress, last: int, parent: Ints) -> None:
        mine, count = self.progress, len(parent)
        self.progress = Progress(
            np.concatenate([mine.end, progress.end]),
            np.concatenate([mine.issued, progress.issued]),
            np.concatenate([mine.ready, progress.ready]),
            np.concatenate([mine.done, progress.done]),
        )
        self.last = np.concatenate([self.last, np.full(count, last)])
        self.parent = np.concatenate([self.parent, parent])
        self.waiting = np.concatenate([self.waiting, np.full(count, -np.inf)])
        self.ends += [(*self.ends[row], last) for row in parent.tolist()]


def _search(step: CoarseStep, relaxed: _Relaxed, limit: float, prunings: Prunings) -> Found:
    """The best list that beats the limit; an empty one if there is none."""
    count, took = len(step), step.took_us
    open_ = cuts(took, step.ready, step.producer, step.hook, step.call_us) if prunings.groups else np.ones(count, bool)
    none = np.array([NONE])
    candidates = _Lists(step.start(), none, none, np.array([-np.inf]), [()])
    tried = replayed = 0
    for place in range(count):
        candidates.waiting = np.maximum(candidates.waiting, candidates.progress.ready[:, place])
        if not open_[place]:
            continue
        rows = np.flatnonzero(candidates.last < place)
        returned = candidates.progress.issued[rows, place] + step.call_us[place]
        ready = np.maximum(returned, candidates.waiting[rows])
        end = np.maximum(candidates.progress.end[rows], ready) + took[candidates.last[rows] + 1, place]
        tried += len(rows)
        fine = np.ones(len(rows), np.bool_)
        if prunings.bound:
            fine &= relaxed.at_best(place, end, candidates.progress.done[rows]) < limit - SAME_US
        if prunings.tensors:
            fine &= ~_better_fused(candidates, rows, place, ready, took)
        rows, returned, end = rows[fine], returned[fine], end[fine]
        if not len(rows):
            continue
        grown = step.behind_call(candidates.progress.only(rows), place, returned, end)
        replayed += len(rows)
        chosen = _undominated(grown, place)
        candidates.add(grown.only(chosen), place, rows[chosen])
    complete = np.flatnonzero(candidates.last == count - 1)
    if not len(complete):
        return Found(ends=(), length_us=np.inf, tried=tried, replayed=replayed)
    lengths = step.length_us(candidates.progress.only(complete))
    best = int(complete[np.argmin(lengths)])
    return Found(ends=candidates.ends[best], length_us=float(lengths.min()), tried=tried, replayed=replayed)


def _better_fused(candidates: _Lists, rows: Ints, place: int, ready: Floats, took: Floats) -> NDArray[np.bool_]:
    """Which of these lists with a bucket up to `place` more would be better with that and their last bucket in one."""
    better = np.zeros(len(rows), np.bool_)
    two = candidates.last[rows] != NONE
    last, before = candidates.last[rows[two]], candidates.last[candidates.parent[rows[two]]]
    fused, alone = took[before + 1, place], took[last + 1, place]
    pays = tensor_fusion_pays(candidates.progress.end[rows[two]], ready[two], fused, alone)
    better[two] = pays & subadditive(took, before + 1, last, place)
    return better


def _undominated(progress: Progress, place: int) -> Ints:
    """The rows that no other is as early as in everything that matters behind this gradient."""
    later = np.column_stack([progress.done, progress.issued[:, place + 1 :], progress.ready[:, place + 1 :]])
    later = later[:, (later != later[:1]).any(axis=0)]
    order = np.lexsort((later.sum(axis=1, where=np.isfinite(later)), progress.end))
    if not later.shape[1]:
        return order[:1]
    chosen: list[int] = []
    for row in order.tolist():
        if not (later[chosen] <= later[row]).all(axis=1).any():
            chosen.append(row)
    return np.array(chosen)


# Bounds


@dataclass(frozen=True, eq=False)
class _Relaxed:
    """Remainder of a step at best, if calls delay nothing but their own bucket.

    Attributes:
        step: the coarsened view.
        left: from each gradient on, when the channel would be free at the end, had it been free all the time.
        busy: from each gradient on, for how long the channel is busy.
        ends: the best list of buckets for the whole step.
    """

    step: CoarseStep
    left: Floats
    busy: Floats
    ends: Ends

    @staticmethod
    def of(step: CoarseStep) -> _Relaxed:
        """By two dynamic programmes, from every gradient on at once."""
        count, took = len(step), step.took_us
        returned = step.issued + step.call_us
        # At [i, j] when the channel is free after gradients i to j - 1, if buckets begin with i.
        free = np.full((count, count + 1), np.inf)
        free[np.arange(count), np.arange(count)] = -np.inf
        choice = np.zeros(count + 1, np.int64)
        waiting = np.full(count, -np.inf)
        for place in range(count):
            waiting[: place + 1] = np.maximum(waiting[: place + 1], step.ready[place])
            start = np.maximum(waiting[: place + 1], returned[place])
            ways = np.maximum(free[: place + 1, : place + 1], start) + took[: place + 1, place]
            free[: place + 1, place + 1] = ways.min(axis=1)
            choice[place + 1] = int(ways[0].argmin())
        busy = np.zeros(count + 1)
        for place in range(count - 1, -1, -1):
            busy[place] = (took[place, place:] + busy[place + 1 :]).min()
        ends: list[int] = []
        place = count
        while place:
            ends.append(place - 1)
            place = int(choice[place])
        return _Relaxed(step, np.append(free[:, count], -np.inf), busy, tuple(ends[::-1]))

    def at_best(self, place: int, end: Floats, done: Floats) -> Floats:
        """Bound below every list that begins with one whose last bucket, up to `place`, ends at `end`."""
        step = self.step
        last = np.maximum(end + self.busy[place + 1], self.left[place + 1])
        return np.maximum(np.maximum(done, last + step.tail), last) - step.begin


def _merged(step: CoarseStep, ends: Ends, limit: float) -> tuple[Ends, int]:
    """The list with neighbouring buckets in one wherever the step stays within the limit, and how many were tried."""
    tried = 0
    for last in ends[:-1]:
        fewer = tuple(end for end in ends if end != last)
        tried += 1
        if step.replay(fewer) <= limit:
            ends = fewer
    return ends, tried


# Algorithm 1


def walked(step: CoarseStep) -> Ends:
    """dPRO's own way over the tensors (algorithm 1, lines 17 to 25): each, once, fused with those before it or not."""
    ends: list[int] = []
    progress, first, last_start = step.start(), 0, step.start()
    for place in range(len(step)):
        extended = step.extended(progress, place, place)
        if place and _pays(step, progress, first, place):
            ends[-1] = place
            progress = step.extended(last_start, first, place)
        else:
            last_start, first = progress, place
            ends.append(place)
            progress = extended
    return tuple(ends)


def _pays(step: CoarseStep, progress: Progress, first: int, place: int) -> bool:
    ready = max(float(progress.issued[0, place] + step.call_us[place]), float(progress.ready[0, place]))
    fused, alone = step.took_us[first, place], step.took_us[place, place]
    return bool(tensor_fusion_pays(float(progress.end[0]), ready, float(fused), float(alone)))


def by_limits(sizes: Floats, limits: Sequence[float]) -> Ends:
    """The buckets that DDP makes of these limits in bytes: a bucket ends with the gradient by which it reaches its own.

    The last limit counts for all further buckets.

    >>> by_limits(np.array([3.0, 1.0, 4.0, 4.0, 1.0]), [3.0, 5.0])
    (0, 2, 4)
    """
    ends: list[int] = []
    filled = 0.0
    for place, size in enumerate(sizes.tolist()):
        filled += size
        if filled >= limits[min(len(ends), len(limits) - 1)]:
            ends.append(place)
            filled = 0.0
    return tuple(ends) if ends and ends[-1] == len(sizes) - 1 else (*ends, len(sizes) - 1)
