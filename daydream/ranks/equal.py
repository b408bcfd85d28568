"""Equal ranks, simulated once.

Two ranks are equal if their own tasks and dependencies are the same, and the n-th meeting of one is attended as the
n-th of the other: by ranks equal to each other, in the same roles, at the same places of their graphs. Such a division
of ranks into classes is an equitable partition of the joined graph. A task starts when its thread is free and its
dependencies are met, which is a maximum over times of tasks before it. Along any order in which the tasks can run,
tasks at the same place of equal ranks so take maxima over equal times, and start at the same time; a meeting takes
place at the same time as every other of its class. One rank of each class therefore tells the times of all, exactly.

The classes are found by refinement: ranks that look alike by themselves are one class, and are divided as long as
their meetings differ. A meeting's duration would let meetings of one channel compete, so there must be none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from daydream.graph.graph import Dependency, TaskGraph
from daydream.graph.ranks import COLUMNS, meetings
from daydream.graph.simulate import Timeline, simulate
from daydream.trace.trace import NONE, Ints


class _RankRows(NamedTuple):
    """A rank's part of a graph, in an order that equal ranks share.

    Attributes:
        rows: its tasks, thread by thread, as they stand in the graph.
        edges: edges that touch them, by source, target, kind and lag.
        meeting_edges: those of them that touch a meeting, too.
    """

    rows: Ints
    edges: Ints
    meeting_edges: Ints


def simulate_ranks(graph: TaskGraph) -> Timeline:
    """The timeline of a joined graph, as :func:`daydream.graph.simulate.simulate` gives it, one rank of a class run.

    Of causes that end at the same time, another may be named.
    """
    classes = equal_ranks(graph)
    if not len(classes) or classes.max() + 1 == len(classes):
        return simulate(graph)
    rows_of_ranks = _rank_rows(graph)
    _, first = np.unique(classes, return_index=True)
    of_meeting = _meeting_classes(graph, rows_of_ranks, classes)
    folded, row_of = _folded(graph, rows_of_ranks, first, of_meeting)
    run = simulate(folded)
    # For every row of the graph the row of the folded one that runs in its place.
    proxy = np.full(len(graph), NONE)
    for index, rank_rows in enumerate(rows_of_ranks):
        proxy[rank_rows.rows] = row_of[rows_of_ranks[first[classes[index]]].rows]
    meeting = np.flatnonzero(of_meeting != NONE)
    _, representatives = np.unique(of_meeting[meeting], return_index=True)
    proxy[meeting] = row_of[meeting[representatives]][of_meeting[meeting]]
    start = run.start_us[proxy]
    return Timeline(
        graph, start, start + graph.duration_us, _causes(graph, run.cause, proxy, row_of, rows_of_ranks, of_meeting)
    )


def equal_ranks(graph: TaskGraph) -> Ints:
    """For every rank of a joined graph the number of its class, numbered in the order of their first ranks."""
    met = meetings(graph)
    singles = np.arange(len(graph.ranks))
    if not graph.ranks or (graph.duration_us[met] + graph.gap_us[met] > 0).any():
        return singles
    rows_of_ranks = _rank_rows(graph)
    # Recorded durations differ as a rule, and then nothing else matters.
    if len({graph.duration_us[rank_rows.rows].tobytes() for rank_rows in rows_of_ranks}) == len(rows_of_ranks):
        return singles
    place = _places(graph, rows_of_ranks)
    classes = _numbered([_digest(graph, rank_rows, place) for rank_rows in rows_of_ranks])
    ends = np.where(met[graph.edge_source], graph.edge_source, graph.edge_target)
    while classes.max() + 1 < len(classes):
        of_meeting = _meeting_classes(graph, rows_of_ranks, classes)
        keys = [
            (number, of_meeting[ends[rank_rows.meeting_edges]].tobytes())
            for number, rank_rows in zip(classes.tolist(), rows_of_ranks, strict=True)
        ]
        refined = _numbered(keys)
        if refined.max() == classes.max():
            return refined
        classes = refined
    return classes


def _places(graph: TaskGraph, rows_of_ranks: list[_RankRows]) -> Ints:
    """For every task of a rank which of its rows it is; -1 for meetings."""
    place = np.full(len(graph), NONE)
    for rank_rows in rows_of_ranks:
        place[rank_rows.rows] = np.arange(len(rank_rows.rows))
    return place


def _numbered(keys: Sequence[object]) -> Ints:
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _rank_rows(graph: TaskGraph) -> list[_RankRows]:
    """Rows and edges of every rank."""
    process = np.array([NONE if thread.is_meeting else thread.process for thread in graph.threads], np.int64)
    of_task = process[graph.thread]
    met = meetings(graph)
    source, target = graph.edge_source, graph.edge_target
    of_edge = np.maximum(of_task[source], of_task[target])
    rows, edges = np.argsort(of_task, kind="stable"), np.argsort(of_edge, kind="stable")
    sorted_tasks, sorted_edges = of_task[rows], of_edge[edges]
    place = np.full(len(graph), NONE)
    rows_of_ranks = []
    for rank in graph.ranks:
        low, high = np.searchsorted(sorted_tasks, (rank, rank + 1))
        first, last = np.searchsorted(sorted_edges, (rank, rank + 1))
        tasks, edges_of_rank = rows[low:high], edges[first:last]
        # Tasks of two threads stand in the order of their recorded times, which decides nothing.
        tasks = tasks[np.argsort(graph.thread[tasks], kind="stable")]
        place[tasks] = np.arange(len(tasks))
        ends = place[source[edges_of_rank]], place[target[edges_of_rank]]
        edges_of_rank = edges_of_rank[
            np.lexsort((graph.edge_lag_us[edges_of_rank], graph.edge_kind[edges_of_rank], ends[1], ends[0]))
        ]
        rows_of_ranks.append(
            _RankRows(tasks, edges_of_rank, edges_of_rank[met[source[edges_of_rank]] | met[target[edges_of_rank]]])
        )
    return rows_of_ranks


def _digest(graph: TaskGraph, rank_rows: _RankRows, place: Ints) -> bytes:
    """All that decides when a rank's tasks run, but for whom it meets, as a digest."""
    rows, edges = rank_rows.rows, rank_rows.edges
    threads, local = np.unique(graph.thread[rows], return_inverse=True)
    # What a rank calls its boards says nothing.
    devices: dict[int, int] = {}
    kinds = [
        (graph.threads[t].kind, devices.setdefault(graph.threads[t].device, len(devices))) for t in threads.tolist()
    ]
    digest = hashlib.sha256(repr(kinds).encode())
    for column in (
        graph.duration_us[rows],
        graph.gap_us[rows],
        graph.priority[rows],
        local,
        place[graph.edge_source[edges]],
        place[graph.edge_target[edges]],
        graph.edge_lag_us[edges],
        # A launch takes a place in the queue.
        graph.edge_kind[edges] == Dependency.LAUNCH,
    ):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


