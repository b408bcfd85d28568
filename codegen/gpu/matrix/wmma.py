"""Tensor Core kernels of sm_70 and sm_75: matrix products by the 16x16x16 instructions of ``nvcuda::wmma``.

A fragment's elements are scattered over the warp in an order that the hardware keeps to itself; only whole fragments
can be loaded and stored. :mod:`codegen.gpu.matrix.base` has what is not about fragments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.matrix.base import (
    ProductBlock,
    ProductKernel,
    ProductPlan,
    lower_product,
    outer_inner,
    shared_shape,
    strip_bytes,
    strip_shape,
)
from codegen.tir.lowered import Lowered, identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.reads import read_in_place
from codegen.tir.statements import allocate, mention, named
from codegen.tir.values import Expr
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import FRAGMENT, STATIC_SHARED_BYTES, MatrixRoles
from sokoban.language.expression import Load
from sokoban.schedule.tile import TileSchedule

#: Shared rows start at multiples of 16 bytes: what ``load_matrix_sync`` asks of a leading dimension.
OPERAND_PADDING_STEP = 8


def takes(request: TileRequest) -> bool:
    """Products by instruction ``wmma_16x16x16``."""
    return request.schedule.instruction.startswith("wmma")


def lower(request: TileRequest) -> Lowered:
    """The kernel of a matrix product by ``wmma``.

    Raises:
        ValueError: the operator or the schedule does not fit the instruction.
    """
    return lower_product(WmmaKernel, request)


class WmmaKernel(ProductKernel):
    """The statements of one kernel, those of :meth:`write` in their order."""

    def __init__(self, plan: ProductPlan, block: ProductBlock) -> None:
        super().__init__(plan, block)
        roles, schedule = plan.roles, plan.schedule
        a_shape, b_shape = (shared_shape(roles, schedule, load) for load in (roles.a, roles.b))
        operand = plan.tensors[roles.a.tensor].dtype
        scope = "shared.dyn" if plan.is_dynamic else "shared"
        self.a_shared = allocate("a_shared", math.prod(a_shape), operand, scope)
        self.b_shared = allocate("b_shared", math.prod(b_shape), operand, scope)
        self.strip = allocate("strip", strip_bytes(roles, schedule) // 4, "float32", "shared")
        area = FRAGMENT * FRAGMENT
        self.sums = plan.fragments_m * plan.fragments_n
        self.accumulators = allocate("accumulators", self.sums * area, "float32", "wmma.accumulator")
        self.a_fragments = allocate("a_fragments", plan.fragments_m * area, operand, "wmma.matrix_a")
        self.b_fragments = allocate("b_fragments", plan.fragments_n * area, operand, "wmma.matrix_b")

    @staticmethod
    def instruction_problem(form: KernelForm, schedule: TileSchedule, roles: MatrixRoles) -> str | None:
        for load in (roles.a, roles.b):
            padding = schedule.padding_of.get(load.tensor, 0)
            if padding % OPERAND_PADDING_STEP or padding < 0:
                return f"padding {padding} of {load.tensor} is no multiple of {OPERAND_PADDING_STEP} elements"
        if schedule.stages != 1:
            return f"{schedule.stages} pipeline stages: wmma fetches a step, then computes on it"
        strip = strip_bytes(roles, schedule)
        if strip > STATIC_SHARED_BYTES:
            return f"results on their way out take {strip} bytes, static shared memory has {STATIC_SHARED_BYTES}"
        return None

    @staticmethod
    def shared_bytes(schedule: TileSchedule, roles: MatrixRoles) -> int:
        staged = sum(2 * math.prod(shared_shape(roles, schedule, load)) for load in (roles.a, roles.b))
        return staged + strip_bytes(roles, schedule)

    @staticmethod
    def dynamic_bytes(plan: ProductPlan) -> int:
        """Shared memory that is sized at launch: that of the operands. The strip has a static buffer of its own."""
        return plan.shared_bytes - strip_bytes(plan.roles, plan.schedule) if plan.is_dynamic else 0

    def write(self) -> None:
        # TVM lets buffers whose lives do not overlap share storage, and then fails over their types: a mention at the
        # start makes the strip live throughout.
        mention(self.strip)
        with T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0):
            with named(T.unroll, self.sums, "position") as position:
                T.evaluate(T.tvm_fill_fragment(*_fragment(self.accumulators, position), T.float32(0)))
            self._steps(list(self.form.reduced), {})
            with named(T.unroll, self.plan.fragments_m, "row") as row:
                self._leave(row)

    # ---- the product

    def _steps(self, remaining: list[str], origin: dict[str, Expr]) -> None:
        """The loops over steps along the ``remaining`` reduction axes, and inside them one step; along the others it
        begins at ``origin``."""
        if not remaining:
            self._step(origin)
            return
        axis = remaining[0]
        step = self.schedule.step_of[axis]
        with named(T.serial, self.plan.padded[axis] // step, f"{identifier(axis)}_step") as index:
            self._steps(remaining[1:], {**origin, axis: index * step})

    def _step(self, origin: Mapping[str, Expr]) -> None:
        """Copy both tiles of the step that begins at ``origin``, and multiply them."""
        roles = self.roles
        first = {**self.origin, **origin}
        self._fetch(roles.a, self.a_shared, first)
        self._fetch(roles.b, self.b_shared, first)
        warp_m = self.warp // self.plan.warps_n * self.schedule.thread_of[roles.m]
        warp_n = self.warp % self.plan.warps_n * self.schedule.thread_of[roles.n]
        with named(T.unroll, self.schedule.step_of[roles.k] // FRAGMENT, "depth") as depth:
            with named(T.unroll, self.plan.fragments_m, "i") as i:
                corner = {roles.m: warp_m + i * FRAGMENT, roles.k: depth * FRAGMENT}
                self._load(self.a_fragments, i, roles.a, self.a_shared, corner, roles.a_layout)
            with named(T.unroll, self.plan.fragments_n, "j") as j:
                corner = {roles.n: warp_n + j * FRAGMENT, roles.k: depth * FRAGMENT}
                self._load(self.b_fragments, j, roles.b, self.b_shared, corner, roles.b_layout)
            with (
                named(T.unroll, self.plan.fragments_m, "i") as i,
                named(T.unroll, self.plan.fragments_n, "j") as j,
            ):
                position = i * self.plan.fragments_n + j
                T.evaluate(
                    T.tvm_mma_sync(
                        self.accumulators.data, position, self.a_fragments.data, i,
                        self.b_fragments.data, j, self.accumulators.data, position,
                    )
                )  # fmt: skip

    def _load(
        self, fragments: Any, index: Expr, load: Load, shared: Any, corner: Mapping[str, Expr], layout: str
    ) -> None:
        outer, inner = outer_inner(self.roles, load)
        row = shared_shape(self.roles, self.schedule, load)[1]
        pointer = shared.access_ptr("r", offset=corner[outer] * row + corner[inner])
        T.evaluate(T.tvm_load_matrix_sync(*_fragment(fragments, index), pointer, row, f"{layout}_major"))

    def _fetch(self, load: Load, shared: Any, first: Mapping[str, Expr]) -> None:
        """All threads copy the data tile of ``load``, zero where the tensor or the product ends."""
        outer, inner = outer_inner(self.roles, load)
        width = self.tile[inner]
        padding = self.schedule.padding_of.get(load.tensor, 0)

        def copy(row: Expr, column: Expr) -> None:
            axes = {**first, outer: first[outer] + row, inner: first[inner] + column}
            ranges = {**self.form.sizes, **self.plan.padded}
            value = read_in_place(load, self.plan.tensors, self.block.buffers, axes, ranges, bounds=self.plan.bounds)
            T.buffer_store(shared, value, [row * (width + padding) + column])

        self.share_out(self.tile[outer], width, self.fetch_width(load), copy)

    # ---- the results

    def _leave(self, row: Expr) -> None:
        """One row of every warp's fragments: to shared memory, through the final statement, to the output."""
        width = strip_shape(self.roles, self.schedule)[1]
        warp_row = self.warp // self.plan.warps_n * FRAGMENT
        warp_column = self.warp % self.plan.warps_n * self.schedule.thread_of[self.roles.n]
        with named(T.unroll, self.plan.fragments_n, "j") as j:
            pointer = self.strip.access_ptr("w", offset=warp_row * width + warp_column + j * FRAGMENT)
            source = _fragment(self.accumulators, row * self.plan.fragments_n + j)
            T.evaluate(T.tvm_store_matrix_sync(*source, pointer, width, "row_major"))
        self.store_strip(self.strip, row)


def _fragment(fragments: Any, index: Expr) -> tuple[Any, int, int, int, Expr]:
    """The arguments by which every wmma intrinsic names a fragment."""
    return fragments.data, FRAGMENT, FRAGMENT, FRAGMENT, index
