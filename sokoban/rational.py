"""RATIONAL: a kernel as a pipeline whose slowest stage sets the pace (thesis 5.3.3, 5.4.3).

A block walks its reduction in steps; in each it fetches data tiles and computes on them. Stages that all resident
blocks of a unit share are the arithmetic pipelines, the issue slots of the schedulers, shared memory with the
load/store unit, and the way from L2. The slowest of them takes the time of a step, unless a single block is slower all
by itself, because it waits for memory and at barriers; then nothing but more resident blocks helps. Rounds of blocks
(waves), DRAM, the rate at which blocks start, the power limit and the launch come on top.

Every stage is a function of its own over a :class:`ScheduleTable`, one entry per row. Numbers of a board come from its
spec; the constants here are about compilers and are the same for every board.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hal import DeviceSpec
from sokoban.banks import cache_lines
from sokoban.expression import REDUCTION_IDENTITY, Load
from sokoban.fetch import Fetch, fetch, loads_in_flight
from sokoban.kernel_form import KernelForm, operation_count
from sokoban.loops import LoopNest, loop_nest
from sokoban.occupancy import (
    FETCHED_REGISTERS,
    blocks_per_unit,
    granted_registers,
    registers_per_thread,
    shared_bytes,
    spilled_registers,
)
from sokoban.operands import OperandReads, operand_reads
from sokoban.schedule import TileSchedule
from sokoban.table import Bools, Floats, Ints, ScheduleTable, product
from sokoban.transactions import dram_bytes, stored_transactions, super_tile, tile_transaction_bytes

#: Pipeline stages in the order in which they are shown.
STAGES = ("compute", "issue", "shared", "l2", "dram", "latency", "block_launch")

#: Share of the other stages' time that the slowest one does not hide with one warp per scheduler, and how fast more
#: warps hide it. Imperfect overlap of this order is what programs on a V100 show; the figures move little between half
#: and twice as much.
UNHIDDEN = 0.25
HIDING = 0.15

#: Share of a step's waiting that other resident blocks do not fill.
UNHIDDEN_WAIT = 1.0

#: Exponent with which time on the units and time of DRAM add up: 1 would be no overlap, infinity a perfect one.
DRAM_OVERLAP = 4.0

#: Exponent with which the power limit takes over: a board throttles before the average says so, and of two programs at
#: the limit the one with less other work still is the faster.
POWER_SOFTNESS = 12.0

#: A load's latency on a busy memory system over the idle one; a synchronised step waits for a load, its store, two
#: barriers and the first operand: as many idle latencies.
LOADED_LATENCY = 1.28
STEP_LATENCY = 2.35

#: Instructions per unrolled body (counter, branch, addresses) and per step.
BODY_INSTRUCTIONS = 3.0
STEP_INSTRUCTIONS = 10.0

#: Instructions that guard a read in place at the edge of a padded tensor.
DIRECT_GUARD_INSTRUCTIONS = 1.5

#: Passes per spilled value and point of the reduction; passes per accumulator in local memory, whose lines do not fit
#: in L1 together.
SPILL_PASSES = 2.0
LOCAL_PASSES = 20.0

#: Operand words of an unrolled body per free register from which on the compiler may hoist more reads than it has room
#: for, from which on it is as likely as it gets, and what that costs on average over the programs it hits or spares.
HOISTED_WORDS = (5.0, 7.0)
HOISTING_RISK = 0.25

#: Elements of a scattered transaction that a thread still finds in L1 when it comes to them.
L1_REUSE = 4

#: Bytes of DRAM that one activation opens for one channel.
DRAM_PAGE_BYTES = 1024

#: Latencies where a spec does not give its own: published figures for NVIDIA GPUs lie between 350 and 600 ns.
DEFAULT_LATENCY_SECONDS = 500e-9

#: Rows that are worked on at a time: what belongs to a lane of a warp then stays in the cache of the CPU.
_CHUNK = 4096


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
    """Predict every row; large tables in pieces."""
    if table.count <= _CHUNK:
        return _estimate(table, device)
    parts = [_estimate(table.rows(slice(i, i + _CHUNK)), device) for i in range(0, table.count, _CHUNK)]
    return EstimateTable(
        np.concatenate([part.seconds for part in parts]),
        {name: np.concatenate([part.stage_seconds[name] for part in parts]) for name in STAGES},
        np.concatenate([part.registers for part in parts]),
        np.concatenate([part.shared_bytes for part in parts]),
        np.concatenate([part.blocks_per_unit for part in parts]),
        np.concatenate([part.wave_count for part in parts]),
    )


@dataclass(frozen=True, eq=False)
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


def _estimate(table: ScheduleTable, device: DeviceSpec) -> EstimateTable:
    form = table.form
    nest = loop_nest(table)
    fetches = {load: fetch(table, load, device) for load in form.body_loads}
    reads = {load: operand_reads(table, load, device, nest) for load in form.body_loads if form.reduction is not None}
    launch = launch_of(table, device, nest, fetches)
    # Seconds of one step on a unit that runs `running` blocks.
    busy = {
        "compute": compute_seconds(table, device, launch),
        "issue": issue_seconds(table, device, nest, launch, fetches, reads),
        "shared": shared_seconds(table, device, nest, launch, fetches, reads),
        "l2": l2_seconds(table, device, launch, fetches),
    }
    stores = launch.running * stored_seconds_per_block(table, device)
    together = step_seconds(busy, launch, device)
    waiting = waiting_seconds(table, device, fetches)
    alone = waiting + together / launch.running
    # What a step waits for is filled by other blocks, but not entirely: they tend to wait at the same time.
    unfilled = UNHIDDEN_WAIT * np.minimum(waiting, together / launch.running) / launch.running
    steps = table.step_count
    units = launch.rounds * (steps * (np.maximum(together, alone) + unfilled) + stores)
    stages: dict[str, Floats] = {name: launch.rounds * steps * seconds for name, seconds in busy.items()}
    power = power_seconds(table, device)
    stages["compute"] = np.maximum(stages["compute"], power)
    stages["l2"] = stages["l2"] + launch.rounds * stores
    stages["dram"] = dram_seconds(table, device, launch, fetches)
    stages["latency"] = launch.rounds * steps * alone
    stages["block_launch"] = table.block_count * device.block_launch_seconds
    seconds = _soft_maximum(units, stages["dram"], DRAM_OVERLAP)
    seconds = seconds * hoisting_factor(table, device, launch, nest, reads)
    seconds = _soft_maximum(seconds, power, POWER_SOFTNESS)
    seconds = np.maximum(seconds, stages["block_launch"]) + device.launch_overhead_seconds
    waves = -(-table.block_count // (np.maximum(1, launch.resident) * device.unit_count))
    seconds = np.where(launch.resident > 0, seconds, np.inf)
    return EstimateTable(seconds, stages, launch.registers, launch.shared, launch.resident, waves)


# Occupancy and rounds


def launch_of(table: ScheduleTable, device: DeviceSpec, nest: LoopNest, fetches: Mapping[Load, Fetch]) -> Launch:
    """Registers, resident blocks and rounds of blocks (5.4.3: a partial last round takes as long as a full one)."""
    needed = registers_per_thread(table, nest.local)
    loads = sum(
        np.where(table.cached[load.tensor], part.loads, direct_reads(table, load)) for load, part in fetches.items()
    )
    wanted = needed + np.minimum(loads, FETCHED_REGISTERS).astype(np.int64)
    registers = granted_registers(table, device, wanted)
    spilled = np.where(table.warp_tile, 0, spilled_registers(device, needed, registers))
    shared = shared_bytes(table)
    resident = blocks_per_unit(table, device, registers, shared)
    share = -(-table.block_count // device.unit_count)
    running = np.minimum(np.maximum(1, resident), share)
    warps = -(-table.threads_per_block // device.warp_lanes)
    return Launch(registers, spilled, shared, resident, running, share / running, warps)


def busiest_scheduler(launch: Launch, device: DeviceSpec) -> Ints:
    """Resident warps of the scheduler that has most: the others wait for it at every barrier."""
    return -(-launch.warps * launch.running // device.teu.group_size)


# Stages of a unit: seconds of one step of all blocks it runs


def compute_seconds(table: ScheduleTable, device: DeviceSpec, launch: Launch) -> Floats:
    """Arithmetic pipelines: every warp issues its multiply-adds whole, partial warps too (5.4.3: throughput falls to
    N / (ceil(N / k) k) of the peak), and each keeps its lanes busy for ``warp / lanes`` cycles."""
    rate = device.peak_flops(_arithmetic_dtype(table.form, device)) / device.teu_count
    per_instruction = 2.0 * device.warp_lanes / rate
    scalar: Floats = arithmetic_instructions(table) * per_instruction * busiest_scheduler(launch, device)
    matrix = device.matrix_instruction(_input_dtype(table.form)) if table.has_warp_tiles else None
    if matrix is None:
        return scalar
    points = product(table.block.values(), table.count) * product(table.step.values(), table.count)
    fragments = points * 2.0 / (matrix.peak_flops / device.unit_count) * launch.running
    # Too few warps leave matrix units idle, as they leave schedulers.
    idle = np.maximum(1.0, device.teu.group_size / (launch.warps * launch.running))
    return np.where(table.warp_tile, fragments * idle, scalar)


def arithmetic_instructions(table: ScheduleTable) -> Floats:
    """Arithmetic instructions of one thread during one step: a multiply and an add of a sum fuse into one."""
    return table.accumulators * _thread_points(table) * max(1.0, _issue_operations(table.form))


def issue_seconds(
    table: ScheduleTable,
    device: DeviceSpec,
    nest: LoopNest,
    launch: Launch,
    fetches: Mapping[Load, Fetch],
    reads: Mapping[Load, OperandReads],
) -> Floats:
    """Issue slots: an instruction per cycle and scheduler, whatever it is. FMA density (5.5.2) is what arithmetic
    gets of them beside operand reads, the fetch, and loop control."""
    instructions = arithmetic_instructions(table) + STEP_INSTRUCTIONS
    instructions = instructions + BODY_INSTRUCTIONS * _thread_points(table) / nest.unrolled_points
    for load, part in fetches.items():
        staged = table.cached[load.tensor]
        direct = reads[load].instructions if load in reads else part.loads
        if load.pad is not None:
            direct = np.where(staged, direct, direct * (1.0 + DIRECT_GUARD_INSTRUCTIONS))
        instructions = instructions + direct + np.where(staged, part.instructions, 0.0)
    seconds = instructions / _clock_hz(device) * busiest_scheduler(launch, device)
    # A matrix instruction stands for many multiply-adds; its loads are counted in passes.
    return np.where(table.warp_tile, 0.0, seconds) if table.has_warp_tiles else seconds


def shared_seconds(
    table: ScheduleTable,
    device: DeviceSpec,
    nest: LoopNest,
    launch: Launch,
    fetches: Mapping[Load, Fetch],
    reads: Mapping[Load, OperandReads],
) -> Floats:
    """Shared memory, L1 and the load/store unit are one port: a pass per cycle and unit (5.5.2).

    Operand reads by what the banks make of a warp's addresses, the fetch by lines and bank conflicts of its stores,
    and whatever lives in local memory.
    """
    passes: Floats = np.zeros(table.count)
    for load, part in fetches.items():
        staged = table.cached[load.tensor]
        operand = _fragment_passes(table, load, device) if table.has_warp_tiles else None
        read = launch.warps * (reads[load].passes if load in reads else part.loads)
        passes = passes + (read if operand is None else np.where(table.warp_tile, operand * launch.warps, read))
        passes = passes + np.where(staged, part.wavefronts, 0.0)
    points = _thread_points(table)
    homeless = np.where(nest.local, LOCAL_PASSES * table.accumulators, SPILL_PASSES * launch.spilled)
    passes = passes + launch.warps * points * homeless
    return passes * launch.running / _passes_per_second(device)


def _fragment_passes(table: ScheduleTable, load: Load, device: DeviceSpec) -> Floats:
    """Passes per warp and step in which matrix instructions read their fragments, each once, at full width."""
    row_bytes = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    return table.operand_elements[load] * element_bytes / row_bytes * product(table.step.values(), table.count)


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
    passes = len(table.form.reductions) + 1 if table.form.kind == "rows" else 1
    return total * passes * launch.running / (l2.bandwidth_bytes_per_second / device.unit_count)


def stored_seconds_per_block(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Writing a block's outputs to L2, in the transactions of its warps."""
    l2 = device.l2 or device.dram
    elements = table.form.expr.output.element_count / table.block_count
    moved = elements * stored_transactions(table, device) * l2.transaction_bytes
    return moved / (l2.bandwidth_bytes_per_second / device.unit_count)


