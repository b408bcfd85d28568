"""Reading operands from shared memory in the inner loop: how many instructions, how wide, how many passes (5.5.2).

Everything follows from addresses. The elements that one thread reads in an unrolled body form a box in the staged
tile; equal ones are read once. Where a run of them is contiguous and every lane's start is aligned, the compiler reads
up to 16 bytes at once. What the 32 lanes of a warp read together then decides how many passes the banks need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.regions import DataDimension, data_dimension
from sokoban.language.expression import Load
from sokoban.model.gpu.banks import cycles_of_request, lane_words, read_passes, tensor_lane_addresses
from sokoban.model.gpu.loops import COMPILER_UNROLL, LoopNest
from sokoban.model.gpu.occupancy import OVERHEAD_REGISTERS
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.table import Floats, Ints, ScheduleTable, product

#: Multiply-adds and reads of an unrolled body beyond which the device compiler no longer orders them so that few values
#: wait for their next use: 17 window sums compiled for sm_86 spill from 4,470 on and not up to 3,960.
ORDERED_INSTRUCTIONS = 4200

#: Registers that an instruction can name.
MOST_REGISTERS = 255

#: How often the device compiler merges the reads of points that it unrolled itself: in half of 400 such programs
#: compiled for sm_75 it did; by the times of programs on V100 it does so in most.
MERGED_BY_COMPILER = 0.85


@dataclass(frozen=True, eq=False)
class OperandReads:
    """One load of the body: what a thread reads during a step of its block.

    Attributes:
        words: different elements in one unrolled body.
        instructions: read instructions per step.
        passes: passes through the banks (lines of L1 where the tensor is not staged) per warp and step.
        width: elements per instruction.
    """

    words: Floats
    instructions: Floats
    passes: Floats
    width: Ints


def operand_reads(table: ScheduleTable, load: Load, device: DeviceSpec, nest: LoopNest) -> OperandReads:
    """Reads of ``load`` per step: of a thread, but for the passes, which are those of a warp."""
    # Whether merged or not: both ways at once are half the calls.
    is_left = nest.is_left.any()
    words, instructions, width = _instructions(table, load, nest.merged_and_separate if is_left else nest)
    lanes = lane_words(table, load, device) if table.cached[load.tensor].any() else None
    conflicts = _conflicts(table, load, device, width, lanes)
    if not is_left:
        return OperandReads(words, instructions, instructions * conflicts, width)
    merged, separate = instructions
    share = np.where(nest.is_left, MERGED_BY_COMPILER, 1.0)
    unmerged = (1.0 - share) * separate
    passes = share * (merged * conflicts[0]) + unmerged * conflicts[1]
    return OperandReads(words[0], share * merged + unmerged, passes, width[0])


def _instructions(table: ScheduleTable, load: Load, nest: LoopNest) -> tuple[Floats, Floats, Ints]:
    """Words of a body, read instructions per step, and elements per instruction, if every body is one piece of code."""
    bodies = np.maximum(1.0, table.thread_points / nest.unrolled_points)
    part = _footprint(table, load, nest)
    words, run = part.words, part.run
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    widest = max(1, VECTOR_BYTES // element_bytes)
    fits = 1 << np.log2(np.maximum(1, run)).astype(np.int64)
    aligned_width = np.minimum(np.gcd(part.alignment, widest), fits)
    given = table.reads.get(load.tensor, table.zeros)
    # What is read in place is read word by word: the compiler cannot prove alignment in a tensor it does not lay out.
    by_itself = np.where(table.cached[load.tensor], aligned_width, 1)
    first = np.where(given > 0, np.minimum(aligned_width, given), by_itself)
    # A run of 15 with 4 at once: three wide reads and three single ones. Rows that an odd pitch pushes out of line
    # begin and end with single ones.
    aligned = np.gcd(part.runs_alignment, first) / first
    wide, single = np.divmod(run, first)
    per_run = wide + single + np.where(single == 0, 2.0, 1.0) * (1.0 - aligned)
    return words, words / run * np.minimum(run, per_run) * bodies, first


def _conflicts(table: ScheduleTable, load: Load, device: DeviceSpec, width: Ints, lanes: Ints | None) -> Floats:
    """Passes per read of a warp: by the banks of the tile where the tensor is staged, else by those of L1, which is the
    same memory, where the tensor's own addresses count."""
    staged = table.cached[load.tensor]
    passes = np.ones(width.shape) if lanes is None else _passes(load, table, device, width, lanes)
    if staged.all():
        return passes
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    addresses = tensor_lane_addresses(table, load, device)
    words = (addresses - addresses[:, :1]) * element_bytes // (device.shared.bank_width_bytes or 4)
    return np.where(staged, passes, _passes(load, table, device, width, words, merges=False))


class _Footprint(NamedTuple):
    """Elements of a staged tile that a thread reads in an unrolled body.

    Attributes:
        words: different elements.
        run: how many of them lie side by side.
        alignment: greatest common divisor of the addresses where the first run of a body may start; 0 for any.
        runs_alignment: that of the addresses where any run may start.
    """

    words: Floats
    run: Ints
    alignment: Ints
    runs_alignment: Ints


def _footprint(table: ScheduleTable, load: Load, nest: LoopNest) -> _Footprint:
    """Elements of the tile of ``load`` that a thread reads, as it is stored."""
    return _Footprint(*table.by_order(load, lambda order: _stored(table, load, nest, order)))


