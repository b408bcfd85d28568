"""What each physical effect of the cost models contributes to their accuracy: predictions with it against without.

An effect is taken out by replacing the functions and constants that hold it for the time of one evaluation, nowhere
else. Effects overlap (what one no longer explains another may still bound), so that their contributions do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_struct
from rich.table import Table

from bench.accuracy.ansor import FLAT, TILED
from bench.accuracy.effects import NO_SUM, TINY, Effect, bars, without
from bench.accuracy.schedules import DEVICE, Score, evaluate
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from sokoban.language.expression import Load
from sokoban.model.gpu import breakdown, fetch, operands, stages, step, transactions
from sokoban.model.gpu.loops import LoopNest
from sokoban.schedule.table import Floats, Ints, ScheduleTable, product


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Means over the tiled operators (see :class:`schedules.Score`), and errors of flat programs.

    Nine in ten flat programs take exactly as long as their blocks take to start, so that the median over all of them
    says something about that alone. ``reduction_error`` is the mean of the medians of the reductions, which do not.
    """

    first: float
    best_of_ten: float
    median_error: float
    rank_correlation: float
    flat_median: float
    reduction_error: float

    def minus(self, other: Figures) -> Figures:
        """Difference, figure by figure."""
        return Figures(**{name: getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__})


def figures(data: Path, effect: Effect | None = None) -> Figures:
    """The measured schedules of ``data``, predicted without ``effect``."""
    board = load_device(DEVICE)
    with without([effect] if effect else []), np.errstate(divide="ignore", invalid="ignore"):
        board = effect.device(board) if effect else board
        return _figures(evaluate(board, TILED, data), evaluate(board, FLAT, data))


def _figures(tiled: Sequence[Score], flat: Sequence[Score]) -> Figures:
    errors = np.concatenate([np.abs(s.predicted - s.measured) / s.measured for s in flat])
    return Figures(
        first=float(np.mean([s.first for s in tiled])),
        best_of_ten=float(np.mean([s.best_of_ten for s in tiled])),
        median_error=float(np.mean([s.median_error for s in tiled])),
        rank_correlation=float(np.nanmean([s.rank_correlation for s in tiled])),
        flat_median=float(np.median(errors)),
        reduction_error=float(np.mean([s.median_error for s in flat if s.kind.startswith("reduction")])),
    )


# RATIONAL without ...


def _no_time(block_step: step.BlockStep, *_: Any) -> Floats:
    return np.zeros(block_step.table.count)


def _ones(table: ScheduleTable, *_: Any) -> Floats:
    return np.ones(table.count)


def _raw_bytes(
    table: ScheduleTable, load: Load, tile: Mapping[str, Ints], transaction_bytes: int, by_lane: bool = False
) -> Floats:
    """Bytes of a tile's elements, whatever transactions they arrive in."""
    tensor = table.form.expr.tensor_by_name[load.tensor]
    return product(table.extents(load), table.count) * float(tensor.element_bytes)


def _raw_touched_bytes(form: Any, load: Load, transaction_bytes: int) -> float:
    return float(form.expr.tensor_by_name[load.tensor].size_bytes)


def _raw_stores(table: ScheduleTable, device: DeviceSpec) -> Floats:
    least = table.form.expr.output.element_bytes / (device.l2 or device.dram).transaction_bytes
    return np.full(table.count, least)


def _free_fetch(table: ScheduleTable, load: Load, device: DeviceSpec) -> fetch.Fetch:
    """The fetch, its instructions and wavefronts for nothing."""
    none = np.zeros(table.count)
    return replace(_FETCH(table, load, device), instructions=none, wavefronts=none)


def _free_reads(*arguments: Any) -> operands.OperandReads:
    part = _READS(*arguments)
    return replace(part, instructions=0.0 * part.instructions, passes=0.0 * part.passes)


def _never_wide(table: ScheduleTable, *_: Any) -> Any:
    return np.zeros(table.count, dtype=bool)


def _occupancy_without_rounding(block_step: step.BlockStep) -> step.Occupancy:
    """Warps and their share of the schedulers as fractions."""
    warps: Any = block_step.table.threads_per_block / block_step.device.warp_lanes
    return replace(_OCCUPANCY(block_step), warps=warps)


def _fluid_schedulers(block_step: step.BlockStep) -> Floats:
    return block_step.occupancy.warps * block_step.occupancy.running / block_step.device.teu.group_size


