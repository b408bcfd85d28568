"""Schedules of gradients of attention: rows of a block's own that meet rows it walks, and how warps divide them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.attention_gradient import AttentionGradientKernel, SlopeProduct
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import FRAGMENT_ROWS, PIECE_BYTES, RowTiles, padded

#: Numbers of every query besides its row: the logarithm of the sum of its exponentials, and D.
QUERY_NUMBERS = 2
#: The same where warp groups multiply, whose sums begin with the second: of both rows of a fragment that a thread has.
GROUP_QUERY_NUMBERS = 3
#: Buffers of the numbers of queries that are walked, where single warps multiply: those of the next step are written
#: while this one's are read. Warp groups have as many as of what is walked.
NUMBER_BUFFERS = 2
#: Elements of a piece of 16 bits each: queries of a head, where slopes of its logits are written and read.
SLOPE_PIECE = 8
#: Bytes of the barriers of a buffer that warp groups walk: it is there, or used; and of those of a block's own tiles.
GRADIENT_BARRIERS_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class GradientSchedule(RowTiles):
    """Schedule of attention's gradient: a block holds ``rows`` rows of its own and walks others, ``step`` at a time.

    Attributes:
        step: rows of the other side at a step.
        shares: blocks that divide the results of the same rows, where warp groups multiply: with two, one makes dK and
            the other dV.
        columns: warps that have the same rows, where single warps multiply, and divide the columns of a step and those
            of the results: probabilities and gradients of logits pass from one to the other through shared memory.
    """

    WALKED = "walked"
    OPTION = ("shares", 1, ", dK and dV by different blocks")

    step: int
    shares: int = 1
    columns: int = 1

    @property
    def warp_rows(self) -> int:
        """Rows that a warp multiplies, alone or with the others that divide their columns."""
        return self.rows * self.columns // self.warps

    @property
    def text(self) -> str:
        """In words, as of all row tiles; and how many warps divide columns."""
        return super().text + (f", {self.columns} warps to a row" if self.columns > 1 else "")

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule; columns are left out where nothing divides them."""
        return super().to_json() | ({"columns": self.columns} if self.columns > 1 else {})

    def scalar_twin(self, problem: Any) -> GradientSchedule:
        """The schedule with multiply-adds, of which a grid of threads divides columns."""
        return super().scalar_twin(problem) if self.columns == 1 else replace(self, columns=1).scalar_twin(problem)

    def misfit(self, problem: AttentionGradientKernel | SlopeProduct) -> str | None:
        """Why no lowering makes a kernel of it for a gradient; None where one does."""
        attention = problem.attention
        if self.shares > 1 and not self.instruction.is_by_groups:
            return f"{self.shares} shares by {self.instruction}, whose warps divide columns instead"
        if self.columns > 1:
            widths = [padded(width) for width in (attention.head_dim, attention.value_size)]
            uneven = next((each for each in widths if each % (FRAGMENT_ROWS * self.columns)), None)
            if uneven is not None:
                return f"{self.columns} warps do not divide {uneven} columns into fragments of {FRAGMENT_ROWS}"
            if isinstance(problem, SlopeProduct):
                return f"{self.columns} warps to a row of a product of slopes, which passes nothing on"
        if not attention.slopes:
            return None
        if attention.queries % SLOPE_PIECE:
            return f"slopes of {attention.queries} queries are no multiple of {SLOPE_PIECE}"
        if self.instruction is Instruction.FMA:
            return "slopes need matrix instructions"
        if attention.of == "queries" and self.shares > 1:
            return f"{self.shares} shares of a product of slopes, which has one result"
        return None

    def blocks(self, kernel: AttentionGradientKernel | SlopeProduct) -> int:
        """Blocks of the launch."""
        return self.row_blocks(kernel) * kernel.problems * self.shares


