"""The library models against measured 16-bit kernels of A100, H100, L40S and B200 (AIConfigurator's database).

Errors are ``|predicted - measured| / measured``. The model is compared with a roofline of two numbers a board.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.tensor_core_rows import BOARDS, KINDS, Calls, Kind, read_calls
from bench.pictures import new_figure, save
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.library import library_times
from sokoban.schedule.table import Floats

#: Ends of the classes of calls by measured length, in seconds, and how tables call them.
LENGTHS = (5e-6, 20e-6, 200e-6, 2e-3)
LENGTH_NAMES = ("< 5 µs", "5 to 20 µs", "20 to 200 µs", "0.2 to 2 ms", "> 2 ms")

#: Between these quantiles lie four of five predictions.
FEW, MOST = 0.1, 0.9

#: Calls from this length on have an error of their own: below it the gaps between kernels decide.
LONG = 20e-6

#: Points of a panel; more only blacken it.
MOST_POINTS = 3000


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """The calls of one kind on one board, in seconds, an entry per call.

    Attributes:
        predicted: by the model; None where it has no such operator.
        roofline: by two numbers of the board.
    """

    kind: Kind
    board: str
    measured: Floats
    predicted: Floats | None
    roofline: Floats

    @property
    def device(self) -> DeviceSpec:
        """The board's spec."""
        return load_device(BOARDS[self.board])

    def errors(self, seconds: Floats) -> Floats:
        """Relative errors of predictions, too long ones positive."""
        return (seconds - self.measured) / self.measured

    def mean_error(self, seconds: Floats | None) -> float | None:
        """The mean of the errors without their signs; None without predictions."""
        return None if seconds is None else float(np.abs(self.errors(seconds)).mean())

    @property
    def long_error(self) -> float | None:
        """The mean error of calls of :data:`LONG` and more; None without such, or without predictions."""
        long = self.measured >= LONG
        if self.predicted is None or not long.any():
            return None
        return float(np.abs(self.errors(self.predicted))[long].mean())

    def signed_by_length(self, seconds: Floats) -> list[float | None]:
        """The mean error of every class of lengths; None where it has no calls."""
        errors, classes = self.errors(seconds), np.digitize(self.measured, LENGTHS)
        return [float(errors[classes == each].mean()) if (classes == each).any() else None for each in range(5)]


def compare(calls: Calls) -> Comparison:
    """The model's figures for measured calls."""
    return Comparison(
        kind=calls.kind,
        board=calls.board,
        measured=calls.seconds,
        predicted=_predicted(calls),
        roofline=calls.roofline(),
    )


def _predicted(calls: Calls) -> Floats | None:
    """Device time of every call; None where the operator is not known."""
    operators = calls.operators
    try:
        library_times(operators[:1], calls.device)
    except InputError:
        return None
    return np.array([each.seconds for each in library_times(operators, calls.device)])


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """A table and a picture per kind."""
    out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        comparisons = [compare(calls) for calls in read_calls(data, kind)]
        if comparisons:
            chart(comparisons, out / f"tensor_core_{kind.name}.png")
            yield kind_table(comparisons)


def kind_table(comparisons: Sequence[Comparison]) -> Table:
    """A row per board: mean and median errors, the roofline's next to them, signed means by length."""
    kind = comparisons[0].kind
    numbers = ("calls", "mean error", "asked", "from 20 µs", "median error", "two numbers", *LENGTH_NAMES)
    view = new_table(("board",), numbers, title=kind.title)
    for each in comparisons:
        median = None if each.predicted is None else float(np.median(np.abs(each.errors(each.predicted))))
        signed = [None] * 5 if each.predicted is None else each.signed_by_length(each.predicted)
        view.add_row(
            each.board,
            str(len(each.measured)),
            _percent(each.mean_error(each.predicted)),
            _percent(kind.bar),
            _percent(each.long_error),
            _percent(median),
            _percent(each.mean_error(each.roofline)),
            *("-" if value is None else f"{value:+.1%}" for value in signed),
        )
    return view


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


# Pictures


def chart(comparisons: Sequence[Comparison], path: Path) -> None:
    """Predicted over measured time by measured time: calls as points, the median of each length as lines."""
    figure = new_figure(4.2 * len(comparisons) + 0.6, 4.4)
    panels: list[Any] = figure.subplots(1, len(comparisons), sharey=True, squeeze=False)[0].tolist()
    for panel, each in zip(panels, comparisons, strict=True):
        _panel(panel, each)
    panels[0].set_ylabel("predicted over measured")
    lines = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)
    kind = comparisons[0].kind
    figure.suptitle(f"{kind.title}: predictions by length of the call (band: four of five calls)", fontsize=12)
    save(figure, path)


def _panel(panel: Any, each: Comparison) -> None:
    shown = np.random.default_rng(0).permutation(len(each.measured))[:MOST_POINTS]
    lines: Mapping[str, tuple[Floats | None, str, str]] = {
        "model": (each.predicted, "C0", "-"),
        "two numbers": (each.roofline, "C3", "--"),
    }
    microseconds = 1e6 * each.measured
    if each.predicted is not None:
        ratio = np.clip(each.predicted / each.measured, 0.2, 5)
        panel.plot(microseconds[shown], ratio[shown], ".", color="0.75", markersize=2, rasterized=True, zorder=1)
    for name, (seconds, colour, style) in lines.items():
        if seconds is None:
            continue
        centres, low, middle, high = _quantiles(microseconds, seconds / each.measured)
        panel.plot(centres, middle, style, color=colour, linewidth=1.8, label=name, zorder=3)
        if name == "model":
            panel.fill_between(centres, low, high, color=colour, alpha=0.25, linewidth=0, zorder=2)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set(xscale="log", yscale="log", ylim=(0.2, 5), xlabel="measured, µs")
    panel.set_yticks([0.25, 0.5, 0.8, 1.25, 2, 4], ["0.25", "0.5", "0.8", "1.25", "2", "4"])
    panel.set_yticks([], minor=True)
    errors = {"model": each.predicted, "two numbers": each.roofline}
    means = [f"{name} {each.mean_error(seconds):.0%}" for name, seconds in errors.items() if seconds is not None]
    panel.set_title(f"{each.board}: {len(each.measured):,} calls\nmean error: {', '.join(means)}", fontsize=10)
    panel.grid(alpha=0.25)


def _quantiles(lengths: Floats, ratio: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """The middles of thirds of decades with ten calls and more, and three quantiles of ``ratio`` in each."""
    classes = np.floor(3 * np.log10(lengths))
    filled = [each for each in np.unique(classes) if (classes == each).sum() >= 10]
    quantiles = np.array([np.quantile(ratio[classes == each], (FEW, 0.5, MOST)) for each in filled]).reshape(-1, 3)
    return 10 ** ((np.array(filled) + 0.5) / 3), quantiles[:, 0], quantiles[:, 1], quantiles[:, 2]
