"""The stages of RATIONAL's pipeline, a function each: what every part of the hardware needs for a program's work.

Seconds of one step of all blocks that a unit runs at once, or of the whole kernel where that is said. Numbers of a
board come from its spec; the constants here are about compilers and are the same for every board.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import FRAGMENT
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import data_dimension, read_bytes
from sokoban.language.expression import REDUCTION_IDENTITY, Load
from sokoban.model.gpu.banks import cache_lines
from sokoban.model.gpu.fetch import ROLLED_LOADS, UNROLLED_LOADS, Fetch
from sokoban.model.gpu.issue import warp_instructions
from sokoban.model.gpu.reuse import bytes_of_all_steps
from sokoban.model.gpu.row_work import bytes_again, row_bytes, row_passes
from sokoban.model.gpu.scales import scale_bytes, scale_instructions, scale_passes
from sokoban.model.gpu.step import BlockStep, busiest_scheduler, direct_reads, working_warps
from sokoban.model.gpu.transactions import dram_bytes, stored_transactions, super_tile, tile_transaction_bytes
from sokoban.model.gpu.work import final_flops, is_flat
from sokoban.schedule.bulk_copies import read_share
from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, product, shares_rows

#: A load's latency on a busy memory system over the idle one; a synchronised step waits for a load, its store, two
#: barriers and the first operand: as many idle latencies.
LOADED_LATENCY = 1.28
STEP_LATENCY = 2.0

#: Cycles that a step of a pipeline waits although its copies are there: for the barrier, and for the warps that come
#: late to it.
BARRIER_CYCLES = 40.0

#: Cycles between two tiles of a unit that are neither the first copies nor the way of results: the next block starts
#: and computes its addresses. The 5.5 us of the regression of UNHIDDEN_ASYNCHRONOUS, less those.
START_CYCLES = 2100.0

#: Passes per spilled value and point of the reduction; passes per accumulator in local memory, whose lines do not fit
#: in L1 together.
SPILL_PASSES = 1.0
LOCAL_PASSES = 20.0

#: Length of a kernel by matrix instructions at which the clock has fallen half of the way to where the power limit
#: leaves it: that of the library's products, which rows of AIConfigurator's data base gave
#: (``roller/library/products/matrix_gemm.py``).
CLOCK_FALL_SECONDS = 4.5e-4

#: Elements of a scattered transaction that a thread still finds in L1 when it comes to them.
L1_REUSE = 4

#: Bytes of DRAM that one activation opens for one channel.
DRAM_PAGE_BYTES = 1024

#: Bytes of L1 that shared memory never takes: 28 KiB of 192 (A100), 256 (H100) and 128 (RTX 30), 32 KiB on Volta and
#: Turing (CUDA C++ Programming Guide, "Compute Capabilities").
LEAST_L1_BYTES = 28 << 10

#: Bytes of a line of L1.
LINE_BYTES = 128

#: Latencies where a spec does not give its own: published figures for NVIDIA GPUs lie between 350 and 600 ns.
DEFAULT_LATENCY_SECONDS = 500e-9


# Stages of a unit: seconds of one step of all blocks it runs


def compute_seconds(step: BlockStep) -> Floats:
    """Arithmetic pipelines: every warp issues its multiply-adds whole, partial warps too (5.4.3: throughput falls to
    N / (ceil(N / k) k) of the peak), and each keeps its lanes busy for ``warp / lanes`` cycles."""
    table, device, occupancy = step.table, step.device, step.occupancy
    rate = device.peak_flops(step.placed.arithmetic_dtype) / device.teu_count
    per_instruction = 2.0 * device.warp_lanes / rate
    scalar: Floats = (step.arithmetic * per_instruction + address_seconds(step)) * busiest_scheduler(step)
    matrix = step.placed.matrix_rates if table.has_warp_tiles else None
    if matrix is None:
        return scalar
    points = product(table.block.values(), table.count) * table.step_points
    peak = _by_instruction(step, "peak_flops", matrix.peak_flops)
    fragments = points * 2.0 / (peak / device.unit_count) * occupancy.running
    # Too few warps leave matrix units idle, as they leave schedulers.
    idle = np.maximum(1.0, device.teu.group_size / (working_warps(step) * occupancy.running))
    fragments = fragments * idle
    if table.form.scale_loads:
        fragments = np.maximum(fragments, _turn_seconds(step, fragments))
    return np.where(table.warp_tile, fragments, scalar)


def _turn_seconds(step: BlockStep, fragments: Floats) -> Floats:
    """A step of one warp of a scheduler whose sums are scaled: it multiplies, then adds what it has scaled. A warp
    group issues nothing while it multiplies. Meanwhile the matrix units have other warps, or nothing.

    Args:
        step: of all blocks that a unit runs.
        fragments: seconds of the matrix units for the products of all of their warps.
    """
    table = step.table
    warps = np.maximum(1.0, working_warps(step) * step.occupancy.running / step.device.teu.group_size)
    between = np.where(table.wgmma, warp_instructions(step), scale_instructions(table))
    turn: Floats = fragments / warps + between / step.device.clocks.boost_hz
    return turn


def address_seconds(step: BlockStep) -> Floats:
    """Time of a warp for the addresses of its reads in place, on the pipelines that multiply integers: ptxas adds the
    upper halves of 64-bit addresses there."""
    device = step.device
    rate = device.peak_flops("int32" if "int32" in device.dtypes else step.placed.arithmetic_dtype)
    return step.addresses * (2.0 * device.warp_lanes / (rate / device.teu_count))


def _by_instruction(step: BlockStep, figure: str, by_warp: float) -> Floats:
    """A rate of matrix instructions in FLOP/s, by row: that of warp groups, or of single warps."""
    groups = step.placed.warp_group_rates if step.table.wgmma.any() else None
    return np.where(step.table.wgmma, by_warp if groups is None else getattr(groups, figure), by_warp)


def shared_seconds(step: BlockStep) -> Floats:
    """Shared memory, L1 and the load/store unit are one port: a pass per cycle and unit (5.5.2).

    Operand reads by what the banks make of a warp's addresses, the fetch by lines and words stored,
    and whatever lives in local memory.
    """
    table, device, occupancy = step.table, step.device, step.occupancy
    warps = working_warps(step)
    passes: Floats = np.zeros(table.count)
    for load, part in step.fetches.items():
        staged = table.cached[load.tensor]
        operand = _fragment_passes(table, load, device) if table.has_warp_tiles else None
        read = warps * (step.reads[load].passes if load in step.reads else part.loads)
        passes = passes + (read if operand is None else np.where(table.warp_tile, operand * warps, read))
        passes = passes + np.where(staged, np.where(table.bulk, part.bulk_passes, part.wavefronts), 0.0)
    if step.rows is not None:
        passes = np.where(shares_rows(table), warps * row_passes(table, device, step.rows), passes)
    local = step.nest.local_share
    homeless = local * (LOCAL_PASSES * table.accumulators) + (1.0 - local) * (SPILL_PASSES * occupancy.spilled)
    passes = passes + warps * table.thread_points * homeless
    # Every value that does not wait in a register for its next use is stored once, and read again.
    passes = passes + warps * 2.0 * step.window_spills
    if table.form.scale_loads:
        passes = passes + warps * scale_passes(table)
    return passes * occupancy.running / passes_per_second(device)


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


def l2_seconds(step: BlockStep) -> Floats:
    """The way from L2 to a unit, which all units together saturate: bytes in transactions (W_i of 5.4.3)."""
    l2 = step.device.l2 or step.device.dram
    return l2_bytes(step) * step.occupancy.running / (l2.bandwidth_bytes_per_second / step.device.unit_count)


def l2_bytes(step: BlockStep) -> Floats:
    """Bytes that a block takes from L2 in a step, and what it spills.

    A staged tile is read once per step, what the blocks of a cluster have in common once by all of them, and what L1
    has of earlier steps not again (:func:`read_bytes_of_step`). Without staging neighbouring threads share lines
    through L1, so that a block touches its tile once per step too, as long as the lanes of a warp walk the innermost
    dimension.
    """
    table = step.table
    l2 = step.device.l2 or step.device.dram
    block_bytes: Floats = np.zeros(table.count)
    for load, part in step.fetches.items():
        moved = read_bytes_of_step(step, load, part) * read_share(table, load)
        staged = table.cached[load.tensor]
        if not staged.all():
            together = _lanes_walk_innermost(table, load) | staged
            # A transaction per element, of which L1 keeps some for the next elements of the same thread.
            scattered = tile_transaction_bytes(table, load, table.block_tile, l2.transaction_bytes, by_lane=True)
            moved = np.where(together, moved, np.maximum(moved, scattered / L1_REUSE))
        block_bytes = block_bytes + moved
    if step.rows is not None and step.form.is_rows:
        block_bytes = row_bytes(table, l2.transaction_bytes, step.rows)
    if step.form.scale_loads:
        block_bytes = block_bytes + scale_bytes(table, step.device)
    return block_bytes + local_bytes(step)


def read_bytes_of_step(step: BlockStep, load: Load, part: Fetch) -> Floats:
    """Bytes of a tile that a block reads in a step past L1, in the mean of all steps: rows of windows, and ends of
    transactions, that an earlier step has read are in L1 as long as it has room for what the blocks of a unit read
    meanwhile. Asynchronous and bulk copies pass by L1."""
    table, device, form = step.table, step.device, step.form
    through = table.cached[load.tensor] & ~table.asynchronous & ~table.bulk & ~table.mma
    if not form.reduced or not through.any():
        return part.bytes
    transaction = (device.l2 or device.dram).transaction_bytes
    running = step.occupancy.running
    room = device.shared.capacity_bytes + LEAST_L1_BYTES - step.occupancy.shared * running

    def bytes_of(each: Load, tile: Mapping[str, Ints]) -> Floats:
        return tile_transaction_bytes(table, each, tile, transaction)

    each_block = bytes_of_all_steps(table, load, table.block, np.maximum(room, LEAST_L1_BYTES) / running, bytes_of)
    return np.where(through, np.minimum(part.bytes, each_block / table.step_count), part.bytes)


def local_bytes(step: BlockStep) -> Floats:
    """Bytes that a block's spilled values take to L2 in a step: L1 writes through what is stored (NVIDIA, "Volta tuning
    guide", 2017). Values that wait for their next use in an unrolled window are too many to be read from L1 again."""
    table = step.table
    values = step.occupancy.spilled * table.thread_points + 2.0 * step.window_spills
    return values * (4.0 * table.threads_per_block)


