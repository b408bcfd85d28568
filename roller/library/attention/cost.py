"""Time of an attention kernel with known tiles: products next to softmax, rounds of blocks, memory, power.

All arrays have one entry per call. A step of a block multiplies queries by a tile of keys, takes the softmax's
exponentials, and multiplies by the values; generations of kernels differ in how much of the softmax overlaps the
products. Latencies are in cycles of the boost clock: the same code takes them on every board.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES, MatrixInstruction
from roller.library.arrays import Floats
from roller.library.attention.constants import AttentionConstants, KernelConstants
from roller.library.attention.tiles import PLANNED_SEQUENCES, ULTRA_CAPABILITIES, AttentionLaunch, Calls
from roller.library.cache import is_flushed
from sokoban.model.gpu.power import power_limited

#: Work of a backward pass over that of the forward pass: matrix products (scores again, then the gradients of scores,
#: queries, keys and values), the rest of the arithmetic, and bytes.
BACKWARD_PRODUCTS, BACKWARD_SOFTMAX, BACKWARD_TRAFFIC = 2.5, 1.5, 2.0
#: Kernels of a backward pass: sums of rows before, gradients, and the conversion of the queries' gradient after. The
#: first and the last read and write about so many bytes per byte of queries and results.
BACKWARD_KERNELS, BACKWARD_ENDS = 3, 3.0
#: Bytes of a partial result.
PARTIAL_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class AttentionStages:
    """Seconds of the parts of calls; ``kernel`` is the whole device time, of which the others are no sum.

    Attributes:
        kernel: all kernels of the call.
        compute: units with all that their blocks do, were memory infinitely fast.
        products: matrix products, all units busy with nothing else.
        softmax: exponentials and the rest of the softmax, likewise.
        dram: DRAM delivering what L2 does not keep.
        l2: L2 delivering the tiles.
        launch: the start of the call and of its kernels.
        update: writing new keys and values into pages.
        combine: adding the results of splits.
        kernels: how many kernels there are.
    """

    kernel: Floats
    compute: Floats
    products: Floats
    softmax: Floats
    dram: Floats
    l2: Floats
    launch: Floats
    update: Floats
    combine: Floats
    kernels: Floats


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Common facts of all calls: the board, the matrix instruction of their type, the direction, the constants."""

    device: DeviceSpec
    instruction: MatrixInstruction
    backward: bool
    constants: AttentionConstants

    @property
    def cycle(self) -> float:
        """Seconds of a cycle of the boost clock."""
        return 1 / self.device.clocks.boost_hz

    @property
    def exponentials(self) -> float:
        """Exponentials of a unit in a cycle."""
        first, end = ULTRA_CAPABILITIES
        is_ultra = first <= (self.device.compute_capability or (0, 0)) < end
        return self.constants.ultra_exponentials if is_ultra else self.constants.exponentials

    @property
    def gap(self) -> float:
        """Seconds between two dependent kernels."""
        return self.device.launch_overhead_seconds

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.instruction.input_dtype]

    @property
    def best_flops(self) -> float:
        """FLOP/s that a library's matrix product of the type reaches before the clock has fallen."""
        return self.instruction.best_flops or self.instruction.sustained_flops

    def move_seconds(self, moved: Floats, cached_share: Floats) -> Floats:
        """Seconds of bytes that L2 keeps a share of, the others going through DRAM."""
        dram = self.device.dram.bandwidth_bytes_per_second
        return moved * (1 - cached_share) / dram + moved * cached_share / self.l2_rate

    @property
    def l2_rate(self) -> float:
        """Bytes per second of L2; of DRAM where there is none."""
        return (self.device.l2 or self.device.dram).bandwidth_bytes_per_second

    def cached_share(self, footprint: Floats) -> Floats:
        """Share of so many bytes that L2 still holds when they are used again."""
        if self.device.l2 is None:
            return np.zeros(footprint.shape)
        full, none = self.constants.reuse_full, self.constants.reuse_none
        return np.clip((none - footprint / self.device.l2.capacity_bytes) / (none - full), 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Seconds of one step of a block, a tile of queries by a tile of keys.

    Attributes:
        products: of the matrix unit.
        softmax: of special function units and float32 lanes.
        mask: further ones of the lanes, of a masked tile.
        load: in which the unit takes the tile's keys and values out of L2.
        port: in which shared memory gives and takes what passes its port.
    """

    products: Floats
    softmax: Floats
    mask: Floats
    load: Floats
    port: Floats | float


@dataclass(frozen=True, kw_only=True)
class _Traffic:
    """Bytes of calls.

    Attributes:
        queries: queries read and results written.
        new: new keys and values, written into pages.
        dram: what moves between DRAM and L2 if L2 keeps nothing from the previous call.
        l2: what units take out of L2 and store.
        cached_share: share of the bytes that the previous identical call left in L2.
    """

    queries: Floats
    new: Floats
    dram: Floats
    l2: Floats
    cached_share: Floats


def kernel_stages(calls: Calls, launch: AttentionLaunch, setting: Setting) -> AttentionStages:
    """Times of calls of one family of kernels."""
    kernel = setting.constants.kernels[launch.kind]
    walk = launch.walk
    step = _step(calls, launch, kernel, setting)
    traffic = _traffic(calls, launch, setting)
    busy = _busy_seconds(calls, launch, step, kernel, setting)
    steps = walk.blocks * walk.steps / setting.device.unit_count
    dram = traffic.dram * (1 - traffic.cached_share) / setting.device.dram.bandwidth_bytes_per_second
    l2 = traffic.l2 / setting.l2_rate
    exposed = np.minimum(busy, dram) / (1 + steps / setting.constants.hidden_steps)
    body = np.maximum(np.maximum(busy, dram) + exposed, l2)
    if setting.instruction.power_limited_flops is not None:
        # What products draw follows from how many there are, not from the pace at which a backward pass makes them.
        full = steps * step.products * (kernel.backward_share if setting.backward else 1.0)
        limited = full * setting.best_flops / setting.instruction.power_limited_flops
        body = power_limited(body, limited, setting.constants.power, setting.constants.power_seconds)

    start, kernels = _start(calls, launch, traffic, kernel, setting)
    combine, second = _combine_seconds(calls, launch, kernel, setting)
    update = _update_seconds(calls, traffic, setting)
    return AttentionStages(
        kernel=start + update + body + combine,
        compute=busy,
        products=steps * step.products,
        softmax=steps * step.softmax,
        dram=dram,
        l2=l2,
        launch=start,
        update=update,
        combine=combine,
        kernels=kernels + calls.paged + second,
    )


def _step(calls: Calls, launch: AttentionLaunch, kernel: KernelConstants, setting: Setting) -> _Step:
    """One step of a block."""
    device, constants, tile = setting.device, setting.constants, launch.tile
    issue = np.where(tile.lone_warps, constants.lone_warp, 1.0)
    lanes = device.peak_flops("float32") / 2 / device.unit_count / issue
    scores = tile.rows * tile.keys
    width = tile.depth + tile.value_depth
    products = 2 * scores * width / (kernel.product_share * setting.best_flops / device.unit_count)
    softmax = scores / setting.exponentials * setting.cycle + scores * kernel.score_instructions / lanes
    loaded = tile.keys if tile.whole else np.minimum(tile.keys, calls.keys)
    bytes_at_once = (device.shared.bank_count or 32) * (device.shared.bank_width_bytes or 4)
    port = tile.port_bytes / bytes_at_once * setting.cycle
    if setting.backward:
        # Warps pass factors to each other behind barriers, so that all of them multiply at the same time.
        products = np.maximum(products * BACKWARD_PRODUCTS / kernel.backward_share, port)
    return _Step(
        products=products,
        softmax=softmax * (BACKWARD_SOFTMAX if setting.backward else 1.0),
        mask=scores * kernel.mask_instructions / lanes,
        load=loaded * width * setting.dtype_bytes / kernel.unit_bytes * setting.cycle,
        port=port,
    )


def _traffic(calls: Calls, launch: AttentionLaunch, setting: Setting) -> _Traffic:
    """Bytes that calls move."""
    tile, walk = launch.tile, launch.walk
    width = (calls.head_dim + calls.value_dim) * setting.dtype_bytes
    queries = calls.b * calls.queries * calls.heads * width
    seen = np.where(calls.local, np.minimum(calls.keys, calls.window + calls.queries), calls.keys)
    keys = calls.b * seen * calls.kv_heads * width
    new = np.where(calls.paged, calls.b * calls.queries * calls.kv_heads * width, 0.0)
    footprint = queries + keys + new
    if launch.kind == "FlashAttention 2":
        # All sequences' blocks of one query head run before those of the next: heads that share keys find them in L2
        # only if it holds what one head reads and writes of all sequences.
        shared = setting.cached_share(queries / calls.heads + keys / calls.kv_heads)
        keys = keys * np.where(tile.packed, 1.0, 1 + (calls.group - 1) * (1 - shared))
    tiles_bytes = walk.blocks * walk.steps * tile.keys * (tile.depth + tile.value_depth) * setting.dtype_bytes
    times = BACKWARD_TRAFFIC if setting.backward else 1.0
    return _Traffic(
        queries=queries,
        new=new,
        dram=(queries + keys) * times,
        l2=(queries + tiles_bytes) * times,
        cached_share=np.zeros(footprint.shape) if is_flushed() else setting.cached_share(footprint * times),
    )


def _busy_seconds(
    calls: Calls, launch: AttentionLaunch, step: _Step, kernel: KernelConstants, setting: Setting
) -> Floats:
    """Seconds until the last block has ended, were memory infinitely fast."""
    tile, walk, cycle, constants = launch.tile, launch.walk, setting.cycle, setting.constants
    longer, shorter = np.maximum(step.products, step.softmax), np.minimum(step.products, step.softmax)
    exposed = kernel.exposed
    if setting.backward and kernel.backward_exposed is not None:
        exposed = kernel.backward_exposed
    shared = np.maximum(longer + exposed * shorter, np.maximum(step.load, step.port))
    waiting = (kernel.step_cycles + np.where(calls.paged, constants.page_cycles, 0.0)) * cycle
    waiting = waiting + kernel.exposed_loads * step.load
    masked = step.mask * walk.edges
    ends = tile.stored * (tile.depth + tile.value_depth) * setting.dtype_bytes / kernel.unit_bytes * cycle

    def unit_seconds(steps: Floats, resident: Floats) -> Floats:
        """Blocks of so many steps side by side on a unit: each waits for itself, and all share what the unit has."""
        alone = kernel.block_cycles * cycle + masked + steps * (shared + waiting)
        return np.maximum(alone, resident * (kernel.block_busy_cycles * cycle + ends + masked + steps * shared))

    units = setting.device.unit_count
    blocks = np.ceil(walk.blocks / units)
    rounds = np.floor(blocks / tile.resident)
    last_round = blocks - rounds * tile.resident
    round_seconds = unit_seconds(walk.steps, tile.resident)
    equal = rounds * round_seconds + np.where(last_round > 0, unit_seconds(walk.steps, last_round), 0.0)
    longest = unit_seconds(walk.longest, np.minimum(tile.resident, np.maximum(blocks, 1)))
    filled = walk.blocks / (units * tile.resident) * round_seconds + kernel.tail * longest
    unequal = np.clip(constants.uneven * (1 - walk.steps / walk.longest), 0.0, 1.0)
    return equal * (1 - unequal) + np.maximum(longest, filled) * unequal


def _start(
    calls: Calls, launch: AttentionLaunch, traffic: _Traffic, kernel: KernelConstants, setting: Setting
) -> tuple[Floats, Floats]:
    """Seconds before and between the kernels of a call, and how many kernels there are."""
    cycle, gap = setting.cycle, setting.gap
    planned = np.where(calls.b <= PLANNED_SEQUENCES, calls.b, 0.0)
    seconds = gap + (kernel.start_cycles + kernel.sequence_cycles * planned) * cycle
    # FlashAttention 2 copies queries and results when it takes the heads of a group for queries of a sequence; of one
    # sequence or one key head they lie in the right order.
    regrouped = launch.tile.packed & (launch.kind == "FlashAttention 2") & (calls.b > 1) & (calls.kv_heads > 1)
    copying = 2 * (gap + kernel.copy_cycles * cycle) + 2 * traffic.queries / setting.l2_rate
    seconds = seconds + np.where(regrouped, copying, 0.0)
    kernels = np.where(regrouped, 3.0, 1.0)
    if setting.backward:
        seconds = seconds + (BACKWARD_KERNELS - 1) * gap
        seconds = seconds + setting.move_seconds(BACKWARD_ENDS * traffic.queries, traffic.cached_share)
        kernels = kernels + BACKWARD_KERNELS - 1
    return seconds, kernels


def _combine_seconds(
    calls: Calls, launch: AttentionLaunch, kernel: KernelConstants, setting: Setting
) -> tuple[Floats, Floats]:
    """Seconds of adding the results of splits, and whether it takes a kernel of its own."""
    tile, walk = launch.tile, launch.walk
    rows = np.minimum(tile.rows, calls.queries * np.where(tile.packed, calls.group, 1))
    partial = walk.blocks * rows * tile.value_depth * PARTIAL_BYTES
    crossing = np.where(walk.splits > 1, setting.move_seconds(2 * partial, setting.cached_share(partial)), 0.0)
    # TensorRT-LLM's last block of a row combines its splits.
    is_separate = launch.kind != "TensorRT-LLM"
    starting = setting.gap + kernel.combine_cycles * setting.cycle if is_separate else 0.0
    seconds = starting + walk.splits * kernel.split_cycles * setting.cycle + crossing
    return np.where(walk.combined, seconds, 0.0), np.where(walk.combined & is_separate, 1.0, 0.0)


def _update_seconds(calls: Calls, traffic: _Traffic, setting: Setting) -> Floats:
    """Seconds of the kernel that writes new keys and values into pages: rounds of a block per token, or its bytes."""
    device, constants, limits = setting.device, setting.constants, setting.device.limits
    warps = np.ceil(np.minimum(calls.kv_heads * calls.head_dim, constants.update_threads) / device.warp_lanes)
    resident = np.minimum(np.floor(limits.threads_per_unit / (warps * device.warp_lanes)), limits.blocks_per_unit)
    rounds = calls.b * calls.queries / (device.unit_count * resident)
    waiting = np.maximum(rounds - 1, 0) * constants.update_round_cycles * setting.cycle
    moving = setting.move_seconds(traffic.new * constants.update_traffic, traffic.cached_share)
    seconds = setting.gap + constants.update_cycles * setting.cycle + np.maximum(waiting, moving)
    return np.where(calls.paged, seconds, 0.0)
