"""How tiles lie in vector registers, for devices whose lanes are elements of vectors.

A schedule reads there as everywhere: ``thread`` is the register tile. One axis of it, the *vector axis*, runs along the
lanes; the elements along it are held in *pieces*, whole vectors first and then halves, quarters, ... of one. The other
axes are *rows*: every row has pieces of its own. Model and code generator both ask here, so that they speak of the same
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import DTYPE_BYTES, Load
from sokoban.schedule.table import Ints, ScheduleTable, product

#: Vectors of partial results that share a sum, so that one addition need not wait for the one before: the latency of an
#: addition over its throughput.
PARTIAL_SUMS = 8


def lane_axis(form: KernelForm) -> str | None:
    """The row axis that lanes lie along; None where they lie along the columns, and for kernels without rows."""
    last = form.final.axes[-1] if form.final.axes else None
    return last if form.kind == "rows" and last in form.spatial else None


#: Elements that a row of a staged box is lengthened by where its bytes are a multiple of `CONFLICT_BYTES`.
ROW_PADDING = 16
#: Rows this far apart fall into few sets of a cache.
CONFLICT_BYTES = 256
#: Turns of the innermost loop that are written out around a large tile, one whose sums are more vectors than
#: `LARGE_TILE`: less to count, and room for one request for the next copy.
WRITTEN_OUT = 8
LARGE_TILE = 8
#: Lines that are asked for in one turn, as it is written out, at most; of what is copied, more of which would not have
#: come before they are needed; and lines of what is not copied, all together.
ASKED_LINES = 16
COPIED_AHEAD = 1
READ_AHEAD_LINES = 2048


def lanes_of(form: KernelForm, device: DeviceSpec) -> int:
    """Elements of the accumulator's type in one vector."""
    return max(1, device.teu.lanes * 4 // DTYPE_BYTES[form.expr.accumulate])


def vector_axis(axes: Sequence[str], tile: Mapping[str, int], lanes: int) -> str:
    """The output axis along which registers hold vectors: the last whose register tile fills one, or else the last."""
    full = [axis for axis in axes if tile[axis] >= lanes]
    return full[-1] if full else axes[-1]


def in_panels(load: Load, axis: str) -> bool:
    """Whether a staged operand is laid out in panels of vectors along ``axis``: one of its plain axes."""
    plain = all(index.is_plain_axis for index in load.indices) and load.pad is None
    axes = [each for index in load.indices for each in index.axes]
    return plain and axis in axes and len(set(axes)) == len(axes)


def phases_of(load: Load, axis: str) -> int:
    """The stride in which vectors along ``axis`` read the rows of an operand, where that is all they do; else 1."""
    coefficients = [index.coefficient(axis) for index in load.indices]
    strided = bool(coefficients) and coefficients[-1] > 1 and not any(coefficients[:-1])
    return coefficients[-1] if strided else 1


def pieces(extent: Ints, lanes: int) -> Ints:
    """Vectors that hold so many elements: whole ones, then falling powers of two."""
    rest = extent % lanes
    bits: Any = np.zeros_like(rest)
    for bit in range(lanes.bit_length()):
        bits = bits + ((rest >> bit) & 1)
    return extent // lanes + bits


def place_of_copy(load: Load, loops: Sequence[str], counts: Mapping[str, int]) -> int:
    """Tile loops around the copy of a staged operand: it is made just outside the innermost loop that uses it again.

    ``loops`` outermost first; ``counts``: turns of each in a block.
    """
    used = {axis for index in load.indices for axis in index.axes}
    reusing = [depth for depth, axis in enumerate(loops) if axis not in used and counts[axis] > 1]
    depth = reusing[-1] if reusing else 0
    # Out of further loops that use it again: there is nothing more to hold.
    while depth and loops[depth - 1] not in used:
        depth -= 1
    return depth


def asked_ahead(
    load: Load,
    axis: str,
    shape: Sequence[int],
    held: Mapping[str, Any],
    staged: Any,
    tiles: Any,
    turns: Any,
    line: int,
) -> Ints:
    """Lines of an operand that a register tile asks for in every turn of its innermost loop, of what is read next.

    The next step of a sum, or the next block, reads rows that lie apart, where no prefetcher follows, and all at once:
    copied in panels before its first tile, or by the first row of its tiles, while memory has nothing to do during the
    others. So the tiles share the lines of it out among themselves and ask for them while they compute.

    Args:
        load: the operand's access. shape: of its tensor, whose rows run along ``axis``, or none are asked for.
        held: elements by axis that are read between.
        staged: whether it is copied then; otherwise only as much is asked for as stays in a core's own cache beside the
            rest.
        tiles: register tiles between. turns: of the innermost loop of a tile, as it is written out.
        line: elements of a line of the caches.

    Returns:
        Lines per turn; 0 where there would be too many, or rows do not lie evenly apart.
    """
    sizes = [np.asarray(held[index.axes[0]]) for index in load.indices] if in_panels(load, axis) else []
    if not sizes or load.indices[-1].axes != (axis,):
        return np.zeros(np.shape(tiles), dtype=np.int64)
    even: Any = True
    first: Any = True
    for extent, size in zip(sizes[:-1], shape[:-1], strict=True):
        even = even & (first | (extent >= size))
        first = first & (extent == 1)
    lines = math.prod(sizes[:-1]) * -(-sizes[-1] // line)
    each = -(-lines // np.maximum(1, tiles * turns))
    most = np.where(staged, each <= COPIED_AHEAD, lines <= READ_AHEAD_LINES)
    return np.where(even & most & (each <= ASKED_LINES) & (turns > 0), each, 0)


def sum_loops(form: KernelForm, axis: str) -> list[str]:
    """The reduction's axes, outermost first: innermost what walks along the rows of an operand that is not in panels
    along ``axis``."""
    rows = [load for load in form.body_loads if load.indices and not in_panels(load, axis)]
    along = {each for load in rows for each in load.indices[-1].axes}
    return sorted(form.reduced, key=lambda each: each in along)


@dataclass(frozen=True, eq=False)
class CpuTiles:
    """The schedules of a table that have the same vector axis, cut up as the code generator does it.

    Attributes:
        axis: the vector axis.
        lanes: elements of a vector.
        tile, block, step: elements by axis, none longer than its axis.
    """

    table: ScheduleTable
    axis: str
    lanes: int

    @cached_property
    def form(self) -> KernelForm:
        return self.table.form

    @cached_property
    def tile(self) -> Mapping[str, Ints]:
        sizes = self.form.sizes
        return {axis: np.minimum(own, sizes[axis]) for axis, own in self.table.register_tile.items()}

    @cached_property
    def block(self) -> Mapping[str, Ints]:
        sizes = self.form.sizes
        return {
            axis: np.where(block >= sizes[axis], sizes[axis], np.maximum(1, block // self.tile[axis]) * self.tile[axis])
            for axis, block in self.table.block.items()
        }

    @cached_property
    def step(self) -> Mapping[str, Ints]:
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
        return {axis: -(-self.form.sizes[axis] // step) for axis, step in self.step.items()}

    @cached_property
    def steps(self) -> Ints:
        return product(self.step_counts.values(), self.table.count)

    @property
    def reduced_points(self) -> int:
        return math.prod(self.form.sizes[axis] for axis in self.form.reduced)


def by_vector_axis(table: ScheduleTable, device: DeviceSpec) -> list[tuple[Ints, CpuTiles]]:
    """The rows of a table by their vector axis: positions, and their tiles."""
    form, lanes = table.form, lanes_of(table.form, device)
    axes = form.final.axes if form.kind == "tile" else form.spatial
    if len(axes) == 0:
        return [(np.arange(table.count), CpuTiles(table, "", lanes))]
    chosen = np.full(table.count, len(axes) - 1)
    for position, axis in enumerate(axes):
        # The last one that fills a vector stays; where none does, the last axis was there from the start.
        full = np.minimum(table.register_tile[axis], form.sizes[axis]) >= lanes
        later = np.logical_or.reduce(
            [np.minimum(table.register_tile[other], form.sizes[other]) >= lanes for other in axes[position + 1 :]]
            or [np.zeros(table.count, dtype=bool)]
        )
        chosen = np.where(full & ~later, position, chosen)
    found = []
    for position in np.unique(chosen).tolist():
        where = np.flatnonzero(chosen == position)
        part = table if len(where) == table.count else table.candidates(where)
        found.append((where, CpuTiles(part, axes[position], lanes)))
    return found