def stored_seconds_per_block(step: BlockStep) -> Floats:
    """Writing a block's outputs to L2, in the transactions of its warps."""
    table, device = step.table, step.device
    l2 = device.l2 or device.dram
    elements = table.form.expr.output.element_count / table.block_count
    moved = elements * stored_transactions(table, device) * l2.transaction_bytes
    return moved / (l2.bandwidth_bytes_per_second / device.unit_count)


def final_seconds_per_block(step: BlockStep) -> Floats:
    """The arithmetic of a block's final statement behind its last step. Flat schedules, and those whose threads share
    rows, count that with the arithmetic of their one step."""
    table = step.table
    outputs = product(table.block.values(), table.count)
    final: Floats = outputs * final_seconds(step.placed)
    if table.has_warp_tiles:
        final = np.where(table.warp_tile, outputs * final_seconds(step.placed, near=True), final)
    return np.where(is_flat(table) | shares_rows(table), 0.0, final)


def final_seconds(placed: PlacedForm, *, near: bool = False) -> float:
    """Seconds of a unit for the final statement of one element behind a reduction; ``near`` as in
    :func:`sokoban.model.gpu.work.final_flops`."""
    device = placed.device
    dtype = "float64" if placed.form.expr.final_dtype == "float64" else "float32"
    return final_flops(placed.form, near=near) / (device.peak_flops(dtype) / device.unit_count)


