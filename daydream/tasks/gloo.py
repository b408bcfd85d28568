"""Collectives of gloo: moved by threads of their own, begun by calls of c10d, waited for where the caller lies idle.

PyTorch's process group hands every collective to a worker thread, which the profiler shows as a range such as
``gloo:all_reduce``: views and copies, and between them one piece in which the data moves. Nothing records the call of
``wait``; the caller's thread shows a gap that ends shortly after the collective does.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, TaskGraph, TaskKind
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace

_RANGE = re.compile(r"^gloo:(?!:)")
_CALL = re.compile(r"^c10d::")

#: A shorter gap of a thread is not taken for waiting, microseconds.
_SHORTEST_WAIT_US = 100.0

#: By what share of a collective its worker may write down its end later than the caller goes on, on busy cores.
_LATE_END = 0.05

#: A worker that begins this soon after it ended had the collective in its queue, microseconds.
_QUEUED_US = 100.0


def gloo_threads(trace: Trace) -> Flags:
    """Which threads of the trace are workers of gloo."""
    threads = np.zeros(len(trace.threads), np.bool_)
    threads[trace.thread[_ranges(trace)]] = True
    return threads


def _ranges(trace: Trace) -> Ints:
    """Rows of the ranges of collectives, in order of start."""
    named = np.array([_RANGE.match(name) is not None for name in trace.names], np.bool_)
    return np.flatnonzero(named[trace.name] & (trace.category == Category.ANNOTATION))


class _Collective(NamedTuple):
    """A collective of gloo.

    Attributes:
        range: row of the trace.
        first: task that the worker begins it with.
        last: task that ends last within it.
        caller: task of the calling thread that ended last before it began; -1 where the call was not recorded.
        called: row of the call; -1 without.
        woken: task of the caller that began when it had ended, if the caller lay idle until then; -1 if not.
        done_us: when it had ended.
    """

    range: int
    first: int
    last: int
    caller: int
    called: int
    woken: int
    done_us: float


def link_gloo(graph: TaskGraph) -> TaskGraph:
    """A graph in which every collective of gloo is a task of kind communication, tied to its caller.

    The task stands on the worker's thread, in the piece of its range in which the data moves. The range begins when the
    call has been made, and what the caller lay idle for when it ended waits for it. Where the caller never lay idle for
    it, it came in time for a later wait, or else for the end of the step.
    """
    trace = graph.trace
    ranges = _ranges(trace) if trace is not None else np.empty(0, np.int64)
    if trace is None or not len(ranges):
        return graph
    edit = Edit(graph)
    threads = _Threads(graph)
    collectives = _collectives(trace, graph, ranges, threads)
    starts_alone = np.isin(graph.edge_target, [each.first for each in collectives if each.caller != NONE])
    edit.drop_edges(np.flatnonzero(starts_alone & (graph.edge_kind == Dependency.HANDOFF)))
    pieces = [_pieces(graph, each, threads) for each in collectives]
    moving = _moving(graph, collectives, pieces)
    ends = [_communicate(edit, *parts) for parts in zip(collectives, pieces, moving, strict=True)]
    for each, lag in zip(collectives, _call_lags(graph, collectives), strict=True):
        if each.caller != NONE:
            edit.depend(each.caller, each.first, Dependency.HANDOFF, lag)
    _wait(edit, graph, collectives, ends, threads)
    return edit.apply()


class _Threads:
    """Tasks of every thread in order, and when each began and ended in the recording."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.end_us = graph.recorded_us + graph.duration_us
        self._rows: dict[int, Ints] = {}

    def rows(self, thread: int) -> Ints:
        """The thread's tasks."""
        if thread not in self._rows:
            self._rows[thread] = np.flatnonzero(self.graph.thread == thread)
        return self._rows[thread]

    def within(self, thread: int, begin_us: float, end_us: float) -> Ints:
        """The thread's tasks that began in a stretch of time."""
        rows = self.rows(thread)
        first, last = np.searchsorted(self.graph.recorded_us[rows], (begin_us, end_us))
        return rows[first:last]

    def before(self, row: int) -> int:
        """The task before this one on its thread; -1 without."""
        rows = self.rows(int(self.graph.thread[row]))
        place = int(np.searchsorted(rows, row))
        return int(rows[place - 1]) if place else NONE

    def ended_by(self, thread: int, time_us: float) -> int:
        """The thread's last task that had ended by then; -1 without."""
        rows = self.rows(thread)
        # Tasks of a thread do not overlap.
        place = int(np.searchsorted(self.end_us[rows], time_us, side="right"))
        return int(rows[place - 1]) if place else NONE


