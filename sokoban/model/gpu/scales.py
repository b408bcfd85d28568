"""Scales of the blocks of a product's depth, as kernels of matrix instructions apply them: what they add to a step.

A thread reads the scales of its rows in place, and adds the sums of a step, scaled, to those of all steps: a
multiply-add a sum. The products of other warps run meanwhile.
"""

from __future__ import annotations

import math

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.language.expression import Load
from sokoban.model.gpu.transactions import tile_transaction_bytes
from sokoban.schedule.table import Floats, Ints, ScheduleTable

#: Rows that the lanes of a warp read the scales of at a time: those of the sums of a thread are as many apart (PTX ISA,
#: fragments of the sums of ``mma.m16n8k32`` and ``wgmma.m64nNk32``).
WARP_READ_ROWS = 8

#: Instructions per read of a scale: itself, its address, its guard (read off the SASS for sm_89 and sm_90a).
READ_INSTRUCTIONS = 4.0

#: Bytes of a line of L1, of which a read passes one at a time.
_LINE_BYTES = 128


def scale_instructions(table: ScheduleTable) -> Floats:
    """Instructions of a warp during one step: reads of scales, their product for every row, and a multiply-add for each
    sum of a thread. The first product of a step takes zeros that no instruction writes."""
    loads = table.form.scale_loads
    if not loads:
        return np.zeros(table.count)
    reads = sum((_reads(table, load) for load in loads), np.zeros(table.count))
    products = _thread_rows(table) * (len(loads) - 1)
    return READ_INSTRUCTIONS * reads + products + np.ceil(table.accumulators / 32)


def scale_passes(table: ScheduleTable) -> Floats:
    """Passes of a warp through L1 during one step: a line at a time."""
    return sum((_reads(table, load) * _lines(table, load) for load in table.form.scale_loads), np.zeros(table.count))


def scale_bytes(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Bytes that a block takes from L2 in a step, on average: sectors of several steps stay in L1."""
    total: Floats = np.zeros(table.count)
    transaction_bytes = (device.l2 or device.dram).transaction_bytes
    tile = {**table.block, **{axis: table.ones * table.form.sizes[axis] for axis in table.form.reduced}}
    for load in table.form.scale_loads:
        total = total + tile_transaction_bytes(table, load, tile, transaction_bytes) / table.step_count
    return total


def _thread_rows(table: ScheduleTable) -> Ints:
    """Rows whose sums a thread has."""
    roles = table.form.roles
    assert roles is not None
    return table.thread[roles.m] // WARP_READ_ROWS


def _reads(table: ScheduleTable, load: Load) -> Ints:
    """Reads of a thread in a step: one for each of its rows, or one for all."""
    return _thread_rows(table) if _row_stride(table, load) else table.ones


def _lines(table: ScheduleTable, load: Load) -> float:
    """Lines of L1 that the lanes of a warp read at a time."""
    span_bytes = WARP_READ_ROWS * _row_stride(table, load) * table.form.expr.tensor_by_name[load.tensor].element_bytes
    return min(max(1.0, span_bytes / _LINE_BYTES), float(WARP_READ_ROWS))


def _row_stride(table: ScheduleTable, load: Load) -> int:
    """Elements of a tensor of scales from one row of the product to the next; 0 where rows have it in common."""
    roles = table.form.roles
    assert roles is not None
    shape = table.form.expr.tensor_by_name[load.tensor].shape
    for position, index in enumerate(load.indices):
        if index.coefficient(roles.m):
            return math.prod(shape[position + 1 :])
    return 0
