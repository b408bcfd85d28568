"""Operators cut down to a few tiles, so that a CPU can run what was scheduled for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Axis, Tensor, loads
from sokoban.schedule.tile import TileSchedule


def cut_down(form: KernelForm, schedule: TileSchedule, vector: int = 4) -> KernelForm:
    """The same operator on axes of at most two full tiles plus the remainder; ``vector`` is how many neighbouring
    columns of a row a thread takes at most."""
    return resize(form, cut_sizes(form, schedule, vector))


def cut_sizes(form: KernelForm, schedule: TileSchedule, vector: int = 4) -> dict[str, int]:
    """The sizes of its axes then."""
    tiles = {**schedule.block_of, **schedule.step_of}
    if form.kind == "rows" or schedule.reduce_threads:
        # Columns are dealt to the threads in vectors.
        dealt = vector * max([count for _, count in schedule.reduce_threads] or [1])
        tiles |= dict.fromkeys((*form.columns, *form.reduced), dealt)
    return {axis: cut(size, tiles.get(axis, 1)) for axis, size in form.sizes.items()}


def cut(size: int, tile: int) -> int:
    """``min(size, 2 * tile + size % tile)``: 1000 in tiles of 64 becomes 168."""
    return min(size, 2 * tile + size % tile)


def resize(form: KernelForm, sizes: Mapping[str, int]) -> KernelForm:
    """The form over other axis sizes. A tensor keeps how far it extends beyond (or falls short of) its accesses."""
    expr = form.expr
    old = expr.sizes
    reach: dict[str, list[tuple[int, int]]] = {}
    for statement in expr.statements:
        for load in loads(statement.value):
            ends = [(index.bounds(old)[1], index.bounds(sizes)[1]) for index in load.indices]
            known = reach.setdefault(load.tensor, ends)
            reach[load.tensor] = [(max(a, b), max(x, y)) for (a, x), (b, y) in zip(known, ends, strict=True)]
    written = {statement.tensor: statement for statement in expr.statements}
    tensors = []
    for tensor in expr.tensors:
        if tensor.name in written:
            shape = tuple(sizes[axis] for axis in written[tensor.name].axes)
        else:
            ends = reach[tensor.name]
            shape = tuple(max(1, extent - was + now) for extent, (was, now) in zip(tensor.shape, ends, strict=True))
        tensors.append(Tensor(tensor.name, shape, tensor.dtype))
    axes = tuple(Axis(axis.name, sizes[axis.name]) for axis in expr.axes)
    return replace(form, expr=replace(expr, axes=axes, tensors=tuple(tensors)))
