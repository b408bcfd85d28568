"""The coarsened view of a step (dPRO, section 5.3): all computation between gradients collapsed, and replays of it.

A task starts at a maximum of times plus constants, and so a gradient is ready: at the maximum of when it would be
without any exchange, and of when each call of an all-reduce returned plus the longest path from there. These paths are
found once, by a walk over the graph. A list of buckets is then replayed from them alone, to the step time that a
simulation of the whole graph gives, and bucket by bucket, so that what two lists share in front is replayed once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.graph.simulate import Timeline, simulate
from daydream.optimize.exchange import Ends, Exchange
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError


@dataclass(frozen=True, eq=False)
class Progress:
    """Progress of lists of buckets that all end with the same gradient: a row of every array for each list.

    Attributes:
        end: when the channel is free.
        issued: for every gradient when the call behind its hook can begin.
        ready: for every gradient when it is complete and its hook has run.
        done: when the step's computation is done, as far as calls delay it.
    """

    end: Floats
    issued: Floats
    ready: Floats
    done: Floats

    def only(self, rows: Ints) -> Progress:
        """Some of the lists."""
        return Progress(self.end[rows], self.issued[rows], self.ready[rows], self.done[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class CoarseStep:
    """One step in terms of its gradients; all times are microseconds.

    Attributes:
        begin: when the step begins.
        call_us: what the call behind each gradient's hook takes, 0 where there is no hook.
        issued: for every gradient when its call can begin, without any exchange; -inf where it takes no time.
        ready: for every gradient when it is complete and its hook has run, without any exchange.
        done: when the step's computation is done, without any exchange.
        issued_after: at [i, j] the longest path from the return of call i to where call j can begin; -inf without.
        ready_after: the same to where gradient j is ready.
        done_after: the same to the end of the step.
        tail: the longest path from the end of the last all-reduce to the end of the step.
        producer: for every gradient the task that completes it, -1 without.
        hook: for every gradient the CPU task that hands it over, -1 without.
        took_us: of a bucket from gradient i to gradient j at [i, j].
    """

    begin: float
    call_us: Floats
    issued: Floats
    ready: Floats
    done: float
    issued_after: Floats
    ready_after: Floats
    done_after: Floats
    tail: float
    producer: Ints
    hook: Ints
    took_us: Floats

    def __len__(self) -> int:
        return len(self.ready)

    @cached_property
    def unhindered(self) -> Floats:
        """For every gradient the latest time at which its call can begin without any effect on the step.

        A call that returns by then returns before the gradient is ready, and delays neither later gradients, nor later
        calls beyond their own such time, nor the end.
        """
        latest = np.minimum(self.ready, self.done - self.done_after) - self.call_us
        latest = np.minimum(latest, np.min(self.ready[None, :] - self.ready_after, axis=1) - self.call_us)
        for place in range(len(self) - 2, -1, -1):
            later = latest[place + 1 :] - self.issued_after[place, place + 1 :]
            latest[place] = min(latest[place], later.min() - self.call_us[place])
        return latest

    def start(self) -> Progress:
        """No bucket yet. What happens before it could matter counts as happening when it begins to matter."""
        issued = np.maximum(self.issued, self.unhindered)
        return Progress(
            end=np.array([0.0]), issued=issued[None, :], ready=self.ready[None, :], done=np.array([self.done])
        )

    def extended(self, progress: Progress, first: int, last: int) -> Progress:
        """The same lists with a bucket more, from gradient `first` to gradient `last`."""
        returned = progress.issued[:, last] + self.call_us[last]
        start = np.maximum(np.maximum(progress.end, returned), progress.ready[:, first : last + 1].max(axis=1))
        return self.behind_call(progress, last, returned, start + self.took_us[first, last])

    def behind_call(self, progress: Progress, last: int, returned: Floats, end: Floats) -> Progress:
        """The same lists after a call behind gradient `last` that returned, and its all-reduce that ended, then."""
        if not self.call_us[last]:
            return Progress(end, progress.issued, progress.ready, progress.done)
        return Progress(
            end,
            np.maximum(progress.issued, returned[:, None] + self.issued_after[last]),
            np.maximum(progress.ready, returned[:, None] + self.ready_after[last]),
            np.maximum(progress.done, returned + self.done_after[last]),
        )

    def length_us(self, progress: Progress) -> Floats:
        """The step's length for lists that hold all gradients."""
        return np.maximum(np.maximum(progress.done, progress.end + self.tail), progress.end) - self.begin

    def replay(self, ends: Ends) -> float:
        """The step's length with these buckets."""
        progress, first = self.start(), 0
        for last in ends:
            progress, first = self.extended(progress, first, last), last + 1
        return float(self.length_us(progress)[0])


