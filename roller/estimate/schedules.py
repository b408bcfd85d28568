"""Predicted times of schedules that somebody else made, and why one of them cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from rich.table import Table

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.algorithms import ChainProgram, flash, flash_gradient, pair
from roller.estimate.tuners import read_tuner_file
from roller.text.quantities import count_text, time_text
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.stages import operator_form
from sokoban.language.expression import TensorExpr
from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.model.estimates import Estimate, EstimateTable
from sokoban.model.rational import estimate
from sokoban.schedule.attention import RowTiles
from sokoban.schedule.attention_files import load_attention_schedules, load_gradient_schedules, load_pair_schedules
from sokoban.schedule.bulk_copies import form_problem
from sokoban.schedule.files import ScheduleGroup, schedules_from_json
from sokoban.schedule.pipelines import copies_past_registers
from sokoban.schedule.table import Bools, Floats, ScheduleTable
from sokoban.schedule.texts import file_text

#: Schedules that are written at a time.
PIECE = 4096

#: The memory of a block that a program fills itself, by what the lanes of a device are.
_MEMORY = {"thread": "shared B", "element": "scratch B"}


@dataclass(frozen=True)
class Scored:
    """One schedule: its estimate, or why no block of it can run on the device."""

    estimate: Estimate
    reason: str | None

    @property
    def record(self) -> dict[str, Any]:
        """Record that ``roller score --json`` prints; ``seconds`` is None where the schedule cannot run."""
        estimate = self.estimate
        record: dict[str, Any] = {
            "seconds": None if self.reason else estimate.seconds,
            "bound": None if self.reason else estimate.bound,
            "stage_seconds": dict(estimate.stage_seconds),
            "registers": estimate.registers,
            "shared_bytes": estimate.shared_bytes,
            "blocks_per_unit": estimate.blocks_per_unit,
            "waves": estimate.wave_count,
        }
        if self.reason:
            record |= {"stage_seconds": None, "blocks_per_unit": 0, "waves": None, "reason": self.reason}
        return record


class Scores(Protocol):
    """The schedules of a file on a device, in the file's order."""

    @property
    def device(self) -> DeviceSpec:
        """Where they would run."""

    @property
    def seconds(self) -> Floats:
        """Predicted time by schedule; infinite where it cannot run."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages of every estimate."""

    @property
    def measured(self) -> Floats | None:
        """Seconds that the file has besides, NaN where it has none; None where it has no times at all."""

    def rows(self, positions: Sequence[int]) -> list[Scored]:
        """The schedules at some positions, in the order given."""


@dataclass(frozen=True, eq=False)
class TileScores:
    """Schedules of tiles on a device, in the file's order; see :class:`Scores`."""

    device: DeviceSpec
    seconds: Floats
    _parts: Sequence[tuple[ScheduleGroup, EstimateTable]]
    measured: Floats | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages of every estimate."""
        return tuple(self._parts[0][1].stage_seconds)

    def rows(self, positions: Sequence[int]) -> list[Scored]:
        """The schedules at some positions, in the order given."""
        scored: dict[int, Scored] = {}
        wanted = np.zeros(len(self.seconds), dtype=np.bool_)
        wanted[positions] = True
        for group, estimates in self._parts:
            picked = np.flatnonzero(wanted[group.positions])
            of_group = group.positions[picked]
            runs = np.isfinite(self.seconds[of_group]).tolist()
            rows = zip(picked.tolist(), of_group.tolist(), runs, estimates.rows(picked.tolist()), strict=True)
            for row, position, fine, row_estimate in rows:
                reason = None if fine else _reason(group.table, self.device, estimates, row)
                scored[position] = Scored(row_estimate, reason)
        return [scored[position] for position in positions]


@dataclass(frozen=True, eq=False)
class AttentionScores:
    """Schedules of attention, its gradients or pairs of products on a device, in the file's order; see
    :class:`Scores`."""

    device: DeviceSpec
    scored: Sequence[Scored]
    measured: Floats | None = None

    @cached_property
    def seconds(self) -> Floats:
        """Predicted time by schedule; infinite where it cannot run."""
        return np.array([np.inf if each.reason else each.estimate.seconds for each in self.scored])

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages of every estimate."""
        return tuple(self.scored[0].estimate.stage_seconds)

    def rows(self, positions: Sequence[int]) -> list[Scored]:
        """The schedules at some positions, in the order given."""
        return [self.scored[position] for position in positions]


