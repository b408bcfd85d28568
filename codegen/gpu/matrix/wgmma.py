"""Tensor Core kernels of sm_90a: warp groups multiply from shared memory (``wgmma``) over a pipeline of copies.

The copies are those of :mod:`codegen.gpu.matrix.copied`, ``cp.async`` of 16 bytes each with zeros at the edges. What
differs is where an element goes, and who reads it: the instruction finds its operands itself, by the descriptor of a
tile in 128-byte swizzle. A tile is a row of panels, each 64 elements (128 bytes) wide and as long as the tile; eight
rows of a panel make an atom of 1024 bytes, within which pieces of 16 bytes are permuted by an exclusive or with the
row's number.

Products are asynchronous. A step waits for its copies, makes them visible to the asynchronous proxy, meets all warps at
one barrier and issues its products; then it starts the copies into the buffer that the step before the last has left,
and waits for the products of the last step only. Tensor cores so have the next products before they finish.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.matrix import wgmma_functions as device
from codegen.gpu.matrix.base import ProductBlock, ProductPlan, lower_product, outer_inner
from codegen.gpu.matrix.copied import CopiedProduct
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import TileRequest
from codegen.tir.statements import named
from codegen.tir.values import Expr
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MatrixRoles
from sokoban.kernel.placed import WARP_GROUP_DTYPES
from sokoban.language.expression import Load
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import (
    ELEMENT_BYTES,
    GROUP_ROWS,
    LEAST_STAGES,
    MOST_STAGES,
    PANEL_BYTES,
    WARP_ROWS,
    WIDTHS,
    is_aligned,
    step_of,
)

#: Elements of a panel's row, and of the pieces that are permuted within it.
PANEL, PIECE = PANEL_BYTES // ELEMENT_BYTES, 16 // ELEMENT_BYTES

#: Bytes of the depth of one instruction, and elements of 16 bits.
DEPTH_BYTES = 32
DEPTH = DEPTH_BYTES // ELEMENT_BYTES


def takes(request: TileRequest) -> bool:
    """Products by instruction ``wgmma_64xNx16`` whose tiles threads copy."""
    return request.schedule.instruction == Instruction.WGMMA and not request.schedule.cluster


def lower(request: TileRequest) -> Lowered:
    """The kernel of a matrix product by ``wgmma``.

    Raises:
        ValueError: the operator or the schedule does not fit the instruction.
    """
    return lower_product(WarpGroupKernel, request)


def tile_problem(
    schedule: TileSchedule,
    roles: MatrixRoles,
    widths: Sequence[int] = WIDTHS,
) -> str | None:
    """Why warp groups cannot multiply the tiles of a schedule, however they are copied; None when they can."""
    rows, width = schedule.block_of[roles.m], schedule.block_of[roles.n]
    if schedule.thread_of[roles.m] != WARP_ROWS or rows % GROUP_ROWS:
        return f"block {rows} of axis {roles.m}: warp groups take multiples of {GROUP_ROWS}, {WARP_ROWS} rows a warp"
    if schedule.thread_of[roles.n] != width or width not in widths:
        return f"block {width} of axis {roles.n}: a warp group has all of {', '.join(map(str, widths))} columns"
    if schedule.step_of[roles.k] % step_of(roles):
        return f"step {schedule.step_of[roles.k]} of axis {roles.k}: warp groups take multiples of {step_of(roles)}"
    if any(amount for _, amount in schedule.padding):
        return "padding: tiles of warp groups are swizzled instead"
    return None


@dataclass(frozen=True)
class PanelTile:
    """The staged tile of one operand, as descriptors can tell of it.

    Attributes:
        turned: the depth runs down the rows rather than along them (PTX: MN-major rather than K-major).
        rows: of the tile; m or n, or the depth where it is turned.
        start: byte where the tile starts within its stage.
        element_bytes: 2 where it is turned.
    """

    turned: bool
    rows: int
    start: int
    element_bytes: int = ELEMENT_BYTES

    @property
    def panel_bytes(self) -> int:
        return self.rows * PANEL_BYTES

    def offset(self, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Byte of an element in shared memory, of the stage that starts at byte ``stage``."""
        piece = column % PANEL // PIECE ^ (row % 8)
        first = stage + self.start + column // PANEL * self.panel_bytes + row * PANEL_BYTES
        return first + (piece * PIECE + column % PIECE) * ELEMENT_BYTES

    def described(self, stage: Expr, spatial: Expr, depth: int) -> tuple[Expr, int, int]:
        """Start, leading and stride byte offsets of what one product reads: from ``spatial`` (m or n, a multiple of 64)
        and step ``depth`` of the product's depth on.

        Eight rows after eight others are an atom apart (the stride). The leading offset is from one panel to the next
        where columns of the tile are m or n; otherwise there is but one, and it is not used (1 after encoding).
        """
        start = stage + self.start
        if self.turned:
            start = start + spatial // PANEL * self.panel_bytes + depth * PANEL_BYTES
            return start, self.panel_bytes, device.ATOM_BYTES
        panel = PANEL_BYTES // self.element_bytes
        within = depth // panel * self.panel_bytes + depth % panel * self.element_bytes
        return start + within + spatial * PANEL_BYTES, 16, device.ATOM_BYTES


