"""A report of a serving as a page: what users see, and throughput of a board against that of a user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from daydream.report.style import document, esc, table, tile
from daydream.serving.answer import columns, configuration, line
from daydream.serving.search import SearchOutcome
from daydream.serving.served import Served
from hal.support.atomic import write_atomic

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1080, 420, 70, 40

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
            curves.append(_plot([points], f"{name}, ms", "% of requests"))
    assumed = "".join(f"<li>{esc(sentence)}</li>" for sentence in each.assumed)
    return (
        f'<p class="faint">{esc(configuration(each))}</p><div class="tiles">{tiles}</div>'
        f"<h2>Requests by their times</h2>{''.join(curves)}<h2>Assumed</h2><ul>{assumed}</ul>"
    )


def _searched(outcome: SearchOutcome, percentile: float) -> str:
    rows = [[esc(cell) for cell in line(outcome, each, percentile)] for each in outcome.best]
    tried = [(each.user_tokens_per_second, each.tokens_per_second / each.boards) for each in outcome.tried]
    front = [(each.user_tokens_per_second, each.tokens_per_second / each.boards) for each in outcome.frontier]
    picture = _plot([front], "tokens/s a user", "tokens/s a board", tried)
    assumed = "".join(f"<li>{esc(sentence)}</li>" for sentence in outcome.best[0].assumed)
    return (
        f"<p>{len(outcome.tried)} configurations were simulated, and {len(outcome.best)} keep the promise.</p>"
        f"{table(columns(outcome, percentile), rows)}<h2>Boards against users</h2>{picture}"
        f"<h2>Assumed</h2><ul>{assumed}</ul>"
    )


def _plot(
    curves: Sequence[Sequence[tuple[float, float]]], across: str, up: str, points: Sequence[tuple[float, float]] = (),
) -> str:  # fmt: skip
    """Curves and points as SVG, both axes from nothing."""
    everything = [*(point for curve in curves for point in curve), *points]
    widest, highest = (max(point[axis] for point in everything) or 1.0 for axis in (0, 1))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + point[0] / widest * (_WIDTH - _LEFT - 10)
        return x, _HEIGHT - _BOTTOM - point[1] / highest * (_HEIGHT - _BOTTOM - 14)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place((share * widest, share * highest))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="faint" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * highest:,.4g}</text>'
        )
        below = f'x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle"'
        parts.append(f'<text class="faint" {below}>{share * widest:,.4g}</text>')
    for x, y in map(place, points):
        parts.append(f'<circle class="other" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    for curve in curves:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, curve))
        parts.append(f'<polyline points="{path}" fill="none" stroke="var(--forward)" stroke-width="2"/>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{esc(across)}</text>')
    parts.append(f'<text x="4" y="12">{esc(up)}</text>')
    label = f"{esc(up)} by {esc(across)}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
