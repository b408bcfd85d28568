"""Why a GPU idles: what each pause of a stream waited for, and which CPU operator was to blame.

A pause ends when a task starts; what let it start then (`Timeline.cause`) is followed back to where the pause began,
and every task on that chain gets the part of the pause during which it was the one that everything waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from daydream.graph.graph import TaskKind
from daydream.graph.simulate import Timeline
from daydream.report.breakdown import Share, blamed_text, of_steps, windows
from daydream.trace.trace import NONE, Floats, Ints

LAUNCH = "waiting for launch (CPU-bound)"
SYNCHRONISED = "host had synchronised"
LOADING = "data loading"
COPY = "waiting for a copy"
COMMUNICATION = "waiting for communication"
STREAM = "waiting for another stream"
BETWEEN_TASKS = "between tasks of the stream"
#: Pauses below this are rounding, microseconds.
_SHORTEST_US = 1e-6

#: What a pause is put down to. SYNCHRONISED: the CPU had nothing queued because it had waited for the GPU, during this
#: pause or as it began; LAUNCH: it was merely too slow.
REASONS = (LAUNCH, SYNCHRONISED, LOADING, COPY, COMMUNICATION, STREAM, BETWEEN_TASKS)


@dataclass(frozen=True)
class LaneIdle:
    """The pauses of a whole device, or of a stream between its first and last task of each step; per step, µs."""

    name: str
    idle_us: float
    pauses: float
    by_reason: dict[str, float]


@dataclass(frozen=True)
class Idle:
    """Pauses of every device and stream, and the CPU operators that the devices waited for."""

    lanes: list[LaneIdle] = field(default_factory=list)
    operators: list[Share] = field(default_factory=list)


@dataclass(frozen=True)
class _Pauses:
    lane: Ints
    begin_us: Floats
    task: Ints
    """The task that ends the pause."""


def idle_times(timeline: Timeline, steps: Sequence[int], limit: int = 10) -> Idle:
    """Idle time of devices and streams within these steps, by reason and by operator; mean of the steps."""
    graph = timeline.graph
    rows = np.flatnonzero(of_steps(graph, steps) & graph.on_gpu)
    if not len(rows):
        return Idle()
    devices = graph.boards.of_thread
    numbers = np.unique(devices[graph.thread[rows]])
    lanes, operators = _explain(timeline, _device_pauses(timeline, steps, devices), len(steps), limit)
    nothing: tuple[float, float, dict[str, float]] = (0.0, 0.0, {})
    idle_lanes = [LaneIdle(graph.boards.names[number], *lanes.get(number, nothing)) for number in numbers.tolist()]
    threads, lane = np.unique(graph.thread[rows], return_inverse=True)
    if len(threads) > len(numbers):
        streams, _ = _explain(timeline, _stream_pauses(timeline, rows, lane), len(steps), 0)
        for place, thread in enumerate(threads.tolist()):
            label = graph.threads[thread].label
            label = f"rank {graph.threads[thread].process}, {label}" if graph.ranks else label
            idle_lanes.append(LaneIdle(label, *streams.get(place, nothing)))
    return Idle(idle_lanes, operators)


def _stream_pauses(timeline: Timeline, rows: Ints, lane: Ints) -> _Pauses:
    """Times at which a stream runs nothing between two tasks of the same step."""
    step = timeline.graph.step[rows]
    order = np.lexsort((timeline.start_us[rows], step, lane))
    rows, lane, step = rows[order], lane[order], step[order]
    group = np.cumsum(np.append(False, (lane[1:] != lane[:-1]) | (step[1:] != step[:-1])))
    busy_until = _busy_before(timeline, rows, group)
    idle = np.append(False, group[1:] == group[:-1]) & (timeline.start_us[rows] - busy_until > _SHORTEST_US)
    return _Pauses(lane[idle], busy_until[idle], rows[idle])


def _device_pauses(timeline: Timeline, steps: Sequence[int], devices: Ints) -> _Pauses:
    """Times at which a device runs nothing, each counted to the step of the task that ends it.

    The time from the step's begin to its first task counts too: there a GPU waits for data.
    """
    graph = timeline.graph
    rows = np.flatnonzero(graph.on_gpu)
    lane = devices[graph.thread[rows]]
    order = np.lexsort((timeline.start_us[rows], lane))
    rows, lane = rows[order], lane[order]
    group = np.cumsum(np.append(False, lane[1:] != lane[:-1]))
    begins, _ = windows(graph, timeline.start_us, timeline.end_us)
    begin = np.append(begins, 0.0)[graph.step[rows]]
    pause_from = np.maximum(_busy_before(timeline, rows, group), begin)
    idle = of_steps(graph, steps)[rows] & (timeline.start_us[rows] - pause_from > _SHORTEST_US)
    return _Pauses(lane[idle], pause_from[idle], rows[idle])


def _busy_before(timeline: Timeline, rows: Ints, group: Ints) -> Floats:
    """Until when anything before each row of its group ran; minus infinity for the first. Rows stand by start."""
    # Groups are pushed apart by more than any time is long, so that one running maximum serves all.
    shift = group * (timeline.makespan_us + 1.0)
    until = np.maximum.accumulate(timeline.end_us[rows] + shift) - shift
    first = np.append(True, group[1:] != group[:-1])
    return np.where(first, -np.inf, np.append(-np.inf, until[:-1]))


def _explain(
    timeline: Timeline, pauses: _Pauses, steps: int, limit: int
) -> tuple[dict[int, tuple[float, float, dict[str, float]]], list[Share]]:
    """Per lane idle time, number of pauses and time by reason; the operators with most of it."""
    graph = timeline.graph
    cause, start = timeline.cause.tolist(), timeline.start_us.tolist()
    on_cpu, kind, thread = graph.on_cpu.tolist(), graph.kind.tolist(), graph.thread.tolist()
    by_reason: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_task: dict[int, float] = defaultdict(float)
    count: dict[int, int] = defaultdict(int)
    for lane, begin, task in zip(pauses.lane.tolist(), pauses.begin_us.tolist(), pauses.task.tolist(), strict=True):
        count[lane] += 1
        reasons = by_reason[lane]
        until, blocker, waited_cpu = start[task], cause[task], 0.0
        lane_of_task = thread[task]
        while blocker != NONE and until > begin:
            amount = until - max(start[blocker], begin)
            until = start[blocker]
            if not on_cpu[blocker]:
                reasons[_gpu_reason(kind[blocker], thread[blocker] == lane_of_task)] += amount
            elif kind[blocker] == TaskKind.DATA_LOADING:
                reasons[LOADING] += amount
            else:
                waited_cpu += amount
            if on_cpu[blocker]:
                by_task[blocker] += amount
            blocker = cause[blocker]
            if blocker != NONE and not on_cpu[blocker] and until >= begin - _SHORTEST_US and waited_cpu:
                # The CPU came out of waiting for this task while the lane idled, or just before.
                reasons[SYNCHRONISED] += waited_cpu
                waited_cpu = 0.0
        reasons[LAUNCH] += waited_cpu
    lanes = {}
    for lane, reasons in by_reason.items():
        shown = {reason: reasons[reason] / steps for reason in REASONS if reasons.get(reason)}
        lanes[lane] = (sum(shown.values()), count[lane] / steps, shown)
    return lanes, _operators(timeline, by_task, steps, limit)


def _gpu_reason(kind: int, same_lane: bool) -> str:
    if kind == TaskKind.COMMUNICATION:
        return COMMUNICATION
    if same_lane:
        return BETWEEN_TASKS
    return COPY if kind in (TaskKind.MEMCPY, TaskKind.MEMSET) else STREAM


def _operators(timeline: Timeline, by_task: dict[int, float], steps: int, limit: int) -> list[Share]:
    amounts: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    longest: dict[str, float] = defaultdict(float)
    for row, amount in by_task.items():
        name = blamed_text(timeline.graph, row, amount)
        amounts[name] += amount
        counts[name] += 1
        longest[name] = max(longest[name], amount)
    total_us = sum(amounts.values()) or 1.0
    order = sorted(amounts, key=lambda name: -amounts[name])[:limit]
    return [Share(n, counts[n] / steps, amounts[n] / steps, amounts[n] / total_us, longest[n]) for n in order]
