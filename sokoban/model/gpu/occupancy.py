"""Registers, shared memory and how many blocks fit on a unit at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.matrix import (
    DEPTH_BYTES,
    FRAGMENT,
    MMA_OTHER_REGISTERS,
    STATIC_SHARED_BYTES,
    WGMMA_OTHER_REGISTERS,
)
from sokoban.schedule.bulk_copies import BARRIER_BYTES
from sokoban.schedule.rows import column_bytes_of, exchange_elements
from sokoban.schedule.table import Bools, Ints, ScheduleTable, product

#: Registers a kernel needs besides accumulators, operands and what is being fetched: addresses, counters; and fetched
#: values that the compiler keeps between load and store, at most. What the occupancy of programs timed on a V100 (CUDA
#: 10.2) speaks for: NVRTC 12.9 grants itself more where it may, without need.
OVERHEAD_REGISTERS = 20
FETCHED_REGISTERS = 24

#: Bytes of a copy by ``mma.sync``; copies of a thread in a step up to which their addresses are among its other
#: registers, and registers that each further one takes: compiled kernels with 16 have no more, those with 24 some 45
#: more.
COPY_BYTES, COPIES_WITHIN, COPY_REGISTERS = 16, 16, 6

#: Widest result that the warps of a row exchange.
_EXCHANGED_BYTES = 8

#: Operands of a register tile beyond this many are read when they are needed.
OPERAND_REGISTERS = 64


@dataclass(frozen=True, eq=False)
class CompilerReport:
    """Report of the device compiler on every compiled schedule, in place of what the model expects.

    Attributes:
        registers: 32-bit registers per thread.
        spilled: values per thread that got none.
    """

    registers: Ints
    spilled: Ints


def registers_per_thread(table: ScheduleTable, local: Bools | None = None) -> Ints:
    """32-bit registers that one thread cannot do without: accumulators, one fragment of every operand, and the
    compiler's overhead. ``local``: schedules whose accumulators live in local memory."""
    width = 2 if table.form.expr.accumulate == "float64" else 1
    accumulators: Ints = table.accumulators if local is None else np.where(local, 0, table.accumulators)
    values: Ints = (accumulators + (operand_registers(table) if table.form.reduction else 0)) * width
    if table.has_warp_tiles:
        # The tile of a warp is spread over its lanes.
        values = np.where(table.warp_tile, -(-values // 32), values)
        # Where sums of a step are scaled, they are besides those of all steps.
        sums = -(-table.accumulators // 32) * table.form.sum_sets
        values = np.where(table.mma, sums + _mma_operand_registers(table), values)
    return values + OVERHEAD_REGISTERS


def _mma_operand_registers(table: ScheduleTable) -> Ints:
    """Fragments of two depths of the step at once, four bytes to a register, and the addresses of both pipelines."""
    elements = sum(table.operand_elements.values(), table.zeros)
    fragments = 2 * DEPTH_BYTES * elements // (4 * 32) + MMA_OTHER_REGISTERS
    if (roles := table.form.roles) is not None:
        staged = sum((product(table.extents(load), table.count) for load in (roles.a, roles.b)), table.zeros)
        element_bytes = table.form.expr.tensor_by_name[roles.a.tensor].element_bytes
        copies = -(-staged * element_bytes // (COPY_BYTES * table.threads_per_block))
        fragments = fragments + COPY_REGISTERS * np.maximum(0, copies - COPIES_WITHIN)
    return np.where(table.wgmma, WGMMA_OTHER_REGISTERS, fragments) - OVERHEAD_REGISTERS


def operand_registers(table: ScheduleTable) -> Ints:
    """Operands that one thread holds at a point of the reduction."""
    return sum((np.minimum(elements, OPERAND_REGISTERS) for elements in table.operand_elements.values()), table.zeros)


def shared_bytes(table: ScheduleTable) -> Ints:
    """Bytes of shared memory of one block: the staged data tiles with their padding, the strip in which results leave
    matrix instructions, and what threads that share rows keep of them."""
    total = table.zeros
    for load in table.form.body_loads:
        extents = table.extents(load)
        if not extents or not table.cached[load.tensor].any():
            continue
        row = table.stored_row(load)
        element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
        tile_bytes = product(extents, table.count) // row * (row + table.padding[load.tensor]) * element_bytes
        if table.has_stages:
            # Registers hold what multiply-adds fetch further ahead, unless they copy past them.
            past_registers = table.warp_tile | table.asynchronous
            tile_bytes = tile_bytes * np.where(past_registers, table.stages, np.minimum(table.stages, 2))
        total = total + np.where(table.cached[load.tensor], tile_bytes, 0)
    if table.has_warp_tiles:
        roles = table.form.roles
        if roles is not None:
            strip = FRAGMENT * table.threads[roles.m] * (table.block[roles.n] + roles.strip_padding) * 4
            # The strip is static, what is staged may be dynamic: past the static limit there is no such kernel. With
            # mma.sync results leave through what was the tiles' memory.
            static = np.where(strip > STATIC_SHARED_BYTES, 1 << 40, strip)
            together = np.where(table.mma, np.maximum(total, strip), total + static)
            # Results of what is copied in bulk leave straight from registers.
            together = np.where(table.bulk, total + BARRIER_BYTES * table.stages, together)
            total = np.where(table.warp_tile, together, total)
    if table.kept_columns.any():
        rows = product(table.threads.values(), table.count)
        exchanged = _EXCHANGED_BYTES * exchange_elements(table.form, rows, table.reduce_threads)
        row_bytes = rows * table.kept_columns * column_bytes_of(table.form)
        total = total + np.where(row_bytes > 0, row_bytes + exchanged, 0)
    return total


def granted_registers(table: ScheduleTable, device: DeviceSpec, needed: Ints) -> Ints:
    """Registers per thread that the compiler may use: a kernel compiled for its block size gets no more than lets one
    block run, nor more than an instruction can name; never fewer than one allocation unit."""
    limits = device.limits
    warps = np.maximum(1, table.warps(device.warp_lanes))
    granularity = limits.register_allocation_granularity
    per_warp = np.maximum(1, limits.registers_per_unit // warps // granularity) * granularity
    return np.minimum(np.minimum(needed, per_warp // device.warp_lanes), limits.registers_per_thread)


def spilled_registers(device: DeviceSpec, needed: Ints, granted: Ints) -> Ints:
    """Values per thread that live in local memory, since the compiler has no register for them.

    A device that plans with every register it counts (an IPU) counts none of the compiler's.
    """
    return np.maximum(0, needed - uncounted_registers(device) - granted)


def uncounted_registers(device: DeviceSpec) -> int:
    """Registers of :data:`OVERHEAD_REGISTERS` that the device's limits leave no room for and do not mean."""
    limits = device.limits
    return max(0, OVERHEAD_REGISTERS - (limits.registers_per_thread - limits.registers_per_thread_usable))


def blocks_per_unit(table: ScheduleTable, device: DeviceSpec, registers: Ints, shared: Ints) -> Ints:
    """Resident blocks of one unit: the tightest of threads, registers, shared memory and the block limit; 0 where no
    block fits.

    A device that plans with every register it counts (an IPU, whose register file is not public) counts none of the
    compiler's, and they are taken off again.

    Args:
        table: the schedules.
        device: of the unit.
        registers: per thread; see :func:`registers_per_thread`.
        shared: bytes per block; see :func:`shared_bytes`.
    """
    limits = device.limits
    registers = np.maximum(1, registers - uncounted_registers(device))
    warps = table.warps(device.warp_lanes)
    by_threads = limits.threads_per_unit // np.maximum(1, warps * device.warp_lanes)
    granularity = limits.register_allocation_granularity
    per_warp = -(-registers * device.warp_lanes // granularity) * granularity
    by_registers = limits.registers_per_unit // np.maximum(1, per_warp * warps)
    by_shared = limits.shared_bytes_per_unit // np.maximum(1, shared + limits.shared_bytes_reserved_per_block)
    fits = (shared <= limits.shared_bytes_per_block_opt_in) & (table.threads_per_block <= limits.threads_per_block)
    resident = np.minimum(np.minimum(by_threads, by_registers), np.minimum(by_shared, limits.blocks_per_unit))
    return np.where(fits, resident, 0)
