"""The merged job as one HTML file: tiles, a lane for every rank, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from daydream.graph.graph import Phase, TaskKind
from daydream.graph.simulate import Timeline
from daydream.ranks.report import Findings, because, conclusions
from daydream.ranks.skew import Attended, attended
from daydream.report.breakdown import Cover, windows
from daydream.report.picture import BINS, GAP, LABEL_WIDTH, LANE, WIDTH, axis, x_of
from daydream.report.style import document, esc, legend, ms, percent, table, tile
from daydream.trace.trace import Floats, Ints

#: Ranks that get a lane, those that hold the others up most and as many of the first.
MOST_LANES = 24

#: Class and text of what a rank does.
_WORK = (("forward", "forward"), ("backward", "backward"), ("update", "update"), ("other", "other work"))
_COMMUNICATION = (("idle", "waiting for ranks"), ("comm", "moving data"))


def write_page(path: Path, findings: Findings, rows: int) -> None:
    """Writes the page; it appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    from hal.support.atomic import write_atomic

    write_atomic(path, page(findings, rows))


def page(findings: Findings, rows: int) -> str:
    """The page. All text from traces is escaped."""
    merged = findings.merged
    title = f"Daydream: {len(merged.graph.ranks)} ranks"
    sections = [
        _tiles(findings),
        f"<ul>{''.join(f'<li>{esc(sentence)}</li>' for sentence in conclusions(findings))}</ul>",
        _timeline(findings),
        _ranks(findings, rows),
        _groups(findings, rows),
        _clocks(findings, rows),
    ]
    head = f'<h1>{title}</h1><p class="faint">{esc(_subtitle(findings))}</p>'
    return document(title, head + "".join(sections))


def _subtitle(findings: Findings) -> str:
    merged = findings.merged
    hosts = len(merged.clocks.hosts)
    names = [merged.graph.steps[index].name for index in findings.steps]
    return (
        f"{merged.paths[0].parent} · {hosts} clock{'' if hosts == 1 else 's'} · {merged.meetings.count} collectives · "
        f"{len(merged.graph):,} tasks · {names[0] if len(names) == 1 else f'mean of {len(names)} steps'}"
    )


