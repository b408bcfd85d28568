"""Operators cut down to a few tiles, so that a CPU can run what was scheduled for a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sokoban.kernel.form import KernelForm
from sokoban.language.expression import (
    AffineIndex,
    Axis,
    GatheredIndex,
    Load,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    rewrite,
)
from sokoban.language.gathers import gathers
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.tile import TileSchedule

#: Rows whose largest or smallest element is looked for: one of so many notices when part of a row is left out.
SELECTED_ROWS = 32

#: Most elements of a dimension that is read at places which are read: it takes no more to see whether they are right.
MOST_PLACES = 128

_SELECTING = frozenset({"max", "min"})


def cut_down(form: KernelForm, schedule: TileSchedule, vector: int = 4) -> KernelForm:
    """An operator on axes cut to two full tiles and the remainder, of a pipeline to more steps (:func:`cut_sizes`).

    ``vector``: most neighbouring columns that a thread of a ``rows`` kernel takes at a time.
    """
    return resize(form, cut_sizes(form, schedule, vector))


def cut_sizes(form: KernelForm, schedule: TileSchedule, vector: int = 4) -> dict[str, int]:
    """Axis sizes after cutting to two full tiles and the remainder.

    A pipeline fetches inside its loop, and uses a buffer a second time, only where there are more steps than buffers:
    its innermost stepped axes keep as many tiles as that takes. A largest or smallest element that threads look for
    together is not missed by chance where there are many rows.
    """
    tiles = {**schedule.block_of, **schedule.step_of}
    if form.is_rows or schedule.reduce_threads:
        # Columns are dealt to the threads in vectors.
        dealt = vector * max([count for _, count in schedule.reduce_threads] or [1])
        tiles |= dict.fromkeys((*form.columns, *form.reduced), dealt)
    counts, needed = {}, schedule.stages + 1 if schedule.stages > 1 else 1
    for axis, step in reversed(schedule.step):
        available = form.sizes[axis] // step
        counts[axis] = max(2, min(needed, available))
        needed = -(-needed // max(1, min(counts[axis], available)))
    if schedule.reduce_threads and {each.reduction.function for each in form.reductions if each.reduction} & _SELECTING:
        rows = form.spatial[-1]
        counts[rows] = max(2, SELECTED_ROWS // tiles.get(rows, 1))
    return {axis: cut(size, tiles.get(axis, 1), counts.get(axis, 2)) for axis, size in form.sizes.items()}


def cut(size: int, tile: int, count: int = 2) -> int:
    """An axis cut to some full tiles and its remainder: ``min(size, count * tile + size % tile)``.

    >>> cut(1000, 64), cut(100, 64)
    (168, 100)
    """
    return min(size, count * tile + size % tile)


def resize(form: KernelForm, sizes: Mapping[str, int]) -> KernelForm:
    """An operator on axes of other ``sizes``; tensors extend beyond their accesses as far as before, or fall short so.

    Axes of a result are longer than asked for where a later statement reads more of it: ``H[i,j]`` as ``H[i,k]``.

    >>> from sokoban.kernel.form import kernel_form
    >>> from sokoban.language.parser import parse_program
    >>> form = kernel_form(parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 1000, "j": 100, "k": 50}, {}))
    >>> [tensor.shape for tensor in resize(form, {"i": 168, "j": 100, "k": 10}).expr.inputs]
    [(168, 10), (10, 100)]
    """
    expr = form.expr
    sizes = _covering(expr, sizes)
    # By dimension of a tensor: the largest index that is read over the axes as they were, and over the new ones; and
    # that of loads over the new ones that never left the tensor there.
    reach: dict[str, list[tuple[int, int]]] = {}
    inside: dict[str, list[int]] = {}
    reads: dict[str, list[Load]] = {}
    for statement in expr.statements:
        for load in loads(statement.value):
            ends = [_ends(index, expr.sizes, sizes) for index in load.indices]
            reads.setdefault(load.tensor, []).append(load)
            furthest = reach.setdefault(load.tensor, ends)
            reach[load.tensor] = [(max(a, b), max(x, y)) for (a, x), (b, y) in zip(furthest, ends, strict=True)]
            lasts = inside.setdefault(load.tensor, [0] * len(ends))
            stays = _stays_inside(load, expr)
            inside[load.tensor] = [
                max(last, end) if stay else last for last, (_, end), stay in zip(lasts, ends, stays, strict=True)
            ]
    written = {statement.tensor: statement for statement in expr.statements}
    tensors = []
    for tensor in expr.tensors:
        if tensor.name in written:
            shape = tuple(sizes[axis] for axis in written[tensor.name].axes)
        else:
            ends, lasts = reach[tensor.name], inside[tensor.name]
            shape = tuple(
                max(last + 1, extent + end - before)
                for extent, (before, end), last in zip(tensor.shape, ends, lasts, strict=True)
            )
            shape = tuple(
                min(extent, MOST_PLACES) if is_gathered else extent
                for extent, is_gathered in zip(shape, _gathered_dimensions(reads[tensor.name]), strict=True)
            )
            if len(set(reads[tensor.name])) > 1:
                # Another load may have made rows longer than an operand's: copies of 16 bytes may still begin there.
                piece = math.gcd(tensor.shape[-1], VECTOR_BYTES // tensor.element_bytes)
                shape = (*shape[:-1], -(-shape[-1] // piece) * piece)
        tensors.append(Tensor(tensor.name, shape, tensor.dtype))
    axes = tuple(Axis(axis.name, sizes[axis.name]) for axis in expr.axes)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    form = replace(form, expr=expr.rewritten(axes=axes, tensors=tuple(tensors)))
    return _with_places(form, shapes) if gathers(expr) else form


def _ends(index: AffineIndex, sizes: Mapping[str, int], new_sizes: Mapping[str, int]) -> tuple[int, int]:
    """The largest value of an index before and after; one that is read goes wherever the others do."""
    if isinstance(index, GatheredIndex):
        return 0, 0
    return index.bounds(sizes)[1], index.bounds(new_sizes)[1]


def _gathered_dimensions(reads: Sequence[Load]) -> list[bool]:
    """By dimension of a tensor, True where all of its reads are at places that are read."""
    by_dimension = zip(*(load.indices for load in reads), strict=True)
    return [all(isinstance(index, GatheredIndex) for index in indices) for indices in by_dimension]


def _with_places(form: KernelForm, shapes: Mapping[str, tuple[int, ...]]) -> KernelForm:
    """An operator whose places are those of tensors of other shapes."""

    def within(load: Load) -> Load:
        indices = tuple(
            replace(index, high=extent - 1 - index.low) if isinstance(index, GatheredIndex) else index
            for index, extent in zip(load.indices, shapes[load.tensor], strict=True)
        )
        return replace(load, indices=indices)

    def moved(statement: Statement) -> Statement:
        changed: dict[Value, Value] = {load: within(load) for load in loads(statement.value) if load.places}
        return replace(statement, value=rewrite(statement.value, changed))

    expr = form.expr.rewritten(statements=tuple(map(moved, form.expr.statements)))
    reductions = tuple(map(moved, form.reductions))
    return replace(form, expr=expr, reductions=reductions, final=moved(form.final))


def _stays_inside(load: Load, expr: TensorExpr) -> list[bool]:
    """By dimension of the tensor, True where a load stays within it: no guard is written there."""
    bounds = [index.bounds(expr.sizes) for index in load.indices]
    shape = expr.tensor_by_name[load.tensor].shape
    return [load.pad is None or (low >= 0 and high < extent) for (low, high), extent in zip(bounds, shape, strict=True)]


def _covering(expr: TensorExpr, sizes: Mapping[str, int]) -> dict[str, int]:
    """``sizes``, with which there is all that statements read of each other's results, and values for all ranks."""
    axes_of_result = {statement.tensor: statement.axes for statement in expr.statements}
    read = [load for statement in expr.statements for load in loads(statement.value) if load.pad is None]
    ranked = [each.reduction for each in expr.statements if each.reduction is not None and each.reduction.rank]
    grown = dict(sizes)
    while True:
        before = dict(grown)
        for reduction in ranked:
            assert reduction.rank is not None
            grown[reduction.axes[0]] = max(grown[reduction.axes[0]], grown[reduction.rank])
        for load in read:
            for axis, index in zip(axes_of_result.get(load.tensor, ()), load.indices, strict=False):
                grown[axis] = max(grown[axis], index.bounds(grown)[1] + 1)
        if grown == before:
            return grown
