"""Which tile of the grid a block computes: launch order as the schedule asks for it, for every kind of kernel."""

from __future__ import annotations

from tvm import tirx

from codegen.tir.bounds import Bounds
from codegen.tir.values import Expr
from sokoban.kernel.form import KernelForm
from sokoban.schedule.raster import raster_axes
from sokoban.schedule.tile import TileSchedule


def block_places(block: Expr, form: KernelForm, schedule: TileSchedule, bounds: Bounds) -> dict[str, Expr]:
    """The number of the tile along every spatial axis, by axis, that the ``block``-th block of a launch computes.

    Blocks count the output's last axis fastest. With ``raster`` they go down a band of so many adjacent tiles
    along the last axis that has several, before they come to the next band; the last one may be narrower.
    """
    grid = {axis: -(-form.sizes[axis] // size) for axis, size in schedule.block}
    counts = {axis: bounds.tiles(axis, size) for axis, size in schedule.block}
    axes = form.final.axes
    places: dict[str, Expr] = {}
    band = raster_axes(grid) if schedule.raster else None
    for axis in reversed(axes):
        if band is not None and axis == band[0]:
            continue
        if band is not None and axis == band[1]:
            down, across = counts[band[0]], counts[band[1]]
            outer, slab = Bounds.split(block, down * across)
            band_number, within = Bounds.split(slab, schedule.raster * down)
            first = band_number * schedule.raster
            width = tirx.const(schedule.raster, "int32")
            if grid[axis] % schedule.raster:
                width = tirx.min(width, across - first)
            places[band[0]] = tirx.floordiv(within, width)
            places[axis] = first + tirx.floormod(within, width)
            block = outer
            continue
        outer, within = Bounds.split(block, counts[axis])
        places[axis], block = within if axis != axes[0] else block, outer
    return {axis: places[axis] for axis in axes}
