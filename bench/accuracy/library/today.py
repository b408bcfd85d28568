"""Layers of today's servers against kernels that others measured (AIConfigurator's performance database).

Constants were chosen on one half of the shapes (:func:`chosen`); the column *others* is the error on the other half.
Rows of 128x128 blocks were measured without a CUDA graph, so that the host's time between calls is in them: they are
compared with ``call_seconds``, all others with ``seconds``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.left_out import fitted_without
from bench.accuracy.library.tensor_core_rows import BOARDS as SIXTEEN_BIT_BOARDS
from bench.accuracy.library.tensor_core_rows import FLOORS, REACHED
from bench.accuracy.library.today_kinds import KINDS, WEIGHT_BYTES, Columns, Kind, Operator
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.library import library_times
from sokoban.schedule.table import Floats

#: Board as the data calls it -> its device.
BOARDS: Mapping[str, str] = {
    **SIXTEEN_BIT_BOARDS, "h200_sxm": "h200", "b300_sxm": "b300", "gb200_sxm": "gb200", "gb300_sxm": "gb300",
    "gb200": "gb200", "gb300": "gb300", "rtx_pro_6000": "rtx-pro-6000", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """The calls of one kind on one board, in seconds, an entry per call.

    Attributes:
        predicted: None where the board has no such kernels by the model.
        roofline: by two numbers, a rate and a constant that suits these very calls best.
        on: whether constants were chosen on the call's shape.
        left_out: by constants chosen without the board; None where there are none.
    """

    board: str
    kind: str
    measured: Floats
    predicted: Floats | None
    roofline: Floats
    on: np.ndarray[Any, np.dtype[np.bool_]]
    left_out: Floats | None = None

    def errors(self, seconds: Floats) -> Floats:
        """Relative errors without their signs."""
        return np.asarray(np.abs(seconds / self.measured - 1))


def table(data: Path, out: Path) -> Iterable[Table]:
    """A table per kind, a row per board and precision."""
    for kind in KINDS:
        comparisons = list(compare(data, kind))
        if comparisons:
            yield kind_table(kind, comparisons)


def compare(data: Path, kind: Kind) -> Iterator[Comparison]:
    """Comparisons by board and precision; none where the file is absent."""
    import pyarrow.parquet as parquet

    path = data / "today" / f"{kind.file}.parquet"
    if not path.is_file():
        return
    read = parquet.read_table(path)
    columns = {name: read[name].to_numpy(zero_copy_only=False) for name in read.column_names}
    for board in sorted(set(columns["board"].tolist()) & set(BOARDS)):
        for word in kind.precisions:
            mine = (columns["board"] == board) & (columns[kind.column] == word)
            if mine.any():
                rows = {name: part[mine] for name, part in columns.items()}
                yield _comparison(kind, board, word, rows)


def _comparison(kind: Kind, board: str, word: str, rows: Columns) -> Comparison:
    device = load_device(BOARDS[board])
    measured = np.asarray(rows["latency"], np.float64) / 1e3
    flops, moved = kind.work(rows, word)
    rates = device.best_matrix_instruction("bfloat16")
    assert rates is not None, device.name
    faster = WEIGHT_BYTES.get(word, WEIGHT_BYTES["bfloat16"])[1]
    longest = np.maximum(flops / (REACHED * faster * rates.peak_flops), moved / device.dram.bandwidth_bytes_per_second)
    roofline = min((longest + floor for floor in FLOORS), key=lambda seconds: np.abs(seconds / measured - 1).mean())
    operators = kind.operators(rows, kind.precisions[word])
    left_out = None
    without = fitted_without(board, kind.left_out)
    if without is not None:
        with without:
            left_out = _predicted(operators, device, has_calls=word in kind.has_calls)
    return Comparison(
        board=board, kind=word, measured=measured, roofline=roofline, on=kind.chosen(rows),
        predicted=_predicted(operators, device, has_calls=word in kind.has_calls), left_out=left_out,
    )  # fmt: skip


def _predicted(operators: Sequence[Operator], device: DeviceSpec, *, has_calls: bool) -> Floats | None:
    """Seconds of rows; None where the board or its node has no such kernels."""
    try:
        times = library_times(operators, device)
    except InputError:
        return None
    return np.array([each.call_seconds if has_calls else each.seconds for each in times])


def kind_table(kind: Kind, comparisons: Sequence[Comparison]) -> Table:
    """Mean errors, on shapes that constants were chosen on and on others, the roofline's next to them."""
    numbers = ("rows", "mean error", "asked", "others", "without it", "median error", "two numbers")
    view = new_table(("board", "numbers"), numbers, title=kind.title)
    for each in comparisons:
        errors = None if each.predicted is None else each.errors(each.predicted)
        shown = ["-"] * 3
        if errors is not None:
            others = "-" if each.on.all() else f"{errors[~each.on].mean():.1%}"
            shown = [f"{errors.mean():.1%}", others, f"{np.median(errors):.1%}"]
        without = "-" if each.left_out is None else f"{each.errors(each.left_out).mean():.1%}"
        view.add_row(
            each.board, each.kind, str(len(each.measured)), shown[0], f"{kind.bar:.0%}", shown[1], without, shown[2],
            f"{each.errors(each.roofline).mean():.1%}",
        )  # fmt: skip
    return view
