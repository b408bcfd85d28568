"""Tiles for warp groups: which matrix products of 16-bit floats ``wgmma`` of sm_90a takes, and in which tiles.

Four warps, a group, multiply 64 rows by up to 256 columns together, and read both operands from shared memory. A block
is a column of groups over the same columns; each keeps its 64 rows of sums in registers. That leaves so few tiles that
all of them are proposed, by construction as by the search.

Both operands are copied by 16 bytes at a time: rows of a tensor that do not allow it are left to ``mma.sync``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MATRIX_TYPES, MatrixRoles
from sokoban.kernel.placed import PlacedForm
from sokoban.schedule.accesses import VECTOR_BYTES, fetch_vector
from sokoban.schedule.tile import TileSchedule

_T = TypeVar("_T")

#: Bytes of an element of the types that warp groups multiply whoever copies them.
ELEMENT_BYTES = 2

#: Rows that a group multiplies, and rows of each of its four warps.
GROUP_ROWS, WARP_ROWS = 64, 16
#: Registers of a thread that multiplies and of one that copies, by warp groups that multiply: ``setmaxnreg`` moves them
#: from where all threads have as many. One group has enough without.
MOVED_REGISTERS = {2: (232, 40), 3: (160, 32)}
#: Columns of a group's tile that are proposed.
WIDTHS = (64, 128, 192, 256)

#: Groups of a block that are proposed: with four, a thread of the widest tile has no registers besides its sums.
GROUPS = (1, 2, 3, 4)

#: Bytes of a panel's row: tiles lie in panels as wide as the widest swizzle of the instruction. A step is as deep.
PANEL_BYTES = 128

#: Buffers of a pipeline: products of a step and of the one before it occupy two, which leaves one to six for copies.
STAGES = (3, 4, 5, 6)
LEAST_STAGES, MOST_STAGES = 3, 8


def is_aligned(form: KernelForm, schedule: TileSchedule) -> bool:
    """True if both operands are copied by 16 bytes."""
    return all(fetch_vector(form, schedule, load) == VECTOR_BYTES // ELEMENT_BYTES for load in form.body_loads)


def warp_group_schedules(placed: PlacedForm) -> Iterator[TileSchedule]:
    """Every tile and pipeline for the operator, but for larger tiles than the smallest of which more than half would be
    padding; none where warp groups cannot multiply it. Whether they fit the device is left to the estimate."""
    form, roles = placed.form, placed.warp_group_roles
    if roles is None:
        return
    for rows in (GROUP_ROWS * groups for groups in GROUPS):
        for width in WIDTHS:
            most_rows = max(GROUP_ROWS, 2 * form.sizes[roles.m])
            most_columns = max(WIDTHS[0], 2 * form.sizes[roles.n])
            if rows <= most_rows and width <= most_columns:
                yield from (group_schedule(form, roles, rows, width, stages) for stages in STAGES)


def with_fall_back(ranked: Sequence[_T], top_k: int, instruction: Callable[[_T], Instruction | None]) -> list[_T]:
    """Programs, best first, with one by ``mma.sync`` among the first ``top_k`` where some of those need warp groups.

    Warp groups run on one generation of boards alone. Where none of the first ``top_k`` is by ``mma.sync``, the best
    one that is takes the last of their places.

    >>> ranked = [Instruction.WGMMA, Instruction.WGMMA, Instruction.FMA, Instruction.MMA_16X8X16]
    >>> [str(instruction) for instruction in with_fall_back(ranked, 2, lambda program: program)]
    ['wgmma_64xNx16', 'mma_16x8x16', 'wgmma_64xNx16', 'fma']

    Args:
        ranked: the programs, best first.
        top_k: programs that are asked for.
        instruction: of a program; None for programs that are not one kernel.
    """

    def is_mma(program: _T) -> bool:
        computed_by = instruction(program)
        return computed_by is not None and computed_by.is_mma

    best = ranked[:top_k]
    if top_k > 1 and Instruction.WGMMA in map(instruction, best) and not any(map(is_mma, best)):
        fall_back = next((place for place in range(top_k, len(ranked)) if is_mma(ranked[place])), None)
        if fall_back is not None:
            between, behind = ranked[top_k - 1 : fall_back], ranked[fall_back + 1 :]
            return [*ranked[: top_k - 1], ranked[fall_back], *between, *behind]
    return list(ranked)


def step_of(roles: MatrixRoles) -> int:
    """Elements of a step along the depth: a row of a panel."""
    return PANEL_BYTES // MATRIX_TYPES[roles.dtype].element_bytes


def group_schedule(form: KernelForm, roles: MatrixRoles, rows: int, width: int, stages: int) -> TileSchedule:
    """The schedule of blocks of ``rows`` by ``width`` that warp groups multiply."""
    block, warp = {roles.m: rows, roles.n: width}, {roles.m: WARP_ROWS, roles.n: width}
    return TileSchedule(
        block=tuple((axis, block.get(axis, 1)) for axis in form.spatial),
        thread=tuple((axis, warp.get(axis, 1)) for axis in form.spatial),
        vthreads=tuple((axis, 1) for axis in form.spatial),
        step=tuple((axis, step_of(roles) if axis == roles.k else 1) for axis in form.reduced),
        cached=tuple(dict.fromkeys(load.tensor for load in form.body_loads)),
        instruction=Instruction.WGMMA,
        stages=stages,
    )
