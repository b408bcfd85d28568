"""Schedules of patch transforms and of kernels of lines, and what a schedule of any kernel is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sokoban.kernel.line import LineKernel
from sokoban.kernel.patches import PatchTransform
from sokoban.language.expression import AffineIndex, Load, loads
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.attention import AttentionSchedule, SliceSumSchedule
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.pair import PairSchedule
from sokoban.schedule.schedule import KernelSchedule
from sokoban.schedule.tile import TileSchedule

#: Elements that a thread with a line of its own has under way.
AHEAD = 8
#: Times 32 places of scattered rows that a warp has under way; of more, each with a loop of its own, registers spill.
PLACES_AHEAD = 4
#: Scattered rows of a list that a thread reads before it adds the first of them.
ROWS_AHEAD = 4
#: Most adjacent elements of a thread.
MOST_ADJACENT = 8
#: Most elements of a thread's share of a line that stay in registers while ranks are looked for.
MOST_REMEMBERED = 32


@dataclass(frozen=True)
class PatchSchedule(KernelSchedule):
    """Schedule of a patch transform: blocks of ``threads`` threads, each with a patch of its own."""

    threads: int

    @property
    def cells(self) -> tuple[str, str, str]:
        """Patches of a block and of a thread, for tables."""
        return f"{self.threads} patches", "a patch", ""

    def blocks(self, transform: PatchTransform) -> int:
        """Blocks of the launch: the transform's patches divided by ``threads``, rounded up."""
        return -(-transform.points // self.threads)

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule."""
        return {"threads": self.threads}


@dataclass(frozen=True, kw_only=True)
class LineSchedule(KernelSchedule):
    """Schedule of a kernel of lines.

    Attributes:
        threads: threads that share a line, side by side along it; one goes along a line of its own. Of scattered rows
            they lie side by side along the columns of a row.
        lines: lines of a block, side by side along the last of the other axes; of scattered rows those whose sums each
            of its threads has.
    """

    threads: int
    lines: int

    @property
    def uses_matrix(self) -> bool:
        """False: nothing is multiplied by matrix instructions."""
        return False

    @property
    def cells(self) -> tuple[str, str, str]:
        """Lines of a block and of a thread, for tables."""
        each = "a line" if self.threads == 1 else f"1/{self.threads} line"
        return f"{self.lines} line{'s' * (self.lines > 1)}", each, ""

    def blocks(self, kernel: LineKernel) -> int:
        """Blocks of the launch."""
        return -(-kernel.lines // self.lines) * column_blocks(kernel, self)

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule."""
        return {"threads": self.threads, "lines": self.lines}


def adjacent_loads(kernel: LineKernel) -> tuple[Load, ...]:
    """Loads whose elements lie side by side along a line, in the kernel's order of it."""
    return tuple(load for load in kernel.reads if _lies_along(kernel, load) and load.pad is None)


def _lies_along(kernel: LineKernel, load: Load) -> bool:
    if not load.indices:
        return False
    *outer, innermost = load.indices
    return (
        innermost.terms == ((kernel.axis, 1),)
        and not innermost.offset
        and not any(index.coefficient(kernel.axis) for index in outer)
    )


def is_stored_along(kernel: LineKernel) -> bool:
    """True if the results of a line lie side by side."""
    return kernel.is_scan and kernel.final.axes[-1] == kernel.axis


def line_vector(kernel: LineKernel, schedule: LineSchedule) -> int:
    """Adjacent elements of a line that one of several threads takes at a time: by one access of 16 bytes of the widest
    operand, where lines and rows of memory consist of so many; one where nothing lies along lines. Of ranks all threads
    have some, where there are as many."""
    tensors = kernel.expr.tensor_by_name
    along = [tensors[load.tensor] for load in adjacent_loads(kernel)]
    along += [kernel.output] if is_stored_along(kernel) else []
    if schedule.threads == 1 or not along:
        return 1
    vector = min(MOST_ADJACENT, VECTOR_BYTES // max(tensor.element_bytes for tensor in along))
    if kernel.rank_axis is not None:
        vector = min(vector, 1 << max(1, kernel.length // schedule.threads).bit_length() - 1)
    while vector > 1 and (kernel.length % vector or any(tensor.shape[-1] % vector for tensor in along)):
        vector //= 2
    return vector


def turns(kernel: LineKernel, schedule: LineSchedule) -> int:
    """Vectors of a line that each of its threads takes."""
    return -(-kernel.length // (schedule.threads * line_vector(kernel, schedule)))


def keeps_share(kernel: LineKernel, schedule: LineSchedule) -> bool:
    """True if a thread's share of a line stays in its registers while ranks are looked for."""
    if schedule.threads == 1:
        return kernel.length <= MOST_REMEMBERED
    return turns(kernel, schedule) * line_vector(kernel, schedule) <= MOST_REMEMBERED


def scatter_vector(kernel: LineKernel) -> int:
    """Adjacent columns of a thread of scattered rows: as many as float32 has in 16 bytes, since their sums in many rows
    are registers, and no more than the widest operand that lies along them has."""
    scatter = kernel.scatter
    assert scatter is not None
    last, tensors = scatter.columns[-1], kernel.expr.tensor_by_name
    if kernel.final.axes[-1] != last:
        return 1
    along = [kernel.output, *(tensors[load.tensor] for load in column_loads(kernel))]
    vector = VECTOR_BYTES // max(4, *(tensor.element_bytes for tensor in along))
    while vector > 1 and (kernel.sizes[last] % vector or any(tensor.shape[-1] % vector for tensor in along)):
        vector //= 2
    return vector


def scatter_shared_bytes(schedule: LineSchedule) -> int:
    """Shared memory of a block of scattered rows: two lists of places of each of its warps, where it has several."""
    warps = schedule.threads // 32
    return 2 * warps * (32 * PLACES_AHEAD + 1) * 4 if warps > 1 else 0


def column_loads(kernel: LineKernel) -> tuple[Load, ...]:
    """Loads of what is added whose elements lie side by side along the last axis of columns."""
    assert kernel.scatter is not None
    last = kernel.scatter.columns[-1]
    return tuple(
        load
        for load in loads(kernel.scatter.value)
        if load.pad is None and not load.places and load.indices and load.indices[-1] == AffineIndex.axis(last)
        if not any(index.coefficient(last) for index in load.indices[:-1])
    )


def column_blocks(kernel: LineKernel, schedule: LineSchedule) -> int:
    """Blocks that share the columns of scattered rows; 1 elsewhere."""
    if kernel.scatter is None or schedule.threads == 1:
        return 1
    return -(-kernel.columns // (schedule.threads * scatter_vector(kernel)))


def lies_across(kernel: LineKernel) -> bool:
    """True if neighbouring lines lie side by side in the output: lanes of a processor's vectors have a line each."""
    return bool(kernel.row_axes) and kernel.final.axes[-1] == kernel.row_axes[-1] and kernel.axis in _strided(kernel)


def _strided(kernel: LineKernel) -> tuple[str, ...]:
    """The axis of lines, where no operand lies along it."""
    return () if any(_lies_along(kernel, load) for load in kernel.reads) else (kernel.axis,)


#: How one kernel of a program runs, whatever kind of problem it solves.
Schedule = (
    TileSchedule | PatchSchedule | AttentionSchedule | SliceSumSchedule | GradientSchedule | PairSchedule | LineSchedule
)
