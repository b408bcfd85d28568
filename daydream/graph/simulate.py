"""Runtime simulation (thesis 4.4.1, algorithm 1) and the timeline it gives."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.trace.trace import NONE, Floats, Ints

#: Tasks from which compiling the simulation pays: below, loading the compiler takes longer than it saves.
COMPILED_FROM = 100_000

#: The CPU's steps may be longer than the time between completions by this share before the GPU drains a backlog.
BACKLOG = 0.02

#: Picks from the frontier: graph, ready tasks, earliest start of each (µs); returns a position in that list.
Schedule = Callable[[TaskGraph, list[int], list[float]], int]


class CycleError(ValueError):
    """The dependencies contradict each other, so some tasks can never start."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each task of `graph` starts and ends, microseconds.

    `cause` is the task whose end let a task start when it did: its last dependency, or the task before it on its
    thread; -1 where nothing held it back.
    """

    graph: TaskGraph
    start_us: Floats
    end_us: Floats
    cause: Ints

    @cached_property
    def makespan_us(self) -> float:
        """End of the last task, polling aside; 0 without tasks."""
        return float(self.end_us.max(initial=0.0, where=self.graph.working))

    @cached_property
    def step_us(self) -> Floats:
        """Simulated length of every step of `graph.steps`; the makespan where the graph marks none."""
        return step_lengths(self.graph, self.start_us)

    @cached_property
    def completed_us(self) -> Floats:
        """When every step had ended on its CPU thread and all its work on streams and channels; NaN without mark."""
        last = np.full(len(self.graph.steps), -np.inf)
        # Other CPU threads may only poll, by the clock and whatever becomes of the step.
        counted = (self.graph.step != NONE) & (~self.graph.on_cpu | (self.graph.mark == Mark.STEP_END))
        np.maximum.at(last, self.graph.step[counted], self.end_us[counted])
        return np.where(np.isfinite(last), last, np.nan)

    @cached_property
    def sustained_us(self) -> float:
        """Mean time between the ends of full steps in a long training; NaN with fewer than two, or where all work is
        the CPU's.

        A step is measured on the CPU, which may run ahead of the GPU by a full launch queue: a recording that begins
        with an empty queue then shows steps that are shorter than a long training's. Completions do not run ahead.
        Where they follow each other faster than the steps of the CPU, the GPU drains a backlog: then the CPU sets the
        pace, with what it takes by itself.
        """
        lengths = self.paced_us[np.isfinite(self.paced_us)]
        return float(lengths.mean()) if len(lengths) else np.nan

    @cached_property
    def paced_us(self) -> Floats:
        """Length of every step as in a long training, whatever the recording's backlog; NaN where `sustained_us` is.

        The first full step, before which nothing was completed, takes the mean of the others.
        """
        paced = np.full(len(self.graph.steps), np.nan)
        full = np.array([step.full for step in self.graph.steps], np.bool_)
        steps = np.flatnonzero(full & np.isfinite(self.completed_us))
        steps = steps[np.argsort(self.completed_us[steps], kind="stable")]
        if len(steps) < 2 or self.graph.on_cpu.all():
            return paced
        completions = np.diff(self.completed_us[steps])
        marked = self.step_us[steps]
        # Ranks that wait for each other have no pace of their own.
        if self.graph.ranks or not marked[1:].sum() > (1 + BACKLOG) * completions.sum():
            paced[steps] = np.append(completions.mean(), completions)
            return paced
        alone = self.graph.without_waiting()
        of_host = np.minimum(marked, step_lengths(alone, simulate(alone).start_us)[steps])
        lengths = np.append(max(of_host[0], completions.mean()), np.maximum(completions, of_host[1:]))
        # What drains unevenly is no slower for it.
        paced[steps] = lengths * max(completions.mean(), of_host.mean()) / max(lengths.mean(), 1e-9)
        return paced

    @cached_property
    def critical_path(self) -> Ints:
        """Tasks up to the one that ends last, polling aside, each starting when the one before it lets it."""
        if not self.graph.working.any():
            return np.empty(0, np.int64)
        return self.path_to(int(np.where(self.graph.working, self.end_us, -np.inf).argmax()))

    def path_to(self, row: int) -> Ints:
        """The tasks that decided when task `row` started, earliest first, `row` last."""
        cause = self.cause
        path = [row]
        while (row := int(cause[row])) != NONE:
            path.append(row)
        return np.array(path[::-1])


def step_lengths(graph: TaskGraph, start_us: Floats) -> Floats:
    """Time between the marks of every step, given a start for each task; NaN where a mark is missing."""
    if not (graph.mark != Mark.NONE).any():
        ends = start_us + graph.duration_us
        return np.full(len(graph.steps), ends.max(initial=0.0, where=graph.working) - start_us.min(initial=0.0))
    lengths = np.full(len(graph.steps), np.nan)
    marks = graph.step_marks
    begins, finishes = marks[graph.mark[marks] == Mark.STEP_BEGIN], marks[graph.mark[marks] == Mark.STEP_END]
    lengths[graph.step[finishes]] = start_us[finishes]
    lengths[graph.step[begins]] -= start_us[begins]
    return lengths


def simulate(graph: TaskGraph, schedule: Schedule | None = None, *, compiled: bool | None = None) -> Timeline:
    """Runs algorithm 1 over a graph.

    A task starts when its thread is free and all its dependencies are met; its thread is busy until its duration
    and gap are over. Unlike the printed algorithm, which lets every child wait for the gap too, only the thread
    does: a kernel does not wait for what the CPU does after launching it.

    Tasks of an ordered thread run in row order. Among the ready tasks of a channel the one that can start first
    goes first, of several the one with the highest priority, then the lowest row. `schedule` replaces that choice
    among all ready tasks (4.4.4); it is called once a task, so it is slow. `compiled` forces or forbids the
    machine code version, which otherwise serves graphs of 100,000 tasks and more; results are the same.

    Raises:
        CycleError: the dependencies contain a cycle; the message names a task in it.
    """
    if schedule is not None:
        return _simulate_with(graph, schedule)
    tasks, progress = _columns(graph)
    channel: Any = ~np.array([thread.ordered for thread in graph.threads], np.bool_)
    if compiled is None:
        compiled = len(graph) >= COMPILED_FROM
    if compiled:
        done = _compiled_run()(tasks, channel, progress)
    else:
        # Python counts and adds lists several times faster than single elements of arrays.
        tasks = _Tasks(*(column.tolist() for column in tasks))
        progress = _Progress(*(column.tolist() for column in progress))
        done = _run(tasks, channel.tolist(), progress)
    return _timeline(graph, np.asarray(progress.start, np.float64), np.asarray(progress.cause, np.int64), done)


def _timeline(graph: TaskGraph, start: Floats, cause: Ints, done: int) -> Timeline:
    if done < len(graph):
        raise CycleError(f"{len(graph) - done} tasks wait for each other in a circle{_culprit(graph)}")
    return Timeline(graph, start, start + graph.duration_us, cause)


def _culprit(graph: TaskGraph) -> str:
    """Names a task of a cycle: whoever still waits when every task that can run has been taken away."""
    source, target, _, _ = graph.dependencies()
    waits = np.bincount(target, minlength=len(graph))
    ready = list(np.flatnonzero(waits == 0))
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(source[order], np.arange(len(graph) + 1))
    while ready:
        row = ready.pop()
        for child in target[order[first[row] : first[row + 1]]]:
            waits[child] -= 1
            if not waits[child]:
                ready.append(child)
    stuck = np.flatnonzero(waits > 0)
    return f"; one of them is {graph.text(int(stuck[0]))!r}" if len(stuck) else ""


class _Tasks(NamedTuple):
    """What algorithm 1 reads of a graph: arrays for machine code, lists for Python. Times are microseconds.

    Attributes:
        following: next task on the same ordered thread, -1 without.
        first_edge: for each task where its edges begin, and at the end their number.
        target: task that each edge leads to; edges stand by source.
        lag: from the end of an edge's source to the earliest start of its target.
        duration: how long a task takes.
        gap: how long its thread stays busy after it.
        thread: thread of each task.
        priority: among ready tasks of a channel the highest goes first.
    """

    following: Any
    first_edge: Any
    target: Any
    lag: Any
    duration: Any
    gap: Any
    thread: Any
    priority: Any


class _Progress(NamedTuple):
    """How far algorithm 1 has come.

    Attributes:
        missing: for each task the dependencies that are not met.
        start: earliest start of each task by the dependencies met.
        cause: which of them decided it, -1 for none.
        free: when each thread's last task and the gap behind it are over.
        last: each thread's last task, -1 for none.
    """

    missing: Any
    start: Any
    cause: Any
    free: Any
    last: Any


def _columns(graph: TaskGraph) -> tuple[_Tasks, _Progress]:
    """A graph as algorithm 1 reads it, and its progress before the first task."""
    held_by, held = graph.queue
    source = np.concatenate([graph.edge_source, held_by])
    target = np.concatenate([graph.edge_target, held])
    lag = np.concatenate([graph.edge_lag_us, np.zeros(len(held))])
    order = np.argsort(source, kind="stable")
    first_edge = np.zeros(len(graph) + 1, np.int64)
    np.cumsum(np.bincount(source, minlength=len(graph)), out=first_edge[1:])
    missing = np.bincount(target, minlength=len(graph))
    missing[graph.following[graph.following != NONE]] += 1
    tasks = _Tasks(
        following=graph.following,
        first_edge=first_edge,
        target=target[order],
        lag=lag[order],
        duration=graph.duration_us,
        gap=graph.gap_us,
        thread=graph.thread,
        priority=graph.priority,
    )
    progress = _Progress(
        missing=missing,
        start=np.zeros(len(graph)),
        cause=np.full(len(graph), NONE),
        free=np.zeros(len(graph.threads)),
        last=np.full(len(graph.threads), NONE),
    )
    return tasks, progress


def _run(tasks: _Tasks, channel: Any, progress: _Progress) -> int:
    """Algorithm 1. Plain loops over lists or arrays, so that Numba compiles it as it stands.

    Tasks of ordered threads start at a time that does not depend on the order in which they are visited, so they
    are taken from a stack; those of channels by earliest start, once nothing else can run. `channel` says which
    threads are channels. Uses up `progress` and returns the number of tasks that ran.
    """
    # A named tuple's field takes longer than a local name, and this is the innermost loop.
    following, first_edge, target, lag, duration, gap, thread, _ = tasks
    missing, start, cause, free, last = progress
    stack, coming, present = _first_ready(tasks, channel, progress)
    done = 0
    while True:
        row = stack.pop() if len(stack) > 0 else _next_of_channels(tasks, progress, coming, present)
        if row < 0:
            return done
        done += 1
        lane = thread[row]
        if free[lane] > start[row]:
            start[row] = free[lane]
            cause[row] = last[lane]
        end = start[row] + duration[row]
        free[lane] = end + gap[row]
        last[lane] = row
        for edge in range(first_edge[row], first_edge[row + 1]):
            child = target[edge]
            arrival = end + lag[edge]
            # At equal times a dependency on another thread says more than none at all.
            if arrival > start[child] or cause[child] < 0:
                start[child] = max(arrival, start[child])
                cause[child] = row
            missing[child] -= 1
            if missing[child] == 0:
                if channel[thread[child]]:
                    heapq.heappush(coming[thread[child]], (start[child], child))
                else:
                    stack.append(child)
        after = following[row]
        if after >= 0:
            missing[after] -= 1
            if missing[after] == 0:
                stack.append(after)


def _first_ready(tasks: _Tasks, channel: Any, progress: _Progress) -> tuple[Any, Any, Any]:
    """The tasks without dependencies: those of ordered threads as a stack, those of channels as two heaps each.

    The first heap of a channel holds its tasks by the time at which they become ready, the second those that are
    ready by priority.
    """
    # An element put in and taken out tells the compiler what a list holds.
    stack = [0]
    stack.pop()
    coming = [[(0.0, 0)] for _ in channel]
    present = [[(0, 0)] for _ in channel]
    for lane in range(len(channel)):
        coming[lane].pop()
        present[lane].pop()
    for row in range(len(tasks.following)):
        if progress.missing[row] == 0:
            if channel[tasks.thread[row]]:
                heapq.heappush(coming[tasks.thread[row]], (0.0, row))
            else:
                stack.append(row)
    return stack, coming, present


def _next_of_channels(tasks: _Tasks, progress: _Progress, coming: Any, present: Any) -> int:
    """Takes the task that a channel can start first, -1 without; what is ready by then competes for it."""
    free = progress.free
    earliest, chosen = np.inf, -1
    for lane in range(len(coming)):
        if len(coming[lane]) > 0:
            _let_in(tasks, coming[lane], present[lane], free[lane])
        if len(present[lane]) > 0:
            time = free[lane]
        elif len(coming[lane]) > 0:
            time = coming[lane][0][0]
        else:
            continue
        if time < earliest:
            earliest, chosen = time, lane
    if chosen < 0:
        return -1
    _let_in(tasks, coming[chosen], present[chosen], earliest)
    _, row = heapq.heappop(present[chosen])
    return row


def _let_in(tasks: _Tasks, coming: Any, present: Any, time: float) -> None:
    """Moves a channel's tasks that are ready at this time from one heap to the other."""
    while len(coming) > 0 and coming[0][0] <= time:
        _, row = heapq.heappop(coming)
        heapq.heappush(present, (-tasks.priority[row], row))


