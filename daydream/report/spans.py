"""CPU events as they nest: from tasks, which are cut where the next one starts, back to whole operators and calls."""

from __future__ import annotations

import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import Timeline
from daydream.trace.trace import NONE, Floats, Ints

#: Ending of the names of tasks that end a call that waits.
RETURN = " (return)"


def returns(graph: TaskGraph) -> Ints:
    """For each task the one that ends it where the call was cut in two for its waiting, -1 elsewhere."""
    call_of = np.full(len(graph), NONE)
    code_of = {name: index for index, name in enumerate(graph.names)}
    second = np.array([code_of.get(name + RETURN, NONE) for name in graph.names], np.int64)
    rows = np.flatnonzero((graph.event != NONE) & (graph.following != NONE) & graph.on_cpu)
    rows = rows[second[graph.name[rows]] != NONE]
    after = graph.following[rows]
    is_return = (graph.name[after] == second[graph.name[rows]]) & (graph.event[after] == NONE)
    call_of[rows[is_return]] = after[is_return]
    return call_of


def spans(timeline: Timeline) -> tuple[Floats, Floats, Ints]:
    """When each event of the trace begins and ends in the timeline, µs, and its last task; -1 for those without any.

    An event lasts from its first task to the end of its last one, those of the events inside it included, and as
    far into the time behind that as it did in the recording.
    """
    graph, trace = timeline.graph, timeline.graph.trace
    if trace is None:
        return np.empty(0), np.empty(0), np.empty(0, np.int64)
    rows = np.flatnonzero((graph.event != NONE) & graph.on_cpu)
    second = returns(graph)[rows]
    last_row = np.where(second == NONE, rows, second)
    begin, end = np.full(len(trace), np.inf), np.full(len(trace), -np.inf)
    last = np.full(len(trace), NONE)
    events = graph.event[rows]
    begin[events], end[events], last[events] = timeline.start_us[rows], timeline.end_us[last_row], last_row
    _widen(graph.enclosing, begin, end, last)
    # A return is recorded at its end, other tasks at their start.
    recorded_end = graph.recorded_us + np.where(graph.event == NONE, 0.0, graph.duration_us)
    tail = trace.start_us + trace.duration_us - recorded_end[last]
    # The thread may have less to do behind the task than it had: then the next task comes earlier.
    end += np.clip(np.nan_to_num(tail), 0.0, np.where(last != NONE, graph.gap_us[last], 0.0))
    return begin, end, last


def _widen(enclosing: Ints, begin: Floats, end: Floats, last: Ints) -> None:
    """Lets every event reach as far as those inside it. Parents stand before their children."""
    begins, ends, lasts = begin.tolist(), end.tolist(), last.tolist()
    for row in np.flatnonzero(enclosing != NONE)[::-1].tolist():
        above = enclosing[row]
        if lasts[row] == NONE:
            continue
        if ends[row] >= ends[above]:
            ends[above], lasts[above] = ends[row], lasts[row]
        begins[above] = min(begins[above], begins[row])
    begin[:], end[:], last[:] = begins, ends, lasts


def moved(timeline: Timeline, time_us: Floats, thread: Ints) -> Floats:
    """Times of the recording as times of the timeline, in their order.

    Args:
        timeline: of a recording.
        time_us: ascending.
        thread: index of each time's thread among the trace's, by whose tasks it moves; -1 is moved by all of them.
    """
    graph, trace = timeline.graph, timeline.graph.trace
    tasks = np.flatnonzero((graph.event != NONE) & graph.on_cpu & np.isfinite(graph.recorded_us))
    if trace is None or not len(tasks):
        return time_us
    lane = trace.thread[graph.event[tasks]]
    result = time_us.astype(np.float64)
    for each in np.unique(thread).tolist():
        tasks_of_thread = tasks[lane == each] if (lane == each).any() else tasks
        tasks_of_thread = tasks_of_thread[np.argsort(graph.recorded_us[tasks_of_thread], kind="stable")]
        recorded_us, shift_us = (
            graph.recorded_us[tasks_of_thread],
            timeline.start_us[tasks_of_thread] - graph.recorded_us[tasks_of_thread],
        )
        last = np.maximum(np.searchsorted(recorded_us, time_us, side="right") - 1, 0)
        result = np.where(thread == each, time_us + shift_us[last], result)
    # Threads that move apart do not change what was first.
    return np.maximum.accumulate(result)
