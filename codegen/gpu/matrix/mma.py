"""Tensor Core kernels of sm_80 and later: ``ldmatrix`` and ``mma.sync`` over a pipeline of asynchronous copies.

Shared memory holds ``stages`` buffers of both operands' tiles. While a step is multiplied, ``cp.async`` copies the next
``stages - 1`` into the others, past the registers; one barrier per step says both that a buffer is full and that the
next one is free. Tiles lie swizzled: a row's pieces of 16 bytes are permuted by an exclusive or with the row's number,
so that the eight rows which ``ldmatrix`` reads at a time fall into different banks, as the copies do, without padding.

A warp multiplies 32 bytes of the depth at a time and loads the fragments of the next 32 meanwhile, those of the next
step's first 32 included: :mod:`codegen.gpu.matrix.operands` has how, for every element type and layout. Where a
tensor's rows cannot be copied by four bytes at least, threads copy its elements one by one through registers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.matrix.base import (
    MatrixLowering,
    allocate,
    lower_product,
    named,
    outer_inner,
    strip_bytes,
    strip_shape,
    warp_tile_problem,
)
from codegen.gpu.matrix.mma_functions import COPY_BYTES, ROUND_TO_TF32, product_name
from codegen.gpu.matrix.operands import OperandTile
from codegen.tir.lowered import Lowered
from codegen.tir.reads import guarded_read, read_conditions
from codegen.tir.values import Expr, affine
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import FRAGMENT, MATRIX_TYPES, STATIC_SHARED_BYTES, MatrixRoles
from sokoban.language.expression import Load
from sokoban.schedule.tile import TileSchedule

#: Pipeline stages that the copies' waiting is written for.
MOST_STAGES = 8
#: Sums that one thread gets of a 16x8 product.
SUMS = 4


def lower_mma(form: KernelForm, schedule: TileSchedule, *, entry: str, dynamic_shared: bool = True) -> Lowered:
    """Lower a matrix product with one of :data:`sokoban.kernel.matrix.MMA_INSTRUCTIONS`.

    Raises:
        ValueError: the operator or the schedule does not fit the instruction; :func:`mma_problem` says why.
    """
    problem = mma_problem(form, schedule)
    return lower_product(MmaLowering, problem, form, schedule, entry, dynamic_shared)


def mma_problem(form: KernelForm, schedule: TileSchedule) -> str | None:
    """Why a schedule cannot be lowered to ``mma.sync``; None when it can."""
    problem = warp_tile_problem(form, schedule)
    if problem is not None:
        return problem
    roles = form.roles
    assert roles is not None
    if schedule.instruction != MATRIX_TYPES[roles.dtype].mma:
        return f"instruction {schedule.instruction}: {roles.dtype} takes {MATRIX_TYPES[roles.dtype].mma}"
    padded = [f"{amount} of {name}" for name, amount in schedule.padding if amount]
    if padded:
        return f"padding {padded[0]}: tiles of mma are swizzled instead"
    if not 1 <= schedule.stages <= MOST_STAGES:
        return f"{schedule.stages} pipeline stages: mma takes 1 to {MOST_STAGES}"
    return None


def mma_shared_bytes(form: KernelForm, schedule: TileSchedule) -> int:
    """Shared memory of a block: the buffers of all stages, in whose place results leave afterwards."""
    roles = form.roles
    assert roles is not None
    rows, columns = schedule.block_of[roles.m], schedule.block_of[roles.n]
    step = MATRIX_TYPES[roles.dtype].element_bytes * schedule.step_of[roles.k] * (rows + columns)
    return max(schedule.stages * step, strip_bytes(roles, schedule))


class MmaLowering(MatrixLowering):
    """One kernel, its statements in the order in which :meth:`kernel` writes them."""

    has_barriers = True

    def __init__(
        self, form: KernelForm, schedule: TileSchedule, roles: MatrixRoles, entry: str, dynamic_shared: bool
    ) -> None:
        super().__init__(form, schedule, roles, entry)
        self.shared_bytes = mma_shared_bytes(form, schedule)
        self.is_dynamic = dynamic_shared and self.shared_bytes > STATIC_SHARED_BYTES
        self.step = schedule.step_of[roles.k]
        self.depths = self.step // roles.depth
        self.stages = schedule.stages
        #: Steps whose copies are under way while one is multiplied.
        self.ahead = self.stages - 1
        self.steps = math.prod(self.padded[axis] // schedule.step_of[axis] for axis in form.reduced)
        self.element_bytes = MATRIX_TYPES[roles.dtype].element_bytes
        a_bytes = self.element_bytes * schedule.block_of[roles.m] * self.step
        self.stage_bytes = a_bytes + self.element_bytes * schedule.block_of[roles.n] * self.step
        self.operands = {
            load: OperandTile.of(roles, load, self.tile[outer_inner(roles, load)[1]], self.element_bytes, start)
            for load, start in ((roles.a, 0), (roles.b, a_bytes))
        }
        self.product = product_name(roles)
        self.has_interleaved_rows = self.element_bytes == 1 and roles.is_turned(roles.a)
        #: With an even number of depths the fragments of the next step's first depth can be loaded ahead: they are in
        #: the same registers at every step.
        self.loads_ahead = self.stages > 1 and self.depths % 2 == 0

    def memory(self) -> tuple[int, int]:
        return self.shared_bytes, self.shared_bytes if self.is_dynamic else 0

    def kernel(self) -> None:
        scope = "shared.dyn" if self.is_dynamic else "shared"
        self.shared = allocate("shared", self.shared_bytes // 4, self.dtype, scope)
        self.sums = allocate("sums", self.fragments_m * self.fragments_n * 2 * SUMS, self.dtype, "local")
        self.a_fragments = allocate("a_fragments", 2 * self.fragments_m * 4, "uint32", "local")
        self.b_fragments = allocate("b_fragments", 2 * self.fragments_n * 4, "uint32", "local")
        self.warp_m = self.warp // self.warps_n * self.schedule.thread_of[self.roles.m]
        self.warp_n = self.warp % self.warps_n * self.schedule.thread_of[self.roles.n]
        with T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0):
            with named(T.unroll, self.fragments_m * self.fragments_n * 2 * SUMS, "position") as position:
                T.buffer_store(self.sums, tirx.const(0, self.dtype), [position])
            if self.stages == 1:
                self._plain_steps()
            else:
                self._pipeline()
            with named(T.unroll, self.fragments_m, "row") as row:
                self._leave(row)

    # ---- steps

    def _plain_steps(self) -> None:
        """Copy a step, wait, multiply, wait."""
        with named(T.serial, self.steps, "step") as step:
            self._fetch(step, 0)
            self._call("copy_async_commit")
            self._await(0)
            self._multiply_step(0)
            self._barrier()

    def _pipeline(self) -> None:
        """The first copies; then per step: multiply, and copy the step that comes ``stages - 1`` later."""
        for step in range(self.ahead):
            if step < self.steps:
                self._fetch(tirx.const(step, "int32"), step)
            self._call("copy_async_commit")
        if self.loads_ahead:
            self._await(self.stages - 2)
            self._load_fragments(0, 0, 0)
        with named(T.serial, self.steps, "step") as step:
            if self.loads_ahead:
                self._multiply_ahead(step)
            else:
                self._await(self.stages - 2)
                self._fetch_later(step)
                self._multiply_step(step % self.stages)
        self._call("copy_async_wait_0")

    def _fetch_later(self, step: Expr) -> None:
        """Copy the step after those under way to the buffer that was left last."""
        later = step + self.ahead
        with T.If(later < self.steps), T.Then():
            self._fetch(later, later % self.stages)
        self._call("copy_async_commit")

    def _multiply_step(self, stage: Expr) -> None:
        self._load_fragments(0, stage, 0)
        for depth in range(self.depths):
            if depth + 1 < self.depths:
                self._load_fragments((depth + 1) % 2, stage, depth + 1)
            self._multiply(depth % 2)

    def _multiply_ahead(self, step: Expr) -> None:
        """A step whose first fragments are there already; those of the next step follow its barrier."""
        for depth in range(self.depths):
            last = depth + 1 == self.depths
            if last:
                self._await(self.stages - 2)
            self._load_fragments((depth + 1) % 2, (step + last) % self.stages, (depth + 1) % self.depths)
            if depth == 0:
                self._fetch_later(step)
            self._multiply(depth % 2)

    def _await(self, pending: int) -> None:
        """All but ``pending`` groups of copies are there, those of other threads too; all threads are here."""
        self._call(f"copy_async_wait_{pending}")
        self._barrier()

    def _barrier(self) -> None:
        T.evaluate(T.tvm_storage_sync("shared"))

    # ---- fragments

    def _load_fragments(self, buffer: int, stage: Expr, depth: int) -> None:
        roles = self.roles
        for load, fragments, count, first in (
            (roles.a, self.a_fragments, self.fragments_m, self.warp_m),
            (roles.b, self.b_fragments, self.fragments_n, self.warp_n),
        ):
            with named(T.unroll, count, "i" if load == roles.a else "j") as index:
                spatial, start = first + index * FRAGMENT, stage * self.stage_bytes
                name, places = self.operands[load].fragment(start, self.lane, spatial, depth * roles.depth)
                self._call(name, fragments.data, (buffer * count + index) * 4, self.shared.data, *places)

    def _multiply(self, buffer: int) -> None:
        if self.roles.dtype == "tfloat32":
            # Not sooner: a fragment that is rounded has arrived, and until now nobody has waited for it.
            for fragments, count in ((self.a_fragments, self.fragments_m), (self.b_fragments, self.fragments_n)):
                with named(T.unroll, count, "i") as index:
                    self._call(ROUND_TO_TF32, fragments.data, (buffer * count + index) * 4)
        with named(T.unroll, self.fragments_m, "i") as i, named(T.unroll, self.fragments_n * 2, "j") as j:
            self._call(
                self.product,
                self.sums.data,
                self._first_sum(i, j),
                self.a_fragments.data,
                (buffer * self.fragments_m + i) * 4,
                self.b_fragments.data,
                buffer * self.fragments_n * 4 + j * 2,
            )

    def _first_sum(self, i: Expr, j: Expr) -> Expr:
        """Where the sums of 16x8 product ``j`` of fragment row ``i`` begin; interleaved ones are every other sum."""
        if self.roles.is_interleaved:
            return (i * self.fragments_n + j // 2) * (2 * SUMS) + j % 2
        return (i * (self.fragments_n * 2) + j) * SUMS

    # ---- copies

    def _fetch(self, step: Expr, stage: Expr) -> None:
        """All threads copy the tiles of a step, zero where a tensor or the product ends."""
        first = {**self.origin, **self._step_origin(step)}
        for load in (self.roles.a, self.roles.b):
            self._fetch_operand(load, stage, first)

    def _step_origin(self, step: Expr) -> dict[str, Expr]:
        origin: dict[str, Expr] = {}
        for axis in reversed(self.form.reduced):
            size = self.schedule.step_of[axis]
            count = self.padded[axis] // size
            origin[axis] = (step % count if axis != self.form.reduced[0] else step) * size
            step = step // count
        return origin

    def place(self, load: Load, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Byte in shared memory of an element of an operand's tile."""
        return self.operands[load].offset(stage * self.stage_bytes, row, column)

    def _fetch_operand(self, load: Load, stage: Expr, first: Mapping[str, Expr]) -> None:
        outer, inner = outer_inner(self.roles, load)
        vector = self.fetch_width(load)
        size = vector * self.element_bytes
        if size not in COPY_BYTES:
            vector = 1
        tensor, ranges = self.tensors[load.tensor], {**self.form.sizes, **self.padded}

        def copy(row: Expr, column: Expr) -> None:
            axes = {**first, outer: first[outer] + row, inner: first[inner] + column}
            offset = self.place(load, stage, row, column)
            if size not in COPY_BYTES:
                value = guarded_read(load, tensor, self.source(load), axes, ranges)
                self._call("store_shared", self.shared.data, offset, value)
                return
            source = T.address_of(self.buffers[load.tensor][[affine(index, axes) for index in load.indices]])
            conditions = read_conditions(load, tensor, axes, ranges)
            if conditions:
                inside = tirx.all(*conditions)
                self._call(f"copy_async_{size}_guarded", self.shared.data, offset, source, inside)
            else:
                self._call(f"copy_async_{size}", self.shared.data, offset, source)

        self.share_out_vectors(self.tile[outer], self.tile[inner], vector, copy, unroll=True)

    # ---- the results

    def _leave(self, row: Expr) -> None:
        """One row of every warp's sums: to shared memory, through the final statement, to the output."""
        width = strip_shape(self.roles, self.schedule)[1]
        strip_row = self.warp // self.warps_n * FRAGMENT + self.lane // 4
        # Adjacent sums of a lane: of two columns, or of four where two products have every other column each.
        adjacent = 4 if self.roles.is_interleaved else 2
        column = self.warp_n + self.lane % 4 * adjacent
        self._barrier()  # until then the strip is what others read: the last fragments, the row before
        with (
            named(T.unroll, self.fragments_n * 4 // adjacent, "j") as j,
            named(T.unroll, 2, "eight") as eight,
            named(T.vectorized, adjacent, "pair") as pair,
        ):
            first = (row * (self.fragments_n * 4 // adjacent) + j) * 2 * adjacent
            value = self.sums[first + eight * adjacent + pair]
            T.buffer_store(self.shared, value, [(strip_row + eight * 8) * width + column + j * (4 * adjacent) + pair])
        self._barrier()
        self.store_strip(self.shared, row)

    def _call(self, name: str, *arguments: Any) -> None:
        T.evaluate(T.call_extern("void", name, *arguments))
