"""Stacked areas as inline SVG of bounded size: what makes up a sum that changes over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daydream.report.picture import LABEL_WIDTH, WIDTH, axis, x_of
from daydream.report.style import esc
from daydream.trace.trace import Floats, Ints

#: Units of the drawing.
HEIGHT, TOP, BOTTOM = 220, 22, 6

#: Pieces of time; each is drawn as it is when the sum is largest in it.
BINS = 500


@dataclass(frozen=True, eq=False)
class Area:
    """One part of the sum.

    Attributes:
        text: what it is.
        css: class of its colour.
        amounts: behind each change.
    """

    text: str
    css: str
    amounts: Ints


def stacked(time_us: Floats, areas: Sequence[Area], begin_us: float, end_us: float, label: str) -> str:
    """Areas on top of each other between two times, as SVG; bytes are written in MB.

    Args:
        time_us: when the amounts change, ascending; the first holds from the begin.
        areas: the lowest first.
        begin_us, end_us: the picture's edges.
        label: what is shown, for those who do not see it.
    """
    edges, rows = _pieces(
        time_us, sum((area.amounts for area in areas), np.zeros(len(time_us), np.int64)), begin_us, end_us
    )
    amounts = np.array([area.amounts[rows] for area in areas]).reshape(len(areas), len(rows))
    tops = np.cumsum(amounts, axis=0)
    most = float(tops[-1].max()) if tops.size else 0.0
    length = end_us - begin_us
    x = [x_of(edge - begin_us, length) for edge in edges.tolist()]
    drawn = []
    floor = np.zeros(len(rows))
    for area, top, amount in zip(areas, tops, amounts, strict=True):
        if most and amount.any():
            outline = [*_steps(x, top / most), *reversed(_steps(x, floor / most))]
            points = " ".join(f"{px:.1f},{py:.1f}" for px, py in outline)
            tip = f"{area.text}: {amount[tops[-1].argmax()] / 1e6:.1f} MB at the peak, {amount.max() / 1e6:.1f} at most"
            drawn.append(f'<polygon class="{area.css}" points="{points}"><title>{esc(tip)}</title></polygon>')
        floor = top
    height = TOP + HEIGHT + BOTTOM
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{esc(label)}">'
        f"{axis(length, length, height)}{_scale(most)}{''.join(drawn)}</svg>"
    )


def _pieces(time_us: Floats, total: Ints, begin_us: float, end_us: float) -> tuple[Floats, Ints]:
    """Edges of pieces of time, and for each piece the change behind which the sum is largest in it."""
    inside = np.flatnonzero((time_us > begin_us) & (time_us < end_us))
    if not len(time_us) or end_us <= begin_us:
        return np.array([begin_us, end_us]), np.empty(0, np.int64)
    edges = np.linspace(begin_us, end_us, BINS + 1) if len(inside) > BINS else np.append(time_us[inside], end_us)
    edges = np.unique(np.append(begin_us, edges))
    # A piece begins with what the last change before it left.
    first = np.maximum(np.searchsorted(time_us, edges[:-1], side="right") - 1, 0)
    last = np.maximum(np.searchsorted(time_us, edges[1:], side="left"), first + 1)
    pieces = zip(first.tolist(), last.tolist(), strict=True)
    return edges, np.array([begin + int(total[begin:end].argmax()) for begin, end in pieces], np.int64)


def _steps(x: Sequence[float], share: Floats) -> list[tuple[float, float]]:
    """The upper edge of an area: level within each piece."""
    y = (TOP + HEIGHT * (1 - share)).tolist()
    return [(at, y[place]) for place in range(len(y)) for at in (x[place], x[place + 1])]


def _scale(most: float) -> str:
    """Lines at round amounts, about four of them."""
    if most <= 0:
        return ""
    rough = most / 4
    power = 10.0 ** np.floor(np.log10(rough))
    every = float(next(power * step for step in (1, 2, 5, 10) if power * step >= rough))
    parts = []
    for amount in np.arange(0.0, most * 1.0001, every).tolist():
        y = TOP + HEIGHT * (1 - amount / most)
        parts.append(f'<line class="grid" x1="{LABEL_WIDTH}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LABEL_WIDTH - 8}" y="{y + 4:.1f}" text-anchor="end">{amount / 1e6:g} MB</text>')
    return "".join(parts)
