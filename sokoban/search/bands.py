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
    """The width of bands for some schedules of a table, best first, and their estimates with these. None has any where
    DRAM takes little of the best one's time."""
    found = estimates.rows_of(which)
    if not len(which) or found.stage_seconds["dram"][0] <= DRAM_SHARE * found.seconds[0]:
        return np.zeros(len(which), dtype=np.int64), found
    table = table.candidates(which)
    raster = bands(table, found, placed.device)
    return raster, estimate(table.with_raster(raster), placed) if raster.any() else found


def bands(table: ScheduleTable, estimates: EstimateTable, device: DeviceSpec) -> Ints:
    """The width of bands for every schedule, in tiles; 0 where DRAM takes little of its time anyway, or launch order
    moves no more.

    ``R`` blocks that cover ``w`` tiles across and ``R / w`` down read ``w Q + R / w P`` bytes, ``P`` and ``Q`` being
    what one more tile down or across adds: least at ``w = sqrt(R P / Q)``, here the nearest power of two.
    """
    form = table.form
    slow = estimates.stage_seconds["dram"] > DRAM_SHARE * estimates.seconds
    if device.shared.is_cache or device.l2 is None or form.reduction is None or form.kind != "tile" or not slow.any():
        return table.zeros
    kept = device.l2.capacity_bytes / 2
    if all(form.expr.tensor_by_name[load.tensor].size_bytes <= kept for load in form.body_loads):
        return table.zeros
    able = slow & (table.warp_tile | fully_staged(table))
    together = np.maximum(1, estimates.blocks_per_unit) * device.unit_count
    down, across = _added_bytes(table)
    width = np.sqrt(together * down / np.maximum(1.0, across))
    band = (2 ** np.rint(np.log2(np.maximum(1.0, width)))).astype(np.int64)
    plain, banded = (_traffic(table, device, together, raster) for raster in (table.zeros, band))
    return np.where(able & (banded < WORTHWHILE * plain), band, 0)


def _traffic(table: ScheduleTable, device: DeviceSpec, resident: Ints, raster: Ints) -> Floats:
    """Bytes of the operands from DRAM with bands of some width."""
    together = super_tile(table, resident, raster)
    loads = table.form.body_loads
    return sum((dram_bytes(table, load, device, together) for load in loads), np.zeros(table.count))


def _added_bytes(table: ScheduleTable) -> tuple[Floats, Floats]:
    """Bytes of operands that one more tile down a band adds, and one more across it: of those that only the one axis
    indexes."""
    form = table.form
    sums = {True: np.zeros(table.count), False: np.zeros(table.count)}
    tile = {**{axis: table.ones * form.sizes[axis] for axis in form.reduced}, **table.block}
    axes = _band_axes(table)
    for load in form.body_loads:
        extents = [data_dimension(index).extent(tile) for index in load.indices]
        size = product(extents, table.count) * float(form.expr.tensor_by_name[load.tensor].element_bytes)
        indexed = {axis for index in load.indices for axis in index.axes}
        by = {
            is_down: sum((chosen[axis] for axis in form.spatial if axis in indexed), table.zeros)
            for is_down, chosen in axes.items()
        }
        for is_down in sums:
            sums[is_down] = sums[is_down] + np.where((by[is_down] > 0) & (by[not is_down] == 0), size, 0.0)
    return sums[True], sums[False]


def _band_axes(table: ScheduleTable) -> dict[bool, dict[str, Bools]]:
    """By whether a band goes down it: which axis that is, for every schedule."""
    passed = table.zeros
    down, across = {}, {}
    for axis in reversed(table.form.spatial):
        several = table.grid[axis] > 1
        across[axis], down[axis] = several & (passed == 0), several & (passed == 1)
        passed = passed + several
    return {True: down, False: across}
