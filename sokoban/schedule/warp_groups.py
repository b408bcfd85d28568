"""Tiles for warp groups, whose products are ``wgmma`` of sm_90a, and programs by ``mma.sync`` to fall back on.

Four warps, a group, multiply 64 rows by up to 256 columns together, and read both operands from shared memory. A block
is a column of groups over the same columns; each keeps its 64 rows of sums in registers. Which tiles there are is
:mod:`sokoban.schedule.bulk_copies`'s: operands are copied in bulk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MATRIX_TYPES, MatrixRoles
from sokoban.schedule.tile import TileSchedule

_T = TypeVar("_T")

#: Bytes of an element of the types whose operands may be turned.
ELEMENT_BYTES = 2

#: Rows that a group multiplies, and rows of each of its four warps.
GROUP_ROWS, WARP_ROWS = 64, 16
#: Registers of a thread that multiplies and of one that copies, by warp groups that multiply: ``setmaxnreg`` moves them
#: from where all threads have as many. One group has enough without.
MOVED_REGISTERS = {2: (232, 40), 3: (160, 32)}
#: Bytes of a panel's row: tiles lie in panels as wide as the widest swizzle of the instruction. A step is as deep.
PANEL_BYTES = 128


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
