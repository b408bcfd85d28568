"""The picture of a comparison: how each rival's time stands to ours, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cpu.results import OperatorResult, Results
from bench.cpu.tables import COLUMNS
from bench.pictures import new_figure, save
from bench.timed.statistics import Spread, geometric_mean

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:gray")
_COLUMNS = 3
_TICKS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
#: Where all ratios lie within a factor of two.
_FINE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2)


def draw_ratios(results: Results, path: Path) -> bool:
    """Draw every rival's time over ours into a PNG, a panel per rival, our worst operator on top of each.

    Returns:
        False, and draws nothing, where ours or all rivals were struck out everywhere.
    """
    panels = {
        name: found
        for name, who in COLUMNS.items()
        if (found := [(one, ratio) for one in results.operators if (ratio := one.ratio(*who)) is not None])
    }
    if not panels:
        return False
    # Panels with as many operators side by side.
    ordered = sorted(panels, key=lambda name: -len(panels[name]))
    rows = [ordered[start : start + _COLUMNS] for start in range(0, len(ordered), _COLUMNS)]
    heights = [1.4 + 0.22 * len(panels[row[0]]) for row in rows]
    figure = new_figure(4.4 * len(rows[0]), 0.8 + sum(heights))
    grid = figure.add_gridspec(len(rows), len(rows[0]), height_ratios=heights)
    for line, row in enumerate(rows):
        for column, name in enumerate(row):
            found = sorted(panels[name], key=lambda pair: pair[1].median, reverse=True)
            _panel(figure.add_subplot(grid[line, column]), name, found)
    machine = results.machine
    figure.suptitle(f"{machine.title} ({machine.llvm}), {machine.threads} threads, {results.started[:10]}")
    figure.supxlabel("their time / ours, quartiles as lines (right of 1 ours is faster)", fontsize=10)
    save(figure, path)
    return True


def _panel(axes: Any, name: str, found: Sequence[tuple[OperatorResult, Spread]]) -> None:
    colour = _COLOURS[list(COLUMNS).index(name)]
    places = range(len(found))
    medians = [ratio.median for _, ratio in found]
    reach = [[ratio.median - ratio.low for _, ratio in found], [ratio.high - ratio.median for _, ratio in found]]
    axes.errorbar(medians, places, xerr=reach, fmt="o", color=colour, markersize=4, capsize=2)
    axes.axvline(1, color="black", linewidth=0.8)
    mean = geometric_mean(medians)
    assert mean is not None
    axes.axvline(mean, color=colour, linestyle="--", linewidth=1.2)
    axes.set_yticks(places, [one.name for one, _ in found], fontsize=7)
    axes.set_ylim(-0.7, len(found) - 0.3)
    axes.set_xscale("log")
    low, high = min(1.0, *(ratio.low for _, ratio in found)) / 1.1, max(1.0, *(ratio.high for _, ratio in found)) * 1.1
    axes.set_xlim(low, high)
    ticks = [tick for tick in (_FINE_TICKS if high / low <= 2 else _TICKS) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"{name}\ngeometric mean {mean:.2f} of {len(found)}", fontsize=10)
