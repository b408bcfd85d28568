"""Scale up, scale out, shrink: tiles grown layer by layer along the best data-reuse score (thesis 6.3.2).

Algorithm 2 prints its capacity test the wrong way round; this follows the prose: enlarge until the next tile would not
fit the layer or loading outruns the arithmetic, then go on at the next layer. Of every path the last tiles are kept,
not the very last one alone: what the greedy step cannot see (occupancy, waves, bank conflicts) decides between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from operator import floordiv
from typing import Any

from roller.construct.alignment import aligned_axis_sizes, default_rules
from roller.construct.growth import Growth, Step
from roller.construct.performance import Costs, MicroModel, Shape, data_reuse_score
from roller.construct.program import Candidate, Reason
from roller.construct.rtile import TileSpace
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MMA_STAGES
from sokoban.kernel.placed import PlacedForm
from sokoban.schedule.tile import Sizes, TileSchedule

Menu = list[tuple[int, ...]]
Explained = tuple[Shape, tuple[Reason, ...]]

#: Largest register tile along one axis of a thread, and of a warp that uses matrix instructions: beyond, unrolled
#: code outgrows the instruction cache without saving traffic.
LARGEST_THREAD_AXIS = 16
LARGEST_WARP_AXIS = 64

#: Largest block tile along a spatial axis, and largest reduction step: a menu has to end somewhere.
LARGEST_BLOCK_AXIS = 1024
LARGEST_STEP = 64

#: Points of the reduction per shared-memory fill below which barriers dominate.
SMALLEST_STEP_POINTS = 8

#: Blocks per unit up to which a launch waits for memory at every step rather than for arithmetic, so that its steps are
#: worth doubling further; and how often.
FEW_WAVES = 2
LONGEST_DOUBLINGS = 5

#: Storage padding of matrix operands: fragment rows may start at any multiple of eight halves, and eight more keep
#: rows apart in the banks.
OPERAND_PADDING = 8

#: Tiles kept of the end of a path: at the register layer of the first and the second path, and at the shared layer. An
#: operator with fewer outputs than the device holds threads may want less data reuse for more parallelism (6.6), so
#: that smaller register tiles are kept too.
REGISTER_TAILS = (3, 1)
SMALL_REGISTER_TAILS = (5, 2)
SHARED_TAIL = 3


class ScaleUp:
    """The construction of one operator on one device for one epsilon, by threads or by matrix instructions."""

    def __init__(
        self,
        space: TileSpace,
        placed: PlacedForm,
        epsilon: float,
        costs: dict[Shape, Costs],
        *,
        matrix: bool = False,
    ) -> None:
        """``costs``: what tiles cost, as far as it is known; see :class:`MicroModel`."""
        device, product = placed.device, placed.product if matrix else None
        roles = None if product is None else product.roles
        self.instruction = Instruction.FMA if product is None else product.instruction
        self.space, self.placed, self.device, self.epsilon, self.roles = space, placed, device, epsilon, roles
        self.limits, self.lanes = device.limits, device.warp_lanes
        fragments = (
            {} if roles is None else {space.axes.index(a): roles.fragment(a) for a in (roles.m, roles.n, roles.k)}
        )
        self.start = tuple(fragments.get(axis, 1) for axis in range(len(space.axes)))
        #: Axes beside a matrix product run one element at a time.
        self.single = tuple(roles is not None and axis not in fragments for axis in range(len(space.axes)))
        self.rules = default_rules(device, epsilon, tuple(fragments.items()))
        rate = device.sustained_flops("float32")
        if roles is not None:
            rates = placed.matrix_rates
            assert rates is not None
            rate = rates.sustained_flops
        self.model = MicroModel(space, device, rate, float(space.form.body_operations), costs)
        staged = tuple(dict.fromkeys(space.input_names))
        is_padded = self.instruction == Instruction.WMMA
        #: What all schedules have in common.
        self._common: dict[str, Any] = {
            "cached": staged,
            "padding": tuple([(name, OPERAND_PADDING) for name in staged]) if is_padded else (),
            "instruction": self.instruction,
        }
        self._stepped = [axis for axis in range(space.spatial_count, len(space.axes)) if not self.single[axis]]
        self._threadings: dict[Shape, tuple[Sizes, Sizes]] = {}
        self._growth = Growth(self.model)
        self._grow = tuple(f"grow {axis}" for axis in space.axes)
        self._menus: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Every register tile kept, under it every shared tile kept, with its variants."""
        menu = [self._sizes("registers", axis, size) for axis, size in enumerate(self.start)]
        if not all(menu):
            return  # no fragment within epsilon of an axis
        seen: set[tuple[Shape, Shape]] = set()
        for register_shape, register_reasons in self._register_tiles(menu):
            for shared_shape, shared_reasons in self._shared_tiles(register_shape):
                for shape, more in self._fit_device(register_shape, shared_shape):
                    if (register_shape, shape) not in seen:
                        seen.add((register_shape, shape))
                        yield from self._candidates(register_shape, shape, (*register_reasons, *shared_reasons, *more))

    def _sizes(self, layer: str, axis: int, base: int) -> tuple[int, ...]:
        """Aligned sizes of an axis at a layer: multiples of ``base``."""
        known = self._menus.get((layer, axis, base))
        if known is None:
            if self.single[axis]:
                known = (1,)
            elif layer == "registers":
                largest = LARGEST_WARP_AXIS if self.roles else LARGEST_THREAD_AXIS
                largest = min(largest, 2 * self.space.sizes[axis]) if axis < self.space.spatial_count else base
                known = aligned_axis_sizes(self.space, self.rules, layer, axis, base, max(base, largest))
            else:
                largest = LARGEST_BLOCK_AXIS if axis < self.space.spatial_count else LARGEST_STEP
                known = aligned_axis_sizes(self.space, self.rules, layer, axis, base, largest)
            self._menus[layer, axis, base] = known
        return known

    # ---- the register layer

    def _register_tiles(self, menu: Menu) -> list[Explained]:
        """Two paths, by the best and by the second best axis at first; the last tiles of each, largest first."""
        kept: dict[Shape, tuple[Reason, ...]] = {}
        outputs = math.prod(self.space.sizes[: self.space.spatial_count])
        small = outputs < self.device.unit_count * self.limits.threads_per_unit
        tails = SMALL_REGISTER_TAILS if small else REGISTER_TAILS
        for turn in (0, 1):
            path = list(self._growth.path("registers", self.start, menu, self._register_capacity, turn))
            shapes = [self.start, *[shape for _, _, shape in path]]
            stop = self._stop("registers", shapes[-1], self._register_capacity)
            reasons = [self._grown("registers", step) for step in path]
            for number in reversed(range(len(shapes))[-tails[turn] :]):
                shape = shapes[number]
                if number == len(path):
                    why = stop
                elif self.model.mem_perf("registers", shape) >= self.model.max_compute_perf():
                    why = Reason("registers", "stop: shared memory can feed the arithmetic units", shape)
                else:
                    why = Reason("registers", "keep too: fewer registers, more resident warps", shape)
                kept.setdefault(shape, (*reasons[:number], why))
        return list(kept.items())

    @cached_property
    def _register_capacity(self) -> int:
        """Elements; the accumulators of a warp's fragments are spread over its lanes."""
        if self.roles is None:
            return self.limits.registers_per_thread_usable
        if self.instruction.is_mma:
            other = self.placed.mma_other_registers
            return (self.limits.registers_per_thread - other) * self.lanes
        return self.limits.registers_per_thread_usable * self.lanes

    def _grown(self, layer: str, step: Step) -> Reason:
        """Why a path takes a step."""
        score, axis, shape = step
        return Reason(layer, self._grow[axis], shape, (("score", score),))

    def _stop(self, layer: str, shape: Shape, capacity: int) -> Reason:
        """Why the last search for a step found none: what the most rewarding one would have needed."""
        if self._growth.blocked is None:
            return Reason(layer, "stop: no axis is left whose growth saves traffic", shape)
        _, axis, grown = self._growth.blocked
        unit = "elements" if layer == "registers" else "bytes"
        numbers = ((unit, float(self.model.footprint(layer, grown))), ("limit", float(capacity)))
        return Reason(layer, f"stop: {self.space.axes[axis]}={grown[axis]} would not fit", shape, numbers)

    # ---- the shared layer

    def _shared_tiles(self, register_shape: Shape) -> list[Explained]:
        """Tiles over a given register tile whose threads fill warps, the last ones of the path."""
        unit = self.rules[0]
        menu, shape = self._shared_menu(register_shape)
        capacity = self.limits.shared_bytes_per_block
        reasons = [Reason("shared", "start from the register tile and one aligned reduction step", shape)]
        kept: list[Explained] = []
        largest = shape, len(reasons)
        saturated = 0
        path = self._growth.path("shared", shape, menu, capacity)
        while saturated < SHARED_TAIL:
            threads = self._threads(register_shape, shape)
            if threads > self.limits.threads_per_block:
                limit = (("threads", float(threads)), ("limit", float(self.limits.threads_per_block)))
                self._close(kept, Reason("shared", "stop: the next step would take too many threads", shape, limit))
                break
            largest = shape, len(reasons)
            if unit.fills(threads, self.epsilon) and threads >= min(2 * self.lanes, self.limits.threads_per_block):
                fed = self.model.mem_perf("shared", shape) >= self.model.max_compute_perf()
                note = "keep: memory can feed the arithmetic units" if fed else "keep: memory sets the pace"
                kept.append((shape, (*reasons, Reason("shared", note, shape, (("threads", threads),)))))
                saturated += fed
            step = next(path, None)
            if step is None and not kept:
                # Full before the threads fill a warp: a shorter reduction step makes room.
                shorter = self._halved_step(menu, shape)
                if shorter is not None:
                    shape = shorter
                    path = self._growth.path("shared", shape, menu, capacity)
                    reasons.append(Reason("shared", "shorten the step: shared memory is full, warps are not", shape))
                    continue
            if step is None:
                self._close(kept, self._stop("shared", shape, capacity))
                break
            shape = step[2]
            reasons.append(self._grown("shared", step))
        return kept[-SHARED_TAIL:] or [(largest[0], tuple(reasons[: largest[1]]))]

    @staticmethod
    def _close(kept: list[Explained], stop: Reason) -> None:
        """Say under the last tile kept what ended its path."""
        if kept:
            shape, reasons = kept[-1]
            kept[-1] = (shape, (*reasons, stop._replace(tile=shape)))

    def _shared_menu(self, register_shape: Shape) -> tuple[Menu, Shape]:
        """The aligned sizes of every axis above a register tile, and the smallest tile made of them."""
        space, menu = self.space, []
        for axis, base in enumerate(register_shape):
            sizes = self._sizes("shared", axis, base)
            if not sizes:
                # Nothing within epsilon: the whole axis in one tile if that is small, or one register tile.
                size = space.sizes[axis]
                sizes = (-(-size // base) * base,) if size <= 64 * base else (base,)
            menu.append(sizes)
        shape = tuple(sizes[0] for sizes in menu)
        # Enlarge the reduction step, innermost axis first, until one fill feeds enough points of the inner loop.
        for axis in reversed(range(space.spatial_count, len(shape))):
            for size in menu[axis]:
                if math.prod(shape[space.spatial_count :]) >= SMALLEST_STEP_POINTS:
                    break
                grown = (*shape[:axis], size, *shape[axis + 1 :])
                if self.model.footprint("shared", grown) <= self.limits.shared_bytes_per_block:
                    shape = grown
        menu, shape = self._shortened(menu, shape)
        # No step along an axis that cannot save traffic is ever taken: such axes stay where they are.
        held = [sizes if self.model.can_save(axis, sizes) else (shape[axis],) for axis, sizes in enumerate(menu)]
        return held, shape

    def _shortened(self, menu: Menu, shape: Shape) -> tuple[Menu, Shape]:
        """Where even the smallest aligned tile does not fit, reduction steps are halved until it does: a wasted
        transaction is better than no program."""
        while self.model.footprint("shared", shape) > self.limits.shared_bytes_per_block:
            shorter = self._halved_step(menu, shape)
            if shorter is None:
                break
            shape = shorter
        return menu, shape

    def _halved_step(self, menu: Menu, shape: Shape) -> Shape | None:
        """The shape with its longest reduction step halved, and the menu held to that; None where all are shortest."""
        axes = [a for a in range(self.space.spatial_count, len(shape)) if shape[a] > self.start[a]]
        if not axes:
            return None
        axis = max(axes, key=lambda a: shape[a] // self.start[a])
        size = max(self.start[axis], shape[axis] // 2 // self.start[axis] * self.start[axis])
        menu[axis] = (size,)
        return (*shape[:axis], size, *shape[axis + 1 :])

    def _threads(self, register_shape: Shape, shared_shape: Shape) -> int:
        # Of the longer shape only as many axes count as there are spatial ones.
        tiles = math.prod(map(floordiv, shared_shape, register_shape[: self.space.spatial_count]))
        return tiles * self.lanes if self.roles else tiles

    # ---- scale out

    def _fit_device(self, register_shape: Shape, shape: Shape) -> Iterator[Explained]:
        """The tile itself; with a longer reduction step if there is room; and, for a small operator, shrunken tiles
        until every unit has a block (6.3.2)."""
        yield shape, ()
        yield from self._longer_steps(shape, (), 1)
        reasons: list[Reason] = []
        blocks = self._blocks(shape)
        kept: Explained = shape, ()
        while blocks < self.device.unit_count:
            smaller = self._shrink(register_shape, shape)
            if smaller is None:
                break
            shape = smaller
            numbers = (("blocks", float(blocks)), ("units", float(self.device.unit_count)))
            reasons.append(Reason("scale out", "shrink: fewer blocks than units", shape, numbers))
            blocks = self._blocks(shape)
            threads = self._threads(register_shape, shape)
            if threads >= self.lanes and self.rules[0].fills(threads, self.epsilon):
                kept = shape, tuple(reasons)
                yield kept
        if self._blocks(kept[0]) <= FEW_WAVES * self.device.unit_count:
            yield from self._longer_steps(*kept, LONGEST_DOUBLINGS)

    def _longer_steps(self, shape: Shape, reasons: tuple[Reason, ...], doublings: int) -> Iterator[Explained]:
        """The tile with its reduction step doubled, up to ``doublings`` times, as long as there is room."""
        for _ in range(doublings):
            longer = self._longer_step(shape)
            if longer == shape:
                return
            shape = longer
            why = Reason("shared", "variant: a longer reduction step halves the barriers", shape)
            reasons = (*reasons, why)
            yield shape, reasons

    def _blocks(self, shape: Shape) -> int:
        spatial = self.space.spatial_count
        return math.prod([-(-size // tile) for size, tile in zip(self.space.sizes[:spatial], shape, strict=False)])

    def _longer_step(self, shape: Shape) -> Shape:
        """Twice the step along the reduction axis with the most steps, if half of a unit's shared memory holds it."""
        space = self.space
        axes = [axis for axis in self._stepped if shape[axis] * 2 <= space.sizes[axis]]
        if not axes:
            return shape
        axis = max(axes, key=lambda a: space.sizes[a] // shape[a])
        grown = (*shape[:axis], shape[axis] * 2, *shape[axis + 1 :])
        return grown if self.model.footprint("shared", grown) <= self._longer_step_bytes else shape

    @cached_property
    def _longer_step_bytes(self) -> int:
        """Bytes that longer steps may take: two blocks of a unit have room for them."""
        return min(self.limits.shared_bytes_per_unit // 2, self.limits.shared_bytes_per_block)

    def _shrink(self, register_shape: Shape, shape: Shape) -> Shape | None:
        """Halve the spatial axis whose reuse is worth least: the smallest score of growing it back."""
        traffic, held = self.model.traffic(shape), self.model.footprint("shared", shape)
        options = []
        for axis in range(self.space.spatial_count):
            half = shape[axis] // 2
            if half >= register_shape[axis] and half % register_shape[axis] == 0:
                small = (*shape[:axis], half, *shape[axis + 1 :])
                score = data_reuse_score(
                    self.model.traffic(small), traffic, self.model.footprint("shared", small), held
                )
                options.append((score, axis, small))
        return min(options)[2] if options else None

    def _candidates(
        self, register_shape: Shape, shared_shape: Shape, reasons: tuple[Reason, ...]
    ) -> Iterator[Candidate]:
        """The tiles as a schedule; with ``mma.sync`` as one for every number of pipeline stages."""
        candidate = self._candidate(register_shape, shared_shape, reasons)
        if not self.instruction.is_mma:
            yield candidate
            return
        for stages in MMA_STAGES:
            why = Reason("shared", f"variant: {stages} buffers, so that copies run ahead", shared_shape)
            schedule = candidate.schedule.with_(stages=stages)
            yield candidate._replace(schedule=schedule, reasons=(*reasons, why))

    def _candidate(self, register_shape: Shape, shared_shape: Shape, reasons: tuple[Reason, ...]) -> Candidate:
        space = self.space
        thread, virtual = self._threading(register_shape)
        pairs = tuple(zip(space.axes, shared_shape, strict=True))
        schedule = TileSchedule.quickly(
            block=pairs[: space.spatial_count],
            thread=thread,
            vthreads=virtual,
            step=pairs[space.spatial_count :],
            **self._common,
        )
        return Candidate(
            schedule,
            "scale up" if self.roles is None else "scale up, Tensor Core",
            self.epsilon,
            reasons,
            (register_shape, shared_shape),
        )

    def _threading(self, register_shape: Shape) -> tuple[Sizes, Sizes]:
        """A register tile as adjacent elements per thread and strided copies of them.

        Four adjacent elements make a 16-byte access; further ones are strided, so that lanes stay adjacent on the last
        axis and rows that lanes read together lie few enough apart to fall into different banks.
        """
        known = self._threadings.get(register_shape)
        if known is None:
            inner = [4 if size % 4 == 0 and self.roles is None else size for size in register_shape]
            axes = self.space.axes[: self.space.spatial_count]
            thread = tuple(zip(axes, inner, strict=False))
            virtual = tuple(
                (axis, size // adjacent) for axis, size, adjacent in zip(axes, register_shape, inner, strict=False)
            )
            known = self._threadings[register_shape] = (thread, virtual)
        return known
