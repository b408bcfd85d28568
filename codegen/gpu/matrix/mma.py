"""Tensor Core kernels of sm_80 and later: ``ldmatrix`` and ``mma.sync`` over a pipeline of asynchronous copies.

While a step is multiplied, the next ``stages - 1`` are copied (:mod:`codegen.gpu.matrix.copied`); one barrier per step
says both that a buffer is full and that the next one is free. Tiles lie swizzled: a row's pieces of 16 bytes are
permuted by an exclusive or with the row's number, so that the eight rows which ``ldmatrix`` reads at a time fall into
different banks, as the copies do, without padding.

A warp multiplies 32 bytes of the depth at a time and loads the fragments of the next 32 meanwhile, those of the next
step's first 32 included: :mod:`codegen.gpu.matrix.operands` has how, for every element type and layout.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.matrix.base import (
    ProductBlock,
    ProductPlan,
    lower_product,
    outer_inner,
)
from codegen.gpu.matrix.copied import CopiedProduct
from codegen.gpu.matrix.mma_functions import ROUND_TO_TF32, product_name
from codegen.gpu.matrix.operands import OperandTile
from codegen.gpu.matrix.scaled_sums import ScaledSums
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import TileRequest
from codegen.tir.statements import allocate, named
from codegen.tir.values import Expr
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import FRAGMENT, MATRIX_TYPES, MatrixRoles
from sokoban.language.expression import Load
from sokoban.schedule.tile import TileSchedule

#: Pipeline stages that the copies' waiting is written for.
MOST_STAGES = 8
#: Sums that one thread gets of a 16x8 product.
SUMS = 4


def takes(request: TileRequest) -> bool:
    """True if the schedule multiplies by ``mma.sync``, of whatever depth."""
    return request.schedule.instruction.startswith("mma")


def lower(request: TileRequest) -> Lowered:
    """The kernel of a matrix product by ``mma.sync``.

    Raises:
        ValueError: the operator or the schedule does not fit the instruction.
    """
    return lower_product(MmaKernel, request)


class MmaKernel(CopiedProduct):
    """The statements of one kernel, those of :meth:`write` in their order."""

    def __init__(self, plan: ProductPlan, block: ProductBlock) -> None:
        schedule, roles = plan.schedule, plan.roles
        warp_m, warp_n = block.warp // plan.warps_n, block.warp % plan.warps_n
        super().__init__(
            plan,
            block,
            sums=plan.fragments_m * plan.fragments_n * 2 * SUMS,
            ahead=schedule.stages - 1,
            first_column=warp_n * schedule.thread_of[roles.n],
        )
        self.warp_m = warp_m * schedule.thread_of[roles.m]
        self.depths = self.step // roles.depth
        a_bytes = self.element_bytes * schedule.block_of[roles.m] * self.step
        self.operands = {
            load: OperandTile.of(roles, load, self.tile[outer_inner(roles, load)[1]], self.element_bytes, start)
            for load, start in ((roles.a, 0), (roles.b, a_bytes))
        }
        self.product = product_name(roles)
        self.has_interleaved_rows = self.element_bytes == 1 and roles.is_turned(roles.a)
        #: With an even number of depths the fragments of the next step's first depth can be loaded ahead: they are in
        #: the same registers at every step.
        self.loads_ahead = self.stages > 1 and self.depths % 2 == 0 and self.steps > 1
        #: Whether threads meet at every step: what is stored ahead at once is there from the first step on.
        self.meets = self.is_asynchronous or not self.loads_ahead or self.steps > self.ahead
        self.a_fragments = allocate("a_fragments", 2 * plan.fragments_m * 4, "uint32", "local")
        self.b_fragments = allocate("b_fragments", 2 * plan.fragments_n * 4, "uint32", "local")
        self.scales = ScaledSums(self, self.warp_m) if roles.scales else None
        self.multiplied = self.sums if self.scales is None else self.scales.products

    @staticmethod
    def instruction_problem(form: KernelForm, schedule: TileSchedule, roles: MatrixRoles) -> str | None:
        if schedule.instruction != MATRIX_TYPES[roles.dtype].mma:
            return f"instruction {schedule.instruction}: {roles.dtype} takes {MATRIX_TYPES[roles.dtype].mma}"
        padded = [f"{amount} of {name}" for name, amount in schedule.padding if amount]
        if padded:
            return f"padding {padded[0]}: tiles of mma are swizzled instead"
        if not 1 <= schedule.stages <= MOST_STAGES:
            return f"{schedule.stages} pipeline stages: mma takes 1 to {MOST_STAGES}"
        return None

    def place(self, load: Load, stage: Expr, row: Expr, column: Expr) -> Expr:
        return self.operands[load].offset(stage * self.stage_bytes, row, column)

    def write(self) -> None:
        with T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0):
            self.clear()
            if self.stages == 1 or self.steps == 1:
                self._unpipelined_steps()
            else:
                self._pipeline()
            with named(T.unroll, self.plan.fragments_m, "row") as row:
                self.leave(row)

    # ---- steps

    def _unpipelined_steps(self) -> None:
        """Wait for those who multiply, copy a step, wait for it, multiply."""
        with named(T.serial, self.steps, "step") as step:
            if self.steps > 1:
                self.barrier()
            self.fetch(step, 0)
            self.commit()
            self.wait(0)
            with self._scaled(step):
                self._multiply_step(0)

    def last_read(self) -> Collection[int]:
        if self.stages == 1 or self.steps == 1:
            return [0]
        # Fragments of a step that never comes are loaded ahead, too.
        end = self.steps + self.loads_ahead
        return [step % self.stages for step in range(end - 1 if self.meets else 0, end)]

    def _pipeline(self) -> None:
        """The first copies; then per step: multiply, and copy the step that comes ``stages - 1`` later."""
        self.fetch_first()
        if self.loads_ahead:
            self.wait(self.ahead - 1)
            self._load_fragments(0, 0, 0)
        with named(T.serial, self.steps, "step") as step:
            if self.loads_ahead:
                with self._scaled(step):
                    self._multiply_ahead(step)
            else:
                self.wait(self.ahead - 1)
                self.fetch_later(step)
                with self._scaled(step):
                    self._multiply_step(step % self.stages)

    def _scaled(self, step: Expr) -> AbstractContextManager[None]:
        """Statements that multiply a step, whose sums are scaled where there are scales."""
        return nullcontext() if self.scales is None else self.scales.of_step(step)

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
            if last and self.meets:
                self.wait(self.ahead - 1)
            self._load_fragments((depth + 1) % 2, (step + last) % self.stages, (depth + 1) % self.depths)
            if depth == 0:
                self.fetch_later(step)
            self._multiply(depth % 2)

    # ---- fragments

    def _load_fragments(self, buffer: int, stage: Expr, depth: int) -> None:
        roles = self.roles
        for load, fragments, count, first in (
            (roles.a, self.a_fragments, self.plan.fragments_m, self.warp_m),
            (roles.b, self.b_fragments, self.plan.fragments_n, self.warp_n),
        ):
            with named(T.unroll, count, "i" if load == roles.a else "j") as index:
                spatial, start = first + index * FRAGMENT, stage * self.stage_bytes
                name, places = self.operands[load].fragment(start, self.lane, spatial, depth * roles.depth)
                self.call(name, fragments.data, (buffer * count + index) * 4, self.shared.data, *places)

    def _multiply(self, buffer: int) -> None:
        if self.roles.dtype == "tfloat32":
            # Not sooner: a fragment that is rounded has arrived, and until now no thread has waited for it.
            for fragments, count in (
                (self.a_fragments, self.plan.fragments_m),
                (self.b_fragments, self.plan.fragments_n),
            ):
                with named(T.unroll, count, "i") as index:
                    self.call(ROUND_TO_TF32, fragments.data, (buffer * count + index) * 4)
        with named(T.unroll, self.plan.fragments_m, "i") as i, named(T.unroll, self.plan.fragments_n * 2, "j") as j:
            self.call(
                self.product,
                self.multiplied.data,
                self._first_sum(i, j),
                self.a_fragments.data,
                (buffer * self.plan.fragments_m + i) * 4,
                self.b_fragments.data,
                buffer * self.plan.fragments_n * 4 + j * 2,
            )

    def _first_sum(self, i: Expr, j: Expr) -> Expr:
        """Where the sums of 16x8 product ``j`` of fragment row ``i`` begin; interleaved ones are every other sum."""
        if self.roles.is_interleaved:
            return (i * self.plan.fragments_n + j // 2) * (2 * SUMS) + j % 2
        return (i * (self.plan.fragments_n * 2) + j) * SUMS
