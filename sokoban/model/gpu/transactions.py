"""Global-memory traffic in whole transactions (thesis 5.5.2, "Underutilized Memory Transactions")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.regions import DataDimension, data_dimension
from sokoban.language.expression import GatheredIndex, Load
from sokoban.model.gpu.reuse import bytes_of_all_steps, is_read_again
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.table import Floats, Ints, ScheduleTable, product

#: Share of L2 that keeps what is read again, besides results and other data; beyond all of it nothing is kept.
KEPT_SHARE = 0.5


def tile_transaction_bytes(
    table: ScheduleTable, load: Load, tile: Mapping[str, Ints], transaction_bytes: int, by_lane: bool = False
) -> Floats:
    """Bytes moved when a block reads the data tile of ``load`` once, rounded up to transactions.

    A row of the tile is contiguous; rows that span a whole tensor row continue into the next one. A row whose start
    is not aligned touches one transaction more, as often as its offset demands. No element takes more than one
    transaction.

    Args:
        table: the schedules.
        load: of the tile.
        tile: elements of a block by axis, those of the reduction included.
        transaction_bytes: of the layer that is read.
        by_lane: whether every element is fetched by itself.
    """
    tensor = table.form.expr.tensor_by_name[load.tensor]
    dimensions = [data_dimension(index) for index in load.indices]
    if not dimensions:
        return np.full(table.count, float(transaction_bytes))
    needed = table.extents(load) if tile is table.block_tile else [d.extent(tile) for d in dimensions]
    extents = [np.minimum(extent, size) for extent, size in zip(needed, tensor.shape, strict=True)]
    elements = product(extents, table.count).astype(np.float64)
    if by_lane:
        return elements * transaction_bytes
    run = ((extents[-1] - 1) * dimensions[-1].stride + 1).astype(np.float64)
    rows = elements / extents[-1]
    spans_row = (extents[-1] >= tensor.shape[-1]) & (dimensions[-1].stride == 1)
    for position in range(len(dimensions) - 2, -1, -1):
        if not spans_row.any():
            break
        run = np.where(spans_row, run * extents[position], run)
        rows = np.where(spans_row, rows / extents[position], rows)
        spans_row = spans_row & (extents[position] >= tensor.shape[position]) & (dimensions[position].stride == 1)
    run_bytes = run * tensor.element_bytes
    start = _row_alignment_bytes(table, load, dimensions[-1], tile)
    # A run of r bytes starting at a multiple of s: on average (T - s) / T of a transaction more than r / T needs.
    per_row = np.where(
        start >= transaction_bytes,
        np.ceil(run_bytes / transaction_bytes),
        (run_bytes + transaction_bytes - start) / transaction_bytes,
    )
    return np.minimum(rows * per_row, elements) * transaction_bytes


def _row_alignment_bytes(table: ScheduleTable, load: Load, innermost: DataDimension, tile: Mapping[str, Ints]) -> Ints:
    """Largest power of two, in bytes, that divides the address of every row start of every block's tile."""
    tensor = table.form.expr.tensor_by_name[load.tensor]
    start = table.zeros
    for axis, coefficient in innermost.terms:
        # An axis in a single tile starts at zero, wherever the others do.
        step = np.where(tile[axis] < table.form.sizes[axis], coefficient * innermost.stride * tile[axis], 0)
        start = np.gcd(start, step)
    if len(tensor.shape) > 1:
        start = np.gcd(start, tensor.shape[-1])
    start = np.gcd(start, innermost.offset) if innermost.offset else start
    start = np.where(start == 0, 1 << 20, start)
    return (start & -start) * tensor.element_bytes


@dataclass(frozen=True, eq=False)
class SuperTile:
    """Area that the blocks which run at the same time cover together.

    Attributes:
        tile: elements by axis; reduction axes in full.
        rounds: such tiles until the operator is covered.
    """

    tile: Mapping[str, Ints]
    rounds: Floats


