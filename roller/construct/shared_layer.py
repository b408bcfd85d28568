"""The shared layer of scale-up: all blocks' tiles over a register tile, and why each of them is proposed (6.3.2).

The walk is written twice, here and in C, where it takes a sixth of the time. Both write down the same lines: of every
tile on the way its shape, what is said of it and the line before it. The reasons of a tile are read off them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import cached_property
from itertools import islice
from operator import floordiv
from struct import iter_unpack

from roller.construct.alignment import ExecutionUnitRule
from roller.construct.growth import Growth, Menu, flat_menu
from roller.construct.performance import MicroModel, Shape, data_reuse_score
from roller.construct.program import Reason

#: A tile and why it is proposed.
Explained = tuple[Shape, tuple[Reason, ...]]

#: Points of the reduction per shared-memory fill below which barriers dominate.
SMALLEST_STEP_POINTS = 8

#: Blocks per unit up to which a launch waits for memory at every step rather than for arithmetic, so that its steps are
#: worth doubling further; and how often.
FEW_WAVES = 2
LONGEST_DOUBLINGS = 5

#: Tiles kept of the end of a path.
SHARED_TAIL = 3

#: Lines that the C file may write; longer walks are left to Python.
MOST_LINES = 512


class Said(IntEnum):
    """Statements that a line makes of its tile, in the order of the C file."""

    START = 0
    GROW = auto()
    SHORTEN = auto()
    FED = auto()
    SLOW = auto()
    THREADS = auto()
    BLOCKED = auto()
    SATED = auto()
    LONGER = auto()
    SHRINK = auto()


#: What most lines say, as the C file writes it.
_GROW = int(Said.GROW)

#: What lines say in the same words of every tile: the layer, and the words.
_WORDS: Mapping[int, tuple[str, str]] = {
    Said.START: ("shared", "start from the register tile and one aligned reduction step"),
    Said.SHORTEN: ("shared", "shorten the step: shared memory is full, warps are not"),
    Said.FED: ("shared", "keep: memory can feed the arithmetic units"),
    Said.SLOW: ("shared", "keep: memory sets the pace"),
    Said.THREADS: ("shared", "stop: the next step would take too many threads"),
    Said.SATED: ("shared", "stop: no axis is left whose growth saves traffic"),
    Said.LONGER: ("shared", "variant: a longer reduction step halves the barriers"),
    Said.SHRINK: ("scale out", "shrink: fewer blocks than units"),
}

#: What is said, the line before it (-1 for none), two numbers, and the shape.
Line = tuple[int, ...]


@dataclass
class Walk:
    """The lines of a walk, the score of each, and which of them are tiles to propose."""

    lines: list[Line] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)

    def say(self, said: Said, before: int, shape: Shape, number: int = 0, other: int = 0, score: float = 0.0) -> int:
        """A line more; its number."""
        self.lines.append((said, before, number, other, *shape))
        self.scores.append(score)
        return len(self.lines) - 1

    def shape(self, line: int) -> Shape:
        """The tile of a line."""
        return self.lines[line][4:]


class SharedLayer:
    """The tiles of one operator on one device for one epsilon.

    Attributes:
        start: the smallest tile there is, one element or one fragment.
        single: whether an axis runs one element at a time, by axis.
        lanes_of_tile: threads that compute a register tile.
    """

    def __init__(
        self, model: MicroModel, growth: Growth, unit: ExecutionUnitRule, epsilon: float, *, start: Shape,
        single: Sequence[bool], lanes_of_tile: int,
    ) -> None:  # fmt: skip
        self.model, self.space, self.growth, self.unit, self.epsilon = model, model.space, growth, unit, epsilon
        self.start, self.single, self.lanes_of_tile = start, single, lanes_of_tile
        limits = model.device.limits
        self.unit_count, self.threads_per_block = model.device.unit_count, limits.threads_per_block
        self.capacity = limits.shared_bytes_per_block
        # Two blocks of a unit have room for longer steps.
        self.longer_bytes = min(limits.shared_bytes_per_unit // 2, limits.shared_bytes_per_block)
        self._grow = tuple([f"grow {axis}" for axis in self.space.axes])

    def tiles(self, register_shape: Shape, menu: Menu) -> list[Explained]:
        """The tiles over a register tile that grow through the aligned sizes of ``menu``."""
        walk = self.compiled(register_shape, menu) or self.walked(register_shape, menu)
        reasons: list[tuple[Reason, ...]] = []
        grow = self._grow
        for line, score in zip(walk.lines, walk.scores, strict=True):
            said, before, number = line[:3]
            if said == _GROW:
                reason = Reason("shared", grow[number], line[4:], (("score", score),))
            else:
                reason = self._reason(line, score)
            reasons.append((*reasons[before], reason) if before >= 0 else (reason,))
        return [(walk.shape(line), reasons[line]) for line in walk.tiles]

    def _reason(self, line: Line, score: float) -> Reason:
        """Reason in a line that is no step of growth."""
        said, _, number, other = line[:4]
        shape = line[4:]
        if said == Said.BLOCKED:
            action = f"stop: {self.space.axes[number]}={other} would not fit"
            return Reason("shared", action, shape, (("bytes", score), ("limit", float(self.capacity))))
        layer, action = _WORDS[said]
        numbers: tuple[tuple[str, float], ...] = ()
        if said in (Said.FED, Said.SLOW):
            numbers = (("threads", number),)
        elif said == Said.THREADS:
            numbers = (("threads", float(number)), ("limit", float(other)))
        elif said == Said.SHRINK:
            numbers = (("blocks", float(number)), ("units", float(self.unit_count)))
        return Reason(layer, action, shape, numbers)

    # ---- in Python

    def walked(self, register_shape: Shape, menu: Menu) -> Walk:
        """The walk: the last tiles of the path whose threads fill warps, each fit to the device."""
        walk = Walk()
        for line in self._path(walk, register_shape, list(menu)):
            self._fit_device(walk, register_shape, line)
        return walk

    def _path(self, walk: Walk, register_shape: Shape, menu: list[tuple[int, ...]]) -> list[int]:
        """The lines of the tiles kept."""
        menu, shape = self._smallest(menu)
        line = largest = walk.say(Said.START, -1, shape)
        lines: list[int] = []
        saturated = 0
        path = self.growth.path("shared", shape, menu, self.capacity)
        while saturated < SHARED_TAIL:
            threads = self._threads(register_shape, shape)
            if threads > self.threads_per_block:
                self._close(walk, lines, Said.THREADS, threads, self.threads_per_block)
                break
            largest = line
            if self.unit.fills(threads, self.epsilon) and threads >= min(2 * self.unit.lanes, self.threads_per_block):
                fed = self.model.mem_perf("shared", shape) >= self.model.max_compute_perf()
                lines.append(walk.say(Said.FED if fed else Said.SLOW, line, shape, threads))
                saturated += fed
            step = next(path, None)
            if step is not None:
                score, axis, shape = step
                line = walk.say(Said.GROW, line, shape, axis, score=score)
                continue
            # Full before the threads fill a warp: a shorter reduction step makes room.
            shorter = None if lines else self._halved_step(menu, shape)
            if shorter is None:
                self._close_blocked(walk, lines)
                break
            shape = shorter
            path = self.growth.path("shared", shape, menu, self.capacity)
            line = walk.say(Said.SHORTEN, line, shape)
        return lines[-SHARED_TAIL:] or [largest]

    def _close(
        self, walk: Walk, lines: list[int], said: Said, number: int = 0, other: int = 0, score: float = 0.0
    ) -> None:
        """Say under the last tile kept what ended its path."""
        if lines:
            lines[-1] = walk.say(said, lines[-1], walk.shape(lines[-1]), number, other, score)

    def _close_blocked(self, walk: Walk, lines: list[int]) -> None:
        """Say what the most rewarding step would have needed."""
        if self.growth.blocked is None:
            self._close(walk, lines, Said.SATED)
        else:
            _, axis, grown = self.growth.blocked
            self._close(walk, lines, Said.BLOCKED, axis, grown[axis], float(self.model.footprint("shared", grown)))

    def _smallest(self, menu: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], Shape]:
        """The smallest tile worth growing, and the sizes through which it may grow."""
        space = self.space
        shape = tuple([sizes[0] for sizes in menu])
        # Enlarge the reduction step, innermost axis first, until one fill feeds enough points of the inner loop.
        for axis in reversed(range(space.spatial_count, len(shape))):
            for size in menu[axis]:
                if math.prod(shape[space.spatial_count :]) >= SMALLEST_STEP_POINTS:
                    break
                grown = (*shape[:axis], size, *shape[axis + 1 :])
                if self.model.footprint("shared", grown) <= self.capacity:
                    shape = grown
        # Where even the smallest aligned tile does not fit, reduction steps are halved until it does: a wasted
        # transaction is better than no program.
        while self.model.footprint("shared", shape) > self.capacity:
            shorter = self._halved_step(menu, shape)
            if shorter is None:
                break
            shape = shorter
        # No step along an axis that cannot save traffic is ever taken: such axes stay where they are.
        sizes_by_axis = [
            sizes if self.model.can_save(axis, sizes) else (shape[axis],) for axis, sizes in enumerate(menu)
        ]
        return sizes_by_axis, shape

    def _halved_step(self, menu: list[tuple[int, ...]], shape: Shape) -> Shape | None:
        """The shape with its longest reduction step halved, and the menu held to that; None where all are shortest."""
        axes = [a for a in range(self.space.spatial_count, len(shape)) if shape[a] > self.start[a]]
        if not axes:
            return None
        axis = max(axes, key=lambda a: shape[a] // self.start[a])
        size = max(self.start[axis], shape[axis] // 2 // self.start[axis] * self.start[axis])
        menu[axis] = (size,)
        return (*shape[:axis], size, *shape[axis + 1 :])

    def _threads(self, register_shape: Shape, shape: Shape) -> int:
        # Of the longer shape only as many axes count as there are spatial ones.
        tiles = math.prod(map(floordiv, shape, register_shape[: self.space.spatial_count]))
        return tiles * self.lanes_of_tile

    def _fit_device(self, walk: Walk, register_shape: Shape, line: int) -> None:
        """The tile of a line; with a longer reduction step if there is room; and, for a small operator, shrunken tiles
        until every unit has a block."""
        walk.tiles.append(line)
        self._longer_steps(walk, line, 1)
        shape, last_filled = walk.shape(line), line
        blocks = self._blocks(shape)
        while blocks < self.unit_count:
            smaller = self._shrunk(register_shape, shape)
            if smaller is None:
                break
            shape = smaller
            line = walk.say(Said.SHRINK, line, shape, blocks)
            blocks = self._blocks(shape)
            threads = self._threads(register_shape, shape)
            if threads >= self.unit.lanes and self.unit.fills(threads, self.epsilon):
                last_filled = line
                walk.tiles.append(line)
        if self._blocks(walk.shape(last_filled)) <= FEW_WAVES * self.unit_count:
            self._longer_steps(walk, last_filled, LONGEST_DOUBLINGS)

    def _longer_steps(self, walk: Walk, line: int, doublings: int) -> None:
        """The tile of a line with its reduction step doubled, along the axis with the most steps, up to ``doublings``
        times, as long as there is room."""
        space, shape = self.space, walk.shape(line)
        for _ in range(doublings):
            axes = [a for a in range(space.spatial_count, len(shape)) if shape[a] * 2 <= space.sizes[a]]
            axes = [a for a in axes if not self.single[a]]
            if not axes:
                return
            axis = max(axes, key=lambda a: space.sizes[a] // shape[a])
            shape = (*shape[:axis], shape[axis] * 2, *shape[axis + 1 :])
            if self.model.footprint("shared", shape) > self.longer_bytes:
                return
            line = walk.say(Said.LONGER, line, shape)
            walk.tiles.append(line)

    def _blocks(self, shape: Shape) -> int:
        spatial = self.space.spatial_count
        return math.prod([-(-size // tile) for size, tile in zip(self.space.sizes[:spatial], shape, strict=False)])

    def _shrunk(self, register_shape: Shape, shape: Shape) -> Shape | None:
        """Halve the spatial axis whose reuse is worth least: the smallest score of growing it back."""
        traffic, footprint = self.model.traffic(shape), self.model.footprint("shared", shape)
        options = []
        for axis in range(self.space.spatial_count):
            half = shape[axis] // 2
            if half >= register_shape[axis] and half % register_shape[axis] == 0:
                small = (*shape[:axis], half, *shape[axis + 1 :])
                score = data_reuse_score(
                    self.model.traffic(small), traffic, self.model.footprint("shared", small), footprint
                )
                options.append((score, axis, small))
        return min(options)[2] if options else None

    # ---- in C

    def compiled(self, register_shape: Shape, menu: Menu) -> Walk | None:
        """:meth:`walked` by the C file; None where there is none, or numbers are too large for it."""
        library = self.growth.library
        if library is None:
            return None
        lines, scores, tiles = self._room
        registers, sizes = array("q", register_shape), flat_menu(menu)
        arrays = (self.growth.described, *self._bounds, registers, sizes)
        addresses = [each.buffer_info()[0] for each in arrays]
        results = (lines.buffer_info()[0], scores.buffer_info()[0], tiles.buffer_info()[0])
        count = library.shared_tiles(*addresses, MOST_LINES, *results)
        if count < 0:
            return None
        proposed = tiles[:count].tolist()
        # No line that leads to a tile stands behind all tiles.
        needed = max(proposed) + 1
        width = len(register_shape) + 4
        return Walk(list(islice(iter_unpack(f"{width}q", lines), needed)), scores[:needed].tolist(), proposed)

    @cached_property
    def _bounds(self) -> Sequence[array[int] | array[float]]:
        """Bounds of the tiles, as the C file reads them."""
        lanes = self.unit.lanes
        limits = (self.capacity, self.longer_bytes, lanes, self.lanes_of_tile, self.threads_per_block, self.unit_count)
        numbers = (*limits, SMALLEST_STEP_POINTS, SHARED_TAIL, FEW_WAVES, LONGEST_DOUBLINGS)
        work = self.space.points * self.model.operations
        rates = (work, self.model.bandwidth("shared"), self.model.max_compute_perf(), self.epsilon)
        return array("q", numbers), array("d", rates), array("q", self.start), array("q", self.single)

    @cached_property
    def _room(self) -> tuple[array[int], array[float], array[int]]:
        """Room for lines, scores and tiles."""
        line_bytes = 8 * (len(self.start) + 4)
        lines, tiles = array("q", bytes(line_bytes * MOST_LINES)), array("q", bytes(8 * MOST_LINES))
        return lines, array("d", bytes(8 * MOST_LINES)), tiles
