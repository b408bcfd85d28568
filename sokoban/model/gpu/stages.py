"""The stages of RATIONAL's pipeline, a function each: what every part of the hardware needs for a program's work.

Seconds of one step of all blocks that a unit runs at once, or of the whole kernel where that is said. Numbers of a
board come from its spec; the constants here are about compilers and are the same for every board.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm, operation_count
from sokoban.kernel.matrix import WIDENED_REGISTERS
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import REDUCTION_IDENTITY, Load
from sokoban.model.gpu.banks import cache_lines
from sokoban.model.gpu.fetch import Fetch, loads_in_flight
from sokoban.model.gpu.loops import LoopNest
from sokoban.model.gpu.occupancy import (
    FETCHED_REGISTERS,
    blocks_per_unit,
    granted_registers,
    registers_per_thread,
    shared_bytes,
    spilled_registers,
)
from sokoban.model.gpu.operands import OperandReads
from sokoban.model.gpu.row_work import bytes_again, row_bytes, row_passes
from sokoban.model.gpu.transactions import dram_bytes, stored_transactions, super_tile, tile_transaction_bytes
from sokoban.model.gpu.work import arithmetic_instructions, row_work_of
from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, product, shares_rows

#: A load's latency on a busy memory system over the idle one; a synchronised step waits for a load, its store, two
#: barriers and the first operand: as many idle latencies.
LOADED_LATENCY = 1.28
STEP_LATENCY = 2.35

#: Cycles that a step of a pipeline waits although its copies are there: for the barrier, and for the warps that come
#: late to it.
BARRIER_CYCLES = 40.0

#: Passes per spilled value and point of the reduction; passes per accumulator in local memory, whose lines do not fit
#: in L1 together.
SPILL_PASSES = 2.0
LOCAL_PASSES = 20.0

#: Elements of a scattered transaction that a thread still finds in L1 when it comes to them.
L1_REUSE = 4

#: Bytes of DRAM that one activation opens for one channel.
DRAM_PAGE_BYTES = 1024

#: Latencies where a spec does not give its own: published figures for NVIDIA GPUs lie between 350 and 600 ns.
DEFAULT_LATENCY_SECONDS = 500e-9


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch:
    """How a launch occupies the device; one entry per schedule.

    Attributes:
        registers: per thread, as granted.
        spilled: values per thread that got none.
        resident: blocks that fit on a unit; 0 = the kernel cannot run.
        running: blocks that a unit really runs at once, at least 1.
        rounds: how often a unit runs that many: whole for a single round, else the busiest unit's blocks by them.
        warps: per block.
    """

    registers: Ints
    spilled: Ints
    shared: Ints
    resident: Ints
    running: Ints
    rounds: Floats
    warps: Ints


# Occupancy and rounds


def launch_of(
    table: ScheduleTable,
    placed: PlacedForm,
    nest: LoopNest,
    fetches: Mapping[Load, Fetch],
    reads: Mapping[Load, OperandReads],
) -> Launch:
    """Registers, resident blocks and rounds of blocks (5.4.3: a partial last round takes as long as a full one)."""
    device = placed.device
    needed = registers_per_thread(table, nest.local)
    loads = sum(
        np.where(table.cached[load.tensor], part.loads, direct_reads(table, load, reads))
        for load, part in fetches.items()
    )
    rows = row_work_of(table)
    if rows is not None:
        # A row that a thread keeps is what it has under way too.
        loads = np.where(shares_rows(table), np.maximum(0.0, loads - rows.kept_registers), loads)
        needed = np.where(shares_rows(table), needed + rows.kept_registers, needed).astype(np.int64)
    wanted = needed + np.minimum(loads, FETCHED_REGISTERS).astype(np.int64)
    if table.has_stages:
        held = sum(
            np.where(table.cached[load.tensor], _held_registers(table, load, part), 0.0)
            for load, part in fetches.items()
        )
        ahead = (table.stages > 1) & ~table.warp_tile
        needed = np.where(ahead, needed + held, needed).astype(np.int64)
        wanted = np.where(ahead, needed, wanted)
    if table.has_warp_tiles:
        # Asynchronous copies pass by the registers.
        needed = needed + np.where(table.mma & placed.is_widened, WIDENED_REGISTERS, 0)
        wanted = np.where(table.mma, needed, wanted)
    registers = granted_registers(table, device, wanted)
    spilled = spilled_registers(device, needed, registers)
    if table.has_warp_tiles:
        spilled = np.where(table.warp_tile & ~table.mma, 0, spilled)
    shared = shared_bytes(table)
    resident = blocks_per_unit(table, device, registers, shared)
    share = -(-table.block_count // device.unit_count)
    running = np.minimum(np.maximum(1, resident), share)
    warps = table.warps(device.warp_lanes)
    return Launch(
        registers=registers,
        spilled=spilled,
        shared=shared,
        resident=resident,
        running=running,
        rounds=share / running,
        warps=warps,
    )


def _held_registers(table: ScheduleTable, load: Load, part: Fetch) -> Floats:
    """Registers of a thread that a pipelined fetch holds while another step is computed on: the elements, unless they
    are copied past them, and where every access starts in the tensor and in the tile. Constants tell the accesses of a
    thread apart where nothing is checked and each begins at the same place of a row as the first one."""
    words = max(1.0, table.form.expr.tensor_by_name[load.tensor].element_bytes / 4)
    held = np.where(table.asynchronous, 0.0, part.elements_per_thread * words)
    if load.pad is not None:
        return held + part.loads * 2
    extents = table.extents(load)
    width = np.maximum(1, np.rint(part.elements_per_thread / np.maximum(part.loads, 1e-9)).astype(np.int64))
    alike = (table.threads_per_block * width) % product(extents[1:], table.count) == 0
    return held + np.where(alike | (part.loads <= 1), 2.0, part.loads * 2)


def busiest_scheduler(launch: Launch, device: DeviceSpec) -> Ints:
    """Resident warps of the scheduler that has most: the others wait for it at every barrier."""
    return -(-launch.warps * launch.running // device.teu.group_size)


# Stages of a unit: seconds of one step of all blocks it runs


def compute_seconds(table: ScheduleTable, placed: PlacedForm, launch: Launch) -> Floats:
    """Arithmetic pipelines: every warp issues its multiply-adds whole, partial warps too (5.4.3: throughput falls to
    N / (ceil(N / k) k) of the peak), and each keeps its lanes busy for ``warp / lanes`` cycles."""
    device = placed.device
    rate = device.peak_flops(placed.arithmetic_dtype) / device.teu_count
    per_instruction = 2.0 * device.warp_lanes / rate
    scalar: Floats = arithmetic_instructions(table) * per_instruction * busiest_scheduler(launch, device)
    matrix = placed.matrix_rates if table.has_warp_tiles else None
    if matrix is None:
        return scalar
    points = product(table.block.values(), table.count) * table.step_points
    peak = _by_instruction(table, placed, "peak_flops", matrix.peak_flops)
    fragments = points * 2.0 / (peak / device.unit_count) * launch.running
    # Too few warps leave matrix units idle, as they leave schedulers.
    idle = np.maximum(1.0, device.teu.group_size / (launch.warps * launch.running))
    return np.where(table.warp_tile, fragments * idle, scalar)


def _by_instruction(table: ScheduleTable, placed: PlacedForm, figure: str, by_warp: float) -> Floats:
    """A rate of matrix instructions in FLOP/s, by row: that of warp groups, or of single warps."""
    groups = placed.warp_group_rates if table.wgmma.any() else None
    return np.where(table.wgmma, by_warp if groups is None else getattr(groups, figure), by_warp)


def shared_seconds(
    table: ScheduleTable,
    device: DeviceSpec,
    nest: LoopNest,
    launch: Launch,
    fetches: Mapping[Load, Fetch],
    reads: Mapping[Load, OperandReads],
) -> Floats:
    """Shared memory, L1 and the load/store unit are one port: a pass per cycle and unit (5.5.2).

    Operand reads by what the banks make of a warp's addresses, the fetch by lines and words stored,
    and whatever lives in local memory.
    """
    passes: Floats = np.zeros(table.count)
    for load, part in fetches.items():
        staged = table.cached[load.tensor]
        operand = _fragment_passes(table, load, device) if table.has_warp_tiles else None
        read = launch.warps * (reads[load].passes if load in reads else part.loads)
        passes = passes + (read if operand is None else np.where(table.warp_tile, operand * launch.warps, read))
        passes = passes + np.where(staged, part.wavefronts, 0.0)
    rows = row_work_of(table)
    if rows is not None:
        passes = np.where(shares_rows(table), launch.warps * row_passes(table, device, rows), passes)
    points = thread_points(table)
    homeless = np.where(nest.local, LOCAL_PASSES * table.accumulators, SPILL_PASSES * launch.spilled)
    passes = passes + launch.warps * points * homeless
    return passes * launch.running / _passes_per_second(device)


def _fragment_passes(table: ScheduleTable, load: Load, device: DeviceSpec) -> Floats:
    """Passes per warp and step in which matrix instructions read their fragments, each once, at full width."""
    row_bytes = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    passes = table.operand_elements[load] * element_bytes / row_bytes * table.step_points
    roles = table.form.roles
    if roles is None or load != roles.b:
        return passes
    # The four warps of a group share the columns, which are read for all of them at once.
    return np.where(table.wgmma, passes / 4.0, passes)


def l2_seconds(table: ScheduleTable, device: DeviceSpec, launch: Launch, fetches: Mapping[Load, Fetch]) -> Floats:
    """The way from L2 to a unit, which all units together saturate: bytes in transactions (W_i of 5.4.3).

    A staged tile is read once per step. Without staging neighbouring threads share lines through L1, so that a block
    touches its tile once per step too, as long as the lanes of a warp walk the innermost dimension.
    """
    l2 = device.l2 or device.dram
    total: Floats = np.zeros(table.count)
    for load, part in fetches.items():
        moved = part.bytes
        staged = table.cached[load.tensor]
        if not staged.all():
            together = _lanes_walk_innermost(table, load) | staged
            # A transaction per element, of which L1 keeps some for the next elements of the same thread.
            scattered = tile_transaction_bytes(table, load, table.block_tile, l2.transaction_bytes, by_lane=True)
            moved = np.where(together, moved, np.maximum(moved, scattered / L1_REUSE))
        total = total + moved
    rows = row_work_of(table) if table.form.kind == "rows" else None
    if rows is not None:
        total = row_bytes(table, l2.transaction_bytes, rows)
    return total * launch.running / (l2.bandwidth_bytes_per_second / device.unit_count)


def stored_seconds_per_block(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Writing a block's outputs to L2, in the transactions of its warps."""
    l2 = device.l2 or device.dram
    elements = table.form.expr.output.element_count / table.block_count
    moved = elements * stored_transactions(table, device) * l2.transaction_bytes
    return moved / (l2.bandwidth_bytes_per_second / device.unit_count)


