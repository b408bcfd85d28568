"""Our best kernels, as predicted, against the measurements of the thesis: its 119 operators on a V100 PCIe.

The predicted time is that of the rank-1 program of construction and search together. It is held against the best of ten
that the thesis's own Roller reached (the paper's run, and the run of its artifact) and against the libraries under
TensorFlow. These are predictions against measurements: how good the kernels are is confounded with how good the model
is, which the table ``schedules`` measures by itself.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from bench.pictures import draw_comparison
from bench.suites import suite_path
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.construct.program import RProgram
from roller.programs import SEARCH_POLICY, find_programs
from roller.text.quantities import si_text, sizes_text
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import load_operators

#: The board that the thesis measured.
DEVICE = "v100-pcie"

#: What is compared with: column of ops.csv -> how the tables call it.
REFERENCES: Mapping[str, str] = {
    "roller_top10_ms": "Roller's best of ten",
    "rerun_roller_top10_ms": "the same, rerun",
    "cudalib_ms": "cuBLAS, cuDNN, TensorFlow",
    "rerun_cudalib_ms": "the same, rerun",
}

#: A ratio of predicted to measured time below the first wins, above the second loses.
WIN, LOSE = 0.95, 1.05

#: Operators that are looked at more closely.
WORST = 5


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One operator.

    Attributes:
        constructed_seconds: of the best program of construction alone.
        program: the best of construction and search.
        measured: seconds by column of ops.csv; those that were not measured are missing.
    """

    name: str
    kind: str
    form: KernelForm
    constructed_seconds: float
    program: RProgram
    measured: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Predicted for the best program."""
        return self.program.estimate.seconds

    def ratio(self, reference: str) -> float:
        """Predicted over measured; below 1 ours is faster."""
        return self.seconds / self.measured[reference]


def evaluate(data: Path, device: DeviceSpec, names: Sequence[str] | None = None) -> list[Row]:
    """The operators of ops.csv, or some of them by name (``M0``).

    Raises:
        InputError: there is no such file below ``data``.
    """
    path = data / "roller119" / "ops.csv"
    if not path.is_file():
        raise InputError(str(path), "no such file", "name the measured data with --data")
    with path.open(newline="") as file:
        records = {record["id"]: record for record in csv.DictReader(file)}
    out = []
    for expr in load_operators(suite_path("roller119")):
        record = records.get(expr.name)
        if record is None or (names is not None and expr.name not in names):
            continue
        form = kernel_form(expr)
        constructed = find_programs(form, device, 1, "roller").direct[0].estimate.seconds
        best = find_programs(form, device, 1, "both").direct[0]
        measured = {column: float(record[column]) / 1e3 for column in REFERENCES if record[column]}
        out.append(
            Row(
                name=expr.name,
                kind=record["op"],
                form=form,
                constructed_seconds=constructed,
                program=best,
                measured=measured,
            )
        )
    return out


def verdict(ratio: float) -> str:
    """``win``, ``tie`` or ``lose``."""
    return "win" if ratio < WIN else "lose" if ratio > LOSE else "tie"


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """All operators, the counts, and the worst with their reasons; a picture in ``out``."""
    device = load_device(DEVICE)
    rows = evaluate(data, device)
    scatter(rows, out / "thesis.png")
    return [operator_table(rows), summary_table(rows), worst_table(rows, device)]


def operator_table(rows: Sequence[Row]) -> Table:
    """A row per operator, times in milliseconds."""
    view = new_table(
        ("operator", "kind"),
        ("construction", "with search", "Roller", "rerun", "library", "ours/Roller", "ours/rerun"),
        ("against Roller", "bound", "found by"),
        title="The thesis's operators, predicted on a V100, against measurements, in ms",
    )
    main, rerun, library = "roller_top10_ms", "rerun_roller_top10_ms", "cudalib_ms"
    for row in rows:
        view.add_row(
            row.name,
            row.kind,
            f"{1e3 * row.constructed_seconds:.3f}",
            f"{1e3 * row.seconds:.3f}",
            *(f"{1e3 * row.measured[key]:.3f}" if key in row.measured else "-" for key in (main, rerun, library)),
            *(f"{row.ratio(key):.2f}" if key in row.measured else "-" for key in (main, rerun)),
            verdict(row.ratio(main)) if main in row.measured else "-",
            row.program.estimate.bound.replace("_", " "),
            "search" if row.program.policy == SEARCH_POLICY else "construction",
        )
    return view


def summary_table(rows: Sequence[Row]) -> Table:
    """Wins, ties, losses and the geometric mean of predicted over measured, against each reference and by kind."""
    title = f"Predicted against measured: win below {WIN}, lose above {LOSE}"
    view = new_table(("against", "kind"), ("operators", "win", "tie", "lose", "mean ratio"), title=title)
    for reference, title in REFERENCES.items():
        for kind in (*dict.fromkeys(row.kind for row in rows), "all"):
            mine = [row for row in rows if kind in (row.kind, "all") and reference in row.measured]
            if not mine:
                continue
            ratios = np.array([row.ratio(reference) for row in mine])
            verdicts = [verdict(ratio) for ratio in ratios]
            counts = [str(verdicts.count(word)) for word in ("win", "tie", "lose")]
            mean = f"{np.exp(np.log(ratios).mean()):.3f}"
            view.add_row(title, kind, str(len(mine)), *counts, mean, end_section=kind == "all")
    return view


def worst_table(rows: Sequence[Row], device: DeviceSpec) -> Table:
    """The operators furthest behind Roller's measured time, with what limits them by the model."""
    reference = "roller_top10_ms"
    view = new_table(("operator",), ("ours/Roller",), ("reason",), title="Furthest behind Roller's best of ten")
    measured = [row for row in rows if reference in row.measured]
    for row in sorted(measured, key=lambda row: -row.ratio(reference))[:WORST]:
        view.add_row(row.name, f"{row.ratio(reference):.2f}", reason(row, device, row.measured[reference]))
    return view