def super_tile(table: ScheduleTable, resident_blocks: Ints, raster: Ints | None = None) -> SuperTile:
    """The tile of consecutive blocks, which run along the last axis first, or down bands of it.

    Args:
        table: the schedules.
        resident_blocks: blocks that run at the same time on the whole device.
        raster: width of the bands in blocks, 0 without; that of the schedules where it is left out.
    """
    raster = table.raster if raster is None else raster
    if raster.any():
        return _banded_super_tile(table, resident_blocks, raster)
    form = table.form
    remaining = np.maximum(1, resident_blocks)
    tile: dict[str, Ints] = {axis: table.ones * form.sizes[axis] for axis in (*form.columns, *form.reduced)}
    rounds = np.ones(table.count)
    for axis in reversed(form.spatial):
        if form.sizes[axis] == 1:
            tile[axis] = table.ones
            continue
        grid = table.grid[axis]
        cover = np.minimum(grid, remaining)
        remaining = np.maximum(1, remaining // cover)
        tile[axis] = np.minimum(cover * table.block[axis], form.sizes[axis])
        rounds = rounds * -(-grid // cover)
    return SuperTile(tile, rounds)


def _banded_super_tile(table: ScheduleTable, resident_blocks: Ints, raster: Ints) -> SuperTile:
    """:func:`super_tile` where some schedules have bands (:func:`sokoban.schedule.raster.raster_axes`): blocks fill the
    width of a band, then what it goes down, then further bands, then the other axes."""
    form = table.form
    remaining = np.maximum(1, resident_blocks)
    tile: dict[str, Ints] = {axis: table.ones * form.sizes[axis] for axis in (*form.columns, *form.reduced)}
    rounds = np.ones(table.count)
    several = sum(((grid > 1).astype(np.int64) for grid in table.grid.values()), table.zeros)
    banded = (raster > 0) & (several > 1)
    axes_behind, bands, across = table.zeros, table.ones, dict.fromkeys(form.spatial, table.ones)
    for axis in reversed(form.spatial):
        grid = table.grid[axis]
        is_across, is_down = banded & (grid > 1) & (axes_behind == 0), banded & (grid > 1) & (axes_behind == 1)
        width = np.where(is_across, np.minimum(grid, np.maximum(1, raster)), grid)
        bands = np.where(is_across, -(-grid // width), bands)
        cover = np.minimum(width, remaining)
        remaining = np.maximum(1, remaining // cover)
        rounds = rounds * -(-width // cover)
        across[axis] = cover
        # Whoever has come down a band goes on to the next one.
        concurrent = np.where(is_down, np.minimum(bands, remaining), 1)
        remaining = np.maximum(1, remaining // concurrent)
        rounds = np.where(is_down, rounds * -(-bands // concurrent), rounds)
        for other in form.spatial[form.spatial.index(axis) + 1 :]:
            is_band = is_down & (table.grid[other] > 1)
            across[other] = np.where(is_band, np.minimum(table.grid[other], across[other] * concurrent), across[other])
        axes_behind = axes_behind + (grid > 1)
    for axis in form.spatial:
        tile[axis] = np.minimum(across[axis] * table.block[axis], form.sizes[axis])
    return SuperTile(tile, rounds)


def dram_bytes(table: ScheduleTable, load: Load, device: DeviceSpec, together: SuperTile) -> Floats:
    """Bytes of ``load``'s tensor that come from DRAM: compulsory traffic, plus what L2 cannot keep between waves.

    The blocks that run at the same time share the data of their super-tile through L2. The next ones read theirs
    again, unless the tensor stays in L2 as a whole; and so do steps of a window, where L2 has not room for what all
    blocks read in between.
    """
    tensor = table.form.expr.tensor_by_name[load.tensor]
    compulsory = touched_bytes(table.form, load, device.dram.transaction_bytes)
    if keeps_in_l2(table.form, load, device):
        return np.full(table.count, compulsory)
    # A super-tile is large: its rows waste as much of their transactions as the whole tensor's do.
    elements: Floats = np.ones(table.count)
    for index, size in zip(load.indices, tensor.shape, strict=True):
        elements = elements * np.minimum(data_dimension(index).extent(together.tile), size)
    touched, _ = touched_parts(table.form, load, device.dram.transaction_bytes)
    once = np.maximum(together.rounds * elements * (compulsory / touched), compulsory)
    if device.l2 is None or not is_read_again(table.form, load):
        return once
    in_all = bytes_of_all_steps(table, load, together.tile, l2_room(device), partial(_touched_bytes, table.form))
    return once * np.maximum(1.0, in_all / _touched_bytes(table.form, load, together.tile))


def _touched_bytes(form: KernelForm, load: Load, tile: Mapping[str, Ints]) -> Floats:
    """Bytes of the elements that a tile reads; of a dimension that is walked with gaps those between are none."""
    tensor = form.expr.tensor_by_name[load.tensor]

    def touched(dimension: DataDimension, size: int) -> Ints:
        points = math.prod([np.minimum(tile[axis], form.sizes[axis]) for axis, _ in dimension.terms])
        return np.minimum(np.minimum(dimension.extent(tile), size), points)

    dimensions = zip(map(data_dimension, load.indices), tensor.shape, strict=True)
    bytes_: Floats = np.asarray(math.prod([touched(*each) for each in dimensions]) * float(tensor.element_bytes))
    return bytes_


def _tiles_of_a_matrix(form: KernelForm, load: Load) -> float:
    """How many tiles of a product's rows follow each other that read one matrix, where a place says which: as many as
    there are to each of them, since rows are sorted by matrices before they are multiplied."""
    roles = form.roles
    if roles is None:
        return 1.0
    tiles = 1.0
    for index, extent in zip(load.indices, form.expr.tensor_by_name[load.tensor].shape, strict=True):
        if isinstance(index, GatheredIndex) and not {roles.m, roles.n, roles.k} & set(index.axes):
            tiles *= max(1.0, math.prod(form.sizes[axis] for axis in index.axes) / extent)
    return tiles


def keeps_in_l2(form: KernelForm, load: Load, device: DeviceSpec) -> bool:
    """True if L2 has room for the tensor of ``load`` as a whole, besides what else it holds."""
    return device.l2 is not None and form.expr.tensor_by_name[load.tensor].size_bytes <= l2_room(device)


def l2_room(device: DeviceSpec) -> float:
    """Bytes of L2 that keep what is read again; 0 without L2."""
    return 0.0 if device.l2 is None else device.l2.capacity_bytes * KEPT_SHARE


def touched_parts(form: KernelForm, load: Load, transaction_bytes: int) -> tuple[float, float]:
    """Elements of the box of a whole tensor that the operator reads from, every dimension by itself, as often as tiles
    that follow each other read the same; and :func:`touched_bytes`."""
    tensor = form.expr.tensor_by_name[load.tensor]
    size_bytes = tensor.size_bytes
    if not load.indices:
        return 1.0, float(size_bytes)
    rows, inner, stride = 1, 1, 1
    for index, size in zip(load.indices, tensor.shape, strict=True):
        dimension = data_dimension(index)
        rows, inner, stride = rows * inner, min(dimension.extent(form.sizes), size), dimension.stride
    elements, span = rows * inner, inner * stride * tensor.element_bytes
    return elements * _tiles_of_a_matrix(form, load), float(
        min(size_bytes, rows * (span + transaction_bytes), elements * transaction_bytes)
    )


def touched_bytes(form: KernelForm, load: Load, transaction_bytes: int) -> float:
    """Bytes of a whole tensor that the operator touches, in transactions: a strided access skips rows."""
    return touched_parts(form, load, transaction_bytes)[1]


def stored_transactions(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Transactions of the next layer per element of the output, as the warps write it.

    Lanes run along the last axis, ``thread`` elements apart; where a lane does not write its adjacent elements at once
    (``vector`` of the output), every store of a warp touches the sectors between them again.
    """
    form = table.form
    output = form.expr.output
    transaction = (device.l2 or device.dram).transaction_bytes
    least = output.element_bytes / transaction
    last = form.final.axes[-1] if form.final.axes else None
    if last is None or last not in table.thread:
        return np.full(table.count, least)
    thread, width = table.thread[last], store_width(table)
    lanes = np.minimum(device.warp_lanes, table.threads[last])
    span = lanes * thread * least + 1 - least
    per_store = np.minimum(lanes * np.maximum(1.0, width * least), span) * (device.warp_lanes / lanes)
    scattered = np.maximum(least, per_store / (device.warp_lanes * width))
    # Matrix instructions' results leave through shared memory, rows in full.
    return np.where(table.mma, least, scattered) if table.has_warp_tiles else scattered


def store_width(table: ScheduleTable) -> Ints:
    """Elements that a thread stores at a time along the output's last axis."""
    output, last = table.form.expr.output, table.form.final.axes[-1] if table.form.final.axes else None
    if last is None or last not in table.thread:
        return table.ones
    vector = table.vector.get(output.name)
    widest = np.gcd(table.thread[last], max(1, VECTOR_BYTES // output.element_bytes))
    return widest if vector is None else np.where(vector == 0, widest, np.gcd(vector, widest))