def waiting_seconds(
    table: ScheduleTable, device: DeviceSpec, fetches: Mapping[Load, Fetch], reads: Mapping[Load, OperandReads]
) -> Floats:
    """What one block cannot do anything during, per step: the latency of its fetch.

    The first load of a synchronised step takes :data:`STEP_LATENCY`; more of them wait in line where the loads of a
    thread cannot all be under way together. Blocks without staged data wait for their operands in the same way.
    """
    latency = _latency(device)
    first: Floats = np.zeros(table.count)
    more: Floats = np.zeros(table.count)
    for load, part in fetches.items():
        staged = table.cached[load.tensor]
        if staged.all():
            first, more = np.maximum(first, STEP_LATENCY), more + part.batches - 1.0
            continue
        direct = _direct_batches(table, load, reads)
        first = np.maximum(first, np.where(staged, STEP_LATENCY, LOADED_LATENCY))
        more = more + np.where(staged, part.batches, direct) - 1.0
    rows = row_work_of(table)
    if rows is not None:
        first = np.where(shares_rows(table), LOADED_LATENCY, first)
        more = np.where(shares_rows(table), table.accumulators * rows.batches - 1.0, more)
    return latency * (first + LOADED_LATENCY * more)


def pipelined_waiting(
    table: ScheduleTable, device: DeviceSpec, waiting: Floats, own: Floats, transfer: Floats
) -> Floats:
    """:func:`waiting_seconds` where buffers let copies run ahead: ``own`` is the rest of a step of one block, of which
    its data take ``transfer`` from L2.

    With ``stages`` buffers the copies of ``stages - 1`` steps are under way, so that a block waits for as much of a
    latency and of the way from L2 per step as those steps do not cover, and at every barrier.
    """
    if not table.has_stages:
        return waiting
    # Two buffers belong to the products of warp groups, which also go on while their threads meet.
    ahead = np.maximum(1, table.stages - np.where(table.wgmma, 2, 1))
    barrier = np.where(table.wgmma, 0.0, BARRIER_CYCLES / _clock_hz(device))
    late = np.maximum(0.0, (LOADED_LATENCY * _latency(device) + transfer) / ahead - own) + barrier
    return np.where(table.stages > 1, np.minimum(late, waiting), waiting)


