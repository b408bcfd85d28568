"""Take the profiler's own cost off: steps as they are without a recording."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from daydream.graph.graph import Mark, TaskGraph
from daydream.passes import Outcome, what_if
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError

#: What recording one event may cost at most. With input sizes it was 1 to 3 µs in PyTorch 2.13 on a 2.5 GHz Xeon; a
#: difference beyond this is no profiler's, but that of a machine whose pace changed between the steps.
MOST_US = 10.0


@what_if("unprofiled")
def unprofiled(graph: TaskGraph, *, step_ms: float = 0.0) -> Outcome:
    """Steps without what recording costs, as long as the steps that were timed without the profiler.

    Every event of a CPU thread costs the profiler about the same, just before and behind the event's own times. That
    much is taken off what stands before each event, so that steps get the wanted length. If more than 10 µs an event
    would be needed, or less than none, the pace of the machine was another one: the rest is made up by scaling.

    Args:
        graph: the baseline.
        step_ms: a step's length without the profiler in milliseconds; 0 is the median of what
            `daydream record --timed` measured.

    Raises:
        InputError: the trace holds no timed steps and none are given.
    """
    wanted = step_ms * 1e3 if step_ms > 0 else _timed_us(graph)
    steps = [index for index, step in enumerate(graph.steps) if step.full]
    lengths = [graph.steps[index].measured_us for index in steps]
    recorded = statistics.median(lengths) if lengths else 0.0
    if not recorded > 0:
        raise InputError("step-ms", "there is no whole step to compare with", "record one")
    before, room = _preceding(graph, steps)
    surplus = (recorded - wanted) * len(steps)
    cost = min(_cost(room, surplus), MOST_US)
    taken = np.minimum(room, cost)
    graph = _without(graph, before, taken)
    factor = wanted / (recorded - float(taken.sum()) / len(steps))
    rows = np.flatnonzero(graph.on_cpu)
    duration, gap = graph.duration_us.copy(), graph.gap_us.copy()
    duration[rows] *= factor
    gap[rows] *= factor
    per_step = len(before) / len(steps)
    notes = [
        f"steps of {recorded / 1e3:.3f} ms recorded, {wanted / 1e3:.3f} ms without the profiler",
        f"{per_step:.0f} events a step cost {cost:.2f} µs each, {float(taken.sum()) / len(steps):.0f} µs in all",
    ]
    if abs(factor - 1) > 1e-4:
        notes.append(f"the rest is another pace of the machine: all CPU times multiplied by {factor:.4f}")
    return Outcome(replace(graph, duration_us=duration, gap_us=gap), tuple(notes))


def _timed_us(graph: TaskGraph) -> float:
    timed = graph.trace.metadata.get("timed_seconds") if graph.trace is not None else None
    if not isinstance(timed, list) or not timed or not all(isinstance(t, int | float) and t > 0 for t in timed):
        problem = "the trace holds no steps that were timed without the profiler"
        raise InputError("step-ms", problem, "give it, or record with `daydream record --timed 10`")
    return statistics.median(timed) * 1e6


def _preceding(graph: TaskGraph, steps: list[int]) -> tuple[Ints, Floats]:
    """For every recorded event of the steps the task before it on its thread, and what can be taken off that."""
    order = graph.by_thread
    same = graph.thread[order[1:]] == graph.thread[order[:-1]]
    eventful = graph.on_cpu & (graph.event != NONE) & (graph.mark == Mark.NONE) & np.isin(graph.step, steps)
    chosen = same & eventful[order[1:]] & np.isin(graph.step[order[:-1]], steps)
    before = order[:-1][chosen]
    return before, graph.duration_us[before] + graph.gap_us[before]


def _cost(room: Floats, surplus: float) -> float:
    """The cost per event that takes the surplus off in all, where no event gives more than it has; microseconds.

    >>> _cost(np.array([1.0, 5.0, 5.0]), surplus=7.0)
    3.0
    """
    if surplus <= 0 or not len(room):
        return 0.0
    spare = np.sort(room)
    # With the cost c those with less room give all they have, the others c.
    sums = np.cumsum(spare) - spare
    totals = sums + spare * np.arange(len(spare), 0, -1)
    position = int(np.searchsorted(totals, surplus))
    if position == len(spare):
        return float(spare[-1])
    return float((surplus - sums[position]) / (len(spare) - position))


def _without(graph: TaskGraph, rows: Ints, taken: Floats) -> TaskGraph:
    """The graph with that much less in these tasks: of the gap behind one first, then of its duration."""
    gap, duration = graph.gap_us.copy(), graph.duration_us.copy()
    of_gap = np.minimum(gap[rows], taken)
    gap[rows] -= of_gap
    duration[rows] -= np.minimum(duration[rows], taken - of_gap)
    return replace(graph, gap_us=gap, duration_us=duration)
