"""Clocks of hosts aligned by what ranks did together (dPRO, section 4.2), as a linear programme.

A host's time t becomes T = t + a (1 - x) + b x, with x = t / span from 0 at the beginning of the recording to 1 at its
end: an offset, and a drift that is steady. As in dPRO, ranks of a machine share its clock, the first host's is kept,
and no rank receives before it was sent:

    end(i) >= begin(j)    for every i that waits for j in a collective.

dPRO then makes receptions of the same tensor take equally long, by least squares. PyTorch records collectives whole,
and what all its kinds share is that their members end together; so here the sum of the distances from the common end
is least, which a linear programme can say and a few late ends cannot spoil:

    min  sum over collectives c, hosts h of  w |end(c, h) - z(c)|  +  cost of drift  +  penalty of broken constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from daydream.ranks.collectives import Kind
from daydream.ranks.pairing import Meetings
from daydream.trace.trace import Floats, Ints
from hal.support.errors import InputError

#: Clocks of machines run apart by less than 500 µs a second: the most that NTP slews, five times what quartz does.
MOST_DRIFT = 5e-4

#: A rank that ends earlier than another began, by more than this after alignment, has a clock that jumped, or is of
#: another run. Profilers round to microseconds, and what they convert a board's clock with is some microseconds off.
CONTRADICTION_US = 100.0

#: Weight of a broken constraint against a distance from the common end.
_PENALTY = 1e3

#: What the end of a collective that need not end together weighs.
_LOOSE = 1e-2

#: Ends of a host that the programme looks at, at most, spread evenly; more make no better estimate.
_MOST_ENDS = 4000


class Span(NamedTuple):
    """A stretch of the common clock."""

    begin_us: float
    end_us: float

    @property
    def length_us(self) -> float:
        """Its length, at least a microsecond."""
        return max(self.end_us - self.begin_us, 1.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Clocks:
    """Clocks of ranks: aligned time is ``shift_us + rate * time``, both in microseconds.

    Attributes:
        hosts: name of every host.
        host: of every rank, index into `hosts`.
        shift_us: of every rank, what its recording's beginning is in the common clock.
        rate: of every rank, microseconds of the common clock in one of its own.
        offset_us: of every host, what its clock lacks at the beginning of the recording.
        drift: of every host, by how much its clock is slow: microseconds in one.
        jitter_us: of every host, median distance of its ends from the common ones; NaN for one that met no other.
    """

    hosts: tuple[str, ...]
    host: Ints
    shift_us: Floats
    rate: Floats
    offset_us: Floats
    drift: Floats
    jitter_us: Floats

    def aligned(self, rank: Ints, time_us: Floats) -> Floats:
        """Times of these ranks in the common clock."""
        return np.asarray(self.shift_us[rank] + self.rate[rank] * time_us, np.float64)

    def own(self, rank: Ints, aligned_us: Floats) -> Floats:
        """Times of the common clock in the clocks of these ranks."""
        return np.asarray((aligned_us - self.shift_us[rank]) / self.rate[rank], np.float64)


def as_recorded(origin_us: Floats, hosts: Sequence[str]) -> Clocks:
    """Clocks taken as they are. `origin_us` is when every rank's recording began, by its own clock."""
    names = tuple(dict.fromkeys(hosts))
    return Clocks(
        hosts=names,
        host=np.array([names.index(host) for host in hosts], np.int64),
        shift_us=origin_us - origin_us.min(),
        rate=np.ones(len(origin_us)),
        offset_us=np.zeros(len(names)),
        drift=np.zeros(len(names)),
        jitter_us=np.full(len(names), np.nan),
    )


def align(meetings: Meetings, recorded: Clocks, paths: Sequence[Path]) -> Clocks:
    """The clocks that fit the meetings best.

    Args:
        meetings: what the ranks did together.
        recorded: the clocks as they are.
        paths: files of the ranks, for errors.

    Raises:
        InputError: no clocks fit, because one jumped or its file is of another run; names the file.
    """
    ends = _by_host(meetings, recorded)
    count = len(recorded.hosts)
    if count == 1 or not len(ends.meeting):
        return recorded
    rough_us, references = _rough_offsets(ends, count)
    ends = ends.moved(rough_us)
    span = Span(float(ends.end_us.min()), float(ends.end_us.max()))
    solved = _solve(ends, span, count, references)
    if solved.early_us.max(initial=0.0) > CONTRADICTION_US:
        raise _contradiction(ends, solved, recorded, paths)
    drift = (solved.offset_us[1] - solved.offset_us[0]) / span.length_us
    offset_us = (1.0 + drift) * rough_us + solved.offset_us[0] - drift * span.begin_us
    jitter = [np.median(solved.distance_us[ends.host == h]) if (ends.host == h).any() else np.nan for h in range(count)]
    rate = 1.0 + drift[recorded.host]
    return Clocks(
        hosts=recorded.hosts,
        host=recorded.host,
        shift_us=offset_us[recorded.host] + rate * recorded.shift_us,
        rate=rate * recorded.rate,
        offset_us=rough_us + solved.offset_us[0],
        drift=drift,
        jitter_us=np.array(jitter),
    )


