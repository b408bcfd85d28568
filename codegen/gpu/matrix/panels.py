"""Operands of warp groups in shared memory: panels in 128-byte swizzle, which descriptors tell of.

The instruction (``wgmma``) finds its operands itself, by the descriptor of a tile in 128-byte swizzle. A tile is a row
of panels, each 128 bytes wide and as long as the tile; eight rows of a panel make an atom of 1024 bytes, within which
pieces of 16 bytes are permuted by an exclusive or with the row's number.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.gpu.matrix.wgmma_functions import ATOM_BYTES
from codegen.tir.values import Expr
from sokoban.kernel.matrix import MatrixRoles
from sokoban.schedule.bulk_copies import BULK_WIDTHS
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import ELEMENT_BYTES, GROUP_ROWS, PANEL_BYTES, WARP_ROWS, step_of

#: Elements of 16 bits of a panel's row.
PANEL = PANEL_BYTES // ELEMENT_BYTES

#: Bytes of the depth of one instruction.
DEPTH_BYTES = 32


def tile_problem(schedule: TileSchedule, roles: MatrixRoles) -> str | None:
    """Why warp groups cannot multiply the tiles of a schedule; None when they can."""
    rows, width = schedule.block_of[roles.m], schedule.block_of[roles.n]
    if schedule.thread_of[roles.m] != WARP_ROWS or rows % GROUP_ROWS:
        return f"block {rows} of axis {roles.m}: warp groups take multiples of {GROUP_ROWS}, {WARP_ROWS} rows a warp"
    if schedule.thread_of[roles.n] != width or width not in BULK_WIDTHS:
        return f"block {width} of axis {roles.n}: a warp group has all of {', '.join(map(str, BULK_WIDTHS))} columns"
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
    element_bytes: int

    @property
    def panel_bytes(self) -> int:
        return self.rows * PANEL_BYTES

    def described(self, stage: Expr, spatial: Expr, depth: int) -> tuple[Expr, int, int]:
        """Start, leading and stride byte offsets of what one product reads: from ``spatial`` (m or n, a multiple of 64)
        and step ``depth`` of the product's depth on.

        Eight rows after eight others are an atom apart (the stride). The leading offset is from one panel to the next
        where columns of the tile are m or n; otherwise there is but one, and it is not used (1 after encoding).
        """
        start = stage + self.start
        if self.turned:
            start = start + spatial // PANEL * self.panel_bytes + depth * PANEL_BYTES
            return start, self.panel_bytes, ATOM_BYTES
        panel = PANEL_BYTES // self.element_bytes
        within = depth // panel * self.panel_bytes + depth % panel * self.element_bytes
        return start + within + spatial * PANEL_BYTES, 16, ATOM_BYTES
