"""The library models against measured 16-bit kernels of A100, H100, L40S and B200 (AIConfigurator's database).

Errors are ``|predicted - measured| / measured``. Beside the model stands a roofline of two numbers a board, and the
model with constants that were chosen without the board (:mod:`bench.accuracy.library.left_out`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.left_out import fitted_without
from bench.accuracy.library.tensor_core_rows import BOARDS, KINDS, Calls, Kind, Operator, read_calls
from bench.pictures import new_figure, save
from hal.catalog import all_devices, load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
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
        example: the first of the calls as an operator.
        predicted: by the model; None where it has no such operator.
        roofline: by two numbers of the board.
        left_out: by the model with constants chosen without this board; None where nobody chose any.
    """

    kind: Kind
    board: str
    example: Operator
    measured: Floats
    predicted: Floats | None
    roofline: Floats
    left_out: Floats | None

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

    @property
    def best_known(self) -> Floats | None:
        """Predictions by constants chosen without the board where there are any, else by the model's own."""
        return self.predicted if self.left_out is None else self.left_out


def compare(calls: Calls) -> Comparison:
    """The model's figures for measured calls."""
    chosen = fitted_without(calls.board, calls.kind.name)
    return Comparison(
        kind=calls.kind,
        board=calls.board,
        example=calls.operators[0],
        measured=calls.seconds,
        predicted=_predicted(calls),
        roofline=calls.roofline(),
        left_out=None if chosen is None else _predicted(calls, chosen),
    )


def _predicted(calls: Calls, inside: Any = None) -> Floats | None:
    """Device time of every call; None where the operator is not known."""
    operators = calls.operators
    with inside or nullcontext():
        if not _is_priced(operators[0], calls.device):
            return None
        return np.array([each.seconds for each in library_times(operators, calls.device)])


def _is_priced(operator: Operator, device: DeviceSpec) -> bool:
    """Whether the library models know the operator, and the board what it needs."""
    try:
        library_times([operator], device)
    except InputError:
        return False
    return True


# Boards that nobody measured


@dataclass(frozen=True, kw_only=True)
class Range:
    """Between which multiples of a prediction the time of four calls in five is expected, on a board without data.

    Attributes:
        like: the measured board, as the data calls it, whose matrix units work like this one's.
        left_out: whether the errors are of constants chosen without that board.
    """

    device: str
    kind: str
    like: str
    low: float
    high: float
    left_out: bool


def ranges(comparisons: Sequence[Comparison], devices: Iterable[DeviceSpec] | None = None) -> list[Range]:
    """Error bars: what the nearest measured board's calls take over what is predicted for them."""
    out = []
    for device in all_devices() if devices is None else devices:
        if (device.compute_capability or (0, 0)) < (8, 0) or device.name in BOARDS.values():
            continue
        for kind in dict.fromkeys(each.kind.name for each in comparisons):
            known = {each.board: each for each in comparisons if each.kind.name == kind}
            like = _nearest(device, known)
            # What a node's links do is told by no board of another generation.
            if known[like].kind.over_links and known[like].device.compute_capability != device.compute_capability:
                continue
            seconds = known[like].best_known
            if seconds is not None and _is_priced(known[like].example, device):
                low, high = np.quantile(known[like].measured / seconds, (FEW, MOST))
                left_out = known[like].left_out is not None
                out.append(Range(device=device.name, kind=kind, like=like, low=low, high=high, left_out=left_out))
    return out


def _nearest(device: DeviceSpec, boards: Iterable[str]) -> str:
    """The measured board with matrix instructions of the same sort, and among these the nearest generation."""

    def distance(board: str) -> tuple[bool, float]:
        other = load_device(BOARDS[board])
        return _by_warps(other) != _by_warps(device), abs(_generation(other) - _generation(device))

    return min(boards, key=distance)


def _by_warps(device: DeviceSpec) -> bool:
    rates = device.best_matrix_instruction("bfloat16")
    return rates is None or rates.is_by_warps


