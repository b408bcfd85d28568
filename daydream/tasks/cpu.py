"""CPU tasks of a trace: what each thread does from one event to the next (thesis 4.4.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from daydream.graph.graph import Mark, Step, TaskKind
from daydream.trace.nesting import innermost_of, outermost
from daydream.trace.trace import NONE, Category, Flags, Floats, Ints, Trace

_STEP = re.compile(r"^ProfilerStep#\d+$")
_DATA_LOADING = re.compile(r"enumerate\(DataLoader\)")

#: A step with fewer than this share of the usual number of launches was only partly recorded.
CUT_STEP = 0.9


@dataclass(kw_only=True)
class CpuTasks:
    """CPU tasks in thread order, one array entry each. `event` is the trace row (-1 for marks)."""

    event: Ints
    thread: Ints
    start_us: Floats
    duration_us: Floats
    gap_us: Floats
    kind: Ints
    mark: Ints
    mark_step: Ints
    task_of: Ints
    """For each trace row the position of its task, -1 without; CUDA calls inside another are that one's."""

    def following(self) -> Ints:
        """Position of the next task on the same thread, -1 without. Tasks stand thread by thread."""
        after = np.arange(1, len(self.thread) + 1)
        last = np.append(self.thread[1:] != self.thread[:-1], True) if len(after) else np.empty(0, np.bool_)
        after[last] = NONE
        return after


def find_steps(trace: Trace) -> tuple[tuple[Step, ...], Ints]:
    """The steps of a trace and their marks' rows, on the thread that has most of them.

    A trace without marks is one step from its first event to its last; its rows are empty. A first or last step
    with clearly fewer launches than its fellows is not full: the recording of the GPU began or ended inside.
    """
    wanted = np.array([_STEP.match(name) is not None for name in trace.names], np.bool_)
    rows = np.flatnonzero(wanted[trace.name] & (trace.category == Category.ANNOTATION))
    if not len(rows):
        length = float((trace.start_us + trace.duration_us).max(initial=0.0) - trace.start_us.min(initial=0.0))
        return (Step("trace", length),), rows
    rows = rows[trace.thread[rows] == np.bincount(trace.thread[rows]).argmax()]
    gpu = np.isin(trace.category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET))
    launching = (trace.category == Category.RUNTIME) & np.isin(trace.correlation, trace.correlation[gpu])
    calls = np.sort(trace.start_us[launching])
    begin, end = trace.start_us[rows], trace.start_us[rows] + trace.duration_us[rows]
    count = np.searchsorted(calls, end) - np.searchsorted(calls, begin)
    usual = float(np.median(count))
    steps = []
    for place, row in enumerate(rows):
        outer = place in (0, len(rows) - 1)
        full = not (outer and len(rows) > 1 and count[place] < CUT_STEP * usual)
        steps.append(Step(trace.text(row), float(trace.duration_us[row]), full))
    return tuple(steps), rows


def cpu_tasks(trace: Trace, enclosing: Ints, step_rows: Ints) -> CpuTasks:
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
    steps = len(step_rows)
    begin = trace.start_us[step_rows]
    finish = begin + trace.duration_us[step_rows]
    event = np.concatenate([rows, np.full(2 * steps, NONE)])
    thread = np.concatenate([trace.thread[rows], np.tile(trace.thread[step_rows], 2)])
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
    kind = _kinds(trace, enclosing, event)
    gap = np.zeros(len(order))
    tasks = CpuTasks(
        event=event,
        thread=thread,
        start_us=start,
        duration_us=length,
        gap_us=gap,
        kind=kind,
        mark=mark,
        mark_step=mark_step[order],
        task_of=task_of,
    )
    _cut(tasks)
    return tasks


def _cut(tasks: CpuTasks) -> None:
    """Cuts each task where the next of its thread starts, and gives it the gap up to there."""
    after = tasks.following()
    has_next = after != NONE
    until = np.where(has_next, tasks.start_us[after], np.inf)
    end = np.minimum(tasks.start_us + tasks.duration_us, until)
    tasks.duration_us = end - tasks.start_us
    tasks.gap_us = np.where(has_next, until - end, 0.0)


def _kinds(trace: Trace, enclosing: Ints, event: Ints) -> Ints:
    loading = np.array([_DATA_LOADING.search(name) is not None for name in trace.names], np.bool_)[trace.name]
    inside = innermost_of(enclosing, loading & np.isin(trace.category, (Category.OPERATOR, Category.ANNOTATION)))
    return np.where((event != NONE) & (inside[event] != NONE), TaskKind.DATA_LOADING, TaskKind.CPU)


@dataclass
class Handoff:
    """CPU threads that hand over to each other: edges between task positions, with lags in microseconds."""

    source: Ints
    target: Ints
    lag_us: Floats


def hand_over(tasks: CpuTasks, worker: Flags, *, shortest_us: float = 200.0, share: float = 0.6) -> Handoff:
    """Finds threads that sleep while another works for them, and turns the sleep into dependencies.

    When `backward()` runs on autograd's thread, the main thread's gap and the worker's tasks cover the same time:
    the gap is waiting, not work (4.4.2 knows CPU threads only as sequences). A gap of at least `shortest_us` in
    which another thread starts a burst that fills at least `share` of it becomes two edges, into the burst and out
    of the last task that ended before the sleeper woke; the gap itself, and the worker's own sleep before the
    burst, are taken off. `worker` says for each thread whether it takes part (it has operators): one that only
    polls sleeps by the clock.
    """
    source: list[int] = []
    target: list[int] = []
    lag: list[float] = []
    end = tasks.start_us + tasks.duration_us
    bounds = np.flatnonzero(np.diff(tasks.thread, prepend=-1, append=-1))
    threads = [(int(a), int(b)) for a, b in pairwise(bounds)]
    asleep = np.flatnonzero((tasks.gap_us >= shortest_us) & worker[tasks.thread])
    for position in asleep:
        begin, finish = end[position], end[position] + tasks.gap_us[position]
        for first, last in threads:
            if first <= position < last or not worker[tasks.thread[first]]:
                continue
            low = first + int(np.searchsorted(tasks.start_us[first:last], begin))
            # Ends of a thread's tasks are in order, as they don't overlap.
            high = first + int(np.searchsorted(end[first:last], finish, side="right")) - 1
            # The burst must begin inside: a thread that is already busy works on its own account.
            if low > high or (low > first and end[low - 1] > begin):
                continue
            if end[high] - tasks.start_us[low] < share * tasks.gap_us[position]:
                continue
            source += [int(position), high]
            target += [low, int(position) + 1]
            lag += [tasks.start_us[low] - begin, finish - end[high]]
    tasks.gap_us[source[::2]] = 0.0
    first_of_burst = np.array(target[::2], np.int64)
    before = first_of_burst[first_of_burst > 0] - 1
    same = tasks.thread[before] == tasks.thread[before + 1]
    tasks.gap_us[before[same]] = 0.0
    return Handoff(np.array(source, np.int64), np.array(target, np.int64), np.array(lag))
