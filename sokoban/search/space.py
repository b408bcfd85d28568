"""The tiles that exhaustive search looks at: sizes per axis, and their products layer by layer (thesis 5.4.5).

Sets of tiles are integer arrays with a row per tile and a column per axis. Each layer's tiles are multiples of those of
the layer above it, whatever the sizes: seven or forty-nine as well as powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import FRAGMENT, MatrixRoles
from sokoban.kernel.placed import PlacedForm
from sokoban.schedule.table import Bools, Ints

#: Share of an axis that padding to whole tiles may add.
MOST_PADDING = 0.25

#: Block tiles looked at in closed form, whatever the number of axes: it bounds the sizes per axis.
MOST_BLOCK_TILES = 120_000

#: Sizes per axis, and per reduction axis: beyond, sizes differ by a few per cent.
MOST_AXIS_SIZES = 40
MOST_STEP_SIZES = 14

#: Elements along one axis of a block, of a block of an operator without a reduction, of a thread and of a warp.
LARGEST_BLOCK_AXIS = 1024
LARGEST_POINTWISE_AXIS = 16384
LARGEST_THREAD_AXIS = 16
LARGEST_WARP_AXIS = 64

#: Longest step, all reduction axes together, and how many steps a set of tiles may have.
LARGEST_STEP = 4096
MOST_STEPS = 48


@dataclass(frozen=True)
class Family:
    """Schedules of one structure.

    Attributes:
        name: for people.
        staged: tensors in shared memory.
        whole_reduction: whether the reduction is one step, so that nothing is fetched step by step.
        roles: the axes of a matrix product that a warp computes by matrix instructions; None for multiply-adds.
        instruction: what computes its tiles.
    """

    name: str
    staged: tuple[str, ...] = ()
    whole_reduction: bool = False
    roles: MatrixRoles | None = None
    instruction: Instruction = Instruction.FMA

    def fragment(self, axis: str) -> int:
        """Divisor of every tile's size along ``axis``."""
        return 1 if self.roles is None else self.roles.fragment(axis)

    def is_single(self, axis: str) -> bool:
        """Axes outside a matrix product run one element at a time."""
        return self.roles is not None and axis not in (self.roles.m, self.roles.n, self.roles.k)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Sets of tiles; arrays have a row per schedule and a column per axis.

    Attributes:
        block: elements of a block over the spatial axes.
        register: elements of a thread over the spatial axes; of a warp for matrix instructions.
        step: elements of a step over the reduction axes.
    """

    block: Ints
    register: Ints
    step: Ints

    @property
    def count(self) -> int:
        """Schedules."""
        return len(self.block)

    def candidates(self, which: slice | Ints) -> Tiles:
        """Some schedules, in the order given."""
        return Tiles(self.block[which], self.register[which], self.step[which])

    def with_each(self, steps: Ints) -> Tiles:
        """Every schedule with each of ``steps``, shape (steps, reduction axes): all of the first schedule come
        first."""
        rows = np.repeat(np.arange(self.count), len(steps))
        return Tiles(self.block[rows], self.register[rows], np.tile(steps, (self.count, 1)))


def axis_sizes(size: int, largest: int, count: int, multiple: int = 1) -> Ints:
    """Tile sizes for an axis, ascending: at most ``count`` multiples of ``multiple`` up to ``largest``.

    All sizes that pad the axis by :data:`MOST_PADDING` of it or less, or the ones that pad it least. Where those are
    too many they are thinned evenly on a logarithmic scale, to the one that pads least and the roundest of every bin.

    >>> axis_sizes(7, 1024, 40).tolist()
    [1, 2, 4, 7, 8]
    """
    units = max(1, min(largest, 2 * size) // multiple)
    sizes = np.arange(1, units + 1, dtype=np.int64) * multiple
    waste = -size % sizes
    allowed = waste <= MOST_PADDING * size
    if not allowed.any():
        allowed = waste == waste.min()
    sizes, waste = sizes[allowed], waste[allowed]
    if len(sizes) <= count:
        return sizes
    low, high = math.log(sizes[0]), math.log(sizes[-1] + 1)
    bins = ((np.log(sizes) - low) / (high - low) * (count // 2)).astype(np.int64)
    roundest = -(sizes & -sizes)
    chosen = [_first_of_each(bins, np.lexsort((sizes, *keys, bins))) for keys in ((roundest, waste), (waste, roundest))]
    thinned: Ints = np.unique(sizes[np.concatenate(chosen)])
    return thinned


def _first_of_each(bins: Ints, order: Ints) -> Ints:
    """Of ``order``, which goes bin by bin, the first entry of every bin."""
    first = np.ones(len(order), dtype=bool)
    first[1:] = bins[order][1:] != bins[order][:-1]
    chosen: Ints = order[first]
    return chosen


def cartesian(columns: list[Ints]) -> Ints:
    """All combinations of the columns' entries, one a row, the last column fastest.

    >>> cartesian([np.array([1, 2]), np.array([3, 4])]).tolist()
    [[1, 3], [1, 4], [2, 3], [2, 4]]
    """
    grids = np.meshgrid(*columns, indexing="ij")
    return np.stack([grid.ravel() for grid in grids], axis=1)


def block_tiles(placed: PlacedForm, family: Family) -> Ints:
    """Block tiles over the spatial axes, shape (tiles, spatial axes)."""
    form, device = placed.form, placed.device
    largest = LARGEST_BLOCK_AXIS if form.reduction else LARGEST_POINTWISE_AXIS
    wide = [axis for axis in form.spatial if form.sizes[axis] > 1 and not family.is_single(axis)]
    count = min(MOST_AXIS_SIZES, int(MOST_BLOCK_TILES ** (1 / max(1, len(wide)))))
    menus = [
        axis_sizes(form.sizes[axis], largest, count, family.fragment(axis))
        if axis in wide or family.fragment(axis) > 1
        else np.ones(1, dtype=np.int64)
        for axis in form.spatial
    ]
    tiles = cartesian(menus)
    values = device.limits.threads_per_block * device.limits.registers_per_thread_usable
    return tiles[can_launch(placed, tiles) & (tiles.prod(axis=1) <= values)]


def can_launch(placed: PlacedForm, tiles: Ints) -> Bools:
    """True if the blocks of each tile fit one launch, on devices that kernels are written for.

    Args:
        placed: the operator on a device.
        tiles: elements of a block, shape (tiles, spatial axes).
    """
    form, device = placed.form, placed.device
    blocks = np.ones(len(tiles))
    for position, axis in enumerate(form.spatial):
        blocks *= -(-form.sizes[axis] // tiles[:, position])
    return blocks <= (device.limits.grid_x if device.code_generator else math.inf)


def thread_tiles(placed: PlacedForm, family: Family, blocks: Ints) -> tuple[Ints, Ints]:
    """Tiles of a thread (of a warp for matrix instructions) that divide their block.

    No more accumulators than a thread has registers to plan with, no more threads than a block may have.

    Args:
        placed: the operator on a device.
        family: the structure of the schedules.
        blocks: elements of a block, shape (blocks, spatial axes).

    Returns:
        The row of ``blocks`` that each tile divides, shape (tiles,), and the tiles, shape (tiles, spatial axes).
    """
    form, device = placed.form, placed.device
    limits, lanes = device.limits, device.warp_lanes
    most_owners = limits.threads_per_block // (lanes if family.roles else 1)
    most_values = limits.registers_per_thread_usable * (lanes if family.roles else 1)
    if family.instruction.is_mma:
        most_values = placed.most_sums
    largest = LARGEST_WARP_AXIS if family.roles else LARGEST_THREAD_AXIS
    rows = np.arange(len(blocks))
    tiles = np.ones((len(blocks), 0), dtype=np.int64)
    values = owners = np.ones(len(blocks), dtype=np.int64)
    for position, axis in enumerate(form.spatial):
        divided, sizes = _divisors(blocks[rows, position], largest, family.fragment(axis))
        values, owners = values[divided] * sizes, owners[divided] * (blocks[rows[divided], position] // sizes)
        fits = (values <= most_values) & (owners <= most_owners)
        divided, sizes, values, owners = divided[fits], sizes[fits], values[fits], owners[fits]
        rows, tiles = rows[divided], np.concatenate([tiles[divided], sizes[:, None]], axis=1)
    return rows, tiles


def _divisors(numbers: Ints, largest: int, multiple: int) -> tuple[Ints, Ints]:
    """Every number's divisors up to ``largest`` that are multiples of ``multiple``: positions of the numbers, and
    divisors.

    >>> position, divisor = _divisors(np.array([6, 4]), 4, 1)
    >>> position.tolist(), divisor.tolist()
    ([0, 0, 0, 1, 1, 1], [1, 2, 3, 1, 2, 4])
    """
    distinct, which = np.unique(numbers, return_inverse=True)
    candidates = np.arange(multiple, largest + 1, multiple, dtype=np.int64)
    divides: Bools = distinct[:, None] % candidates == 0
    counts = divides.sum(axis=1)
    flat = np.broadcast_to(candidates, divides.shape)[divides]
    starts = np.cumsum(counts) - counts
    repeats = counts[which]
    position = np.repeat(np.arange(len(numbers)), repeats)
    within = np.arange(len(position)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return position, flat[starts[which][position] + within]


def step_tiles(form: KernelForm, family: Family) -> Ints:
    """Steps over the reduction axes, shape (steps, reduction axes); one row without columns where nothing is
    reduced."""
    if not form.reduced:
        return np.ones((1, 0), dtype=np.int64)
    if family.whole_reduction:
        return np.array([[form.sizes[axis] for axis in form.reduced]], dtype=np.int64)
    menus = []
    for axis in form.reduced:
        size = form.sizes[axis]
        if family.is_single(axis):
            menus.append(np.ones(1, dtype=np.int64))
        elif size <= 2 * FRAGMENT and len(form.reduced) > 1 and family.fragment(axis) == 1:
            # A window is walked one by one or at once.
            menus.append(np.unique(np.array([1, size], dtype=np.int64)))
        else:
            menus.append(axis_sizes(size, LARGEST_STEP, MOST_STEP_SIZES, family.fragment(axis)))
    steps = cartesian(menus)
    points = steps.prod(axis=1)
    steps, points = steps[points <= LARGEST_STEP], points[points <= LARGEST_STEP]
    if len(steps) > MOST_STEPS:
        # Evenly by the points of a step.
        order = np.argsort(points, kind="stable")
        steps = steps[order[np.linspace(0, len(order) - 1, MOST_STEPS).astype(np.int64)]]
    return steps
