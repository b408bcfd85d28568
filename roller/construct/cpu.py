"""Scale up and out for processors: register tiles along lanes, blocks for a core's own cache.

The walk is that of :mod:`roller.construct.scale_up`, along the same data-reuse score and layer by layer (thesis 6.3.2).
What is different is what a tile of a layer is made of, which the spec says by ``teu.lane = "element"``: the register
tile fills vectors along one axis (alignment rule 1: whole TEUs), a thread goes through the register tiles of its block
one after the other, so that no limit of threads ends a block's growth, and whatever the last tile of an axis leaves
over gets a tile of its own size instead of padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from roller.construct.performance import MicroModel, Shape, data_reuse_score
from roller.construct.program import Candidate, Reason
from roller.construct.rtile import TileSpace
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import Load
from sokoban.model.cpu.traffic import PAGE_BYTES, PIECES_FOLLOWED
from sokoban.schedule.cpu_tiles import in_panels, lane_axis, phases_of
from sokoban.schedule.tile import TileSchedule

#: Vectors of a register tile along the lanes that are tried, and rows along any other axis.
VECTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28)

#: Axes that lanes may lie along: those that most operands are contiguous along come first.
VECTOR_AXES = 2

#: Tiles kept of the end of a path at the register layer, and of all paths together: those whose turn of the innermost
#: loop takes the fewest instructions per vector of multiply-adds.
REGISTER_TAIL = 2
REGISTER_TILES = 10
#: Instructions of a turn besides reads and multiply-adds, and multiply-adds that a turn waits for anyway.
TURN_INSTRUCTIONS = 3
CHAINED = 8

#: Register tiles in the smallest block worth proposing, as far as there are so many.
SMALLEST_BLOCK = 4

#: Parts that an axis may be divided into among blocks.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)

#: How often a step is halved, points of the shortest step that comes of it, and those of a step so short that every
#: row of an operand that it walks is followed by a prefetcher of its own.
STEP_HALVINGS = 3
SHORTEST_STEP = 64
FOLLOWED_STEP = 16

#: Blocks per unit up to which flat kernels are cut.
MOST_BLOCKS = 32


class CpuScaleUp:
    """The construction of one operator on one device whose lanes are elements of vectors."""

    def __init__(self, space: TileSpace, placed: PlacedForm, epsilon: float) -> None:
        device = placed.device
        self.space, self.device, self.epsilon = space, device, epsilon
        self.form: KernelForm = space.form
        self.lanes = placed.vector_lanes
        self.registers = device.limits.registers_per_thread_usable // device.teu.lanes
        rate = device.peak_flops(self.form.expr.accumulate)
        self.model = MicroModel(space, device, rate, float(max(1, self.form.body_operations)))
        self.sizes = self.form.sizes
        #: Blocks that divide an axis evenly, by axis and register tile.
        self._block_sizes: dict[tuple[str, int], tuple[int, ...]] = {}

    def candidates(self) -> Iterator[Candidate]:
        """All programs worth an estimate."""
        form = self.form
        if form.is_rows:
            yield from self._rows()
            return
        if form.reduction is None:
            yield from self._flat()
            return
        if form.reduces_contiguously:
            yield from self._rows()
        tiles = [(tile, axis, why) for axis in self._vector_axes() for tile, why in self._register_tiles(axis)]
        tiles.sort(key=lambda each: self._instructions(*each[:2]))
        for tile, _, reasons in tiles[:REGISTER_TILES]:
            yield from self._blocks(tile, reasons)
        for axis in self._vector_axes():
            for tile, reasons in self._tiles_apart(axis):
                yield from self._blocks(tile, reasons, smallest=1)

    # ---- the register layer

    def _vector_axes(self) -> list[str]:
        """Output axes that vectors may lie along: where operands and output are contiguous, and long enough."""
        tensors = [load.indices for load in self.form.body_loads if load.indices]
        last = self.form.final.axes[-1]

        def worth(axis: str) -> tuple[bool, int, bool]:
            contiguous = sum(abs(indices[-1].coefficient(axis)) == 1 for indices in tensors) + (axis == last)
            absent = sum(not any(index.coefficient(axis) for index in indices) for indices in tensors)
            return self.sizes[axis] >= self.lanes // 2, contiguous + absent, axis == last

        axes = sorted(self.form.final.axes, key=worth, reverse=True)
        long = [axis for axis in axes if self.sizes[axis] >= self.lanes // 2] or axes[:1]
        return long[:VECTOR_AXES]

    def _pieces(self, extent: int) -> int:
        return extent // self.lanes + (extent % self.lanes).bit_count()

    def _registers(self, tile: Mapping[str, int], axis: str) -> int:
        """Vector registers of a tile: its sums, a vector of an operand for each of a row's, and one on its way."""
        vectors = self._pieces(tile[axis])
        rows = math.prod(size for name, size in tile.items() if name != axis)
        return rows * vectors + vectors + 1

    def _instructions(self, tile: Mapping[str, int], axis: str) -> float:
        """Instructions of a turn of the innermost loop per vector of multiply-adds, counted in whole vectors."""
        vectors = self._pieces(tile[axis])
        rows = math.prod(size for name, size in tile.items() if name != axis)
        reads = 0.0
        for load in self.form.body_loads:
            used = {name for index in load.indices for name in index.axes}
            along = [index.coefficient(axis) for index in load.indices]
            distinct = math.prod(size for name, size in tile.items() if name != axis and name in used)
            alone = not any(along[:-1]) and (abs(along[-1]) == 1 or phases_of(load, axis) > 1)
            gathered = axis in used and not alone and not in_panels(load, axis)
            reads += distinct * (vectors if axis in used else 1) * (2 * self.lanes if gathered else 1)
        useful = rows * tile[axis] / self.lanes
        return max(rows * vectors + reads + TURN_INSTRUCTIONS, 2.0 * CHAINED) / useful

    def _register_tiles(self, axis: str) -> Iterator[tuple[dict[str, int], tuple[Reason, ...]]]:
        """Tiles whose rows grow along the best data-reuse score, for every number of vectors; the last ones of each."""
        axes = self.form.final.axes
        later = axes[axes.index(axis) + 1 :]
        for extent in dict.fromkeys(min(self.sizes[axis], count * self.lanes) for count in VECTORS):
            tile = {name: extent if name == axis else 1 for name in axes}
            if self._registers(tile, axis) > self.registers + 1:
                continue
            start = Reason("registers", f"{self._pieces(extent)} vectors along {axis}", self._shape(tile))
            path: list[tuple[dict[str, int], tuple[Reason, ...]]] = [(tile, (start,))]
            while True:
                step = self._best_row(tile, axis, later)
                if step is None:
                    break
                score, name, tile = step
                reason = Reason("registers", f"grow {name}", self._shape(tile), (("score", score),))
                path.append((tile, (*path[-1][1], reason)))
            yield from path[-REGISTER_TAIL:]

    def _tiles_apart(self, axis: str) -> Iterator[tuple[dict[str, int], tuple[Reason, ...]]]:
        """Tiles that read the largest operand in as many places at a time as registers and prefetchers allow, where a
        core that reads in one place waits at the beginning of every page."""
        if not any(layer.page_start_seconds for layer in self.device.layers if layer is not self.device.dram):
            return
        tensors = self.form.expr.tensor_by_name
        largest = max(self.form.body_loads, key=lambda load: tensors[load.tensor].size_bytes)
        outer = next((index.axes[0] for index in largest.indices if index.axes), axis)
        if outer == axis or outer in self.form.reduced:
            return
        extents = dict.fromkeys(min(self.sizes[axis], count * self.lanes) for count in VECTORS)
        for extent, rows in itertools.product(extents, range(PIECES_FOLLOWED, 1, -1)):
            tile = {name: 1 for name in self.form.final.axes} | {axis: extent, outer: rows}
            if self.sizes[outer] % rows == 0 and self._registers(tile, axis) <= self.registers:
                yield tile, (Reason("registers", f"read {largest.tensor} in {rows} places", self._shape(tile)),)

    def _shape(self, tile: Mapping[str, int]) -> Shape:
        """The shape of a register tile at one point of the reduction."""
        return tuple([tile.get(axis, 1) for axis in self.space.axes])

    def _best_row(
        self, tile: dict[str, int], axis: str, later: Sequence[str]
    ) -> tuple[float, str, dict[str, int]] | None:
        """The next larger tile with the best score that fits the registers."""
        shape = self._shape(tile)
        steps = []
        for position, name in enumerate(tile):
            # A later axis that filled a vector would be the one that lanes lie along.
            most = min(self.sizes[name], self.lanes - 1 if name in later else self.registers)
            size = next((rows for rows in ROWS if tile[name] < rows <= most), None)
            if name == axis or size is None:
                continue
            grown = {**tile, name: size}
            if self._registers(grown, axis) > self.registers:
                continue
            grown_shape = self._shape(grown)
            score = data_reuse_score(
                self.model.traffic(shape),
                self.model.traffic(grown_shape),
                self.model.footprint("registers", shape),
                self.model.footprint("registers", grown_shape),
            )
            if score > 0:
                steps.append((score, position, name, grown))
        if not steps:
            return None
        score, _, name, grown = max(steps, key=lambda step: step[:2])
        return score, name, grown

    # ---- the layer of a core's own

    def _blocks(
        self, tile: dict[str, int], reasons: tuple[Reason, ...], smallest: int = SMALLEST_BLOCK
    ) -> Iterator[Candidate]:
        """Blocks of ``smallest`` register tiles or more for every length of a step: all of the path, as the cache
        manages itself."""
        tiles = self._tiles_in(tile, self.sizes)
        units = min(self.device.unit_count, tiles)
        least = min(smallest, tiles // units)
        for step in self._steps():
            block = dict(tile)
            why = (*reasons, Reason("shared", "start from the register tile", self._full(block, step)))
            if self._tiles_in(tile, block) >= least:
                yield from self._variants(tile, block, step, why)
            while True:
                # Odd sizes, whose last block is hardly used, would seem to move more in every larger one.
                grown = self._best_block(tile, block, step, at_any_score=self._tiles_in(tile, block) < least)
                if grown is None:
                    break
                score, axis, block = grown
                why = (*why, Reason("shared", f"grow {axis}", self._full(block, step), (("score", score),)))
                if self._tiles_in(tile, block) >= least and self._tiles_in(block, self.sizes) >= units:
                    yield from self._variants(tile, block, step, why)

    @staticmethod
    def _tiles_in(tile: Mapping[str, int], larger: Mapping[str, int]) -> int:
        """Tiles that a larger one is cut into."""
        return math.prod([-(-larger[axis] // size) for axis, size in tile.items()])

    def _full(self, block: Mapping[str, int], step: Mapping[str, int]) -> Shape:
        """The shape of a block and a step together."""
        sizes = {**block, **step}
        return tuple([sizes[axis] for axis in self.space.axes])

    def _steps(self) -> Iterator[dict[str, int]]:
        """The whole reduction, its longest axis halved while that leaves enough to do, and very short steps where rows
        lie on different pages."""
        step = {axis: self.sizes[axis] for axis in self.form.reduced}
        yield dict(step)
        if self.form.expr.output.dtype != self.form.expr.accumulate:
            return  # partial sums rest in the output
        axis = max(self.form.reduced, key=lambda each: self.sizes[each])
        sizes = [-(-self.sizes[axis] // 2**halvings) for halvings in range(1, STEP_HALVINGS + 1)]
        others = math.prod(step.values()) // step[axis]
        sizes = [size for size in sizes if size * others >= SHORTEST_STEP]
        if others == 1 and min(sizes, default=0) > FOLLOWED_STEP and self._rows_change_pages(axis):
            sizes.append(FOLLOWED_STEP)
        for size in sizes:
            yield {**step, axis: size}

    def _rows_change_pages(self, axis: str) -> bool:
        """True where half of an operand's rows along a reduced axis, or more, begin on another page than the one
        before: within a page prefetchers go on from row to row."""
        tensors = self.form.expr.tensor_by_name
        for load in self.form.body_loads:
            shape = tensors[load.tensor].shape
            for place, index in enumerate(load.indices):
                row_bytes = math.prod(shape[place + 1 :]) * tensors[load.tensor].element_bytes
                if index.coefficient(axis) and 2 * row_bytes >= PAGE_BYTES:
                    return True
        return False

    def _best_block(
        self, tile: Mapping[str, int], block: dict[str, int], step: Mapping[str, int], *, at_any_score: bool
    ) -> tuple[float, str, dict[str, int]] | None:
        """The next larger block with the best score that a core's own cache holds."""
        _, footprint, traffic = self.model.costs(self._full(block, step))
        capacity = self.device.limits.shared_bytes_per_block
        steps = []
        for position, axis in enumerate(block):
            size = self._next_block(axis, tile[axis], block[axis])
            if size is None:
                continue
            grown = {**block, axis: size}
            _, grown_bytes, grown_traffic = self.model.costs(self._full(grown, step))
            if grown_bytes > capacity:
                continue
            score = data_reuse_score(traffic, grown_traffic, footprint, grown_bytes)
            if score > 0 or at_any_score or axis in self.form.batch_axes:
                steps.append((score, position, axis, grown))
        if not steps:
            return None
        score, _, axis, grown = max(steps, key=lambda each: each[:2])
        return score, axis, grown

    def _next_block(self, axis: str, tile: int, block: int) -> int | None:
        """The next larger block that divides an axis evenly; None where it is all in one."""
        sizes = self._block_sizes.get((axis, tile))
        if sizes is None:
            tiles = -(-self.sizes[axis] // tile)
            sizes = tuple(sorted({-(-tiles // parts) * tile for parts in PARTS if parts <= tiles}))
            self._block_sizes[axis, tile] = sizes
        return next((size for size in sizes if size >= 2 * block or (size > block and size == sizes[-1])), None)

    def _variants(
        self, tile: Mapping[str, int], block: Mapping[str, int], step: Mapping[str, int], reasons: tuple[Reason, ...]
    ) -> Iterator[Candidate]:
        """The tiles with every choice of packed operands: those copied into scratch memory in the order in which the
        innermost loop reads them."""
        tiles = self._shape(tile), self._full(block, step)
        sizes = tuple(block.items()), tuple(tile.items()), tuple(step.items())
        for packed in self._packings:
            schedule = TileSchedule(block=sizes[0], thread=sizes[1], step=sizes[2], cached=packed)
            why = Reason("shared", f"pack {', '.join(packed)}" if packed else "pack nothing", tiles[1])
            yield Candidate(schedule, "scale up", self.epsilon, (*reasons, why), tiles)

    @cached_property
    def _packings(self) -> tuple[tuple[str, ...], ...]:
        """Every choice of operands that may be packed; those with a border always are."""
        scattered = {load.tensor for load in self.form.scattered_loads}
        operands = [load for load in self.form.body_loads if load.tensor not in scattered]
        names = tuple(dict.fromkeys(load.tensor for load in operands if load.indices and self._reused(load)))
        padded = {load.tensor for load in operands if load.pad is not None}
        choices = (packed for count in range(len(names) + 1) for packed in itertools.combinations(names, count))
        return tuple(packed for packed in choices if not padded - set(packed))

    def _reused(self, load: Load) -> bool:
        """True if outputs share elements of an operand, so that a copy may pay; or it has a border, which a copy has
        inside."""
        used = {axis for index in load.indices for axis in index.axes}
        windows = any(len(index.terms) > 1 for index in load.indices)
        return windows or load.pad is not None or any(axis not in used for axis in self.form.final.axes)

    # ---- operators without reuse

    def _flat(self) -> Iterator[Candidate]:
        """Element-wise operators: vectors along the last axis, or squares where an operand is transposed."""
        axes = self.form.final.axes
        if not axes:
            yield self._flat_candidate({}, {}, "one element")
            return
        last = axes[-1]
        other = self._transposed_along()
        for vectors in (1, 2, 4, 8):
            for rows in (1,) if other is None else (1, 2, 4, 8, 16, 32):
                tile = {axis: 1 for axis in axes} | {last: min(self.sizes[last], vectors * self.lanes)}
                if other is not None:
                    tile[other] = min(rows, self.sizes[other])
                yield from self._cut_up(tile)

    def _transposed_along(self) -> str | None:
        """The output axis that an operand is contiguous along, where that is not the last one."""
        last = self.form.final.axes[-1]
        for load in self.form.body_loads:
            if load.indices and not load.indices[-1].coefficient(last):
                output_axes = [axis for axis in load.indices[-1].axes if axis in self.form.final.axes]
                if output_axes and any(index.coefficient(last) for index in load.indices):
                    return output_axes[0]
        return None

    def _cut_up(self, tile: dict[str, int]) -> Iterator[Candidate]:
        """A register tile in blocks: contiguous ones, the outermost axes cut first."""
        axes = self.form.final.axes
        for blocks in (1, 2, 4, 8, MOST_BLOCKS):
            wanted = blocks * self.device.unit_count
            block = {axis: self.sizes[axis] for axis in axes}
            for axis in axes:
                tiles = -(-self.sizes[axis] // tile[axis])
                parts = min(tiles, wanted)
                block[axis] = -(-tiles // parts) * tile[axis]
                wanted = -(-wanted // parts)
            yield self._flat_candidate(
                block,
                tile,
                f"cut for {blocks * self.device.unit_count} blocks",
            )

    def _flat_candidate(self, block: dict[str, int], tile: dict[str, int], action: str) -> Candidate:
        schedule = TileSchedule(block=tuple(block.items()), thread=tuple(tile.items()))
        text = " ".join(f"{axis}={size}" for axis, size in tile.items())
        return Candidate(schedule, "element-wise", self.epsilon, (Reason("registers", action, text),))

    def _rows(self) -> Iterator[Candidate]:
        """Whole rows: lanes along their columns, or along neighbouring rows."""
        form = self.form
        along = lane_axis(form)
        for blocks in (1, 2, 4, 8, MOST_BLOCKS):
            wanted = blocks * self.device.unit_count
            block: dict[str, int] = {}
            for axis in form.spatial:
                unit = min(self.lanes, self.sizes[axis]) if axis == along else 1
                rows = -(-self.sizes[axis] // unit)
                parts = min(rows, wanted)
                block[axis] = -(-rows // parts) * unit
                wanted = -(-wanted // parts)
            schedule = TileSchedule(
                block=tuple(block.items()),
                thread=tuple((axis, 1) for axis in form.spatial),
                reduce_threads=tuple((axis, self.lanes if axis == form.reduced[-1] else 1) for axis in form.reduced),
            )
            text = " ".join(f"{axis}={size}" for axis, size in block.items()) or "one row"
            yield Candidate(
                schedule, "rows", self.epsilon, (Reason("registers", f"lanes along {along or 'columns'}", text),)
            )