def _stored(table: ScheduleTable, load: Load, nest: LoopNest, order: tuple[int, ...]) -> _Footprint:
    """:func:`_footprint` of tiles stored in ``order``: dimensions of the tensor, the innermost one last."""
    words: Floats = np.ones(nest.unrolled_points.shape)
    run = pitch = table.ones
    alignment = runs_alignment = np.zeros_like(nest.unrolled_points)
    contiguous = run == pitch
    extents = table.extents(load)
    for position in reversed(order):
        dimension = data_dimension(load.indices[position])
        extent, pieces = _reach(table, dimension, nest)
        for axis, coefficient in dimension.terms:
            if axis in table.thread:
                elements, others = table.thread[axis], table.threads[axis] > 1
            elif axis in table.step:
                elements, others = nest.unrolled[axis], nest.unrolled[axis] < table.step[axis]
            else:
                continue
            # Where other threads or bodies start, and where runs of this one do.
            stride = pitch if coefficient == 1 else abs(coefficient) * pitch
            alignment = np.gcd(alignment, others * (elements * stride))
            if position != order[-1]:
                runs_alignment = np.gcd(runs_alignment, ((elements > 1) & ~contiguous) * stride)
        span, different = extent
        run = np.where(contiguous & (different == span), run * different, run)
        words = words * (different * pieces)
        stored = extents[position]
        if position == order[-1]:
            stored = stored + table.padding[load.tensor]
        contiguous = contiguous & (different == stored)
        pitch = pitch * stored
    return _Footprint(words, run, alignment, np.gcd(alignment, runs_alignment))


def _reach(table: ScheduleTable, dimension: DataDimension, nest: LoopNest) -> tuple[tuple[Ints, Ints], Ints]:
    """Along one dimension: (span, different coordinates) of a thread's adjacent elements, and how many such pieces its
    virtual threads make."""
    span = counted = pieces = table.ones
    copies: list[tuple[Ints, Ints]] = []
    for axis, coefficient in dimension.terms:
        if axis in table.thread:
            # Virtual threads of a single thread lie side by side.
            alone = table.threads[axis] == 1
            size = np.where(alone, table.register_tile[axis], table.thread[axis])
            copies.append((np.where(alone, 1, table.vthreads[axis]), abs(coefficient) * table.threads[axis] * size))
        elif axis in table.step:
            size = nest.unrolled[axis]
        else:
            continue
        if len(dimension.terms) == 1:
            return (size, size), copies[0][0] if copies else pieces  # the coefficient of a single axis is one
        span = span + abs(coefficient) * (size - 1)
        counted = counted * size
    different = np.minimum(span, counted)
    for number, apart in copies:
        # Windows of virtual threads that overlap are one, whose elements are read once.
        overlap = (number > 1) & (apart < span)
        joined = span + apart * (number - 1)
        different = np.where(overlap, np.minimum(joined, different * number), different)
        span = np.where(overlap, joined, span)
        pieces = pieces * np.where(overlap, 1, number)
    return (span, different), pieces


def window_spills(table: ScheduleTable, nest: LoopNest, reads: Mapping[Load, OperandReads]) -> Floats:
    """Values of an unrolled body that a thread has no register for until it uses them again.

    Where the windows of virtual threads overlap, what one of them reads is used by the next one a few turns later. Up
    to :data:`ORDERED_INSTRUCTIONS` the compiler brings the uses together; beyond, all that come in between are held.
    """
    spilled = np.zeros(table.count)
    if not reads or int(table.unroll.max(initial=0)) <= COMPILER_UNROLL:
        return spilled
    body = table.accumulators * nest.unrolled_points + sum(part.words for part in reads.values())
    held = np.zeros(table.count)
    for load in reads:
        words = np.ones(table.count)
        for index in reversed(load.indices):
            dimension = data_dimension(index)
            (_, different), pieces = _reach(table, dimension, nest)
            window = product([nest.unrolled[axis] for axis, _ in dimension.terms if axis in table.step], table.count)
            for axis, coefficient in dimension.terms:
                if axis in table.thread:
                    apart = abs(coefficient) * table.threads[axis] * table.thread[axis]
                    copies = np.where(table.threads[axis] > 1, table.vthreads[axis] - 1, 0)
                    held = held + words * copies * np.clip(window - apart, 0, apart)
            words = words * (different * pieces)
    room = MOST_REGISTERS - OVERHEAD_REGISTERS - table.accumulators
    return np.where(body > ORDERED_INSTRUCTIONS, np.maximum(0.0, held - room), 0.0)


def _passes(
    load: Load, table: ScheduleTable, device: DeviceSpec, width: Ints, lanes: Ints, *, merges: bool = True
) -> Floats:
    """Passes that the banks need for one read of ``width`` adjacent elements by every lane of a warp."""
    banks, bank_bytes = device.shared.bank_count or 32, device.shared.bank_width_bytes or 4
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    wide = np.minimum(np.maximum(width * element_bytes // bank_bytes, 1), banks)
    passes = np.empty(wide.shape)
    for size in set(wide.ravel().tolist()):
        reads_so_wide = wide == size
        rows = reads_so_wide if reads_so_wide.ndim == 1 else reads_so_wide.any(axis=0)
        row_passes = np.zeros(table.count)
        row_passes[rows] = read_passes(lanes[rows], size, banks, merges=merges)
        np.copyto(passes, row_passes, where=reads_so_wide)
    return np.maximum(passes, cycles_of_request(device))
