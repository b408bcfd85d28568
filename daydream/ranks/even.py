"""Time of a job under an even load: every rank takes for a task the mean of the ranks that do the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.graph.ranks import meetings
from daydream.trace.trace import NONE, Flags, Floats, Ints

#: Ranks do the same where this share of the tasks of the one that has more are also the other's.
ALIKE = 0.9


def even_load(graph: TaskGraph, only: Flags | None = None) -> TaskGraph:
    """A joined graph in which tasks, gaps and lags have the mean of all ranks that do the same.

    The n-th task of a name in a step on one rank is the n-th of that name in that step on another; ranks with other
    tasks, such as stages of a pipeline, are evened out among their likes. What one rank alone has stays as it is.

    Args:
        graph: of several ranks.
        only: tasks to even out, with their gaps and the lags behind them; None for all.
    """
    index = {rank: place for place, rank in enumerate(graph.ranks)}
    of_thread = np.array([NONE if t.is_meeting else index[t.process] for t in graph.threads], np.int64)
    rank = of_thread[graph.thread]
    rows = np.flatnonzero(~meetings(graph))
    key = np.full(len(graph), NONE)
    key[rows] = _keys(graph, rows, rank[rows])
    alike = _alike(key[rows], rank[rows], len(graph.ranks))
    # Tasks of unlike ranks have nothing to do with each other.
    task = _numbered(alike[rank[rows]], key[rows])
    place = np.full(len(graph), NONE)
    place[rows] = task
    duration, gap = graph.duration_us.copy(), graph.gap_us.copy()
    duration[rows], gap[rows] = _mean(graph.duration_us[rows], task), _mean(graph.gap_us[rows], task)
    if only is not None:
        duration, gap = np.where(only, duration, graph.duration_us), np.where(only, gap, graph.gap_us)
    source, target = place[graph.edge_source], place[graph.edge_target]
    # Edges of meetings have no lag.
    inside = np.flatnonzero((source != NONE) & (target != NONE))
    edge = _numbered(_numbered(source[inside], target[inside]), graph.edge_kind[inside])
    lag = graph.edge_lag_us.copy()
    lag[inside] = _mean(graph.edge_lag_us[inside], edge)
    if only is not None:
        lag = np.where(only[graph.edge_source], lag, graph.edge_lag_us)
    return replace(graph, duration_us=duration, gap_us=gap, edge_lag_us=lag)


def _numbered(first: Ints, second: Ints) -> Ints:
    """A number for every pair, from 0 without holes; numbers of both columns are not negative."""
    _, firsts = np.unique(first, return_inverse=True)
    seconds, of_second = np.unique(second, return_inverse=True)
    _, pairs = np.unique(firsts * len(seconds) + of_second, return_inverse=True)
    return np.asarray(pairs, np.int64)


def _keys(graph: TaskGraph, rows: Ints, rank: Ints) -> Ints:
    """Numbers of tasks that are the same on all ranks: by step, name, kind of thread, and which of these it is."""
    kind = graph.thread_kinds[graph.thread[rows]]
    steps, kinds = len(graph.steps) + 1, int(graph.thread_kinds.max()) + 1
    name = ((graph.name[rows] * kinds + kind) * steps + graph.step[rows] + 1) * (len(Mark) + 1) + graph.mark[rows]
    order = np.lexsort((rows, name, rank))
    new = np.append(True, (np.diff(name[order]) != 0) | (np.diff(rank[order]) != 0))[: len(order)]
    begin = np.flatnonzero(new)
    count = np.empty(len(rows), np.int64)
    count[order] = np.arange(len(rows)) - begin[np.cumsum(new) - 1]
    return np.asarray(name * (int(count.max(initial=0)) + 1) + count, np.int64)


def _alike(key: Ints, rank: Ints, ranks: int) -> Ints:
    """For every rank the first rank that does the same."""
    order = np.lexsort((key, rank))
    bounds = np.searchsorted(rank[order], np.arange(ranks + 1))
    keys_of_rank = [key[order[bounds[i] : bounds[i + 1]]] for i in range(ranks)]
    first: list[int] = []
    alike = np.empty(ranks, np.int64)
    for index in range(ranks):
        for other in first:
            if np.array_equal(keys_of_rank[index], keys_of_rank[other]):
                break
            common = len(np.intersect1d(keys_of_rank[index], keys_of_rank[other], assume_unique=True))
            if common >= ALIKE * max(len(keys_of_rank[index]), len(keys_of_rank[other])):
                break
        else:
            other = index
            first.append(index)
        alike[index] = other
    return alike


def _mean(values: Floats, place: Ints) -> Floats:
    """For every value the mean of those with the same place; equal ones stay bit by bit what they are."""
    if not len(values):
        return values
    count = np.bincount(place)
    mean = np.bincount(place, values) / count
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    return np.asarray(np.where(low == high, low, mean)[place], np.float64)
