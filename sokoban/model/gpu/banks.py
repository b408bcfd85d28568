"""Shared-memory time from addresses: what one warp really touches when it reads an operand (thesis 5.5.2).

The threads of a warp are laid out over the tile as the code generator lays them out, last axis fastest. Their
addresses at one element of the inner loop decide everything: lanes that read the same word are served together
(broadcast), lanes that read different words of one bank wait for each other. Other elements and other warps read
translations of the same pattern.
"""

from __future__ import annotations

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.regions import data_dimension
from sokoban.language.expression import Load
from sokoban.schedule.table import Floats, Ints, ScheduleTable


def lane_parts(table: ScheduleTable, load: Load, device: DeviceSpec) -> tuple[Ints, Ints]:
    """Where the lanes of a warp read in the staged tile of ``load``: their place in a row, and the number of the row.

    Both have shape (schedules, lanes). An element's address is ``place + row * pitch``, where the pitch of a row
    includes storage padding.
    """
    memo = table.lane_parts.get((load, device.warp_lanes))
    if memo is None:
        place, row = table.by_order(load, lambda order: _lane_parts(table, load, device, order), lanes=True)
        memo = table.lane_parts[load, device.warp_lanes] = (place, row)
    return memo


def _lane_parts(table: ScheduleTable, load: Load, device: DeviceSpec, order: tuple[int, ...]) -> tuple[Ints, Ints]:
    """:func:`lane_parts` for tiles stored in ``order``: dimensions of the tensor, the innermost one last."""
    coordinate = _lane_coordinates(table, device)
    extents = table.extents(load)
    parts: list[Ints] = []
    pitch: Ints | int = 1
    zeros = address = np.zeros((table.count, device.warp_lanes), dtype=np.int64)
    for position in reversed(order):
        for axis, coefficient in data_dimension(load.indices[position]).terms:
            if axis in coordinate:
                scale = coefficient * pitch
                part = coordinate[axis] * (scale if isinstance(scale, int) else scale[:, None])
                address = part if address is zeros else address + part
        if position == order[-1]:
            parts.append(address)
            address = zeros
        else:
            pitch = pitch * extents[position]
    return parts[0], address


def lane_words(table: ScheduleTable, load: Load, device: DeviceSpec, padding: Ints | None = None) -> Ints:
    """Word addresses in the staged tile of ``load`` that the lanes of a warp read, shape (…, schedules, lanes).

    A word is as wide as a bank.

    Args:
        table: the schedules.
        load: of the tile.
        device: whose warps read.
        padding: storage padding in elements, shape (…, schedules): leading dimensions give several choices of it. The
            table's own where it is left out.
    """
    place, row = lane_parts(table, load, device)
    pitch = table.stored_row(load) + (table.padding[load.tensor] if padding is None else padding)
    address = place + row * np.asarray(pitch)[..., None]
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    width = device.shared.bank_width_bytes or 4
    return address if element_bytes == width else address * element_bytes // width


def tensor_lane_addresses(table: ScheduleTable, load: Load, device: DeviceSpec) -> Ints:
    """Element addresses in the whole tensor that the lanes of a warp read, but for a constant; shape (schedules,
    lanes)."""
    memo = table.lane_addresses.get((load, device.warp_lanes))
    if memo is not None:
        return memo
    coordinate = _lane_coordinates(table, device)
    shape = table.form.expr.tensor_by_name[load.tensor].shape
    address = np.zeros((table.count, device.warp_lanes), dtype=np.int64)
    pitch = 1
    for position in reversed(range(len(load.indices))):
        for axis, coefficient in load.indices[position].terms:
            if axis in coordinate:
                address += coordinate[axis] * (coefficient * pitch)
        pitch *= shape[position]
    table.lane_addresses[load, device.warp_lanes] = address
    return address


