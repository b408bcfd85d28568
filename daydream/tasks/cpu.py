"""CPU tasks of a trace: what each thread does from one event to the next (thesis 4.4.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from daydream.graph.graph import Mark, TaskKind
from daydream.tasks.steps import Steps
from daydream.trace.nesting import innermost_of, outermost
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace

_DATA_LOADING = re.compile(r"enumerate\(DataLoader\)")


@dataclass(frozen=True, kw_only=True)
class CpuTasks:
    """CPU tasks thread by thread in the order in which they ran, one array entry each. Times are microseconds.

    Attributes:
        event: row of the trace, -1 for marks.
        thread: index of the trace's thread.
        start_us: start in the trace.
        duration_us: how long it occupies its thread.
        gap_us: how long its thread then stays busy with what no event records.
        kind: a :class:`daydream.graph.graph.TaskKind`.
        mark: a :class:`daydream.graph.graph.Mark`.
        mark_step: index of the step that a mark begins or ends, -1 without.
        task_of: for each trace row the position of its task, -1 without; CUDA calls inside another are that one's.
    """

    event: Ints
    thread: Ints
    start_us: Floats
    duration_us: Floats
    gap_us: Floats
    kind: Ints
    mark: Ints
    mark_step: Ints
    task_of: Ints

    def following(self) -> Ints:
        """Position of the next task on the same thread, -1 without. Tasks stand thread by thread."""
        after = np.arange(1, len(self.thread) + 1)
        last = np.append(self.thread[1:] != self.thread[:-1], True) if len(after) else np.empty(0, np.bool_)
        after[last] = NONE
        return after


def cpu_tasks(trace: Trace, enclosing: Ints, marked: Steps) -> CpuTasks:
    """Cuts every CPU thread into tasks: an operator, annotation or CUDA call from its start to the next one's.

    What an event does itself before its first child starts is its task's duration; from its end (or a child's) to
    the next event's start is the gap. So no time is lost or counted twice, and nesting needs no further care.
    Python frames make no tasks; a CUDA call inside another (runtime into driver) belongs to the outer one.
    """
    on_stream = np.array([thread.is_stream for thread in trace.threads], np.bool_)
    runtime = trace.category == Category.RUNTIME
    owner = outermost(enclosing, runtime)
    wanted = (owner == np.arange(len(trace))) & ~on_stream[trace.thread]
    wanted &= np.isin(trace.category, (Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME))
    rows = np.flatnonzero(wanted)
    steps, begin, finish = len(marked.begin_us), marked.begin_us, marked.end_us
    event = np.concatenate([rows, np.full(2 * steps, NONE)])
    thread = np.concatenate([trace.thread[rows], np.tile(marked.thread, 2)])
    start = np.concatenate([trace.start_us[rows], begin, finish])
    length = np.concatenate([trace.duration_us[rows], np.zeros(2 * steps)])
    mark = np.repeat([Mark.NONE, Mark.STEP_BEGIN, Mark.STEP_END], [len(rows), steps, steps])
    mark_step = np.concatenate([np.full(len(rows), NONE), np.arange(steps), np.arange(steps)])
    # A step ends before the next one begins, and begins before the first event inside it.
    rank = np.select([mark == Mark.STEP_END, mark == Mark.STEP_BEGIN], [0, 1], 2)
    order = np.lexsort((np.where(event == NONE, 0, event), rank, start, thread))
    event, thread, start, length, mark = event[order], thread[order], start[order], length[order], mark[order]
    task_of = np.full(len(trace), NONE)
    task_of[event[event != NONE]] = np.flatnonzero(event != NONE)
    task_of[runtime] = task_of[owner[runtime]]
    uncut = CpuTasks(
        event=event,
        thread=thread,
        start_us=start,
        duration_us=length,
        gap_us=np.zeros(len(order)),
        kind=_kinds(trace, enclosing, event),
        mark=mark,
        mark_step=mark_step[order],
        task_of=task_of,
    )
    return _cut(uncut)


def _cut(tasks: CpuTasks) -> CpuTasks:
    """Each task cut where the next of its thread starts, with the gap up to there."""
    after = tasks.following()
    has_next = after != NONE
    until = np.where(has_next, tasks.start_us[after], np.inf)
    end = np.minimum(tasks.start_us + tasks.duration_us, until)
    return replace(tasks, duration_us=end - tasks.start_us, gap_us=np.where(has_next, until - end, 0.0))


def _kinds(trace: Trace, enclosing: Ints, event: Ints) -> Ints:
    loading = np.array([_DATA_LOADING.search(name) is not None for name in trace.names], np.bool_)[trace.name]
    inside = innermost_of(enclosing, loading & np.isin(trace.category, (Category.OPERATOR, Category.ANNOTATION)))
    return np.where((event != NONE) & (inside[event] != NONE), TaskKind.DATA_LOADING, TaskKind.CPU)


@dataclass(frozen=True)
class Handoff:
    """CPU threads that hand over to each other: edges between task positions, with lags in microseconds."""

    source: Ints
    target: Ints
    lag_us: Floats


def hand_over(
    tasks: CpuTasks, worker: Flags, *, shortest_us: float = 200.0, share: float = 0.6
) -> tuple[CpuTasks, Handoff]:
    """Finds threads that sleep while another works for them, and turns the sleep into dependencies.

    When `backward()` runs on autograd's thread, the main thread's gap and the worker's tasks cover the same time:
    the gap is waiting, not work (4.4.2 knows CPU threads only as sequences). A gap of at least `shortest_us` in
    which another thread starts a burst that fills at least `share` of it becomes two edges, into the burst and out
    of the last task that ended before the sleeper woke; the gap itself, and the worker's own sleep before the
    burst, are taken off. `worker` says for each thread whether it takes part (it has operators): one that only
    polls sleeps by the clock.
    """
    end = tasks.start_us + tasks.duration_us
    bounds = np.flatnonzero(np.diff(tasks.thread, prepend=-1, append=-1))
    threads = [(first, last) for first, last in pairwise(bounds.tolist()) if worker[tasks.thread[first]]]
    source: list[int] = []
    target: list[int] = []
    lag: list[float] = []
    for sleeper in np.flatnonzero((tasks.gap_us >= shortest_us) & worker[tasks.thread]).tolist():
        asleep, awake = end[sleeper], end[sleeper] + tasks.gap_us[sleeper]
        for first, last in threads:
            if first <= sleeper < last:
                continue
            burst = _burst(tasks, end, range(first, last), asleep, awake)
            if burst is None or end[burst[-1]] - tasks.start_us[burst[0]] < share * tasks.gap_us[sleeper]:
                continue
            source += [sleeper, burst[-1]]
            target += [burst[0], sleeper + 1]
            lag += [tasks.start_us[burst[0]] - asleep, awake - end[burst[-1]]]
    gap = tasks.gap_us.copy()
    gap[source[::2]] = 0.0
    burst_begin = np.array(target[::2], np.int64)
    before = burst_begin[burst_begin > 0] - 1
    same_thread = tasks.thread[before] == tasks.thread[before + 1]
    gap[before[same_thread]] = 0.0
    handoff = Handoff(np.array(source, np.int64), np.array(target, np.int64), np.array(lag))
    return replace(tasks, gap_us=gap), handoff


def _burst(tasks: CpuTasks, end: Floats, thread: range, asleep: float, awake: float) -> range | None:
    """Positions of a thread's tasks that began and ended between these times; None if it was busy at their begin.

    A thread that is already busy works on its own account.
    """
    low = thread.start + int(np.searchsorted(tasks.start_us[thread.start : thread.stop], asleep))
    # Ends of a thread's tasks are in order, as they don't overlap.
    high = thread.start + int(np.searchsorted(end[thread.start : thread.stop], awake, side="right")) - 1
    busy = low > thread.start and end[low - 1] > asleep
    return range(low, high + 1) if low <= high and not busy else None
