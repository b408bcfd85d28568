"""A plan as a picture: when gradients are ready and buckets on the network, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from daydream.optimize.exchange import Ends
from daydream.optimize.plan import buckets_of
from daydream.optimize.strategies import Optimized, Variant
from hal.support.errors import InputError

#: Colours of computation, of what it hides of the network's time, and of what it does not.
COMPUTATION, HIDDEN, EXPOSED = "#db8424", "#3b7dc9", "#c0392b"


def write_picture(answer: Optimized, title: str, path: Path) -> None:
    """Draws one step as it is and one with the plan, from the first gradient on.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), dpi=144)
    figure.set_layout_engine("constrained")
    panel: Any = figure.subplots()
    lists = (("as it is", answer.before, answer.before.usual), ("plan", answer.best, answer.best.best))
    for place, (_, variant, ends) in enumerate(lists):
        _draw(panel, variant, ends, 2.6 * place)
    labels = [f"{what}, {name}" for name, _, _ in lists for what in ("gradients", "network")]
    panel.set_yticks([2.6 * place + line for place in range(2) for line in (0, 1)], labels)
    panel.invert_yaxis()
    panel.set_xlabel("ms from the step's beginning; red: what no computation hides")
    panel.set_title(title, loc="left", fontsize=10)
    panel.spines[["top", "right", "left"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror or error}") from None


def _draw(panel: Any, variant: Variant, ends: Ends, line: float) -> None:
    """One list: ticks where gradients are ready, a bar for every bucket, the end of the step."""
    step = variant.step
    ready = (step.ready - step.begin) / 1e3
    panel.vlines(ready, line - 0.35, line + 0.35, color=COMPUTATION, linewidth=0.8)
    computed = float(ready.max())
    for bucket in buckets_of(variant.exchange, step, ends):
        start, end = bucket.start_us / 1e3, bucket.end_us / 1e3
        shown = min(max(computed, start), end)
        for begin, finish, colour in ((start, shown, HIDDEN), (shown, end, EXPOSED)):
            if finish > begin:
                panel.barh(line + 1, finish - begin, left=begin, height=0.7, color=colour, edgecolor="white", lw=0.7)
    length = step.replay(ends) / 1e3
    panel.vlines(length, line - 0.5, line + 1.5, color="#222", linewidth=1.2)
    panel.text(length, line + 0.5, f" {length:.2f} ms", va="center", fontsize=9, color="#222")
