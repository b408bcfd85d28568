"""Schedules of two products in a row: rows of a block that meet H's columns a tile at a step, divided among warps."""

from __future__ import annotations

from dataclasses import dataclass

from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pair import ProductPair
from sokoban.schedule.attention import RowTiles, SharedFloats, padded, pitch_bytes


@dataclass(frozen=True, kw_only=True)
class PairSchedule(RowTiles):
    """Schedule of a pair of products: a block holds ``rows`` rows of X and walks the columns of H, ``step`` at a time.

    Attributes:
        step: columns of H at a step.
        held: whether a warp's rows of X stay in registers between steps; they are read from shared memory otherwise.
    """

    WALKED = "middle"
    NOUN = " columns"
    OPTION = ("held", False, ", rows held")

    step: int
    held: bool

    def blocks(self, kernel: ProductPair) -> int:
        """Blocks of the launch."""
        return self.row_blocks(kernel) * kernel.problems


def pair_floats(kernel: ProductPair, schedule: PairSchedule) -> SharedFloats:
    """The layout of shared memory where threads multiply and add, whose rows tell each other nothing: what attention
    calls queries, keys, values and exponentials are X, A, B and the elements of H here."""
    return SharedFloats.of_tiles(
        schedule.rows, schedule.step, kernel.depth_size, kernel.width_size, schedule.lanes, exchanged=0
    )


@dataclass(frozen=True)
class StagedFactor:
    """A tile of A or B as matrix instructions read it from shared memory.

    Attributes:
        rows, columns: of the tile; its columns lie side by side, those of H where the factor is turned.
        pitch: bytes from row to row.
    """

    rows: int
    columns: int
    pitch: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tile."""
        return self.rows * self.pitch


def staged_factors(kernel: ProductPair, schedule: PairSchedule) -> tuple[StagedFactor, StagedFactor]:
    """The tiles of A and of B at a step."""
    first, second = (
        (padded(size), schedule.step) if is_turned else (schedule.step, padded(size))
        for size, is_turned in (
            (kernel.depth_size, kernel.is_first_turned), (kernel.width_size, kernel.is_second_turned)
        )
    )  # fmt: skip
    return (
        StagedFactor(*first, pitch_bytes(first[1], kernel.dtype)),
        StagedFactor(*second, pitch_bytes(second[1], kernel.dtype)),
    )


def pair_shared_bytes(kernel: ProductPair, schedule: PairSchedule) -> int:
    """Shared memory of a block: its rows of X, and ``stages`` tiles of A and of B."""
    if schedule.instruction is Instruction.FMA:
        return 4 * pair_floats(kernel, schedule).total
    walked = sum(factor.size_bytes for factor in staged_factors(kernel, schedule))
    return schedule.rows * pitch_bytes(kernel.depth_size, kernel.dtype) + schedule.stages * walked
