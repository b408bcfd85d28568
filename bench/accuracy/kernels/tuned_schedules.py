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
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data
from sokoban.schedule.files import schedules_from_json
from sokoban.schedule.table import Bools, Floats

#: Where the spaces lie below the measured data.
FOLDER = "tuned_schedules"

#: Boards of the data.
BOARDS: Mapping[str, str] = {"NVIDIA GeForce RTX 3090": "rtx-3090", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb"}

#: The board whose configurations constants were chosen on, half of them.
CHOSEN_ON = "rtx-3090"

#: The product as CLBlast's kernel stores it.
PRODUCT = {"expr": "C[n,m] = sum([k], A[k,m] * B[k,n])", "sizes": {"n": 4096, "m": 4096, "k": 4096}}

#: The filter: a number in constant memory is an operand of the multiply-add, as a number in its code is. Where blocks
#: overhang the image and nothing is staged, the kernel checks every read by itself, as one at the edge of a padded
#: image; the compiler merges none of them (900 of 900 in a tile of four, compiled for sm_80).
FILTER = {"expr": "Y[y,x] = sum([i,j], X[y+i,x+j] * 1.5)", "sizes": {"y": 4096, "x": 4096, "i": 15, "j": 15}}
GUARDED_FILTER = {
    "expr": "Y[y,x] = sum([i,j], X[y+i-1,x+j-1 | pad=0] * 1.5)",
    "sizes": FILTER["sizes"],
    "shapes": {"X": [4108, 4108]},
}

#: Multiply-adds of a body beyond which the device compiler leaves the outer of two loops alone that the text asks it to
#: unroll: 4,725 came out flat, 5,400 did not (window sums compiled for sm_86).
MOST_UNROLLED = 5000

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
    """All of the data, the product first."""
    found = []
    for name, file in (("product", "gemm"), ("filter", "convolution")):
        rows = _rows(data / FOLDER / f"{file}.parquet")
        for title, board in BOARDS.items():
            ran = [row for row in rows if row["board"] == title and row["time_ms"] is not None]
            if ran:
                predicted = (product_seconds if name == "product" else filter_seconds)(ran, load_device(board))
                measured = np.array([row["time_ms"] for row in ran]) * 1e-3
                found.append(Space(name=name, board=board, measured=measured, predicted=predicted))
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    from pyarrow.parquet import read_table

    return read_table(path).to_pylist()


def product_seconds(rows: Sequence[Mapping[str, Any]], device: DeviceSpec) -> Floats:
    """Predicted seconds of CLBlast's configurations, by the reader of ``roller score``."""
    words = [{key: value for key, value in row.items() if key.isupper()} for row in rows]
    expr = operator_from_data(PRODUCT)
    file = read_tuner_file(msgspec.json.Encoder().encode_lines(words), expr, "gemm")
    assert file is not None
    return _seconds(file.schedules, expr, device)


def filter_seconds(rows: Sequence[Mapping[str, Any]], device: DeviceSpec) -> Floats:
    """Predicted seconds of the filter's configurations."""
    seconds = np.empty(len(rows))
    guarded = np.array([_overhangs(row) and not _stages(row) for row in rows])
    for operator, which in ((FILTER, ~guarded), (GUARDED_FILTER, guarded)):
        positions = np.flatnonzero(which).tolist()
        if positions:
            checked = operator is GUARDED_FILTER
            schedules = [msgspec.json.encode(filter_schedule(rows[i], checked=checked)) for i in positions]
            seconds[positions] = _seconds(schedules, operator_from_data(operator), device)
    return seconds


def filter_schedule(row: Mapping[str, Any], *, checked: bool = False) -> dict[str, Any]:
    """The schedule of a configuration: elements of a thread lie a block's threads apart; ``use_padding`` lengthens the
    rows of the tile where that takes conflicts away. Where every read is ``checked``, the elements of a thread share
    none: each is as a thread of its own."""
    x, y = int(row["block_size_x"]), int(row["block_size_y"])
    across, down, taps = int(row["tile_size_x"]), int(row["tile_size_y"]), int(row["filter_width"])
    beyond = x * (across - 1) + taps - 1
    across, down = (1, 1) if checked else (across, down)
    points = taps * int(row["filter_height"]) * across * down
    padding = -beyond % 32 if row["use_padding"] and x % 32 else 0
    return {
        "threads": {"y": y, "x": x},
        "vthreads": {"y": down, "x": across},
        "thread": {"y": 1, "x": 1},
        "cached": ["X"] if _stages(row) else [],
        "padding": {"X": padding} if _stages(row) else {},
        "vector": {"X": 1, "Y": 1},
        "unroll": points if points <= MOST_UNROLLED else taps * across * down,
    }


def _stages(row: Mapping[str, Any]) -> bool:
    """True if the image is staged; the older kernel always does."""
    return row["use_shmem"] is None or bool(row["use_shmem"])


def _overhangs(row: Mapping[str, Any]) -> bool:
    return any(row[size] % (row[f"block_size_{a}"] * row[f"tile_size_{a}"]) for size, a in (("m", "x"), ("n", "y")))


def _seconds(schedules: Sequence[bytes], expr: TensorExpr, device: DeviceSpec) -> Floats:
    return predict(schedules_from_json(b"\n".join(schedules), expr), device).seconds


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
