"""Common part of products over a pipeline of asynchronous copies: the copies, and the results' way out.

Shared memory holds ``stages`` buffers of both operands' tiles. While a step is multiplied, ``cp.async`` copies later
ones into the others, past the registers, with zeros at the edges. Where a tensor's rows cannot be copied by four bytes
at least, threads copy its elements one by one through registers. Results leave in place of the buffers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.matrix.base import ProductBlock, ProductKernel, ProductPlan, outer_inner, strip_bytes, strip_shape
from codegen.gpu.matrix.mma_functions import COPY_BYTES
from codegen.tir.reads import places, read_conditions, read_in_place
from codegen.tir.statements import allocate, named
from codegen.tir.values import Expr
from sokoban.kernel.matrix import FRAGMENT, MATRIX_TYPES, MatrixRoles
from sokoban.language.expression import Load
from sokoban.schedule.tile import TileSchedule


class CopiedProduct(ProductKernel):
    """A kernel whose operands are copied ahead; subclasses say where elements go and how they are multiplied."""

    has_barriers = True

    def __init__(
        self,
        plan: ProductPlan,
        block: ProductBlock,
        *,
        sums: int,
        ahead: int,
        first_column: Expr,
    ) -> None:
        """``sums`` are a thread's; ``ahead`` steps are under way while one is multiplied; ``first_column`` is that of
        the warp in its block."""
        super().__init__(plan, block)
        schedule, roles, dtype = plan.schedule, plan.roles, plan.form.expr.accumulate
        self.step = schedule.step_of[roles.k]
        self.steps = math.prod(plan.padded[axis] // schedule.step_of[axis] for axis in plan.form.reduced)
        self.stages, self.ahead, self.sum_count, self.warp_n = (
            schedule.stages,
            min(ahead, self.steps),
            sums,
            first_column,
        )
        self.element_bytes = MATRIX_TYPES[roles.dtype].element_bytes
        self.stage_bytes = stage_bytes(schedule, roles)
        #: Whether copies pass by the registers, of one operand at least; where none does, there is nothing to wait for.
        self.is_asynchronous = any(self._copy_bytes(load) in COPY_BYTES for load in (roles.a, roles.b))
        scope = "shared.dyn" if plan.is_dynamic else "shared"
        self.shared = allocate("shared", plan.shared_bytes // 4, dtype, scope)
        self.sums = allocate("sums", sums, dtype, "local")

    @staticmethod
    def shared_bytes(schedule: TileSchedule, roles: MatrixRoles) -> int:
        """Shared memory of a block: the buffers of all stages, in whose place results leave afterwards."""
        return max(schedule.stages * stage_bytes(schedule, roles), strip_bytes(roles, schedule))

    @abstractmethod
    def place(self, load: Load, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Byte in shared memory of an element of an operand's tile."""

    def clear(self) -> None:
        """Zero to all sums."""
        with named(T.unroll, self.sum_count, "position") as position:
            T.buffer_store(self.sums, tirx.const(0, self.form.expr.accumulate), [position])

    # ---- steps

    def fetch_first(self) -> None:
        """The copies that are under way before the first step."""
        for step in range(self.ahead):
            self.fetch(tirx.const(step, "int32"), step)
            self.commit()

    def fetch_later(self, step: Expr) -> None:
        """Copy the step after those under way to the buffer that was left last."""
        later = step + self.ahead
        with T.If(later < self.steps), T.Then():
            self.fetch(later, later % self.stages)
        self.commit()

    def commit(self) -> None:
        """The copies since the last time are a group."""
        if self.is_asynchronous:
            self.call("copy_async_commit")

    def wait(self, pending: int) -> None:
        """All but ``pending`` groups of copies are there, those of other threads too; all threads are here."""
        if self.is_asynchronous:
            self.call(f"copy_async_wait_{pending}")
        self.barrier()

    def barrier(self) -> None:
        T.evaluate(T.tvm_storage_sync("shared"))

    # ---- copies

    def fetch(self, step: Expr, stage: Expr) -> None:
        """All threads copy the tiles of a step, zero where a tensor or the product ends."""
        first = {**self.origin, **self.step_origin(step)}
        for load in (self.roles.a, self.roles.b):
            self._fetch_operand(load, stage, first)

    def _place(self, place: Load, axes: Mapping[str, Expr]) -> Expr:
        """The number that says where a row is."""
        ranges, bounds = {**self.form.sizes, **self.plan.padded}, self.plan.bounds
        return read_in_place(place, self.plan.tensors, self.block.buffers, axes, ranges, bounds=bounds)

    def step_origin(self, step: Expr) -> dict[str, Expr]:
        """First elements of a step along the axes of the reduction."""
        origin: dict[str, Expr] = {}
        for axis in reversed(self.form.reduced):
            size = self.schedule.step_of[axis]
            count = self.plan.padded[axis] // size
            origin[axis] = (step % count if axis != self.form.reduced[0] else step) * size
            step = step // count
        return origin

    def _copy_bytes(self, load: Load) -> int:
        """Bytes of an operand that a thread copies at once."""
        return self.fetch_width(load) * self.element_bytes

    def _fetch_operand(self, load: Load, stage: Expr, first: Mapping[str, Expr]) -> None:
        outer, inner = outer_inner(self.roles, load)
        vector, size = self.fetch_width(load), self._copy_bytes(load)
        if size not in COPY_BYTES:
            vector = 1
        tensor, ranges = self.plan.tensors[load.tensor], {**self.form.sizes, **self.plan.padded}

        def copy(row: Expr, column: Expr) -> None:
            axes = {**first, outer: first[outer] + row, inner: first[inner] + column}
            offset = self.place(load, stage, row, column)
            if size not in COPY_BYTES:
                value = read_in_place(
                    load, self.plan.tensors, self.block.buffers, axes, ranges, bounds=self.plan.bounds
                )
                self.call("store_shared", self.shared.data, offset, value)
                return
            indices = places(load, axes, lambda place: self._place(place, axes))
            source = T.address_of(self.block.buffers[load.tensor][indices])
            conditions = read_conditions(load, tensor, indices, ranges, self.plan.bounds)
            if conditions:
                inside = tirx.all(*conditions)
                self.call(f"copy_async_{size}_guarded", self.shared.data, offset, source, inside)
            else:
                self.call(f"copy_async_{size}", self.shared.data, offset, source)

        self.share_out_vectors(self.tile[outer], self.tile[inner], vector, copy, unroll=True)

    # ---- the results

    @abstractmethod
    def last_read(self) -> Collection[int]:
        """Stages that other warps may still read when one has multiplied all steps."""

    def is_in_strip(self, stage: int) -> bool:
        """True if results leave in place of a stage."""
        return stage * self.stage_bytes < strip_bytes(self.roles, self.schedule)

    def leave(self, row: Expr) -> None:
        """One row of every warp's sums: to shared memory, through the final statement, to the output."""
        width = strip_shape(self.roles, self.schedule)[1]
        strip_row = self.warp // self.plan.warps_n * FRAGMENT + self.lane // 4
        # Adjacent sums of a lane: of two columns, or of four where two products have every other column each.
        adjacent = 4 if self.roles.is_interleaved else 2
        column = self.warp_n + self.lane % 4 * adjacent
        if self.plan.fragments_m > 1 or any(self.is_in_strip(stage) for stage in self.last_read()):
            self.barrier()  # until then the strip is what others read: the last fragments, the row before
        with (
            named(T.unroll, self.plan.fragments_n * 4 // adjacent, "j") as j,
            named(T.unroll, 2, "eight") as eight,
            named(T.vectorized, adjacent, "pair") as pair,
        ):
            first = (row * (self.plan.fragments_n * 4 // adjacent) + j) * 2 * adjacent
            value = self.sums[first + eight * adjacent + pair]
            T.buffer_store(self.shared, value, [(strip_row + eight * 8) * width + column + j * (4 * adjacent) + pair])
        self.barrier()
        self.store_strip(self.shared, row)

    def call(self, name: str, *arguments: Any) -> None:
        T.evaluate(T.call_extern("void", name, *arguments))


def stage_bytes(schedule: TileSchedule, roles: MatrixRoles) -> int:
    """Bytes of one buffer of both operands' tiles."""
    rows, columns = schedule.block_of[roles.m], schedule.block_of[roles.n]
    return MATRIX_TYPES[roles.dtype].element_bytes * schedule.step_of[roles.k] * (rows + columns)
