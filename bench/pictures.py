"""Figures without a display, written whole or not at all."""

from __future__ import annotations

import io
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
    """Write a figure as PNG."""
    from hal.support.atomic import write_atomic

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomic(path, buffer.getvalue())
