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

from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, product

#: Virtual threads up to which TVM writes every copy out; more become a loop.
UNROLLED_VTHREADS = 15

#: Statements up to which the device compiler unrolls loops over the reduction, read off the SASS of 1,200 tiled
#: programs compiled for sm_75, where bodies of up to a thousand statements came out flat.
COMPILER_UNROLL = 1024

#: Statements of a loop over accumulators, all inside it included, from which on it is more likely than not that the
#: device compiler unrolls it too late to keep these in registers, and how likely that becomes at most. The probability
#: is that share of 1 / (1 + (430 / statements)**8): of convolutions that Ansor measured (CUDA 10.2) 2% take more than
#: three times the time of registers below 224 statements, 17% at 240, 62% at 450 and 84% beyond 1,000. Random halves of
#: the operators choose 430 or 520. (Stack frames of 1,200 programs compiled by NVRTC 12.9 speak for 190 to 260.)
PROMOTED_STATEMENTS = 430.0
UNPROMOTED_SHARE = 0.9

#: Fewest accumulators for which that matters: smaller arrays get their registers anyway.
PROMOTED_ACCUMULATORS = 16


@dataclass(frozen=True, eq=False)
class LoopNest:
    """Loops of a thread as both compilers leave them; one entry per schedule.

    Attributes:
        unrolled: points of each reduction axis in the innermost unrolled body.
        unrolled_points: their product.
        local_share: probability that the accumulators live in local memory, since a loop that indexes them is not
            unrolled in time.
        is_left: whether unrolling the reduction is left to the device compiler, which then merges the reads of
            different points only at times.
    """

    unrolled: Mapping[str, Ints]
    unrolled_points: Ints
    local_share: Floats
    is_left: Bools

    @property
    def local(self) -> Bools:
        """Schedules whose accumulators live in local memory more likely than not."""
        return self.local_share > UNPROMOTED_SHARE / 2

    @cached_property
    def merged_and_separate(self) -> LoopNest:
        """The nest as it is and, second along a new first dimension, with one point per body."""
        ones = np.ones_like(self.unrolled_points)
        unrolled = {axis: np.array([points, ones]) for axis, points in self.unrolled.items()}
        return LoopNest(unrolled, np.array([self.unrolled_points, ones]), self.local_share, self.is_left)


def loop_nest(table: ScheduleTable) -> LoopNest:
    """Follow both compilers through the loops of every schedule, from the inside."""
    ones = table.ones
    copies = product(table.vthreads.values(), table.count)
    written = np.where(copies <= UNROLLED_VTHREADS, copies, 1)
    generated, flat, reused = written, written, written
    open_generated = open_reused = np.ones(table.count, dtype=bool)
    promoted = table.zeros
    unrolled = dict.fromkeys(table.step, ones)
    written_points = ones
    limit = np.maximum(table.unroll, COMPILER_UNROLL)
    for axis, length in _loops(table, copies // written):
        single = length == 1
        if single.all():
            continue
        statements, flat, used = generated * length, flat * length, reused * length
        fits = statements <= table.unroll
        by_generator = open_generated & fits
        open_generated = open_generated & (fits | single)
        generated = np.where(by_generator, statements, generated)
        inside = open_reused & ((used <= limit) | single)
        open_reused = inside
        reused = np.where(inside, used, reused)
        if axis in unrolled:
            unrolled[axis] = np.where(inside, unrolled[axis] * length, unrolled[axis])
            written_points = np.where(by_generator, written_points * length, written_points)
        else:
            promoted = np.where(by_generator | single, promoted, flat)
    promoted = np.where((table.accumulators > PROMOTED_ACCUMULATORS) & ~table.warp_tile, promoted, 0)
    points = product(unrolled.values(), table.count)
    return LoopNest(unrolled, points, _local_share(promoted), (written_points == 1) & (points > 1))


def _local_share(statements: Ints) -> Floats:
    """Probability of local accumulators by statements of the largest loop over them that is left to the device
    compiler; 0 where there is none. (Squares, so that compiled code has the same bits.)"""
    ratio = PROMOTED_STATEMENTS / np.maximum(1, statements)
    square = ratio * ratio
    fourth = square * square
    share: Floats = np.where(statements > 0, UNPROMOTED_SHARE / (1.0 + fourth * fourth), 0.0)
    return share


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