def waiting_seconds(step: BlockStep) -> Floats:
    """Time in which one block can do nothing, per step: the latency of its fetch.

    The first load of a synchronised step takes :data:`STEP_LATENCY`; more of them wait in line where the loads of a
    thread cannot all be under way together. Operands that are read in place wait besides (:func:`_direct_waits`).
    """
    table = step.table
    first: Floats = np.zeros(table.count)
    more: Floats = np.zeros(table.count)
    for load, part in step.fetches.items():
        staged = table.cached[load.tensor]
        first = np.maximum(first, np.where(staged, STEP_LATENCY, LOADED_LATENCY))
        further = part.batches - 1.0
        if (waits := table.waits.get(load.tensor)) is not None:
            further = np.where(waits > 0, (waits - 1) * far_latency(step), further)
        more = more + np.where(staged, further, 0.0)
    if not np.logical_and.reduce(list(table.cached.values())).all():
        more = more + _direct_waits(step)
    if step.rows is not None:
        first = np.where(shares_rows(table), LOADED_LATENCY, first)
        more = np.where(shares_rows(table), table.accumulators * step.rows.batches - 1.0, more)
    return latency_seconds(step.device) * (first + LOADED_LATENCY * more)


def pipelined_waiting(step: BlockStep, waiting: Floats, work: Floats, transfer: Floats) -> Floats:
    """:func:`waiting_seconds` where buffers let copies run ahead: ``work`` is the rest of a step of one block, of which
    its data take ``transfer`` from L2.

    With ``stages`` buffers the copies of ``stages - 1`` steps are under way, so that a block waits for as much of a
    latency and of the way from L2 per step as those steps do not cover, and at every barrier.
    """
    table = step.table
    if not table.has_stages:
        return waiting
    # Products of warp groups go on while their threads meet.
    ahead = np.maximum(1, table.stages - 1)
    barrier = np.where(table.wgmma, 0.0, BARRIER_CYCLES / step.device.clocks.boost_hz)
    late = np.maximum(0.0, (LOADED_LATENCY * latency_seconds(step.device) + transfer) / ahead - work) + barrier
    if table.form.scale_loads:
        # Scales are read when the step before begins, and used when their own ends.
        late = np.maximum(late, LOADED_LATENCY * cache_latencies(step.device)[0] - 2.0 * work)
    return np.where(table.stages > 1, np.minimum(late, waiting), waiting)


