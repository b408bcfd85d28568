"""A report of a serving as a page: what users see, and throughput of a board against that of a user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from daydream.report.style import document, esc, table, tile
from daydream.serving.answer import columns, configuration, line
from daydream.serving.search import SearchOutcome
from daydream.serving.served import Served
from hal.support.atomic import write_atomic

Point = tuple[float, float]

#: Pixels of a picture and of its margins; spaces between ticks, about.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM, _TICKS = 1080, 420, 70, 24, 24, 40, 5

#: Colours of kinds of boards, by their names on a page.
_COLOURS = ("forward", "backward", "update", "comm", "copy", "loading", "other")

#: Points of a curve of percentiles.
_POINTS = 101


def write_page(path: Path, each: Served | SearchOutcome, percentile: float = 90.0) -> None:
    """Writes the report of a simulation, or of a search.

    Raises:
        OSError: the file cannot be written.
    """
    body = _searched(each, percentile) if isinstance(each, SearchOutcome) else _served(each)
    title = (each.best[0] if isinstance(each, SearchOutcome) else each).costs.model.title
    write_atomic(path, document(f"Serving {esc(title)}", f"<h1>Serving {esc(title)}</h1>{body}"))


def _served(each: Served) -> str:
    record = each.record()
    tiles = "".join((
        tile("tokens/s", f"{each.tokens_per_second:,.0f}", f"{each.tokens_per_second / each.boards:,.0f} a board"),
        tile("first token", f"{1e3 * float(np.median(each.ttft)):,.0f} ms", "median"),
        tile("further tokens", f"{1e3 * float(np.median(each.tpot)):,.1f} ms", "median of the requests"),
        tile("boards busy", f"{100 * record['busy_share']:.0f} %", f"{record['preemptions']:,} preemptions"),
    ))  # fmt: skip
    share = np.linspace(0, 100, _POINTS)
    curves = []
    for name, times in (("first token", each.ttft), ("further tokens", each.tpot)):
        if len(times):
            points = [(float(np.percentile(times, place)) * 1e3, float(place)) for place in share]
            curves.append(_plot([_Curve(name, points)], f"{name}, ms", "% of requests"))
    assumed = "".join(f"<li>{esc(sentence)}</li>" for sentence in each.assumed)
    return (
        f'<p class="faint">{esc(configuration(each))}</p><div class="tiles">{tiles}</div>'
        f"<h2>Requests by their times</h2>{''.join(curves)}<h2>Assumed</h2><ul>{assumed}</ul>"
    )


def _searched(outcome: SearchOutcome, percentile: float) -> str:
    rows = [[esc(cell) for cell in line(outcome, each, percentile)] for each in outcome.best]
    boards = dict.fromkeys(each.costs.device.name for each in outcome.tried)
    curves = [
        _Curve(
            name, [_place(each) for each in outcome.frontier(name)],
            [(_place(each), configuration(each)) for each in outcome.tried if each.costs.device.name == name],
        )
        for name in boards
    ]  # fmt: skip
    picture = _plot(curves, "tokens/s a user", "tokens/s a board")
    assumed = "".join(f"<li>{esc(sentence)}</li>" for sentence in outcome.best[0].assumed)
    return (
        f"<p>{len(outcome.tried)} configurations were simulated, and {len(outcome.best)} keep the promise.</p>"
        f"{table(columns(outcome, percentile), rows)}<h2>Boards against users</h2>"
        f'<p class="faint small">Every point is a configuration; lines join those of a kind of board '
        f"that no other one of it beats in both.</p>{picture}"
        f"<h2>Assumed</h2><ul>{assumed}</ul>"
    )


def _place(each: Served) -> Point:
    return each.user_tokens_per_second, each.tokens_per_second / each.boards


class _Curve(NamedTuple):
    """A line of a picture, its name, and what points of the same colour are."""

    name: str
    points: Sequence[Point]
    others: Sequence[tuple[Point, str]] = ()


def _plot(curves: Sequence[_Curve], across: str, up: str) -> str:
    """Curves and points as SVG, both axes from nothing."""
    everything = [point for curve in curves for point in (*curve.points, *(point for point, _ in curve.others))]
    steps = [_round_step(max(point[axis] for point in everything) / _TICKS) for axis in (0, 1)]
    most = [step * math.ceil(max(point[axis] for point in everything) / step) for axis, step in enumerate(steps)]

    def place(point: Point) -> Point:
        x = _LEFT + point[0] / most[0] * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - point[1] / most[1] * (_HEIGHT - _BOTTOM - _TOP)

    parts = []
    for tick in np.arange(0, most[1] + steps[1] / 2, steps[1]).tolist():
        _, y = place((0.0, tick))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="faint" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    for tick in np.arange(0, most[0] + steps[0] / 2, steps[0]).tolist():
        below = f'x="{place((tick, 0.0))[0]:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle"'
        parts.append(f'<text class="faint" {below}>{tick:,g}</text>')
    for number, curve in enumerate(curves):
        colour = f"var(--{_COLOURS[number % len(_COLOURS)]})"
        for point, name in curve.others:
            x, y = place(point)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"><title>{esc(name)}</title></circle>'
            )
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, curve.points))
        parts.append(f'<polyline points="{path}" style="fill:none;stroke:{colour};stroke-width:2"/>')
        if len(curves) > 1:
            parts.append(
                f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 16 * (number + 1)}" text-anchor="end" style="fill:{colour}">'
                f"{esc(curve.name)}</text>"
            )
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{esc(across)}</text>')
    parts.append(f'<text x="4" y="12">{esc(up)}</text>')
    label = f"{esc(up)} by {esc(across)}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that is as large as a step between ticks.

    >>> _round_step(0.0), _round_step(109.0), _round_step(0.3), _round_step(969.0)
    (1.0, 200.0, 0.5, 1000.0)
    """
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(float(f"{step * power:g}") for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