def score_file(path: Path, expr: TensorExpr, device: DeviceSpec) -> Scores:
    """Every schedule of a file for one operator, or every configuration of another tuner's.

    Raises:
        InputError: as :func:`sokoban.schedule.files.load_schedules` or
            :func:`roller.estimate.tuners.read_tuner_file`, or the device has no kernels of such attention.
    """
    if expr.operator_as(Attention) is not None:
        form = kernel_form(expr)
        scored = [
            _attention_score(flash.program_of(form, each.schedule, each.slices, device), each.schedule, device)
            for each in load_attention_schedules(path)
        ]
    elif expr.operator_as(AttentionGradient) is not None:
        form = kernel_form(expr)
        scored = [
            _attention_score(flash_gradient.program_of(form, schedule, device), schedule, device)
            for schedule in load_gradient_schedules(path)
        ]
    elif _sums(expr) > 1 and (form := operator_form(expr)).stages:
        scored = [
            _attention_score(pair.program_of(form, schedule, device), schedule, device)
            for schedule in load_pair_schedules(path)
        ]
    elif any(statement.is_of_lines for statement in expr.statements):
        problem = "goes along an axis in order: its kernels take no schedules of tiles"
        raise InputError(expr.name, problem, "use roller estimate")
    else:
        return _tile_scores(path, expr, device)
    return AttentionScores(device, scored)


def _tile_scores(path: Path, expr: TensorExpr, device: DeviceSpec) -> TileScores:
    text = file_text(path)
    file = read_tuner_file(text, expr, str(path))
    if file is None:
        return score(schedules_from_json(text, expr, str(path)), device)
    scores = score(schedules_from_json(b"\n".join(file.schedules), expr, str(path)), device)
    return replace(scores, measured=file.measured if np.isfinite(file.measured).any() else None)


def _sums(expr: TensorExpr) -> int:
    """Statements that reduce something."""
    return sum(statement.reduction is not None for statement in expr.statements)


def _attention_score(program: ChainProgram, schedule: RowTiles, device: DeviceSpec) -> Scored:
    estimate, dtype = program.estimate, program.form.expr.inputs[0].dtype
    if not flash.has_instruction(dtype, schedule.instruction, device):
        return Scored(estimate, f"{device.name} has no {schedule.instruction} for {dtype}")
    reason = schedule.misfit(program.parts[0].problem)
    if not estimate.blocks_per_unit:
        reason = _limit(device, schedule.threads, estimate.shared_bytes, estimate.registers)
    return Scored(estimate, reason)


def score(groups: Sequence[ScheduleGroup], device: DeviceSpec) -> TileScores:
    """Every schedule of groups of tiles."""
    seconds = np.empty(sum(group.table.count for group in groups))
    parts = []
    for group in groups:
        placed = PlacedForm(group.table.form, device)
        estimates = estimate(group.table, placed)
        seconds[group.positions] = np.where(_without_instruction(group.table, placed), np.inf, estimates.seconds)
        parts.append((group, estimates))
    return TileScores(device, seconds, parts)


def _without_instruction(table: ScheduleTable, placed: PlacedForm) -> Bools:
    """Schedules for a matrix instruction or for asynchronous copies that the device does not have."""
    return _without_matrix(table, placed) | (table.asynchronous & (not copies_past_registers(placed.device)))


def _without_matrix(table: ScheduleTable, placed: PlacedForm) -> Bools:
    """Schedules for a matrix instruction that the device does not have."""
    product = placed.product
    if not table.has_warp_tiles or product is None:
        return table.warp_tile
    by_warp = table.mma & (not product.instruction.is_mma)
    in_bulk = placed.bulk_roles
    not_in_bulk = in_bulk is None or form_problem(placed.form, in_bulk) is not None
    return np.where(table.wgmma, not_in_bulk, by_warp)


def _reason(table: ScheduleTable, device: DeviceSpec, estimates: EstimateTable, row: int) -> str:
    """Why no block of a schedule runs, the limit that it breaks by name."""
    if table.asynchronous[row] and not copies_past_registers(device):
        return f"{device.name} has no asynchronous copies"
    if _without_instruction(table, PlacedForm(table.form, device))[row]:
        return f"{device.name} has no matrix instruction for this operator"
    threads, shared = int(table.threads_per_block[row]), int(estimates.shared_bytes[row])
    return _limit(device, threads, shared, int(estimates.registers[row]))


def _limit(device: DeviceSpec, threads: int, shared: int, registers: int) -> str:
    """The limit of a device that a block breaks, with its ``threads``, bytes and the registers of a thread."""
    limits = device.limits
    if threads > limits.threads_per_block:
        return f"{threads} threads per block, at most {limits.threads_per_block}"
    most = min(
        limits.shared_bytes_per_block_opt_in, limits.shared_bytes_per_unit - limits.shared_bytes_reserved_per_block
    )
    if shared > most:
        return f"{shared} bytes of shared memory per block, at most {most}"
    return f"{threads} threads with {registers} registers each: no block fits on one of the {device.unit_name}s"


