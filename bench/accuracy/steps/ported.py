"""Times of a V100 ported to other boards, as ``daydream whatif --pass port`` does it, against times measured there.

Two ways: recorded time x price there / price here by the library models, and wave scaling with sustained rates. Once
for the calls of whole models, which were timed one by one on several boards, and once for single PyTorch calls, where
the kernels and grids are known: wave scaling is for kernels that both boards run. Only calls of 0.3 ms and more count,
where the host's share is small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.accuracy.library.backward_calls import Run, call_kind, call_seconds, library_calls, read_runs
from bench.accuracy.library.library import CLASSES, MAKERS, Columns, boards, read_calls
from bench.accuracy.steps import models
from bench.accuracy.steps.models import Score
from daydream.operators.wave_scaling import Launch, habitat_ratio, memory_share, sustained_rate, wave_ratio
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table
from roller.library.calls import LibraryCall, price
from sokoban.schedule.table import Floats

#: The board whose times are ported, and those that the issue asks about, by the names in the data.
SOURCE = "Tesla V100-PCIE-32GB"
ASKED = ("Tesla P100-PCIE-16GB", "NVIDIA A100-PCIE-40GB")

#: Shortest calls that count, in seconds on the source, and the largest mean error asked for, in per cent.
SHORTEST_SECONDS, BAR = 0.3e-3, 10.0

#: How far the calls of a run, timed one by one, may add up to something else than its step for the run to be steady.
STEADY = 0.1

#: What cuBLAS's kernels begin their names with.
_GENERATION = re.compile(r"^(maxwell|volta|turing|ampere)_")

#: Bytes of an element.
_FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class Ported:
    """A call on the source and its ported times, in seconds.

    Attributes:
        kind: of call.
        measured: on the target.
        by_price: recorded x price there / price here.
        by_waves: wave scaling with sustained rates.
        steady: whether on both boards the calls of its run add up to the measured step.
    """

    kind: str
    measured: float
    by_price: float
    by_waves: float
    steady: bool


#: Fields of :class:`Ported`, as the table has them.
_WAYS = ("by_price", "by_waves")


# Calls of whole models


def ported_calls(runs: Sequence[Run], target: str, specs: Mapping[str, DeviceSpec]) -> list[Ported]:
    """The inference calls of runs that both boards were measured with; views and what launches nothing left out.

    Args:
        runs: on all boards.
        target: name of the board to port to, as the data has it.
        specs: boards by name.
    """
    there = {run.label: run for run in _on(runs, target)}
    out = []
    for run in _on(runs, SOURCE):
        other = there.get(run.label)
        if other is None or run.training:
            continue
        steady = _is_steady(run) and _is_steady(other)
        launched = [library_calls(call, specs[SOURCE], training=False) for call in run.calls]
        launched_there = [library_calls(call, specs[target], training=False) for call in other.calls]
        on_source = call_seconds(launched, specs[SOURCE])
        prices = call_seconds(launched_there, specs[target])
        for position, (call, same) in enumerate(zip(run.calls, other.calls, strict=True)):
            seconds = call.forward_seconds
            if seconds < SHORTEST_SECONDS or not on_source[position] or not prices[position]:
                continue
            waves = seconds * _ratio(launched[position], specs[SOURCE], specs[target])
            out.append(
                Ported(
                    kind=call_kind(call.target), measured=same.forward_seconds, steady=steady,
                    by_price=seconds * float(prices[position] / on_source[position]), by_waves=waves,
                )
            )  # fmt: skip
    return out


def _on(runs: Sequence[Run], board: str) -> list[Run]:
    return [run for run in runs if run.board.replace("_", " ") == board]


def _is_steady(run: Run) -> bool:
    """True if its calls as timed one by one add up to the step: a board that has not yet raised its clock is slower."""
    alone = sum(call.times * (call.forward_seconds + call.backward_seconds) for call in run.calls)
    return abs(alone / run.measured - 1) <= STEADY


def _ratio(calls: Sequence[LibraryCall], source: DeviceSpec, target: DeviceSpec) -> float:
    """Wave scaling of what a call launches, without its grids: a product by its FLOP a byte, the rest by bandwidth."""
    products = [call for call in calls if call.kind == "gemm"]
    if not products:
        return wave_ratio(source, target)
    _, m, n, k = products[0].sizes
    return wave_ratio(source, target, share=_share(m, n, k, source), products=True)


def _share(m: float, n: float, k: float, source: DeviceSpec) -> float:
    """Influence of bandwidth on a matrix product in float32."""
    ridge = sustained_rate(source, "float32", products=True) / source.dram.bandwidth_bytes_per_second
    return memory_share(2 * m * n * k / (_FLOAT * (m * k + k * n + m * n)), ridge)


@dataclass(frozen=True)
class PortedStep:
    """A measured step, ported by the ratio of predicted steps, and measured there, in seconds."""

    board: str
    label: str
    ported: float
    measured: float


def ported_steps(scores: Sequence[Score], source: str) -> list[PortedStep]:
    """The steps of `source` (a device's name) on every other board that has the same run."""
    by_label = {score.label: score for score in scores if score.device == source}
    steps = []
    for there in scores:
        if there.device != source and there.label in by_label:
            recorded = by_label[there.label]
            ported = recorded.measured * there.predicted / recorded.predicted
            steps.append(PortedStep(there.device, there.label, ported, there.measured))
    return steps


# Single calls with known kernels


@dataclass(frozen=True, eq=False, kw_only=True)
class PortedKernels:
    """The calls of a class on one board, as shares of the measured time: errors by every way, signed.

    Attributes:
        operation: class of calls.
        device: the target.
        by_price: of all calls.
        by_waves: of those whose kernel and grid are the same on both; likewise the following.
        by_habitat: Habitat's equation (1) with sustained rates.
    """

    operation: str
    device: str
    by_price: Floats
    by_waves: Floats
    by_habitat: Floats


def ported_kernels(data: Path, operation: str) -> list[PortedKernels]:
    """One class of calls on every board that it was measured on."""
    columns = read_calls(data, CLASSES[operation][0])
    specs = boards(columns)
    if SOURCE not in specs:
        return []
    out = []
    for name in sorted(specs.keys() - {SOURCE}, key=lambda name: specs[name].name):
        source_rows, target_rows = _same_shapes(columns[SOURCE], columns[name])
        recorded = _seconds(source_rows) / _seconds(target_rows)
        prices = [
            np.array([call.seconds for call in price(MAKERS[operation](rows), specs[board])])
            for rows, board in ((source_rows, SOURCE), (target_rows, name))
        ]
        same = np.flatnonzero(_same_kernels(source_rows, target_rows))
        if operation == "convolution":
            # A handful, of which most are Winograd's.
            same = same[:0]
        waves = np.array([_wave_ratios(source_rows, row, specs[SOURCE], specs[name]) for row in same.tolist()])
        by_waves, by_habitat = recorded[same] * waves.reshape(-1, 2).T - 1
        out.append(
            PortedKernels(
                operation=operation, device=specs[name].name, by_price=recorded * prices[1] / prices[0] - 1,
                by_waves=by_waves, by_habitat=by_habitat,
            )
        )  # fmt: skip
    return out


def _wave_ratios(rows: Columns, row: int, source: DeviceSpec, target: DeviceSpec) -> tuple[float, float]:
    """Time there over time here of one kernel: wave scaling, and Habitat's equation.

    Registers and shared memory were not recorded.
    """
    sides = [[int(rows[f"{word}_{axis}"][row]) for axis in "xyz"] for word in ("grid", "block")]
    launch = Launch(math.prod(sides[0]), math.prod(sides[1]))
    products = "m" in rows
    m, n, k = (float(rows[size][row]) if products else 0.0 for size in "mnk")
    share = _share(m, n, k, source) if products else 1.0
    by_waves = wave_ratio(source, target, share=share, products=products, launch=launch)
    return by_waves, habitat_ratio(source, target, launch, share=share)


def _seconds(rows: Columns) -> Floats:
    return np.asarray(rows["latency_ms"], np.float64) / 1e3


def _same_shapes(source_rows: Columns, target_rows: Columns) -> tuple[Columns, Columns]:
    """The calls of both boards with equal sizes, long enough on the source, in one order."""
    sizes = [
        name
        for name in ("op", "b", "m", "n", "k", "c", "f", "h", "w", "kh", "kw", "stride", "pad")
        if name in source_rows
    ]
    keyed = [
        {key: row for row, key in enumerate(zip(*(rows[name].tolist() for name in sizes), strict=True))}
        for rows in (source_rows, target_rows)
    ]
    long = _seconds(source_rows) >= SHORTEST_SECONDS
    pairs = np.array([(row, keyed[1][key]) for key, row in keyed[0].items() if long[row] and key in keyed[1]], np.int64)
    first, second = (
        {name: values[at] for name, values in rows.items()}
        for rows, at in zip((source_rows, target_rows), pairs.reshape(-1, 2).T, strict=True)
    )
    return first, second


def _same_kernels(source_rows: Columns, target_rows: Columns) -> NDArray[np.bool_]:
    """Where both boards ran one kernel alone, of the same name but for the board's generation, with the same grid."""
    names = [
        [_GENERATION.sub("", str(name)) for name in rows["kernel"].tolist()] for rows in (source_rows, target_rows)
    ]
    same = np.array(names[0], np.str_) == np.array(names[1], np.str_)
    for rows in (source_rows, target_rows):
        # Of element-wise calls and softmax the data has the one kernel that they launch.
        same &= np.nan_to_num(rows["n_kernels"].astype(np.float64), nan=1.0) == 1
    for side in ("grid_x", "grid_y", "grid_z", "block_x"):
        same &= source_rows[side] == target_rows[side]
    return same


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """Calls of models, whole steps and single kernels; none of what is missing in the data."""
    if (data / "models" / "neusight_operators.parquet").is_file():
        runs = read_runs(data)
        specs = boards(sorted({run.board.replace("_", " ") for run in runs}))
        targets = [name for name in specs if name != SOURCE]
        calls = {name: ported_calls(runs, name, specs) for name in targets}
        yield call_table(
            {specs[name].name: ported for name, ported in calls.items()}, [specs[name].name for name in ASKED]
        )
        scores = models.evaluate(models.read_runs(data), data / "models" / "neusight_configs")
        yield step_table(ported_steps(scores, specs[SOURCE].name))
    kernels = [each for operation in CLASSES for each in ported_kernels(data, operation)]
    if kernels:
        yield kernel_table(kernels)


def call_table(calls: Mapping[str, Sequence[Ported]], asked: Sequence[str]) -> Table:
    """A row per kind of call and board, all of a board, those of steady runs, and the boards asked about together."""
    view = new_table(
        ("board", "call"),
        ("calls", "by price", "asked", "median", "ported/measured", "waves"),
        title="Calls of whole models, ported from a V100",
    )
    for board, ported in calls.items():
        for kind in sorted({each.kind for each in ported}):
            _call_row(view, board, kind, [each for each in ported if each.kind == kind])
        _sum_rows(view, board, ported, BAR if board in asked else None)
    together = [each for board in asked for each in calls.get(board, ())]
    _sum_rows(view, " and ".join(asked), together, BAR)
    return view


def _sum_rows(view: Table, board: str, ported: Sequence[Ported], bar: float | None) -> None:
    """The rows in bold: all calls, and those of steady runs."""
    if ported:
        _call_row(view, board, "all", ported, bar)
        _call_row(view, board, "all of steady runs", [each for each in ported if each.steady], bar)
        view.add_section()


def _call_row(view: Table, board: str, name: str, calls: Sequence[Ported], bar: float | None = None) -> None:
    if calls:
        errors = [np.array([getattr(each, way) / each.measured - 1 for each in calls]) for way in _WAYS]
        means = [f"{np.abs(each).mean():.1%}" for each in errors]
        figures = (f"{np.median(np.abs(errors[0])):.1%}", f"{np.exp(np.log1p(errors[0]).mean()):.2f}")
        style = "bold" if name.startswith("all") else None
        asked = f"{bar:g}%" if bar else ""
        view.add_row(board, name, str(len(calls)), means[0], asked, *figures, *means[1:], style=style)


def step_table(steps: Sequence[PortedStep]) -> Table:
    """A row per run and board, and the mean of each board."""
    view = new_table(("board", "model"), ("ported", "measured", "error"), title="Whole steps, ported from a V100")
    for board in dict.fromkeys(step.board for step in steps):
        errors = []
        for step in (step for step in steps if step.board == board):
            errors.append(step.ported / step.measured - 1)
            view.add_row(
                board, step.label, f"{1e3 * step.ported:.1f} ms", f"{1e3 * step.measured:.1f} ms", f"{errors[-1]:+.1%}"
            )
        view.add_row(board, "mean", "", "", f"{np.abs(errors).mean():.1%}", style="bold", end_section=True)
    return view


def kernel_table(kernels: Sequence[PortedKernels]) -> Table:
    """A row per class and board: mean errors by price of all calls, by waves of those with one kernel on both."""
    view = new_table(
        ("class", "board"),
        ("calls", "by price", "same kernel", "waves", "Habitat (1)"),
        title="PyTorch calls, ported from a V100",
    )
    for each in kernels:
        waves = [f"{np.abs(errors).mean():.1%}" if len(errors) else "" for errors in (each.by_waves, each.by_habitat)]
        by_price = f"{np.abs(each.by_price).mean():.1%}"
        view.add_row(
            each.operation, each.device, str(len(each.by_price)), by_price, str(len(each.by_waves) or ""), *waves
        )
    return view