def _collectives(trace: Trace, graph: TaskGraph, ranges: Ints, threads: _Threads) -> list[_Collective]:
    """The collectives in order of begin. Workers take calls first come, first served."""
    row_of = np.full(len(trace), NONE)
    made = np.flatnonzero((graph.event != NONE) & graph.on_cpu)
    row_of[graph.event[made]] = made
    calls = _calls(trace, graph)
    calls = calls[row_of[calls] != NONE]
    collectives = []
    for range_ in ranges.tolist():
        first = int(row_of[range_])
        if first == NONE:
            continue
        begin, done = float(trace.start_us[range_]), float(trace.start_us[range_] + trace.duration_us[range_])
        inside = threads.within(int(graph.thread[first]), begin, done)
        last = int(inside[-1]) if len(inside) else first
        caller, called, woken = NONE, NONE, NONE
        if len(calls) and trace.start_us[calls[0]] <= begin:
            called, calls = int(calls[0]), calls[1:]
            caller = threads.ended_by(int(graph.thread[row_of[called]]), begin)
            woken = _woken(threads, int(graph.thread[row_of[called]]), begin, done)
        if woken != NONE:
            done = min(done, float(graph.recorded_us[woken]))
        collectives.append(_Collective(range_, first, last, caller, called, woken, done))
    return collectives


def _calls(trace: Trace, graph: TaskGraph) -> Ints:
    """Rows of outermost calls of c10d, in order of start."""
    named = np.array([_CALL.match(name) is not None for name in trace.names], np.bool_)[trace.name]
    rows = np.flatnonzero(named & (trace.category == Category.OPERATOR))
    above = graph.enclosing[rows]
    return rows[(above == NONE) | ~named[above]]


class _Pieces(NamedTuple):
    """A range cut at its tasks: in turn how long each lasts and how long the gap behind it is, microseconds."""

    rows: Ints
    lengths_us: Floats


def _pieces(graph: TaskGraph, each: _Collective, threads: _Threads) -> _Pieces:
    trace = graph.trace
    assert trace is not None
    begin, end = trace.start_us[each.range], each.done_us
    rows = threads.within(int(graph.thread[each.first]), float(begin), float(end))
    rows = rows if len(rows) else np.array([each.first])
    gaps = np.maximum(np.append(graph.recorded_us[rows][1:], end) - threads.end_us[rows], 0.0)
    lasting = np.minimum(graph.duration_us[rows], np.maximum(end - graph.recorded_us[rows], 0.0))
    return _Pieces(rows, np.stack([lasting, gaps], axis=1).ravel())


def _moving(graph: TaskGraph, collectives: list[_Collective], pieces: list[_Pieces]) -> list[int]:
    """For every collective the piece in which its data moves.

    Ranges of the same name and number of tasks do the same; their piece is that which is longest as a rule. In a single
    range a copy may last longer, as when its thread has to leave its core.
    """
    trace = graph.trace
    assert trace is not None
    keys = [
        (trace.text(each.range), len(pieces_of_range.lengths_us))
        for each, pieces_of_range in zip(collectives, pieces, strict=True)
    ]
    alike: dict[tuple[str, int], list[Floats]] = {}
    for key, pieces_of_range in zip(keys, pieces, strict=True):
        alike.setdefault(key, []).append(pieces_of_range.lengths_us)
    places = {key: int(np.median(lengths, axis=0).argmax()) for key, lengths in alike.items()}
    return [places[key] for key in keys]


def _communicate(edit: Edit, each: _Collective, pieces: _Pieces, piece: int) -> int:
    """Makes a piece of a collective a task of its own; the task that ends the collective."""
    trace = edit.graph.trace
    assert trace is not None
    rows, (place, is_gap) = pieces.rows, divmod(piece, 2)
    edit.set("duration_us", rows, pieces.lengths_us[::2])
    # A worker without work is idle, and not busy with unrecorded work.
    edit.set("gap_us", rows, pieces.lengths_us[1::2])
    row = int(rows[place])
    if not is_gap:
        edit.set("kind", [row], TaskKind.COMMUNICATION)
        edit.set("operator", [row], each.range)
        return int(rows[-1])
    edit.set("gap_us", [row], 0.0)
    length = float(pieces.lengths_us[piece])
    made = edit.add(trace.text(each.range), TaskKind.COMMUNICATION, length, after=row, operator=each.range)
    return made if place == len(rows) - 1 else int(rows[-1])


