"""Instructions of a core for a tile schedule on vectors: arithmetic, loads and stores, and everything around them.

Totals of the whole kernel on all units, by schedule. A load is one request of the first cache, whether a vector or a
number for all lanes; what vectors cannot read at once (strided elements, guarded ones) is read one element at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sokoban.kernel.instructions import value_instructions
from sokoban.language.expression import Load
from sokoban.schedule.cpu_tiles import CpuTiles, in_panels, phases_of, pieces, sum_loops
from sokoban.schedule.table import Floats, Ints, product

#: Multiply-adds that a call takes the time of; what is missing is one, or what its definition says.
FUNCTION_INSTRUCTIONS: Mapping[str, float] = {
    "exp": 15.0,
    "log": 40.0,
    "sqrt": 32.0,
    "rsqrt": 48.0,
    "div": 20.0,
    "tanh": 36.0,
    "erf": 36.0,
    "sin": 60.0,
    "cos": 60.0,
    "pow": 120.0,
}

#: Instructions per element of a vector that is put together from single reads: the read and its place in the vector.
GATHERED_INSTRUCTIONS = 3.0
#: Instructions by which an element, or a number for all lanes, is found to lie inside its tensor.
GUARD_INSTRUCTIONS = 4.0
#: Instructions of a turn of the innermost loop, and of what begins and ends a loop inside another.
TURN_INSTRUCTIONS = 3.0
LOOP_INSTRUCTIONS = 10.0
#: Instructions of a register tile besides its loops: where it lies.
TILE_INSTRUCTIONS = 30.0
#: Instructions of a row that is copied into a box besides its vectors: where it begins, and whether it is a whole one.
ROW_INSTRUCTIONS = 8.0


@dataclass(frozen=True, eq=False)
class Work:
    """Instructions of all cores together for a kernel; one entry per schedule.

    Attributes:
        arithmetic: instructions of the arithmetic pipelines.
        accesses: requests of the first cache.
        instructions: of all kinds, but for those of copies.
        chain_turns: turns of the innermost loop, in each of which a sum waits for itself.
        copying: instructions of copies.
        tiles: register tiles of sums that begin and end, those of every step.
    """

    arithmetic: Floats
    accesses: Floats
    instructions: Floats
    chain_turns: Floats
    copying: Floats | float = 0.0
    tiles: Floats | float = 0.0


def copies_of(tiles: CpuTiles) -> dict[Load, Ints]:
    """Tile loops around the copy of every load that some schedule stages; see
    `sokoban.schedule.cpu_tiles.place_of_copy`."""
    depths: dict[Load, Ints] = {}
    if tiles.form.reduction is None:
        return depths
    loops, count = tiles.tile_loops, tiles.table.count
    for load in dict.fromkeys(tiles.form.body_loads):
        if not load.indices or not tiles.table.cached[load.tensor].any():
            continue
        used = {axis for index in load.indices for axis in index.axes}
        depth = np.zeros(count, dtype=np.int64)
        for place, axis in enumerate(loops):
            if axis not in used:
                depth = np.where(tiles.tiles_per_block[axis] > 1, place, depth)
        for place in range(len(loops), 0, -1):
            if loops[place - 1] not in used:
                depth = np.where(depth == place, place - 1, depth)
        depths[load] = depth
    return depths


def tile_work(tiles: CpuTiles, copies: Mapping[Load, Ints]) -> Work:
    """The work of schedules whose vectors lie along an output axis; ``copies``: see :func:`copies_of`."""
    form, count = tiles.form, tiles.table.count
    points = tiles.reduced_points
    other_sizes = float(np.prod([form.sizes[axis] for axis in form.final.axes if axis != tiles.axis]))
    vectors = other_sizes * tiles.all_pieces
    register_tiles = product(tiles.tiles.values(), count).astype(np.float64)
    final_cost = max(1.0, value_instructions(form.final.value, costs=FUNCTION_INSTRUCTIONS))
    accesses, others = _final_reads(tiles, vectors)
    arithmetic: Floats = np.zeros(count)
    copying: Floats = np.zeros(count)
    turns = register_tiles
    if form.reduction is None:
        arithmetic = arithmetic + vectors * final_cost
    else:
        reduction = form.reductions[0].value
        arithmetic = vectors * points * max(1.0, value_instructions(reduction, costs=FUNCTION_INSTRUCTIONS))
        arithmetic = arithmetic + vectors * value_instructions(form.final.value, costs=FUNCTION_INSTRUCTIONS)
        turns = register_tiles * points
        for load in dict.fromkeys(form.body_loads):
            requests, more = _reads(tiles, load, points, staged=False)
            if load in copies:
                inside, less = _reads(tiles, load, points, staged=True)
                staged = tiles.table.cached[load.tensor]
                requests, more = np.where(staged, inside, requests), np.where(staged, less, more)
                copying = copying + np.where(staged, _copy(tiles, load, copies[load]), 0.0)
            accesses, others = accesses + requests, others + more
        others = others + turns * TURN_INSTRUCTIONS + _loops_inside(tiles, register_tiles) * LOOP_INSTRUCTIONS
        # Partial sums of all steps but one rest in the output.
        partial_sums = 2.0 * vectors * (tiles.steps - 1) * _scattered(tiles)
        accesses, others = accesses + partial_sums, others + partial_sums
    others = others + register_tiles * tiles.steps * TILE_INSTRUCTIONS
    tiles_of_sums = register_tiles * tiles.steps if form.reduction is not None else np.zeros(tiles.table.count)
    return Work(arithmetic, accesses, arithmetic + accesses + others, turns, copying, tiles_of_sums)


def _final_reads(tiles: CpuTiles, vectors: Floats) -> tuple[Floats, Floats]:
    """Requests of the final statement, its store among them, and further instructions."""
    accesses, others = 1.0 * vectors, np.zeros(tiles.table.count)
    loads = tiles.form.final_loads if tiles.form.reduction is not None else tiles.form.body_loads
    for load in loads:
        requests, more = _reads(tiles, load, 1, staged=False)
        accesses, others = accesses + requests, others + more
    scattered = vectors * (_scattered(tiles) - 1.0)
    return accesses + scattered, others + 2.0 * scattered


def _scattered(tiles: CpuTiles) -> Floats | float:
    """Vectors in which a vector's share of the results is stored: more than one where its own elements are no
    neighbours, so that they are turned into vectors along the rows of the tile."""
    last = tiles.form.final.axes[-1] if tiles.form.final.axes else tiles.axis
    if tiles.axis == last or tiles.form.reduction is None:
        return 1.0 if tiles.axis == last else float(tiles.lanes)
    along = tiles.tile[last]
    return pieces(along, tiles.lanes) / along * tiles.lanes


def _reads(tiles: CpuTiles, load: Load, points: int, *, staged: bool) -> tuple[Floats, Floats]:
    """Requests for an operand, and instructions besides: once per register tile for what its rows share.

    Args:
        tiles: the schedules.
        load: of the operand.
        points: of the reduction at which it is read.
        staged: whether its copy is read.
    """
    form = tiles.form
    if not load.indices:
        return np.zeros(tiles.table.count), np.zeros(tiles.table.count)
    used = {axis for index in load.indices for axis in index.axes}
    times: Floats = np.full(tiles.table.count, float(points))
    for axis in form.final.axes:
        if axis != tiles.axis:
            times = times * (form.sizes[axis] if axis in used else tiles.tiles[axis])
    guarded = load.pad is not None and not staged
    if tiles.axis not in used:
        times = times * tiles.tiles[tiles.axis]
        return times, times * (GUARD_INSTRUCTIONS if guarded else 0.0)
    times = times * tiles.all_pieces
    along = [index.coefficient(tiles.axis) for index in load.indices]
    contiguous = abs(along[-1]) == 1 and not any(along[:-1])
    contiguous = contiguous or (staged and phases_of(load, tiles.axis) > 1)
    panels = staged and in_panels(load, tiles.axis)
    if not guarded and (contiguous or panels):
        return times * (1.0 + (0.0 if panels else _across_lines(tiles, load))), np.zeros(tiles.table.count)
    elements = times * tiles.lanes
    return elements, elements * (GATHERED_INSTRUCTIONS - 1.0 + (GUARD_INSTRUCTIONS if guarded else 0.0))


def _across_lines(tiles: CpuTiles, load: Load) -> Floats | float:
    """Share of an operand's vectors that lie across two lines of the cache, which are two requests: nearly all where
    rows or tiles begin anywhere, none where all begin at whole vectors."""
    lanes, last = tiles.lanes, load.indices[-1]
    row = tiles.form.expr.tensor_by_name[load.tensor].shape[-1]
    if len(last.terms) > 1 or last.offset % lanes or (len(load.indices) > 1 and row % lanes):
        return 1.0 - 1.0 / lanes
    return np.where(tiles.tile[tiles.axis] % lanes == 0, 0.0, 0.5)


def _loops_inside(tiles: CpuTiles, register_tiles: Floats) -> Floats:
    """Number of times that a loop of the sum begins, all such loops together."""
    begins: Floats = np.zeros(tiles.table.count)
    outside: Floats = register_tiles * tiles.steps
    for axis in sum_loops(tiles.form, tiles.axis):
        begins = begins + outside
        outside = outside * tiles.form.sizes[axis] / tiles.step_counts[axis]
    return begins


def _copy(tiles: CpuTiles, load: Load, depth: Ints) -> Floats:
    """Instructions of the copies of a staged operand, a load and a store of every vector among them."""
    form = tiles.form
    times = tiles.steps * product(tiles.blocks.values(), tiles.table.count).astype(np.float64)
    sizes: dict[str, Floats] = {axis: form.sizes[axis] / tiles.step_counts[axis] for axis in form.reduced}
    for place, axis in enumerate(tiles.tile_loops):
        inside = place >= depth
        times = times * np.where(inside, 1.0, tiles.tiles[axis] / tiles.blocks[axis])
        sizes[axis] = np.where(inside, form.sizes[axis] / tiles.blocks[axis], form.sizes[axis] / tiles.tiles[axis])
    extents = [
        1.0 + sum((abs(c) * (sizes[axis] - 1.0) for axis, c in index.terms), np.zeros(tiles.table.count))
        for index in load.indices
    ]
    elements = np.prod(extents, axis=0)
    if in_panels(load, tiles.axis):
        vectors = elements / tiles.tile[tiles.axis] * tiles.tile_pieces
        if load.indices[-1].axes == (tiles.axis,):
            return times * 3.0 * vectors
        return times * vectors * (3.0 + np.log2(tiles.lanes))
    rows = elements / extents[-1]
    vectors = rows * np.ceil(extents[-1] / tiles.lanes)
    return times * (2.0 * vectors + rows * ROW_INSTRUCTIONS)
