"""Times of PyTorch's cumulative sums and products (``aten/src/ATen/native/cuda/ScanUtils.cuh``).

Along the last dimension (``tensor_kernel_scan_innermost_dim``) a block of 512 threads takes several rows, the more the
fewer columns there are for a row. It goes over them in steps of two elements a thread, which Sklansky's network adds up
in shared memory; every step waits for its load and for the network's rounds, one barrier each. Along another dimension
(``tensor_kernel_scan_outer_dim``) a thread has a column and waits for each element before it loads the next. As in
:mod:`roller.library.streaming.row_kernels`, waits and what the blocks of a unit issue add up: the pessimistic bound of
a closed queueing network (Lazowska and others, *Quantitative System Performance*, 1984, table 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping

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

#: Kernels along the last dimension and along another.
INNERMOST, OUTER = "tensor_kernel_scan_innermost_dim", "tensor_kernel_scan_outer_dim"

#: Instructions of a combination of two elements besides the one addition or product.
COMBINATIONS: Mapping[str, float] = {"cumsum": 0, "cumprod": 0, "cummax": 9, "cummin": 9, "logcumsumexp": 40}

#: Threads of a block, and the powers of two between which those of a row lie.
THREADS, LEAST_LOG, MOST_LOG = 512, 4, 9

#: Warps of a block for each scheduler of a unit: cycles of an instruction of the block.
WARPS_PER_SCHEDULER = 4

#: Instructions of a round of the network: three shifts and two sums for the places, two loads, an addition, a store, a
#: barrier, a comparison and a jump.
ROUND_INSTRUCTIONS = 12.0

#: Cycles that a block waits in a round, and cycles that it issues in a step besides: places, bounds, two loads, two
#: stores. Chosen on every second one of sixteen lengths of rows on an A100 (FlagGems's benchmark of ``cumsum``).
ROUND_WAIT, STEP_CYCLES = 190.0, 525.0


def row_threads_log(rows: ArrayLike, columns: ArrayLike) -> Floats:
    """Power of two of the threads of a row: PyTorch's ``get_log_num_threads_x_inner_scan``, whose numbers have no sign.

    >>> row_threads_log([1024, 1024, 32768, 1 << 20], [1024, 77824, 32768, 8]).tolist()
    [4.0, 8.0, 4.0, 9.0]
    """
    high, wide = (np.ceil(np.log2(np.maximum(np.asarray(size, dtype=np.float64), 1))) for size in (rows, columns))
    both = 9 + wide - high
    return np.asarray(np.where(both < 0, MOST_LOG, np.clip(np.floor(both / 2), LEAST_LOG, MOST_LOG)))


def scan_seconds(
    rows: ArrayLike, columns: ArrayLike, inner: ArrayLike, moved: ArrayLike, combination: ArrayLike, device: DeviceSpec
) -> LibraryTime:
    """Seconds of scans over ``columns`` of contiguous ``[rows, columns, inner]`` tensors.

    Args:
        rows: product of the dimensions before the one that is scanned.
        columns: its size.
        inner: product of those after it; 1 for the last dimension.
        moved: bytes read and written.
        combination: instructions of a combination besides one, out of :data:`COMBINATIONS`.
        device: the board.
    """
    sizes = (rows, columns, inner, moved, combination)
    high, wide, low, traffic, more = (
        np.atleast_1d(array) for array in np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in sizes))
    )
    is_last, latency = low == 1, device.dram.latency_seconds or 400e-9
    log = row_threads_log(high, wide)
    threads = np.where(is_last, THREADS, np.clip(low, device.warp_lanes, THREADS))
    blocks = np.where(is_last, np.ceil(high * 2**log / THREADS), high * np.ceil(low / threads))
    most = np.minimum(np.floor(device.limits.threads_per_unit / threads), device.limits.blocks_per_unit)
    # Full turns of all units, and what the last one has.
    turns, left_over = np.divmod(blocks, device.unit_count * most)
    busiest = turns * most + np.ceil(left_over / device.unit_count)
    turns = turns + (left_over > 0)
    steps = np.where(is_last, np.ceil(wide / 2 ** (log + 1)), wide)
    rounds = np.where(is_last, log + 1, 0.0)
    combined = rounds * WARPS_PER_SCHEDULER * more / device.clocks.boost_hz
    waits = latency + rounds * ROUND_WAIT / device.clocks.boost_hz + combined
    issued = rounds * WARPS_PER_SCHEDULER * ROUND_INSTRUCTIONS + np.where(is_last, STEP_CYCLES, 0.0)
    stages = {
        "host": host_seconds(device, np.ones(high.shape)),
        "launch": block_seconds(device, blocks),
        **stream_seconds(device, traffic),
        "arithmetic": busiest * steps * (issued / device.clocks.boost_hz + combined),
        "waits": turns * steps * waits,
    }
    memory = stages["dram"] + stages["l2"]
    # Where elements follow one another, what all threads load still takes its turn.
    chain = stages["waits"] + np.where(is_last, stages["arithmetic"], memory)
    seconds = np.maximum.reduce([memory, chain, stages["launch"]]) + kernel_seconds_floor(device)
    return library_time(device, stages, seconds, np.ones(high.shape), np.where(is_last, INNERMOST, OUTER))
