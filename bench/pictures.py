"""Figures without a display, written whole or not at all."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
