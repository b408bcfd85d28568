"""Reading operands from shared memory in the inner loop: how many instructions, how wide, how many passes (5.5.2).

Everything follows from addresses. The elements that one thread reads in an unrolled body form a box in the staged
tile; equal ones are read once. Where a run of them is contiguous and every lane's start is aligned, the compiler reads
up to 16 bytes at once. What the 32 lanes of a warp read together then decides how many passes the banks need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.regions import DataDimension, data_dimension
from sokoban.language.expression import Load
from sokoban.model.gpu.banks import busiest_bank, lane_words, tensor_lane_addresses
from sokoban.model.gpu.loops import LoopNest
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.table import Floats, Ints, ScheduleTable

#: How often the device compiler merges the reads of points that it unrolled itself: in half of 400 such programs
#: compiled for sm_75 it did, in half it read every point by itself.
MERGED_BY_COMPILER = 0.5


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
    """Passes per read of a warp: by the banks where the tensor is staged, by the lines it touches where it is not."""
    staged = table.cached[load.tensor]
    passes = np.ones(width.shape) if lanes is None else _passes(table, load, device, width, lanes)
    if staged.all():
        return passes
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    words = tensor_lane_addresses(table, load, device) * element_bytes // (device.shared.bank_width_bytes or 4)
    words = words - words.min(axis=1, keepdims=True)
    return np.where(staged, passes, _passes(table, load, device, width, words, False))


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
    for axis, coefficient in dimension.terms:
        if axis in table.thread:
            # Virtual threads of a single thread lie side by side.
            alone = table.threads[axis] == 1
            size = np.where(alone, table.register_tile[axis], table.thread[axis])
            pieces = pieces * np.where(alone, 1, table.vthreads[axis])
        elif axis in table.step:
            size = nest.unrolled[axis]
        else:
            continue
        if len(dimension.terms) == 1:
            return (size, size), pieces  # the coefficient of a single axis is one
        span = span + abs(coefficient) * (size - 1)
        counted = counted * size
    return (span, np.minimum(span, counted)), pieces


def _passes(table: ScheduleTable, load: Load, device: DeviceSpec, width: Ints, lanes: Ints, staged=True) -> Floats:
    """Passes that the banks need for one read of ``width`` adjacent elements by every lane of a warp.

    Lanes that read the same word are served together, in vector reads too: a bank is as busy as the different words
    that the whole warp wants of it.
    """
    banks, bank_bytes = device.shared.bank_count or 32, device.shared.bank_width_bytes or 4
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    wide = np.minimum(np.maximum(width * element_bytes // bank_bytes, 1), banks)
    passes = np.ones(wide.shape)
    sizes = set(wide.ravel().tolist())
    for size in sizes:
        reads_so_wide = wide == size
        rows = reads_so_wide if reads_so_wide.ndim == 1 else reads_so_wide.any(axis=0)
        row_passes = np.zeros(table.count)
        row_passes[rows] = _wide_passes(lanes[rows], size, banks, device, staged)
        np.copyto(passes, row_passes, where=reads_so_wide)
    return passes


def _wide_passes(lanes, size, banks, device, staged):
    import os
    X = os.environ.get("X", "pml")
    words = lanes if size == 1 else lanes // size
    if "p" in X and size > 1:
        passes = busiest_bank(words.reshape(len(words), size, -1), banks // size).sum(axis=1)
        if "m" in X and (staged or "g" in X):
            pairs = np.zeros(len(words), dtype=bool)
            for distance in (1, 2):
                other = words[:, np.arange(words.shape[1]) ^ distance]
                pairs |= (words == other).all(axis=1)
            half = busiest_bank(words.reshape(len(words), size // 2, -1), banks // size).sum(axis=1)
            passes = np.where(pairs, half, passes)
    else:
        passes = busiest_bank(words, banks // size)
    least = 1
    if "r" in X:
        least = size
    if "l" in X and device.shared.lanes_per_cycle:
        least = max(least, device.warp_lanes // device.shared.lanes_per_cycle)
    return np.maximum(passes, least)