@cache
def _compiled_run() -> Any:
    """:func:`_run` as machine code, kept on disk between processes."""
    import numba
    from numba.extending import register_jitable

    for part in (_let_in, _next_of_channels, _first_ready):
        register_jitable(part)
    return numba.njit(cache=True)(_run)


def _simulate_with(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """Algorithm 1 as printed, line by line, with somebody's `schedule` (line 9)."""
    tasks, (missing, start, cause, free, last) = _columns(graph)
    frontier = [int(row) for row in np.flatnonzero(missing == 0)]
    done = 0
    while frontier:
        earliest = [max(float(start[row]), float(free[graph.thread[row]])) for row in frontier]
        row = frontier.pop(schedule(graph, frontier, earliest))
        done += 1
        lane = graph.thread[row]
        if free[lane] > start[row]:
            start[row], cause[row] = free[lane], last[lane]
        end = start[row] + graph.duration_us[row]
        free[lane], last[lane] = end + graph.gap_us[row], row
        for edge in range(tasks.first_edge[row], tasks.first_edge[row + 1]):
            child, arrival = int(tasks.target[edge]), end + tasks.lag[edge]
            if arrival > start[child] or cause[child] == NONE:
                start[child], cause[child] = max(arrival, start[child]), row
            missing[child] -= 1
            if not missing[child]:
                frontier.append(child)
        after = int(tasks.following[row])
        if after != NONE:
            missing[after] -= 1
            if not missing[after]:
                frontier.append(after)
    return _timeline(graph, start, cause, done)
