"""Schedules of attention kernels: tiles of queries that walk tiles of keys, and how warps divide them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sokoban.kernel.attention import AttentionKernel, SliceSum
from sokoban.kernel.instructions import Instruction
from hal.spec.parts import DTYPE_BYTES

#: Threads of a warp.
LANES = 32
#: Rows of a fragment of ``mma.sync``, its depth, and bytes that one lane copies at a time.
FRAGMENT_ROWS, FRAGMENT_DEPTH, PIECE_BYTES = 16, 16, 16


@dataclass(frozen=True, kw_only=True)
class AttentionSchedule:
    """How an attention kernel runs: a block holds ``rows`` rows of queries and walks the keys, ``keys`` at a step.

    Attributes:
        rows: queries of a block, of all heads of a group.
        keys: keys of a step.
        warps: warps of a block; each has as many rows as any other, and all keys of a step.
        stages: buffers of keys and values: with one, keys arrive while values are used and the other way round; with
            two, a whole step arrives beside the one before it.
        held: whether the queries stay in registers between steps; they are read from shared memory again otherwise.
        instruction: what multiplies.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    held: bool
    instruction: Instruction

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * LANES

    def row_blocks(self, kernel: AttentionKernel) -> int:
        """Blocks along the rows of one problem."""
        return -(-kernel.rows // self.rows)

    def blocks(self, kernel: AttentionKernel) -> int:
        """Blocks of the launch."""
        return self.row_blocks(kernel) * kernel.problems * kernel.slices

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule."""
        return {
            "rows": self.rows, "keys": self.keys, "warps": self.warps, "stages": self.stages, "held": self.held,
            "instruction": str(self.instruction), "threads": self.threads,
        }  # fmt: skip


@dataclass(frozen=True)
class SliceSumSchedule:
    """How slices are brought together: a warp per row, ``threads / 32`` of them in a block."""

    threads: int

    def blocks(self, kernel: SliceSum) -> int:
        """Blocks of the launch."""
        return -(-kernel.rows // (self.threads // LANES))

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule."""
        return {"threads": self.threads, "sums": "slices"}


def padded(width: int, multiple: int = FRAGMENT_DEPTH) -> int:
    """A width as tiles of matrix instructions have it.

    >>> padded(80), padded(72)
    (80, 80)
    """
    return -(-width // multiple) * multiple


def pitch_bytes(width: int, dtype: str) -> int:
    """Bytes from one row of a staged tile to the next: a piece more than the row, so that eight rows lie in all banks.

    >>> pitch_bytes(64, "float16")
    144
    """
    return padded(width) * DTYPE_BYTES[dtype] + PIECE_BYTES


def shared_bytes(kernel: AttentionKernel, schedule: AttentionSchedule) -> int:
    """Shared memory of a block: the tile of queries, and ``stages`` tiles of keys and of values."""
    attention = kernel.attention
    keys, values = (pitch_bytes(width, attention.dtype) for width in (attention.head_dim, attention.value_size))
    return schedule.rows * keys + schedule.stages * schedule.keys * (keys + values)
