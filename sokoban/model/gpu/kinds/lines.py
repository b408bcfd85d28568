"""RATIONAL for kernels of lines: what threads do with every element, and what a turn waits for.

A piece of a line is loaded, accumulated and exchanged before the next one is asked for, so that a turn takes the
latency of memory, of the sums of a thread one after the other, of ten shuffles and of a barrier. As many blocks as a
unit holds wait at the same time.

Ranks are looked for one after the other: threads of a line compare by the shuffles of a place, and one of them goes on
with the second of its share, or looks through it again, out of registers or out of the caches. Nothing was chosen on
kernels of lines: latencies and overlaps are those of :mod:`sokoban.model.gpu.stages`, a shuffle's that of shared memory
(Z. Jia and others, "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018, tables 3.1 and 4.1: 19
cycles and more, arithmetic 4).
"""

from __future__ import annotations

import math

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.instructions import value_instructions
from sokoban.kernel.line import LineKernel
from sokoban.kernel.regions import read_bytes
from sokoban.language.expression import AffineIndex
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.breakdown import DRAM_OVERLAP, STAGES, UNHIDDEN, UNHIDDEN_WAIT, soft_maximum
from sokoban.model.gpu.fetch import LINE_WAVEFRONTS
from sokoban.model.gpu.issue import BODY_INSTRUCTIONS, STEP_INSTRUCTIONS
from sokoban.model.gpu.kinds.patches import resident_blocks
from sokoban.model.gpu.occupancy import OVERHEAD_REGISTERS
from sokoban.model.gpu.row_work import EXCHANGE_INSTRUCTIONS
from sokoban.model.gpu.stages import BARRIER_CYCLES, DEFAULT_LATENCY_SECONDS, LOADED_LATENCY
from sokoban.schedule.patches import (
    AHEAD,
    LineSchedule,
    adjacent_loads,
    is_stored_along,
    keeps_share,
    line_vector,
    turns,
)

#: Cycles of a shuffle, and of an operation whose result the next one needs.
SHUFFLE_CYCLES, CHAINED_CYCLES = 22.0, 4.0
#: Shuffles by which a warp brings its threads together, and the one that hands on what comes before a thread.
WARP_SHUFFLES = 5
#: Instructions by which a value is compared with the best so far, and taken.
PLACE_INSTRUCTIONS = 8.0
#: Bytes of a line of L1.
_LINE_BYTES = 128


