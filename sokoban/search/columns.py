"""Columns of a search: tiles put together as :class:`ScheduleTable`, and taken apart again."""

from __future__ import annotations

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MMA_STAGES
from sokoban.schedule.pipelines import fully_staged, with_layouts
from sokoban.schedule.table import INSTRUCTION_NUMBER, Bools, Ints, ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.windows import with_patches
from sokoban.search.space import Family, Tiles

#: Adjacent elements of a 16-byte access in single precision.
ADJACENT = 4

#: Storage padding of matrix operands: fragment rows may start at any multiple of eight halves.
OPERAND_PADDING = 8

#: Loop iterations that the code generator unrolls.
UNROLL = 64


def adjacent(form: KernelForm, family: Family, register: Ints) -> Ints:
    """Adjacent elements of a thread's tile along each axis; the rest are strided copies.

    Staged tiles are read four elements at a time along every axis; without staging lanes stay adjacent along the last
    axis, except for what a vector holds where nothing is reduced. Warps own their fragments in one piece.

    Args:
        form: the operator.
        family: the structure of the schedules.
        register: elements of a thread (of a warp for matrix instructions), shape (schedules, spatial axes).
    """
    if family.roles is not None:
        return register
    if family.staged and form.reduction is not None:
        return np.where(register % ADJACENT == 0, ADJACENT, register)
    inner = register.copy()
    inner[:, -1] = np.gcd(register[:, -1], ADJACENT) if form.reduction is None else 1
    return inner


def tile_table(form: KernelForm, family: Family, tiles: Tiles) -> ScheduleTable:
    """The table of some tiles, a schedule of the family for each."""
    inner = adjacent(form, family, tiles.register)
    padding = OPERAND_PADDING if family.instruction == Instruction.WMMA else 0
    return _table(
        form,
        block=tiles.block,
        thread=inner,
        vthreads=tiles.register // inner,
        step=tiles.step,
        reduce_threads=np.ones(tiles.count, dtype=np.int64),
        cached={name: np.full(tiles.count, name in family.staged) for name in _body_tensors(form)},
        padding=np.full(tiles.count, padding, dtype=np.int64),
        instruction=family.instruction,
    )


def shared_table(form: KernelForm, block: Ints, threads: Ints) -> ScheduleTable:
    """The table of schedules in which ``threads`` threads share a reduction and each has one output of ``block``.

    Args:
        form: the operator.
        block: elements of a block, shape (schedules, spatial axes).
        threads: that share a reduction, shape (schedules,).
    """
    count, ones = len(block), np.ones_like(block)
    whole_step = np.array([[form.sizes[axis] for axis in form.reduced]] * count, dtype=np.int64).reshape(count, -1)
    return _table(
        form,
        block=block,
        thread=ones,
        vthreads=ones,
        step=whole_step,
        reduce_threads=threads,
        cached={name: np.zeros(count, dtype=bool) for name in _body_tensors(form)},
        padding=np.zeros(count, dtype=np.int64),
    )


def _body_tensors(form: KernelForm) -> tuple[str, ...]:
    """Tensors that the body reads, each once."""
    return tuple(dict.fromkeys(load.tensor for load in form.body_loads))


def _table(
    form: KernelForm,
    *,
    block: Ints,
    thread: Ints,
    vthreads: Ints,
    step: Ints,
    reduce_threads: Ints,
    cached: dict[str, Bools],
    padding: Ints,
    instruction: Instruction = Instruction.FMA,
) -> ScheduleTable:
    """A table of arrays that have a row per schedule and a column per axis; operands are laid out where all are
    staged."""
    count = len(block)
    table = ScheduleTable(
        form=form,
        block=dict(zip(form.spatial, np.ascontiguousarray(block.T), strict=True)),
        thread=dict(zip(form.spatial, np.ascontiguousarray(thread.T), strict=True)),
        vthreads=dict(zip(form.spatial, np.ascontiguousarray(vthreads.T), strict=True)),
        step=dict(zip(form.reduced, np.ascontiguousarray(step.T), strict=True)),
        reduce_threads=reduce_threads,
        cached=cached,
        padding={name: np.where(staged, padding, 0) for name, staged in cached.items()},
        vector={},
        unroll=np.full(count, UNROLL, dtype=np.int64),
        stages=np.full(count, MMA_STAGES[0] if instruction.is_mma else 1, dtype=np.int64),
        instruction=np.full(count, INSTRUCTION_NUMBER[instruction], dtype=np.int64),
    )
    return with_patches(with_layouts(table, fully_staged(table)))


def schedule_at(table: ScheduleTable, row: int) -> TileSchedule:
    """One row as a :class:`TileSchedule`, written as construction writes its own."""
    form = table.form

    def sizes(mapping: object) -> tuple[tuple[str, int], ...]:
        assert isinstance(mapping, dict)
        return tuple((name, int(column[row])) for name, column in mapping.items())

    cached = tuple(name for name, staged in table.cached.items() if staged[row])
    shared = int(table.reduce_threads[row])
    is_rows = shared > 1 or form.is_rows
    return TileSchedule(
        block=sizes(table.block),
        thread=sizes(table.thread),
        vthreads=() if is_rows else sizes(table.vthreads),
        step=() if is_rows else sizes(table.step),
        reduce_threads=tuple((axis, shared if axis == form.reduced[-1] else 1) for axis in form.reduced)
        if is_rows
        else (),
        cached=cached,
        padding=tuple((name, int(table.padding[name][row])) for name in cached if table.padding[name][row]),
        unroll=int(table.unroll[row]),
        instruction=table.instruction_at(row),
        stages=int(table.stages[row]),
        asynchronous=bool(table.asynchronous[row]),
        raster=int(table.raster[row]),
        cluster=int(table.cluster[row]),
        launched=int(table.launched[row]),
        kept_columns=int(table.kept_columns[row]),
        turned=tuple(name for name in cached if table.turned[name][row]),
    )