# Ends and begins by host


class _Ends(NamedTuple):
    """Ends of collectives on the ranks of a host, a row each. Times are microseconds.

    Attributes:
        meeting: which collective, from 0 without holes.
        host: index of the host.
        end_us: median end of the host's ranks.
        begin_us: when the last of them began to send, -inf where none sends.
        first_end_us: when the first of those that wait ended, inf where none waits.
        weight: of the distance from the common end.
    """

    meeting: Ints
    host: Ints
    end_us: Floats
    begin_us: Floats
    first_end_us: Floats
    weight: Floats

    def moved(self, offset_us: Floats) -> _Ends:
        """The rows with every host's clock put forward."""
        by = offset_us[self.host]
        return self._replace(end_us=self.end_us + by, begin_us=self.begin_us + by, first_end_us=self.first_end_us + by)


def _by_host(meetings: Meetings, clocks: Clocks) -> _Ends:
    """Collectives of two hosts or more."""
    host = clocks.host[meetings.rank]
    hosts = len(clocks.hosts)
    key, row = np.unique(meetings.meeting * hosts + host, return_inverse=True)
    start, end = clocks.aligned(meetings.rank, meetings.start_us), clocks.aligned(meetings.rank, meetings.end_us)
    begin, first_end = np.full(len(key), -np.inf), np.full(len(key), np.inf)
    np.maximum.at(begin, row[meetings.sends], start[meetings.sends])
    np.minimum.at(first_end, row[meetings.waits], end[meetings.waits])
    meeting, of_host = np.divmod(key, hosts)
    shared = np.bincount(meeting, minlength=meetings.count) > 1
    chosen = np.flatnonzero(shared[meeting])
    if len(chosen) > _MOST_ENDS:
        some = np.unique(meeting[chosen])
        step = len(chosen) / _MOST_ENDS
        some = some[np.unique((np.arange(0, len(some), step)).astype(np.int64))]
        chosen = chosen[np.isin(meeting[chosen], some)]
    _, dense = np.unique(meeting[chosen], return_inverse=True)
    loose = meetings.kind[meeting[chosen]] > Kind.BARRIER
    return _Ends(
        meeting=dense,
        host=of_host[chosen],
        end_us=_medians(end, row, len(key))[chosen],
        begin_us=begin[chosen],
        first_end_us=first_end[chosen],
        weight=np.where(loose, _LOOSE, 1.0),
    )


