"""How long an attention kernel with known tiles takes: products beside softmax, rounds of blocks, memory, power.

All arrays have one entry per call. A step of a block multiplies queries by a tile of keys, takes the softmax's
exponentials, and multiplies by the values; generations of kernels differ in how much of the softmax runs beside the
products. Latencies are in cycles of the boost clock: the same code takes them on every board.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES, MatrixInstruction
from roller.library.attention_tiles import Calls, Family, Tiles, Walk
from roller.library.gemm_types import Floats


@dataclass(frozen=True, kw_only=True)
class KernelConstants:
    """What one family of kernels takes, whatever the board."""

    # Share of the shorter of products and softmax that is not hidden beside the longer, with a full unit.
    exposed: float
    # float32 instructions per score beside its exponential: scale, maximum, sum, conversion, rescaling of the output.
    score_instructions: float
    # Further ones per score of a tile that is masked element by element.
    mask_instructions: float
    # Bytes per cycle that one unit takes out of L2 at most.
    unit_bytes: float
    # Cycles of a step in which the block waits for its own loads and products; other blocks of the unit do not.
    step_cycles: float = 0.0
    # Cycles of a block around its steps: alone on its unit (first loads to the last store), and what it takes of the
    # unit's time beside others.
    block_cycles: float = 0.0
    block_busy_cycles: float
    # Rest of the longest block that is still running when the others have ended, where blocks differ in length: little
    # if the longest start first.
    tail: float
    # Cycles before the first block of a call starts: the graph's start, reading the call's arguments.
    start_cycles: float
    # The kernel that combines splits, and each split of a row in it.
    combine_cycles: float = 0.0
    split_cycles: float = 0.0
    # A kernel that copies queries or results into another order of heads.
    copy_cycles: float = 0.0
    # Sorting the sequences of a call by length, per sequence.
    sequence_cycles: float = 0.0
    # Share of the matrix rate that the five products of a backward pass reach of that of the forward pass: operands of
    # three of them go through shared memory twice. The papers' figures for 128 elements per head; no measured rows.
    backward_share: float


@dataclass(frozen=True, kw_only=True)
class AttentionConstants:
    """The numbers of the model that belong to kernels rather than to a board; see the comments.

    Chosen on a random half of the heads' shapes of the tensor_core data set (A100 SXM, L40S, H100 SXM, B200); none
    belongs to a shape.
    """

    # Exponentials that a unit computes per cycle: 16 since 2010, whatever the rate of its Tensor Cores.
    exponentials: float = 16.0
    # Cycles per step for looking up where a page lies.
    page_cycles: float = 122.0
    # Bytes of a call over the L2 capacity: repeated calls find everything in L2 below the first, nothing above the
    # second.
    reuse_full: float = 0.955
    reuse_none: float = 1.18
    # Bytes per cycle and unit that L2 delivers with all units reading.
    l2_bytes: float = 33.9
    # Exponent of the sum of arithmetic and memory; infinity is a perfect overlap.
    overlap: float = 2.73
    # How soon blocks count as different in length: the inverse of the share by which the longest exceeds the mean.
    uneven: float = 20.0
    # Power of a FLOP beside that of one of a large matrix product: exponentials and registers draw some too. And the
    # length of a call after which half of the fall of the clock has come.
    power: float = 1.20
    power_seconds: float = 7.2e-3
    # The kernel that writes new keys and values into their pages: its own cycles, those of a round of its blocks (one
    # per token), and bytes moved per byte written.
    update_cycles: float = 997.0
    update_round_cycles: float = 4401.0
    update_traffic: float = 2.66
    # Threads of a block of it at most: one per element of a token's keys.
    update_threads: float = 512.0
    kernels: Mapping[Family, KernelConstants] = field(
        default_factory=lambda: {
            "FlashAttention 2": KernelConstants(
                exposed=0.768, score_instructions=6.03, mask_instructions=2.08, unit_bytes=29.9, step_cycles=860,
                block_cycles=3922, block_busy_cycles=1399, tail=0.573, start_cycles=1767, combine_cycles=4250,
                split_cycles=336, copy_cycles=1240, backward_share=0.85,
            ),
            "FlashAttention 3": KernelConstants(
                exposed=0.355, score_instructions=3.52, mask_instructions=8.99, unit_bytes=26.9,
                block_busy_cycles=3476, tail=0.261, start_cycles=6567, split_cycles=71, sequence_cycles=33,
                backward_share=0.75,
            ),
            "FlashAttention 4": KernelConstants(
                exposed=0.565, score_instructions=0.696, mask_instructions=6.18, unit_bytes=17.7,
                block_busy_cycles=6323, tail=0.2, start_cycles=3445, backward_share=0.7,
            ),
            "TensorRT-LLM": KernelConstants(
                exposed=0.142, score_instructions=1.84, mask_instructions=6.18, unit_bytes=64.0,
                block_busy_cycles=2563, tail=0.646, start_cycles=7578, split_cycles=190, backward_share=0.7,
            ),
        }
    )  # fmt: skip


CONSTANTS = AttentionConstants()

#: Products of the backward pass over those of the forward pass, and its other arithmetic and traffic likewise: scores
#: are computed again, then gradients of scores, queries, keys and values.
BACKWARD_PRODUCTS, BACKWARD_SOFTMAX, BACKWARD_TRAFFIC = 2.5, 1.5, 2.0
#: Kernels of a backward pass: row sums before, gradients, and the conversion of the queries' gradient after.
BACKWARD_KERNELS = 3


@dataclass(frozen=True, kw_only=True)
class AttentionStages:
    """Seconds of the parts of calls; ``kernel`` is the whole device time, of which the others are no sum.

    Attributes:
        kernel: all kernels of the call.
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
    products: Floats
    softmax: Floats
    dram: Floats
    l2: Floats
    launch: Floats
    update: Floats
    combine: Floats
    kernels: Floats


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of a block: a tile of queries by a tile of keys.

    Attributes:
        products: seconds of the matrix unit.
        softmax: seconds of special function units and float32 lanes.
        mask: further seconds of the lanes, of a masked tile.
        load: seconds in which the unit takes the tile's keys and values out of L2.
        bytes: bytes of these.
    """

    products: Floats
    softmax: Floats
    mask: Floats
    load: Floats
    bytes: Floats


def kernel_stages(
    calls: Calls,
    tile: Tiles,
    walk: Walk,
    kind: Family,
    device: DeviceSpec,
    instruction: MatrixInstruction,
    *,
    backward: bool = False,
    constants: AttentionConstants = CONSTANTS,
) -> AttentionStages:
    """Times of calls that are all of one family, direction and element type (that of ``instruction``)."""
    kernel = constants.kernels[kind]
    units, cycle = device.unit_count, 1 / device.clocks.boost_hz
    gap = device.launch_overhead_seconds
    width = DTYPE_BYTES[instruction.input_dtype]
    step = _step(tile, calls, device, instruction, kernel, constants, backward)
    busy = _busy_seconds(calls, tile, walk, step, device, kernel, constants)

    query_bytes = calls.b * calls.queries * calls.heads * (calls.head_dim + calls.value_dim) * width
    seen = np.where(calls.local, np.minimum(calls.keys, calls.window + calls.queries), calls.keys)
    token_bytes = calls.b * calls.kv_heads * (calls.head_dim + calls.value_dim) * width
    new_bytes = np.where(calls.paged, token_bytes * calls.queries, 0.0)
    moved = (query_bytes + token_bytes * seen) * (BACKWARD_TRAFFIC if backward else 1.0)
    hit = _reuse(device, moved + new_bytes, constants)
    l2_rate = units * constants.l2_bytes / cycle
    dram_seconds = moved * (1 - hit) / device.dram.bandwidth_bytes_per_second
    l2_seconds = (walk.blocks * walk.steps * step.bytes * (BACKWARD_TRAFFIC if backward else 1.0) + query_bytes) / l2_rate
    memory = np.maximum(dram_seconds, l2_seconds)
    body = (busy**constants.overlap + memory**constants.overlap) ** (1 / constants.overlap)
    work = walk.blocks * walk.steps / units
    body = _power_limited(body, work * step.products, instruction, constants)

    update = _update_seconds(calls, new_bytes, hit, l2_rate, device, constants)
    rows = np.minimum(tile.rows, calls.queries * np.where(tile.packed, calls.group, 1))
    combine = walk.splits * kernel.split_cycles * cycle + walk.blocks * rows * tile.value_depth * 8 / l2_rate
    second = walk.combined & (kind != "TensorRT-LLM")  # whose last block of a row combines its splits
    combine = np.where(walk.combined, combine + np.where(second, gap + kernel.combine_cycles * cycle, 0.0), 0.0)
    # FlashAttention 2 takes the heads of a group apart and puts them together again.
    copies = np.where((kind == "FlashAttention 2") & tile.packed & (calls.b > 1) & (calls.kv_heads > 1), 2.0, 0.0)
    copying = copies * (gap + kernel.copy_cycles * cycle) + np.where(copies > 0, 2 * query_bytes / l2_rate, 0.0)
    planned = np.where(calls.b <= 992, calls.b, 0.0)
    launch = gap + (kernel.start_cycles + kernel.sequence_cycles * planned) * cycle + copying
    kernels = 1 + calls.paged + second + copies
    if backward:
        # Row sums read results and their gradients; the conversion reads float32 and writes.
        ends = 3 * query_bytes * (1 - hit) / device.dram.bandwidth_bytes_per_second + 3 * query_bytes * hit / l2_rate
        launch = launch + (BACKWARD_KERNELS - 1) * gap + ends
        kernels = kernels + BACKWARD_KERNELS - 1
    return AttentionStages(
        kernel=launch + update + body + combine,
        products=work * step.products,
        softmax=work * step.softmax,
        dram=dram_seconds,
        l2=l2_seconds,
        launch=launch,
        update=update,
        combine=combine,
        kernels=kernels,
    )


def _step(
    tile: Tiles,
    calls: Calls,
    device: DeviceSpec,
    instruction: MatrixInstruction,
    kernel: KernelConstants,
    constants: AttentionConstants,
    backward: bool,
) -> _Step:
    """One step of a block. Products run at the best rate that a library's matrix product of the type reaches."""
    units, clock = device.unit_count, device.clocks.boost_hz
    rate = instruction.best_flops or instruction.sustained_flops
    lanes = device.peak_flops("float32") / 2 / units
    scores = tile.rows * tile.keys
    products = 2 * scores * (tile.depth + tile.value_depth) / (rate / units)
    softmax = scores / (constants.exponentials * clock) + scores * kernel.score_instructions / lanes
    if backward:
        products = products * BACKWARD_PRODUCTS / kernel.backward_share
        softmax = softmax * BACKWARD_SOFTMAX
    width = DTYPE_BYTES[instruction.input_dtype]
    loaded = np.minimum(tile.keys, calls.keys) * (tile.depth + tile.value_depth) * width
    return _Step(
        products=products,
        softmax=softmax,
        mask=scores * kernel.mask_instructions / lanes,
        load=loaded / (kernel.unit_bytes * clock),
        bytes=tile.keys * (tile.depth + tile.value_depth) * width,
    )


