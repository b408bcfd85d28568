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


def lane_addresses(table: ScheduleTable, load: Load, device: DeviceSpec, *, staged: bool) -> Ints:
    """Element addresses that the lanes of a warp read at one point of the inner loop; shape (schedules, lanes).

    ``staged`` addresses lie in the data tile of ``load`` in shared memory, storage padding included; otherwise in the
    whole tensor.
    """
    coordinate = _lane_coordinates(table, device)
    tensor = table.form.expr.tensor_by_name[load.tensor]
    extents = table.extents(load)
    address = np.zeros((table.count, device.warp_lanes), dtype=np.int64)
    pitch: Ints | int = 1
    for position in reversed(range(len(load.indices))):
        dimension = data_dimension(load.indices[position])
        scale = 1 if staged else dimension.stride
        for axis, coefficient in dimension.terms:
            if axis in coordinate:
                address += coordinate[axis] * np.reshape(coefficient * scale * pitch, (-1, 1))
        if not staged:
            pitch = pitch * tensor.shape[position]
        elif position == len(load.indices) - 1:
            pitch = extents[position] + table.padding[load.tensor]
        else:
            pitch = pitch * extents[position]
    return address


def _lane_coordinates(table: ScheduleTable, device: DeviceSpec) -> dict[str, Ints]:
    """First element of every lane of the first warp, by axis; lanes run along the last spatial axis first.

    Threads that share a reduction come before that where the reduction is contiguous in memory, else after it.
    """
    known = table.lane_coordinates.get(device.warp_lanes)
    if known is None:
        lanes = np.arange(device.warp_lanes, dtype=np.int64)[None, :]
        remaining = np.minimum(lanes, table.threads_per_block[:, None] - 1)
        known = {}
        last = table.form.reduced[-1] if table.form.reduced else ""
        if last and table.form.reduces_contiguously:
            known[last] = remaining % table.reduce_threads[:, None]
            remaining = remaining // table.reduce_threads[:, None]
        for axis in reversed(table.form.spatial):
            extent = table.threads[axis][:, None]
            if table.form.sizes[axis] > 1:
                known[axis] = remaining % extent * table.thread[axis][:, None]
            remaining = remaining // extent
        if last and not table.form.reduces_contiguously:
            known[last] = remaining % table.reduce_threads[:, None]
        table.lane_coordinates[device.warp_lanes] = known
    return known


def lane_words(table: ScheduleTable, load: Load, device: DeviceSpec) -> Ints:
    """Word addresses in the staged tile of ``load`` that the lanes of a warp read; shape (schedules, lanes).

    A word is one bank's width. Storage padding is included.
    """
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    address = lane_addresses(table, load, device, staged=True)
    width = device.shared.bank_width_bytes or 4
    return address if element_bytes == width else address * element_bytes // width


def cache_lines(table: ScheduleTable, load: Load, device: DeviceSpec, line_bytes: int = 128) -> Floats:
    """Different L1 lines that one warp touches per read of an operand that is not staged: one pass each."""
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    lines = np.sort(lane_addresses(table, load, device, staged=False) * element_bytes // line_bytes, axis=1)
    return 1.0 + (lines[:, 1:] != lines[:, :-1]).sum(axis=1)


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
