"""The inner loops of a thread after two compilers: what is unrolled, and whether accumulators stay in registers.

A thread walks, outermost first, what is left of a step, what is left of its elements, ``inner_step``,
``inner_thread`` and the virtual threads. The code generator unrolls from the inside as long as the schedule's
``unroll`` allows; the device compiler then unrolls loops of constant length that are short enough. Operands are shared
between all points of an unrolled body (FMA density, thesis 5.5.2), and an array of accumulators can only live in
registers if every loop that indexes it is unrolled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sokoban.schedule.table import Bools, Ints, ScheduleTable, product

#: Virtual threads up to which TVM writes every copy out; more become a loop.
UNROLLED_VTHREADS = 15

#: Statements up to which the device compiler unrolls loops over the reduction, read off the SASS of 1,200 tiled
#: programs compiled for sm_75, where bodies of up to a thousand statements came out flat.
COMPILER_UNROLL = 1024

#: Statements up to which it unrolls loops over accumulators in time to keep these in registers, read off the same
#: programs' stack frames (Matthews correlation 0.71 between 190 and 260).
PROMOTED_STATEMENTS = 256

#: Fewest accumulators for which that matters: smaller arrays get their registers anyway.
PROMOTED_ACCUMULATORS = 16


@dataclass(frozen=True, eq=False)
class LoopNest:
    """Loops of a thread as both compilers leave them; one entry per schedule.

    Attributes:
        unrolled: points of each reduction axis in the innermost unrolled body.
        unrolled_points: their product.
        local: whether the accumulators live in local memory, since a loop that indexes them is not unrolled.
        is_left: whether unrolling the reduction is left to the device compiler, which then merges the reads of
            different points only at times.
    """

    unrolled: Mapping[str, Ints]
    unrolled_points: Ints
    local: Bools
    is_left: Bools

    @cached_property
    def merged_and_separate(self) -> LoopNest:
        """The nest as it is and, second along a new first dimension, with one point per body."""
        ones = np.ones_like(self.unrolled_points)
        unrolled = {axis: np.array([points, ones]) for axis, points in self.unrolled.items()}
        return LoopNest(unrolled, np.array([self.unrolled_points, ones]), self.local, self.is_left)


def loop_nest(table: ScheduleTable) -> LoopNest:
    """Follow both compilers through the loops of every schedule, from the inside."""
    ones = table.ones
    copies = product(table.vthreads.values(), table.count)
    written = np.where(copies <= UNROLLED_VTHREADS, copies, 1)
    generated, compiled, reused = written, written, written
    open_generated = open_reused = np.ones(table.count, dtype=bool)
    local = np.zeros(table.count, dtype=bool)
    unrolled = dict.fromkeys(table.step, ones)
    written_points = ones
    limit = np.maximum(table.unroll, COMPILER_UNROLL)
    for axis, length in _loops(table, copies // written):
        single = length == 1
        if single.all():
            continue
        statements, flat, used = generated * length, compiled * length, reused * length
        fits = statements <= table.unroll
        by_generator = open_generated & fits
        open_generated = open_generated & (fits | single)
        generated = np.where(by_generator, statements, generated)
        is_left = ~(by_generator | single)
        by_compiler = is_left & (flat <= PROMOTED_STATEMENTS)
        compiled = np.where(by_generator | by_compiler, flat, compiled)
        inside = open_reused & ((used <= limit) | single)
        open_reused = inside
        reused = np.where(inside, used, reused)
        if axis in unrolled:
            unrolled[axis] = np.where(inside, unrolled[axis] * length, unrolled[axis])
            written_points = np.where(by_generator, written_points * length, written_points)
        else:
            local = local | (is_left & ~by_compiler)
    local = local & (table.accumulators > PROMOTED_ACCUMULATORS) & ~table.warp_tile
    points = product(unrolled.values(), table.count)
    return LoopNest(unrolled, points, local, (written_points == 1) & (points > 1))


def _loops(table: ScheduleTable, vthread_loop: Ints) -> list[tuple[str, Ints]]:
    """The loops of a thread with their lengths, innermost first; the virtual threads' loop has no axis."""
    thread = {axis: table.inner_thread.get(axis, size) for axis, size in table.thread.items()}
    steps = {axis: -(-size // table.reduce_threads) for axis, size in table.step.items()}
    inner = table.inner_step
    step = {axis: np.minimum(inner[axis], size) if axis in inner else size for axis, size in steps.items()}
    spatial, reduced = reversed(list(table.thread)), list(reversed(list(table.step)))
    axes = list(spatial)
    loops = [("", vthread_loop)]
    loops += [(axis, thread[axis]) for axis in axes]
    loops += [(axis, step[axis]) for axis in reduced]
    loops += [(axis, table.thread[axis] // thread[axis]) for axis in axes if axis in table.inner_thread]
    loops += [(axis, -(-steps[axis] // step[axis])) for axis in reduced if axis in table.inner_step]
    return loops
