"""Data that later steps read again, and the share of them that a cache still has: reuse distances.

A step of a window's rows, or of its columns, reads what an earlier step has read for the outputs next to them. Between
both lie some turns of a loop, within which all loads touch their own data: where these fit into the cache, nothing
comes anew. That is the way in which :mod:`sokoban.model.cpu.traffic` counts for processors; here it holds for L1 and
the steps of the blocks of a unit, and for L2 and those of all blocks that run together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.kernel.regions import data_dimension
from sokoban.language.expression import Load
from sokoban.schedule.table import Floats, Ints, ScheduleTable

#: Bytes of the data of a load within a tile of all axes.
BytesOf = Callable[[Load, Mapping[str, Ints]], Floats]


def bytes_of_all_steps(
    table: ScheduleTable, load: Load, tile: Mapping[str, Ints], capacity: Floats | float, bytes_of: BytesOf
) -> Floats:
    """Bytes of a load that come into a cache while blocks walk all steps of their reduction.

    From the innermost loop over steps outwards, ``Q = Q_inside (kept F / F_inside + (1 - kept) turns)``: ``F`` is what
    the load touches within everything up to a loop, and ``kept`` follows from what all loads touch until data are used
    again.

    Args:
        table: the schedules.
        load: the operand's access.
        tile: elements of what shares the cache, by spatial axis.
        capacity: bytes of the cache.
        bytes_of: data of a load within a tile.
    """
    form = table.form
    steps = {axis: np.minimum(table.step[axis], form.sizes[axis]) for axis in form.reduced}
    covered = {**tile, **steps}
    inside = bytes_of(load, covered)
    moved = inside
    for axis in reversed(form.reduced):
        touched = sum(bytes_of(each, covered) for each in form.body_loads)
        covered = {**covered, axis: table.ones * form.sizes[axis]}
        turns = np.ceil(form.sizes[axis] / steps[axis])
        through = bytes_of(load, covered)
        kept = np.clip(2.0 - touched * turns_between(form, load, axis) / capacity, 0.0, 1.0)
        moved = moved * (kept * np.minimum(through / inside, turns) + (1.0 - kept) * turns)
        inside = through
    return moved


def turns_between(form: KernelForm, load: Load, axis: str) -> float:
    """Turns of the loop over a reduction axis between two uses of the same data: the stride of a window.

    >>> from sokoban.kernel.form import kernel_form
    >>> from sokoban.language.operators import operator_from_data
    >>> sizes = {"n": 1, "c": 8, "h": 16, "w": 16, "f": 8, "kh": 3, "kw": 3, "stride": 2}
    >>> form = kernel_form(operator_from_data({"op": "conv2d", **sizes}))
    >>> [turns_between(form, form.body_loads[0], axis) for axis in form.reduced]
    [1.0, 2.0, 2.0]
    """
    turns = 1.0
    for index in load.indices:
        terms = dict(data_dimension(index).terms)
        across = [abs(coefficient) for other, coefficient in terms.items() if other in form.spatial]
        if axis in terms and across:
            turns = max(turns, min(across) / abs(terms[axis]))
    return turns


def is_read_again(form: KernelForm, load: Load) -> bool:
    """True if steps of the reduction read data of earlier ones: an output axis and one of the reduction walk the same
    dimension."""
    spatial, reduced = set(form.spatial), set(form.reduced)
    walked = ({axis for axis, _ in index.terms} for index in load.indices)
    return any(axes & spatial and axes & reduced for axes in walked)
