"""Pictures of a harvest: ours against the others, predictions against measurements, what-ifs against ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.comparison import duels
from bench.gpu.results import Results
from bench.gpu.whatif import WhatIf
from bench.pictures import new_figure, save

_RIVALS = (("library", "tab:blue"), ("compile", "tab:orange"), ("triton", "tab:green"))


def draw_all(results: Results, answers: Sequence[WhatIf], out: Path) -> list[Path]:
    """Draw what there is data for; returns the pictures."""
    drawn = []
    for name, figure in (
        ("operators", draw_operators(results)),
        ("predictions", draw_predictions(results)),
        ("whatifs", draw_what_ifs(answers)),
    ):
        if figure is not None:
            path = out / f"{name}.png"
            save(figure, path)
            drawn.append(path)
    return drawn


def draw_operators(results: Results) -> Any:
    """Their time over ours per operator, our worst first, a line per rival and precision; None if there is none."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    empty = True
    for precision, style in (("float32", "-"), ("float16", "--")):
        for rival, colour in _RIVALS:
            ratios = sorted(one.ratio for one in duels(results, rival, precision))
            if ratios:
                empty = False
                share = [100 * (i + 0.5) / len(ratios) for i in range(len(ratios))]
                label = f"{rival}, {precision} ({len(ratios)})"
                axes.plot(share, ratios, style, color=colour, marker=".", label=label)
    if empty:
        return None
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("operators, per cent")
    axes.set_ylabel("their time / ours (above 1 ours is faster)")
    axes.set_title(results.board)
    axes.legend()
    return figure


def draw_predictions(results: Results) -> Any:
    """Predicted against measured time of every kernel; None if there is none."""
    by_op: dict[str, list[tuple[float, float]]] = {}
    for profile in results.profile:
        pairs = [(one.cold.median, one.predicted_seconds) for one in profile.kernels if one.cold is not None]
        by_op.setdefault(profile.op, []).extend(pairs)
    points = [pair for pairs in by_op.values() for pair in pairs]
    if not points:
        return None
    figure = new_figure(6.5, 6)
    axes = figure.subplots()
    for op, pairs in by_op.items():
        if pairs:
            axes.scatter(*zip(*pairs, strict=True), s=8, label=op)
    low, high = min(map(min, points)) / 2, max(map(max, points)) * 2
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=results.board)
    axes.set_xlabel("measured, s")
    axes.set_ylabel("predicted, s")
    axes.legend(fontsize=8)
    return figure


def draw_what_ifs(answers: Sequence[WhatIf]) -> Any:
    """Measured and predicted step as bars, the baseline as a line across; None if nothing was predicted."""
    shown = [one for one in answers if one.predicted is not None]
    if not shown:
        return None
    figure = new_figure(max(6, 0.7 * len(shown) + 2), 5)
    axes = figure.subplots()
    for place, one in enumerate(shown):
        axes.bar(place - 0.2, one.measured / one.baseline, 0.4, color="tab:blue", label="measured" if not place else "")
        axes.bar(
            place + 0.2,
            (one.predicted or 0) / one.baseline,
            0.4,
            color="tab:orange",
            label="" if place else "predicted",
        )
    axes.axhline(1, color="black", linewidth=0.8)
    names = [f"{one.model} {one.batch}\n{one.variant}" for one in shown]
    axes.set_xticks(range(len(shown)), names, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("step / baseline's step")
    axes.legend()
    return figure