def _busy_seconds(
    calls: Calls,
    tile: Tiles,
    walk: Walk,
    step: _Step,
    device: DeviceSpec,
    kernel: KernelConstants,
    constants: AttentionConstants,
) -> Floats:
    """Seconds until the last block has ended, were memory infinitely fast."""
    units, cycle = device.unit_count, 1 / device.clocks.boost_hz
    longer, shorter = np.maximum(step.products, step.softmax), np.minimum(step.products, step.softmax)
    shared = np.maximum(longer + kernel.exposed * shorter, step.load)
    # A block that has nobody to hide behind does one after the other, unless its warps take turns by design.
    alone = np.where(tile.resident > 1, np.maximum(longer + shorter, step.load), shared)
    alone = alone + (kernel.step_cycles + np.where(calls.paged, constants.page_cycles, 0.0)) * cycle
    around = step.mask * walk.edges
    store = tile.rows * (tile.depth + tile.value_depth) * 2 * cycle / kernel.unit_bytes

    def unit_seconds(steps: Floats, resident: Floats) -> Floats:
        """Blocks of so many steps, side by side on a unit."""
        lone = kernel.block_cycles * cycle + around + steps * alone
        return np.maximum(lone, resident * (kernel.block_busy_cycles * cycle + store + around + steps * shared))

    blocks = np.ceil(walk.blocks / units)
    rounds = np.floor(blocks / tile.resident)
    rest = blocks - rounds * tile.resident
    round_seconds = unit_seconds(walk.steps, tile.resident)
    equal = rounds * round_seconds + np.where(rest > 0, unit_seconds(walk.steps, rest), 0.0)
    longest = unit_seconds(walk.longest, np.minimum(tile.resident, np.maximum(blocks, 1)))
    filled = walk.blocks / (units * tile.resident) * round_seconds + kernel.tail * longest
    unequal = np.clip(constants.uneven * (1 - walk.steps / walk.longest), 0.0, 1.0)
    return equal * (1 - unequal) + np.maximum(longest, filled) * unequal


