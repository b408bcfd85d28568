"""RATIONAL for patch transforms: the stages of :mod:`sokoban.model.gpu.stages` for threads that stage nothing and walk
no steps.

Traffic is counted in sectors as the lanes of a warp ask for them: rows of neighbouring patches are read together, a
patch of which every lane has its own by itself. What rows of patches share vertically comes from L2 again.
"""

from __future__ import annotations

import math

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import operation_count
from sokoban.kernel.patches import COLUMN, ROW, PatchTransform
from sokoban.language.expression import AffineIndex
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.breakdown import DRAM_OVERLAP, STAGES, UNHIDDEN, UNHIDDEN_WAIT, soft_maximum
from sokoban.model.gpu.fetch import LINE_WAVEFRONTS, UNROLLED_LOADS
from sokoban.model.gpu.issue import BODY_INSTRUCTIONS, DIRECT_GUARD_INSTRUCTIONS, STEP_INSTRUCTIONS
from sokoban.model.gpu.occupancy import OVERHEAD_REGISTERS
from sokoban.model.gpu.stages import DEFAULT_LATENCY_SECONDS, DRAM_PAGE_BYTES, LOADED_LATENCY, passes_per_second
from sokoban.schedule.patches import PatchSchedule

#: Instructions by which a thread finds its place along an axis: a division by a constant and a remainder, as
#: multiplications.
PLACE_INSTRUCTIONS = 4.0

#: Bytes of a line of L1.
_LINE_BYTES = 128


