"""Shared-memory time from addresses: what one warp really touches when it reads an operand (thesis 5.5.2).

The threads of a warp are laid out over the tile as the code generator lays them out, last axis fastest. Their
addresses at one element of the inner loop decide everything: lanes that read the same word are served together
(broadcast), lanes that read different words of one bank wait for each other. Other elements and other warps read
translations of the same pattern.
"""

from __future__ import annotations

import numpy as np

from hal import DeviceSpec
from sokoban.expression import Load
from sokoban.regions import data_dimension
from sokoban.table import Floats, Ints, ScheduleTable


def lane_words(table: ScheduleTable, load: Load, device: DeviceSpec) -> Ints:
    """Word addresses in the staged tile of ``load`` that the lanes of a warp read; shape (schedules, lanes).

    A word is one bank's width. Storage padding is included.
    """
    lanes = np.arange(device.warp_lanes, dtype=np.int64)[None, :]
    lanes = np.minimum(lanes, table.threads_per_block[:, None] - 1)
    coordinate: dict[str, Ints] = {}
    remaining = lanes
    for axis in reversed(list(table.block)):
        extent = table.threads[axis][:, None]
        coordinate[axis] = remaining % extent * table.thread[axis][:, None]
        remaining = remaining // extent
    dimensions = [data_dimension(index) for index in load.indices]
    address = np.zeros((table.count, device.warp_lanes), dtype=np.int64)
    pitch = np.ones(table.count, dtype=np.int64)
    for position in reversed(range(len(dimensions))):
        dimension = dimensions[position]
        for axis, coefficient in dimension.terms:
            if axis in coordinate:
                address += coordinate[axis] * (coefficient * pitch)[:, None]
        extent = dimension.extent(table.block_tile)
        if position == len(dimensions) - 1:
            extent = extent + table.padding[load.tensor]
        pitch = pitch * extent
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    return address * element_bytes // (device.shared.bank_width_bytes or 4)


def wavefronts(table: ScheduleTable, load: Load, device: DeviceSpec, width: Ints) -> Floats:
    """Passes through shared memory that one warp needs per read instruction of ``load``, at least one.

    ``width`` is the number of adjacent words a lane reads at once. A scalar read needs as many passes as the busiest
    bank has different words; a vector read of distinct, contiguous pieces is limited by the bytes alone.
    """
    words = np.sort(lane_words(table, load, device), axis=1)
    distinct = np.ones_like(words, dtype=bool)
    distinct[:, 1:] = words[:, 1:] != words[:, :-1]
    banks = device.shared.bank_count or 32
    bank = np.where(distinct, words % banks, banks)
    rows = np.arange(table.count)[:, None] * (banks + 1)
    counts = np.bincount((rows + bank).ravel(), minlength=table.count * (banks + 1)).reshape(table.count, banks + 1)
    busiest = counts[:, :banks].max(axis=1)
    by_bytes = np.ceil(distinct.sum(axis=1) * width / banks)
    return np.where(width > 1, np.maximum(1.0, by_bytes), np.maximum(1, busiest)).astype(np.float64)