def filling_seconds(step: BlockStep) -> Floats:
    """Filling a pipeline's first buffer, once per block: other blocks compute meanwhile, where there are any. Blocks
    that compute one tile after another fill it once in all rounds together: for the next tile copies are under way
    while the last one is multiplied and its results leave."""
    latency = LOADED_LATENCY * latency_seconds(step.device)
    seconds: Floats = np.where(step.table.stages > 1, latency, 0.0) / step.occupancy.running
    return seconds / np.where(step.table.launched > 0, np.maximum(1.0, step.occupancy.rounds), 1.0)


def between_tiles_seconds(step: BlockStep) -> Floats:
    """Time of a block by ``mma.sync`` in which it multiplies nothing, but for its first copies and its stores: its
    start, and results that pass through shared memory by sixteen rows a warp, two barriers each time. Other blocks
    multiply meanwhile, where there are any."""
    table, device, roles = step.table, step.device, step.table.form.roles
    if roles is None:
        return np.zeros(table.count)
    width = device.shared.bandwidth_bytes_per_second / device.unit_count
    # In and out again, in sums of four bytes.
    through = 2.0 * 4.0 * table.block[roles.m] * table.block[roles.n] / width
    meetings = 2.0 * BARRIER_CYCLES * np.ceil(table.thread[roles.m] / FRAGMENT)
    # The first block of a unit starts with the kernel.
    starts = START_CYCLES * (1.0 - 1.0 / np.maximum(1.0, step.occupancy.rounds))
    seconds = through + (starts + meetings) / device.clocks.boost_hz
    return np.where(table.mma & ~table.bulk, seconds, 0.0) / step.occupancy.running