def _call_lags(graph: TaskGraph, collectives: list[_Collective]) -> list[float]:
    """From the end of the caller's task to the worker's begin; the usual time where the worker was busy before."""
    begun = np.array([graph.recorded_us[each.first] for each in collectives])
    ended = np.array([each.done_us for each in collectives])
    lags = np.array(
        [begun[i] - graph.recorded_us[c.caller] - graph.duration_us[c.caller] for i, c in enumerate(collectives)]
    )
    has_caller = np.array([each.caller != NONE for each in collectives], np.bool_)
    thread = np.array([graph.thread[each.first] for each in collectives])
    queued = np.zeros(len(collectives), np.bool_)
    for number in np.unique(thread).tolist():
        of_thread = np.flatnonzero(thread == number)
        queued[of_thread[1:]] = begun[of_thread[1:]] - ended[of_thread[:-1]] < _QUEUED_US
    free = lags[has_caller & ~queued]
    usual = float(np.median(free)) if len(free) else 0.0
    return np.maximum(np.where(queued, np.minimum(lags, usual), lags), 0.0).tolist()


def _wait(edit: Edit, graph: TaskGraph, collectives: list[_Collective], ends: list[int], threads: _Threads) -> None:
    """Lets what the callers lay idle for wait for the collectives that ended then."""
    done = np.array([each.done_us for each in collectives])
    woken = [each.woken for each in collectives]
    last_of: dict[int, int] = {}
    for index, target in enumerate(woken):
        if target != NONE and (target not in last_of or done[index] > done[last_of[target]]):
            last_of[target] = index
    for index, target in enumerate(woken):
        each = collectives[index]
        if each.called == NONE:
            continue
        lag = 0.0
        if target == NONE:
            target = _in_time(graph, float(done[index]), collectives, woken, each, threads)
        elif last_of[target] == index:
            lag = float(graph.recorded_us[target] - _end(graph, ends[index], done[index], threads))
            edit.set("gap_us", [threads.before(target)], 0.0)
        if target != NONE:
            edit.depend(ends[index], target, Dependency.HANDOFF, max(lag, 0.0))


def _end(graph: TaskGraph, row: int, done_us: float, threads: _Threads) -> float:
    """When a task ended in the recording; the end of the collective for a task that was made for it."""
    return min(float(threads.end_us[row]), done_us) if row < len(graph) else done_us


def _woken(threads: _Threads, thread: int, begin_us: float, done_us: float) -> int:
    """The task of a calling thread that began when a collective had ended, if it lay idle until then; -1 if not.

    Most of the gap must lie before the end: in a gap for another reason, an end falls anywhere. The caller goes on a
    little before the end where the worker had to leave its core before it wrote that down; then it is the longest gap.
    """
    graph, tolerated_us = threads.graph, _LATE_END * (done_us - begin_us)
    before = threads.ended_by(thread, done_us)
    longest_us, woken = _SHORTEST_WAIT_US, NONE
    while before != NONE:
        after = int(graph.following[before])
        if after == NONE or graph.recorded_us[after] < max(done_us - tolerated_us, begin_us):
            break
        idle_us, late_us = done_us - threads.end_us[before], graph.recorded_us[after] - done_us
        if idle_us >= late_us and idle_us + late_us >= longest_us:
            longest_us, woken = idle_us + late_us, after
        before = threads.before(before)
    return woken


def _in_time(
    graph: TaskGraph,
    done_us: float,
    collectives: list[_Collective],
    woken: list[int],
    each: _Collective,
    threads: _Threads,
) -> int:
    """The first task behind a wait for a later collective of the same thread, else the mark of the step's end."""
    thread = int(graph.thread[each.caller]) if each.caller != NONE else NONE
    later = [
        target
        for other, target in zip(collectives, woken, strict=True)
        if target != NONE and graph.thread[target] == thread and graph.recorded_us[target] >= done_us
        and other.range > each.range
    ]  # fmt: skip
    marks = [row for row in threads.rows(thread).tolist() if graph.mark[row] == Mark.STEP_END] if thread != NONE else []
    later += [row for row in marks if graph.recorded_us[row] >= done_us]
    return min(later, key=lambda row: float(graph.recorded_us[row])) if later else NONE
