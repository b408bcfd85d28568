"""Roller's construction: grow aligned tiles layer by layer, then spread them over the device (thesis 6.3.2).

Scale up: starting from the smallest aligned tile, enlarge the axis with the best data-reuse score until the layer
below can feed the arithmetic units or the layer is full, then do the same one layer down. (Algorithm 2 prints its
capacity test the wrong way round; the prose is right and this follows the prose.) Scale out: blocks are tiles of the
output, a reduction stays inside one block. Shrink: an operator with fewer tiles than the device has units gives up
reuse for parallelism, along the axis whose reuse is worth least.

Every tile on the way that could be a program is kept as a candidate, not the last one alone: what the greedy step
cannot see (occupancy, waves, bank conflicts) decides between them, by RATIONAL's estimate of all candidates at once.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from hal import DeviceSpec, InputError
from roller.alignment import AlignmentRule, BankRule, ExecutionUnitRule, aligned_axis_sizes, default_rules
from roller.performance import MicroModel
from roller.reuse import data_reuse_score
from roller.rtile import RTile, TileSpace
from sokoban import Estimate, KernelForm, ScheduleTable, TileSchedule, data_dimension, estimate
from sokoban.banks import wavefronts
from sokoban.table import Ints
from sokoban.matrix import MatrixRoles, matrix_roles

#: Waste that tensor padding may cause, raised until there are enough programs (6.3.2, "irregular tensor shapes").
EPSILON_STEPS = (0.1, 0.25, 0.4, 1.0, 4.0, 64.0)

#: Largest register tile along one axis, and the most elements of it: beyond, unrolled code outgrows the instruction
#: cache without saving shared-memory traffic.
LARGEST_REGISTER_AXIS = 16

#: Points of the reduction per shared-memory fill below which barriers dominate.
SMALLEST_STEP_POINTS = 8


@dataclass(frozen=True)
class Reason:
    """One step of the construction: what was done at which layer, and why. ``numbers`` back the sentence."""

    layer: str
    action: str
    tile: str | tuple[int, ...]
    numbers: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class RProgram:
    """One constructed program: a schedule, the tiles it came from, what it is expected to take, and why it is so."""

    schedule: TileSchedule
    estimate: Estimate
    register_tile: RTile | None
    shared_tile: RTile | None
    policy: str
    epsilon: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Construction:
    """The ranked programs of one operator on one device.

    Attributes:
        programs: best first by predicted time, all different.
        considered: how many candidates were scored.
        epsilon: the largest tensor padding that had to be allowed.
        seconds: time the construction took.
    """

    form: KernelForm
    device: DeviceSpec
    programs: tuple[RProgram, ...]
    considered: int
    epsilon: float
    seconds: float


@dataclass
class _Candidate:
    schedule: TileSchedule
    register_tile: RTile | None
    shared_tile: RTile | None
    policy: str
    epsilon: float
    reasons: tuple[Reason, ...]


def construct(form: KernelForm, device: DeviceSpec, top_k: int = 10) -> Construction:
    """Construct the ``top_k`` best programs of an operator.

    Raises:
        InputError: the device has no layer that holds even the smallest tile.
    """
    start = time.perf_counter()
    candidates: dict[TileSchedule, _Candidate] = {}
    epsilon = EPSILON_STEPS[0]
    for epsilon in EPSILON_STEPS:
        for candidate in _Policies(form, device, epsilon).candidates():
            candidates.setdefault(candidate.schedule, candidate)
        if len(candidates) >= top_k:
            break
    programs = _rank(form, device, list(candidates.values()), top_k)
    if not programs:
        raise InputError(form.expr.name, f"no tile fits the memory of {device.name}", "use a smaller operator")
    return Construction(form, device, programs, len(candidates), epsilon, time.perf_counter() - start)


def _rank(form: KernelForm, device: DeviceSpec, candidates: list[_Candidate], top_k: int) -> tuple[RProgram, ...]:
    """Best first by predicted time; equal times keep the order in which construction proposed them."""
    if not candidates:
        return ()
    schedules = [candidate.schedule for candidate in candidates]
    unpadded = ScheduleTable.of(form, schedules)
    padding = _bank_padding(unpadded, device)
    table = estimate(replace(unpadded, padding=padding), device)
    programs = []
    for position in np.argsort(table.seconds, kind="stable")[:top_k].tolist():
        if not math.isfinite(table.seconds[position]):
            break
        candidate, schedule = candidates[position], schedules[position]
        pads = tuple((name, int(column[position])) for name, column in padding.items() if column[position])
        programs.append(
            RProgram(
                replace(schedule, padding=pads) if pads else schedule,
                table.row(position),
                candidate.register_tile,
                candidate.shared_tile,
                candidate.policy,
                candidate.epsilon,
                candidate.reasons,
            )
        )
    return tuple(programs)


def _bank_padding(table: ScheduleTable, device: DeviceSpec) -> dict[str, Ints]:
    """Storage padding in elements for every staged tile, by tensor: none where no read conflicts, else one vector,
    else an odd row, else the printed formula.

    The formula of 6.3.1 always pads to a fixed residue, up to doubling narrow rows; where the addresses of a warp
    show no conflict without it, or with the smallest padding that keeps vector accesses aligned, that is better.
    """
    rule = BankRule(device.shared.bank_count or 32, device.shared.bank_width_bytes or 4)
    form, count = table.form, table.count
    padding = dict(table.padding)
    # Four rows per schedule: no padding, a vector's worth, an odd row, the formula's.
    options = table.repeated(4)
    for load in form.body_loads:
        wanted = table.cached[load.tensor] & ~table.warp_tile
        if not load.indices or not wanted.any():
            continue
        element_bytes = form.expr.tensor_by_name[load.tensor].element_bytes
        innermost = data_dimension(load.indices[-1])
        zeros = np.zeros(count, dtype=np.int64)
        rows = innermost.extent(table.block_tile) + zeros
        reads = innermost.extent({**table.register_tile, **dict.fromkeys(table.step, 1)}) + zeros
        vector = np.full(count, max(1, 16 // element_bytes), dtype=np.int64)
        odd = 1 - rows % 2
        formula = [rule.padding(n, r, element_bytes) for n, r in zip(rows.tolist(), reads.tolist(), strict=True)]
        pads = np.stack([zeros, vector, odd, np.array(formula, dtype=np.int64)])
        padded = replace(options, padding={**options.padding, load.tensor: pads.ravel()})
        passes = wavefronts(padded, load, device, np.ones(4 * count, dtype=np.int64)).reshape(4, count)
        chosen = pads[passes.argmin(axis=0), np.arange(count)]
        padding[load.tensor] = np.where(wanted, chosen, padding[load.tensor])
    return padding


@dataclass
class _Policies:
    """Proposes candidates for one operator, one device and one epsilon."""

    form: KernelForm
    device: DeviceSpec
    epsilon: float
    _menus: dict[object, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = TileSpace.of(self.form)
        self.limits = self.device.limits
        self.lanes = self.device.warp_lanes
        self.staged = tuple(dict.fromkeys(self.space.input_names))
        self.widest = tuple((name, _widest(self.form, name)) for name in self.staged)

    def candidates(self) -> Iterator[_Candidate]:
        form = self.form
        if form.kind == "rows":
            yield from self.rows()
            return
        if form.reduction is None:
            yield from self.pointwise()
            return
        if self.has_reuse():
            roles = matrix_roles(form) if self.device.matrix_instruction(self.input_dtype) else None
            if roles is not None:
                yield from self.scale_up(roles)
            yield from self.scale_up(None)
        else:
            yield from self.staged_reduction()
        if math.prod(self.space.sizes[self.space.spatial_count :]) <= 128 or not self.has_reuse():
            yield from self.direct()
        outputs = math.prod(self.space.sizes[: self.space.spatial_count])
        if not self.has_reuse() or outputs < self.device.unit_count * self.limits.threads_per_unit:
            yield from self.rows()

    @property
    def input_dtype(self) -> str:
        return self.form.expr.tensor_by_name[self.form.body_loads[0].tensor].dtype

    def has_reuse(self) -> bool:
        """Some operand is read for several outputs: it lacks a spatial axis, or its windows overlap."""
        spatial = [i for i in range(self.space.spatial_count) if self.space.sizes[i] > 1]
        for access in self.space.inputs:
            dimensions = access.dimensions
            used = {axis for terms in dimensions for axis, _ in terms}
            if any(axis not in used for axis in spatial):
                return True
            for terms in dimensions:
                if len([axis for axis, _ in terms if self.space.sizes[axis] > 1]) > 1:
                    return True
        return False

    # ---- scale up

    def scale_up(self, roles: MatrixRoles | None) -> Iterator[_Candidate]:
        """Registers first, shared memory next; every feasible tile of the last stretch of a path is a candidate."""
        space = self.space
        multiples: tuple[tuple[int, int], ...] = ()
        if roles is not None:
            multiples = tuple((space.axes.index(axis), 16) for axis in (roles.m, roles.n, roles.k))
        rules = default_rules(self.device, self.epsilon, multiples)
        operations = self.form.body_operations
        rate = self.device.sustained_flops("float32")
        if roles is not None:
            instruction = self.device.matrix_instruction(self.input_dtype)
            assert instruction is not None
            rate = instruction.sustained_flops
        self.model = MicroModel(space, self.device, rate, float(operations))
        start = tuple(dict(multiples).get(i, 1) for i in range(len(space.axes)))
        if roles is not None and not all(
            self._sizes(rules, "registers", axis, multiple, 1 << 30) for axis, multiple in multiples
        ):
            return
        self.single = tuple(
            axis not in dict(multiples) for axis in range(len(space.axes))
        ) if roles is not None else (False,) * len(space.axes)
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for register_shape, register_reasons in self._register_tiles(start, rules, roles is not None):
            for shared_shape, shared_reasons in self._shared_tiles(register_shape, rules, roles is not None):
                for shape, more in self._fit_device(register_shape, shared_shape, rules):
                    if (register_shape, shape) in seen:
                        continue
                    seen.add((register_shape, shape))
                    yield self._tiled(register_shape, shape, roles, (*register_reasons, *shared_reasons, *more))

    def _sizes(self, rules: tuple[AlignmentRule, ...], layer: str, axis: int, base: int, largest: int) -> tuple[int, ...]:
        key = (layer, axis, base, rules[0])
        known = self._menus.get(key)
        if known is None:
            known = self._menus[key] = aligned_axis_sizes(self.space, rules, layer, axis, base, largest)
        return known

    def _register_tiles(
        self, start: tuple[int, ...], rules: tuple[AlignmentRule, ...], matrix: bool
    ) -> list[tuple[tuple[int, ...], tuple[Reason, ...]]]:
        """The register layer: a path per first and second best axis, the last tiles of each kept, largest first."""
        space = self.space
        # A warp's accumulators are spread over its lanes; so are the fragments of a matrix instruction.
        capacity = self.limits.registers_per_thread_usable * (self.lanes if matrix else 1)
        largest = 64 if matrix else LARGEST_REGISTER_AXIS
        menu = [
            self._sizes(rules, "registers", axis, start[axis], min(largest, 2 * space.sizes[axis]))
            if axis < space.spatial_count and not self.single[axis]
            else (start[axis],)
            for axis in range(len(space.axes))
        ]
        found: dict[tuple[int, ...], tuple[Reason, ...]] = {}
        for choice in (0, 1):
            shape, reasons = start, []
            path = [(shape, ())]
            turn = choice
            while True:
                step = self._best_step("registers", shape, menu, capacity, turn)
                if step is None:
                    reasons.append(Reason("registers", "full: the next step would not fit", shape,
                                          (("elements", self.model.footprint("registers", shape)), ("limit", capacity))))
                    break
                axis, shape, score = step
                reasons.append(Reason("registers", f"grow {space.axes[axis]}", shape, (("score", score),)))
                path.append((shape, tuple(reasons)))
                turn = 0 if len(path) > 3 else choice
            # The walk's last tiles: the greedy step cannot see what occupancy makes of the difference.
            tail = path[choice - 3 :] if len(path) > 3 else path
            for tile, why in reversed(tail):
                fed = self.model.mem_perf("registers", tile) >= self.model.max_compute_perf()
                note = "shared memory can feed the arithmetic units" if fed else "shared memory sets the pace"
                found.setdefault(tile, (*why, Reason("registers", f"keep: {note}", tile)))
        return list(found.items())

    def _best_step(
        self, layer: str, shape: tuple[int, ...], menu: list[tuple[int, ...]], capacity: int, rank: int
    ) -> tuple[int, tuple[int, ...], float] | None:
        """GetNextRTileShape: the step with the best (or ``rank``-th best) data-reuse score that fits ``capacity``.

        Equal scores go to the innermost axis: it is the one that memory is contiguous along.
        """
        held = 0 if layer == "registers" else 1
        costs = self.model.costs
        now = costs(shape)
        footprint, traffic = now[held], now[2]
        steps = []
        for axis, sizes in enumerate(menu):
            here = shape[axis]
            if sizes[-1] <= here:
                continue
            size = sizes[bisect_right(sizes, here)]
            grown = (*shape[:axis], size, *shape[axis + 1 :])
            then = costs(grown)
            if then[held] > capacity:
                continue
            score = data_reuse_score(traffic, then[2], footprint, then[held])
            if score > 0:
                steps.append((score, axis, grown))
        if not steps:
            return None
        if rank:
            steps.sort(reverse=True)
            score, axis, grown = steps[min(rank, len(steps) - 1)]
        else:
            score, axis, grown = max(steps)
        return axis, grown, score

    def _shared_tiles(
        self, register_shape: tuple[int, ...], rules: tuple[AlignmentRule, ...], matrix: bool
    ) -> list[tuple[tuple[int, ...], tuple[Reason, ...]]]:
        """The shared layer over a given register tile: tiles whose threads fill warps, from small to large."""
        space = self.space
        unit = rules[0]
        assert isinstance(unit, ExecutionUnitRule)
        per_warp = self.lanes if matrix else 1
        capacity = self.limits.shared_bytes_per_block
        menu, shape = [], list(register_shape)
        for axis, size in enumerate(space.sizes):
            base = register_shape[axis]
            if self.single[axis]:
                menu.append((1,))
                shape[axis] = 1
                continue
            sizes = self._sizes(rules, "shared", axis, base, 1024 if axis < space.spatial_count else 64)
            if not sizes:
                # No aligned size within epsilon: the smallest tile that covers the axis, or one register tile.
                sizes = (-(-size // base) * base,) if size <= 64 * base else (base,)
            menu.append(sizes)
            shape[axis] = sizes[0]
        shape_now = self._fill_step(tuple(shape), menu, capacity)
        reasons = [Reason("shared", "start from the register tile, one aligned reduction step", shape_now)]
        found: list[tuple[tuple[int, ...], tuple[Reason, ...]]] = []
        saturated = 0
        for _ in range(24):
            threads = self._threads(register_shape, shape_now) * per_warp
            if threads > self.limits.threads_per_block:
                reasons.append(Reason("shared", "stop: more threads than a block may have", shape_now,
                                      (("threads", threads), ("limit", self.limits.threads_per_block))))
                break
            if unit.fills(threads, self.epsilon) and threads >= 2 * self.lanes:
                fed = self.model.mem_perf("shared", shape_now) >= self.model.max_compute_perf()
                found.append((shape_now, (*reasons, Reason(
                    "shared", "keep: memory can feed the arithmetic units" if fed else "keep: memory sets the pace",
                    shape_now, (("threads", threads),)))))
                saturated += fed
                if saturated >= 3:
                    break
            step = self._best_step("shared", shape_now, menu, capacity, 0)
            if step is None:
                reasons.append(Reason("shared", "full: the next step would not fit or reuses nothing",
                                      shape_now, (("bytes", self.model.footprint("shared", shape_now)),
                                                                ("limit", capacity))))
                break
            axis, shape_now, score = step
            reasons.append(Reason("shared", f"grow {space.axes[axis]}", shape_now, (("score", score),)))
        if not found:
            found.append((shape_now, tuple(reasons)))
        return found[-3:]

    def _fill_step(self, shape: tuple[int, ...], menu: list[tuple[int, ...]], capacity: int) -> tuple[int, ...]:
        """Enlarge the reduction step, innermost axis first, until a fill feeds enough points of the inner loop."""
        space = self.space
        for axis in reversed(range(space.spatial_count, len(shape))):
            for size in menu[axis]:
                if math.prod(shape[space.spatial_count :]) >= SMALLEST_STEP_POINTS:
                    break
                grown = (*shape[:axis], size, *shape[axis + 1 :])
                if size > shape[axis] and self.model.footprint("shared", grown) <= capacity:
                    shape = grown
        return shape

    def _threads(self, register_shape: tuple[int, ...], shared_shape: tuple[int, ...]) -> int:
        threads = 1
        for axis in range(self.space.spatial_count):
            threads *= shared_shape[axis] // register_shape[axis]
        return threads

    def _fit_device(
        self, register_shape: tuple[int, ...], shape: tuple[int, ...], rules: tuple[AlignmentRule, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[Reason, ...]]]:
        """The tile itself; a deeper reduction step if there is room; and, for a small operator, shrunken tiles
        until every unit has a block (6.3.2)."""
        space = self.space
        yield shape, ()
        deeper = self._deeper(shape)
        if deeper != shape:
            yield deeper, (Reason("shared", "variant: a longer reduction step halves the barriers", deeper),)
        blocks = self._blocks(shape)
        reasons: list[Reason] = []
        while blocks < self.device.unit_count:
            smaller = self._shrink(register_shape, shape)
            if smaller is None:
                break
            shape = smaller
            reasons.append(Reason("scale out", "shrink: fewer blocks than units", shape,
                                  (("blocks", blocks), ("units", self.device.unit_count))))
            blocks = self._blocks(shape)
            if self._threads(register_shape, shape) >= self.lanes:
                yield shape, tuple(reasons)

    def _blocks(self, shape: tuple[int, ...]) -> int:
        return math.prod(-(-self.space.sizes[a] // shape[a]) for a in range(self.space.spatial_count))

    def _deeper(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Twice the step along the reduction axis that is longest in steps, if half of shared memory holds it."""
        space = self.space
        axes = [a for a in range(space.spatial_count, len(shape)) if shape[a] * 2 <= space.sizes[a]]
        if not axes:
            return shape
        axis = max(axes, key=lambda a: space.sizes[a] // shape[a])
        grown = (*shape[:axis], shape[axis] * 2, *shape[axis + 1 :])
        return grown if self.model.footprint("shared", grown) <= self.limits.shared_bytes_per_unit // 2 else shape

    def _shrink(self, register_shape: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Halve the spatial axis whose reuse is worth least: the smallest score of growing back."""
        options = []
        for axis in range(self.space.spatial_count):
            half = shape[axis] // 2
            if half >= register_shape[axis] and half % register_shape[axis] == 0:
                small = (*shape[:axis], half, *shape[axis + 1 :])
                score = data_reuse_score(
                    self.model.traffic(small), self.model.traffic(shape),
                    self.model.footprint("shared", small), self.model.footprint("shared", shape),
                )
                options.append((score, axis, small))
        return min(options)[2] if options else None

    def _tiled(
        self,
        register_shape: tuple[int, ...],
        shared_shape: tuple[int, ...],
        roles: MatrixRoles | None,
        reasons: tuple[Reason, ...],
    ) -> _Candidate:
        space = self.space
        spatial = range(space.spatial_count)
        thread, virtual = [], []
        for axis in spatial:
            size = register_shape[axis]
            # Four adjacent elements make a 16-byte access; further ones are strided, so that lanes stay adjacent on
            # the last axis and rows that lanes read together lie few enough apart to fall into different banks.
            inner = 4 if size % 4 == 0 and roles is None else size
            thread.append((space.axes[axis], inner))
            virtual.append((space.axes[axis], size // inner))
        schedule = TileSchedule(
            block=tuple((space.axes[a], shared_shape[a]) for a in spatial),
            thread=tuple(thread),
            vthreads=tuple(virtual),
            step=tuple((space.axes[a], shared_shape[a]) for a in range(space.spatial_count, len(shared_shape))),
            cached=self.staged,
            vector=self.widest,
            # Rows of a fragment may start at any multiple of eight halves; eight more keep rows apart in the banks.
            padding=tuple((name, 8) for name in self.staged) if roles is not None else (),
            instruction="wmma_16x16x16" if roles is not None else "fma",
        )
        policy = "scale up, Tensor Core" if roles is not None else "scale up"
        return _Candidate(
            schedule, RTile(space, register_shape), RTile(space, shared_shape), policy, self.epsilon, reasons
        )

    # ---- operators without reuse between outputs

    def pointwise(self) -> Iterator[_Candidate]:
        """Element-wise operators: constant reuse score, so tiles for the top layer alone, loaded from the bottom layer
        (6.3.2); a transposed operand is staged through shared memory in square tiles."""
        widest = _widest(self.form, self.form.expr.output.name)
        for coarsen in (widest, 2 * widest, 4 * widest, 1):
            for threads in (256, 128, 512, 64, 1024):
                yield from self._flat("element-wise", coarsen, threads, min(coarsen, widest))
        if self._transposed():
            for edge, rows in ((32, 8), (64, 8), (32, 16), (16, 16), (64, 16)):
                candidate = self._transposing(edge, rows)
                if candidate is not None:
                    yield candidate

    def _transposed(self) -> list[str]:
        """Tensors whose innermost dimension is not the output's last axis."""
        last = self.form.final.axes[-1]
        return [
            load.tensor
            for load in self.form.body_loads
            if load.indices and not load.indices[-1].coefficient(last) and any(i.coefficient(last) for i in load.indices)
        ]

    def _transposing(self, edge: int, rows: int) -> _Candidate | None:
        names = self._transposed()
        load = next(load for load in self.form.body_loads if load.tensor == names[0])
        last = self.form.final.axes[-1]
        other = next((axis for axis in load.indices[-1].axes if axis in self.form.final.axes), None)
        if other is None or edge * edge * 4 > self.limits.shared_bytes_per_block:
            return None
        block = {axis: 1 for axis in self.form.final.axes} | {last: edge, other: edge}
        thread = {axis: 1 for axis in block} | {other: edge // rows}
        reason = Reason("shared", f"stage {', '.join(names)}: read along {other}, written along {last}", f"{edge}x{edge}")
        schedule = TileSchedule(
            block=tuple(block.items()), thread=tuple(thread.items()), cached=tuple(names), padding=((names[0], 1),)
        )
        return _Candidate(schedule, None, None, "transpose through shared memory", self.epsilon, (reason,))

    def direct(self) -> Iterator[_Candidate]:
        """Windows and short reductions without shared memory: neighbouring threads share lines through L1."""
        for coarsen in (1, 2, 4):
            for threads in (128, 256, 64, 512):
                yield from self._flat("direct", coarsen, threads, 1)

    def _flat(self, policy: str, coarsen: int, threads: int, vector: int) -> Iterator[_Candidate]:
        """Threads along the last axes, ``coarsen`` elements each: ``vector`` adjacent ones, the rest strided."""
        axes, sizes = self.form.spatial, self.form.sizes
        last = axes[-1]
        thread = {axis: 1 for axis in axes} | {last: vector}
        virtual = {axis: 1 for axis in axes}
        block: dict[str, int] = {}
        copies, left = max(1, coarsen // vector), threads
        if sizes[last] < thread[last] * copies:
            copies = max(1, sizes[last] // thread[last])
        virtual[last] = copies
        for axis in reversed(axes):
            own = thread[axis] * virtual[axis]
            here = min(left, -(-sizes[axis] // own))
            if axis != axes[0] and here < left:
                # Whole threads only: the rest of the block goes to the next axis.
                left //= here
            block[axis] = own * here
            if axis == axes[0] or here == left:
                left = 1 if here == left else left
        if math.prod(block.values()) // (vector * copies) > self.limits.threads_per_block:
            return
        ordered = {axis: block[axis] for axis in axes}
        reason = Reason("registers", f"{coarsen} elements per thread, {threads} threads along the last axes",
                        " ".join(f"{axis}={size}" for axis, size in ordered.items()))
        yield _Candidate(
            TileSchedule(
                block=tuple(ordered.items()),
                thread=tuple(thread.items()),
                vthreads=tuple(virtual.items()),
                step=tuple((axis, sizes[axis]) for axis in self.form.reduced),
                vector=((self.form.expr.output.name, vector),),
            ),
            None, None, policy, self.epsilon, (reason,),
        )

    def staged_reduction(self) -> Iterator[_Candidate]:
        """A reduction with one thread per output, its rows fetched through shared memory in contiguous pieces."""
        axes, sizes = self.form.spatial, self.form.sizes
        reduced = math.prod(sizes[axis] for axis in self.form.reduced)
        element = max(access.element_bytes for access in self.space.inputs)
        for outputs in (64, 128, 32, 256):
            budget = self.limits.shared_bytes_per_block // (outputs * element * len(self.space.inputs))
            if budget < 8:
                continue
            step = {axis: 1 for axis in self.form.reduced}
            for axis in reversed(self.form.reduced):
                step[axis] = sizes[axis] if sizes[axis] <= budget else 1 << (budget.bit_length() - 1)
                budget //= step[axis]
                if budget < 2:
                    break
            block = {axis: 1 for axis in axes}
            left = outputs
            for axis in reversed(axes):
                block[axis] = min(left, sizes[axis])
                left = max(1, left // block[axis])
            reason = Reason("shared", f"one thread per output, rows of {reduced} staged", f"{outputs} outputs")
            yield _Candidate(
                TileSchedule(
                    block=tuple(block.items()), thread=tuple((axis, 1) for axis in axes), step=tuple(step.items()),
                    cached=self.staged,
                    vector=self.widest,
                ),
                None, None, "staged reduction", self.epsilon, (reason,),
            )

    def rows(self) -> Iterator[_Candidate]:
        """A reduction shared by the threads of a block: whole warps along the reduced axes, rows side by side."""
        form = self.form
        columns = math.prod(form.sizes[axis] for axis in form.reduced)
        rows = math.prod(form.sizes[axis] for axis in form.spatial)
        for threads in (32, 64, 128, 256, 512, 1024):
            if threads > self.lanes and threads >= 2 * columns:
                break
            if threads % self.lanes:
                continue
            for side in (1, 2, 4, 8):
                if threads * side > self.limits.threads_per_block or (side > 1 and side > rows):
                    break
                block = {axis: 1 for axis in form.spatial}
                left = side
                for axis in reversed(form.spatial):
                    block[axis] = min(left, form.sizes[axis])
                    left = max(1, left // block[axis])
                reason = Reason("registers", f"{threads} threads share a row of {columns}, {side} rows per block",
                                f"{rows} rows")
                yield _Candidate(
                    TileSchedule(
                        block=tuple(block.items()),
                        thread=tuple((axis, 1) for axis in form.spatial),
                        reduce_threads=tuple(
                            (axis, threads if axis == form.reduced[-1] else 1) for axis in form.reduced
                        ),
                    ),
                    None, None, "shared rows", self.epsilon, (reason,),
                )


def _widest(form: KernelForm, tensor: str) -> int:
    """Elements of a 16-byte access; code generation narrows it to what alignment allows."""
    return max(1, 16 // form.expr.tensor_by_name[tensor].element_bytes)
