"""The step that RATIONAL describes: what a block fetches, reads and computes between barriers, and how many blocks run.

A block walks its reduction in steps (thesis 5.3.3). The stages of :mod:`sokoban.model.gpu.stages` say what every part
of the hardware needs for the quantities that stand here; all are arrays with one entry per schedule of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import WIDENED_REGISTERS
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import Load
from sokoban.model.gpu.fetch import ROLLED_LOADS, Fetch, fetch
from sokoban.model.gpu.loops import LoopNest, loop_nest
from sokoban.model.gpu.occupancy import (
    FETCHED_REGISTERS,
    CompilerReport,
    blocks_per_unit,
    granted_registers,
    registers_per_thread,
    shared_bytes,
    spilled_registers,
)
from sokoban.model.gpu.operands import OperandReads, operand_reads, window_spills
from sokoban.model.gpu.row_work import RowWork
from sokoban.model.gpu.work import arithmetic_instructions, row_work_of
from sokoban.schedule.bulk_copies import GIVING_THREADS, clustered_blocks, units_of_clusters
from sokoban.schedule.table import Floats, Ints, ScheduleTable, product, shares_rows
from sokoban.schedule.tile import COPYING_THREADS


@dataclass(frozen=True, eq=False, kw_only=True)
class Occupancy:
    """Occupation of a device's units by the blocks of a kernel.

    Attributes:
        registers: 32-bit registers per thread, as granted.
        spilled: values per thread that got none.
        shared: bytes of shared memory per block.
        resident: blocks that fit on a unit; 0 where the kernel cannot run.
        running: blocks that a unit really runs at once, at least 1.
        rounds: blocks of the busiest unit divided by ``running``.
        warps: per block.
    """

    registers: Ints
    spilled: Ints
    shared: Ints
    resident: Ints
    running: Ints
    rounds: Floats
    warps: Ints


@dataclass(frozen=True, eq=False)
class BlockStep:
    """One step of the blocks that a unit runs; what is not asked for is not computed.

    Attributes:
        table: the schedules.
        placed: their operator on a device.
        report: registers and spills as compiled; None before that.
        given_occupancy: how the blocks occupy the device, where that was computed elsewhere.
    """

    table: ScheduleTable
    placed: PlacedForm
    report: CompilerReport | None = None
    given_occupancy: Occupancy | None = None

    @property
    def form(self) -> KernelForm:
        """The operator."""
        return self.placed.form

    @property
    def device(self) -> DeviceSpec:
        """The device that it runs on."""
        return self.placed.device

    @cached_property
    def nest(self) -> LoopNest:
        """The inner loops of a thread."""
        return loop_nest(self.table)

    @cached_property
    def fetches(self) -> Mapping[Load, Fetch]:
        """Copies of data tiles to shared memory, by load of the body."""
        return {load: fetch(self.table, load, self.device) for load in self.form.body_loads}

    @cached_property
    def reads(self) -> Mapping[Load, OperandReads]:
        """Operands of the reduction as threads read them, by load of the body; empty where nothing is reduced."""
        if self.form.reduction is None:
            return {}
        return {load: operand_reads(self.table, load, self.device, self.nest) for load in self.form.body_loads}

    @cached_property
    def addresses(self) -> Floats:
        """Integer instructions of a thread for the addresses and guards of its reads in place, where a schedule says
        that these need some."""
        total = np.zeros(self.table.count)
        for load in self.form.body_loads:
            if (each := self.table.address.get(load.tensor)) is not None:
                total = total + np.where(self.table.cached[load.tensor], 0.0, each * direct_reads(self, load))
        return total

    @cached_property
    def window_spills(self) -> Floats:
        """Values per thread and unrolled body that find no register until they are used again."""
        return window_spills(self.table, self.nest, self.reads)

    @cached_property
    def rows(self) -> RowWork | None:
        """Work of the threads of those schedules whose threads share rows; None where there are none."""
        return row_work_of(self.table)

    @cached_property
    def arithmetic(self) -> Floats:
        """Arithmetic instructions of a thread."""
        return arithmetic_instructions(self.table, self.rows)

    @cached_property
    def occupancy(self) -> Occupancy:
        """Occupation of the device by the blocks."""
        return self.given_occupancy or occupancy_of(self)


def occupancy_of(step: BlockStep) -> Occupancy:
    """Registers, resident blocks and rounds of blocks (5.4.3: a partial last round takes as long as a full one)."""
    table, device = step.table, step.device
    needed = registers_per_thread(table, step.nest.local)
    loads = sum(
        np.where(table.cached[load.tensor], _fetched_together(table, load, part), direct_reads(step, load))
        for load, part in step.fetches.items()
    )
    if step.rows is not None:
        # A row that a thread keeps is what it has under way too.
        loads = np.where(shares_rows(table), np.maximum(0.0, loads - step.rows.kept_registers), loads)
        needed = np.where(shares_rows(table), needed + step.rows.kept_registers, needed).astype(np.int64)
    wanted = needed + np.minimum(loads, FETCHED_REGISTERS).astype(np.int64)
    if table.has_stages:
        in_flight = sum(
            np.where(table.cached[load.tensor], _fetch_registers(table, load, part), 0.0)
            for load, part in step.fetches.items()
        )
        ahead = (table.stages > 1) & ~table.warp_tile
        needed = np.where(ahead, needed + in_flight, needed).astype(np.int64)
        wanted = np.where(ahead, needed, wanted)
    if table.has_warp_tiles:
        # Asynchronous copies pass by the registers.
        needed = needed + np.where(table.mma & ~table.wgmma & step.placed.is_widened, WIDENED_REGISTERS, 0)
        wanted = np.where(table.mma, needed, wanted)
        # Groups that give each other registers start with all that a unit has.
        start = device.limits.registers_per_unit // np.maximum(1, table.threads_per_block) // 8 * 8
        wanted = np.where(table.bulk & (table.threads_per_block > GIVING_THREADS), np.maximum(wanted, start), wanted)
    registers = granted_registers(table, device, wanted)
    spilled = spilled_registers(device, needed, registers)
    if table.has_warp_tiles:
        spilled = np.where(table.warp_tile & ~table.mma, 0, spilled)
        # Tiles with two sets of sums are no larger than what the copying group gives up has room for.
        spilled = np.where(table.bulk & bool(table.form.scale_loads), 0, spilled)
    if step.report is not None:
        registers, spilled = step.report.registers, step.report.spilled
    shared = shared_bytes(table)
    resident = blocks_per_unit(table, device, registers, shared)
    units = np.where(table.cluster > 2, units_of_clusters(device.unit_count, 4), device.unit_count)
    busiest_blocks = -(-clustered_blocks(table) // units)
    running = np.minimum(np.maximum(1, resident), busiest_blocks)
    return Occupancy(
        registers=registers,
        spilled=spilled,
        shared=shared,
        resident=resident,
        running=running,
        rounds=busiest_blocks / running,
        warps=table.warps(device.warp_lanes),
    )


def _fetched_together(table: ScheduleTable, load: Load, part: Fetch) -> Floats:
    """Loads of a thread that a register may wait for: all of a step, or those of one turn of a loop over rows."""
    waits = table.waits.get(load.tensor)
    return part.loads if waits is None else np.where(waits > 0, np.minimum(part.loads, ROLLED_LOADS), part.loads)


def _fetch_registers(table: ScheduleTable, load: Load, part: Fetch) -> Floats:
    """Registers of a thread that a pipelined fetch holds while another step is computed on.

    They hold the elements, unless these are copied past them, and where every access starts in the tensor and in the
    tile. Constants tell the accesses of a thread apart where nothing is checked and each begins at the same place of a
    row as the first one.
    """
    words = max(1.0, table.form.expr.tensor_by_name[load.tensor].element_bytes / 4)
    values = np.where(table.asynchronous, 0.0, part.elements_per_thread * words)
    if load.pad is not None:
        return values + part.loads * 2
    extents = table.extents(load)
    width = np.maximum(1, np.rint(part.elements_per_thread / np.maximum(part.loads, 1e-9)).astype(np.int64))
    alike = (table.threads_per_block * width) % product(extents[1:], table.count) == 0
    return values + np.where(alike | (part.loads <= 1), 2.0, part.loads * 2)


def direct_reads(step: BlockStep, load: Load) -> Floats:
    """Reads of ``load`` in place, per thread and step; an unrolled body reads what its points share once."""
    if load in step.reads:
        return step.reads[load].instructions
    return step.table.operand_elements[load] / step.table.operand_width[load] * step.table.thread_points


def working_warps(step: BlockStep) -> Ints:
    """Warps of a block that compute: all but those of the group that copies in bulk, whose one thread does little."""
    copying = COPYING_THREADS // step.device.warp_lanes
    return step.occupancy.warps - np.where(step.table.bulk, copying, 0)


def busiest_scheduler(step: BlockStep) -> Ints:
    """Resident warps of the scheduler that has most: the others wait for it at every barrier."""
    return -(-working_warps(step) * step.occupancy.running // step.device.teu.group_size)
