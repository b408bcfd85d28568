"""Work of threads besides reading operands: their arithmetic, and the cost of a kernel's start and end.

A schedule is staged, with a loop over steps; or flat, with one step and nothing staged; or its threads share rows.
"""

from __future__ import annotations

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import NEAR_INSTRUCTIONS, makes_16_bits, value_instructions
from sokoban.model.gpu.row_work import RowWork, row_work
from sokoban.model.gpu.transactions import store_width
from sokoban.schedule.table import Bools, Floats, ScheduleTable, shares_rows

#: Instructions of a thread before it does anything, and those that divide the number of a block or thread by the
#: length of an axis that is no power of two, for quotient and remainder.
START_INSTRUCTIONS = 8.0
DIVISION_INSTRUCTIONS = 6.0


def row_work_of(table: ScheduleTable) -> RowWork | None:
    """Work of the threads of schedules whose threads share rows; None where there are no such schedules."""
    if not shares_rows(table).any():
        return None
    return row_work(table.form, table.reduce_threads, table.kept_columns)


def arithmetic_instructions(table: ScheduleTable, rows: RowWork | None) -> Floats:
    """Arithmetic instructions of one thread during one step: a multiply and an add of a sum fuse into one. Those of the
    final statement count where there is but one step.

    Args:
        table: the schedules.
        rows: what the threads do of those that share rows; see :func:`row_work_of`.
    """
    body, final = body_instructions(table.form)
    points = table.thread_points * max(1.0, body) + np.where(is_flat(table), final, 0.0)
    by_itself = table.accumulators * points
    return by_itself if rows is None else np.where(shares_rows(table), table.accumulators * rows.arithmetic, by_itself)


def body_instructions(form: KernelForm) -> tuple[float, float]:
    """Arithmetic instructions of a point of the body, and of the final statement behind a reduction."""
    if form.reduction is None:
        return value_instructions(form.final.value), 0.0
    return value_instructions(form.reductions[0].value), value_instructions(form.final.value)


def final_flops(form: KernelForm, *, near: bool = False) -> float:
    """Cost of the final statement of an element behind a reduction, in FLOPs of multiply-adds that take as long;
    ``near`` where kernels with matrix instructions compute it."""
    if form.reduction is None:
        return 0.0
    if near and makes_16_bits(form.expr):
        return 2.0 * value_instructions(form.final.value, costs=NEAR_INSTRUCTIONS)
    return 2.0 * value_instructions(form.final.value)


def is_flat(table: ScheduleTable) -> Bools:
    """Schedules that stage nothing and walk no steps: a thread's first and last instructions are a part of its work."""
    staged = [table.cached[load.tensor] for load in table.form.body_loads]
    return (table.step_count == 1) & ~np.logical_or.reduce(staged or [np.zeros(table.count, dtype=bool)])


def flat_instructions(table: ScheduleTable) -> Floats:
    """Instructions of a thread of a flat schedule (:func:`is_flat`) besides reads and arithmetic: where its elements
    lie, and its stores."""
    form = table.form
    total: Floats = np.full(table.count, START_INSTRUCTIONS)
    for axis in [axis for axis in form.spatial if form.sizes[axis] > 1][1:]:
        for count in (table.grid[axis], table.threads[axis]):
            division = np.where(count & (count - 1) == 0, 2.0, DIVISION_INSTRUCTIONS)
            total = total + np.where(count > 1, division, 0.0)
    dimensions = sum(len(load.indices) for load in (*form.body_loads, *form.final_loads))
    return total + dimensions + table.accumulators / store_width(table)