def _occupancy_without_waves(block_step: step.BlockStep) -> step.Occupancy:
    """Blocks spread evenly over the units, in fractions."""
    occupancy = _OCCUPANCY(block_step)
    blocks_of_a_unit = block_step.table.block_count / block_step.device.unit_count
    running = np.minimum(np.maximum(1, occupancy.resident), np.maximum(1.0, blocks_of_a_unit))
    return replace(occupancy, running=running, rounds=blocks_of_a_unit / running)


def _block_limit(table: ScheduleTable, device: DeviceSpec, *_: Any) -> Ints:
    return np.full(table.count, device.limits.blocks_per_unit)


def _no_spills(device: DeviceSpec, needed: Ints, granted: Ints) -> Ints:
    return np.zeros_like(needed)


def _reads_of_whole_steps(table: ScheduleTable, load: Load, device: DeviceSpec, nest: LoopNest) -> Any:
    """Reads as if all loops were unrolled; the words that the compiler may hoist stay those of the real bodies."""
    part = _READS(table, load, device, _whole_step(table))
    return replace(part, words=_READS(table, load, device, nest).words)


def _whole_step(table: ScheduleTable) -> LoopNest:
    """Everything unrolled, every accumulator in a register."""
    unrolled = {axis: -(-size // table.reduce_threads) for axis, size in table.step.items()}
    never = np.zeros(table.count, dtype=bool)
    return LoopNest(unrolled, product(unrolled.values(), table.count), never, never)


def _never_local(table: ScheduleTable) -> LoopNest:
    return replace(_NEST(table), local=np.zeros(table.count, dtype=bool))


def _all_together(table: ScheduleTable, loads: Floats, guarded: bool) -> Floats:
    return np.minimum(loads, fetch.UNROLLED_LOADS)


def _one_pass(*_: Any) -> int:
    return 1


def _all_by_themselves(table: ScheduleTable, load: Load, loads: Floats, vector: Ints) -> Floats:
    return loads


def _instant_blocks(device: DeviceSpec) -> DeviceSpec:
    return replace_struct(device, block_launch_seconds=TINY)


#: The functions that replacements above still call.
_FETCH, _READS, _NEST, _OCCUPANCY = step.fetch, step.operand_reads, step.loop_nest, step.occupancy_of

#: The effects of RATIONAL; what follows a colon is a part of the effect before it.
EFFECTS: Sequence[Effect] = (
    Effect(
        "transactions",
        (
            (fetch, {"tile_transaction_bytes": _raw_bytes, "LINE_WAVEFRONTS": 0.0}),
            (operands, {"LINE_WAVEFRONTS": 0.0}),
            (transactions, {"touched_bytes": _raw_touched_bytes}),
            (stages, {"tile_transaction_bytes": _raw_bytes, "stored_transactions": _raw_stores}),
        ),
    ),
    Effect("transactions: of stores", ((stages, {"stored_transactions": _raw_stores}),)),
    Effect("transactions: lines of a fetch", ((fetch, {"LINE_WAVEFRONTS": 0.0}), (operands, {"LINE_WAVEFRONTS": 0.0}))),
    Effect("banks", ((operands, {"_passes": _ones}), (fetch, {"_store_passes": _one_pass}))),
    Effect("banks: of the fetch", ((fetch, {"_store_passes": _one_pass}),)),
    Effect("vectors", ((operands, {"VECTOR_BYTES": 1}), (fetch, {"_is_vector_access": _never_wide}))),
    Effect("vectors: of operands", ((operands, {"VECTOR_BYTES": 1}),)),
    Effect("density", ((breakdown, {"issue_seconds": _no_time}), (step, {"operand_reads": _free_reads}))),
    Effect("density: issue slots", ((breakdown, {"issue_seconds": _no_time}),)),
    Effect("cost of the fetch", ((step, {"fetch": _free_fetch}),)),
    Effect(
        "thread mapping",
        ((step, {"occupancy_of": _occupancy_without_rounding}), (stages, {"busiest_scheduler": _fluid_schedulers})),
    ),
    Effect("occupancy", ((step, {"blocks_per_unit": _block_limit, "spilled_registers": _no_spills}),)),
    Effect("occupancy: spills", ((step, {"spilled_registers": _no_spills}),)),
    Effect("compilers", ((step, {"loop_nest": _whole_step}), (breakdown, {"hoisting_factor": _one_pass}))),
    Effect("compilers: rolled loops", ((step, {"operand_reads": _reads_of_whole_steps}),)),
    Effect("compilers: local accumulators", ((step, {"loop_nest": _never_local}),)),
    Effect("compilers: hoisting", ((breakdown, {"hoisting_factor": _one_pass}),)),
    Effect(
        "compilers: loads in flight",
        ((stages, {"loads_in_flight": _all_together}), (fetch, {"loads_in_flight": _all_together})),
    ),
    Effect("compilers: guards", ((fetch, {"GUARD_INSTRUCTIONS": 0.0}),)),
    Effect("compilers: guards of a whole vector", ((fetch, {"_waits": _all_by_themselves}),)),
    Effect("latency", ((breakdown, {"waiting_seconds": _no_time}),)),
    Effect("overlap", ((breakdown, {"UNHIDDEN": 0.0, "UNHIDDEN_WAIT": 0.0}),)),
    Effect("overlap: of stages", ((breakdown, {"UNHIDDEN": 0.0}),)),
    Effect("overlap: of waiting", ((breakdown, {"UNHIDDEN_WAIT": 0.0}),)),
    Effect("overlap: with DRAM", ((breakdown, {"DRAM_OVERLAP": NO_SUM}),)),
    Effect("waves", ((step, {"occupancy_of": _occupancy_without_waves}),)),
    Effect("L2", ((breakdown, {"l2_seconds": _no_time, "stored_seconds_per_block": _no_time}),)),
    Effect("L2: reuse between blocks", ((stages, {"dram_bytes": lambda *_: np.inf}),)),
    Effect("L1 reuse", ((stages, {"L1_REUSE": 1}),)),
    Effect("DRAM", ((breakdown, {"dram_seconds": _no_time}),)),
    Effect("DRAM: rows", ((stages, {"row_factor": lambda *_: 1.0}),)),
    Effect("power limit", ((breakdown, {"power_seconds": _no_time}),)),
    Effect("block launch", device=_instant_blocks),
)


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """Both tables, and their pictures in ``out``."""
    from bench.accuracy.library_ablation import library_chart, library_rows, library_table

    full = figures(data)
    rows = [(effect.name, figures(data, effect)) for effect in EFFECTS]
    chart(full, rows, out / "ablation.png")
    views = [effect_table(full, rows)]
    calls = library_rows(data)
    if calls:
        library_chart(calls, out / "ablation_library.png")
        views.append(library_table(calls))
    return views


def effect_table(full: Figures, rows: Sequence[tuple[str, Figures]]) -> Table:
    """A row per effect: the figures without it, and in brackets by how much they differ from the full model's."""
    view = Table(box=None, pad_edge=False, title="Ansor's programs, RATIONAL without ...", title_justify="left")
    view.add_column("without")
    for column in ("first choice", "best of ten", "median error", "rank correlation", "flat median", "reductions"):
        view.add_column(column, justify="right")
    view.add_row("nothing: the full model", *_cells(full), style="bold", end_section=True)
    for name, found in rows:
        more = _cells(found.minus(full), sign="+")
        indent = "  " if ": " in name else ""
        view.add_row(indent + name, *(f"{a} ({b})" for a, b in zip(_cells(found), more, strict=True)))
    return view


def _cells(found: Figures, sign: str = "") -> tuple[str, ...]:
    return (
        f"{found.first:{sign}.3f}",
        f"{found.best_of_ten:{sign}.3f}",
        f"{found.median_error:{sign}.1%}",
        f"{found.rank_correlation:{sign}.3f}",
        f"{found.flat_median:{sign}.2%}",
        f"{found.reduction_error:{sign}.1%}",
    )


def chart(full: Figures, rows: Sequence[tuple[str, Figures]], path: Path) -> None:
    """Horizontal bars as a PNG: by how much each figure gets worse without an effect."""
    from matplotlib.figure import Figure

    shown: Sequence[tuple[str, Callable[[Figures], float]]] = (
        ("first choice, % slower", lambda f: 100 * (f.first - full.first)),
        ("best of ten, % slower", lambda f: 100 * (f.best_of_ten - full.best_of_ten)),
        ("median error, points", lambda f: 100 * (f.median_error - full.median_error)),
        ("rank correlation lost", lambda f: full.rank_correlation - f.rank_correlation),
        ("reductions: error, points", lambda f: 100 * (f.reduction_error - full.reduction_error)),
    )
    figure = Figure(figsize=(15, 0.27 * len(rows) + 1.2))
    figure.set_layout_engine("constrained")
    panels: list[Any] = figure.subplots(1, len(shown), sharey=True).tolist()
    for panel, (title, worse) in zip(panels, shown, strict=True):
        values = [worse(found) for _, found in rows]
        bars(panel, values, [""] * len(values))
        panel.set_title(title)
    panels[0].set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    figure.suptitle("Ansor's programs on a V100: what RATIONAL loses without an effect (red) or gains (blue)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
