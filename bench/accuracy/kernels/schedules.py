"""Predicted times of the programs that Ansor measured on a V100: how well they rank, and how far off they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.table import Table

from bench.accuracy.data import data_directory
from bench.accuracy.kernels.ansor import FLAT, TILED, Log, load_logs
from bench.pictures import draw_comparison
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table
from sokoban.kernel.placed import PlacedForm
from sokoban.model.rational import estimate
from sokoban.schedule.table import Floats

#: The board on which the programs were measured.
DEVICE = "v100-pcie"

#: Of how many first choices the best is taken.
CHOICES = 10


@dataclass(frozen=True, eq=False, kw_only=True)
class Score:
    """One log: predicted against measured seconds, by program.

    Attributes:
        kind: the log's kind; for flat programs with their structure where a kind has several.
        best_of_ten: the best measured time among the ten that the model puts first, over the best of all: 1 is perfect.
        first: the same for its first choice.
        median_error: median of ``|predicted - measured| / measured``.
        rank_correlation: Spearman's.
    """

    kind: str
    label: str
    predicted: Floats
    measured: Floats
    best_of_ten: float
    first: float
    median_error: float
    rank_correlation: float


def evaluate(
    device: DeviceSpec | str = DEVICE, kinds: Sequence[str] | None = None, data: Path | None = None
) -> list[Score]:
    """A score per log (and structure); ``kinds`` of :data:`TILED` and :data:`FLAT`, the tiled ones where not given."""
    board = load_device(device) if isinstance(device, str) else device
    out: list[Score] = []
    for log in logs(data or data_directory(), tuple(kinds or TILED)):
        predicted = predict(log, board)
        for structure in sorted(set(log.structure.tolist())):
            rows = log.structure == structure
            kind = f"{log.kind}, {structure}" if log.kind == "reduction" else log.kind
            if log.kind == "pooling":
                kind = "pooling, two kernels" if len(log.kernels) == 2 else "pooling, one kernel"
            out.append(score(kind, log.label, predicted[rows], log.measured[rows]))
    return out


@cache
def logs(data: Path, kinds: tuple[str, ...]) -> tuple[Log, ...]:
    """The logs below a data directory, read once."""
    return tuple(load_logs(data / "v100_schedules", kinds))


def predict(log: Log, device: DeviceSpec) -> Floats:
    """Seconds by program: the sum over its kernels."""
    total = np.zeros(len(log.trial))
    for kernel in log.kernels:
        total = total + estimate(kernel.table, PlacedForm(kernel.table.form, device)).seconds
    return total


def score(kind: str, label: str, predicted: Floats, measured: Floats) -> Score:
    """The figures of one log; arrays of the same length. A program that cannot run by the model (infinite) is last."""
    order = np.argsort(predicted, kind="stable")
    best = measured.min()
    ranks = _ranks(predicted), _ranks(measured)
    constant = any(np.ptp(rank) == 0 for rank in ranks)
    return Score(
        kind=kind,
        label=label,
        predicted=predicted,
        measured=measured,
        best_of_ten=float(measured[order[:CHOICES]].min() / best),
        first=float(measured[order[0]] / best),
        median_error=float(np.median(np.abs(predicted - measured) / measured)),
        rank_correlation=float("nan") if constant else float(np.corrcoef(*ranks)[0, 1]),
    )


def _ranks(values: Floats) -> Floats:
    """Places in ascending order from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """Both tables, and their pictures in ``out``."""
    tiled, flat = evaluate(kinds=TILED, data=data), evaluate(kinds=FLAT, data=data)
    scatter(tiled, out / "schedules_tiled.png", "Tiled programs of Ansor on a V100")
    scatter(flat, out / "schedules_flat.png", "Flat programs of Ansor on a V100")
    return [tiled_table(tiled), flat_table(flat)]


def tiled_table(scores: Sequence[Score]) -> Table:
    """A row per operator, means per kind and over all."""
    view = new_table(
        ("operator", "kind"),
        ("programs", "first choice", "best of ten", "median error", "rank correlation"),
        title="Tiled programs on a V100",
    )
    kinds = list(dict.fromkeys(score.kind for score in scores))
    for kind in kinds:
        mine = [score for score in scores if score.kind == kind]
        for each in mine:
            view.add_row(each.label, kind, str(len(each.measured)), *_figures([each]))
        view.add_row(
            "mean", kind, str(sum(len(s.measured) for s in mine)), *_figures(mine), style="bold", end_section=True
        )
    if len(kinds) > 1:
        view.add_row("mean", "all", str(sum(len(s.measured) for s in scores)), *_figures(scores), style="bold")
    return view


def flat_table(scores: Sequence[Score]) -> Table:
    """A row per kind."""
    view = new_table(
        ("kind",),
        ("operators", "programs", "first choice", "best of ten", "median error", "rank correlation"),
        title="Flat programs on a V100",
    )
    for kind in dict.fromkeys(score.kind for score in scores):
        mine = [score for score in scores if score.kind == kind]
        errors = np.concatenate([np.abs(s.predicted - s.measured) / s.measured for s in mine])
        first, ten, _, correlation = _figures(mine)
        programs = str(sum(len(s.measured) for s in mine))
        view.add_row(kind, str(len(mine)), programs, first, ten, f"{np.median(errors):.1%}", correlation)
    return view


def _figures(scores: Sequence[Score]) -> tuple[str, str, str, str]:
    """Means over operators, as text."""
    return (
        f"{np.mean([s.first for s in scores]):.3f}",
        f"{np.mean([s.best_of_ten for s in scores]):.3f}",
        f"{np.mean([s.median_error for s in scores]):.1%}",
        f"{np.nanmean([s.rank_correlation for s in scores]):.3f}",
    )


def scatter(scores: Sequence[Score], path: Path, title: str) -> None:
    """Predicted over measured times, a panel per kind, as a PNG."""
    panels = {}
    for kind in dict.fromkeys(score.kind for score in scores):
        mine = [score for score in scores if score.kind == kind]
        measured, predicted = (np.concatenate([getattr(s, name) for s in mine]) for name in ("measured", "predicted"))
        panels[f"{kind}: {len(mine)} operators"] = {f"{len(measured)} programs": (measured, predicted)}
    draw_comparison(path, title, panels)