def latency_seconds(device: DeviceSpec) -> float:
    """Latency of an idle DRAM."""
    return device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS


def _direct_waits(step: BlockStep) -> Floats:
    """Waits of a thread for operands that it reads in place behind the first of a step, in loaded latencies of DRAM.

    Every unrolled body waits for its loads, several times where they are too many to be under way together. Lines that
    no earlier body has read come from L2, or from DRAM as often as the kernel's traffic does; all others are in L1.
    """
    table, device = step.table, step.device
    reads = lines = np.zeros(table.count)
    for load in step.fetches:
        in_place = ~table.cached[load.tensor]
        reads = reads + np.where(in_place, direct_reads(step, load), 0.0)
        lines = lines + np.where(in_place, _lines_along_step(table, load), 0.0)
    bodies = np.maximum(1.0, table.thread_points / step.nest.unrolled_points)
    together = np.where(step.nest.is_left, ROLLED_LOADS, UNROLLED_LOADS)
    waits = bodies * np.maximum(1.0, reads / bodies / together)
    new = np.minimum(waits, lines)
    l1_share = cache_latencies(device)[1] / latency_seconds(device)
    return np.where(reads > 0, np.maximum(0.0, new - 1.0) * far_latency(step) + (waits - new) * l1_share, 0.0)


def far_latency(step: BlockStep) -> Floats:
    """Latency of what L1 does not have, in latencies of DRAM: that of L2, or of DRAM as often as the kernel's traffic
    comes from there."""
    table, device = step.table, step.device
    l2_share = cache_latencies(device)[0] / latency_seconds(device)
    from_dram = np.minimum(1.0, dram_traffic(step) / (l2_bytes(step) * table.step_count * table.block_count))
    far: Floats = l2_share + (1.0 - l2_share) * from_dram
    return far


def _lines_along_step(table: ScheduleTable, load: Load) -> Floats:
    """Cache lines in which a thread finds what one of its outputs needs of ``load`` in a step."""
    lines: Floats = np.ones(table.count)
    tile = {**dict.fromkeys(table.block, table.ones), **table.step}
    for position, index in enumerate(load.indices, start=1):
        extent = data_dimension(index).extent(tile)
        if position == len(load.indices):
            extent = np.ceil(extent * table.form.expr.tensor_by_name[load.tensor].element_bytes / LINE_BYTES)
        lines = lines * extent
    return lines


def cache_latencies(device: DeviceSpec) -> tuple[float, float]:
    """Latencies of L2 and L1, which answers like the shared memory next to it; DRAM's where a spec gives none."""
    l2 = device.l2.latency_seconds if device.l2 is not None else None
    return l2 or latency_seconds(device), device.shared.latency_seconds or latency_seconds(device)


# The whole kernel


def dram_seconds(step: BlockStep) -> Floats:
    """Traffic of DRAM at the sustained rate."""
    return dram_traffic(step) / step.device.dram.bandwidth_bytes_per_second


def dram_traffic(step: BlockStep) -> Floats:
    """Compulsory bytes of DRAM, and those that L2 cannot keep for the blocks of the next round."""
    table, form, device, occupancy = step.table, step.form, step.device, step.occupancy
    together = super_tile(table, np.maximum(1, occupancy.resident) * device.unit_count)
    moved: Floats = np.full(table.count, float(form.expr.output.size_bytes))
    for load, part in step.fetches.items():
        fetched = np.maximum(1.0, part.bytes * table.step_count * table.block_count)
        read = np.minimum(dram_bytes(table, load, device, together), fetched)
        moved = moved + read * row_factor(table, load, device)
    others = {load.tensor for load in form.later_loads} - {load.tensor for load in step.fetches}
    moved = moved + sum(read_bytes(form.expr, form.expr.tensor_by_name[tensor]) for tensor in others)
    if step.rows is not None and form.is_rows:
        moved = moved + bytes_again(table, device, occupancy.running, step.rows)
    return moved


