"""The picture of a step: what every CPU thread, stream and channel does, as inline SVG of bounded size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daydream.graph.graph import Phase, TaskGraph, TaskKind, ThreadKind
from daydream.graph.simulate import Timeline
from daydream.report.breakdown import Cover, Resource, cpu_busy_until, critical_segments, resources, windows
from daydream.report.style import RESOURCE_CLASSES, esc, ms
from daydream.trace.trace import Floats, Ints

#: Units of the drawing: all, names of lanes, height of a lane, space between.
WIDTH, LABEL_WIDTH, LANE, GAP = 1180, 165, 26, 8

#: Pieces of time; a lane never has more rectangles.
BINS = 500

#: Heights a rectangle may have: the share of its time in which the lane is busy.
LEVELS = 8

MOST_LANES = 12

CLASSES = ("forward", "backward", "update", "other", "copy", "comm", "loading")
TEXTS = ("forward", "backward", "update", "no phase", "copy", "communication", "data loading")


@dataclass(frozen=True)
class _Lane:
    label: str
    rows: Ints


def picture(timeline: Timeline, step: int, longest_us: float) -> str:
    """A step of a timeline as SVG. `longest_us` is what the whole width stands for."""
    begin, end = (float(column[step]) for column in windows(timeline.graph, timeline.start_us, timeline.end_us))
    lanes, hidden = _lanes(timeline, begin, end)
    edges = begin + np.linspace(0.0, longest_us, BINS + 1)
    edges = np.append(edges[edges < end], end)
    top = 22
    parts = [_critical_lane(timeline, edges, begin, longest_us, top)]
    for place, lane in enumerate(lanes, start=1):
        parts.append(_lane(timeline, lane, edges, begin, longest_us, top + place * (LANE + GAP)))
    height = top + (len(lanes) + 1) * (LANE + GAP) + (16 if hidden else 0)
    ruler = axis(longest_us, end - begin, height)
    note = f'<text class="faint" x="{LABEL_WIDTH}" y="{height - 4}">{esc(hidden)}</text>' if hidden else ""
    label = f"Timeline of {esc(timeline.graph.steps[step].name)}"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{ruler}{"".join(parts)}{note}</svg>'


def _lanes(timeline: Timeline, begin: float, end: float) -> tuple[list[_Lane], str]:
    """Threads with something to show in the window: CPU, streams, channels, the busiest of each first."""
    graph = timeline.graph
    shown = (timeline.start_us < end) & (cpu_busy_until(graph, timeline.end_us) > begin) & (graph.duration_us > 0)
    load = np.bincount(graph.thread[shown], graph.duration_us[shown], len(graph.threads))
    order = [i for i in np.argsort(-load, kind="stable").tolist() if load[i] > 0]
    threads = sorted(order[:MOST_LANES], key=lambda i: (_rank(graph, i), -load[i]))
    by_thread = {i: np.flatnonzero(shown & (graph.thread == i)) for i in threads}
    hidden_count = len(order) - len(threads)
    note = f"{hidden_count} more threads and streams with less to do are not shown" if hidden_count else ""
    return [_Lane(_label(graph, i), by_thread[i]) for i in threads], note


def _rank(graph: TaskGraph, thread: int) -> int:
    return (ThreadKind.CPU, ThreadKind.STREAM, ThreadKind.CHANNEL).index(graph.threads[thread].kind)


def _label(graph: TaskGraph, index: int) -> str:
    thread = graph.threads[index]
    label = thread.label or f"thread {thread.number}"
    if graph.ranks:
        return f"rank {thread.process} {label}"[:24]
    several = len({t.device for t in graph.threads if t.kind is ThreadKind.STREAM}) > 1
    label = f"GPU {thread.device} {label}" if several and thread.kind is ThreadKind.STREAM else label
    label = label if len(label) <= 24 else label.removeprefix("thread ")
    return label if len(label) <= 24 else label[:23] + "…"


def _kinds(graph: TaskGraph, rows: Ints) -> Ints:
    """Position in :data:`CLASSES` of each task: its phase, unless its kind says more."""
    kind, phase = graph.kind[rows], graph.phase[rows]
    kinds = np.where(phase == Phase.NONE, 3, phase)
    kinds[np.isin(kind, (TaskKind.MEMCPY, TaskKind.MEMSET))] = 4
    kinds[kind == TaskKind.COMMUNICATION] = 5
    kinds[kind == TaskKind.DATA_LOADING] = 6
    return kinds


def kinds_used(graph: TaskGraph) -> set[str]:
    """The classes that any task of a graph has."""
    rows = np.flatnonzero(graph.duration_us > 0)
    return {CLASSES[kind] for kind in np.unique(_kinds(graph, rows)).tolist()}


def _lane(timeline: Timeline, lane: _Lane, edges: Floats, begin: float, longest_us: float, y: int) -> str:
    graph = timeline.graph
    kinds = _kinds(graph, lane.rows)
    start, end = timeline.start_us[lane.rows], cpu_busy_until(graph, timeline.end_us)[lane.rows]
    if not graph.on_cpu[lane.rows[0]]:
        end = timeline.end_us[lane.rows]
    busy = np.array(
        [Cover(start[kinds == k], end[kinds == k]).within(edges[:-1], edges[1:]) for k in range(len(CLASSES))]
    )
    drawn = _rectangles(busy, edges, begin, longest_us, y, CLASSES, TEXTS)
    rows, from_us, to_us = critical_segments(timeline)
    of_lane = np.isin(rows, lane.rows)
    critical = Cover(from_us[of_lane], to_us[of_lane]).within(edges[:-1], edges[1:])
    strip = _strip(critical, edges, begin, longest_us, y + LANE)
    return _frame(lane.label, edges, begin, longest_us, y) + drawn + strip


def _critical_lane(timeline: Timeline, edges: Floats, begin: float, longest_us: float, y: int) -> str:
    rows, from_us, to_us = critical_segments(timeline)
    kinds = resources(timeline.graph)[rows]
    busy = np.array(
        [Cover(from_us[kinds == k], to_us[kinds == k]).within(edges[:-1], edges[1:]) for k in range(len(Resource))]
    )
    texts = tuple(f"critical path: {resource.label}" for resource in Resource)
    drawn = _rectangles(busy, edges, begin, longest_us, y, RESOURCE_CLASSES, texts)
    return _frame("critical path", edges, begin, longest_us, y) + drawn


def _frame(label: str, edges: Floats, begin: float, longest_us: float, y: int) -> str:
    width = _x(edges[-1], begin, longest_us) - LABEL_WIDTH
    return (
        f'<rect class="lane" x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{LANE}"/>'
        f'<text x="{LABEL_WIDTH - 8}" y="{y + LANE / 2 + 4}" text-anchor="end">{esc(label)}</text>'
    )


def x_of(time_us: float, longest_us: float) -> float:
    """Where a time since the picture's begin is drawn."""
    return LABEL_WIDTH + (WIDTH - LABEL_WIDTH) * time_us / longest_us if longest_us else LABEL_WIDTH


