"""Scans, and places along an axis, in one kernel: how many threads share a line, and how many lines a block has.

There is nothing to reuse, so that tiles need no growth: RATIONAL prices every number of threads that a line has work
for, and a line for each thread where lines lie side by side. On processors cores take blocks of lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from hal.support.errors import InputError
from roller.algorithms.chain import needed_sizes
from roller.construct.program import ProgramPart
from sokoban.kernel.form import KernelForm
from sokoban.kernel.line import LineKernel
from sokoban.kernel.problem import Problem
from sokoban.model.cpu.lines import estimate_cpu_lines
from sokoban.model.cpu.scatters import estimate_cpu_scatter
from sokoban.model.gpu.kinds.lines import estimate_lines
from sokoban.model.gpu.kinds.scatters import estimate_scatter
from sokoban.schedule.cutting import cut, cut_sizes, resize
from sokoban.schedule.patches import AHEAD, PLACES_AHEAD, LineSchedule, line_vector, scatter_vector
from sokoban.schedule.tile import TileSchedule

#: The name of the algorithm.
NAME = "line"

#: Threads that share a line, and those of a block.
THREADS = (1, 32, 64, 128, 256, 512, 1024)
#: Threads of parts of a warp, which share lines of which values are ranked: all look through their shares at once.
RANK_THREADS = (8, 16)
BLOCK_THREADS = (32, 64, 128, 256, 512, 1024)
#: Blocks of lines of a processor, for each core.
CORE_BLOCKS = (1, 4, 16)
#: Threads of a block, and rows of it, that add scattered rows; and the registers that its sums take of a thread.
SCATTER_THREADS, SCATTER_ROWS, MOST_SUMS = (32, 64, 128, 256, 512), (1, 2, 4, 8, 16), 64
#: Lines that are gone along to prove a kernel: a place is not missed by chance.
LEAST_LINES = 8


@dataclass(frozen=True)
class WholeLine:
    """An operator as one kernel of lines; see :class:`roller.algorithms.chain.Split`."""

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernel."""
        return (form.line_kernel,)

    def cut_down(self, form: KernelForm, schedules: Sequence[LineSchedule]) -> tuple[KernelForm, WholeLine]:
        """A few blocks of lines of several turns; the axis of lines keeps what it is divided by."""
        return resize(form, needed_sizes(form.sizes, [(form, line_sizes(form.line_kernel, schedules[0]))])), self

    def tolerance(self, form: KernelForm) -> float | None:
        """That of the dtype."""
        return None


def covering_sizes(form: KernelForm, schedule: TileSchedule | LineSchedule) -> dict[str, int]:
    """Sizes over which a kernel's schedule covers several blocks, of lines or of tiles."""
    if isinstance(schedule, LineSchedule):
        return line_sizes(form.line_kernel, schedule)
    return cut_sizes(form, schedule)


def line_sizes(kernel: LineKernel, schedule: LineSchedule) -> dict[str, int]:
    """Sizes over which a line has two full turns and its remainder, and lines fill two blocks and theirs."""
    if kernel.scatter is not None:
        return _scatter_sizes(kernel, schedule)
    turn = AHEAD if schedule.threads == 1 else schedule.threads * line_vector(kernel, schedule)
    sizes = {kernel.axis: cut(kernel.length, turn, max(2, -(-kernel.ranks // turn)))}
    if kernel.rank_axis is not None:
        sizes[kernel.rank_axis] = kernel.ranks
    left = max(LEAST_LINES, cut(kernel.lines, schedule.lines))
    for axis in reversed(kernel.row_axes):
        sizes[axis] = max(1, min(kernel.sizes[axis], left))
        left = -(-left // sizes[axis])
    return sizes


def _scatter_sizes(kernel: LineKernel, schedule: LineSchedule) -> dict[str, int]:
    """Sizes of two full turns of a block and their remainder, whose rows and columns fill two blocks and theirs."""
    assert kernel.scatter is not None
    turn = PLACES_AHEAD * max(32, schedule.threads)
    sizes = {kernel.axis: cut(kernel.length, turn), kernel.scatter.row: cut(kernel.lines, schedule.lines)}
    remaining = cut(kernel.columns, schedule.threads * scatter_vector(kernel))
    for axis in reversed(kernel.scatter.columns):
        sizes[axis] = max(1, min(kernel.sizes[axis], remaining))
        remaining = -(-remaining // sizes[axis])
    return sizes


def line_parts(form: KernelForm, device: DeviceSpec) -> list[ProgramPart]:
    """Kernels of a scan or place, best first.

    Raises:
        InputError: the device has no kernels.
    """
    if device.code_generator is None:
        raise InputError(form.expr.name, f"there are no kernels for {device.name}", "name a GPU or a processor")
    kernel = form.line_kernel
    on_gpu = device.teu.lane == "thread"
    if kernel.scatter is not None:
        schedules = _gpu_scatters(kernel, device) if on_gpu else _cpu_scatters(kernel, device)
        estimate = estimate_scatter if on_gpu else estimate_cpu_scatter
    else:
        schedules = _gpu_schedules(kernel, device) if on_gpu else _cpu_schedules(kernel, device)
        estimate = estimate_lines if on_gpu else estimate_cpu_lines
    parts = [
        ProgramPart(", ".join(schedule.cells[:2]), kernel, schedule, estimate(kernel, schedule, device), NAME)
        for schedule in dict.fromkeys(schedules)
    ]
    return sorted(parts, key=lambda part: part.estimate.seconds)


def _gpu_schedules(kernel: LineKernel, device: DeviceSpec) -> Iterator[LineSchedule]:
    """Threads that have something to do, in blocks that the device has room for."""
    for threads in (*THREADS, *(RANK_THREADS if kernel.rank_axis is not None else ())):
        shared = LineSchedule(threads=threads, lines=1)
        if threads > 32 and threads * line_vector(kernel, shared) >= 2 * kernel.length:
            continue
        for block in BLOCK_THREADS:
            if threads <= block <= device.limits.threads_per_block:
                lines = block // threads
                if lines == 1 or lines < 2 * kernel.lines:
                    yield LineSchedule(threads=threads, lines=lines)


def _gpu_scatters(kernel: LineKernel, device: DeviceSpec) -> Iterator[LineSchedule]:
    """Blocks of a few rows, whose threads have columns side by side, each so many sums as its registers hold; those
    beyond the columns look at places."""
    vector = scatter_vector(kernel)
    wide = 2 if kernel.expr.accumulate == "float64" else 1
    for threads in SCATTER_THREADS:
        for rows in SCATTER_ROWS:
            if rows * vector * wide <= MOST_SUMS and (rows == 1 or rows < 2 * kernel.lines):
                yield LineSchedule(threads=threads, lines=rows)


def _cpu_scatters(kernel: LineKernel, device: DeviceSpec) -> Iterator[LineSchedule]:
    """Blocks of rows for all cores, several each, whose sums lie in a core's own caches."""
    most = max(1, device.shared.capacity_bytes // (2 * DTYPE_BYTES[kernel.expr.accumulate] * kernel.columns))
    for count in CORE_BLOCKS:
        yield LineSchedule(threads=1, lines=max(1, min(most, -(-kernel.lines // (device.unit_count * count)))))


def _cpu_schedules(kernel: LineKernel, device: DeviceSpec) -> Iterator[LineSchedule]:
    """Blocks for all cores, several each."""
    for count in CORE_BLOCKS:
        yield LineSchedule(threads=1, lines=max(1, kernel.lines // (device.unit_count * count)))
