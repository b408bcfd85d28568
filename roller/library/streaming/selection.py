"""Times of PyTorch's ``topk`` (``aten/src/ATen/native/cuda/TensorTopK.cu``): values by rank and their places.

Both ways find the last value that is in by its digits, from the highest on, and then gather what is above it. Where
rows are many and short a block has each (``sbtopk``): it goes over its row once for every two bits that tell the value
from others, and all its warps add to four counters in between. Otherwise a row has many blocks (``mbtopk``), and every
eight bits take three kernels: counts of digits in each block, their sums over blocks, one block of the row after the
other, and what of a block is above; two scans and the gathering follow. A last kernel sorts what was found.

Chosen on four times of an H100 PCIe that a study of sparse attention published (``topk`` of 2,048 values out of 8,192
and 16,384 in float32, of 8 out of 16 and 1,024 in bfloat16, PyTorch 2.10), the loads under way in sums over blocks on
two more (32,768 and 131,072), and the instructions of the two passes on kernels of another board's profile. The other
eighteen of that study are 11 % off on average, -30 to +35.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from roller.library.streaming.elementwise import (
    Floats,
    LibraryTime,
    block_seconds,
    host_seconds,
    kernel_seconds_floor,
    library_time,
    stream_seconds,
)

#: The two ways, by PyTorch's namespaces.
SINGLE_BLOCK, MULTI_BLOCK = "sbtopk", "mbtopk"

#: From how many elements of a row on, by the most rows that it holds for, a row has several blocks
#: (``should_use_multiblock``; past the last, from 400 on).
MULTI_BLOCK_FROM = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
MULTI_BLOCK_LEAST = 400

#: Bits of a digit, threads of a block, and elements of a thread: those of ``sbtopk`` and of ``mbtopk``.
SINGLE_BITS, SINGLE_THREADS = 2, 1024
MULTI_BITS, MULTI_THREADS, MULTI_ITEMS = 8, 256, (4, 64)
#: Registers of a thread of ``mbtopk``, by which PyTorch sets its blocks.
MULTI_REGISTERS = 40

#: Passes that a row's highest bits take, a sign and an exponent in common; values that are in take half a digit of two
#: bits more for each doubling. Then the value is looked up, and the row gone over twice for what is above it and equal.
FIRST_PASSES, LAST_PASSES = 5.0, 3.0

#: A pass of ``sbtopk``: cycles of a warp's turn over its elements, and of the counters for the block and for each warp.
TURN_CYCLES, COUNTER_CYCLES, WARP_CYCLES = 12.5, 185.0, 27.0

#: Kernels of ``mbtopk`` besides those of the digits: a fill, two of zeros, a count, two scans of two and the gathering.
OTHER_KERNELS, DIGIT_KERNELS = 9, 3
#: Trips to L2 that follow one another in its kernels of a few numbers, and loads under way in sums over blocks.
TRIPS, UNDER_WAY = 3.0, 5.0
#: Instructions of a thread for an element: one that is counted, and one that is gathered, with a scan over the block.
COUNT_INSTRUCTIONS, GATHER_INSTRUCTIONS = 18.0, 60.0

#: Seconds of a step of the network that sorts what was found.
STEP_SECONDS = 0.3e-6


def topk_seconds(rows: ArrayLike, columns: ArrayLike, k: ArrayLike, item_bytes: int, device: DeviceSpec) -> LibraryTime:
    """Seconds of ``torch.topk`` of contiguous ``[rows, columns]`` tensors, sorted.

    Args:
        rows: how many.
        columns: elements of each.
        k: values of each that are in.
        item_bytes: of an element.
        device: the board.
    """
    high, wide, ranks = (
        np.atleast_1d(array)
        for array in np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (rows, columns, k)))
    )
    is_multi = wide >= _multi_block_from(high)
    digits = 8.0 * item_bytes / MULTI_BITS
    kernels = np.where(is_multi, OTHER_KERNELS + DIGIT_KERNELS * digits, 1.0) + (ranks > 1)
    one, many = _single(high, wide, ranks, item_bytes, device), _multi(high, wide, item_bytes, device)
    doublings = np.ceil(np.log2(np.maximum(2 * ranks, 2)))
    sorted_seconds = np.where(ranks > 1, doublings * (doublings + 1) / 2 * STEP_SECONDS, 0.0)
    gone_over = np.where(is_multi, digits + 1, 1.0)
    memory = stream_seconds(device, high * wide * item_bytes)
    stages = {
        "host": host_seconds(device, np.ones(high.shape), kernels),
        "launch": block_seconds(device, high),
        "dram": memory["dram"] * gone_over,
        "l2": memory["l2"] * gone_over,
        "arithmetic": np.where(is_multi, many[0], one[0]),
        "trips": np.where(is_multi, many[1], one[1]),
        "waits": np.where(is_multi, many[2], 0.0) + sorted_seconds,
    }
    memory_seconds = stages["dram"] + stages["l2"]
    busy = np.maximum.reduce([memory_seconds, stages["arithmetic"], stages["trips"], stages["launch"]])
    seconds = busy + stages["waits"] + kernels * kernel_seconds_floor(device)
    return library_time(device, stages, seconds, kernels, np.where(is_multi, MULTI_BLOCK, SINGLE_BLOCK))


def _multi_block_from(rows: Floats) -> Floats:
    least = np.full(rows.shape, float(MULTI_BLOCK_LEAST))
    for most, columns in reversed(MULTI_BLOCK_FROM):
        least = np.where(rows <= most, columns, least)
    return least


def _single(rows: Floats, columns: Floats, ranks: Floats, item_bytes: int, device: DeviceSpec) -> tuple[Floats, Floats]:
    """Seconds that the units issue, and that blocks take with what they wait, where each row has one."""
    hertz, lanes = device.clocks.boost_hz, device.warp_lanes
    threads = np.minimum(np.ceil(columns / lanes) * lanes, SINGLE_THREADS)
    turns, warps = np.ceil(columns / threads), threads / lanes
    passes = np.minimum(FIRST_PASSES + np.log2(np.maximum(ranks, 1)) / 2, 8 * item_bytes / SINGLE_BITS) + LAST_PASSES
    latency = (device.l2.latency_seconds if device.l2 else None) or 200e-9
    issued = passes * (turns * warps * TURN_CYCLES + warps * WARP_CYCLES) / hertz
    waits = passes * (turns * latency + COUNTER_CYCLES / hertz)
    resident = np.minimum(np.floor(device.limits.threads_per_unit / threads), device.limits.blocks_per_unit)
    busiest = np.ceil(rows / device.unit_count)
    return busiest * issued, np.ceil(busiest / resident) * (waits + issued)


def _multi(rows: Floats, columns: Floats, item_bytes: int, device: DeviceSpec) -> tuple[Floats, Floats, Floats]:
    """Seconds that the units issue, that threads wait for one element after the other, and that the kernels between
    wait, where a row has many blocks."""
    limits, latency = device.limits, (device.l2.latency_seconds if device.l2 else None) or 200e-9
    resident = min(limits.registers_per_unit // (MULTI_REGISTERS * MULTI_THREADS), limits.blocks_per_unit)
    items = np.clip(np.ceil(rows * columns / (device.unit_count * resident * MULTI_THREADS)), *MULTI_ITEMS)
    blocks = np.ceil(columns / (items * MULTI_THREADS))
    turns = np.ceil(rows * blocks / (device.unit_count * resident))
    digits = 8 * item_bytes / MULTI_BITS
    issue = device.unit_count * device.teu.group_size * device.warp_lanes * device.clocks.boost_hz
    arithmetic = rows * columns * (digits * COUNT_INSTRUCTIONS + GATHER_INSTRUCTIONS) / issue
    trips = (digits + 1) * turns * np.minimum(items, np.ceil(columns / MULTI_THREADS)) * latency
    sums = digits * np.ceil(rows / (device.unit_count * resident)) * blocks / UNDER_WAY * latency
    few = (2 * digits + 5) * TRIPS * latency
    return arithmetic, trips, sums + few