def _x(time_us: float, begin: float, longest_us: float) -> float:
    return x_of(time_us - begin, longest_us)


def _rectangles(
    busy: Floats,
    edges: Floats,
    begin: float,
    longest_us: float,
    y: int,
    classes: tuple[str, ...],
    texts: tuple[str, ...],
) -> str:
    """Neighbouring pieces of time with the same main class and about the same load as one rectangle.

    Its colour is what most of the time goes to, its height the share of time that anything runs.
    """
    total = busy.sum(axis=0)
    length = np.diff(edges)
    share = np.minimum(total / np.where(length > 0, length, 1.0), 1.0)
    level = np.where(total > 0, np.maximum(np.ceil(share * LEVELS - 1e-9), 1), 0).astype(int)
    code = np.where(level > 0, busy.argmax(axis=0) * (LEVELS + 1) + level, 0)
    opens = np.flatnonzero(np.diff(code, prepend=-1))
    closes = np.append(opens[1:], len(code))[: len(opens)]
    drawn = []
    for first, last in zip(opens.tolist(), closes.tolist(), strict=True):
        if not code[first]:
            continue
        kind, height = int(code[first]) // (LEVELS + 1), int(level[first]) * LANE / LEVELS
        x, until = _x(edges[first], begin, longest_us), _x(edges[last], begin, longest_us)
        part = total[first:last].sum() / max(edges[last] - edges[first], 1e-9)
        when = f"{ms(edges[first] - begin)} to {ms(edges[last] - begin)} ms"
        tip = f"{texts[kind]}, {when}, {100 * min(part, 1.0):.0f} % busy"
        drawn.append(
            f'<rect class="{classes[kind]}" x="{x:.1f}" y="{y + LANE - height:.1f}" width="{max(until - x, 0.4):.1f}" '
            f'height="{height:.1f}"><title>{esc(tip)}</title></rect>'
        )
    return "".join(drawn)


def _strip(critical: Floats, edges: Floats, begin: float, longest_us: float, y: int) -> str:
    """A red line below a lane where the critical path runs on it for at least half of the time."""
    on = critical > 0.5 * np.diff(edges)
    bounds = np.flatnonzero(np.diff(on, prepend=False, append=False))
    drawn = []
    for first, last in zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True):
        x, until = _x(edges[first], begin, longest_us), _x(edges[last], begin, longest_us)
        drawn.append(f'<rect class="critical" x="{x:.1f}" y="{y + 1}" width="{until - x:.1f}" height="3"/>')
    return "".join(drawn)


def axis(longest_us: float, length_us: float, height: int) -> str:
    """Ticks in milliseconds, about ten of them."""
    if longest_us <= 0:
        return ""
    rough = longest_us / 10
    power = 10.0 ** np.floor(np.log10(rough))
    every = float(next(power * step for step in (1, 2, 5, 10) if power * step >= rough))
    parts = []
    ticks = np.arange(0.0, longest_us * 1.0001, every)
    for tick in ticks.tolist():
        x = _x(tick, 0.0, longest_us)
        anchor = "end" if x > WIDTH - 25 else "middle"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height}"/>')
        unit = " ms" if tick == 0 else ""
        parts.append(f'<text class="faint" x="{x:.1f}" y="11" text-anchor="{anchor}">{tick / 1000:g}{unit}</text>')
    end = _x(length_us, 0.0, longest_us)
    parts.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="16" y2="{height}" stroke="currentColor" stroke-width="1"/>')
    return "".join(parts)
