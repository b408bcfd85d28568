"""Whole spaces of schedules that others measured on boards of today, ranked by RATIONAL.

Two spaces of Kernel Tuner's benchmark hub, every second configuration of them: CLBlast's float32 product of 4096 cubed,
and a filter of 15x15 numbers over an image, whose kernel keeps the filter in constant memory. Constants of the model
were chosen on half of the configurations of RTX 3090; the other half is judged, and so is a board left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from bench.accuracy.kernels.schedules import Score, score
from bench.pictures import draw_comparison
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table
from roller.estimate.schedules import score as predict
from roller.estimate.tuners import read_tuner_file
from sokoban.language.operators import operator_from_data
from sokoban.schedule.files import schedules_from_json
from sokoban.schedule.table import Bools, Floats

#: Where the spaces lie below the measured data.
FOLDER = "tuned_schedules"

#: The board whose configurations constants were chosen on, half of them.
CHOSEN_ON = "rtx-3090"

#: The product as CLBlast's kernel stores it.
PRODUCT = {"expr": "C[n,m] = sum([k], A[k,m] * B[k,n])", "sizes": {"n": 4096, "m": 4096, "k": 4096}}

#: The filter: a number in constant memory is an operand of the multiply-add, as a number in its code is.
FILTER = {"expr": "Y[y,x] = sum([i,j], X[y+i,x+j] * 1.5)", "sizes": {"y": 4096, "x": 4096, "i": 15, "j": 15}}

#: Words of its configurations that say something of the kernel.
FILTER_WORDS = (
    "block_size_x", "block_size_y", "tile_size_x", "tile_size_y", "use_padding", "read_only", "use_shmem",
)  # fmt: skip

#: Largest first choice and best of ten over the best measured, least rank correlation and largest median error asked
#: for, by space.
ASKED: Mapping[str, tuple[float, float, float, float | None]] = {
    "product": (1.10, 1.03, 0.8, 0.2), "filter": (1.15, 1.05, 0.7, None),
}  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Space:
    """The configurations of one space that ran on one board.

    Attributes:
        name: ``product`` or ``filter``.
        board: its name in the catalogue.
        measured, predicted: seconds by configuration.
    """

    name: str
    board: str
    measured: Floats
    predicted: Floats

    @property
    def chosen(self) -> Bools:
        """Configurations on which constants were chosen: a random half of :data:`CHOSEN_ON`, none elsewhere."""
        count = len(self.measured)
        chosen = np.zeros(count, dtype=np.bool_)
        if self.board == CHOSEN_ON:
            chosen[np.random.RandomState(7).permutation(count)[: count // 2]] = True
        return chosen

    def score(self, which: Bools) -> Score:
        """Figures of some configurations."""
        return score(self.name, self.board, self.predicted[which], self.measured[which])


def spaces(data: Path) -> list[Space]:
    """All of the data, the product first.

    Raises:
        InputError: the catalogue has no board of a name in the data.
    """
    found = []
    for name, file in (("product", "gemm"), ("filter", "convolution")):
        rows = _rows(data / FOLDER / f"{file}.parquet")
        for title in dict.fromkeys(row["board"] for row in rows):
            ran = [row for row in rows if row["board"] == title and row["time_ms"] is not None]
            board = load_device(title)
            predicted = (product_seconds if name == "product" else filter_seconds)(ran, board)
            measured = np.array([row["time_ms"] for row in ran]) * 1e-3
            found.append(Space(name=name, board=board.name, measured=measured, predicted=predicted))
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    from pyarrow.parquet import read_table

    return read_table(path).to_pylist()


def product_seconds(rows: Sequence[Mapping[str, Any]], device: DeviceSpec) -> Floats:
    """Predicted seconds of CLBlast's configurations, by the reader of ``roller score``."""
    return _seconds([{key: value for key, value in row.items() if key.isupper()} for row in rows], PRODUCT, device)


def filter_seconds(rows: Sequence[Mapping[str, Any]], device: DeviceSpec) -> Floats:
    """Predicted seconds of the filter's configurations, by the same reader."""
    return _seconds([{key: row[key] for key in FILTER_WORDS if row[key] is not None} for row in rows], FILTER, device)


def _seconds(words: Sequence[Mapping[str, Any]], operator: Mapping[str, Any], device: DeviceSpec) -> Floats:
    expr = operator_from_data(operator)
    file = read_tuner_file(msgspec.json.Encoder().encode_lines(words), expr, "configurations")
    assert file is not None
    return predict(schedules_from_json(b"\n".join(file.schedules), expr), device).seconds


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """One table, and a picture of it in ``out``."""
    view = new_table(
        ("space", "board", "configurations"),
        ("number", "first choice", "best of ten", "rank correlation", "median error", "asked"),
        title="Spaces measured whole, ranked",
    )
    panels = {}
    for space in spaces(data):
        chosen, judged = space.chosen, ~space.chosen
        parts = [("chosen on", chosen), ("judged", judged)] if chosen.any() else [("all, board left out", judged)]
        if chosen.any():
            parts.append(("all", np.ones(len(judged), dtype=np.bool_)))
        for title, which in parts:
            view.add_row(space.name, space.board, title, str(which.sum()), *_figures(space, which))
        panels[f"{space.name}, {space.board}"] = {f"{len(judged)} configurations": (space.measured, space.predicted)}
    draw_comparison(out / "tuned_schedules.png", "Spaces of Kernel Tuner's benchmark hub", panels)
    return [view]


def _figures(space: Space, which: Bools) -> tuple[str, ...]:
    each = space.score(which)
    first, ten, correlation, error = ASKED[space.name]
    asked = f"{first:.2f}, {ten:.2f}, {correlation:.1f}" + (f", {error:.0%}" if error is not None else "")
    figures = [f"{figure:.3f}" for figure in (each.first, each.best_of_ten, each.rank_correlation)]
    return (*figures, f"{each.median_error:.1%}", asked)