def step_us(timeline: Timeline, step: int) -> float:
    """From a step's beginning until all its work is done: on streams and channels, on the host as its mark says."""
    graph = timeline.graph
    counted = _counted(graph, step)
    return float(timeline.end_us[counted].max()) - _begin(timeline, step)


def coarsened(exchange: Exchange) -> CoarseStep:
    """The coarsened view of the step that answers are about.

    Raises:
        InputError: calls delay gradients that were handed over before them, or the exchange delays the backward pass:
            then buckets do not follow each other in the order of gradients.
    """
    graph, gradients = exchange.graph, exchange.of_step
    timeline = simulate(graph)
    hook = np.array([gradient.hook for gradient in gradients], np.int64)
    producer = np.array([gradient.ready for gradient in gradients], np.int64)
    call_us = np.where(hook != NONE, exchange.call_us, 0.0)
    waiting = exchange.waiting(gradients)
    counted = np.flatnonzero(_counted(graph, exchange.step))
    paths = _Paths(graph, hook, waiting, np.concatenate([counted, producer[producer != NONE], hook[hook != NONE]]))
    end = np.append(timeline.end_us, -np.inf)
    free = np.append(timeline.end_us + graph.gap_us, -np.inf)
    pairs = zip(producer.tolist(), hook.tolist(), strict=True)
    after_end = np.stack([np.maximum(paths.to_end(task), paths.to_end(caller)) for task, caller in pairs])
    after_free = np.stack([paths.to_free(int(row)) for row in hook])
    done_after = np.max([paths.to_end(int(row)) for row in counted], axis=0)
    count = len(gradients)
    places = np.arange(count)
    # A call behind a hook is behind those that an earlier gradient's bucket has there.
    same = (hook[:, None] == hook[None, :]) & (hook[None, :] != NONE) & (places[:, None] < places[None, :])
    issued_after = np.where(same, np.maximum(after_free[:, :count].T, 0.0), after_free[:, :count].T)
    issued_after[:, call_us == 0] = -np.inf
    ready_after = after_end[:, :count].T
    backwards = places[:, None] >= places[None, :]
    if (
        exchange.call_us
        and (np.isfinite(issued_after) & backwards).any() | (np.isfinite(ready_after) & backwards).any()
    ):
        raise InputError("gradients", "are not handed over in one order", "set --call-us 0")
    if np.isfinite(after_end[:, count]).any():
        raise InputError("gradients", "wait for what waits for their exchange", "record one backward pass a step")
    return CoarseStep(
        begin=_begin(timeline, exchange.step),
        call_us=call_us,
        issued=np.where(call_us > 0, free[hook], -np.inf),
        ready=np.maximum(end[producer], end[hook]),
        done=float(timeline.end_us[counted].max()),
        issued_after=issued_after,
        ready_after=ready_after,
        done_after=done_after[:count],
        tail=float(done_after[count]),
        producer=producer,
        hook=hook,
        took_us=exchange.took_us(),
    )