def estimate_lines(kernel: LineKernel, schedule: LineSchedule, device: DeviceSpec) -> Estimate:
    """The predicted time of a kernel of lines on a GPU; it takes infinite time where no block fits."""
    block_threads = schedule.threads * schedule.lines
    registers = line_registers(kernel, schedule)
    resident = resident_blocks(block_threads, registers, device)
    blocks, lanes = schedule.blocks(kernel), device.warp_lanes
    busiest_blocks = -(-blocks // device.unit_count)
    running = max(1, min(resident, busiest_blocks))
    rounds = busiest_blocks / running
    busiest_warps = -(-(-(-block_threads // lanes) * running) // device.teu.group_size)
    work = _Work(kernel, schedule)
    count = _turns(kernel, schedule)
    clock = device.clocks.boost_hz
    l2, block_bytes = device.l2 or device.dram, _moved_bytes(kernel, schedule, device) / blocks
    passes_per_second = device.shared.bandwidth_bytes_per_second / device.unit_count / _LINE_BYTES
    warps = -(-block_threads // lanes) * running
    busy = {
        "compute": work.arithmetic * 2.0 * lanes / (device.peak_flops(_rated(kernel, device)) / device.teu_count)
        * busiest_warps,
        "issue": work.issued / clock * busiest_warps,
        "shared": warps * _passes(kernel, schedule, lanes) / passes_per_second,
        "l2": block_bytes * running / (l2.bandwidth_bytes_per_second / device.unit_count),
    }  # fmt: skip
    together = max(busy.values()) + UNHIDDEN * (sum(busy.values()) - busy["issue"] - max(busy.values()))
    together = max(together, max(busy.values()))
    memory = (device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS) * LOADED_LATENCY
    nearer = (l2.latency_seconds or memory) if not keeps_share(kernel, schedule) else 0.0
    waiting = count * (memory + work.chained_cycles / clock)
    waiting += work.rank_rounds * work.round_cycles / clock
    waiting += work.rank_looks * (work.look_cycles / clock + work.look_reads * nearer)
    alone = waiting + together / running
    unfilled = UNHIDDEN_WAIT * min(waiting, together / running) / running
    units = rounds * (max(together, alone) + unfilled)
    dram = (kernel.output.size_bytes + sum(read_bytes(kernel.expr, tensor) for tensor in kernel.inputs)) / (
        device.dram.bandwidth_bytes_per_second
    )
    starting = blocks * device.block_launch_seconds
    stages = {stage: rounds * seconds for stage, seconds in busy.items()}
    stages |= {"dram": dram, "latency": rounds * alone, "block_launch": starting}
    seconds = max(float(soft_maximum(np.array([units]), np.array([dram]), DRAM_OVERLAP)[0]), starting)
    return Estimate(
        seconds=seconds + device.launch_overhead_seconds if resident else math.inf,
        bound=max(STAGES, key=lambda stage: stages[stage]),
        stage_seconds={stage: stages[stage] for stage in STAGES},
        registers=registers,
        shared_bytes=0 if schedule.threads <= lanes else 2 * block_threads // lanes * 8,
        blocks_per_unit=resident,
        wave_count=-(-blocks // (max(1, resident) * device.unit_count)),
    )


def line_registers(kernel: LineKernel, schedule: LineSchedule) -> int:
    """Registers of a thread: the values of a turn, what they are made of, and addresses."""
    values = AHEAD if schedule.threads == 1 else line_vector(kernel, schedule)
    if kernel.rank_axis is not None and keeps_share(kernel, schedule):
        values *= 1 if schedule.threads > 1 else -(-kernel.length // AHEAD)
        values *= turns(kernel, schedule) if schedule.threads > 1 else 1
    wide = 2 if kernel.expr.accumulate == "float64" else 1
    return OVERHEAD_REGISTERS + values * wide * (1 + len(kernel.reads)) + 4 * wide


class _Work:
    """Work of a thread: arithmetic and all instructions of its line, and cycles of a turn that nothing shortens."""

    def __init__(self, kernel: LineKernel, schedule: LineSchedule) -> None:
        vector, count = line_vector(kernel, schedule), _turns(kernel, schedule)
        each = AHEAD if schedule.threads == 1 else vector
        elements = count * each
        keeps_two = kernel.rank_axis is not None and schedule.threads > 1
        combining = 1.0 if kernel.is_scan else PLACE_INSTRUCTIONS * (1 + keeps_two)
        # Threads that share a scan accumulate each of their elements twice: to know its total, and behind the others.
        again = 2.0 if kernel.is_scan and schedule.threads > 1 else 1.0
        final = value_instructions(kernel.final.value)
        self.arithmetic = elements * (value_instructions(kernel.body) + combining * again)
        self.arithmetic += final * (elements if kernel.is_scan else kernel.ranks)
        wide = adjacent_loads(kernel)
        accesses = sum(elements / (vector if load in wide else 1) for load in kernel.reads)
        accesses += (elements / (vector if is_stored_along(kernel) else 1)) if kernel.is_scan else kernel.ranks
        warps = max(1, schedule.threads // 32)
        exchanges = 0 if schedule.threads == 1 else count if kernel.is_scan else kernel.ranks
        shared_by = min(WARP_SHUFFLES, schedule.threads.bit_length() - 1)
        compared = 1.0 if kernel.is_scan else PLACE_INSTRUCTIONS
        exchange = (shared_by + 1) * (2.0 + compared) + (EXCHANGE_INSTRUCTIONS + 2.0 * warps) * (warps > 1)
        self.issued = self.arithmetic + accesses + exchanges * exchange + count * STEP_INSTRUCTIONS + BODY_INSTRUCTIONS
        chain = each * CHAINED_CYCLES * combining * again
        shuffles = (shared_by + 1) * (SHUFFLE_CYCLES + CHAINED_CYCLES)
        meeting = shuffles + (BARRIER_CYCLES + warps * CHAINED_CYCLES) * (warps > 1)
        self.chained_cycles = chain + (0.0 if kernel.rank_axis else meeting * exchanges / count)
        self._look_again(kernel, schedule, elements, meeting, warps)

    def _look_again(
        self, kernel: LineKernel, schedule: LineSchedule, elements: float, meeting: float, warps: int
    ) -> None:
        """Rounds of ranks, one after the other, and looks through a share: cycles and reads that each waits for. A
        thread with a line of its own looks through it in every round; of those that share one a single thread does,
        where it has no second to go on with."""
        alone, keeps = schedule.threads == 1, keeps_share(kernel, schedule)
        self.rank_rounds = 0 if kernel.rank_axis is None else kernel.ranks - 1 if alone else kernel.ranks
        self.rank_looks = _looks(kernel, schedule)
        self.look_reads = 0.0 if keeps else elements / AHEAD
        compared = 2.0 if alone else 3.0
        looking = elements * compared * PLACE_INSTRUCTIONS
        looking += 0.0 if keeps else elements * value_instructions(kernel.body)
        self.round_cycles, self.look_cycles = 0.0 if alone else meeting, looking
        self.arithmetic += self.rank_looks * looking / warps
        self.issued += self.rank_looks * looking / warps


def _looks(kernel: LineKernel, schedule: LineSchedule) -> float:
    """Times that shares of a line are looked through again, where its best are anywhere: a thread keeps two of its own,
    so that one that has m of the ranks, a number by Poisson's law, looks for every second of them."""
    if kernel.rank_axis is None:
        return 0.0
    if schedule.threads == 1:
        return float(kernel.ranks - 1)
    each = kernel.ranks / schedule.threads
    return schedule.threads * (each / 2 - (1 - math.exp(-2 * each)) / 4)


def _turns(kernel: LineKernel, schedule: LineSchedule) -> int:
    """Waits for memory of a thread along its line."""
    return -(-kernel.length // AHEAD) if schedule.threads == 1 else turns(kernel, schedule)


def _rated(kernel: LineKernel, device: DeviceSpec) -> str:
    return kernel.expr.accumulate if kernel.expr.accumulate in device.dtypes else "float32"


def _accesses(kernel: LineKernel) -> list[tuple[str, tuple[AffineIndex, ...]]]:
    """Tensors of an element for each of the line's, and their indices."""
    stored = [(kernel.output.name, tuple(AffineIndex.axis(axis) for axis in kernel.final.axes))] * kernel.is_scan
    return [*((load.tensor, load.indices) for load in kernel.reads), *stored]


def _stride_bytes(kernel: LineKernel, tensor: str, indices: tuple[AffineIndex, ...], axis: str) -> int:
    """Bytes from one step along an axis to the next."""
    shape = kernel.expr.tensor_by_name[tensor].shape
    strides = (index.coefficient(axis) * math.prod(shape[position + 1 :]) for position, index in enumerate(indices))
    return abs(sum(strides)) * kernel.expr.tensor_by_name[tensor].element_bytes


def _moved_bytes(kernel: LineKernel, schedule: LineSchedule, device: DeviceSpec) -> float:
    """Bytes to and from L2: elements that lie apart for neighbouring threads take a transaction each, but for lines of
    the same block, and elements of the same thread's turn, that share it."""
    transaction = (device.l2 or device.dram).transaction_bytes
    elements, total = float(kernel.lines * kernel.length), float(kernel.output.size_bytes)
    for tensor, indices in _accesses(kernel):
        element = kernel.expr.tensor_by_name[tensor].element_bytes
        along = _stride_bytes(kernel, tensor, indices, kernel.axis)
        across = _stride_bytes(kernel, tensor, indices, kernel.row_axes[-1]) if kernel.row_axes else 0
        # Neighbours by the direction in which threads lie, then by what else a block does at once.
        near = [along, across] if schedule.threads > 1 else [across, along]
        counts = [schedule.threads, schedule.lines] if schedule.threads > 1 else [schedule.lines, AHEAD]
        sharing = max(min(count, transaction / stride) if stride else count
                      for stride, count in zip(near, counts, strict=True))  # fmt: skip
        total += elements * _reads(kernel, schedule) * max(min(element, transaction), transaction / max(1.0, sharing))
    return total


def _reads(kernel: LineKernel, schedule: LineSchedule) -> float:
    """Times that an element is read: once, and whenever a share is looked through again that is not in registers."""
    if kernel.rank_axis is None or keeps_share(kernel, schedule):
        return 1.0
    return 1.0 + _looks(kernel, schedule) / schedule.threads


def _passes(kernel: LineKernel, schedule: LineSchedule, lanes: int) -> float:
    """Passes of a warp through L1 for its share of lines."""
    vector, wide = line_vector(kernel, schedule), adjacent_loads(kernel)
    elements = _turns(kernel, schedule) * (AHEAD if schedule.threads == 1 else vector)
    direction = kernel.axis if schedule.threads > 1 else kernel.row_axes[-1] if kernel.row_axes else kernel.axis
    total = 0.0
    for tensor, indices in _accesses(kernel):
        width = vector if any(load.indices == indices and load.tensor == tensor for load in wide) else 1
        width = vector if tensor == kernel.output.name and is_stored_along(kernel) else width
        stride = _stride_bytes(kernel, tensor, indices, direction)
        lines = min(float(lanes), max(1.0, lanes * stride * width / _LINE_BYTES))
        total += elements * _reads(kernel, schedule) / width * max(1.0, LINE_WAVEFRONTS * lines)
    return total
