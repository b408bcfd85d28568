"""Work of threads that share a row: instructions, accesses and waits, from :func:`sokoban.schedule.rows.row_plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import value_instructions
from sokoban.language.expression import Load, Reduction
from sokoban.model.gpu.banks import cache_lines
from sokoban.model.gpu.fetch import LINE_WAVEFRONTS
from sokoban.model.gpu.transactions import tile_transaction_bytes
from sokoban.schedule.rows import loads_together, row_columns, row_plan
from sokoban.schedule.table import Floats, Ints, ScheduleTable

#: Instructions per vector besides its accesses: address, and who still takes part.
TURN_INSTRUCTIONS = 1.5

#: Instructions by which warps exchange a result: two barriers, stores and loads, branches for those that take part.
EXCHANGE_INSTRUCTIONS = 16.0

_WARP_LANES = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class RowWork:
    """Work of a thread for one row; one entry per schedule.

    Attributes:
        arithmetic: instructions that compute, those by which threads combine their results included.
        instructions: all of them.
        loads: accesses of global memory, by load.
        shared_accesses: accesses of what shared memory keeps of a row, by load.
        walks: how often a thread reads along a row in global memory, by load; what is not read again counts less.
        width: elements per access, by load.
        kept_registers: 32-bit registers that hold the row.
        batches: how often a thread waits for memory.
    """

    arithmetic: Floats
    instructions: Floats
    loads: Mapping[Load, Floats]
    shared_accesses: Mapping[Load, Floats]
    walks: Mapping[Load, Floats]
    width: Mapping[Load, Ints]
    kept_registers: Floats
    batches: Floats


def row_work(form: KernelForm, reduce_threads: Ints, kept_columns: Ints) -> RowWork:
    """Work of each of the threads that share a row; ``reduce_threads``: how many share one, ``kept_columns``: what
    shared memory keeps of it, by schedule."""
    pairs = list(zip(reduce_threads.tolist(), kept_columns.tolist(), strict=True))
    place = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    works = [_work(form, threads, column_count) for threads, column_count in place]
    inverse = np.array([place[pair] for pair in pairs])

    def column(of: Callable[[_Work], float]) -> Floats:
        return np.array([of(work) for work in works])[inverse]

    def columns(of: Callable[[_Work], Mapping[Load, float]]) -> dict[Load, Any]:
        return {load: np.array([of(work)[load] for work in works])[inverse] for load in works[0].loads}

    return RowWork(
        arithmetic=column(lambda work: work.arithmetic),
        instructions=column(lambda work: work.instructions),
        loads=columns(lambda work: work.loads),
        shared_accesses=columns(lambda work: work.shared_accesses),
        walks=columns(lambda work: work.walks),
        width=columns(lambda work: work.width),
        kept_registers=column(lambda work: work.kept_registers),
        batches=column(lambda work: work.batches),
    )


@dataclass(frozen=True, kw_only=True)
class _Work:
    """:class:`RowWork` for one number of threads."""

    arithmetic: float
    instructions: float
    loads: Mapping[Load, float]
    shared_accesses: Mapping[Load, float]
    walks: Mapping[Load, float]
    width: Mapping[Load, int]
    kept_registers: float
    batches: float


def _work(form: KernelForm, threads: int, kept_columns: int) -> _Work:
    """Work of a thread for one row that ``threads`` threads share."""
    plan = row_plan(form, threads, kept_columns)
    columns = plan.turns * plan.vector
    # Of what is kept, the part that is read again nevertheless, and the part in shared memory.
    again = 1.0 - (plan.register_turns + plan.shared_turns) / plan.turns
    in_shared = plan.shared_turns / plan.turns
    loads: dict[Load, float] = dict.fromkeys((load for group in plan.reads for load in group), 0.0)
    walks, shared = dict(loads), dict(loads)
    width = {load: plan.vector if load in plan.wide else 1 for load in loads}
    tensors, axes = form.expr.tensor_by_name, row_columns(form)
    arithmetic = others = batches = 0.0
    for value, reads in zip(plan.values, plan.reads, strict=True):
        is_final = not isinstance(value, Reduction)
        walked = columns if form.columns or not is_final else 1
        varying = value_instructions(value, axes)
        # A half-precision element is converted wherever it is used.
        converted = sum(tensors[load.tensor].element_bytes < 4 for load in reads)
        arithmetic += walked * (varying + converted) + value_instructions(value) - varying
        accesses = 0.0
        walked_loads = 0
        for load in reads:
            share = again if load in plan.kept and walks[load] else 1.0
            walks[load] += share
            loads[load] += share * columns / width[load]
            accesses += share * columns / width[load]
            walked_loads += share > 0.0
            if load in plan.kept:
                shared[load] += in_shared * plan.turns
                others += in_shared * plan.turns
        if walked_loads:
            in_registers = plan.kept if plan.register_turns == plan.turns else ()
            operands = sum(load not in in_registers for load in reads)
            loads_under_way = loads_together(plan, threads, operands) * walked_loads
            batches += max(1.0, accesses / loads_under_way)
            others += accesses + TURN_INSTRUCTIONS * plan.turns
        if is_final:
            others += plan.turns if plan.stores_wide else walked
            continue
        combining, exchanging = _combining(threads)
        arithmetic, others = arithmetic + combining, others + exchanging
    registers = sum(
        plan.register_turns * plan.vector * max(0.5, tensors[load.tensor].element_bytes / 4) for load in plan.kept
    )
    registers = max(registers, columns if plan.remembered is not None else 0)
    return _Work(
        arithmetic=arithmetic,
        instructions=arithmetic + others,
        loads=loads,
        shared_accesses=shared,
        walks=walks,
        width=width,
        kept_registers=registers,
        batches=batches,
    )


def _combining(threads: int) -> tuple[float, float]:
    """Arithmetic and other instructions by which threads combine a result: a shuffle and an operation for every halving
    of a warp, and where there are several warps a pass through shared memory and the same once more.

    >>> _combining(1), _combining(8), _combining(64)
    ((0.0, 0.0), (3, 4.0), (6, 22.0))
    """
    if threads == 1:
        return 0.0, 0.0
    inside = math.ceil(math.log2(min(threads, _WARP_LANES)))
    if threads <= _WARP_LANES:
        return inside, inside + 1.0
    between = math.ceil(math.log2(-(-threads // _WARP_LANES)))
    return inside + between, inside + between + EXCHANGE_INSTRUCTIONS


def row_passes(table: ScheduleTable, device: DeviceSpec, rows: RowWork) -> Floats:
    """Passes through L1 of a warp whose threads share rows, by the lines that they touch."""
    passes: Floats = np.zeros(table.count)
    for load, accesses in rows.loads.items():
        width = rows.width[load]
        access_bytes = device.warp_lanes * width * table.form.expr.tensor_by_name[load.tensor].element_bytes
        lines = np.where(width > 1, access_bytes / 128, cache_lines(table, load, device))
        passes = passes + table.accumulators * accesses * np.maximum(1.0, LINE_WAVEFRONTS * lines)
        # Columns of a row lie in shared memory vector by vector: every word passes once.
        row_bytes = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
        shared_passes = np.maximum(1.0, access_bytes / row_bytes) * rows.shared_accesses[load]
        passes = passes + table.accumulators * shared_passes
    return passes


def bytes_again(table: ScheduleTable, device: DeviceSpec, running: Ints, rows: RowWork) -> Floats:
    """Bytes that DRAM delivers again of rows that are walked several times, where the rows that all running blocks work
    on do not stay in L2. ``running``: blocks that a unit runs at once."""
    again: Floats = np.zeros(table.count)
    room = 0.0 if device.l2 is None else device.l2.capacity_bytes / 2
    for load, walks in rows.walks.items():
        tensor = table.form.expr.tensor_by_name[load.tensor]
        block_bytes = tile_transaction_bytes(table, load, table.block_tile, device.dram.transaction_bytes)
        worked_on = block_bytes / table.accumulators * np.minimum(running * device.unit_count, table.block_count)
        again = again + np.where(worked_on > room, (walks - 1.0) * tensor.size_bytes, 0.0)
    return again


def row_bytes(table: ScheduleTable, transaction_bytes: int, rows: RowWork) -> Floats:
    """Bytes in transactions that a block reads of its rows, as often as it reads along them."""
    total: Floats = np.zeros(table.count)
    for load, walks in rows.walks.items():
        total = total + walks * tile_transaction_bytes(table, load, table.block_tile, transaction_bytes)
    return total