def row_factor(table: ScheduleTable, load: Load, device: DeviceSpec) -> Floats | float:
    """Factor of DRAM's time for reads whose lanes are each in a row (page) of their own.

    Then a row is opened for two transactions only, which is what L2 asks for at a time.
    """
    staged = table.cached[load.tensor]
    if device.dram.scattered_bytes_per_second is None or staged.all() or not load.indices:
        return 1.0
    pages = cache_lines(table, load, device, DRAM_PAGE_BYTES)
    return np.where(~staged & (pages >= device.warp_lanes / 2), opened_pages_factor(device), 1.0)


def opened_pages_factor(device: DeviceSpec) -> float:
    """Factor of DRAM's time where every row that it opens serves two transactions only; 1 where it was not measured.
    it."""
    scattered = device.dram.scattered_bytes_per_second
    return 1.0 if scattered is None else max(1.0, device.dram.bandwidth_bytes_per_second / (2.0 * scattered))


def power_seconds(step: BlockStep) -> Floats:
    """Arithmetic at the rate that the board sustains under load: its power limit lowers the clock of whatever would
    be faster, the longer the kernel the lower where both ends are known; 0 where the limit does not bind."""
    table, placed = step.table, step.placed
    points = table.block_count * product(table.block.values(), table.count) * table.reduced_points
    flops = points * max(1.0, issue_operations(placed.form)) * 2.0
    limit = placed.device.limited_flops(placed.arithmetic_dtype)
    seconds: Floats = np.zeros(table.count) if limit is None else flops / limit
    matrix = placed.matrix_rates if table.has_warp_tiles else None
    if matrix is None:
        return seconds
    fresh, settled = (
        points * 2.0 / _by_instruction(step, figure, getattr(matrix, figure))
        for figure in ("fresh_flops", "settled_flops")
    )
    limited = fresh + np.maximum(settled - fresh, 0.0) * settled / (settled + CLOCK_FALL_SECONDS)
    return np.where(table.warp_tile, limited, seconds)


def passes_per_second(device: DeviceSpec) -> float:
    """Passes through the banks of one unit: one a cycle, as vector reads of products on V100 and RTX 3090 show to a few
    per cent. The rate of a device without banks stands in its spec."""
    if device.shared.bank_count:
        return device.clocks.boost_hz
    return device.shared.bandwidth_bytes_per_second / device.unit_count / 128


def issue_operations(form: KernelForm) -> float:
    """Arithmetic instructions per point of the body: a multiply and an add fuse into one."""
    reduction = form.reduction
    count = form.body_operations
    if reduction is not None and reduction.function == "sum" and count >= 2:
        count -= 1
    assert reduction is None or reduction.function in REDUCTION_IDENTITY
    return float(count)


def _lanes_walk_innermost(table: ScheduleTable, load: Load) -> Bools:
    """True if neighbouring threads read neighbouring elements: what they stand along is the innermost dimension."""
    along_outputs, along_reduction = walks_innermost(table.form, load)
    if not table.form.reduces_contiguously:
        return np.full(table.count, along_outputs)
    return np.where(table.reduce_threads > 1, along_reduction, along_outputs)


def walks_innermost(form: KernelForm, load: Load) -> tuple[bool, bool]:
    """True if threads that stand along the outputs, and those that stand along the reduction, walk the innermost
    dimension of ``load``."""
    last = next((axis for axis in reversed(form.spatial) if form.sizes[axis] > 1), None)
    innermost = load.indices[-1] if load.indices else None
    along_outputs = innermost is None or last is None or innermost.coefficient(last) != 0
    along_outputs = along_outputs or not any([index.coefficient(last) for index in load.indices if last])
    along_reduction = innermost is None or any([a in form.reduced or a in form.columns for a, _ in innermost.terms])
    return along_outputs, along_reduction
