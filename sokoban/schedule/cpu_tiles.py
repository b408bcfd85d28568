"""Tiles in vector registers, for devices whose lanes are elements of vectors: CPUs.

A schedule's ``thread`` is the register tile. One axis of it, the *vector axis*, runs along the lanes; the elements
along it are held in *pieces*, whole vectors first and then halves, quarters, ... of one. The other axes are *rows*:
every row has pieces of its own. Model and code generator both ask this module, so that they speak of the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import Load
from sokoban.schedule.table import Ints, ScheduleTable, product

#: Vectors of partial results that share a sum, so that an addition need not wait for the one before: the latency of an
#: addition over its throughput.
PARTIAL_SUMS = 8

#: Elements that a row of a staged box is lengthened by where its bytes are a multiple of :data:`CONFLICT_BYTES`.
ROW_PADDING = 16
#: Rows this many bytes apart fall into few sets of a cache.
CONFLICT_BYTES = 256

#: Turns of the innermost loop that are written out around a large tile, one whose sums are more vectors than
#: :data:`LARGE_TILE`: fewer turns to count, and room for one request for the next copy.
WRITTEN_OUT = 8
LARGE_TILE = 8

#: Most lines that a written-out turn asks for. Of operands that are copied a turn asks for at most
#: :data:`COPIED_AHEAD`, since more would not arrive in time; operands that are not copied have at most
#: :data:`READ_AHEAD_LINES` lines in all, half of a second cache of 1 MiB. What they push out of one that is smaller
#: comes from the cache behind it, still not from memory.
ASKED_LINES = 16
COPIED_AHEAD = 1
READ_AHEAD_LINES = 8192


def lane_axis(form: KernelForm) -> str | None:
    """The row axis that lanes lie along; None where they lie along the columns, and for kernels without rows."""
    last = form.final.axes[-1] if form.final.axes else None
    return last if form.is_rows and last in form.spatial else None


def vector_axis(axes: Sequence[str], tile: Mapping[str, int], lanes: int) -> str:
    """The output axis along which registers hold vectors: the last whose register tile fills one, or else the last.

    >>> vector_axis("mn", {"m": 32, "n": 16}, lanes=16), vector_axis("mn", {"m": 32, "n": 8}, lanes=16)
    ('n', 'm')
    """
    full = [axis for axis in axes if tile[axis] >= lanes]
    return full[-1] if full else axes[-1]


def in_panels(load: Load, axis: str) -> bool:
    """True if a staged operand is laid out in panels of vectors along ``axis``.

    It is where every index is a plain axis, each axis is used once and ``axis`` is one of them.
    """
    is_unguarded = all(index.is_plain_axis for index in load.indices) and load.pad is None
    axes = [each for index in load.indices for each in index.axes]
    return is_unguarded and axis in axes and len(set(axes)) == len(axes)


def phases_of(load: Load, axis: str) -> int:
    """Elements between neighbouring lanes of a vector along ``axis``, where it walks an operand's rows; else 1.

    A row read in steps of two falls into two phases, its even and its odd elements; each is contiguous once copied.
    """
    coefficients = [index.coefficient(axis) for index in load.indices]
    is_strided = bool(coefficients) and coefficients[-1] > 1 and not any(coefficients[:-1])
    return coefficients[-1] if is_strided else 1


def pieces(extent: Ints, lanes: int) -> Ints:
    """Vectors that hold ``extent`` elements: whole ones, then falling powers of two.

    >>> pieces(np.array([16, 33, 23]), lanes=16).tolist()  # 16; 16 + 16 + 1; 16 + 4 + 2 + 1
    [1, 3, 4]
    """
    remainder = extent % lanes
    partial: Any = np.zeros_like(remainder)
    for bit in range(lanes.bit_length()):
        partial = partial + ((remainder >> bit) & 1)
    return extent // lanes + partial


def place_of_copy(load: Load, loops: Sequence[str], counts: Mapping[str, int]) -> int:
    """Tile loops around the copy of a staged operand: it is made just outside the innermost loop that uses it again.

    Args:
        load: the operand's access.
        loops: axes of the loops over register tiles, outermost first.
        counts: turns of each loop in a block.
    """
    used = {axis for index in load.indices for axis in index.axes}
    reusing = [depth for depth, axis in enumerate(loops) if axis not in used and counts[axis] > 1]
    depth = reusing[-1] if reusing else 0
    # The copy moves out of further loops that use it again: they need no more memory for it.
    while depth and loops[depth - 1] not in used:
        depth -= 1
    return depth


def asked_ahead(
    load: Load,
    axis: str,
    elements: Mapping[str, Any],
    staged: Any,
    tiles: Any,
    turns: Any,
    line: int,
) -> Ints:
    """Cache lines that a register tile prefetches of an operand in every turn of its innermost loop.

    The next step of a sum, or the next block, reads rows that lie apart, where no hardware prefetcher follows, and all
    of them at once, while memory idles during the tiles before. So those tiles share the lines of the next step out
    among themselves and ask for them while they compute. A turn's lines are neighbours in one row, or whole rows that
    are next to each other.

    Args:
        load: the operand's access.
        axis: the vector axis; operands whose rows run along another one are not prefetched.
        elements: elements of the next step or block, by axis.
        staged: whether the operand is copied into panels; otherwise only as much is prefetched as stays in a core's own
            cache along with the rest.
        tiles: register tiles of a step or block.
        turns: of the innermost loop of a tile, as it is written out.
        line: elements of a line of the caches.

    Returns:
        Lines per turn; 0 where there would be too many, or their number divides neither a row nor rows.
    """
    sizes = [np.asarray(elements[index.axes[0]]) for index in load.indices] if in_panels(load, axis) else []
    if not sizes or load.indices[-1].axes != (axis,):
        return np.zeros(np.shape(tiles), dtype=np.int64)
    row = -(-sizes[-1] // line)
    lines = math.prod(sizes[:-1]) * row
    least = np.maximum(1, -(-lines // np.maximum(1, tiles * turns)))
    of_row = _least_divisor(row, least)
    of_rows = row * _least_divisor(sizes[-2], -(-least // row)) if len(sizes) > 1 else of_row
    asked = np.where((of_row > 0) & ((of_row <= of_rows) | (of_rows == 0)), of_row, of_rows)
    in_time = np.where(staged, asked <= COPIED_AHEAD, lines <= READ_AHEAD_LINES)
    return np.where(in_time & (asked <= ASKED_LINES) & (turns > 0), asked, 0)


def _least_divisor(numbers: Ints, least: Ints) -> Ints:
    """The smallest divisor of each number that is not below ``least``, and not above :data:`ASKED_LINES`; 0 for none.

    >>> _least_divisor(np.array([12, 12, 7, 64]), np.array([2, 5, 2, 17])).tolist()
    [2, 6, 7, 0]
    """
    found: Any = np.zeros(np.broadcast_shapes(np.shape(numbers), np.shape(least)), dtype=np.int64)
    for divisor in range(ASKED_LINES, 0, -1):
        found = np.where((numbers % divisor == 0) & (divisor >= least), divisor, found)
    return found


def sum_loops(form: KernelForm, axis: str) -> list[str]:
    """The reduction's axes, outermost loop first.

    Innermost are those that walk along the rows of an operand that is not in panels along ``axis``: its elements are
    then read one after the other.
    """
    unpacked = [load for load in form.body_loads if load.indices and not in_panels(load, axis)]
    walked = {each for load in unpacked for each in load.indices[-1].axes}
    return sorted(form.reduced, key=lambda each: each in walked)


@dataclass(frozen=True, eq=False)
class CpuTiles:
    """Schedules of a table that have the same vector axis, cut into tiles as the code generator cuts them.

    Attributes:
        table: the schedules.
        axis: the vector axis.
        lanes: elements of a vector.
    """

    table: ScheduleTable
    axis: str
    lanes: int

    @cached_property
    def form(self) -> KernelForm:
        return self.table.form

    @cached_property
    def tile(self) -> Mapping[str, Ints]:
        """Elements of a register tile by output axis, none longer than its axis."""
        sizes = self.form.sizes
        return {axis: np.minimum(tile, sizes[axis]) for axis, tile in self.table.register_tile.items()}

    @cached_property
    def block(self) -> Mapping[str, Ints]:
        """Elements of a block by output axis: whole register tiles, or the whole axis."""
        sizes = self.form.sizes
        return {
            axis: np.where(block >= sizes[axis], sizes[axis], np.maximum(1, block // self.tile[axis]) * self.tile[axis])
            for axis, block in self.table.block.items()
        }

    @cached_property
    def step(self) -> Mapping[str, Ints]:
        """Elements of a step by reduction axis, none longer than its axis."""
        return {axis: np.minimum(step, self.form.sizes[axis]) for axis, step in self.table.step.items()}

    @cached_property
    def blocks(self) -> Mapping[str, Ints]:
        """Blocks along every output axis."""
        return {axis: -(-self.form.sizes[axis] // block) for axis, block in self.block.items()}

    @cached_property
    def tiles(self) -> Mapping[str, Ints]:
        """Register tiles along every output axis, in all its blocks."""
        return {axis: -(-self.form.sizes[axis] // tile) for axis, tile in self.tile.items()}

    @cached_property
    def tiles_per_block(self) -> Mapping[str, Ints]:
        """Register tiles along every output axis, in one block."""
        return {axis: -(-self.block[axis] // tile) for axis, tile in self.tile.items()}

    @cached_property
    def tile_loops(self) -> list[str]:
        """Loops over the register tiles of a block, outermost first; the vector axis is innermost."""
        return [axis for axis in self.form.final.axes if axis != self.axis] + [self.axis]

    @cached_property
    def rows(self) -> Ints:
        """Rows of a whole register tile."""
        return product([tile for axis, tile in self.tile.items() if axis != self.axis], self.table.count)

    @cached_property
    def tile_pieces(self) -> Ints:
        """Vectors of a row of a whole register tile."""
        return pieces(self.tile[self.axis], self.lanes)

    @cached_property
    def all_pieces(self) -> Ints:
        """Vectors along the whole vector axis."""
        size, tile = self.form.sizes[self.axis], self.tile[self.axis]
        return size // tile * self.tile_pieces + pieces(size % tile, self.lanes)

    @cached_property
    def step_counts(self) -> Mapping[str, Ints]:
        """Steps along every reduction axis."""
        return {axis: -(-self.form.sizes[axis] // step) for axis, step in self.step.items()}

    @cached_property
    def steps(self) -> Ints:
        """Steps along all reduction axes together."""
        return product(self.step_counts.values(), self.table.count)

    @property
    def reduced_points(self) -> int:
        """Points of the reduction of one output."""
        return math.prod(self.form.sizes[axis] for axis in self.form.reduced)


def by_vector_axis(table: ScheduleTable, placed: PlacedForm) -> list[tuple[Ints, CpuTiles]]:
    """The schedules of a table by their vector axis: their positions in the table, and their tiles."""
    form, lanes = placed.form, placed.vector_lanes
    axes = form.final.axes if form.is_tile else form.spatial
    if len(axes) == 0:
        return [(np.arange(table.count), CpuTiles(table, "", lanes))]
    chosen = np.full(table.count, len(axes) - 1)
    for position, axis in enumerate(axes):
        # A later axis that fills a vector takes the place; where none does, the last one was there from the start.
        fills_vector = np.minimum(table.register_tile[axis], form.sizes[axis]) >= lanes
        chosen = np.where(fills_vector, position, chosen)
    groups = []
    for position in np.unique(chosen).tolist():
        positions = np.flatnonzero(chosen == position)
        part = table if len(positions) == table.count else table.candidates(positions)
        groups.append((positions, CpuTiles(part, axes[position], lanes)))
    return groups
