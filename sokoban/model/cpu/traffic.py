"""Bytes that caches which manage themselves let through: reuse distances of a tile schedule's loops.

A block's loops are, outermost first: blocks, steps of the sum, register tiles, and the sum within a step. What all
operands touch during one turn of a loop is its working set. Where that fits a cache, the next turn finds there what it
reads again, and only what is new comes from below; where it does not, everything does (the *reuse distance* is then
longer than the cache, and every loop further out pays in full). That is Sokoban's traffic of a layer (thesis 5.5.1) for
layers that no copies fill.

Bytes count in whole transactions, where every row of a tile begins somewhere in its first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import MemoryLayer
from sokoban.language.expression import Load, Tensor
from sokoban.schedule.cpu_tiles import LARGE_TILE, WRITTEN_OUT, CpuTiles, asked_ahead, in_panels, sum_loops
from sokoban.schedule.table import Bools, Floats, Ints, product

#: Share of a cache that a schedule finds for itself: least recently used is only approximated, sets fill unevenly, and
#: stacks and other data are there too.
USABLE = 0.75

#: Lines of a piece that come before a prefetcher knows that there are more.
LINES_UNPREFETCHED = 3.0
#: Memory within which prefetchers look ahead, and pieces that they follow at a time.
PAGE_BYTES = 4096
PIECES_FOLLOWED = 16

#: Lines by which prefetchers of a core run ahead of what it reads, on the same page (Intel 64 and IA-32 Architectures
#: Optimization Reference Manual, data prefetch logic: up to 20 lines).
LINES_AHEAD = 20.0

#: Transfers of a line that is written: a cache fetches it before, and hands it down after.
WRITES = 2.0


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop: the axis that it walks, its turns on average, and how much of the axis it covers then."""

    axis: str
    turns: Floats
    covers: Ints