def filling_seconds(table: ScheduleTable, device: DeviceSpec, launch: Launch) -> Floats:
    """Filling a pipeline's first buffer, once per block: other blocks compute meanwhile, where there are any."""
    seconds: Floats = np.where(table.stages > 1, LOADED_LATENCY * _latency(device), 0.0) / launch.running
    return seconds


def _latency(device: DeviceSpec) -> float:
    return device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS


def direct_reads(table: ScheduleTable, load: Load, reads: Mapping[Load, OperandReads]) -> Floats:
    """Reads of ``load`` in place, per thread and step; an unrolled body reads what its points share once."""
    if load in reads:
        return reads[load].instructions
    return table.operand_elements[load] / table.operand_width[load] * thread_points(table)


def _direct_batches(table: ScheduleTable, load: Load, reads: Mapping[Load, OperandReads]) -> Floats:
    """How often a thread that reads ``load`` from global memory waits, per step."""
    count = direct_reads(table, load, reads)
    return np.maximum(1.0, count / loads_in_flight(table, count, guarded=False))


# The whole kernel


def dram_seconds(table: ScheduleTable, device: DeviceSpec, launch: Launch, fetches: Mapping[Load, Fetch]) -> Floats:
    """Compulsory traffic and what L2 cannot keep for the blocks of the next round, at the sustained rate."""
    form = table.form
    together = super_tile(table, np.maximum(1, launch.resident) * device.unit_count)
    moved: Floats = np.full(table.count, float(form.expr.output.size_bytes))
    for load, part in fetches.items():
        fetched = np.maximum(1.0, part.bytes * table.step_count * table.block_count)
        read = np.minimum(dram_bytes(table, load, device, together), fetched)
        moved = moved + read * row_factor(table, load, device)
    others = {load.tensor for load in form.final_loads} - {load.tensor for load in fetches}
    moved = moved + sum(form.expr.tensor_by_name[tensor].size_bytes for tensor in others)
    rows = row_work_of(table) if form.kind == "rows" else None
    if rows is not None:
        moved = moved + bytes_again(table, device, launch.running, rows)
    return moved / device.dram.bandwidth_bytes_per_second