def _meeting_classes(graph: TaskGraph, rows_of_ranks: list[_RankRows], classes: Ints) -> Ints:
    """For every meeting the number of its class, -1 for other tasks.

    Meetings are alike if the same classes attend them at the same places with the same roles and lags; how many ranks
    of a class do makes no difference to a maximum.
    """
    met = meetings(graph)
    place, of_rank = _places(graph, rows_of_ranks), np.full(len(graph), NONE)
    for index, rank_rows in enumerate(rows_of_ranks):
        of_rank[rank_rows.rows] = classes[index]
    edges = np.concatenate([rank_rows.meeting_edges for rank_rows in rows_of_ranks])
    arrives = met[graph.edge_target[edges]]
    meeting = np.where(arrives, graph.edge_target[edges], graph.edge_source[edges])
    member = np.where(arrives, graph.edge_source[edges], graph.edge_target[edges])
    attended = np.stack([meeting, of_rank[member], place[member], arrives], axis=1)
    lag = graph.edge_lag_us[edges]
    order = np.lexsort((lag, *attended.T[::-1]))
    attended, lag = attended[order], lag[order]
    new = np.append(True, (np.diff(attended, axis=0) != 0).any(axis=1) | (np.diff(lag) != 0))[: len(lag)]
    attended, lag = attended[new], lag[new]
    begins = np.flatnonzero(np.diff(attended[:, 0], prepend=-1))
    numbers: dict[object, int] = {}
    result = np.full(len(graph), NONE)
    for begin, end in zip(begins.tolist(), np.append(begins[1:], len(lag)).tolist(), strict=True):
        key = (attended[begin:end, 1:].tobytes(), lag[begin:end].tobytes())
        result[attended[begin, 0]] = numbers.setdefault(key, len(numbers))
    alone = np.flatnonzero(met & (result == NONE))
    result[alone] = np.arange(len(alone)) + len(numbers)
    return result