class WarpGroupKernel(CopiedProduct):
    """The statements of one kernel, those of :meth:`write` in their order."""

    #: Static memory need not start where the swizzle repeats.
    needs_dynamic_shared = True

    def __init__(self, plan: ProductPlan, block: ProductBlock) -> None:
        schedule, roles = plan.schedule, plan.roles
        width = schedule.block_of[roles.n]
        super().__init__(
            plan,
            block,
            sums=width // 2,
            ahead=schedule.stages - 2,  # two buffers belong to products
            first_column=tirx.const(0, "int32"),
            alignment_bytes=device.ATOM_BYTES,
        )
        self.panels: dict[Load, PanelTile] = {}
        start = 0
        for load in (roles.a, roles.b):
            outer, inner = outer_inner(roles, load)
            self.panels[load] = PanelTile(roles.is_turned(load), self.tile[outer], start)
            start += self.tile[outer] * self.tile[inner] * ELEMENT_BYTES
        self.product = device.product_name(roles.dtype, width, roles.is_turned(roles.a), roles.is_turned(roles.b))

    @staticmethod
    def instruction_problem(form: KernelForm, schedule: TileSchedule, roles: MatrixRoles) -> str | None:
        if roles.dtype not in WARP_GROUP_DTYPES:
            return (
                f"{Instruction.WGMMA} of what threads copy takes {' and '.join(WARP_GROUP_DTYPES)}, not {roles.dtype}"
            )
        problem = tile_problem(schedule, roles)
        if problem is not None:
            return problem
        if not LEAST_STAGES <= schedule.stages <= MOST_STAGES:
            return f"{schedule.stages} pipeline stages: warp groups take {LEAST_STAGES} to {MOST_STAGES}"
        return None if is_aligned(form, schedule) else "rows of an operand are no multiples of 16 bytes"

    def place(self, load: Load, stage: Expr, row: Expr, column: Expr) -> Expr:
        return self.panels[load].offset(stage * self.stage_bytes, row, column)

    def write(self) -> None:
        with T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0):
            self.clear()
            self._pipeline()
            self.leave(0)

    def _pipeline(self) -> None:
        self.fetch_first()
        with named(T.serial, self.steps, "step") as step:
            self.call(f"copy_async_wait_{self.ahead - 1}")
            self.call(device.PROXY_FENCE)
            self.barrier()
            self._multiply_by_group(step % self.stages)
            if self.steps > 1:
                self.fetch_later(step)
            if self.reuses_stages:
                self.call(device.WAIT_FOR_EARLIER)
        self.call(device.finish_name(self.schedule.block_of[self.roles.n]), self.sums.data)

    @property
    def reuses_stages(self) -> bool:
        """Whether copies overwrite what products have read."""
        return self.steps > self.stages

    def last_read(self) -> Collection[int]:
        # Warps wait for their own products only: those of others are two steps behind the last barrier at most.
        behind = 2 if self.reuses_stages else self.steps
        return [step % self.stages for step in range(max(0, self.steps - behind), self.steps)]

    def _multiply_by_group(self, stage: Expr) -> None:
        """All products of a step, as one group."""
        roles, start = self.roles, stage * self.stage_bytes
        self.call(device.ARRIVE)
        for depth in range(0, self.step, DEPTH):
            a = self.panels[roles.a].described(start, self.warp // 4 * GROUP_ROWS, depth)
            b = self.panels[roles.b].described(start, tirx.const(0, "int32"), depth)
            self.call(self.product, self.sums.data, self._descriptor(a), self._descriptor(b))
        self.call(device.COMMIT)

    def _descriptor(self, described: tuple[Any, ...]) -> Expr:
        return T.call_extern("uint64", device.DESCRIPTOR, self.shared.data, *described)
