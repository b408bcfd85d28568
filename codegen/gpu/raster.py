"""Which tile of the grid a block computes: launch order as the schedule asks for it, for every kind of kernel."""

from __future__ import annotations

from tvm import tirx

from codegen.tir.values import Expr, remainder
from sokoban.kernel.form import KernelForm
from sokoban.schedule.raster import raster_axes
from sokoban.schedule.tile import TileSchedule


def block_places(block: Expr, form: KernelForm, schedule: TileSchedule) -> dict[str, Expr]:
    """The number of the tile along every spatial axis, by axis, that the ``block``-th block of a launch computes.

    Blocks count the output's last axis fastest. With ``raster`` they go down a band of so many adjacent tiles
    along the last axis that has several, before they come to the next band; the last one may be narrower.
    """
    grid = {axis: -(-form.sizes[axis] // size) for axis, size in schedule.block}
    axes = form.final.axes
    places: dict[str, Expr] = {}
    band = raster_axes(grid) if schedule.raster else None
    for axis in reversed(axes):
        if band is not None and axis == band[0]:
            continue
        if band is not None and axis == band[1]:
            down, across = grid[band[0]], grid[band[1]]
            slab = tirx.floormod(block, down * across)
            first = tirx.floordiv(slab, schedule.raster * down) * schedule.raster
            within = tirx.floormod(slab, schedule.raster * down)
            width = tirx.const(schedule.raster, "int32")
            if across % schedule.raster:
                width = tirx.min(width, across - first)
            places[band[0]] = tirx.floordiv(within, width)
            places[axis] = first + tirx.floormod(within, width)
            block = tirx.floordiv(block, down * across)
            continue
        places[axis] = remainder(block, grid[axis]) if axis != axes[0] else block
        block = tirx.floordiv(block, grid[axis])
    return {axis: places[axis] for axis in axes}
