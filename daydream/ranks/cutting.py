"""A rank's graph in which every collective is cut in two: arriving, and moving data once the last rank has come.

Between the two stands a meeting (:mod:`daydream.graph.ranks`). A kernel of NCCL becomes two tasks of its stream, what
moves data on a thread of gloo two tasks of that thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.ranks.clocks import Clocks
from daydream.ranks.collectives import Collectives, began
from daydream.ranks.pairing import Meetings
from daydream.tasks.assemble import TRACE_BEGINS
from daydream.trace.trace import NONE, Flags, Floats, Ints

#: Name of the task that ends when its rank has come to a collective; that of the collective would be counted twice.
ARRIVES = "arrives"


class Roles(NamedTuple):
    """When the members of every meeting could move data, and who waited for whom: a row as in :class:`Meetings`.

    Attributes:
        sends: whether the meeting waits for this member.
        waits: whether this member waits for the meeting.
        begun_us: when the last of those that send had arrived, common clock; -inf without senders.
    """

    sends: Flags
    waits: Flags
    begun_us: Floats


def roles(meetings: Meetings, clocks: Clocks) -> Roles:
    """Who waited for whom, by what the recording shows.

    A collective with a root whose members all ended after all of them had begun went through buffers smaller than the
    message: then each waited for each, as in a symmetric one.
    """
    start = clocks.aligned(meetings.rank, meetings.start_us)
    end = clocks.aligned(meetings.rank, meetings.end_us)
    last, first_end = np.full(meetings.count, -np.inf), np.full(meetings.count, np.inf)
    np.maximum.at(last, meetings.meeting, start)
    np.minimum.at(first_end, meetings.meeting, end)
    each = (first_end >= last)[meetings.meeting]
    sends, waits = meetings.sends | each, meetings.waits | each
    begun = np.full(meetings.count, -np.inf)
    np.maximum.at(begun, meetings.meeting[sends], start[sends])
    return Roles(sends, waits, begun[meetings.meeting])


def on_common_clock(graph: TaskGraph, shift_us: float, rate: float) -> TaskGraph:
    """A rank's graph with all times in the common clock: what begins the recording waits until `shift_us`."""
    root = graph.names.index(TRACE_BEGINS) if TRACE_BEGINS in graph.names else NONE
    lag = graph.edge_lag_us * rate
    lag[graph.name[graph.edge_source] == root] += shift_us
    trace = graph.trace
    if trace is not None:
        trace = replace(trace, start_us=shift_us + rate * trace.start_us, duration_us=rate * trace.duration_us)
    return replace(
        graph,
        duration_us=graph.duration_us * rate,
        gap_us=graph.gap_us * rate,
        edge_lag_us=lag,
        recorded_us=shift_us + rate * graph.recorded_us,
        trace=trace,
    )


def cut(graph: TaskGraph, collectives: Collectives, meetings: Meetings, of_rank: Ints, parts: Roles) -> TaskGraph:
    """A rank's graph with its collectives cut.

    Args:
        graph: of one rank, on the common clock.
        collectives: its collectives, as they were found in this graph.
        meetings: those of all ranks.
        of_rank: rows of `meetings` that are of this rank.
        parts: who waits for whom.
    """
    edit = Edit(replace(graph, recorded_us=began(graph)))
    into = _edges_into(graph, collectives.row)
    for line in of_rank.tolist():
        row = int(collectives.row[meetings.place[line]])
        meeting = int(meetings.meeting[line])
        if not (parts.sends[line] or parts.waits[line]):
            continue
        label = f"group {meetings.labels[meetings.group[meeting]]}"
        channel = edit.thread(Thread(kind=ThreadKind.CHANNEL, label=label, process=NONE))
        meet = edit.add(meetings.name(meeting), TaskKind.CPU, 0.0, thread=channel, step=int(graph.step[row]))
        begun = float(parts.begun_us[line]) if parts.waits[line] else -np.inf
        arrives = _cut(edit, row, into, begun, float(collectives.bytes[meetings.place[line]]))
        if parts.sends[line]:
            edit.depend(arrives, meet, Dependency.COMMUNICATION)
        if parts.waits[line]:
            edit.depend(meet, row, Dependency.COMMUNICATION)
    return edit.apply()


def _edges_into(graph: TaskGraph, rows: Ints) -> dict[int, list[int]]:
    """Edges that lead to each of these tasks."""
    edges = np.flatnonzero(np.isin(graph.edge_target, rows))
    into: dict[int, list[int]] = {}
    for edge, target in zip(edges.tolist(), graph.edge_target[edges].tolist(), strict=True):
        into.setdefault(target, []).append(edge)
    return into


def _cut(edit: Edit, row: int, into: dict[int, list[int]], begun_us: float, size: float) -> int:
    """Cuts a collective at the time when the last rank had begun, and returns the task that arrives.

    What held the collective back holds back the arrival. The launch of a kernel stays its launch, too, so that passes
    know it.
    """
    graph = edit.graph
    end = float(graph.recorded_us[row] + graph.duration_us[row])
    begun = min(max(begun_us, float(graph.recorded_us[row])), end)
    arrives = edit.add(
        ARRIVES,
        TaskKind.CPU,
        0.0,
        before=row,
        phase=int(graph.phase[row]),
        layer=int(graph.layer[row]),
        operator=int(graph.operator[row]),
    )
    for edge in into.get(row, ()):
        source, kind, lag = int(graph.edge_source[edge]), graph.edge_kind[edge], float(graph.edge_lag_us[edge])
        is_launch = kind == Dependency.LAUNCH
        edit.depend(source, arrives, Dependency.SYNC if is_launch else Dependency(int(kind)), lag)
        if not is_launch:
            edit.drop_edges(np.array([edge]))
    edit.set("duration_us", [row], end - begun)
    edit.set("recorded_us", [row], begun)
    edit.set("bytes", [row], size)
    return arrives
