"""Variants of schedules that stage every operand: tiles turned, bodies unrolled, steps fetched ahead.

They are what code generation makes of a tile besides its sizes, and better nearly always; so they are proposed for the
tiles that rank best rather than searched together with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sokoban.kernel_form import KernelForm
from sokoban.regions import storage_order
from sokoban.table import Bools, Ints, ScheduleTable

#: Multiply-adds of one unrolled body: 8 KiB of code, which the first instruction cache holds (12 KiB since Volta).
BODY_STATEMENTS = 512

#: Shortest steps worth a barrier, in points of the reduction.
SHORTEST_STEP = 4


def fully_staged(table: ScheduleTable) -> Bools:
    """Schedules by multiply-adds that stage all operands of a reduction whose threads work alone."""
    form = table.form
    if form.kind != "tile" or form.reduction is None or not all(load.indices for load in form.body_loads):
        return np.zeros(table.count, dtype=bool)
    alone = ~table.warp_tile & (table.reduce_threads == 1)
    return np.logical_and.reduce([alone, *(table.cached[load.tensor] for load in form.body_loads)])


def turned_tensors(form: KernelForm) -> tuple[str, ...]:
    """Tensors whose staged tiles are better stored in another order: the reduction walks them innermost."""
    outputs = tuple(axis for axis in form.spatial if form.sizes[axis] > 1)
    loads = [load for load in form.body_loads if load.indices]
    found = [load.tensor for load in loads if storage_order(load, outputs)[-1] != len(load.indices) - 1]
    return tuple(dict.fromkeys(found))


def with_layouts(table: ScheduleTable, staged: Bools, stages: Ints | None = None) -> ScheduleTable:
    """The schedules with their tiles turned and their bodies unrolled where ``staged``, as tensors are elsewhere;
    with other ``stages`` where these are given."""
    turned = turned_tensors(table.form)
    columns = {name: staged if name in turned else np.zeros(table.count, dtype=bool) for name in table.cached}
    unroll = np.where(staged, BODY_STATEMENTS, table.unroll)
    return replace(table, turned=columns, unroll=unroll, stages=table.stages if stages is None else stages)


def fetched_ahead(table: ScheduleTable) -> list[ScheduleTable]:
    """The fully staged schedules of one stage with two, in their own steps and in shorter ones: with no load to wait
    for, a step need not be long."""
    rows = table.rows(np.flatnonzero(fully_staged(table) & (table.stages == 1)))
    if not rows.count:
        return []
    ahead = replace(rows, stages=np.full(rows.count, 2, dtype=np.int64))
    found = [ahead.rows(np.flatnonzero(ahead.step_count > 1))]
    for parts in (2, 4):
        step = _shortened(ahead, parts)
        changed = np.flatnonzero(np.any([step[axis] != ahead.step[axis] for axis in step], axis=0))
        found.append(replace(ahead, step=step).rows(changed))
    return [part for part in found if part.count]


def _shortened(table: ScheduleTable, parts: int) -> Mapping[str, Ints]:
    """Steps of a ``parts``-th, along the first reduction axis that can be cut so; as they are where none can."""
    step = dict(table.step)
    open_ = table.step_points >= parts * SHORTEST_STEP
    for axis in table.form.reduced:
        cut = open_ & (step[axis] % parts == 0)
        step[axis] = np.where(cut, step[axis] // parts, step[axis])
        open_ = open_ & ~cut
    return step
