"""Requests of the program to a CPU thread: operator calls, with everything that ran inside them.

Operators nest: `aten::conv2d` calls `aten::convolution`, that `aten::_convolution` and so on, and the work is done
somewhere inside. What a program called is the outermost of them, and replacing a call replaces all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.operators.inputs import Inputs, inputs_of
from daydream.trace.nesting import outermost
from daydream.trace.trace import NONE, Category, Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class OperatorCall:
    """One call, and its tasks in a graph.

    Attributes:
        event: row of the outermost operator in the trace.
        name: its name, such as `aten::conv2d`.
        inputs: its recorded arguments; None without.
        rows: its tasks in the order in which they ran.
        step: index of the step it belongs to, -1 outside of all.
        duration_us: from its beginning to its end, as the graph has it now.
        tail_us: how long its thread is then busy with what belongs to no call, up to the next task.
    """

    event: int
    name: str
    inputs: Inputs | None
    rows: Ints
    step: int
    duration_us: float
    tail_us: float


def operator_calls(graph: TaskGraph) -> list[OperatorCall]:
    """The calls of all CPU threads, thread by thread in the order in which they ran; none without a trace."""
    trace = graph.trace
    if trace is None:
        return []
    owner = outermost(graph.enclosing, trace.category == Category.OPERATOR)
    rows = graph.by_thread[graph.on_cpu[graph.by_thread]]
    rows = rows[(graph.operator[rows] != NONE) & (graph.mark[rows] == Mark.NONE)]
    if not len(rows):
        return []
    owners = owner[graph.operator[rows]]
    starts = np.flatnonzero(np.diff(owners, prepend=NONE - 1))
    return [_call(graph, int(owners[start]), group) for start, group in zip(starts, _split(rows, starts), strict=True)]


def _split(rows: Ints, starts: Ints) -> list[Ints]:
    return np.split(rows, starts[1:])


def _call(graph: TaskGraph, event: int, rows: Ints) -> OperatorCall:
    trace = graph.trace
    assert trace is not None
    last = rows[-1]
    final = int(graph.event[last])
    # The gap behind the last task is the call's own up to the call's end.
    ends = trace.start_us + trace.duration_us
    inside = float(ends[event] - ends[final]) if final != NONE else 0.0
    tail = float(graph.gap_us[last]) - min(max(inside, 0.0), float(graph.gap_us[last]))
    total = float(graph.duration_us[rows].sum() + graph.gap_us[rows].sum())
    return OperatorCall(
        event=event,
        name=trace.text(event),
        inputs=inputs_of(trace, event),
        rows=rows,
        step=int(graph.step[rows[0]]),
        duration_us=total - tail,
        tail_us=tail,
    )
