"""Windows read in place: whether a thread takes what its outputs read together into registers, and what that is.

Outputs that lie side by side share most of what their windows cover. A schedule that stages nothing and unrolls a
thread's whole work lets every element be loaded once, whatever number of windows it lies in (halo reuse).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.language.expression import AffineIndex, Load
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule

#: Statements of a thread's patch that are worth unrolling: 1,000 multiply-adds with their loads are 32 KiB of code.
PATCH_STATEMENTS = 1024


@dataclass(frozen=True)
class Slide:
    """The dimension along which a thread walks its patch of the input, a row after the other.

    Attributes:
        position: of the dimension among the indices of the loads that have it.
        axis: the output axis that moves windows along the dimension.
        stride: elements between windows of neighbouring outputs.
        window: the reduction axis within a window.
        dilation: elements between the points of a window.
    """

    position: int
    axis: str
    stride: int
    window: str
    dilation: int


def has_windows(form: KernelForm) -> bool:
    """True if some read moves along a dimension with an output and a point of the reduction at once."""
    if any(load.places for load in form.body_loads):
        return False  # what they read lies nowhere near each other
    return any(_window(form, index) is not None for load in form.body_loads for index in load.indices)


def reads_patches(form: KernelForm, schedule: TileSchedule) -> bool:
    """True if a schedule asks for windows in registers: nothing staged, all of a thread's work unrolled."""
    if not form.is_tile or form.reduction is None or schedule.uses_matrix:
        return False
    if schedule.cached or schedule.reduce_threads or schedule.stages > 1 or not has_windows(form):
        return False
    if any(schedule.step_of.get(axis, form.sizes[axis]) < form.sizes[axis] for axis in form.reduced):
        return False
    if any(coefficient < 0 for load in form.body_loads for index in load.indices for _, coefficient in index.terms):
        return False
    points = math.prod(form.sizes[axis] for axis in form.reduced)
    return math.prod(schedule.register_tile.values()) * points <= schedule.unroll


def with_patches(table: ScheduleTable) -> ScheduleTable:
    """The schedules with all of a thread's work unrolled where that lets it read windows from registers."""
    form = table.form
    if not form.is_tile or form.reduction is None or not has_windows(form):
        return table
    staged = np.logical_or.reduce([table.cached[load.tensor] for load in form.body_loads])
    works_alone = ~staged & ~table.warp_tile & (table.reduce_threads == 1) & (table.step_count == 1)
    fits = works_alone & (table.accumulators * table.step_points <= PATCH_STATEMENTS)
    return replace(table, unroll=np.where(fits, PATCH_STATEMENTS, table.unroll))


def slide_of(form: KernelForm, thread: Mapping[str, int]) -> Slide | None:
    """The dimension along which a thread walks its patch: the outermost in which several of its windows overlap.

    ``thread``: outputs of the thread, by spatial axis.
    """
    for load in form.body_loads:
        for position, index in enumerate(load.indices):
            window = _window(form, index)
            if window is None or thread[window[0]] == 1:
                continue
            axis, point = window
            return Slide(position, axis, index.coefficient(axis), point, index.coefficient(point))
    return None


def slides(load: Load, slide: Slide) -> bool:
    """True if ``load`` is walked along ``slide``: it moves by that stride and dilation in that dimension alone."""
    for position, index in enumerate(load.indices):
        moved = (index.coefficient(slide.axis), index.coefficient(slide.window))
        if moved != ((slide.stride, slide.dilation) if position == slide.position else (0, 0)):
            return False
    return len(load.indices) > slide.position


def _window(form: KernelForm, index: AffineIndex) -> tuple[str, str] | None:
    """The output axis and the reduction axis of an index that has one of each."""
    spatial = [axis for axis in index.axes if axis in form.spatial]
    reduced = [axis for axis in index.axes if axis in form.reduced]
    return (spatial[0], reduced[0]) if len(spatial) == len(reduced) == 1 else None