def _counted(graph: TaskGraph, step: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The tasks with whose end a step is done: what :attr:`Timeline.completed_us` counts; all where that is nothing."""
    counted = (graph.step == step) & (~graph.on_cpu | (graph.mark == Mark.STEP_END))
    has_end = (counted & (graph.mark == Mark.STEP_END)).any() or graph.on_gpu.any()
    return counted if has_end else (graph.step == step) & graph.working


def _begin(timeline: Timeline, step: int) -> float:
    graph = timeline.graph
    marks = np.flatnonzero((graph.mark == Mark.STEP_BEGIN) & (graph.step == step))
    return float(timeline.start_us[marks].min() if len(marks) else timeline.start_us[graph.step == step].min())


class _Paths:
    """Longest paths through a graph from every gradient's call and, in the last column, from the exchange's end.

    Args:
        graph: the training without exchange.
        hooks: for every gradient the task behind which its call would stand, -1 without.
        waiting: the tasks that wait for the exchange.
        wanted: the tasks to which paths are asked for.
    """

    def __init__(self, graph: TaskGraph, hooks: Ints, waiting: list[int], wanted: Ints) -> None:
        self._graph = graph
        self._columns = len(hooks) + 1
        seeds: dict[int, list[int]] = defaultdict(list)
        for column, hook in enumerate(hooks.tolist()):
            if hook != NONE and graph.following[hook] != NONE:
                seeds[int(graph.following[hook])].append(column)
        for row in waiting:
            seeds[row].append(len(hooks))
        self._start: dict[int, Floats] = {}
        into = _incoming(graph)
        duration, gap = graph.duration_us.tolist(), graph.gap_us.tolist()
        for row in _order(graph, into, set(seeds), wanted):
            longest = np.full(self._columns, -np.inf)
            longest[seeds.get(row, [])] = 0.0
            for source, lag, holds_thread in into.get(row, ()):
                if (before := self._start.get(source)) is not None:
                    np.maximum(
                        longest, before + (duration[source] + (gap[source] if holds_thread else lag)), out=longest
                    )
            self._start[row] = longest

    def to_end(self, row: int) -> Floats:
        """To the end of a task; -inf where no path leads there, and for no task (-1)."""
        return self._from_start(row) + (self._graph.duration_us[row] if row != NONE else 0.0)

    def to_free(self, row: int) -> Floats:
        """To where the thread of a task is free again."""
        return self.to_end(row) + (self._graph.gap_us[row] if row != NONE else 0.0)

    def _from_start(self, row: int) -> Floats:
        return self._start.get(row, np.full(self._columns, -np.inf))


def _incoming(graph: TaskGraph) -> dict[int, list[tuple[int, float, bool]]]:
    """For every task what it waits for: task, lag, and whether that is the one before it on its thread."""
    into: dict[int, list[tuple[int, float, bool]]] = defaultdict(list)
    for source, target, lag in zip(
        graph.edge_source.tolist(), graph.edge_target.tolist(), graph.edge_lag_us.tolist(), strict=True
    ):
        into[target].append((source, lag, False))
    releasing, delayed = graph.queue
    for source, target in zip(releasing.tolist(), delayed.tolist(), strict=True):
        into[target].append((source, 0.0, False))
    for source, target in enumerate(graph.following.tolist()):
        if target != NONE:
            into[target].append((source, 0.0, True))
    return into


def _order(
    graph: TaskGraph, into: dict[int, list[tuple[int, float, bool]]], seeds: set[int], wanted: Ints
) -> list[int]:
    """The tasks between the seeds and the wanted ones, each behind all that it waits for."""
    out: dict[int, list[int]] = defaultdict(list)
    for target, sources in into.items():
        for source, _, _ in sources:
            out[source].append(target)
    reached = _closure(seeds, out)
    needed = _closure(set(wanted.tolist()), {target: [each[0] for each in sources] for target, sources in into.items()})
    inside = reached & needed
    waits = {row: sum(source in inside for source, _, _ in into.get(row, ())) for row in inside}
    ready = [row for row, count in waits.items() if not count]
    order = []
    while ready:
        row = ready.pop()
        order.append(row)
        for target in out.get(row, ()):
            if target in waits:
                waits[target] -= 1
                if not waits[target]:
                    ready.append(target)
    return order


def _closure(rows: set[int], step: dict[int, list[int]]) -> set[int]:
    reached, stack = set(rows), list(rows)
    while stack:
        for row in step.get(stack.pop(), ()):
            if row not in reached:
                reached.add(row)
                stack.append(row)
    return reached