def reason(row: Row, device: DeviceSpec, measured: float) -> str:
    """Stage that sets the pace, what else is close, and what the measured time would have needed."""
    estimate, schedule = row.program.estimate, row.program.schedule
    stages = sorted(estimate.stage_seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name.replace('_', ' ')} {seconds / estimate.seconds:.0%}" for name, seconds in stages[:3])
    moved = sum(tensor.size_bytes for tensor in (*row.form.expr.inputs, row.form.expr.output))
    needed = []
    if row.form.flops / measured > 0.5 * device.sustained_flops("float32"):
        rate, sustained = row.form.flops / measured, device.sustained_flops("float32")
        needed.append(f"{si_text(rate, 'FLOP/s')} ({rate / sustained:.0%} of what is sustained)")
    if moved / measured > 0.5 * device.dram.bandwidth_bytes_per_second:
        rate, sustained = moved / measured, device.dram.bandwidth_bytes_per_second
        needed.append(f"{si_text(rate, 'B/s')} ({rate / sustained:.0%} of what DRAM sustains)")
    grid = schedule.grid_blocks(row.form.sizes)
    return (
        f"{estimate.bound.replace('_', ' ')} sets the pace ({shares}); {grid} blocks of {schedule.threads_per_block} "
        f"threads, {estimate.blocks_per_unit} per unit, block {sizes_text(schedule.block)}; "
        f"the measured time needs {' and '.join(needed) or 'no more than half of any sustained rate'}"
    )


def scatter(rows: Sequence[Row], path: Path) -> None:
    """Predicted over measured times as a PNG, a panel per reference, a colour per kind of operator."""
    panels = {}
    for reference, title in REFERENCES.items():
        pairs: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if reference in row.measured:
                pairs.setdefault(row.kind.replace("_", " "), []).append((row.measured[reference], row.seconds))
        if pairs:
            count = sum(map(len, pairs.values()))
            panels[f"{title}: {count} operators"] = {kind: tuple(np.array(each).T) for kind, each in pairs.items()}
    draw_comparison(path, "The thesis's operators on a V100: our best kernel, predicted", panels, columns=2)