@dataclass(frozen=True, eq=False)
class Footprint:
    """Part of a tensor that is touched.

    Attributes:
        bytes: in whole transactions.
        row: bytes of a piece without gaps.
        stride: bytes from the beginning of one piece to that of the next; 0 where there is one.
    """

    bytes: Floats
    row: Floats
    stride: Ints

    def where(self, condition: Bools, other: Footprint | None = None) -> Footprint:
        """This footprint where a condition holds, elsewhere another one, or nothing."""
        if other is None:
            return Footprint(np.where(condition, self.bytes, 0.0), self.row, self.stride)
        return Footprint(
            np.where(condition, self.bytes, other.bytes),
            np.where(condition, self.row, other.row),
            np.where(condition, self.stride, other.stride),
        )

    def crowded(self, layer: MemoryLayer) -> Bools | bool:
        """True if a cache cannot keep it for lack of places: rows whose first lines fall into few of its sets."""
        line = layer.transaction_bytes
        is_strided = (self.stride % line == 0) & (self.stride > 0)
        if layer.associativity is None or layer.shared_by == "device" or not is_strided.any():
            return False  # large caches hash their addresses
        sets = max(1, layer.capacity_bytes // (layer.associativity * line))
        starts = sets // np.gcd(sets, np.maximum(1, self.stride // line))
        covered = np.minimum(sets, starts * np.ceil(self.row / line))
        return is_strided & (self.bytes > covered * layer.associativity * line)


@dataclass(frozen=True, eq=False, kw_only=True)
class Stream:
    """Accesses of one operand.

    Attributes:
        name: of the tensor; the copy of one in scratch memory ends in ``'``.
        footprints: what one turn of all loops inside a loop touches, by loop, innermost first; the last entry is what
            all loops together touch.
        start: loops that the accesses are outside of.
        written: whether the operand is the results.
        unprefetched: share of its lines that were not prefetched, as prefetchers do not follow short pieces that lie
            on different pages.
        copied: whether it is read by copying it.
        copying: share of its lines that come while a core copies and computes nothing.
        places: pieces of it that a core reads at a time.
    """

    name: str
    footprints: Sequence[Footprint]
    start: int = 0
    written: bool = False
    unprefetched: Floats | float = 0.0
    copied: Bools | bool = False
    copying: Floats | float = 0.0
    places: Floats | float = 1.0


class Traffic:
    """The memory accesses of all schedules of one vector axis."""

    def __init__(self, tiles: CpuTiles, device: DeviceSpec, copies: Mapping[Load, Ints]) -> None:
        """``copies``: tile loops around the copy of every load that some schedule stages; see
        :func:`sokoban.model.cpu.work.copies_of`."""
        self.tiles, self.device, self.copies = tiles, device, copies
        self.form = tiles.form
        self.count = tiles.table.count

    @cached_property
    def loops(self) -> list[Loop]:
        """The loops of a kernel, innermost first."""
        tiles, sizes = self.tiles, self.form.sizes
        inner = [Loop(axis, sizes[axis] / tiles.step_counts[axis], tiles.step[axis]) for axis in self.sum_axes[::-1]]
        middle = [
            Loop(axis, tiles.tiles[axis] / tiles.blocks[axis], tiles.block[axis]) for axis in tiles.tile_loops[::-1]
        ]
        full_sizes = {axis: np.full(self.count, size) for axis, size in sizes.items()}
        steps = [Loop(axis, 1.0 * tiles.step_counts[axis], full_sizes[axis]) for axis in self.form.reduced[::-1]]
        outer = [Loop(axis, 1.0 * tiles.blocks[axis], full_sizes[axis]) for axis in self.form.final.axes[::-1]]
        # Most schedules take no steps along most axes.
        return [*inner, *middle, *(loop for loop in (*steps, *outer) if (loop.turns > 1).any())]

    @cached_property
    def sum_axes(self) -> Sequence[str]:
        """Axes of the loops of the sum, outermost first."""
        return sum_loops(self.form, self.tiles.axis)

    @cached_property
    def boxes(self) -> list[dict[str, Ints]]:
        """Elements by axis that one turn of all loops inside a loop covers, by loop, innermost first; the last entry is
        what all loops together cover."""
        ones = np.ones(self.count, dtype=np.int64)
        box = {**self.tiles.tile, **dict.fromkeys(self.form.reduced, ones)}
        boxes = [dict(box)]
        for loop in self.loops:
            box[loop.axis] = np.maximum(box[loop.axis], loop.covers)
            boxes.append(dict(box))
        return boxes

    @cached_property
    def streams(self) -> list[Stream]:
        """All accesses of the kernel."""
        inner = len(self.sum_axes)
        streams: list[Stream] = []
        for load in (*self.form.body_loads, *(self.form.later_loads if self.form.reduction else ())):
            if load.indices:
                summed = load in self.form.body_loads or load in self.form.reduction_loads
                streams += self._of(load, 0 if summed else inner)
        output = self.form.expr.output
        extents = [[box[axis] for axis in self.form.final.axes] for box in self.boxes]
        touched = [self._touched(box_extents, output) for box_extents in extents]
        streams.append(Stream(name=output.name, footprints=touched, start=inner, written=True))
        return streams

    def _of(self, load: Load, start: int) -> list[Stream]:
        """The accesses of one operand, outside of the ``start`` innermost loops: its own, and those of its copy."""
        tensor = self.form.expr.tensor_by_name[load.tensor]
        direct = [self._touched(extents_of(load, box, tensor), tensor) for box in self.boxes]
        staged = self.tiles.table.cached[load.tensor] if load in self.copies else np.zeros(self.count, dtype=bool)
        read_in_place = self._unprefetched(load, direct, start)
        # Of one row that is longer than a page all places are neighbours.
        places = np.clip(direct[start].bytes / np.maximum(direct[start].row, 1.0), 1.0, PIECES_FOLLOWED)
        if not staged.any():
            return [Stream(name=load.tensor, footprints=direct, start=start, unprefetched=read_in_place, places=places)]
        # Inside its copy a staged operand is read from scratch memory, which is dense and stays where it is.
        inner, panels = len(self.sum_axes), in_panels(load, self.tiles.axis)
        depth = inner + len(self.tiles.tile_loops) - self.copies[load]
        scratch: list[Footprint] = []
        source: list[Footprint] = []
        for place, (box, touched) in enumerate(zip(self.boxes, direct, strict=True)):
            box_footprint = self._footprint_of_box(load, box, tensor, panels)
            scratch.append(box_footprint.where(staged & (place <= depth), scratch[-1] if scratch else None))
            source.append(touched.where(~staged | (place >= depth)))
        return [
            Stream(
                name=load.tensor,
                footprints=source,
                start=start,
                unprefetched=np.where(staged, self._unprefetched_in_copies(direct, depth), read_in_place),
                copied=staged,
                copying=np.where(staged, self._not_asked(load, tensor), 0.0),
            ),
            Stream(name=f"{load.tensor}'", footprints=scratch, start=start),
        ]

    def _unprefetched_in_copies(self, footprints: Sequence[Footprint], places: Ints) -> Floats:
        """Share of unprefetched lines of an operand that is copied row by row: every row is a piece
        by itself. ``places``: loops inside the copy, by schedule."""
        share: Floats = np.zeros(self.count)
        for place in np.unique(places).tolist():
            box = footprints[place]
            share = np.where(places == place, self._unprefetched_of_pieces(box.row, box.stride), share)
        return share

    def _unprefetched_of_pieces(self, run: Floats, stride: Floats | Ints) -> Floats:
        """Share of the first lines of pieces of ``run`` bytes that begin ``stride`` bytes apart, as far as the next
        piece lies on another page."""
        lines = np.maximum(1.0, run / self.device.shared.transaction_bytes)
        return np.minimum(1.0, LINES_UNPREFETCHED / lines) * np.minimum(1.0, stride / PAGE_BYTES)

    def _unprefetched(self, load: Load, footprints: Sequence[Footprint], start: int) -> Floats:
        """Share of an operand's lines that were not prefetched: the first ones of every piece whose next piece lies
        on another page. A piece goes as far as the loops go along a row, and on where the next begins at its end, as in
        panels; a few pieces are followed at the same time."""
        tensor = self.form.expr.tensor_by_name[load.tensor]
        rows = [math.prod(tensor.shape[place + 1 :]) * tensor.element_bytes for place in range(len(tensor.shape))]
        last = {axis for axis, _ in load.indices[-1].terms}
        run, is_followed = footprints[start].row, np.ones(self.count, dtype=bool)
        stride = np.zeros(self.count)
        followed = footprints[start].bytes / np.maximum(footprints[start].row, self.device.shared.transaction_bytes)
        for place, loop in enumerate(self.loops[start:], start=start):
            jump = sum(abs(i.coefficient(loop.axis)) * row for i, row in zip(load.indices, rows, strict=True))
            if jump == 0:
                continue
            turns = is_followed & (loop.turns > 1)
            goes_on = turns & ((stride == 0) & (jump <= run) if loop.axis not in last else turns)
            run = np.where(goes_on, footprints[place + 1].row, run)
            if loop.axis in last:
                continue
            turns = turns & ~goes_on
            followed = np.where(turns, followed * loop.turns, followed)
            stride = np.where(turns & (stride == 0), jump, stride)
            is_followed = is_followed & (followed <= PIECES_FOLLOWED)
        return self._unprefetched_of_pieces(run, np.where(is_followed, 0.0, stride))

    def _not_asked(self, load: Load, tensor: Tensor) -> Floats:
        """Share of what is copied that tiles do not ask for before: all, or what the first blocks begin with. What is
        read in place is asked for too, but its rows still lie apart for all tiles that read them after the first."""
        tiles, sizes = self.tiles, self.form.sizes
        stepped = sum((tiles.step[axis] < sizes[axis] for axis in tiles.step), np.zeros(self.count, dtype=np.int64))
        asking = (tiles.rows * tiles.tile_pieces > LARGE_TILE) & (stepped <= 1) & (self.copies[load] == 0)
        tile = {**tiles.block, **tiles.step}
        block_tiles = product(tiles.tiles_per_block.values(), self.count)
        turns = product([tiles.step[axis] for axis in self.sum_axes[:-1]], self.count)
        turns = turns * (tiles.step[self.sum_axes[-1]] // WRITTEN_OUT)
        line = self.device.shared.transaction_bytes // tensor.element_bytes
        asked = asking & (asked_ahead(load, tiles.axis, tile, True, block_tiles, turns, line) > 0)
        times = tiles.steps * product(tiles.blocks.values(), self.count)
        return np.where(asked, np.minimum(1.0, self.device.unit_count / times), 1.0)

    def _footprint_of_box(self, load: Load, box: Mapping[str, Ints], tensor: Tensor, panels: bool) -> Footprint:
        """Bytes of a copy that a box of axes reads: adjacent in panels, else row by row, some of each row."""
        extents = extents_of(load, box, None)
        row = 1.0 * extents[-1] * tensor.element_bytes + np.zeros(self.count)
        elements = np.prod(np.broadcast_arrays(*extents, np.ones(self.count)), axis=0)
        line = self.device.shared.transaction_bytes
        row_bytes = elements * tensor.element_bytes / row * np.maximum(line, row + line - tensor.element_bytes)
        size_bytes = elements * tensor.element_bytes if panels else row_bytes
        return Footprint(size_bytes, row, np.zeros(self.count, dtype=np.int64))

    def _touched(self, extents: Sequence[Ints], tensor: Tensor) -> Footprint:
        """The transactions that a box of a tensor lies in."""
        element_bytes = tensor.element_bytes
        line = self.device.shared.transaction_bytes / element_bytes
        run: Floats = np.ones(self.count)
        elements: Floats = np.ones(self.count)
        stride: Ints = np.ones(self.count, dtype=np.int64)
        joined = np.ones(self.count, dtype=bool)
        for extent, length in zip(extents[::-1], tensor.shape[::-1], strict=True):
            run = np.where(joined, run * extent, run)
            stride = np.where(joined, stride * length, stride)
            elements = elements * extent
            joined = joined & (extent >= length)
        lines = np.where(run % line == 0, run / line, run / line + 1.0 - 1.0 / line)
        touched = elements / run * np.maximum(lines, 1.0) * line * element_bytes
        return Footprint(touched, run * element_bytes, np.where(joined, 0, stride * element_bytes))

    @cached_property
    def scratch_bytes(self) -> Ints:
        """Bytes of scratch memory of a block, which holds all copies."""
        copies = [stream.footprints[-1].bytes for stream in self.streams if stream.name.endswith("'")]
        return np.ceil(sum(copies, np.zeros(self.count))).astype(np.int64)

    def into(self, layer: MemoryLayer, writes: float = WRITES) -> Floats:
        """Bytes that come into a cache, and go out of it, during the whole kernel on all units; what is written moves
        ``writes`` times."""
        return self._share_into(layer, lambda stream: writes if stream.written else 1.0)

    def unprefetched_into(self, layer: MemoryLayer) -> Floats:
        """Bytes that come into a cache without having been asked for ahead, so that a core waits for them while it
        computes."""
        return self._share_into(layer, lambda stream: np.where(stream.copied, 0.0, stream.unprefetched))

    def pages_begun_into(self, layer: MemoryLayer) -> Floats:
        """Pages of what comes into a cache because it is read, over the places in which it is read at a time: while
        prefetchers find one page's beginning, the others go on."""

        def pages(stream: Stream) -> Floats | float:
            return 0.0 if stream.written else (1.0 - stream.unprefetched) / (PAGE_BYTES * stream.places)

        return self._share_into(layer, pages)

    @cached_property
    def contested_lines(self) -> Floats:
        """Lines of results that a core fetches from another, all units together: both write parts of the same rows, and
        what one reads of its own again lets its prefetchers run on into the other's.

        Cores are at the same place of their parts, so that as many lines lie between what two of them write as the
        blocks of one that follow each other along a row have, without the one that it is at. What is read for the
        first time is in no other core's cache yet, and what stays in the first cache lets nothing run ahead.
        """
        tiles, output, first = self.tiles, self.form.expr.output, self.device.layers[1]
        axis, line = self.form.final.axes[-1], first.transaction_bytes
        again = np.maximum(0.0, self.streams_into(first)[-1] - self.streams[-1].footprints[-1].bytes) / line
        along = tiles.blocks[axis]
        each = -(-product(tiles.blocks.values(), self.count) // self.device.unit_count)
        piece = np.maximum(1.0, tiles.block[axis] * output.element_bytes / line)
        between = (each - 1) * piece
        reached = np.clip(LINES_AHEAD - between, 0.0, piece)
        # Pages end anywhere between the two.
        same_page = np.clip(1.0 - (between + reached / 2) * line / PAGE_BYTES, 0.0, 1.0)
        return np.where(each < along, again * reached / piece * same_page, 0.0)

    def copied_into(self, layer: MemoryLayer) -> tuple[Floats, Floats]:
        """Bytes that come into a cache while a core does nothing but copy, and those of them that were not asked for
        ahead."""
        return (
            self._share_into(layer, lambda stream: stream.copying),
            self._share_into(layer, lambda stream: stream.copying * stream.unprefetched),
        )

    def _share_into(self, layer: MemoryLayer, share: Callable[[Stream], Floats | float]) -> Floats:
        """A share of the bytes of every stream that come into a cache, summed up."""
        moved = zip(self.streams, self.streams_into(layer), strict=True)
        return sum((share(stream) * stream_bytes for stream, stream_bytes in moved), np.zeros(self.count))

    def streams_into(self, layer: MemoryLayer) -> list[Floats]:
        """Bytes that come into a cache, by stream; what is written counts once."""
        moved = self._bytes_by_layer.get(layer.name)
        if moved is None:
            shares = self._shares_retained(layer)
            moved = self._bytes_by_layer[layer.name] = [self._moved(stream, shares, layer) for stream in self.streams]
        return moved

    @cached_property
    def _bytes_by_layer(self) -> dict[str, list[Floats]]:
        return {}

    def _shares_retained(self, layer: MemoryLayer) -> list[Floats]:
        """Share of what one turn of all loops inside a loop touches that a cache still has in the next turn, by
        loop."""
        places = range(len(self.loops) + 1)
        footprints = (sum((s.footprints[place].bytes for s in self.streams), np.zeros(self.count)) for place in places)
        return [share_retained(layer, footprint) for footprint in footprints]

    def _moved(self, stream: Stream, shares: Sequence[Floats], layer: MemoryLayer) -> Floats:
        """Bytes of a stream that come into a cache during the whole kernel; ``shares``: see
        :meth:`_shares_retained`."""
        moved = stream.footprints[stream.start].bytes
        for place, loop in enumerate(self.loops[stream.start :], start=stream.start):
            inside, outside = stream.footprints[place].bytes, stream.footprints[place + 1].bytes
            grown = outside / np.maximum(inside, 1e-9)
            # A copy's source comes into being where it is copied: it is read once there.
            fresh = (inside == 0) & (outside > 0)
            stays = np.where(stream.footprints[place].crowded(layer), 0.0, shares[place])
            again = stays * grown + (1.0 - stays) * loop.turns
            moved = np.where(fresh, outside, moved * again)
        return moved


def share_retained(layer: MemoryLayer, footprint: Floats) -> Floats:
    """Share of ``footprint`` bytes, read over and over in turn, that a cache still has when they come again.

    A cache whose ways are larger than a page is filled by chance: where a page's lines go depends on where the system
    has put it. Pages that want the same places are then about Poisson distributed, and where they are more than there
    are ways, least recently used loses all of them.
    """
    ways = layer.associativity
    if ways is None or layer.shared_by == "device" or layer.capacity_bytes <= ways * PAGE_BYTES:
        return np.where(footprint <= USABLE * layer.capacity_bytes, 1.0, 0.0)
    others = footprint * (ways / layer.capacity_bytes)
    term: Floats = np.exp(-others)
    share = term
    for number in range(1, ways):
        term = term * others / number
        share = share + term
    return share


def extents_of(load: Load, box: Mapping[str, Ints], tensor: Tensor | None) -> list[Ints]:
    """Extents of the part of a tensor that a box of axes reads; within the tensor where one is given."""
    extents = []
    for place, index in enumerate(load.indices):
        extent = 1 + sum((abs(c) * (box[axis] - 1) for axis, c in index.terms), np.zeros(1, dtype=np.int64))
        extents.append(extent if tensor is None else np.minimum(extent, tensor.shape[place]))
    return extents
