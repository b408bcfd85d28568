"""Scale up, scale out, shrink: tiles grown layer by layer along the best data-reuse score (thesis 6.3.2).

Algorithm 2 prints its capacity test the wrong way round; this follows the prose: enlarge until the next tile would not
fit the layer or loading outruns the arithmetic, then go on at the next layer. Of every path the last tiles are kept,
not the very last one alone: what the greedy step cannot see (occupancy, waves, bank conflicts) decides between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from roller.construct.alignment import aligned_axis_sizes, default_rules
from roller.construct.growth import Growth, Menu
from roller.construct.performance import Costs, MicroModel, Shape
from roller.construct.program import Candidate, Reason
from roller.construct.rtile import TileSpace
from roller.construct.shared_layer import Explained, SharedLayer
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MMA_STAGES
from sokoban.kernel.placed import PlacedForm
from sokoban.schedule.tile import Sizes, TileSchedule

#: Largest register tile along one axis of a thread, and of a warp that uses matrix instructions: beyond, unrolled
#: code outgrows the instruction cache without saving traffic.
LARGEST_THREAD_AXIS = 16
LARGEST_WARP_AXIS = 64

#: Largest block tile along a spatial axis, and largest reduction step: a menu has to end somewhere.
LARGEST_BLOCK_AXIS = 1024
LARGEST_STEP = 64

#: Storage padding of matrix operands: fragment rows may start at any multiple of eight halves, and eight more keep
#: rows apart in the banks.
OPERAND_PADDING = 8

#: Tiles kept of the end of a path at the register layer, of the first and the second one. An operator with fewer
#: outputs than the device holds threads may want less data reuse for more parallelism (6.6), so that smaller register
#: tiles are kept too.
REGISTER_TAILS = (3, 1)
SMALL_REGISTER_TAILS = (5, 2)


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
        #: Axes that are no part of a matrix product run one element at a time.
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
        self._growth = Growth(self.model)
        self._shared = SharedLayer(
            self.model, self._growth, self.rules[0], epsilon,
            start=self.start, single=self.single, lanes_of_tile=1 if roles is None else self.lanes,
        )  # fmt: skip
        self._grow = tuple(f"grow {axis}" for axis in space.axes)
        self._menus: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Every register tile kept, under it every shared tile kept, with its variants."""
        menu = [self._sizes("registers", axis, size) for axis, size in enumerate(self.start)]
        if not all(menu):
            return  # no fragment within epsilon of an axis
        for register_shape, register_reasons in self._register_tiles(menu):
            threading, seen = self._threading(register_shape), set[Shape]()
            for shape, reasons in self._shared.tiles(register_shape, self._shared_menu(register_shape)):
                if shape not in seen:
                    seen.add(shape)
                    reasons = (*register_reasons, *reasons)
                    yield from self._candidates(register_shape, threading, shape, reasons)

    def _sizes(self, layer: str, axis: int, base: int) -> tuple[int, ...]:
        """Aligned sizes of an axis at a layer: multiples of ``base``."""
        menu = self._menus.get((layer, axis, base))
        if menu is None:
            if self.single[axis]:
                menu = (1,)
            elif layer == "registers":
                largest = LARGEST_WARP_AXIS if self.roles else LARGEST_THREAD_AXIS
                largest = min(largest, 2 * self.space.sizes[axis]) if axis < self.space.spatial_count else base
                menu = aligned_axis_sizes(self.space, self.rules, layer, axis, base, max(base, largest))
            else:
                largest = LARGEST_BLOCK_AXIS if axis < self.space.spatial_count else LARGEST_STEP
                menu = aligned_axis_sizes(self.space, self.rules, layer, axis, base, largest)
            self._menus[layer, axis, base] = menu
        return menu

    # ---- the register layer

    def _register_tiles(self, menu: Menu) -> list[Explained]:
        """Two paths, by the best and by the second best axis at first; the last tiles of each, largest first."""
        reasons_by_shape: dict[Shape, tuple[Reason, ...]] = {}
        outputs = math.prod(self.space.sizes[: self.space.spatial_count])
        small = outputs < self.device.unit_count * self.limits.threads_per_unit
        tails = SMALL_REGISTER_TAILS if small else REGISTER_TAILS
        for turn in (0, 1):
            path = list(self._growth.path("registers", self.start, menu, self._register_capacity, turn))
            shapes = [self.start, *[shape for _, _, shape in path]]
            stop = self._stop(shapes[-1])
            reasons = [Reason("registers", self._grow[axis], shape, (("score", score),)) for score, axis, shape in path]
            for number in reversed(range(len(shapes))[-tails[turn] :]):
                shape = shapes[number]
                if number == len(path):
                    why = stop
                elif self.model.mem_perf("registers", shape) >= self.model.max_compute_perf():
                    why = Reason("registers", "stop: shared memory can feed the arithmetic units", shape)
                else:
                    why = Reason("registers", "keep too: fewer registers, more resident warps", shape)
                reasons_by_shape.setdefault(shape, (*reasons[:number], why))
        return list(reasons_by_shape.items())

    @cached_property
    def _register_capacity(self) -> int:
        """Elements; the accumulators of a warp's fragments are spread over its lanes."""
        if self.roles is None:
            return self.limits.registers_per_thread_usable
        if self.instruction.is_mma:
            other = self.placed.mma_other_registers
            return (self.limits.registers_per_thread - other) * self.lanes // self.placed.form.sum_sets
        return self.limits.registers_per_thread_usable * self.lanes

    def _stop(self, shape: Shape) -> Reason:
        """Why a path has ended: what the most rewarding step would have needed."""
        if self._growth.blocked is None:
            return Reason("registers", "stop: no axis is left whose growth saves traffic", shape)
        _, axis, grown = self._growth.blocked
        elements, limit = float(self.model.footprint("registers", grown)), float(self._register_capacity)
        action = f"stop: {self.space.axes[axis]}={grown[axis]} would not fit"
        return Reason("registers", action, shape, (("elements", elements), ("limit", limit)))

    # ---- the shared layer

    def _shared_menu(self, register_shape: Shape) -> Menu:
        """The aligned sizes of every axis above a register tile."""
        menu = []
        for axis, base in enumerate(register_shape):
            sizes = self._sizes("shared", axis, base)
            if not sizes:
                # Nothing within epsilon: the whole axis in one tile if that is small, or one register tile.
                size = self.space.sizes[axis]
                sizes = (-(-size // base) * base,) if size <= 64 * base else (base,)
            menu.append(sizes)
        return menu

    # ---- candidates

    def _candidates(
        self, register_shape: Shape, threading: tuple[Sizes, Sizes], shape: Shape, reasons: tuple[Reason, ...]
    ) -> Sequence[Candidate]:
        """The tiles as a schedule; with ``mma.sync`` as one for every number of pipeline stages."""
        pairs, spatial = tuple(zip(self.space.axes, shape, strict=True)), self.space.spatial_count
        thread, virtual = threading
        schedule = TileSchedule.quickly(
            block=pairs[:spatial], thread=thread, vthreads=virtual, step=pairs[spatial:], **self._common
        )
        policy = "scale up" if self.roles is None else "scale up, Tensor Core"
        candidate = Candidate(schedule, policy, self.epsilon, reasons, (register_shape, shape))
        if not self.instruction.is_mma:
            return (candidate,)
        candidates = []
        for stages in MMA_STAGES:
            why = Reason("shared", f"variant: {stages} buffers, so that copies run ahead", shape)
            candidates.append(
                candidate._replace(schedule=schedule.with_(stages=stages), reasons=(*reasons, why)),
            )
        return candidates

    def _threading(self, register_shape: Shape) -> tuple[Sizes, Sizes]:
        """A register tile as adjacent elements per thread and strided copies of them.

        Four adjacent elements make a 16-byte access; further ones are strided, so that lanes stay adjacent on the last
        axis and rows that lanes read together lie few enough apart to fall into different banks.
        """
        axes = self.space.axes[: self.space.spatial_count]
        inner = [4 if size % 4 == 0 and self.roles is None else size for size in register_shape]
        copies = [size // adjacent for size, adjacent in zip(register_shape, inner, strict=True)]
        return tuple(zip(axes, inner, strict=False)), tuple(zip(axes, copies, strict=False))
