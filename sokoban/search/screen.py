"""Closed forms that search screens tiles with before RATIONAL sees the rest: no addresses, no rounding to transactions.

The efficient-configuration condition of the thesis (5.4.4) asks of every layer no more than the slowest stage can use:
tiles whose stages come within epsilon of the best are kept, the smallest footprint first. What is left out here (bank
conflicts, alignment, spills) makes a schedule slower, rarely faster, so that the screened time is an optimistic one.
"""

from __future__ import annotations

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import data_dimension
from sokoban.language.expression import Load
from sokoban.model.gpu.occupancy import blocks_per_unit, registers_per_thread, shared_bytes
from sokoban.schedule.table import Floats, Ints, ScheduleTable, product

#: Latency of memory where the device does not give its own.
LATENCY_SECONDS = 500e-9

#: Bytes that one thread can have under way.
BYTES_PER_THREAD = 64.0

#: Share of the other stages that the slowest does not hide, as in RATIONAL; and bytes of a cache line.
LEAK = 0.1
LINE_BYTES = 128

#: Tiles within this factor of each other count as equally fast: then the smaller footprint goes first.
BAND = 1.02


def efficient(seconds: Floats, footprint: Floats, epsilon: float, most: int) -> Ints:
    """Positions of the tiles that satisfy the efficient-configuration condition, best first, at most ``most``.

    Tiles within ``1 + epsilon`` of the fastest are kept. Times within :data:`BAND` of each other go by ``footprint``,
    equal ones keep their order. Where more than ``most`` tiles pass, the second half of the places is an even sample
    of the rest; where there are at most ``most`` to begin with, all are kept.

    >>> efficient(np.array([2.0, 1.0, 1.0, 9.0]), np.array([1.0, 8.0, 4.0, 1.0]), 1.5, 3).tolist()
    [2, 1, 0]

    Args:
        seconds: of the slowest stage of each tile.
        footprint: of each tile; any unit, as they are only compared.
        epsilon: how much longer than the fastest a tile may take, as a share.
        most: positions.
    """
    if not len(seconds):
        return np.zeros(0, dtype=np.int64)
    band = np.floor(np.log(np.maximum(seconds, 1e-12)) / np.log(BAND))
    positions = np.arange(len(seconds))
    if len(positions) > most:
        positions = np.flatnonzero(seconds <= (1.0 + epsilon) * seconds.min())
    order = positions[np.lexsort((positions, footprint[positions], band[positions]))]
    if len(order) <= most:
        return order
    # Many tiles that closed forms cannot tell apart: half of the places go to a sample of what would be cut.
    others = order[most // 2 :]
    sample = others[np.linspace(0, len(others) - 1, most - most // 2).astype(np.int64)]
    return np.concatenate([order[: most // 2], sample])


def block_seconds(placed: PlacedForm, blocks: Ints, matrix: bool) -> tuple[Floats, Floats]:
    """Shortest time that block tiles leave any program: arithmetic of the busiest unit against traffic from L2.

    Args:
        placed: the operator on a device.
        blocks: elements of a block, shape (tiles, spatial axes).
        matrix: whether matrix instructions multiply.

    Returns:
        Seconds, and footprints: elements of the outputs and of the data tiles of one point of the reduction.
    """
    form, device = placed.form, placed.device
    columns = dict(zip(form.spatial, blocks.T.astype(np.float64), strict=True))
    count, units = np.ones(len(blocks)), device.unit_count
    for axis, tile in columns.items():
        count *= np.ceil(form.sizes[axis] / tile)
    outputs = blocks.prod(axis=1).astype(np.float64)
    points = outputs * float(np.prod([form.sizes[axis] for axis in form.reduced], dtype=np.float64))
    busiest_blocks = np.ceil(count / units)
    # A block of fewer threads than a warp, or a unit with fewer warps than schedulers, cannot use all its lanes.
    unit_lanes = device.warp_lanes * max(1, device.teu.group_size)
    lanes_filled = 1.0 if matrix else np.minimum(1.0, outputs * busiest_blocks / unit_lanes)
    multiply_adds = max(1.0, form.body_operations / 2.0)
    arithmetic = busiest_blocks * points * multiply_adds * 2.0 / _unit_rate(placed, matrix) / lanes_filled
    traffic, footprint = np.zeros(len(blocks)), outputs.copy()
    full_sizes = {**columns, **{axis: np.float64(form.sizes[axis]) for axis in (*form.reduced, *form.columns)}}
    point = {**columns, **{axis: np.float64(1.0) for axis in (*form.reduced, *form.columns)}}
    for load in form.body_loads:
        tensor = form.expr.tensor_by_name[load.tensor]
        moved = point_elements = row = np.ones(len(blocks))
        for index, size in zip(load.indices, tensor.shape, strict=True):
            dimension = data_dimension(index)
            row = np.minimum(dimension.extent(full_sizes), size) + 0.0 * moved
            moved = moved * row
            point_elements = point_elements * dimension.extent(point)
        traffic += moved * tensor.element_bytes * _row_waste(row, tensor.shape[-1:], tensor.element_bytes, device)
        footprint += point_elements
    below = device.l2 or device.dram
    output, last = form.expr.output, form.final.axes[-1] if form.final.axes else ""
    stored = output.size_bytes * _row_waste(columns.get(last, outputs), output.shape[-1:], output.element_bytes, device)
    memory = traffic * count / below.bandwidth_bytes_per_second + placed.compulsory_seconds
    memory = np.maximum(memory + stored / device.dram.bandwidth_bytes_per_second, count * device.block_launch_seconds)
    return np.maximum(arithmetic, memory) + LEAK * np.minimum(arithmetic, memory), footprint


def _row_waste(row: Floats, shape: tuple[int, ...], element_bytes: int, device: DeviceSpec) -> Floats:
    """Bytes in whole transactions per byte wanted, of a tile's rows of ``row`` elements; one for whole rows."""
    transaction = device.dram.transaction_bytes
    wanted = row * element_bytes
    rounded = np.ceil(wanted / transaction) * transaction / wanted
    return np.where(row >= shape[0], 1.0, rounded) if shape else rounded


def _unit_rate(placed: PlacedForm, matrix: bool) -> float:
    """FLOP/s of one unit, by matrix instructions or without."""
    return (placed.rate if matrix else placed.ordinary_rate).flops / placed.device.unit_count


def schedule_seconds(table: ScheduleTable, placed: PlacedForm, *, any_step: bool = False) -> tuple[Floats, Floats]:
    """Screened time of whole schedules, infinite for those that cannot run, and their footprints in bytes of shared
    memory and registers.

    Args:
        table: the schedules.
        placed: their operator on a device.
        any_step: whether the best step is still to be found: waiting for memory then costs nothing.
    """
    form, device = placed.form, placed.device
    units, lanes = device.unit_count, device.warp_lanes
    matrix = table.has_warp_tiles and form.roles is not None
    registers, shared = registers_per_thread(table), shared_bytes(table)
    most_registers = device.limits.registers_per_thread
    threads, blocks = table.threads_per_block, table.block_count
    resident = blocks_per_unit(table, device, np.minimum(registers, most_registers), shared)
    warps = -(-threads // lanes)
    busiest_blocks = -(-blocks // units)
    waves = -(-blocks // (np.maximum(1, resident) * units))
    points = product(table.block.values(), table.count) * table.reduced_points.astype(np.float64)
    operations = max(1.0, form.body_operations / 2.0)
    arithmetic = points * operations * 2.0 / _unit_rate(placed, matrix)
    reads, passes = _operand_reads(table, device)
    if not matrix:
        issued = table.accumulators * operations
        arithmetic = arithmetic * (warps * lanes / threads) * np.maximum(1.0, (issued + reads + 2.0) / (2.0 * issued))
    idle = np.maximum(1.0, device.teu.group_size / (warps * np.minimum(np.maximum(1, resident), busiest_blocks)))
    passes_per_second = device.shared.bandwidth_bytes_per_second / units / LINE_BYTES
    ports = passes * warps * np.ceil(table.reduced_points / table.reduce_threads) / passes_per_second
    spilled = np.maximum(0, registers - most_registers)
    ports = ports + spilled * 2.0 * table.reduced_points * warps / passes_per_second
    step_bytes = _step_bytes(table, device)
    latency = device.dram.latency_seconds or LATENCY_SECONDS
    running = np.minimum(blocks, np.maximum(1, resident) * units)
    in_flight = running * np.minimum(step_bytes, threads * BYTES_PER_THREAD)
    below = device.l2 or device.dram
    rate = np.minimum(below.bandwidth_bytes_per_second, np.maximum(1.0, in_flight) / latency)
    memory = step_bytes * table.step_count * blocks / rate
    alone = arithmetic * np.maximum(1.0, device.teu.group_size / warps) + ports
    chain = waves * (alone if any_step else table.step_count * latency + alone)
    stages = np.stack([arithmetic * busiest_blocks * idle, ports * busiest_blocks, memory])
    floor = placed.compulsory_seconds
    total = (1 - LEAK) * np.maximum(stages.max(axis=0), floor) + LEAK * (stages.sum(axis=0) + floor)
    total = np.maximum(np.maximum(total, chain), blocks * device.block_launch_seconds) + device.launch_overhead_seconds
    footprint = shared + 4.0 * np.minimum(registers, most_registers) * threads
    return np.where(resident > 0, total, np.inf), footprint


def _operand_reads(table: ScheduleTable, device: DeviceSpec) -> tuple[Floats, Floats]:
    """Read instructions of a thread, and passes of a warp through shared memory or L1, per point of the reduction.

    Without addresses: lanes that differ along the axes of an operand read different words, spread evenly over banks.
    """
    lanes_along: dict[str, Ints] = {}
    free_lanes = np.full(table.count, device.warp_lanes, dtype=np.int64)
    for axis in reversed(table.form.spatial):
        lanes_along[axis] = np.minimum(table.threads[axis], free_lanes)
        free_lanes = np.maximum(1, free_lanes // lanes_along[axis])
    width_bytes = device.shared.bank_width_bytes or 4
    row_bytes = (device.shared.bank_count or 32) * width_bytes
    reads = passes = np.zeros(table.count)
    for load in table.form.body_loads:
        count, vector = table.operand_elements[load], table.operand_width[load]
        instructions = -(-count // vector)
        element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
        distinct, lines = _distinct(table, load, lanes_along, element_bytes)
        staged = np.maximum(1.0, distinct * vector * element_bytes / row_bytes)
        passes_each = np.where(table.cached[load.tensor], staged, lines)
        if table.has_warp_tiles:
            passes_each = np.where(table.warp_tile, vector * element_bytes / row_bytes, passes_each)
        reads, passes = reads + instructions, passes + instructions * passes_each
    return reads, passes


def _distinct(
    table: ScheduleTable, load: Load, lanes_along: dict[str, Ints], element_bytes: int
) -> tuple[Floats, Floats]:
    """Different elements that a warp reads of a load at once, and the cache lines they lie in; ``lanes_along``: lanes
    of a warp side by side along each axis."""
    distinct = lines = np.ones(table.count)
    for position, index in enumerate(load.indices):
        lanes = np.ones(table.count)
        span = np.ones(table.count)
        for axis, coefficient in index.terms:
            if axis in lanes_along:
                lanes = lanes * lanes_along[axis]
                span = span + abs(coefficient) * table.thread[axis] * (lanes_along[axis] - 1)
        distinct = distinct * lanes
        if position == len(load.indices) - 1:
            lines = lines * np.minimum(lanes, np.ceil(span * element_bytes / LINE_BYTES))
        else:
            lines = lines * lanes
    return distinct, lines


def _step_bytes(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Bytes that one block fetches in one step; rows of a tile count in whole transactions."""
    transaction = (device.l2 or device.dram).transaction_bytes
    total = np.zeros(table.count)
    for load in table.form.body_loads:
        tensor = table.form.expr.tensor_by_name[load.tensor]
        extents = table.extents(load)
        if not extents:
            continue
        clipped = [np.minimum(extent, size) for extent, size in zip(extents, tensor.shape, strict=True)]
        row = clipped[-1] * float(tensor.element_bytes)
        rows = product(clipped[:-1], table.count)
        spans_row = clipped[-1] >= tensor.shape[-1]
        total = total + rows * np.where(spans_row, row, np.ceil(row / transaction) * transaction)
    return total