def _medians(values: Floats, place: Ints, count: int) -> Floats:
    """The median of the values of every place; of an even number the lower one of the two in the middle."""
    order = np.lexsort((values, place))
    size = np.bincount(place, minlength=count)
    return np.asarray(values[order][np.cumsum(size) - size + (size - 1) // 2], np.float64)


def _rough_offsets(ends: _Ends, hosts: int) -> tuple[Floats, Ints]:
    """For every host the median of what its ends lack to those of hosts known before, and the hosts that came first.

    Clocks may be hours apart, and a linear programme wants numbers of one size. The first host's clock is kept, and so
    is that of the first of any others that never met those known.
    """
    offset = np.full(hosts, np.nan)
    references: list[int] = []
    while True:
        has_offset = ~np.isnan(offset)
        is_anchored = has_offset[ends.host]
        total, count = (
            np.bincount(ends.meeting[is_anchored], values, ends.meeting.max() + 1)
            for values in ((ends.end_us + np.nan_to_num(offset)[ends.host])[is_anchored], None)
        )
        new = np.flatnonzero(~is_anchored & (count[ends.meeting] > 0))
        if not len(new):
            if is_anchored.all():
                return np.nan_to_num(offset), np.array(references, np.int64)
            references.append(int(ends.host[~is_anchored].min()))
            offset[references[-1]] = 0.0
            continue
        lacking = total[ends.meeting[new]] / count[ends.meeting[new]] - ends.end_us[new]
        for host in np.unique(ends.host[new]).tolist():
            is_of_host = ends.host[new] == host
            tight = is_of_host & (ends.weight[new] == 1.0)
            offset[host] = np.median(lacking[tight if tight.any() else is_of_host])


# The linear programme


class _Solved(NamedTuple):
    """Solution of the programme.

    Attributes:
        offset_us: of every host at the begin of the span and at its end, shape [2, hosts].
        distance_us: of every row, from the common end.
        early_us: of every row, by how much it ended before the last had begun.
    """

    offset_us: Floats
    distance_us: Floats
    early_us: Floats


def _solve(ends: _Ends, span: Span, hosts: int, references: Ints) -> _Solved:
    """The least sum of distances, with the clocks of the hosts `references` as they are.

    Columns are, in this order: offsets at the begin of the span by host, offsets at its end by host, size of every
    host's drift over the span, common end of every collective, its last begin, distance of every row from the common
    end, and by how much a row's first end comes before the last begin.
    """
    rows, collectives = len(ends.meeting), int(ends.meeting.max()) + 1
    sizes = (hosts, hosts, hosts, collectives, collectives, rows, rows)
    at_begin, at_end, drift, common, last, distance, early = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    cost = np.zeros(sum(sizes))
    cost[drift], cost[distance], cost[early] = 1.0, ends.weight, _PENALTY
    lower, upper = np.full(sum(sizes), -np.inf), np.full(sum(sizes), np.inf)
    lower[np.concatenate([distance, early])] = 0.0
    upper[drift] = MOST_DRIFT * span.length_us
    fixed = np.concatenate([at_begin[references], at_end[references]])
    lower[fixed] = upper[fixed] = 0.0
    programme = _Programme(sum(sizes))
    every = np.arange(rows)
    meeting = ends.meeting

    def clock(sign: float, time_us: Floats, of: Ints) -> list[tuple[Ints, Floats]]:
        """The offset of a row's host at a time, as columns with their factors."""
        share = (time_us - span.begin_us) / span.length_us
        return [(at_begin[ends.host[of]], sign * (1.0 - share)), (at_end[ends.host[of]], sign * share)]

    for sign in (1.0, -1.0):
        # sign (end + offset - common) <= distance
        parts = [
            *clock(sign, ends.end_us, every),
            (common[meeting], np.full(rows, -sign)),
            (distance, np.full(rows, -1.0)),
        ]
        programme.at_most(parts, -sign * ends.end_us)
        # sign (offset at the end - offset at the begin) <= drift
        ones = np.ones(hosts)
        programme.at_most([(at_end, sign * ones), (at_begin, -sign * ones), (drift, -ones)], np.zeros(hosts))
    # begin + offset <= last begin
    of = np.flatnonzero(np.isfinite(ends.begin_us))
    begin = ends.begin_us[of]
    programme.at_most([*clock(1.0, begin, of), (last[meeting[of]], np.full(len(of), -1.0))], -begin)
    # last begin <= first end + offset + early
    of = np.flatnonzero(np.isfinite(ends.first_end_us))
    first_end = ends.first_end_us[of]
    ones = np.ones(len(of))
    programme.at_most([*clock(-1.0, first_end, of), (last[meeting[of]], ones), (early[of], -ones)], first_end)
    solution = programme.solve(cost, lower, upper)
    return _Solved(np.stack([solution[at_begin], solution[at_end]]), solution[distance], solution[early])


class _Programme:
    """Inequalities of a linear programme, collected as sparse rows."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[Ints] = []
        self._places: list[Ints] = []
        self._factors: list[Floats] = []
        self._limits: list[Floats] = []
        self._count = 0

    def at_most(self, parts: Sequence[tuple[Ints, Floats]], limit: Floats) -> None:
        """Adds one inequality for every entry of `limit`: the sum of factors times columns is at most the limit."""
        for places, factors in parts:
            self._rows.append(np.arange(self._count, self._count + len(limit)))
            self._places.append(places)
            self._factors.append(factors)
        self._limits.append(limit)
        self._count += len(limit)

    def solve(self, cost: Floats, lower: Floats, upper: Floats) -> Floats:
        """The columns at which the cost is least."""
        try:
            from scipy.optimize import linprog
            from scipy.sparse import csr_array
        except ImportError:
            raise InputError("daydream merge", "needs SciPy", "run pip install 'roller[plan]'") from None

        cells = np.concatenate(self._rows), np.concatenate(self._places)
        matrix = csr_array((np.concatenate(self._factors), cells), shape=(self._count, self._columns))
        done = linprog(
            cost, matrix, np.concatenate(self._limits), bounds=np.stack([lower, upper], axis=1), method="highs"
        )
        if done.x is None:  # every inequality has a column that can give way, so there is an answer
            raise RuntimeError(f"aligning clocks: {done.message}")
        return np.asarray(done.x, np.float64)


def _contradiction(ends: _Ends, solved: _Solved, clocks: Clocks, paths: Sequence[Path]) -> InputError:
    """An error that names a file of the host that is in most of the constraints that no clocks meet."""
    wrong = np.flatnonzero(solved.early_us > CONTRADICTION_US)
    amount = np.zeros(len(clocks.hosts))
    np.add.at(amount, ends.host[wrong], solved.early_us[wrong])
    begin = ends.begin_us + solved.offset_us[0][ends.host]
    order = np.lexsort((begin, ends.meeting))
    last = np.append(ends.meeting[order][1:] != ends.meeting[order][:-1], True)
    last_of = np.empty(int(ends.meeting.max()) + 1, np.int64)
    last_of[ends.meeting[order][last]] = order[last]
    np.add.at(amount, ends.host[last_of[ends.meeting[wrong]]], solved.early_us[wrong])
    # Of two hosts that contradict each other alike, the first one's clock is the one that counts.
    host = len(amount) - 1 - int(np.argmax(amount[::-1]))
    worst = solved.early_us.max() / 1e3
    path = paths[int(np.flatnonzero(clocks.host == host)[0])]
    return InputError(
        str(path),
        f"its clock contradicts the others': a collective ends {worst:.1f} ms before another rank begins it",
        "the clock was set during the recording, or the file is of another run; record again, or write --no-align",
    )
