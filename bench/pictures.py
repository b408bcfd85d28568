"""Figures without a display, written whole or not at all."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Points of a label in a panel; more only blacken it.
MOST_POINTS = 4000

#: Measured and predicted seconds, one for one, by label.
Groups = Mapping[str, tuple[Any, Any]]


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches. (pyplot would keep it.)"""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, into a folder that is made where there is none."""
    from hal.support.atomic import write_atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomic(path, buffer.getvalue())


def draw_equality(panel: Any, times: Sequence[float], factor: float = 2.0) -> None:
    """Draw where predicted times equal measured ones and where they are off by a factor; the same range both ways.

    Args:
        panel: axes with logarithmic scales.
        times: all that are shown, measured and predicted.
        factor: of the dashed lines.
    """
    # Whole decades: ticks in between would be unreadable.
    ends = [10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))]
    panel.plot(ends, ends, color="black", linewidth=1, label="predicted = measured")
    for ratio in (factor, 1 / factor):
        panel.plot(ends, [ratio * end for end in ends], color="grey", linewidth=0.8, linestyle="--")
    panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    panel.grid(alpha=0.25)


def draw_comparison(
    path: Path, title: str, panels: Mapping[str, Groups], *, columns: int = 3, unit: str = "ms", factor: float = 2.0
) -> None:
    """Predicted against measured times as a PNG: a panel per title, a colour per label; infinite ones are left out.

    Args:
        path: of the picture.
        title: of the whole.
        panels: groups of points by the panel's title.
        columns: panels next to one another at most.
        unit: of the axes, ``ms`` or ``s``.
        factor: of the dashed lines.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.6 * columns, 4.5 * rows + 0.4)
    axes: list[Any] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    chance = np.random.default_rng(0)
    for panel, (name, groups) in zip(axes, panels.items(), strict=False):
        ends: list[float] = []
        for number, (label, pair) in enumerate(groups.items()):
            points = {"ms": 1e3, "s": 1.0}[unit] * np.array(pair, np.float64)
            points = points[:, np.isfinite(points).all(axis=0)]
            ends += [points.min(), points.max()]
            shown = points[:, chance.permutation(points.shape[1])[:MOST_POINTS]]
            panel.plot(*shown, ".", color=f"C{number}", markersize=3, alpha=0.4, label=label, rasterized=True)
        draw_equality(panel, ends, factor)
        panel.set_xlabel(f"measured, {unit}")
        panel.set_title(name, fontsize=11)
        panel.legend(loc="upper left", fontsize=8, frameon=False, markerscale=3)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    for row in range(rows):
        axes[row * columns].set_ylabel(f"predicted, {unit}")
    figure.suptitle(title)
    save(figure, path)
