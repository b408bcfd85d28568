"""Schedules of two products in a row: rows of a block that meet H's columns a tile at a step, divided among warps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pair import ProductPair
from sokoban.schedule.attention import FRAGMENT_LANES, TWIN_LANES, RowTiles, SharedFloats, padded, pitch_bytes


@dataclass(frozen=True, kw_only=True)
class PairSchedule(RowTiles):
    """Schedule of a pair of products: a block holds ``rows`` rows of X and walks the columns of H, ``step`` at a time.

    Attributes:
        rows: rows of a block, of X, H and the result.
        step: columns of H at a step.
        warps: warps of a block; each has as many rows as any other, and all of a step.
        stages: buffers of A and B: with one, A arrives while B is used and the other way round; with two, a whole step
            arrives during the one before it.
        held: whether a warp's rows of X stay in registers between steps; they are read from shared memory otherwise.
        instruction: what multiplies.
        lanes: threads that share a row; those of a fragment's row where matrix instructions multiply.
    """

    rows: int
    step: int
    warps: int
    stages: int
    held: bool
    instruction: Instruction
    lanes: int = FRAGMENT_LANES

    WALKED = "middle"

    @property
    def walked(self) -> int:
        """Columns of H at a step."""
        return self.step

    def scalar_twin(self, problem: Any) -> PairSchedule:
        """The schedule with multiply-adds in place of matrix instructions."""
        if self.instruction is Instruction.FMA:
            return self
        return replace(self, instruction=Instruction.FMA, lanes=TWIN_LANES, stages=1, held=False)

    def blocks(self, kernel: ProductPair) -> int:
        """Blocks of the launch."""
        return self.row_blocks(kernel) * kernel.problems

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule."""
        return {
            "rows": self.rows, "step": self.step, "warps": self.warps, "stages": self.stages, "held": self.held,
            "instruction": str(self.instruction), "lanes": self.lanes, "threads": self.threads,
        }  # fmt: skip


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
