"""The arrows of a Kineto file: from a forward operator to its backward one, and from a launch to its kernel."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from daydream.trace.text import Key, Notes
from daydream.trace.trace import NONE, Category, Floats, Ints


@dataclass(frozen=True)
class Ends:
    """One end of each arrow per entry: where and when it touches an event, in the order of the file."""

    is_start: Sequence[bool]
    id: Sequence[Key | None]
    process: Sequence[int]
    line: Sequence[int]
    """Index of its pid and tid, as in :class:`daydream.trace.events.Places`; NONE where no task is."""
    time_us: Sequence[float]
    """From the same origin as the tasks; NaN where the file has none."""

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Start and finish of each arrow: a finish belongs to the latest start of its id before it."""
        starts: dict[tuple[int, Key], list[tuple[float, int]]] = {}
        for index, id in enumerate(self.id):
            if self.is_start[index] and id is not None and not math.isnan(self.time_us[index]):
                starts.setdefault((self.process[index], id), []).append((self.time_us[index], index))
        for ends in starts.values():
            ends.sort()
        for index, id in enumerate(self.id):
            if self.is_start[index] or id is None or math.isnan(self.time_us[index]):
                continue
            ends = starts.get((self.process[index], id), [])
            before = bisect_right(ends, (self.time_us[index], len(self.id)))
            if before:
                yield ends[before - 1][1], index


class _Operators:
    """The operators of one thread, to be found by time."""

    def __init__(self, rows: Ints, start_us: Floats, end_us: Floats, sequence: Ints) -> None:
        self.rows = rows.tolist()
        self.starts = start_us[rows].tolist()
        self.ends = end_us[rows].tolist()
        self.sequence = sequence[rows].tolist()
        self._parents: list[int] | None = None

    def at(self, time: float) -> int:
        """The row of the operator that an arrow touches at `time`, or NONE.

        Arrows are drawn at the start of their operator. Nested operators may start together: it is the innermost
        that autograd numbered. Elsewhere it is the innermost operator that runs at `time`.
        """
        first, behind = bisect_left(self.starts, time), bisect_right(self.starts, time)
        for index in range(behind - 1, first - 1, -1):
            if self.sequence[index] != NONE:
                return self.rows[index]
        index = behind - 1
        if first == behind:
            while index != NONE and self.ends[index] < time:
                index = self.parents[index]
        return self.rows[index] if index != NONE else NONE

    @property
    def parents(self) -> list[int]:
        """The index of the operator around each one, or NONE."""
        if self._parents is None:
            stack: list[int] = []
            self._parents = []
            for index, start in enumerate(self.starts):
                while stack and self.ends[stack[-1]] <= start:
                    stack.pop()
                self._parents.append(stack[-1] if stack else NONE)
                stack.append(index)
        return self._parents


def operator_arrows(
    ends: Ends, category: Ints, line: Ints, start_us: Floats, end_us: Floats, sequence: Ints, notes: Notes
) -> Ints:
    """Rows of the forward and the backward operator of every arrow, shape [arrows, 2]."""
    tables: dict[int, _Operators] = {}

    def at(end: int) -> int:
        place = ends.line[end]
        if place not in tables:
            rows = np.flatnonzero((category == Category.OPERATOR) & (line == place))
            tables[place] = _Operators(rows, start_us, end_us, sequence)
        return tables[place].at(ends.time_us[end])

    pairs = list(ends.pairs())
    row_pairs = [(at(start), at(finish)) for start, finish in pairs]
    arrows = [arrow for arrow in row_pairs if NONE not in arrow]
    lost = len(ends.id) - 2 * len(arrows)
    notes.add("{} of forward-backward arrows that join no two operators, left out", max(lost, 0))
    return np.array(arrows, np.int64).reshape(-1, 2)


def launch_correlations(ends: Ends, correlation: Ints, tasks: Ints, line: Ints, start_us: Floats) -> None:
    """Fill in, from launch arrows, the correlation of those rows among `tasks` that have none."""
    missing: dict[tuple[int, float], list[int]] = {}
    for row in tasks[correlation[tasks] == NONE].tolist():
        missing.setdefault((int(line[row]), float(start_us[row])), []).append(row)
    for id, place, time in zip(ends.id, ends.line, ends.time_us, strict=True):
        rows = missing.get((place, time))
        if rows and type(id) is int and 0 < id < 2**63:
            correlation[rows.pop(0)] = id
