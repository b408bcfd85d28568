"""Graphs of several ranks joined in one, and taken apart again.

Every rank keeps its rows together and in order; its rank becomes the `process` of its threads. Ranks touch only in
meetings: tasks without duration on a channel of process -1, known by channel and name. A meeting of a joined graph
takes place when the last of those that it waits for has arrived. In the graph of one rank alone it takes place when
this rank arrives, as if no other were late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from daydream.graph.graph import TaskGraph, Thread, TrainingStep
from daydream.trace.trace import NONE, Flags, Ints, Trace

_NUMBERS = ("kind", "duration_us", "gap_us", "phase", "mark", "bytes", "priority", "recorded_us")
#: Every column that has an entry a task.
COLUMNS = (*_NUMBERS, "name", "thread", "layer", "step", "operator", "event")

_TRACE_NUMBERS = (
    "category", "start_us", "duration_us", "correlation", "external", "sequence", "forward_thread", "bytes",
)  # fmt: skip


def meetings(graph: TaskGraph) -> Flags:
    """Which tasks are meetings of ranks."""
    return np.array([thread.is_meeting for thread in graph.threads], np.bool_)[graph.thread]


# Joined


def joined(parts: Sequence[TaskGraph], ranks: Sequence[int]) -> TaskGraph:
    """The graphs of these ranks as one; meetings of the same channel and name become one.

    Steps are those of the first rank, and are measured there; those of others are known by their names. What is
    recorded of memory is not joined.

    Raises:
        ValueError: no part, or a rank twice.
    """
    if not parts or len(set(ranks)) != len(parts):
        raise ValueError("joining takes one graph for every rank")
    names, layers, steps = _Codes(), _Codes(), _Codes()
    threads: list[Thread] = []
    steps.add([step.name for step in parts[0].steps])
    columns: dict[str, list[Any]] = {}
    edges: dict[str, list[Any]] = {}
    size, events = 0, 0
    keys = _Codes()
    for part, rank in zip(parts, ranks, strict=True):
        name_codes = names.add(part.names)
        thread_codes = _add_threads(threads, part.threads, rank)
        is_new, place = _placed(part, name_codes, thread_codes, keys, size)
        shifted = {
            **{column: getattr(part, column) for column in _NUMBERS},
            "name": name_codes[part.name],
            "thread": thread_codes[part.thread],
            "layer": _coded(layers.add(part.layers), part.layer),
            "step": _coded(steps.add([step.name for step in part.steps]), part.step),
            "operator": np.where(part.operator == NONE, NONE, part.operator + events),
            "event": np.where(part.event == NONE, NONE, part.event + events),
        }
        for column, values in shifted.items():
            columns.setdefault(column, []).append(values[is_new])
        for column in ("edge_source", "edge_target"):
            edges.setdefault(column, []).append(place[getattr(part, column)])
        for column in ("edge_kind", "edge_lag_us"):
            edges.setdefault(column, []).append(getattr(part, column))
        size += int(is_new.sum())
        events += 0 if part.trace is None else len(part.trace)
    columns_of_all = {name: np.concatenate(arrays) for name, arrays in {**columns, **edges}.items()}
    return replace(
        parts[0],
        **columns_of_all,
        names=tuple(names),
        threads=tuple(threads),
        layers=tuple(layers),
        steps=_steps(parts, steps),
        trace=_joined_trace(parts, ranks),
        enclosing=_joined_enclosing(parts),
        warnings=tuple(dict.fromkeys(warning for part in parts for warning in part.warnings)),
        queue_depth=max(part.queue_depth for part in parts),
        workers=max(part.workers for part in parts),
        memory=None,
        ranks=tuple(ranks),
    )


class _Codes(dict[Any, int]):
    """Distinct values with a number each, in the order in which they came."""

    def add(self, values: Sequence[Any]) -> Ints:
        """The numbers of these values."""
        return np.array([self.setdefault(value, len(self)) for value in values], np.int64)


def _coded(codes: Ints, column: Ints) -> Ints:
    """A column of indices in other words; -1 stays."""
    return np.append(codes, NONE)[column]


def _add_threads(threads: list[Thread], threads_of_part: Sequence[Thread], rank: int) -> Ints:
    """A part's threads added to those of the parts before it; the numbers that they have there."""
    numbers = []
    for thread in threads_of_part:
        if thread.is_meeting and thread in threads:
            numbers.append(threads.index(thread))
        else:
            numbers.append(len(threads))
            threads.append(thread if thread.is_meeting else replace(thread, process=rank))
    return np.array(numbers, np.int64)


def _placed(part: TaskGraph, names: Ints, threads: Ints, keys: _Codes, size: int) -> tuple[Flags, Ints]:
    """Which rows of a part are new, all but meetings that an earlier part has, and the joined row of each."""
    meeting = np.flatnonzero(meetings(part))
    pairs = list(zip(threads[part.thread[meeting]].tolist(), names[part.name[meeting]].tolist(), strict=True))
    is_new = np.ones(len(part), np.bool_)
    is_new[meeting] = [pair not in keys for pair in pairs]
    place = np.cumsum(is_new) - 1 + size
    for row, pair in zip(meeting.tolist(), pairs, strict=True):
        place[row] = keys.setdefault(pair, int(place[row]))
    return is_new, place


def _steps(parts: Sequence[TaskGraph], names: Sequence[str] | _Codes) -> tuple[TrainingStep, ...]:
    """A step is full where it is in every part, and measured in the first that has it."""
    steps_by_name: dict[str, TrainingStep] = {}
    partial = set()
    for part in parts:
        for step in part.steps:
            steps_by_name.setdefault(step.name, step)
            partial |= {step.name} if not step.full else set()
        partial |= set(names) - {step.name for step in part.steps}
    return tuple(replace(steps_by_name[name], full=name not in partial) for name in names)


