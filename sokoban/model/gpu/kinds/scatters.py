"""RATIONAL for kernels that add scattered rows: places looked at by all blocks, and rows read where they are named.

The warps of a block look at every place between them, 32 at a time each, and take the latency of memory for those that
they ask for together; then for every row that they add, one after the other. Places are taken to name all rows alike:
where one row is named by most of them, its warps work longer than this says. Nothing was chosen on such kernels.
"""

from __future__ import annotations

import math

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.instructions import value_instructions
from sokoban.kernel.line import LineKernel
from sokoban.kernel.regions import read_bytes
from sokoban.language.expression import loads
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.breakdown import DRAM_OVERLAP, STAGES, soft_maximum
from sokoban.model.gpu.issue import BODY_INSTRUCTIONS, STEP_INSTRUCTIONS
from sokoban.model.gpu.kinds.patches import resident_blocks
from sokoban.model.gpu.occupancy import OVERHEAD_REGISTERS
from sokoban.model.gpu.stages import BARRIER_CYCLES, DEFAULT_LATENCY_SECONDS, LOADED_LATENCY
from sokoban.schedule.patches import (
    PLACES_AHEAD,
    ROWS_AHEAD,
    LineSchedule,
    column_blocks,
    scatter_shared_bytes,
    scatter_vector,
)

#: Instructions for 32 places: the load, two comparisons, the vote, the branch; and for each that is met, without what
#: is added: its bit, its number by a shuffle, addresses.
VOTE_INSTRUCTIONS, MET_INSTRUCTIONS = 6.0, 14.0
#: Of 32 places that a warp of several lists: the place in the list and what is written there; and of each list that
#: is read: its length and the loop.
LIST_INSTRUCTIONS, LISTER_INSTRUCTIONS = 6.0, 6.0
#: Cycles of a vote and of the shuffle of a place that is met.
VOTE_CYCLES, MET_CYCLES = 22.0, 60.0


def estimate_scatter(kernel: LineKernel, schedule: LineSchedule, device: DeviceSpec) -> Estimate:
    """The predicted time of a kernel that adds scattered rows on a GPU; infinite where no block fits."""
    lanes, clock = device.warp_lanes, device.clocks.boost_hz
    registers = scatter_registers(kernel, schedule)
    shared_bytes = scatter_shared_bytes(schedule)
    resident = resident_blocks(schedule.threads, registers, device)
    if shared_bytes:
        resident = min(resident, device.shared.capacity_bytes // shared_bytes)
    blocks = schedule.blocks(kernel)
    busiest_blocks = -(-blocks // device.unit_count)
    running = max(1, min(resident, busiest_blocks))
    rounds, warps = busiest_blocks / running, schedule.threads // lanes
    work = _Work(kernel, schedule)
    l2, dram_seconds = device.l2 or device.dram, device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS
    passes_per_second = device.shared.bandwidth_bytes_per_second / device.unit_count / 128
    groups = -(-warps * running // device.teu.group_size)
    busy = {
        "issue": groups * work.issued / clock,
        "shared": warps * running * work.passes / passes_per_second,
        "l2": running * work.l2_bytes / (l2.bandwidth_bytes_per_second / device.unit_count),
    }
    meeting = BARRIER_CYCLES + warps * MET_CYCLES if warps > 1 else 0.0
    alone = work.turns * ((l2.latency_seconds or dram_seconds) + (PLACES_AHEAD * VOTE_CYCLES + meeting) / clock)
    alone += work.groups * dram_seconds * LOADED_LATENCY + work.met * MET_CYCLES / clock + dram_seconds
    moved = kernel.output.size_bytes + sum(read_bytes(kernel.expr, tensor) for tensor in kernel.inputs)
    dram, starting = moved / device.dram.bandwidth_bytes_per_second, blocks * device.block_launch_seconds
    units = rounds * max(*busy.values(), alone)
    stages = {stage: rounds * seconds for stage, seconds in busy.items()}
    stages |= {"dram": dram, "latency": rounds * alone, "block_launch": starting}
    seconds = max(float(soft_maximum(np.array([units]), np.array([dram]), DRAM_OVERLAP)[0]), starting)
    return Estimate(
        seconds=seconds + device.launch_overhead_seconds if resident else math.inf,
        bound=max(stages, key=lambda stage: stages[stage]),
        stage_seconds={stage: stages.get(stage, 0.0) for stage in STAGES},
        registers=registers,
        shared_bytes=shared_bytes,
        blocks_per_unit=resident,
        wave_count=-(-blocks // (max(1, resident) * device.unit_count)),
    )


def scatter_registers(kernel: LineKernel, schedule: LineSchedule) -> int:
    """Registers of a thread: sums of its columns in every row, what is added to them, places ahead, and addresses."""
    wide = 2 if kernel.expr.accumulate == "float64" else 1
    vector = scatter_vector(kernel)
    ahead = ROWS_AHEAD if schedule.threads > 32 else 1
    return OVERHEAD_REGISTERS + vector * wide * (schedule.lines + ahead + len(kernel.reads)) + PLACES_AHEAD


class _Work:
    """Work of a warp: turns, rows that it adds, instructions, passes through L1; and the bytes of its block from L2."""

    def __init__(self, kernel: LineKernel, schedule: LineSchedule) -> None:
        scatter, vector = kernel.scatter, scatter_vector(kernel)
        assert scatter is not None
        tensors, added = kernel.expr.tensor_by_name, loads(scatter.value)
        warps = schedule.threads // 32
        chunks = -(-kernel.length // schedule.threads)
        self.turns = -(-chunks // PLACES_AHEAD)
        self.met = kernel.length * schedule.lines / kernel.lines
        # A list's first row is waited for, and every so many behind it.
        lists = self.turns * warps
        first = lists * -math.expm1(-self.met / lists)
        self.groups = self.met if warps == 1 else first + (self.met - first) / ROWS_AHEAD
        adding = MET_INSTRUCTIONS + schedule.lines + vector * (value_instructions(scatter.value) + 1.0) + len(added)
        final = schedule.lines * vector * (1.0 + value_instructions(kernel.final.value))
        looking = VOTE_INSTRUCTIONS + (LIST_INSTRUCTIONS if warps > 1 else 0.0)
        meeting = STEP_INSTRUCTIONS + (warps * LISTER_INSTRUCTIONS if warps > 1 else 0.0)
        self.issued = chunks * looking + self.turns * meeting + self.met * adding + final
        self.issued += BODY_INSTRUCTIONS
        row_bytes = sum(tensors[load.tensor].element_bytes for load in added)
        columns = min(kernel.columns, schedule.threads * vector)
        self.passes = chunks + self.met * max(1.0, 32 * vector * row_bytes / 128)
        stored = kernel.output.size_bytes / schedule.blocks(kernel)
        again = 1.0 if column_blocks(kernel, schedule) == 1 else max(1.0, 32 / (columns * max(1, row_bytes)))
        self.l2_bytes = kernel.length * 4.0 + self.met * columns * row_bytes * again + stored
