"""Which CPU event stands inside which: the call structure of every thread."""

from __future__ import annotations

import numpy as np

from daydream.trace.trace import NONE, Category, Flags, Ints, Trace

#: Microseconds below which two times are one: no profiler's clock resolves less than a nanosecond, and an end, a start
#: and a duration added up, is some bits off the start that follows it.
_SAME_US = 4e-4

CPU_CATEGORIES = (Category.OPERATOR, Category.ANNOTATION, Category.PYTHON, Category.RUNTIME)


def enclosing_events(trace: Trace) -> Ints:
    """For each row the innermost CPU event around it on its thread, -1 for others and at the outermost level.

    Profilers round times, so an event may seem to outlast its parent; whatever starts before the parent ends is
    inside.
    """
    on_stream = np.array([thread.is_stream for thread in trace.threads], np.bool_)
    rows = np.flatnonzero(np.isin(trace.category, CPU_CATEGORIES) & ~on_stream[trace.thread])
    parent = np.full(len(trace), NONE)
    rows = rows[np.argsort(trace.thread[rows], kind="stable")]
    starts = trace.start_us[rows].tolist()
    ends = (trace.start_us[rows] + trace.duration_us[rows]).tolist()
    enclosing = []
    open_rows: list[int] = []
    open_ends: list[float] = []
    lane = NONE
    for row, thread, start, end in zip(rows.tolist(), trace.thread[rows].tolist(), starts, ends, strict=True):
        if thread != lane:
            open_rows, open_ends, lane = [], [], thread
        while open_ends and open_ends[-1] <= start + _SAME_US:
            open_ends.pop()
            open_rows.pop()
        enclosing.append(open_rows[-1] if open_rows else NONE)
        open_rows.append(row)
        open_ends.append(end)
    parent[rows] = enclosing
    return parent


def outermost(enclosing: Ints, inside: Flags) -> Ints:
    """For each row flagged in `inside` the outermost flagged row reached over flagged parents, itself at least.

    >>> outermost(np.array([-1, 0, 1, -1]), np.array([False, True, True, False])).tolist()
    [0, 1, 1, 3]
    """
    owner = np.arange(len(enclosing))
    # Parents start before their children and so stand before them.
    for row in np.flatnonzero(inside):
        above = enclosing[row]
        if above != NONE and inside[above]:
            owner[row] = owner[above]
    return owner


def innermost_of(enclosing: Ints, chosen: Flags) -> Ints:
    """For each row the innermost chosen row among itself and those around it, -1 without.

    >>> innermost_of(np.array([-1, 0, 1, -1]), np.array([True, False, False, False])).tolist()
    [0, 0, 0, -1]
    """
    nearest = np.where(chosen, np.arange(len(enclosing)), NONE)
    # One level of nesting at a time: as many rounds as events are deep.
    waiting = np.flatnonzero((nearest == NONE) & (enclosing != NONE))
    above = enclosing[waiting]
    while len(waiting):
        hit = chosen[above]
        nearest[waiting[hit]] = above[hit]
        above = enclosing[above]
        on = ~hit & (above != NONE)
        waiting, above = waiting[on], above[on]
    return nearest


def outermost_of(enclosing: Ints, chosen: Flags) -> Ints:
    """For each row the outermost chosen row among itself and those around it, -1 without.

    >>> outermost_of(np.array([-1, 0, 1, -1]), np.array([True, False, True, False])).tolist()
    [0, 0, 0, -1]
    """
    farthest = np.where(chosen, np.arange(len(enclosing)), NONE)
    above = enclosing.copy()
    while len(live := np.flatnonzero(above != NONE)):
        hit = live[chosen[above[live]]]
        farthest[hit] = above[hit]
        above[live] = enclosing[above[live]]
    return farthest