def _joined_trace(parts: Sequence[TaskGraph], ranks: Sequence[int]) -> Trace | None:
    traces = [part.trace for part in parts if part.trace is not None]
    if len(traces) < len(parts):
        return None
    names, threads = _Codes(), _Codes()
    coded: dict[str, list[Any]] = {"name": [], "thread": []}
    for trace, rank in zip(traces, ranks, strict=True):
        coded["name"].append(names.add(trace.names)[trace.name])
        numbers = threads.add([replace(thread, process=rank) for thread in trace.threads])
        coded["thread"].append(numbers[trace.thread])
    begins = np.cumsum([0, *(len(trace) for trace in traces)])
    arrows = [trace.forward_backward + begin for trace, begin in zip(traces, begins, strict=False)]
    columns: dict[str, Any] = {column: np.concatenate(arrays) for column, arrays in coded.items()}
    for column in _TRACE_NUMBERS:
        columns[column] = np.concatenate([getattr(trace, column) for trace in traces])
    return replace(
        traces[0],
        **columns,
        names=tuple(names),
        threads=tuple(threads),
        arguments=tuple([arguments for trace in traces for arguments in trace.arguments]),
        forward_backward=np.concatenate(arrows),
        distributed={key: value for key, value in traces[0].distributed.items() if key != "rank"},
        memory=None,
    )


def _joined_enclosing(parts: Sequence[TaskGraph]) -> Ints:
    begins = np.cumsum([0, *(len(part.enclosing) for part in parts)])
    shifted = [np.where(p.enclosing == NONE, NONE, p.enclosing + b) for p, b in zip(parts, begins, strict=False)]
    return np.concatenate(shifted)


# Taken apart


def parted(graph: TaskGraph) -> list[TaskGraph]:
    """The graph of every rank of a joined one, in the order of its `ranks`, with its own part of the trace."""
    process = np.array([NONE if thread.is_meeting else thread.process for thread in graph.threads], np.int64)
    of_task = process[graph.thread]
    ends = np.stack([graph.edge_source, graph.edge_target])
    of_edge = np.maximum(of_task[ends[0]], of_task[ends[1]])
    task_order, edge_order = np.argsort(of_task, kind="stable"), np.argsort(of_edge, kind="stable")
    task_bounds = (
        np.searchsorted(of_task[task_order], graph.ranks),
        np.searchsorted(of_task[task_order], graph.ranks, side="right"),
    )
    edge_bounds = (
        np.searchsorted(of_edge[edge_order], graph.ranks),
        np.searchsorted(of_edge[edge_order], graph.ranks, side="right"),
    )
    meeting = of_task == NONE
    parts = []
    for place, rank in enumerate(graph.ranks):
        tasks = task_order[task_bounds[0][place] : task_bounds[1][place]]
        edges = edge_order[edge_bounds[0][place] : edge_bounds[1][place]]
        touched = np.unique(ends[:, edges])
        rows = np.sort(np.concatenate([tasks, touched[meeting[touched]]]))
        parts.append(_part(graph, rank, rows, edges))
    return parts


def _part(graph: TaskGraph, rank: int, rows: Ints, edges: Ints) -> TaskGraph:
    place = np.full(len(graph), NONE)
    place[rows] = np.arange(len(rows))
    numbers = [
        number for number, thread in enumerate(graph.threads) if thread.process == rank and not thread.is_meeting
    ]
    used = np.union1d(np.unique(graph.thread[rows]), np.array(numbers, np.int64))
    thread_of = np.full(len(graph.threads), NONE)
    thread_of[used] = np.arange(len(used))
    trace, first, last = _part_of_trace(graph.trace, rank)
    columns: dict[str, Any] = {name: getattr(graph, name)[rows] for name in (*_NUMBERS, "name", "layer", "step")}
    for name in ("operator", "event"):
        column = getattr(graph, name)[rows]
        columns[name] = np.where(column == NONE, NONE, column - first)
    enclosing = graph.enclosing[first:last]
    return replace(
        graph,
        **columns,
        thread=thread_of[graph.thread[rows]],
        threads=tuple(graph.threads[index] for index in used.tolist()),
        edge_source=place[graph.edge_source[edges]],
        edge_target=place[graph.edge_target[edges]],
        edge_kind=graph.edge_kind[edges],
        edge_lag_us=graph.edge_lag_us[edges],
        trace=trace,
        enclosing=np.where(enclosing == NONE, NONE, enclosing - first),
        ranks=(),
    )


def _part_of_trace(trace: Trace | None, rank: int) -> tuple[Trace | None, int, int]:
    """A rank's part of a joined trace, and where in it the part begins and ends."""
    if trace is None:
        return None, 0, 0
    is_of_rank = np.array([thread.process == rank for thread in trace.threads], np.bool_)
    rows = np.flatnonzero(is_of_rank[trace.thread])
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    arrows = trace.forward_backward
    arrows = arrows[(arrows >= first).all(axis=1) & (arrows < last).all(axis=1)] - first
    columns: dict[str, Any] = {
        column: getattr(trace, column)[first:last] for column in (*_TRACE_NUMBERS, "name", "thread")
    }
    part = replace(
        trace,
        **columns,
        arguments=trace.arguments[first:last],
        forward_backward=arrows,
        distributed={**trace.distributed, "rank": rank},
    )
    return part, first, last


def by_rank(graph: TaskGraph, change: Callable[[TaskGraph], TaskGraph]) -> TaskGraph:
    """A joined graph with every rank's part changed; a graph of one process changed as it is."""
    if not graph.ranks:
        return change(graph)
    return joined([change(part) for part in parted(graph)], graph.ranks)