def _lane_coordinates(table: ScheduleTable, device: DeviceSpec) -> dict[str, Ints]:
    """First element of every lane of the first warp along each axis, shape (schedules, lanes); lanes run along the last
    spatial axis first.

    Threads that share a reduction come before that where the reduction is contiguous in memory, else after it.
    """
    coordinates = table.lane_coordinates.get(device.warp_lanes)
    if coordinates is None:
        lanes = np.arange(device.warp_lanes, dtype=np.int64)[None, :]
        remaining = np.minimum(lanes, table.threads_per_block[:, None] - 1)
        coordinates = {}
        last = table.form.reduced[-1] if table.form.reduced else ""
        if last and table.form.reduces_contiguously:
            remaining, coordinates[last] = np.divmod(remaining, table.reduce_threads[:, None])
        for axis in reversed(table.form.spatial):
            extent = table.threads[axis][:, None]
            remaining, thread = np.divmod(remaining, extent)
            if table.form.sizes[axis] > 1:
                coordinates[axis] = thread * table.thread[axis][:, None]
        if last and not table.form.reduces_contiguously:
            coordinates[last] = remaining % table.reduce_threads[:, None]
        table.lane_coordinates[device.warp_lanes] = coordinates
    return coordinates


def cache_lines(table: ScheduleTable, load: Load, device: DeviceSpec, line_bytes: int = 128) -> Floats:
    """Different L1 lines that one warp touches per read of an operand that is not staged: one pass each."""
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    lines = tensor_lane_addresses(table, load, device) * element_bytes // line_bytes
    lines.sort(axis=1)
    return 1.0 + np.add.reduce(lines[:, 1:] != lines[:, :-1], axis=1)


def read_passes(lanes: Ints, size: int, banks: int, *, merges: bool = True) -> Ints:
    """Passes of a read of ``size`` adjacent words by every lane of a warp; ``lanes`` are the first words, shape
    (schedules, lanes).

    Lanes that want the same word of a bank are served together, but a pass returns one register per lane: a read has
    :func:`read_parts` parts, each of as many lanes fewer, one after the other (``merges`` as there).

    >>> read_passes(np.arange(0, 128, 4)[None, :], size=4, banks=32).tolist()  # four words of its own for every lane
    [4]
    >>> read_passes(np.zeros((1, 32), dtype=np.int64), size=4, banks=32).tolist()  # the same four for all
    [2]
    """
    if size == 1:
        return busiest_bank(lanes, banks)
    words, parts = lanes // size, read_parts(lanes, size, merges=merges)
    passes = np.zeros(len(words), dtype=np.int64)
    for count in set(parts.tolist()):
        rows = parts == count
        by_part = words[rows].reshape(int(rows.sum()), count, -1)
        passes[rows] = np.add.reduce(busiest_bank(by_part, banks // size), axis=1)
    return passes


def read_parts(lanes: Ints, size: int, *, merges: bool = True) -> Ints:
    """Parts of a read of ``size`` words by every lane, which a unit serves one after the other; ``lanes`` as in
    :func:`read_passes`.

    A warp of few lanes is served at once. Half as many parts where every lane and a neighbour of it, the next or the
    one behind that, read the same: their registers are returned together (NVIDIA, answer to "Unexpected shared memory
    bank conflict" in its developer forums, 2019). Reads of L1 do not gain by that (``merges`` false).
    """
    words, places = lanes // size, np.arange(lanes.shape[1])
    if size == 1 or not merges or len(places) < 2 * size:
        return np.full(len(words), size if len(places) >= 2 * size else 1)
    alike = (words == words[:, places ^ 1]).all(axis=1) | (words == words[:, places ^ 2]).all(axis=1)
    return np.where(alike, size // 2, size)


def cycles_of_request(device: DeviceSpec) -> int:
    """Cycles in which the load/store units of a unit take the addresses of a warp."""
    return -(-device.warp_lanes // (device.shared.lanes_per_cycle or device.warp_lanes))


def busiest_bank(words: Ints, banks: int) -> Ints:
    """Different words in the bank that has most of them; shape (…, lanes) -> (…).

    Lanes that read one word are served together: two lanes wait for each other if they read different words of one
    bank.

    >>> busiest_bank(np.array([[0, 1, 2, 3], [0, 4, 8, 8]]), banks=4).tolist()
    [1, 3]
    """
    ordered = words.reshape(-1, words.shape[-1]).copy()
    ordered.sort(axis=1)
    # Integer division is slow.
    bank = ordered % banks if banks & (banks - 1) else ordered & (banks - 1)
    np.copyto(bank[:, 1:], banks, where=ordered[:, 1:] == ordered[:, :-1])
    bank += np.arange(0, len(ordered) * (banks + 1), banks + 1)[:, None]
    counts = np.bincount(bank.ravel(), minlength=len(ordered) * (banks + 1))
    busiest: Ints = np.maximum.reduce(counts.reshape(-1, banks + 1)[:, :banks], axis=1)
    return busiest.reshape(words.shape[:-1])
