"""The order in which blocks visit the grid of tiles, so that those at work together share what L2 holds.

Launch order runs along the output's last axis: the blocks at work at a time then cover whole rows of tiles, and read
all of the operand that belongs to the columns again for every few rows. In bands of ``raster`` tiles beside each other
they cover something nearer to a square.
"""

from __future__ import annotations

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import data_dimension
from sokoban.model.estimates import EstimateTable
from sokoban.model.gpu.compiled import compiled_added_bytes, compiled_traffic
from sokoban.model.gpu.transactions import dram_bytes, super_tile
from sokoban.model.rational import estimate
from sokoban.schedule.pipelines import fully_staged
from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, product

#: Traffic with bands over that without from which on they are worth their arithmetic.
WORTHWHILE = 0.98

#: Share of a program's time that DRAM takes by itself from which on its traffic counts.
DRAM_SHARE = 0.4


def in_bands(
    table: ScheduleTable, which: Ints, estimates: EstimateTable, placed: PlacedForm
) -> tuple[Ints, EstimateTable]:
    """The width of bands for some schedules of a table, and their estimates with these.

    No schedule gets others than its own where DRAM takes little of the time of the first.

    Args:
        table: the schedules.
        which: rows of some of them, best first.
        estimates: of all schedules of the table as they are.
        placed: their operator on a device.

    Returns:
        The width in blocks for each of ``which``, 0 without bands; and the estimates.
    """
    plain = estimates.rows_of(which)
    own = table.raster[which]
    if not len(which) or plain.stage_seconds["dram"][0] <= DRAM_SHARE * plain.seconds[0] or not _has_bands(placed):
        return own, plain
    table = table.candidates(which)
    raster = bands(table, plain, placed)
    raster = np.where(raster > 0, raster, own)
    return raster, estimate(table.with_raster(raster), placed) if (raster != own).any() else plain


def bands(table: ScheduleTable, estimates: EstimateTable, placed: PlacedForm) -> Ints:
    """The width of bands for every schedule, in blocks; 0 where DRAM takes little of its time anyway, or where launch
    order moves no more bytes.

    ``R`` blocks that cover ``w`` tiles across and ``R / w`` down read ``w Q + R / w P`` bytes, ``P`` and ``Q`` being
    what one more tile down or across adds: least at ``w = sqrt(R P / Q)``, here the nearest power of two.
    """
    slow = estimates.stage_seconds["dram"] > DRAM_SHARE * estimates.seconds
    if not slow.any() or not _has_bands(placed):
        return table.zeros
    able = slow & (table.warp_tile | fully_staged(table))
    if not able.any():
        return table.zeros
    resident = np.maximum(1, estimates.blocks_per_unit) * placed.device.unit_count
    down, across = compiled_added_bytes(table, placed) or added_bytes(table)
    least = np.sqrt(resident * down / np.maximum(1.0, across))
    width = (2 ** np.rint(np.log2(np.maximum(1.0, least)))).astype(np.int64)
    plain, banded = (_traffic(table, placed, resident, raster) for raster in (table.zeros, width))
    return np.where(able & (banded < WORTHWHILE * plain), width, 0)


def _has_bands(placed: PlacedForm) -> bool:
    """Whether launch order may save traffic: blocks share operands that L2 does not hold anyway."""
    form, device = placed.form, placed.device
    if device.shared.is_cache or device.l2 is None or form.reduction is None or not form.is_tile:
        return False
    most_kept_bytes = device.l2.capacity_bytes / 2
    return any([form.expr.tensor_by_name[load.tensor].size_bytes > most_kept_bytes for load in form.body_loads])


def _traffic(table: ScheduleTable, placed: PlacedForm, resident: Ints, raster: Ints) -> Floats:
    compiled = compiled_traffic(table, placed, resident, raster)
    return traffic(table, placed.device, resident, raster) if compiled is None else compiled


def traffic(table: ScheduleTable, device: DeviceSpec, resident: Ints, raster: Ints) -> Floats:
    """Bytes of the operands from DRAM where ``resident`` blocks of the device run at once, in bands of width
    ``raster``."""
    together = super_tile(table, resident, raster)
    loads = table.form.body_loads
    return sum((dram_bytes(table, load, device, together) for load in loads), np.zeros(table.count))


def added_bytes(table: ScheduleTable) -> tuple[Floats, Floats]:
    """Bytes of operands that one more tile down a band adds, and those that one more tile across it adds: of operands
    that only the one axis indexes."""
    form = table.form
    added = {True: np.zeros(table.count), False: np.zeros(table.count)}
    tile = {**{axis: table.ones * form.sizes[axis] for axis in form.reduced}, **table.block}
    axes = _band_axes(table)
    for load in form.body_loads:
        extents = [data_dimension(index).extent(tile) for index in load.indices]
        tile_bytes = product(extents, table.count) * float(form.expr.tensor_by_name[load.tensor].element_bytes)
        indexed = {axis for index in load.indices for axis in index.axes}
        by = {
            is_down: sum((chosen[axis] for axis in form.spatial if axis in indexed), table.zeros)
            for is_down, chosen in axes.items()
        }
        for is_down in added:
            only = (by[is_down] > 0) & (by[not is_down] == 0)
            added[is_down] = added[is_down] + np.where(only, tile_bytes, 0.0)
    return added[True], added[False]


def _band_axes(table: ScheduleTable) -> dict[bool, dict[str, Bools]]:
    """Whether an axis is the one that bands go down (True) or the one across them (False), by axis and schedule: the
    last but one and the last along which a schedule has several blocks."""
    axes_behind = table.zeros
    down, across = {}, {}
    for axis in reversed(table.form.spatial):
        several = table.grid[axis] > 1
        across[axis], down[axis] = several & (axes_behind == 0), several & (axes_behind == 1)
        axes_behind = axes_behind + several
    return {True: down, False: across}