def _tiles(findings: Findings) -> str:
    communication = sum(group.moving_us + group.waited_us for group in findings.groups)
    waiting = sum(group.waited_us for group in findings.groups)
    exposed = sum(group.exposed_us for group in findings.groups)
    late = findings.stragglers
    error = f"replayed within {percent(findings.error)}"
    tiles = [
        tile("step", f"{ms(findings.step_us)} ms", error),
        tile("communication", f"{ms(communication)} ms", f"of it {ms(waiting)} ms waiting for ranks"),
        tile("exposed", f"{ms(exposed)} ms", f"{percent(exposed / communication)} of it" if communication else ""),
        tile("even load", f"{ms(findings.even_us)} ms", f"{ms(findings.step_us - findings.even_us)} ms less"),
        tile(
            "holds up most",
            f"rank {late[0].rank}" if late else "none",
            f"{ms(late[0].held_up_us)} ms" if late else "",
        ),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


# The picture


def _timeline(findings: Findings) -> str:
    step = findings.steps[len(findings.steps) // 2]
    graph = findings.timeline.graph
    drawn = legend([*_WORK, *_COMMUNICATION])
    return f"<h2>{esc(graph.steps[step].name)} on every rank</h2>{picture(findings, step)}{drawn}"


def picture(findings: Findings, step: int) -> str:
    """A step as SVG: for every rank what it works on, above how it waits for others and moves data."""
    timeline = findings.timeline
    begin, end = (float(column[step]) for column in windows(timeline.graph, timeline.start_us, timeline.end_us))
    edges = np.linspace(begin, end, BINS + 1)
    chosen = _chosen(findings)
    came = attended(timeline)
    top = 22
    parts = []
    for place, index in enumerate(chosen):
        parts.append(_lane(timeline, index, came, edges, top + place * (LANE + GAP)))
    height = top + len(chosen) * (LANE + GAP)
    hidden_count = len(findings.ranks) - len(chosen)
    note = f'<p class="faint">{hidden_count} ranks more are not shown</p>' if hidden_count else ""
    ruler = axis(end - begin, end - begin, height)
    label = f"Timeline of {esc(timeline.graph.steps[step].name)}"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{ruler}{"".join(parts)}</svg>{note}'


def _chosen(findings: Findings) -> list[int]:
    """Indices of the ranks that get a lane, in order."""
    count = len(findings.ranks)
    late = sorted(range(count), key=lambda index: -findings.ranks[index].held_up_us)[: MOST_LANES // 2]
    return sorted({*late, *range(min(count, MOST_LANES - len(late)))})


def _lane(timeline: Timeline, index: int, came: Attended, edges: Floats, y: int) -> str:
    graph = timeline.graph
    rank = graph.ranks[index]
    is_shown = np.array([t.process == rank and not t.is_meeting for t in graph.threads], np.bool_)[graph.thread]
    is_shown &= (timeline.start_us < edges[-1]) & (timeline.end_us > edges[0]) & (graph.kind != TaskKind.COMMUNICATION)
    rows = np.flatnonzero(is_shown & graph.on_gpu)
    rows = rows if len(rows) else np.flatnonzero(is_shown & graph.on_cpu & graph.working)
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.NONE)
    work = [_share(timeline, rows[graph.phase[rows] == phase], edges) for phase in phases]
    of_rank = came.rank == index
    waits = Cover(came.arrived_us[of_rank], came.begun_us[of_rank]) if of_rank.any() else None
    moves = Cover(came.begun_us[of_rank], came.ended_us[of_rank]) if of_rank.any() else None
    talk = [cover.within(edges[:-1], edges[1:]) if cover else np.zeros(len(edges) - 1) for cover in (waits, moves)]
    upper = _rectangles(work, _WORK, edges, y, LANE * 0.6)
    lower = _rectangles([np.nan_to_num(part) for part in talk], _COMMUNICATION, edges, y + LANE * 0.6, LANE * 0.4)
    frame = f'<rect class="lane" x="{LABEL_WIDTH}" y="{y}" width="{WIDTH - LABEL_WIDTH}" height="{LANE}"/>'
    label = f'<text x="{LABEL_WIDTH - 8}" y="{y + LANE / 2 + 4}" text-anchor="end">rank {rank}</text>'
    return f"{frame}{label}{upper}{lower}"


def _share(timeline: Timeline, rows: Ints, edges: Floats) -> Floats:
    return Cover(timeline.start_us[rows], timeline.end_us[rows]).within(edges[:-1], edges[1:])


def _rectangles(
    busy: Sequence[Floats], kinds: Sequence[tuple[str, str]], edges: Floats, y: float, height: float
) -> str:
    """Adjacent intervals with the same longest activity, as one rectangle each."""
    amounts = np.array(busy)
    length = np.diff(edges)
    code = np.where(amounts.sum(axis=0) > 0.3 * length, amounts.argmax(axis=0), -1)
    opens = np.flatnonzero(np.diff(code, prepend=-2))
    closes = np.append(opens[1:], len(code))
    drawn = []
    for first, last in zip(opens.tolist(), closes.tolist(), strict=True):
        if code[first] < 0:
            continue
        length_us = float(edges[-1] - edges[0])
        x, until = x_of(float(edges[first] - edges[0]), length_us), x_of(float(edges[last] - edges[0]), length_us)
        kind, text = kinds[int(code[first])]
        tip = f"{text}, {ms(edges[first] - edges[0])} to {ms(edges[last] - edges[0])} ms"
        drawn.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{until - x:.1f}" height="{height:.1f}">'
            f"<title>{esc(tip)}</title></rect>"
        )
    return "".join(drawn)


# Tables


def _ranks(findings: Findings, rows: int) -> str:
    shown = sorted(findings.ranks, key=lambda rank: -rank.held_up_us)[:rows]
    cells = [
        (
            str(rank.rank), ms(rank.step_us), ms(rank.work_us), ms(rank.moving_us), ms(rank.waited_us),
            percent(rank.last), ms(rank.held_up_us), because(findings, rank),
        )
        for rank in shown
    ]  # fmt: skip
    columns = ("rank", "step", "works", "moves data", "waits", "last to come", "holds up", "because")
    return f"<h2>Ranks, ms per step</h2>{table(columns, cells)}"


def _groups(findings: Findings, rows: int) -> str:
    cells = [
        (
            esc(group.name), str(group.ranks), f"{group.count:g}", f"{group.bytes / 1e6:.1f}", ms(group.moving_us),
            ms(group.waited_us), ms(group.exposed_us), percent(group.exposed), ms(group.skew_us),
        )
        for group in findings.groups[:rows]
    ]  # fmt: skip
    columns = ("group", "ranks", "collectives", "MB", "moving", "waiting", "exposed", "of it", "skew")
    return f"<h2>Process groups, ms per step and rank</h2>{table(columns, cells)}"


def _clocks(findings: Findings, rows: int) -> str:
    clocks = findings.merged.clocks
    if len(clocks.hosts) < 2:
        return ""
    cells = [
        (
            esc(host), f"{clocks.offset_us[index]:.1f}", f"{clocks.drift[index] * 1e6:.1f}",
            f"{clocks.jitter_us[index]:.1f}",
        )
        for index, host in enumerate(clocks.hosts[:rows])
    ]  # fmt: skip
    return f"<h2>Clocks</h2>{table(('host', 'behind, µs', 'drift, µs/s', 'jitter, µs'), cells)}"