@dataclass(frozen=True, kw_only=True)
class GradientFloats:
    """Layout of shared memory of a block that multiplies and adds, in floats.

    Attributes:
        depth, width: elements of a row of queries and keys, and of values and results, with zeros behind.
        own_values: where the block's own values, or gradients of results, begin, behind its queries or keys.
        step: where what is walked begins.
        step_values: where the values, or gradients of results, of a step begin.
        slopes, weights: where gradients of the logits and the probabilities of a step begin.
        numbers: where the numbers of the queries that are walked begin.
        total: all of it.
    """

    depth: int
    width: int
    own_values: int
    step: int
    step_values: int
    slopes: int
    weights: int
    numbers: int
    total: int

    @staticmethod
    def of(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> GradientFloats:
        """The layout of a schedule. Rows lie a piece more than their elements apart, in different banks."""
        piece = PIECE_BYTES // 4
        depth = padded(kernel.attention.head_dim, piece * schedule.lanes)
        width = padded(kernel.attention.value_size, piece * schedule.lanes)
        own_values = schedule.rows * (depth + piece)
        step = own_values + schedule.rows * (width + piece)
        step_values = step + schedule.step * (depth + piece)
        slopes = step_values + schedule.step * (width + piece)
        weights = slopes + schedule.rows * (schedule.step + piece)
        numbers = weights + kernel.is_of_keys * schedule.rows * (schedule.step + piece)
        return GradientFloats(
            depth=depth, width=width, own_values=own_values, step=step, step_values=step_values, slopes=slopes,
            weights=weights, numbers=numbers, total=numbers + kernel.is_of_keys * QUERY_NUMBERS * schedule.step,
        )  # fmt: skip

    @property
    def key_pitch(self) -> int:
        """From row to row of queries and keys."""
        return self.depth + PIECE_BYTES // 4

    @property
    def value_pitch(self) -> int:
        """From row to row of values and gradients of results."""
        return self.width + PIECE_BYTES // 4


def weight_pitch(schedule: GradientSchedule) -> int:
    """Floats from row to row of the probabilities of a step."""
    return schedule.step + PIECE_BYTES // 4


def gradient_shared_bytes(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> int:
    """Shared memory of a block: its own two tiles, ``stages`` of what it walks, numbers of queries that it walks,
    barriers of warp groups, and what warps that divide columns pass to each other."""
    if schedule.instruction is Instruction.FMA:
        return 4 * GradientFloats.of(kernel, schedule).total
    barriers = GRADIENT_BARRIERS_BYTES * (1 + schedule.stages) if schedule.instruction.is_by_groups else 0
    return factor_place(kernel, schedule) + factor_bytes(kernel, schedule) + barriers


def number_place(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> int:
    """Bytes in front of the numbers of queries, where matrix instructions multiply."""
    attention = kernel.attention
    row = sum(schedule.pitch_bytes(width, attention.dtype) for width in (attention.head_dim, attention.value_size))
    return (schedule.rows + schedule.stages * schedule.step) * row


def number_bytes(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> int:
    """Bytes of the numbers of queries that are walked, where matrix instructions multiply."""
    by_groups = schedule.instruction.is_by_groups
    numbers = schedule.stages * GROUP_QUERY_NUMBERS if by_groups else NUMBER_BUFFERS * QUERY_NUMBERS
    return kernel.is_of_keys * numbers * schedule.step * DTYPE_BYTES["float32"]


def factor_pitch(schedule: GradientSchedule) -> int:
    """Bytes from row to row of the factors that warps pass to each other: a piece more than the row."""
    return schedule.step * DTYPE_BYTES["float16"] + PIECE_BYTES


def factor_place(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> int:
    """Bytes in front of the factors that warps pass to each other."""
    return number_place(kernel, schedule) + number_bytes(kernel, schedule)


def factor_bytes(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> int:
    """Bytes of the factors that warps pass to each other: gradients of logits and, of keys, probabilities."""
    tables = (1 + kernel.is_of_keys) * (schedule.columns > 1)
    return tables * schedule.rows * factor_pitch(schedule)


def slope_shared_bytes(kernel: SlopeProduct, schedule: GradientSchedule) -> int:
    """Shared memory of a block that multiplies slopes and keys: ``stages`` tiles of both, barriers of warp groups."""
    attention = kernel.attention
    row = sum(schedule.pitch_bytes(width, attention.dtype) for width in (schedule.rows, attention.head_dim))
    return schedule.stages * (schedule.step * row + GRADIENT_BARRIERS_BYTES * schedule.instruction.is_by_groups)