def step_seconds(busy: Mapping[str, Floats], launch: Launch, device: DeviceSpec) -> Floats:
    """A step of all running blocks: ``max(T_i)`` (5.4.3) and what the slowest stage does not hide of the others.

    One warp per scheduler alternates between stages; the more there are, the better they overlap. Issue slots are not
    work of their own: they bound, they do not add.
    """
    slowest = np.maximum.reduce(list(busy.values()))
    others = busy["compute"] + busy["shared"] + busy["l2"] - slowest
    warps = np.maximum(1.0, launch.warps * launch.running / device.teu.group_size)
    return slowest + UNHIDDEN * np.maximum(others, 0.0) / warps**HIDING


def waiting_seconds(table: ScheduleTable, device: DeviceSpec, fetches: Mapping[Load, Fetch]) -> Floats:
    """What one block cannot do anything during, per step: the latency of its fetch.

    The first load of a synchronised step takes :data:`STEP_LATENCY`; more of them wait in line where the loads of a
    thread cannot all be under way together. Blocks without staged data wait for their operands in the same way.
    """
    latency = device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS
    first: Floats = np.zeros(table.count)
    more: Floats = np.zeros(table.count)
    for load, part in fetches.items():
        staged = table.cached[load.tensor]
        direct = _direct_batches(table, load)
        first = np.maximum(first, np.where(staged, STEP_LATENCY, LOADED_LATENCY))
        more = more + np.where(staged, part.batches, direct) - 1.0
    return latency * (first + LOADED_LATENCY * more)