def row_factor(table: ScheduleTable, load: Load, device: DeviceSpec) -> Floats | float:
    """How much longer DRAM takes for reads whose lanes are each in a row (page) of their own.

    Then a row is opened for two transactions only, which is what L2 asks for at a time.
    """
    scattered = device.dram.scattered_bytes_per_second
    staged = table.cached[load.tensor]
    if scattered is None or staged.all() or not load.indices:
        return 1.0
    pages = cache_lines(table, load, device, DRAM_PAGE_BYTES)
    slower = max(1.0, device.dram.bandwidth_bytes_per_second / (2.0 * scattered))
    return np.where(~staged & (pages >= device.warp_lanes / 2), slower, 1.0)


def power_seconds(table: ScheduleTable, placed: PlacedForm) -> Floats:
    """Arithmetic at the rate that the board sustains under load: its power limit lowers the clock of whatever would
    be faster; 0 where the limit does not bind."""
    form, device = placed.form, placed.device
    points = table.block_count * product(table.block.values(), table.count) * table.reduced_points
    flops = points * max(1.0, _issue_operations(form)) * 2.0
    limit = device.limited_flops(placed.arithmetic_dtype)
    seconds: Floats = np.zeros(table.count) if limit is None else flops / limit
    matrix = placed.matrix_rates if table.has_warp_tiles else None
    if matrix is None:
        return seconds
    sustained = _by_instruction(table, placed, "sustained_flops", matrix.sustained_flops)
    return np.where(table.warp_tile, points * 2.0 / sustained, seconds)


def thread_points(table: ScheduleTable) -> Floats:
    """Points of the reduction that one thread handles during a step."""
    return table.thread_points


def _passes_per_second(device: DeviceSpec) -> float:
    """Passes through the banks of one unit."""
    row_bytes = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
    return device.shared.bandwidth_bytes_per_second / device.unit_count / row_bytes


def _clock_hz(device: DeviceSpec) -> float:
    return device.clocks.boost_hz


def _issue_operations(form: KernelForm) -> float:
    """Arithmetic instructions per point of the body: a multiply and an add fuse into one."""
    reduction = form.reduction
    count = operation_count(form.body) + (1 if reduction else 0)
    if reduction is not None and reduction.function == "sum" and count >= 2:
        count -= 1
    assert reduction is None or reduction.function in REDUCTION_IDENTITY
    return float(count)


def _lanes_walk_innermost(table: ScheduleTable, load: Load) -> Bools:
    """Whether neighbouring threads read neighbouring elements: what they stand along is the innermost dimension."""
    form = table.form
    last = next((axis for axis in reversed(form.spatial) if form.sizes[axis] > 1), None)
    innermost = load.indices[-1] if load.indices else None
    along_outputs = innermost is None or last is None or innermost.coefficient(last) != 0
    along_outputs = along_outputs or not any(index.coefficient(last) for index in load.indices if last)
    if not form.reduces_contiguously:
        return np.full(table.count, along_outputs)
    along_reduction = innermost is None or any(innermost.coefficient(axis) for axis in (*form.reduced, *form.columns))
    return np.where(table.reduce_threads > 1, along_reduction, along_outputs)
