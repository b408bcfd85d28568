"""RATIONAL for attention: products and exponentials of a step on a unit, blocks of unequal length, memory in parallel.

A step of a block multiplies its queries by a tile of keys, takes the exponentials, multiplies those by the values. A
warp does one after the other; what other warps of its scheduler fill of that is what FlashAttention 2, whose warps do
the same, was measured at (:data:`EXPOSED`). Everything else is counted: fragments, logits, bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapreplace

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES, MatrixInstruction
from sokoban.kernel.attention import AttentionKernel, GroupedHeads, SliceSum
from sokoban.kernel.block_range import BlockRange
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pages import rows_of_a_lookup
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.power import power_limited
from sokoban.model.gpu.stages import DEFAULT_LATENCY_SECONDS, LOADED_LATENCY
from sokoban.schedule.attention import (
    FRAGMENT_DEPTH,
    FRAGMENT_ROWS,
    GROUP_WARPS,
    LANES,
    AttentionSchedule,
    RowTiles,
    SliceSumSchedule,
    one_columns,
    padded,
    problem_band,
    shared_bytes,
)
from sokoban.schedule.pair import PairSchedule
from sokoban.schedule.warp_groups import MOVED_REGISTERS

#: Share of the shorter of products and exponentials that two warps of a scheduler leave exposed, and instructions per
#: logit besides its exponential and the shrinking of sums: what FlashAttention 2 shows on A100 and L40S (constants of
#: :mod:`roller.library.attention.constants`, chosen there on half of the measured shapes; 8.11 with the shrinking, one
#: instruction a logit in its tiles of 128 keys of 128 elements). The compiled loop of ours has 4 of them; the others
#: stand for chains that a count of instructions does not show.
EXPOSED, LOGIT_INSTRUCTIONS = 0.786, 7.1
#: The same where warp groups multiply: products run while their group takes exponentials, and one group's while another
#: does (FlashAttention 3 on H100, same place). Instructions are those of compiled loops of 128 rows by 64 and 128 keys
#: of 64 to 192 elements: per logit (its scaling, half of a comparison, a sum, half of a conversion), per product with
#: its descriptors, and per step of a thread; those of five tiles are off by 10 of 76 to 97 at most.
GROUP_EXPOSED, GROUP_LOGIT_INSTRUCTIONS, GROUP_PRODUCT_INSTRUCTIONS, GROUP_STEP_INSTRUCTIONS = 0.56, 3.0, 2.7, 53.0
#: Further instructions per logit of a tile that is masked, as the compiled loop has them.
MASK_INSTRUCTIONS = 4.0
#: Instructions of a thread for a place that a table of pages names: its load, two comparisons with the pool's ends, the
#: row, and an address of 64 bits. Elements that threads which multiply and add copy at a time.
LOOKUP_INSTRUCTIONS, FLOATS_AT_ONCE = 6.0, 4
#: Cycles of a step in which a block waits for copies, barriers and the first fragments, with one buffer; half of them
#: with two, which have one wait in place of two. From the same kernels.
STEP_CYCLES = 747.0
#: Cycles of a block around its steps: alone on its unit, and what it takes of the unit's time with others resident.
BLOCK_CYCLES, BLOCK_BUSY_CYCLES = 3850.0, 1360.0
#: Cycles of a block of warp groups around its steps, which wait for nothing else but copies that are late: one of their
#: groups copies, and no barrier holds the others together (FlashAttention 3, same place).
GROUP_BLOCK_CYCLES = 3680.0
#: Exponentials that a unit takes per cycle (CUDA C++ Programming Guide, throughput of native instructions).
EXPONENTIALS = 16.0
#: Bytes of a turn of shared memory's port.
PORT_BYTES = 128
#: Registers of a thread besides sums, logits and fragments of queries: what compiled kernels take at least.
OTHER_REGISTERS = 48
#: The same of warp groups, which copy nothing themselves, and what a window adds: by compiled kernels of heads of 64 to
#: 256 elements; the compiler has up to 20 more where it finds room for them.
GROUP_OTHER_REGISTERS, GROUP_WINDOW_REGISTERS = 28, 28
#: Steps of a unit after which half of DRAM's time is hidden behind the rest.
HIDDEN_STEPS = 6.24
#: Part of the longest block that still runs when the others have ended, where they start problem by problem; and how
#: many blocks of a unit, the last ones, say what it is where those of several problems start side by side.
TAIL, LAST_BLOCKS = 0.5, 4
#: Registers that a block's threads are given more or fewer of at a time, where they may be any number of these.
REGISTER_STEP = 8
#: Registers of a thread that brings slices together, and slices whose values it has under way at a time.
SUM_REGISTERS, SLICES_AT_A_TIME = 40, 4
#: Share of L2 that one round of blocks finds its keys in again, and the share from which on it finds nothing.
L2_FULL, L2_NONE = 0.66, 1.38


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """Seconds of parts of an attention kernel, all units busy with nothing else.

    Attributes:
        products: matrix products.
        exponentials: exponentials, and the arithmetic of the softmax.
        shared: fragments out of shared memory.
        l2: keys and values from L2.
        dram: DRAM.
        units: the units with all that their blocks do, were memory infinitely fast.
    """

    products: float
    exponentials: float
    shared: float
    l2: float
    dram: float
    units: float


def registers_per_thread(kernel: AttentionKernel, schedule: AttentionSchedule) -> int:
    """Registers that a thread which multiplies needs: sums of values, logits, the base and the total of its rows, where
    columns of ones may be its total, queries if held."""
    attention = kernel.attention
    if schedule.instruction is Instruction.FMA:
        columns = padded(attention.value_size, 4 * schedule.lanes) // schedule.lanes
        # Four elements of every row's queries or weights, and of four rows of values.
        factors = 4 * schedule.thread_rows + max(4, 16)
        return schedule.thread_rows * (columns + schedule.keys // schedule.lanes + 2) + factors + OTHER_REGISTERS
    if schedule.instruction.is_by_groups:
        # Exponentials are operands of products that still run while the next logits come.
        rows = padded(attention.value_size) // 2 + schedule.keys * 3 // 4
        return rows + 4 + GROUP_OTHER_REGISTERS + GROUP_WINDOW_REGISTERS * bool(attention.window_size)
    fragments = schedule.rows // schedule.warps // FRAGMENT_ROWS
    queries = padded(attention.head_dim) // 4 if schedule.held else 0
    sums = padded(attention.value_size) // 2 + schedule.keys // 2
    return fragments * (sums + queries + 4) + OTHER_REGISTERS


@dataclass(frozen=True)
class Walks:
    """Steps of the blocks of a kernel: in the mean, of the longest, and how many of a block's are masked; and where
    they differ, those of a problem's blocks over the longest, from it on."""

    mean: float
    longest: float
    edges: float
    lengths: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """Work of the blocks of an attention kernel, of a gradient of it or of a pair of products.

    Attributes:
        dtype: of what is multiplied.
        schedule: tiles, warps and buffers of a block.
        blocks: of the launch; ``row_blocks`` of them along the rows of one of ``problems``, in ``slices``.
        products: elements that every logit is multiplied by or made of.
        loads_per_product: loads that threads issue per multiply-add.
        exponentials: instructions per logit besides its exponential and the mask.
        special: exponentials per logit.
        port_bytes: of shared memory's port, a step.
        step_bytes: of a step from L2.
        once_bytes: of a block's own rows and of its results, all blocks together.
        walked_bytes: of the tensors that blocks walk.
        own_bytes: of the other tensors.
        walk: steps of the blocks.
        table_bytes: of the table of pages, a step; 0 where what is walked is contiguous.
        band: problems whose blocks start side by side, the longest walks first.
        waits: of a step, besides those for what is walked: for what warps of a block pass to each other.
    """

    dtype: str
    schedule: RowTiles
    blocks: int
    row_blocks: int
    problems: int
    slices: int
    products: float
    loads_per_product: float
    exponentials: float
    port_bytes: float
    step_bytes: float
    once_bytes: float
    walked_bytes: float
    own_bytes: float
    walk: Walks
    special: float = 1.0
    table_bytes: float = 0.0
    band: int = 1
    waits: int = 0

    @property
    def logits(self) -> int:
        """Logits of a step."""
        return self.schedule.rows * self.schedule.walked


