"""Programs for operators whose outputs share no data, or too little to be worth staging.

Their data-reuse score is constant, so tiles are constructed for the top layer alone and loaded directly from the bottom
layer (thesis 6.3.2). What is left to decide is which threads stand side by side, how many elements each takes,
and whether shared memory turns a scattered access into a contiguous one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

from hal.spec.device import DeviceSpec
from roller.construct.program import Candidate, Reason
from roller.construct.rtile import TileSpace, data_tile_elements
from sokoban.kernel.form import KernelForm
from sokoban.schedule.accesses import widest_vector
from sokoban.schedule.rows import ROW_REGISTERS, column_bytes_of, exchange_elements, keeps_in_shared, row_plan
from sokoban.schedule.tile import Sizes, TileSchedule
from sokoban.schedule.windows import PATCH_STATEMENTS

#: Columns per thread up to which fewer threads than a warp are worth proposing for a row.
SHORT_ROW = 16


class Flat:
    """Proposals for one operator on one device."""

    def __init__(self, space: TileSpace, device: DeviceSpec, epsilon: float) -> None:
        self.form: KernelForm = space.form
        self.space, self.device, self.epsilon = space, device, epsilon
        self.limits, self.lanes = device.limits, device.warp_lanes
        self.staged = tuple(dict.fromkeys(space.input_names))

    def pointwise(self) -> Iterator[Candidate]:
        """Element-wise operators, one to sixteen elements per thread; transposed operands through shared memory."""
        output = self.form.expr.output
        # Where no vector may straddle the end of a row, a thread's elements lie apart.
        widest = math.gcd(widest_vector(self.form, output.name), output.shape[-1] if output.shape else 1)
        for coarsen in (widest, 2 * widest, 4 * widest, 1):
            for threads in self._thread_counts((256, 128, 512, 64, 1024)):
                yield from self._flat("element-wise", coarsen, threads, min(coarsen, widest))
        if self._transposed():
            for edge, rows in ((32, 8), (64, 8), (32, 16), (16, 16), (64, 16)):
                yield from self._transposing(edge, rows)

    def _thread_counts(self, menu: tuple[int, ...]) -> tuple[int, ...]:
        """The entries of ``menu`` that a block may have, or all it may have where that is less."""
        return tuple(n for n in menu if n <= self.limits.threads_per_block) or (self.limits.threads_per_block,)

    def direct(self) -> Iterator[Candidate]:
        """Windows and short reductions without shared memory: neighbouring threads share lines through L1, and what a
        thread reads for one output it keeps for its others."""
        for coarsen in (1, 2, 4):
            for threads in self._thread_counts((128, 256, 512)):
                yield from self._flat("direct", coarsen, threads, 1)
        axis = self._axis_of_fragments()
        if axis is not None:
            for outputs in (4, 16):
                for threads in self._thread_counts((256, 512)):
                    yield from self._flat("direct", 1, threads, 1, {axis: outputs})
        window = self._window_axis
        if window is not None:
            size = self.form.sizes[window]
            last = self.form.spatial[-1]
            # A column of outputs per thread, about 2 to 16 of them, as evenly as the axis divides; or two columns.
            for outputs in sorted({-(-size // -(-size // most)) for most in (2, 4, 8, 16)}):
                for threads in self._thread_counts((64, 128, 256)):
                    for column_count in (1, 2):
                        yield from self._flat("direct", 1, threads, 1, {window: outputs, last: column_count})
                    yield from self._flat("staged windows", 1, threads, 1, {window: outputs}, staged=True)

    @cached_property
    def _window_axis(self) -> str | None:
        """The last axis but one that a window slides along, so that a thread's outputs along it share what they read;
        None where there is none."""
        if self.form.scattered_loads:
            return None
        for axis in reversed(self.form.spatial[:-1]):
            for load in self.form.body_loads:
                if any(index.coefficient(axis) and len(index.terms) > 1 for index in load.indices):
                    return axis
        return None

    def _axis_of_fragments(self) -> str | None:
        """The outermost axis before the last that some operand lacks: its values serve all outputs along it, such as
        the filter of a depthwise convolution for all images."""
        for axis in self.form.spatial[:-1]:
            for load in self.form.body_loads:
                if self.form.sizes[axis] >= 4 and not any(index.coefficient(axis) for index in load.indices):
                    return axis
        return None

    def _flat(
        self,
        policy: str,
        coarsen: int,
        threads: int,
        vector: int,
        elements_along: Mapping[str, int] = MappingProxyType({}),
        *,
        staged: bool = False,
    ) -> Iterator[Candidate]:
        """Threads along the last axes, ``coarsen`` elements each: ``vector`` adjacent ones, the rest strided; and
        ``elements_along`` elements along other axes. With ``staged`` all that a block reads passes through shared
        memory."""
        axes, sizes = self.form.spatial, self.form.sizes
        last = axes[-1]
        copies = max(1, coarsen // vector)
        if sizes[last] < vector * copies:
            copies = max(1, sizes[last] // vector)
        thread = {**self._ones, last: vector}
        outputs = 1
        for axis, count in elements_along.items():
            thread[axis] = count = min(count, sizes[axis])
            outputs *= count
        copies = 1 if last in elements_along else copies
        block = self._ones.copy()
        unused, points = threads, 1
        for axis in reversed(axes):
            elements = thread[axis] * copies if axis == last else thread[axis]
            count = min(unused, -(-sizes[axis] // elements))
            block[axis] = elements * count
            points *= elements * count
            # Whole threads only: what does not divide goes unused.
            unused //= count
        if points // (vector * copies * outputs) > self.limits.threads_per_block:
            return
        if staged and self._tile_bytes(block) > self.limits.shared_bytes_per_block:
            return
        pairs = tuple(block.items())
        reason = Reason(
            "registers",
            f"{coarsen * outputs} elements per thread, up to {threads} threads along the last axes",
            " ".join([f"{axis}={size}" for axis, size in pairs]),
        )
        # All of a thread's work in one body: what its windows share is then read once.
        in_registers = not staged and self._window_axis is not None
        if in_registers:
            in_registers = math.prod(thread.values()) * copies * self._reduced_points <= PATCH_STATEMENTS
        schedule = TileSchedule.quickly(
            block=pairs,
            thread=tuple(thread.items()),
            vthreads=tuple([(axis, copies if axis == last else 1) for axis in axes]),
            step=self._full_step,
            cached=self.staged if staged else (),
            vector=((self.form.expr.output.name, vector),),
            unroll=PATCH_STATEMENTS if in_registers else TileSchedule.unroll,
        )
        if in_registers:
            policy = "windows in registers"
        yield Candidate(schedule, policy, self.epsilon, (reason,))

    @cached_property
    def _ones(self) -> dict[str, int]:
        """One element along every spatial axis."""
        return dict.fromkeys(self.form.spatial, 1)

    @cached_property
    def _full_step(self) -> Sizes:
        """The reduction in one step."""
        return tuple((axis, self.form.sizes[axis]) for axis in self.form.reduced)

    @cached_property
    def _reduced_points(self) -> int:
        """Points of the reduction."""
        return math.prod(size for _, size in self._full_step)

    def _tile_bytes(self, block: Mapping[str, int]) -> int:
        """Bytes that a block reads for its whole reduction."""
        shape = tuple(block.get(axis, self.form.sizes[axis]) for axis in self.space.axes)
        return sum(data_tile_elements(access, shape) * access.element_bytes for access in self.space.inputs)

    def _transposed(self) -> tuple[str, ...]:
        """Tensors whose innermost dimension is not the output's last axis."""
        last = self.form.final.axes[-1]
        return tuple(
            load.tensor
            for load in self.form.body_loads
            if load.indices
            and load not in self.form.scattered_loads
            and not load.indices[-1].coefficient(last)
            and any(i.coefficient(last) for i in load.indices)
        )

    def _transposing(self, edge: int, rows: int) -> Iterator[Candidate]:
        """A square tile, read along one axis and written along the other, ``edge / rows`` rows per thread."""
        names = self._transposed()
        load = next(load for load in self.form.body_loads if load.tensor == names[0])
        last = self.form.final.axes[-1]
        other = next((axis for axis in load.indices[-1].axes if axis in self.form.final.axes), None)
        element_bytes = self.form.expr.tensor_by_name[names[0]].element_bytes
        if other is None or edge * (edge + 1) * element_bytes * len(names) > self.limits.shared_bytes_per_block:
            return
        block = {axis: 1 for axis in self.form.final.axes} | {last: edge, other: edge}
        thread = {axis: 1 for axis in block} | {other: edge // rows}
        action = f"stage {', '.join(names)}: read along {other}, write along {last}"
        schedule = TileSchedule(
            block=tuple(block.items()),
            thread=tuple(thread.items()),
            cached=names,
            padding=tuple((name, 1) for name in names),
        )
        reason = Reason("shared", action, f"{other}={edge} {last}={edge}")
        yield Candidate(schedule, "transpose through shared memory", self.epsilon, (reason,))

    def staged_reduction(self) -> Iterator[Candidate]:
        """A reduction with one thread per output, its rows fetched through shared memory in contiguous pieces."""
        if not self.space.inputs:
            return  # Of places alone there is nothing to fetch.
        axes, sizes = self.form.spatial, self.form.sizes
        element_bytes = max(access.element_bytes for access in self.space.inputs)
        for outputs in self._thread_counts((64, 128, 32, 256)):
            budget = self.limits.shared_bytes_per_block // (outputs * element_bytes * len(self.space.inputs))
            if budget < 8:
                continue
            step = {axis: 1 for axis in self.form.reduced}
            for axis in reversed(self.form.reduced):
                step[axis] = sizes[axis] if sizes[axis] <= budget else 1 << (budget.bit_length() - 1)
                budget //= step[axis]
                if budget < 2:
                    break
            reason = Reason(
                "shared", "one thread per output, its row fetched by all threads together",
                f"{outputs} outputs, step " + " ".join(f"{axis}={size}" for axis, size in step.items()),
            )  # fmt: skip
            schedule = TileSchedule(
                block=self._last_axes(outputs),
                thread=tuple((axis, 1) for axis in axes),
                step=tuple(step.items()),
                cached=self.staged,
            )
            yield Candidate(schedule, "staged reduction", self.epsilon, (reason,))

    def rows(self) -> Iterator[Candidate]:
        """A reduction shared by the threads of a block; warps stand along what is contiguous in memory, the columns
        of a row or neighbouring outputs."""
        form = self.form
        columns = math.prod(form.sizes[axis] for axis in form.reduced)
        outputs = math.prod(form.sizes[axis] for axis in form.spatial)
        along = form.reduces_contiguously
        for threads in self._thread_counts((8, 16, 32, 64, 128, 256, 512, 1024) if along else (4, 8, 16, 32, 64)):
            if threads > self.lanes and threads >= 2 * columns:
                break
            if along and threads < self.lanes and SHORT_ROW * threads < columns:
                continue
            for side in (1, 2, 4, 8, 16, 32) if along else self._sides:
                if threads * side > self.limits.threads_per_block or (along and side > 1 and side > outputs):
                    break
                if threads * side % self.lanes:
                    continue
                action = f"{threads} threads share a reduction of {columns}"
                arrangement = f"{side} of {outputs} side by side"
                schedule = TileSchedule(
                    block=self._last_axes(side),
                    thread=tuple((axis, 1) for axis in form.spatial),
                    reduce_threads=tuple((axis, threads if axis == form.reduced[-1] else 1) for axis in form.reduced),
                )
                yield Candidate(schedule, "shared rows", self.epsilon, (Reason("registers", action, arrangement),))
                if along and side > 1:
                    continue
                for column_count in self._shared_columns(threads, schedule.threads_per_block // threads):
                    reason = Reason(
                        "shared", f"{action}, shared memory keeps {column_count} columns of each row", arrangement
                    )
                    yield Candidate(schedule.with_(kept_columns=column_count), "rows kept", self.epsilon, (reason,))

    @property
    def _sides(self) -> list[int]:
        """Neighbouring outputs of a block whose reductions are not contiguous: half a warp, one, or two."""
        return sorted({max(1, self.lanes // 2), self.lanes, 2 * self.lanes})

    def _shared_columns(self, threads: int, rows: int) -> Iterator[int]:
        """Numbers of columns of ``rows`` rows that shared memory may keep where registers are too few: all, those
        that registers do not hold besides, or as many as it has room for."""
        form = self.form
        columns = math.prod(form.sizes[axis] for axis in form.columns)
        if threads <= self.lanes or columns <= ROW_REGISTERS * threads or not keeps_in_shared(form, self.device):
            return
        column_bytes = column_bytes_of(form)
        plan = row_plan(form, threads)
        in_turn = threads * plan.vector
        room = self.limits.shared_bytes_per_block_opt_in - 8 * exchange_elements(form, rows, threads)
        turns = room // (in_turn * column_bytes * rows)
        register_turns = row_plan(form, threads, in_turn).register_turns
        for turns_in_shared in dict.fromkeys(
            min(turns, wanted) for wanted in (plan.turns, plan.turns - register_turns)
        ):
            if turns_in_shared > 0:
                yield turns_in_shared * in_turn

    def _last_axes(self, outputs: int) -> tuple[tuple[str, int], ...]:
        """A block of about ``outputs`` outputs along the last axes."""
        block = {axis: 1 for axis in self.form.spatial}
        remaining = outputs
        for axis in reversed(self.form.spatial):
            block[axis] = min(remaining, self.form.sizes[axis])
            remaining = max(1, remaining // block[axis])
        return tuple(block.items())
