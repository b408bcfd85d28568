"""Schedules of attention kernels: tiles of queries that walk tiles of keys, and how warps divide them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.attention import AttentionKernel, GroupedHeads, SliceSum
from sokoban.kernel.attention_gradient import AttentionGradientKernel, SlopeProduct
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pages import bulk_misfit
from sokoban.kernel.pair import ProductPair
from sokoban.schedule.schedule import KernelSchedule
from sokoban.schedule.tile import COPYING_THREADS
from sokoban.schedule.warp_groups import PANEL_BYTES

#: Threads of a warp, and warps of a group.
LANES, GROUP_WARPS = 32, 4
#: Threads that share a row where multiply-adds stand in for matrix instructions.
TWIN_LANES = 8
#: Lanes that hold a row of a fragment of sums.
FRAGMENT_LANES = 4
#: Rows of a fragment of ``mma.sync``, its depth, and bytes that one lane copies at a time.
FRAGMENT_ROWS, FRAGMENT_DEPTH, PIECE_BYTES = 16, 16, 16
_R = TypeVar("_R", bound="RowTiles")

#: Pieces of a row of a panel, in which warp groups read a tile.
PANEL_PIECES = PANEL_BYTES // PIECE_BYTES

#: Buffers of keys and values that warp groups walk, and most that any kernel has.
GROUP_STAGES = (2, 3, 4)
MOST_STAGES = max(GROUP_STAGES)
#: Columns of ones behind the values of a step, whose sums are those of a row's exponentials: the fewest that an
#: instruction multiplies; and the elements of a row of values in front of them, a panel. Bytes of ones for a product,
#: as many rows as it is deep.
ONE_COLUMNS, ONES_BEHIND, ONES_BYTES = 8, 64, 16 * 128
#: Blocks of problems that start side by side, at least, five or six for every unit of the boards with matrix
#: instructions, so that units end together; and most bytes of one head's rows that all of these walk, two thirds of the
#: second cache of an H100.
BAND_BLOCKS, BAND_BYTES = 768, 32 * 2**20
#: Bytes of the barriers of a buffer: its keys are there, or used, and so are its values; and those of the queries.
BARRIERS_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class RowTiles(KernelSchedule):
    """Common part of schedules of attention, its gradients and pairs of products: blocks of rows, which lanes share,
    and which walk rows or columns of another tensor.

    Attributes:
        rows: of a block.
        warps: warps of a block that multiply; each has as many rows as any other, and all of a step.
        stages: buffers of what is walked: with one, its parts arrive in turns; with more, whole steps arrive during the
            one before them.
        instruction: what multiplies.
        lanes: threads that share a row; those of a fragment's row where matrix instructions multiply.
    """

    #: What a step walks, as tables and manifests call it; its field; and as texts call it.
    WALKED: ClassVar[str]
    STEP: ClassVar[str] = "step"
    NOUN: ClassVar[str] = ""
    #: The option of matrix instructions, its value for multiply-adds, and what texts say of any other.
    OPTION: ClassVar[tuple[str, Any, str]]

    rows: int
    warps: int
    stages: int
    instruction: Instruction
    lanes: int = FRAGMENT_LANES

    @property
    def warp_rows(self) -> int:
        """Rows that a warp multiplies."""
        return self.rows // self.warps

    @property
    def walked(self) -> int:
        """Rows or columns that a step walks."""
        return int(getattr(self, self.STEP))

    def scalar_twin(self: _R, problem: Any) -> _R:
        """The schedule with multiply-adds in place of matrix instructions."""
        if self.instruction is Instruction.FMA:
            return self
        option, without, _ = self.OPTION
        return replace(self, instruction=Instruction.FMA, lanes=TWIN_LANES, stages=1, **{option: without})

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule."""
        option = self.OPTION[0]
        return {
            "rows": self.rows, self.STEP: self.walked, "warps": self.warps, "stages": self.stages,
            option: getattr(self, option), "instruction": str(self.instruction), "lanes": self.lanes,
            "threads": self.threads,
        }  # fmt: skip

    @property
    def text(self) -> str:
        """In words: ``64 rows by 64 keys, 4 warps, 2 stages, queries held``."""
        warps = "1 warp" if self.warps == 1 else f"{self.warps} warps"
        text = f"{self.rows} rows by {self.walked}{self.NOUN}, {warps}"
        if self.instruction is Instruction.FMA:
            return f"{text}, {self.lanes} threads a row"
        groups = " by warp groups" if self.instruction.is_by_groups else ""
        stages = "1 stage" if self.stages == 1 else f"{self.stages} stages"
        option, without, words = self.OPTION
        return f"{text}{groups}, {stages}" + (words if getattr(self, option) != without else "")

    def tiles(self, device: DeviceSpec) -> dict[str, dict[str, int]]:
        """Tiles at each memory layer of a device, by axis."""
        return {
            device.registers.name: {"row": self.warp_rows, self.WALKED: self.walked},
            device.shared.name: {"row": self.rows, self.WALKED: self.walked},
        }

    @property
    def cells(self) -> tuple[str, str, str]:
        """Tile of a block, of a warp and of a step, for tables."""
        return f"row={self.rows}", f"row={self.warp_rows} of a warp", f"{self.WALKED}={self.walked}"

    @property
    def threads(self) -> int:
        """Threads of a block, those of the warp group that copies for others among them."""
        return self.warps * LANES + (COPYING_THREADS if self.instruction.is_by_groups else 0)

    def pitch_bytes(self, width: int, dtype: str) -> int:
        """Bytes that a row of a staged tile takes: whole panels where warp groups read it."""
        if self.instruction.is_by_groups:
            return padded(width * DTYPE_BYTES[dtype], PANEL_BYTES)
        return pitch_bytes(width, dtype)

    @property
    def thread_rows(self) -> int:
        """Rows that a thread has a part of."""
        return self.rows * self.lanes // self.threads

    def row_blocks(self, kernel: AttentionKernel | AttentionGradientKernel | SlopeProduct | ProductPair) -> int:
        """Blocks along the rows of one problem."""
        return -(-kernel.rows // self.rows)


@dataclass(frozen=True, kw_only=True)
class AttentionSchedule(RowTiles):
    """Schedule of attention: a block holds ``rows`` rows of queries and walks the keys, ``keys`` at a step.

    Attributes:
        keys: keys of a step. Groups of warps have one more group, which copies.
        held: whether the queries stay in registers between steps; they are read from shared memory again otherwise.
    """

    WALKED = "key"
    STEP = "keys"
    NOUN = " keys"
    OPTION = ("held", False, ", queries held")

    keys: int
    held: bool

    def misfit(self, problem: AttentionKernel) -> str | None:
        """Why no lowering makes a kernel of it for an attention; None where one does."""
        return bulk_misfit(problem, self.keys) if self.instruction.is_by_groups else None

    def blocks(self, kernel: AttentionKernel) -> int:
        """Blocks of the launch."""
        return self.row_blocks(kernel) * kernel.problems * kernel.slices


@dataclass(frozen=True)
class SliceSumSchedule(KernelSchedule):
    """Schedule of a sum of slices: a warp per row, ``threads / 32`` of them in a block."""

    threads: int

    @property
    def cells(self) -> tuple[str, str, str]:
        """Rows of a block and of a warp, for tables."""
        return f"row={self.threads // LANES}", "row=1 of a warp", ""

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


@dataclass(frozen=True, kw_only=True)
class SharedFloats:
    """Layout of shared memory of a block that multiplies and adds, in floats.

    Tiles of keys and of values take the same place one after the other.

    Attributes:
        depth, width: elements of a row of queries and keys, and of values, with zeros behind.
        key_pitch, weight_pitch: from row to row of queries and keys, and of exponentials; values have their width.
        step: where keys and values begin, behind the queries.
        weights: where the exponentials of a step begin.
        exchange: where the threads of a row begin to tell each other.
        total: all of it.
    """

    depth: int
    width: int
    key_pitch: int
    weight_pitch: int
    step: int
    weights: int
    exchange: int
    total: int

    @staticmethod
    def of(kernel: AttentionKernel, schedule: AttentionSchedule) -> SharedFloats:
        """The layout of a schedule."""
        attention = kernel.attention
        return SharedFloats.of_tiles(
            schedule.rows, schedule.keys, attention.head_dim, attention.value_size, schedule.lanes,
            exchanged=schedule.rows * schedule.lanes,
        )  # fmt: skip

    @staticmethod
    def of_tiles(rows: int, keys: int, head_dim: int, value_dim: int, lanes: int, *, exchanged: int) -> SharedFloats:
        """The layout of tiles, with so many floats ``exchanged``. Rows of keys lie a piece more than their elements
        apart, in different banks."""
        piece = PIECE_BYTES // 4
        depth, width = padded(head_dim, piece), padded(value_dim, piece * lanes)
        step = rows * (depth + piece)
        weights = step + keys * max(depth + piece, width)
        exchange = weights + rows * (keys + piece)
        return SharedFloats(
            depth=depth, width=width, key_pitch=depth + piece, weight_pitch=keys + piece, step=step,
            weights=weights, exchange=exchange, total=exchange + exchanged,
        )  # fmt: skip


def shared_bytes(kernel: AttentionKernel, schedule: AttentionSchedule) -> int:
    """Shared memory of a block: the tile of queries, and ``stages`` tiles of keys and of values."""
    if schedule.instruction is Instruction.FMA:
        return 4 * SharedFloats.of(kernel, schedule).total
    attention = kernel.attention
    keys, values = (
        schedule.pitch_bytes(width, attention.dtype) for width in (attention.head_dim, attention.value_size)
    )
    barriers = BARRIERS_BYTES * (1 + schedule.stages) if schedule.instruction.is_by_groups else 0
    ones = ONES_BYTES if one_columns(kernel, schedule) else 0
    return schedule.rows * keys + schedule.stages * schedule.keys * (keys + values) + ones + barriers


def problem_band(kernel: GroupedHeads, row_blocks: int) -> int:
    """Problems whose blocks start side by side, the longest walks of all of them first; 1 where all walks are alike."""
    attention = kernel.attention
    if not attention.causal:
        return 1
    row = (attention.head_dim + attention.value_size) * DTYPE_BYTES[attention.dtype]
    most = BAND_BYTES // (row * max(attention.key_count, attention.queries))
    band = max(1, min(kernel.problems, -(-BAND_BLOCKS // row_blocks), most))
    # Bands alike, if they are half as large: kernels then divide by a constant.
    return next((size for size in range(band, band // 2, -1) if kernel.problems % size == 0), band)


def one_columns(kernel: AttentionKernel, schedule: AttentionSchedule) -> int:
    """Columns of ones that warp groups multiply behind values of a whole panel, whose product with the exponentials is
    their sum over a row: an eighth of a product more in place of an addition for every logit. Wider rows have more
    products than exponentials to wait for."""
    is_panel = padded(kernel.attention.value_size) == ONES_BEHIND
    return ONE_COLUMNS if schedule.instruction.is_by_groups and is_panel else 0