def estimate_attention(
    kernel: AttentionKernel, schedule: AttentionSchedule, device: DeviceSpec, registers: int | None = None
) -> Estimate:
    """The predicted time of an attention kernel; it takes infinite time where no block fits.

    ``registers`` of a thread are those of :func:`registers_per_thread` until the compiler has reported them.
    """
    registers = registers or starting_registers(registers_per_thread(kernel, schedule), schedule, device)
    resources = Resources(schedule.threads, registers, shared_bytes(kernel, schedule))
    return estimate_blocks(_work(kernel, schedule), resources, device)


def starting_registers(needed: int, schedule: RowTiles, device: DeviceSpec) -> int:
    """Registers that every thread of a block starts with, of which those that multiply need so many. Where warp groups
    move them, all have an equal part of the unit's; more than a device has where those that multiply would need more
    than they get."""
    moved = MOVED_REGISTERS.get(schedule.warps // GROUP_WARPS) if schedule.instruction.is_by_groups else None
    if moved is None:
        return needed
    equal = device.limits.registers_per_unit // schedule.threads // REGISTER_STEP * REGISTER_STEP
    return equal if needed <= moved[0] else device.limits.registers_per_thread + needed


@dataclass(frozen=True)
class Resources:
    """Resources of a block on its unit: threads, registers of each, bytes of shared memory."""

    threads: int
    registers: int
    shared_bytes: int


def estimate_blocks(work: BlockWork, resources: Resources, device: DeviceSpec) -> Estimate:
    """The predicted time of blocks that walk tiles; infinite where none fits."""
    registers, shared = resources.registers, resources.shared_bytes
    resident = _resident(resources.threads, registers, shared, device)
    if not resident:
        return _estimate(math.inf, {"compute": math.inf}, registers, shared, 0, 0)
    rates = _rates(work.schedule.instruction, work.dtype, device)
    times = _times(work, device, rates, resident)
    seconds = _with_memory(times, work, device)
    if rates is not None and rates.power_limited_flops is not None:
        slowdown = _product_flops(rates) / rates.power_limited_flops
        seconds = float(power_limited(seconds, times.products * slowdown))
    starting = work.blocks * device.block_launch_seconds
    stages = {
        "compute": times.products, "issue": times.exponentials, "shared": times.shared, "l2": times.l2,
        "dram": times.dram, "latency": times.units, "block_launch": starting,
    }  # fmt: skip
    waves = -(-work.blocks // (resident * device.unit_count))
    return _estimate(
        max(seconds, starting) + device.launch_overhead_seconds, stages, registers, shared, resident, waves
    )


def _work(kernel: AttentionKernel, schedule: AttentionSchedule) -> BlockWork:
    """Work of the blocks of an attention kernel."""
    (depth, width), attention = _widths(kernel, schedule), kernel.attention
    instructions, ones = LOGIT_INSTRUCTIONS, one_columns(kernel, schedule)
    if schedule.instruction.is_by_groups:
        # A thread has half as many logits as the step has keys, and a product for every 16 of the depth and the keys.
        products = (depth + schedule.keys) / FRAGMENT_DEPTH
        each_step = GROUP_PRODUCT_INSTRUCTIONS * products + GROUP_STEP_INSTRUCTIONS
        # Columns of ones take the place of its sum.
        instructions = GROUP_LOGIT_INSTRUCTIONS - bool(ones) + each_step / (schedule.keys / 2)
    is_scalar = schedule.instruction is Instruction.FMA
    row = (attention.head_dim + attention.value_size) * DTYPE_BYTES[attention.dtype]
    queries, pages = kernel.inputs[0], attention.pages
    table_bytes = 0.0 if pages is None else schedule.keys / pages.tokens * DTYPE_BYTES["int32"]
    return BlockWork(
        dtype=attention.dtype,
        schedule=schedule,
        blocks=schedule.blocks(kernel),
        row_blocks=schedule.row_blocks(kernel),
        problems=kernel.problems,
        slices=kernel.slices,
        products=depth + width + ones,
        loads_per_product=loads_per_product(schedule, schedule.keys, width) if is_scalar else 0.0,
        # Sums shrink in every step, or seldom, where matrix instructions multiply: what a step asks about it takes no
        # more instructions than the shuffles of FlashAttention 2, which it does without.
        exponentials=instructions
        + (width / schedule.keys if is_scalar else 0.0)
        + lookups(kernel, schedule) * LOOKUP_INSTRUCTIONS / (schedule.rows * schedule.keys),
        port_bytes=fragment_bytes(schedule, schedule.keys, depth, width + ones, attention.dtype),
        step_bytes=schedule.keys * row + table_bytes,
        once_bytes=float(queries.size_bytes * (kernel.slices if kernel.slices > 1 else 1) + kernel.output.size_bytes),
        walked_bytes=float(kernel.walked_bytes),
        own_bytes=float(queries.size_bytes + kernel.output.size_bytes),
        walk=walks(kernel, schedule),
        table_bytes=table_bytes,
        band=1 if is_scalar else problem_band(kernel, schedule.row_blocks(kernel)),
    )


def lookups(kernel: AttentionKernel, schedule: AttentionSchedule) -> float:
    """Reads of the table of pages by the threads of a block that multiply, a step; none where a thread of its own
    copies, or where keys are contiguous."""
    attention, pages = kernel.attention, kernel.attention.pages
    if pages is None or schedule.instruction.is_by_groups:
        return 0.0
    widths, step, threads = (attention.head_dim, attention.value_size), schedule.keys, schedule.threads
    if schedule.instruction is Instruction.FMA:
        return sum(step * width / FLOATS_AT_ONCE for width in widths)
    return sum(threads * step / rows_of_a_lookup(width, step, pages.tokens, threads) for width in widths)


def matrix_rates(kernel: GroupedHeads, schedule: RowTiles, device: DeviceSpec) -> MatrixInstruction | None:
    """Rates of the device by the schedule's instruction; None for multiply-adds."""
    return _rates(schedule.instruction, kernel.attention.dtype, device)


def _rates(instruction: Instruction, dtype: str, device: DeviceSpec) -> MatrixInstruction | None:
    if instruction is Instruction.FMA:
        return None
    return device.warp_group_instruction(dtype) if instruction.is_by_groups else device.matrix_instruction(dtype)


def _product_flops(rates: MatrixInstruction) -> float:
    """FLOP/s that matrix products reach before the clock has fallen."""
    return rates.best_flops or rates.sustained_flops


def _times(work: BlockWork, device: DeviceSpec, rates: MatrixInstruction | None, resident: int) -> AttentionTimes:
    units, cycle = device.unit_count, 1 / device.clocks.boost_hz
    flops = _product_flops(rates) if rates is not None else device.peak_flops("float32")
    lanes = device.peak_flops("float32") / 2 / units
    products = 2.0 * work.logits * work.products / (flops / units)
    if rates is None:
        products *= 1.0 + work.loads_per_product
    exponentials = work.logits * (work.special * cycle / EXPONENTIALS + work.exponentials / lanes)
    masks = work.logits * MASK_INSTRUCTIONS / lanes
    port = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
    shared = work.port_bytes / port * cycle

    walk = work.walk
    warps = max(1.0, work.schedule.warps * resident / device.teu.group_size)
    # Several groups take turns at the tensor cores no better than the two or three of FlashAttention 3.
    by_groups = work.schedule.instruction.is_by_groups
    exposed = GROUP_EXPOSED ** min(1.0, math.log2(warps)) if by_groups else EXPOSED ** math.log2(warps)
    if rates is None:
        exposed = 1.0  # Products and exponentials are issued by the same schedulers.
    longer, shorter = max(products, exponentials), min(products, exponentials)
    step = max(longer + exposed * shorter, shared)
    # With two buffers copies have a whole step of their block to arrive, with one about half of it.
    looking = _lookup_seconds(work, device)
    arriving = _copy_seconds(work, device) + looking - resident * step * max(0.5, work.schedule.stages - 1)
    waiting = max(0.0 if by_groups else STEP_CYCLES / work.schedule.stages * cycle, arriving)
    # With one buffer a step has two waits, for either half of what is walked.
    waiting += work.waits * STEP_CYCLES / 2 * cycle
    if rates is None:
        # Keys and values come through registers, while their block does nothing else.
        waiting = max(waiting, 2.0 * _copy_seconds(work, device))
    # Threads that multiply wait for the place of a copy before they can issue it.
    waiting += 0.0 if by_groups else looking
    # Queries in and results out pass the unit's share of L2 with no step of their block in parallel.
    ends = work.once_bytes / work.blocks / ((device.l2 or device.dram).bandwidth_bytes_per_second / units)
    alone = 0.0 if by_groups else BLOCK_CYCLES * cycle
    around = (GROUP_BLOCK_CYCLES if by_groups else BLOCK_BUSY_CYCLES) * cycle + ends

    def unit_seconds(steps: float, edges: float, running: float) -> float:
        busy = steps * step + edges * masks
        return max(alone + busy + steps * waiting, running * (around + busy))

    round_seconds = unit_seconds(walk.mean, walk.edges, resident)
    if walk.longest <= walk.mean * 1.001:
        per_unit = -(-work.blocks // units)
        rounds, last_round = divmod(per_unit, resident)
        on_units = rounds * round_seconds + (unit_seconds(walk.mean, walk.edges, last_round) if last_round else 0.0)
    else:
        longest = unit_seconds(walk.longest, walk.edges, min(resident, -(-work.blocks // units)))
        tail = TAIL
        if work.band > 1:
            parts = work.blocks // work.row_blocks
            tail = _tail(walk.lengths, parts, min(parts, work.band * max(1, parts // work.problems)), units * resident)
        on_units = max(longest, work.blocks / (units * resident) * round_seconds + tail * longest)
    steps = work.blocks * walk.mean
    l2_bytes = steps * work.step_bytes + work.once_bytes
    return AttentionTimes(
        products=steps * products / units,
        exponentials=(steps * exponentials + work.blocks * walk.edges * masks) / units,
        shared=steps * shared / units,
        l2=l2_bytes / (device.l2 or device.dram).bandwidth_bytes_per_second,
        dram=_dram_bytes(work, device, resident) / device.dram.bandwidth_bytes_per_second,
        units=on_units,
    )


@lru_cache(maxsize=4096)
def _tail(lengths: tuple[float, ...], problems: int, band: int, running: int) -> float:
    """The part of the longest walk for which units wait for the last blocks, where these start as the hardware starts
    them: each when one before it has ended.

    Args:
        lengths: of the walks of a problem, over the longest, in the order in which they start.
        problems: how many of them there are, ``band`` side by side.
        running: blocks at a time.
    """
    last: list[float] = []
    for first in reversed(range(0, problems, band)):
        together = min(band, problems - first)
        last = [length for length in lengths for _ in range(together)] + last
        if len(last) >= LAST_BLOCKS * running:
            break
    ends = [0.0] * running
    for length in last:
        heapreplace(ends, ends[0] + length)
    return max(ends) - sum(last) / running


def walks(kernel: AttentionKernel, schedule: AttentionSchedule) -> Walks:
    """Number of tiles of keys that the blocks walk.

    >>> from sokoban.language.named.attention import Attention
    >>> causal = Attention(b=1, heads=1, queries=256, head_dim=64, causal=True)
    >>> kernel = AttentionKernel(name="", attention=causal, slices=1, inputs=(), output=None)
    >>> walks(kernel, AttentionSchedule(rows=64, keys=64, warps=4, stages=1, held=False, instruction=Instruction.FMA))
    Walks(mean=2.5, longest=4.0, edges=1.0)
    """
    return range_walks(kernel.block_range, schedule.rows, schedule.keys, kernel.slices)


@lru_cache(maxsize=4096)
def range_walks(walked: BlockRange, rows: int, step: int, slices: int = 1) -> Walks:
    """The walks of blocks of ``rows`` rows, ``step`` of the other side at a time, each divided among ``slices``."""
    counts, edges = walked.steps(rows, step), walked.edges(rows, step)
    mean = float(counts.mean()) / slices
    lengths = tuple(np.sort(counts / counts.max())[::-1].tolist()) if counts.min() < counts.max() else ()
    return Walks(mean, float(-(-counts.max() // slices)), min(edges / slices, mean), lengths)


def _copy_seconds(work: BlockWork, device: DeviceSpec) -> float:
    """Seconds after which a copy has arrived: from DRAM where no other block brought the same keys to L2 before."""
    l2 = device.l2 or device.dram
    layer = l2 if work.row_blocks > 1 else device.dram
    return (layer.latency_seconds or device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS) * LOADED_LATENCY


def _lookup_seconds(work: BlockWork, device: DeviceSpec) -> float:
    """Seconds of a step until the places of its rows are known: the latency of the cache of a unit, which is the memory
    that it shares, and of L2 for every transaction of the table that none of the steps before has read. With one buffer
    values are looked for when keys have come, with more both at once."""
    if not work.table_bytes:
        return 0.0
    l2 = device.l2 or device.dram
    beyond = (l2.latency_seconds or DEFAULT_LATENCY_SECONDS) * LOADED_LATENCY
    near = device.shared.latency_seconds or beyond
    tiles = 2 if work.schedule.stages == 1 else 1
    return tiles * near + min(1.0, work.table_bytes / l2.transaction_bytes) * beyond


def _widths(kernel: AttentionKernel, schedule: AttentionSchedule) -> tuple[int, int]:
    """Elements of a row of keys and of values as products take them."""
    attention = kernel.attention
    if schedule.instruction is Instruction.FMA:
        return padded(attention.head_dim, 4), padded(attention.value_size, 4 * schedule.lanes)
    return padded(attention.head_dim), padded(attention.value_size)


def loads_per_product(schedule: AttentionSchedule | PairSchedule, step: int, width: int) -> float:
    """Loads of four elements that threads issue per multiply-add, the mean of both products.

    >>> schedule = AttentionSchedule(
    ...     rows=64, keys=32, warps=4, stages=1, held=False, instruction=Instruction.FMA, lanes=8)
    >>> loads_per_product(schedule, 32, 64)  # 4 rows by 4 keys: 8 of 64; 4 rows by 8 columns: 12 of 128
    0.109375
    """
    rows, keys, columns = schedule.thread_rows, step // schedule.lanes, width // schedule.lanes
    return ((rows + keys) / (4 * rows * keys) + (rows + columns) / (4 * rows * columns)) / 2


def fragment_bytes(schedule: AttentionSchedule | PairSchedule, step: int, depth: int, width: int, dtype: str) -> float:
    """Bytes of shared memory's port that a step takes, of ``step`` rows of keys and of values.

    Every warp or warp group reads all keys and values, and its queries where they are not held; copies write.
    Multiply-adds read queries and weights for all lanes of a row at once, and keys and values for all rows of a warp at
    once.
    """
    tile = step * (depth + width)
    if schedule.instruction is Instruction.FMA:
        rows_at_once = LANES // schedule.lanes
        # A broadcast takes the port as long as 128 bytes do.
        broadcast = schedule.rows / rows_at_once * (depth + step) / 4 * PORT_BYTES
        return broadcast + 4.0 * (schedule.warps * tile + tile + 2 * schedule.rows * step)
    queries = 0 if schedule.held else schedule.rows * depth
    readers = schedule.warps // GROUP_WARPS if schedule.instruction.is_by_groups else schedule.warps
    return DTYPE_BYTES[dtype] * (readers * tile + queries + tile)


def _dram_bytes(work: BlockWork, device: DeviceSpec, resident: int) -> float:
    """Bytes of DRAM: everything once; what is walked again for every round of blocks of its rows where L2 does not
    keep it so long."""
    if device.l2 is None:
        return work.own_bytes + work.walked_bytes * work.row_blocks
    running = device.unit_count * resident
    together = min(work.problems, max(work.band, running / (work.row_blocks * work.slices) + 1))
    footprint = work.walked_bytes / work.problems * together
    lost = (footprint / device.l2.capacity_bytes - L2_FULL) / (L2_NONE - L2_FULL)
    again = max(0.0, work.row_blocks / max(1.0, running / work.slices / work.band) - 1.0)
    return work.own_bytes + work.walked_bytes * (1.0 + min(1.0, max(0.0, lost)) * again)


def _with_memory(times: AttentionTimes, work: BlockWork, device: DeviceSpec) -> float:
    """Units and memory in parallel: the first copies and the last results overlap with nothing."""
    steps = work.blocks * work.walk.mean / device.unit_count
    exposed = min(times.units, times.dram) / (1.0 + steps / HIDDEN_STEPS)
    return max(max(times.units, times.dram) + exposed, times.l2)


def _resident(threads: int, registers: int, shared: int, device: DeviceSpec) -> int:
    """Blocks that fit on a unit; 0 where none does."""
    limits, lanes = device.limits, device.warp_lanes
    if registers > limits.registers_per_thread or threads > limits.threads_per_block:
        return 0
    if shared > limits.shared_bytes_per_block_opt_in:
        return 0
    grain = limits.register_allocation_granularity
    per_warp = -(-registers * lanes // grain) * grain
    fits = [
        limits.threads_per_unit // threads,
        limits.registers_per_unit // (per_warp * -(-threads // lanes)),
        limits.blocks_per_unit,
        limits.shared_bytes_per_unit // max(1, shared + limits.shared_bytes_reserved_per_block),
    ]
    return min(fits)


def _estimate(
    seconds: float, stages: dict[str, float], registers: int, shared: int, resident: int, waves: int
) -> Estimate:
    names = ("compute", "issue", "shared", "l2", "dram", "latency", "block_launch")
    complete = {name: stages.get(name, 0.0) for name in names}
    return Estimate(
        seconds=seconds,
        bound=max(complete, key=lambda name: complete[name]),
        stage_seconds=complete,
        registers=registers,
        shared_bytes=shared,
        blocks_per_unit=resident,
        wave_count=waves,
    )


def estimate_slice_sum(kernel: SliceSum, schedule: SliceSumSchedule, device: DeviceSpec) -> Estimate:
    """The predicted time of bringing slices together: its bytes, which L2 still holds where they fit, and the chain of
    a warp, which waits for the largest logit of all slices first and then for their values."""
    l2 = device.l2 or device.dram
    moved = float(kernel.source.size_bytes + kernel.output.size_bytes)
    fits = device.l2 is not None and kernel.source.size_bytes <= L2_FULL * device.l2.capacity_bytes
    crossing = moved / (l2 if fits else device.dram).bandwidth_bytes_per_second
    latency = (l2.latency_seconds or device.dram.latency_seconds or DEFAULT_LATENCY_SECONDS) * LOADED_LATENCY
    blocks = schedule.blocks(kernel)
    resident = _resident(schedule.threads, SUM_REGISTERS, 0, device)
    rounds = -(-blocks // (resident * device.unit_count))
    waiting = rounds * latency * (1.0 + kernel.slices / SLICES_AT_A_TIME)
    starting = blocks * device.block_launch_seconds
    stages = {"l2" if fits else "dram": crossing, "latency": waiting, "block_launch": starting}
    seconds = max(crossing, waiting, starting) + device.launch_overhead_seconds
    return _estimate(seconds, stages, SUM_REGISTERS, 0, resident, rounds)