def _generation(device: DeviceSpec) -> float:
    major, minor = device.compute_capability or (0, 0)
    return major + minor / 10


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """A table and a picture per kind, and one of each of the error bars of boards without data."""
    out.mkdir(parents=True, exist_ok=True)
    everything: list[Comparison] = []
    tables = []
    for kind in KINDS:
        found = [compare(calls) for calls in read_calls(data, kind)]
        if found:
            tables.append(kind_table(found))
            chart(found, out / f"tensor_core_{kind.name}.png")
        everything += found
    bars = ranges(everything)
    if bars:
        tables.append(range_table(bars))
        range_chart(bars, out / "tensor_core_unmeasured.png")
    return tables


def kind_table(comparisons: Sequence[Comparison]) -> Table:
    """A row per board: mean and median errors, the roofline's beside them, signed means by length."""
    kind = comparisons[0].kind
    view = Table(box=None, pad_edge=False, title=kind.title, title_justify="left")
    view.add_column("board")
    for column in (
        "calls",
        "mean error",
        "asked",
        "from 20 µs",
        "median error",
        "two numbers",
        "without it",
        *LENGTH_NAMES,
    ):
        view.add_column(column, justify="right")
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
            _percent(each.mean_error(each.left_out)),
            *("-" if value is None else f"{value:+.1%}" for value in signed),
        )
    return view


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def range_table(bars: Sequence[Range]) -> Table:
    """A row per board, a column per kind of call; a star where constants were chosen with the board it is like."""
    view = Table(box=None, pad_edge=False, title="Boards that nobody measured", title_justify="left")
    view.add_column("board")
    view.add_column("as on")
    kinds = [kind for kind in KINDS if any(bar.kind == kind.name for bar in bars)]
    for kind in kinds:
        view.add_column(kind.title, justify="right")
    for device in dict.fromkeys(bar.device for bar in bars):
        mine = {bar.kind: bar for bar in bars if bar.device == device}
        cells = [
            f"{mine[kind.name].low:.2f} to {mine[kind.name].high:.2f}{'' if mine[kind.name].left_out else '*'}"
            if kind.name in mine
            else "-"
            for kind in kinds
        ]
        view.add_row(device, " or ".join(dict.fromkeys(bar.like for bar in mine.values())), *cells)
    return view


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
        "constants chosen without the board": (each.left_out, "C1", "-"),
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
    errors = {"model": each.predicted, "left out": each.left_out, "two numbers": each.roofline}
    means = [f"{name} {each.mean_error(seconds):.0%}" for name, seconds in errors.items() if seconds is not None]
    panel.set_title(f"{each.board}: {len(each.measured):,} calls\nmean error: {', '.join(means)}", fontsize=10)
    panel.grid(alpha=0.25)


def _quantiles(lengths: Floats, ratio: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """The middles of thirds of decades with ten calls and more, and three quantiles of ``ratio`` in each."""
    classes = np.floor(3 * np.log10(lengths))
    kept = [each for each in np.unique(classes) if (classes == each).sum() >= 10]
    found = np.array([np.quantile(ratio[classes == each], (FEW, 0.5, MOST)) for each in kept]).reshape(-1, 3)
    return 10 ** ((np.array(kept) + 0.5) / 3), found[:, 0], found[:, 1], found[:, 2]


def range_chart(bars: Sequence[Range], path: Path) -> None:
    """A line per board and kind from the low to the high multiple."""
    devices = list(dict.fromkeys(bar.device for bar in bars))
    kinds = list(dict.fromkeys(bar.kind for bar in bars))
    figure = new_figure(8.4, 1.2 + 0.5 * len(devices))
    panel = figure.subplots()
    for bar in bars:
        place = devices.index(bar.device) + 0.14 * (kinds.index(bar.kind) - (len(kinds) - 1) / 2)
        panel.plot([bar.low, bar.high], [place, place], color=f"C{kinds.index(bar.kind)}", linewidth=4)
    for number, kind in enumerate(kinds):
        panel.plot([], [], color=f"C{number}", linewidth=4, label=kind)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_yticks(range(len(devices)), devices, fontsize=9)
    panel.set(xscale="log", xlabel="measured over predicted, four of five calls", ylim=(len(devices) - 0.5, -0.5))
    panel.set_xticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
    panel.set_xticks([], minor=True)
    panel.grid(axis="x", alpha=0.25)
    panel.set_title("Boards that nobody measured: errors as on the nearest board with measurements", fontsize=11)
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    save(figure, path)