def _power_limited(
    seconds: Floats, products: Floats, instruction: MatrixInstruction, constants: AttentionConstants
) -> Floats:
    """Seconds with the clock that the board's power limit leaves, the longer the call the lower."""
    best = instruction.best_flops or instruction.sustained_flops
    limited = instruction.power_limited_flops
    if limited is None:
        return seconds
    sustained = np.maximum(seconds, products * constants.power * best / limited)
    return seconds + (sustained - seconds) * seconds / (seconds + constants.power_seconds)


def _update_seconds(
    calls: Calls, new_bytes: Floats, hit: Floats, l2_rate: float, device: DeviceSpec, constants: AttentionConstants
) -> Floats:
    """Seconds of the kernel that writes the new keys and values into pages: a block per token, then its bytes."""
    limits, cycle = device.limits, 1 / device.clocks.boost_hz
    warps = np.ceil(np.minimum(calls.kv_heads * calls.head_dim, constants.update_threads) / device.warp_lanes)
    per_unit = np.minimum(np.floor(limits.threads_per_unit / (warps * device.warp_lanes)), limits.blocks_per_unit)
    rounds = calls.b * calls.queries / (device.unit_count * per_unit)
    waiting = np.maximum(rounds - 1, 0) * constants.update_round_cycles * cycle
    rate = device.dram.bandwidth_bytes_per_second
    moving = new_bytes * constants.update_traffic * ((1 - hit) / rate + hit / l2_rate)
    seconds = device.launch_overhead_seconds + constants.update_cycles * cycle + np.maximum(waiting, moving)
    return np.where(calls.paged, seconds, 0.0)


def _reuse(device: DeviceSpec, footprint: Floats, constants: AttentionConstants) -> Floats:
    """Share of a call's bytes that the previous identical call left in L2."""
    if device.l2 is None:
        return np.zeros(footprint.shape)
    filled = footprint / device.l2.capacity_bytes
    return np.clip((constants.reuse_none - filled) / (constants.reuse_none - constants.reuse_full), 0.0, 1.0)