def estimate_patches(transform: PatchTransform, schedule: PatchSchedule, device: DeviceSpec) -> Estimate:
    """The predicted time of one patch transform; it takes infinite time where no block fits."""
    limits, lanes = device.limits, device.warp_lanes
    patch, transformed = transform.patch, transform.transformed
    reads, writes = patch * patch, transformed * transformed / transform.store_width
    # The compiler turns column by column into the first product, as the SASS of all transforms for sm_80 shows.
    registers = min(patch + transformed * patch + OVERHEAD_REGISTERS, limits.registers_per_thread)
    resident = resident_blocks(schedule.threads, registers, device)
    blocks = schedule.blocks(transform)
    busiest_blocks = -(-blocks // device.unit_count)
    running = max(1, min(resident, busiest_blocks))
    rounds = busiest_blocks / running
    warps = -(-schedule.threads // lanes)
    busiest_warps = -(-warps * running // device.teu.group_size)
    arithmetic = transform.multiply_adds + transformed * transformed * operation_count(transform.value)
    guard = DIRECT_GUARD_INSTRUCTIONS if transform.is_padded else 0.0
    issued = arithmetic + reads * (1.0 + guard) + writes + transformed * transformed * len(transform.value_loads)
    issued += STEP_INSTRUCTIONS + BODY_INSTRUCTIONS + PLACE_INSTRUCTIONS * (len(transform.axes) - 1)
    l2 = device.l2 or device.dram
    read_bytes, written_bytes = _read_bytes(transform, l2.transaction_bytes), _written_bytes(transform, device)
    extra_bytes = sum(transform.tensor_by_name[load.tensor].size_bytes for load in transform.value_loads)
    moved_per_block = (read_bytes + written_bytes + extra_bytes) / blocks
    lines = _lines_per_load(transform, lanes) * reads + _lines_per_store(transform, lanes) * writes
    busy = {
        "compute": arithmetic
        * 2.0
        * lanes
        / (device.peak_flops(transform.accumulate) / device.teu_count)
        * busiest_warps,
        "issue": issued / device.clocks.boost_hz * busiest_warps,
        "shared": warps * running * max(LINE_WAVEFRONTS * lines, reads + writes) / passes_per_second(device),
        "l2": moved_per_block * running / (l2.bandwidth_bytes_per_second / device.unit_count),
    }
    work = [busy["compute"], busy["shared"], busy["l2"]]
    together = max(busy.values()) + UNHIDDEN * (sum(work) - max(work))
    # No more than a column of a patch is sure to be under way at a time.
    batches = max(1.0, reads / min(UNROLLED_LOADS, patch))
    waiting = (device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS) * LOADED_LATENCY * batches
    alone = waiting + together / running
    unfilled = UNHIDDEN_WAIT * min(waiting, together / running) / running
    units = rounds * (max(together, alone) + unfilled)
    dram = _dram_seconds(transform, device)
    seconds = float(soft_maximum(np.array([units]), np.array([dram]), DRAM_OVERLAP)[0])
    starting = blocks * device.block_launch_seconds
    stages = {stage: rounds * seconds for stage, seconds in busy.items()}
    stages |= {"dram": dram, "latency": rounds * alone, "block_launch": starting}
    seconds = max(seconds, starting) + device.launch_overhead_seconds if resident else math.inf
    bound = max(STAGES, key=lambda stage: stages[stage])
    waves = -(-blocks // (max(1, resident) * device.unit_count))
    return Estimate(
        seconds=seconds,
        bound=bound,
        stage_seconds={stage: stages[stage] for stage in STAGES},
        registers=registers,
        shared_bytes=0,
        blocks_per_unit=resident,
        wave_count=waves,
    )


def resident_blocks(threads: int, registers: int, device: DeviceSpec) -> int:
    """Blocks that fit on a unit: the tightest of threads, registers and the block limit; 0 where none fits."""
    limits, lanes = device.limits, device.warp_lanes
    if threads > limits.threads_per_block:
        return 0
    warps = -(-threads // lanes)
    per_warp = -(-registers * lanes // limits.register_allocation_granularity) * limits.register_allocation_granularity
    fits = min(limits.threads_per_unit // (warps * lanes), limits.registers_per_unit // (per_warp * warps))
    return min(fits, limits.blocks_per_unit)


def _dram_seconds(transform: PatchTransform, device: DeviceSpec) -> float:
    """Seconds in which DRAM moves every tensor once; a source of which each lane reads a row of DRAM of its own, at the
    rate of such reads."""
    source = transform.tensor_by_name[transform.source.tensor]
    moved = float(transform.output.size_bytes + sum(tensor.size_bytes for tensor in transform.inputs))
    scattered = device.dram.scattered_bytes_per_second
    if scattered is not None and _stride(transform.source.indices, transform, source.shape) >= (
        DRAM_PAGE_BYTES // source.element_bytes
    ):
        slower = max(1.0, device.dram.bandwidth_bytes_per_second / (2.0 * scattered))
        moved += (slower - 1.0) * source.size_bytes
    return moved / device.dram.bandwidth_bytes_per_second


def _stride(indices: tuple[AffineIndex, ...], transform: PatchTransform, shape: tuple[int, ...]) -> int:
    """Elements between what neighbouring threads read or write."""
    lane = transform.axes[-1].name
    return sum(index.coefficient(lane) * math.prod(shape[position + 1 :]) for position, index in enumerate(indices))


def _read_bytes(transform: PatchTransform, sector: int) -> float:
    """Bytes from L2: rows of patches side by side as whole runs, patches by themselves in sectors of their own."""
    source = transform.tensor_by_name[transform.source.tensor]
    element_bytes, patch, last = source.element_bytes, transform.patch, transform.source.indices[-1]
    lane = transform.axes[-1]
    stride = last.coefficient(lane.name)
    windowed = last.coefficient(COLUMN) != 0
    if stride and not windowed:
        # Elements of adjacent patches are adjacent: each is read once.
        return float(transform.points * patch * patch * element_bytes)
    if stride:
        run = min((lane.size - 1) * stride + patch, source.shape[-1]) * element_bytes
        return transform.points / lane.size * patch * min(run + sector, (-(-run // sector) + 1) * sector)
    is_contiguous = _stride(transform.source.indices, transform, source.shape) == 1
    if is_contiguous:
        return float(transform.points * patch * patch * element_bytes)
    rows_adjoin = source.shape[-1] == patch and transform.source.indices[-2].coefficient(ROW) != 0
    runs, length = (1, patch * patch * element_bytes) if rows_adjoin else (patch, patch * element_bytes)
    return float(transform.points * runs * (length + sector - element_bytes) / sector * sector)


def _written_bytes(transform: PatchTransform, device: DeviceSpec) -> float:
    """Bytes to L2: a store of a warp writes its sectors again where its lanes leave gaps for later ones."""
    sector = (device.l2 or device.dram).transaction_bytes
    output, transformed, width = transform.output, transform.transformed, transform.store_width
    stride = max(1, _stride(transform.target, transform, output.shape)) * output.element_bytes
    store_bytes = width * output.element_bytes
    per_store = device.warp_lanes * min(sector, max(store_bytes, stride))
    stores = transform.points * transformed * transformed / width / device.warp_lanes
    return max(float(output.size_bytes), stores * per_store)


def _lines_per_load(transform: PatchTransform, lanes: int) -> float:
    """Lines of L1 that a warp touches when it reads an element of every patch."""
    source = transform.tensor_by_name[transform.source.tensor]
    span = abs(_stride(transform.source.indices, transform, source.shape)) * source.element_bytes
    return max(1.0, min(lanes, lanes * span / _LINE_BYTES))


def _lines_per_store(transform: PatchTransform, lanes: int) -> float:
    """Lines of L1 that a warp touches when it writes an element of every transformed patch."""
    span = abs(_stride(transform.target, transform, transform.output.shape)) * transform.output.element_bytes
    return max(1.0, min(lanes, lanes * span / _LINE_BYTES))
