"""RATIONAL: a kernel as a pipeline whose slowest stage sets the pace (thesis 5.3.3, 5.4.3).

Stages are the arithmetic units, shared memory, the way from L2 to the units, and DRAM. Each has a time for the whole
kernel, from the work per block and the rate of the layer; waves, resident blocks and the latency of a synchronised
step say how much of that rate a launch can use. All functions work on a :class:`ScheduleTable`, one entry per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hal import DeviceSpec, MemoryLayer
from sokoban.banks import cache_lines, wavefronts
from sokoban.expression import REDUCTION_IDENTITY, Load
from sokoban.kernel_form import KernelForm, operation_count
from sokoban.occupancy import (
    blocks_per_unit,
    granted_registers,
    registers_per_thread,
    shared_bytes,
    spilled_registers,
)
from sokoban.schedule import TileSchedule
from sokoban.table import Bools, Floats, Ints, ScheduleTable, product
from sokoban.transactions import dram_bytes, super_tile, tile_transaction_bytes
from sokoban.vectors import VECTOR_BYTES

#: Pipeline stages in the order in which they are shown.
STAGES = ("compute", "shared", "l2", "dram", "latency", "block_launch")

#: Share of the other stages' time that the slowest one does not hide. A round figure: imperfect overlap is of this
#: order on every GPU that published micro-benchmarks cover; no measurement behind this project fixes it better.
OVERLAP_LEAK = 0.1

#: Elements of a scattered transaction that a thread still finds in L1 when it comes to them.
L1_REUSE = 4

#: Latencies where a spec does not give its own: published figures for NVIDIA GPUs lie between 350 and 600 ns.
DEFAULT_LATENCY_SECONDS = 500e-9


@dataclass(frozen=True)
class Estimate:
    """Predicted time of one schedule.

    Attributes:
        seconds: launch overhead included.
        bound: the stage that sets the pace.
        stage_seconds: time of every stage for the whole kernel, by name.
        registers: estimated 32-bit registers per thread.
        shared_bytes: shared memory per block.
        blocks_per_unit: resident blocks of a unit.
        wave_count: rounds of blocks, the last one counted in full.
    """

    seconds: float
    bound: str
    stage_seconds: Mapping[str, float]
    registers: int
    shared_bytes: int
    blocks_per_unit: int
    wave_count: int


@dataclass(frozen=True, eq=False)
class EstimateTable:
    """Estimates of all schedules of a table; see :class:`Estimate`. Schedules that cannot run take infinite time."""

    seconds: Floats
    stage_seconds: Mapping[str, Floats]
    registers: Ints
    shared_bytes: Ints
    blocks_per_unit: Ints
    wave_count: Ints

    def row(self, position: int) -> Estimate:
        """The estimate of one schedule."""
        return self.rows([position])[0]

    def rows(self, positions: Sequence[int]) -> list[Estimate]:
        """The estimates of some schedules."""
        pick = np.asarray(positions, dtype=np.int64)
        names = list(self.stage_seconds)
        stages = np.stack([self.stage_seconds[name] for name in names])[:, pick]
        columns = zip(
            self.seconds[pick].tolist(),
            stages.argmax(axis=0).tolist(),
            stages.T.tolist(),
            self.registers[pick].tolist(),
            self.shared_bytes[pick].tolist(),
            self.blocks_per_unit[pick].tolist(),
            self.wave_count[pick].tolist(),
            strict=True,
        )
        return [
            Estimate(seconds, names[bound], dict(zip(names, times, strict=True)), registers, shared, resident, waves)
            for seconds, bound, times, registers, shared, resident, waves in columns
        ]


def estimate_schedules(form: KernelForm, device: DeviceSpec, schedules: Sequence[TileSchedule]) -> EstimateTable:
    """Predict every schedule of ``schedules``."""
    return estimate(ScheduleTable.of(form, schedules), device)


def estimate(table: ScheduleTable, device: DeviceSpec) -> EstimateTable:
    """Predict every row: the slowest stage, a share of the others that it does not hide, and the launch."""
    form = table.form
    registers = registers_per_thread(table)
    shared = shared_bytes(table)
    granted = granted_registers(table, device, registers)
    spilled = spilled_registers(device, registers, granted)
    registers = granted
    resident = blocks_per_unit(table, device, registers, shared)
    units = device.unit_count
    per_wave = np.maximum(1, resident) * units
    blocks = table.block_count
    waves = -(-blocks // per_wave)
    share = unit_share(blocks, units)
    warps = -(-table.threads_per_block // device.warp_lanes)
    schedulers = device.teu.group_size
    arithmetic = compute_seconds_per_block(table, device)
    # Fewer resident warps than schedulers leave some of them without work.
    idle = np.maximum(1.0, schedulers / np.maximum(1, warps * np.minimum(resident, share)))
    single = np.maximum(1.0, schedulers / warps)
    banks = shared_seconds_per_block(table, device) + spill_seconds_per_block(table, device, spilled)
    fetched = fetched_bytes_per_block(table, device) * blocks
    stored = stored_bytes(table, device)
    l2 = device.l2 or device.dram
    in_flight = in_flight_bytes(table, device, resident)
    together = super_tile(table, per_wave)
    read = sum(dram_bytes(table, load, device, together) for load in form.body_loads)
    extra = sum(form.expr.tensor_by_name[load.tensor].size_bytes for load in form.final_loads)
    dram = np.minimum(read, np.maximum(fetched, 1.0)) + stored + extra
    stages = {
        "compute": arithmetic * share * idle,
        "shared": banks * share,
        "l2": (fetched + stored) / sustained_rate(l2, in_flight),
        "dram": dram / sustained_rate(device.dram, in_flight),
        "latency": latency_seconds(table, device, waves, arithmetic * single + banks),
        "block_launch": blocks * device.block_launch_seconds,
    }
    seconds = pipeline_seconds(stages) + device.launch_overhead_seconds
    seconds = np.where(resident > 0, seconds, np.inf)
    return EstimateTable(seconds, stages, registers, shared, resident, waves)


def pipeline_seconds(stages: Mapping[str, Floats]) -> Floats:
    """``max(T_i) + leak * (sum(T_i) - max(T_i))`` over the stages that compete for issue slots and queues.

    A pipeline runs at the pace of its slowest stage (5.4.3); real ones do not overlap the others entirely, which also
    decides between schedules that share the slowest stage. ``latency`` and ``block_launch`` are lower bounds, not work.
    """
    work = [stages[name] for name in ("compute", "shared", "l2", "dram")]
    slowest = np.maximum.reduce(work)
    total = slowest + OVERLAP_LEAK * (work[0] + work[1] + work[2] + work[3] - slowest)
    return np.maximum(np.maximum(total, stages["latency"]), stages["block_launch"])


def unit_share(blocks: Ints, units: int) -> Ints:
    """Blocks that the busiest unit runs: ``ceil(blocks / units)``; the others wait for it at the end."""
    return -(-blocks // units)


def compute_seconds_per_block(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Time of a block's arithmetic on one unit that it has to itself.

    Warps are issued whole (5.4.3: throughput falls to N / (ceil(N / k) k) of the peak). An instruction scheduler
    issues one instruction per cycle and keeps its lanes busy for ``warp / lanes`` cycles with each FMA: operand reads
    and addressing are free as long as they fit between.
    """
    form = table.form
    flops_rate = device.sustained_flops(form.expr.accumulate if form.expr.accumulate in device.dtypes else "float32")
    unit_rate = flops_rate / device.unit_count
    points = product(table.block.values(), table.count) * table.reduced_points
    warps = -(-table.threads_per_block // device.warp_lanes)
    lanes_used = table.threads_per_block / (warps * device.warp_lanes)
    operations = max(1.0, _issue_operations(form))
    density = issue_efficiency(table, device, operations)
    scalar: Floats = points * operations * 2.0 / unit_rate / lanes_used / density
    matrix = device.matrix_instruction(_input_dtype(form)) if table.has_warp_tiles else None
    if matrix is None:
        return scalar
    return np.where(table.warp_tile, points * 2.0 / (matrix.sustained_flops / device.unit_count), scalar)


def _input_dtype(form: KernelForm) -> str:
    return form.expr.tensor_by_name[form.body_loads[0].tensor].dtype


def _issue_operations(form: KernelForm) -> float:
    """Arithmetic instructions per point of the body: a multiply and an add fuse into one."""
    reduction = form.reduction
    count = operation_count(form.body) + (1 if reduction else 0)
    if reduction is not None and reduction.function == "sum" and count >= 2:
        count -= 1
    assert reduction is None or reduction.function in REDUCTION_IDENTITY
    return float(count)


def issue_efficiency(table: ScheduleTable, device: DeviceSpec, operations: float) -> Floats:
    """Share of the arithmetic rate that the inner loop's instruction mix allows, at most one.

    Per point of the reduction a thread issues ``accumulators * operations`` arithmetic instructions, its operand
    reads (four adjacent words at once where the register tile has them) and about two of addressing and looping.
    """
    lanes = device.peak_flops("float32") / (
        2.0 * device.unit_count * device.clocks.boost_hz * max(1, device.teu.group_size)
    )
    cycles = max(1.0, device.warp_lanes / lanes)
    arithmetic = table.accumulators * operations
    reads = sum(-(-table.operand_elements[load] // table.operand_width[load]) for load in table.form.body_loads)
    issued = arithmetic + reads + 2.0
    return np.minimum(1.0, arithmetic * cycles / np.maximum(arithmetic * cycles, issued))


def shared_seconds_per_block(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Time of a block's operand reads: passes of every warp, one per cycle and unit (5.5.2).

    Shared memory and L1 are one port: an operand that is not staged takes a pass per line it touches.
    """
    banks, width = device.shared.bank_count or 32, device.shared.bank_width_bytes or 4
    passes_per_second = device.shared.bandwidth_bytes_per_second / device.unit_count / (banks * width)
    warps = -(-table.threads_per_block // device.warp_lanes)
    points = np.ceil(table.reduced_points / table.reduce_threads)
    total = np.zeros(table.count)
    for load in table.form.body_loads:
        count, vector = table.operand_elements[load], table.operand_width[load]
        staged = table.cached[load.tensor]
        words = np.maximum(1, vector * table.form.expr.tensor_by_name[load.tensor].element_bytes // width)
        if staged.all():
            passes = wavefronts(table, load, device, words)
        elif staged.any():
            passes = np.where(staged, wavefronts(table, load, device, words), cache_lines(table, load, device))
        else:
            passes = cache_lines(table, load, device)
        passes = passes * -(-count // vector)
        if table.has_warp_tiles:
            # A fragment of a matrix instruction is read once per warp, at full width.
            spread = count * table.form.expr.tensor_by_name[load.tensor].element_bytes / (banks * width)
            passes = np.where(table.warp_tile, spread, passes)
        total = total + passes
    return total * points * warps / passes_per_second


def spill_seconds_per_block(table: ScheduleTable, device: DeviceSpec, spilled: Ints) -> Floats | float:
    """Time of a block's spills: at every point of the reduction each spilled value is read from L1 and written back,
    a pass per warp each way."""
    if not spilled.any():
        return 0.0
    line_bytes = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
    passes_per_second = device.shared.bandwidth_bytes_per_second / device.unit_count / line_bytes
    warps = -(-table.threads_per_block // device.warp_lanes)
    return 2.0 * spilled * table.reduced_points * warps / table.reduce_threads / passes_per_second


def fetched_bytes_per_block(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Bytes a block reads from L2 in transactions, all steps together (W_i of 5.4.3 with real transactions).

    A staged tile is read once per step. Without staging neighbouring threads share lines through L1, so that a block
    touches its tile once per step too, as long as the lanes of a warp walk the innermost dimension.
    """
    transaction = (device.l2 or device.dram).transaction_bytes
    total = np.zeros(table.count)
    for load in table.form.body_loads:
        coalesced = tile_transaction_bytes(table, load, table.block_tile, transaction)
        staged = table.cached[load.tensor]
        if not staged.all():
            together = _lanes_walk_innermost(table, load) | staged
            # A transaction per element, of which L1 keeps some for the next elements of the same thread.
            scattered = tile_transaction_bytes(table, load, table.block_tile, transaction, by_lane=True) / L1_REUSE
            coalesced = np.where(together, coalesced, np.maximum(coalesced, scattered))
        total = total + coalesced
    passes = len(table.form.reductions) + 1 if table.form.kind == "rows" else 1
    return total * table.step_count * passes


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


def stored_bytes(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Bytes of the output in transactions, whole kernel."""
    form = table.form
    output = form.expr.output
    last = form.final.axes[-1] if form.final.axes else None
    if last is None or last not in table.block:
        return np.full(table.count, float(output.size_bytes))
    run = np.minimum(table.block[last], form.sizes[last]) * output.element_bytes
    transaction = device.dram.transaction_bytes
    waste = np.where(
        table.block[last] >= form.sizes[last], 1.0, np.ceil(run / transaction) * transaction / np.maximum(1, run)
    )
    return output.size_bytes * waste


def in_flight_bytes(table: ScheduleTable, device: DeviceSpec, resident: Ints) -> Floats:
    """Bytes that the blocks running at once, ``min(blocks, resident * units)``, have under way: their next data tiles,
    but no more per thread than a handful of loads of 16 bytes."""
    tensors = table.form.expr.tensor_by_name
    staged = sum(
        product(table.extents(x), table.count) * tensors[x.tensor].element_bytes for x in table.form.body_loads
    )
    running = np.minimum(table.block_count, resident * device.unit_count)
    return running * np.minimum(staged, table.threads_per_block * 4.0 * VECTOR_BYTES)


def sustained_rate(layer: MemoryLayer, in_flight: Floats) -> Floats:
    """Bytes per second that the requests in flight can draw from a layer: its rate, or by Little's law
    ``in_flight / latency`` where that is less; never below a fiftieth of the rate."""
    rate = layer.bandwidth_bytes_per_second
    return np.clip(in_flight / (layer.latency_seconds or DEFAULT_LATENCY_SECONDS), rate / 50, rate)


def latency_seconds(table: ScheduleTable, device: DeviceSpec, waves: Ints, alone: Floats) -> Floats:
    """The longest chain of waiting: every wave walks its steps, and each step waits for memory once.

    Inside a block fetch and compute of a step follow each other, with a barrier between; other resident blocks fill
    the gap, but no wave is shorter than one block that has the unit's arithmetic and banks (``alone``, seconds) to
    itself: ``waves * (steps * latency + alone)``.
    """
    latency = device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS
    return (table.step_count * latency + alone) * waves