def _folded(graph: TaskGraph, rows_of_ranks: list[_RankRows], first: Ints, of_meeting: Ints) -> tuple[TaskGraph, Ints]:
    """The first rank of every class with one meeting of every class, and the row of each kept row in it."""
    meeting = np.flatnonzero(of_meeting != NONE)
    _, representatives = np.unique(of_meeting[meeting], return_index=True)
    stands_for = np.arange(len(graph))
    stands_for[meeting] = meeting[representatives][of_meeting[meeting]]
    chosen = np.zeros(len(graph), np.bool_)
    chosen[meeting[representatives]] = True
    for index in first.tolist():
        chosen[rows_of_ranks[index].rows] = True
    row_of = np.where(chosen, np.cumsum(chosen) - 1, NONE)
    source, target = stands_for[graph.edge_source], stands_for[graph.edge_target]
    # An edge of a meeting counts if its other end, which is a rank's, is kept.
    edges = np.flatnonzero(chosen[source] & chosen[target])
    rows = np.flatnonzero(chosen)
    columns: dict[str, Any] = {column: getattr(graph, column)[rows] for column in COLUMNS}
    folded = replace(
        graph,
        **columns,
        edge_source=row_of[source[edges]],
        edge_target=row_of[target[edges]],
        edge_kind=graph.edge_kind[edges],
        edge_lag_us=graph.edge_lag_us[edges],
        trace=None,
        ranks=tuple(graph.ranks[index] for index in first.tolist()),
    )
    return folded, row_of


def _causes(
    graph: TaskGraph, cause: Ints, proxy: Ints, row_of: Ints, rows_of_ranks: list[_RankRows], of_meeting: Ints
) -> Ints:
    """Task that let every task start, in rows of the graph: of its own rank, or a meeting of its rank, or who came to
    it.
    """
    run_rows = np.flatnonzero(row_of != NONE)
    result = np.full(len(graph), NONE)
    met = of_meeting != NONE
    met_folded = met[run_rows]
    place = _places(graph, rows_of_ranks)
    place_folded = place[run_rows]
    # Which meeting every task comes from.
    source = np.full(len(graph), NONE)
    leaves = met[graph.edge_source]
    source[graph.edge_target[leaves]] = graph.edge_source[leaves]
    for rank_rows in rows_of_ranks:
        because = cause[proxy[rank_rows.rows]]
        has_cause = because != NONE
        by_meeting = has_cause & met_folded[because]
        by_task = has_cause & ~by_meeting
        result[rank_rows.rows[by_task]] = rank_rows.rows[place_folded[because[by_task]]]
        result[rank_rows.rows[by_meeting]] = source[rank_rows.rows[by_meeting]]
    comes = met[graph.edge_target]
    # The member at the place of the one that decided in the folded graph.
    meeting, member = graph.edge_target[comes], graph.edge_source[comes]
    decided = proxy[member] == cause[proxy[meeting]]
    result[meeting[decided]] = member[decided]
    return result
