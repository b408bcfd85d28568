"""Library kernels that stream their tensors: pooling, reductions, transpositions, and whatever no other model knows.

PyTorch runs them as one kernel of its own. The time is that of moving the tensors once, by the conventions of
:mod:`roller.library.streaming.elementwise`, or of issuing the instructions, whichever is longer; a *roofline* call, of
which no kernel is known, is arithmetic at the sustained rate of its type against the same traffic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from roller.library.streaming.elementwise import (
    BLOCK_ELEMENTS,
    Floats,
    LibraryTime,
    block_seconds,
    host_seconds,
    instruction_seconds,
    kernel_seconds_floor,
    library_time,
    stream_seconds,
)

#: Host time of a call in units of ``framework.call_seconds``: about that of a module such as relu.
HOST = 1.1

#: Bytes that a block of some hundred threads has under way to DRAM: few blocks leave it idle.
BLOCK_BYTES = 2500

#: Bytes that a load takes out of L2 where neighbours in a warp are not adjacent: a sector.
SECTOR_BYTES = 32

#: Threads of a block whose round trips count.
TURN_THREADS = 512

#: Instructions per point: a load, an operation, and its share of the addresses.
POINT_INSTRUCTIONS = 3.0


def streamed_seconds(
    moved: ArrayLike,
    outputs: ArrayLike,
    points: ArrayLike,
    device: DeviceSpec,
    algorithm: str,
    *,
    dtype: str = "float32",
    roofline: bool = False,
    scattered: ArrayLike = 0,
    blocks: ArrayLike = 0,
    trips: ArrayLike = 0,
) -> LibraryTime:
    """Time of calls that stream.

    Args:
        moved: bytes read and written, every tensor once.
        outputs: elements of the result; they set the number of blocks.
        points: evaluations of what is reduced; for a roofline call arithmetic operations (a multiply-add is two).
        device: the board.
        algorithm: name of the kernel.
        dtype: type of the arithmetic, for a roofline call.
        roofline: whether no kernel is known.
        scattered: sectors that are read where neighbours in the result lie apart in the operand.
        blocks: of kernels that have few, such as one per channel; 0 for as many as there is work for.
        trips: round trips to DRAM that follow one another in each of ``blocks`` blocks of 512 threads, which units run
            in turn; such blocks are not counted as few.

    Raises:
        InputError: the board has no arithmetic rate for ``dtype``.
    """
    sizes = (moved, outputs, points, scattered, blocks, trips)
    traffic, results, work, sectors, few, turns = (
        np.atleast_1d(array) for array in np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in sizes))
    )
    ones = np.ones(traffic.shape)
    if roofline:
        rate = device.sustained_flops(dtype if dtype in device.dtypes else "float32")
        arithmetic = work / rate
    else:
        arithmetic = instruction_seconds(device, work * POINT_INSTRUCTIONS)
    resident = device.unit_count * max(device.limits.threads_per_unit // TURN_THREADS, 1)
    stages = {
        "host": host_seconds(device, HOST * ones),
        "launch": block_seconds(device, np.ceil(results / BLOCK_ELEMENTS)),
        **stream_seconds(device, traffic),
        "arithmetic": arithmetic,
        "sectors": sectors * SECTOR_BYTES / (device.l2 or device.dram).bandwidth_bytes_per_second,
        "blocks": _few_blocks_seconds(device, traffic, np.where(turns > 0, 0.0, few)),
        "trips": turns * np.ceil(few / resident) * (device.dram.latency_seconds or 400e-9),
    }
    memory = np.maximum(stages["dram"] + stages["l2"], stages["blocks"])
    busy = np.maximum.reduce([memory, stages["arithmetic"], stages["launch"], stages["sectors"], stages["trips"]])
    return library_time(device, stages, busy + kernel_seconds_floor(device), ones, algorithm)


def _few_blocks_seconds(device: DeviceSpec, moved: Floats, blocks: Floats) -> Floats:
    """Seconds of a kernel whose few blocks, two on a unit at a time, wait for DRAM; 0 where blocks are not counted."""
    latency = device.dram.latency_seconds or 400e-9
    under_way = np.minimum(blocks, 2.0 * device.unit_count) * BLOCK_BYTES
    return np.asarray(np.where(blocks > 0, moved * latency / np.maximum(under_way, BLOCK_BYTES), 0.0))