def one_operator(expressions: Sequence[TensorExpr], name: str | None, source: str) -> TensorExpr:
    """The operator that the schedules are of: the only one of a file, or the one named.

    Raises:
        InputError: there is no such one, or several and no name.
    """
    names = [expr.name for expr in expressions]
    if name is None and len(expressions) > 1:
        raise InputError(source, f"holds {len(expressions)} operators", f"pick one with --name, such as {names[0]}")
    if name is not None and name not in names:
        raise InputError("--name", f"{name!r} is not in {source}", f"try {names[0]}")
    return expressions[0 if name is None else names.index(name)]


# What is printed


def file_order(scores: Scores, *, ranked: bool) -> Sequence[int]:
    """Positions of the schedules in the order of the file, or the fastest first."""
    if not ranked:
        return range(len(scores.seconds))
    order: list[int] = np.argsort(scores.seconds, kind="stable").tolist()
    return order


def json_lines(scores: Scores, order: Sequence[int]) -> bytes:
    """One JSON object per schedule and line, in some order of their positions."""
    encoder, times = msgspec.json.Encoder(), scores.measured
    # In pieces: a hundred thousand records at once would keep the garbage collector busy.
    pieces = [order[start : start + PIECE] for start in range(0, len(order), PIECE)]
    return b"".join(
        encoder.encode_lines(
            [
                {"schedule": position + 1} | each.record | _measured_record(times, position)
                for position, each in zip(piece, scores.rows(piece), strict=True)
            ]
        )
        for piece in pieces
    )


def _measured_record(times: Floats | None, position: int) -> dict[str, float | None]:
    if times is None:
        return {}
    return {"measured_seconds": float(times[position]) if np.isfinite(times[position]) else None}


def score_table(scores: Scores, limit: int, order: Sequence[int]) -> Table:
    """The first ``limit`` schedules of some order: time, its stages, and what limits the occupancy."""
    stages = [stage.replace("_", " ") for stage in scores.stages]
    limits = ("regs", _MEMORY[scores.device.teu.lane], "blocks/unit", "waves")
    times = scores.measured
    view = new_table((), ("schedule", *_measured_column(times), "predicted", *stages, *limits), ("bound",))
    positions = order[:limit]
    for position, each in zip(positions, scores.rows(positions), strict=True):
        estimate = each.estimate
        resources = (str(estimate.registers), str(estimate.shared_bytes))
        names = (str(position + 1), *_measured_cell(times, position))
        if each.reason:
            dashes = ("-",) * len(scores.stages)
            view.add_row(*names, "-", *dashes, *resources, "0", "-", f"cannot run: {each.reason}")
            continue
        view.add_row(
            *names,
            time_text(estimate.seconds),
            *(time_text(estimate.stage_seconds[stage]) for stage in scores.stages),
            *resources,
            str(estimate.blocks_per_unit),
            str(estimate.wave_count),
            estimate.bound.replace("_", " "),
        )
    return view


def _measured_column(times: Floats | None) -> tuple[str, ...]:
    return () if times is None else ("measured",)


def _measured_cell(times: Floats | None, position: int) -> tuple[str, ...]:
    if times is None:
        return ()
    return (time_text(float(times[position])) if np.isfinite(times[position]) else "-",)


def summary(scores: Scores, expr: TensorExpr, limit: int) -> str:
    """``998 schedules of matmul_... on Tesla V100; fastest: schedule 17, 2.10 ms``."""
    count, idle = len(scores.seconds), int(np.isinf(scores.seconds).sum())
    text = f"{count_text(count, 'schedule')} of {expr.name} on {scores.device.title}"
    if idle:
        text += f", {idle} cannot run"
    if idle < count:
        best = int(np.argmin(scores.seconds))
        text += f"; fastest: schedule {best + 1}, {time_text(float(scores.seconds[best]))}"
    if scores.measured is not None:
        text += f"; {_ranking(scores.seconds, scores.measured)}"
    if count > limit:
        text += f"; {count - limit} more with --limit or --json"
    return text


def _ranking(predicted: Floats, measured: Floats) -> str:
    """``of those measured, the first choice takes 1.03 of the best, the best of ten 1.00; rank correlation 0.95``."""
    ran = np.isfinite(measured)
    predicted, measured = predicted[ran], measured[ran]
    order, best = np.argsort(predicted, kind="stable"), measured.min()
    first, ten = measured[order[0]] / best, measured[order[:10]].min() / best
    text = f"of those measured, the first choice takes {first:.2f} of the best, the best of ten {ten:.2f}"
    if len(measured) < 3:
        return text
    ranks = np.array([np.argsort(np.argsort(times, kind="stable"), kind="stable") for times in (predicted, measured)])
    correlation = np.asarray(np.corrcoef(ranks.astype(np.float64)))
    return f"{text}; rank correlation {correlation[0, 1]:.2f}"