def direct_reads(table: ScheduleTable, load: Load) -> Floats:
    """Reads of ``load`` in place, per thread and step."""
    return table.operand_elements[load] / table.operand_width[load] * _thread_points(table)


def _direct_batches(table: ScheduleTable, load: Load) -> Floats:
    """How often a thread that reads ``load`` from global memory waits, per step."""
    count = direct_reads(table, load)
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
    moved = moved + sum(form.expr.tensor_by_name[load.tensor].size_bytes for load in form.final_loads)
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


def power_seconds(table: ScheduleTable, device: DeviceSpec) -> Floats:
    """Arithmetic at the rate that the board sustains under load: its power limit lowers the clock of whatever would
    be faster."""
    form = table.form
    points = table.block_count * product(table.block.values(), table.count) * table.reduced_points
    flops = points * max(1.0, _issue_operations(form)) * 2.0
    seconds: Floats = flops / device.sustained_flops(_arithmetic_dtype(form, device))
    matrix = device.matrix_instruction(_input_dtype(form)) if table.has_warp_tiles else None
    return seconds if matrix is None else np.where(table.warp_tile, points * 2.0 / matrix.sustained_flops, seconds)


def hoisting_factor(
    table: ScheduleTable,
    device: DeviceSpec,
    launch: Launch,
    nest: LoopNest,
    reads: Mapping[Load, OperandReads],
) -> Floats | float:
    """Expected cost of operand reads that the compiler hoists without having registers for them.

    A large unrolled body over a full register file is where compilers spill without need, at times by a factor of ten.
    """
    if not reads:
        return 1.0
    operands = sum(np.minimum(elements, 64) for elements in table.operand_elements.values())
    most = granted_registers(table, device, np.full(table.count, 1 << 16))
    room = np.maximum(4, most - table.accumulators - operands)
    words = sum(part.words for part in reads.values())
    risky = (launch.spilled == 0) & ~table.warp_tile
    least, most_words = HOISTED_WORDS
    risk = HOISTING_RISK * np.clip((words / room - least) / (most_words - least), 0.0, 1.0)
    return 1.0 + np.where(risky, risk, 0.0)


def _soft_maximum(a: Floats, b: Floats, exponent: float) -> Floats:
    """``(a**p + b**p) ** (1/p)``: the larger one, and more where they are close."""
    larger = np.maximum(a, b)
    return larger * (1.0 + (np.minimum(a, b) / larger) ** exponent) ** (1.0 / exponent)


def _thread_points(table: ScheduleTable) -> Floats:
    """Points of the reduction that one thread handles during a step."""
    return np.ceil(product(table.step.values(), table.count) / table.reduce_threads)


def _passes_per_second(device: DeviceSpec) -> float:
    """Passes through the banks of one unit."""
    row_bytes = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
    return device.shared.bandwidth_bytes_per_second / device.unit_count / row_bytes


def _clock_hz(device: DeviceSpec) -> float:
    return device.clocks.boost_hz


def _arithmetic_dtype(form: KernelForm, device: DeviceSpec) -> str:
    return form.expr.accumulate if form.expr.accumulate in device.dtypes else "float32"


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
