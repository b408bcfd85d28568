"""Times of PyTorch's softmax and layer norm over the last axis, forward and backward.

Softmax of rows up to 1024 elements keeps a row in the registers of a warp (``softmax_warp_forward``) and touches memory
once each way. Longer rows get a block each (``cunn_SoftMaxForward``) that reads the row three times: maximum, sum of
exponentials, result. Layer norm gives every row four warps (``vectorized_layer_norm_kernel``) and reads it twice:
running moments, result. Whether a second read costs DRAM traffic depends on whether the rows of all resident blocks
together stay in L1 or L2. Reductions and exponentials make short rows bound by instructions.

Seconds; ``rows`` and ``columns`` are those of the row-major matrix, float32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from roller.library.streaming import passes
from roller.library.streaming.elementwise import (
    Direction,
    Floats,
    LibraryTime,
    block_seconds,
    host_seconds,
    instruction_seconds,
    kernel_seconds_floor,
    library_time,
    stream_seconds,
)
from roller.library.streaming.row_kernels import row_kernel_seconds

#: Host time in units of ``framework.call_seconds``: layer norm allocates three results and is called as a module.
SOFTMAX_HOST, LAYER_NORM_HOST = 1.14, 1.62

#: Longest row that the warp softmax takes.
WARP_ROW = 1024

#: Memory time and instruction time add in this norm (1 would be one after the other, infinity full overlap): within a
#: block the phases wait for each other, between the blocks of an SM they overlap.
OVERLAP = 2.0

#: Softmax: instructions per element, of the padded row for the warp kernel, of three passes for the block kernel.
WARP_INSTRUCTIONS, BLOCK_INSTRUCTIONS = 6.0, 34.0

#: Layer norm: instructions per thread for the reduction over a block, and per step of 4 elements per thread (moments
#: with a division each, then the result).
NORM_FIXED, NORM_STEP = 170.0, 125.0

#: RMS norm over layer norm: instructions of a step, whose sum of squares has no running mean and no divisions; chosen
#: on PyTorch's forward kernels on an H200.
RMS_SHARE = 0.43

#: Gradient of a layer norm's input over its forward pass in instructions and waits: two sums and no divisions. Chosen
#: on an H200, judged by single calls on other boards.
GRADIENT_TURNS = 1.5

#: Layer norm backward: columns of a block that adds the gradients of scale and shift over all rows; rows from which on
#: slices of them have blocks of their own where columns make few, and blocks then
#: (``LaunchGammaBetaBackwardCUDAKernel``).
COLUMN_TILE, SLICED_ROWS, SLICED_BLOCKS = 32, 65_536, 32_768

#: Layer norm: threads per row.
NORM_THREADS = 128

#: Layer norm: round trips to DRAM that a row's block waits for at its beginning and end, and per step of 4 elements per
#: thread: loads, and divisions of the running moments that wait for those of the step before.
NORM_ROW_TRIPS, NORM_STEP_TRIPS = 2.0, 3.0

#: Rows that do not begin on a 32-byte sector: share of extra sectors that a warp's scattered rows move.
UNALIGNED = 0.07


def softmax_seconds(
    rows: ArrayLike, columns: ArrayLike, device: DeviceSpec, direction: Direction = "forward", dtype_bytes: int = 4
) -> LibraryTime:
    """Time of softmax (or log-softmax) calls over the last axis of row-major ``[rows, columns]`` tensors.

    The backward pass of softmax first multiplies the result and its gradient; then a kernel of the same kind reads the
    products and the result, that of long rows twice.
    """
    high, wide = np.broadcast_arrays(np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64))
    backward = direction == "backward"
    warp = wide <= WARP_ROW
    moved = high * wide * dtype_bytes * (3 if backward else 2)
    again = np.where(warp, 0.0, high * wide * dtype_bytes * 2)
    threads = np.where(warp, 128.0, softmax_block_threads(wide))
    rows_per_block = np.where(warp, np.where(wide <= 128, 8.0, 4.0), 1.0)
    aligned = (wide * dtype_bytes % 32 == 0) | ~warp
    padded = np.maximum(device.warp_lanes, 2 ** np.ceil(np.log2(np.maximum(wide, 1))))
    instructions = high * np.where(warp, WARP_INSTRUCTIONS * padded, BLOCK_INSTRUCTIONS * wide)
    resident = _resident_rows(device, high, threads, rows_per_block)
    host = _host_units(device, device.framework_calls.softmax_call_seconds, SOFTMAX_HOST)
    kernels = np.full(wide.shape, 2.0 if backward else 1.0)
    memory = passes.passes_seconds(
        device, moved * np.where(aligned, 1.0, 1 + UNALIGNED), again, resident, wide * dtype_bytes
    )
    if backward:
        product = stream_seconds(device, 3 * high * wide * dtype_bytes)
        memory = {name: seconds + product[name] for name, seconds in memory.items()}
    stages = {
        "host": host_seconds(device, np.full(wide.shape, host), kernels),
        "launch": block_seconds(device, np.ceil(high / rows_per_block)),
        **memory,
        "arithmetic": instruction_seconds(device, instructions),
    }
    short_row, long_row = ("softmax_warp_forward", "cunn_SoftMaxForward")
    if backward:
        short_row, long_row = ("mul+softmax_warp_backward", "mul+cunn_SoftMaxBackward")
    return _together(device, stages, kernels, np.where(warp, short_row, long_row))


def layer_norm_seconds(
    rows: ArrayLike,
    columns: ArrayLike,
    device: DeviceSpec,
    direction: Direction = "forward",
    dtype_bytes: int = 4,
    *,
    rms: bool = False,
) -> LibraryTime:
    """Time of layer norm calls with scale and shift over the last axis of row-major ``[rows, columns]`` tensors.

    RMS norm (``rms``) is the same kernels without a mean.

    Rows that are no multiple of four elements take two kernels forward (``RowwiseMoments``, ``LayerNormForward``).
    Backward, one kernel makes the gradient of the input from two reads of both tensors, and one sums the gradients of
    scale and shift down the columns.
    """
    high, wide = np.broadcast_arrays(np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64))
    tensor = high * wide * dtype_bytes
    vector = wide % 4 == 0
    if direction == "backward":
        kernels = np.full(wide.shape, 2.0)
        moved, again = 3 * tensor, 2 * tensor
        algorithm = np.full(wide.shape, "layer_norm_grad_input_kernel+GammaBetaBackwardCUDAKernel")
    else:
        kernels = np.where(vector, 1.0, 2.0)
        # Two kernels read the tensor once each, so the second read never depends on the resident rows.
        moved, again = np.where(vector, 2, 3) * tensor, np.where(vector, tensor, 0.0)
        algorithm = np.where(vector, "vectorized_layer_norm_kernel", "RowwiseMomentsCUDAKernel+LayerNormForward")
    # A warp without elements left in the last step issues nothing.
    steps = np.ceil(wide / (4 * device.warp_lanes)) * device.warp_lanes / NORM_THREADS
    turns = GRADIENT_TURNS if direction == "backward" else 1.0
    instructions = turns * high * NORM_THREADS * (NORM_FIXED + NORM_STEP * steps) * (RMS_SHARE if rms else 1.0)
    resident = _resident_rows(device, high, np.full(wide.shape, NORM_THREADS), np.ones(wide.shape))
    host = _host_units(device, device.framework_calls.layer_norm_call_seconds, LAYER_NORM_HOST)
    stages = {
        "host": host_seconds(device, host, kernels),
        "launch": np.where(direction == "backward", 1.0, kernels) * block_seconds(device, high),
        **passes.passes_seconds(device, moved, again, resident, wide * dtype_bytes),
        "arithmetic": instruction_seconds(device, instructions),
        "turns": turns * _turns_seconds(device, high, wide) * (RMS_SHARE if rms else 1.0),
    }
    if direction == "forward":
        return _together(device, stages, kernels, algorithm)
    tiles = np.ceil(wide / COLUMN_TILE)
    # Few columns of many rows are summed in slices of rows, which another kernel adds.
    is_sliced = (high > SLICED_ROWS) & (tiles < device.unit_count / 2)
    slices = np.where(is_sliced, np.minimum(SLICED_BLOCKS // tiles, np.ceil(high / 32)), 1.0)
    walked = np.ceil(high / slices) * COLUMN_TILE
    sums = row_kernel_seconds("torch norm columns", tiles * slices, walked, device, dtype_bytes=dtype_bytes)
    return _together(device, stages, kernels + is_sliced, algorithm, sums)


def _turns_seconds(device: DeviceSpec, rows: Floats, columns: Floats) -> Floats:
    """Seconds of layer norm's blocks one after the other, a row each: what few or short rows wait for."""
    resident = device.unit_count * max(device.limits.threads_per_unit // NORM_THREADS, 1)
    turns = np.where(rows > resident, rows / resident, 1.0)
    trips = NORM_ROW_TRIPS + NORM_STEP_TRIPS * np.ceil(columns / (4 * NORM_THREADS))
    return np.asarray(turns * trips * (device.dram.latency_seconds or 400e-9))


def softmax_block_threads(columns: ArrayLike) -> Floats:
    """Threads of a block of the long-row softmax: the power of two that covers an eighth of the row, 32 to 1024.

    PyTorch's ``SoftMax_getBlockSize``: doubled while below half of the row's groups of four elements.

    >>> softmax_block_threads([256, 2048, 1e6]).tolist()
    [32.0, 256.0, 1024.0]
    """
    half = np.floor(np.floor(np.asarray(columns, dtype=np.float64) / 4) / 2)
    return np.clip(2 ** np.ceil(np.log2(np.maximum(half, 1))), 32, 1024)


def _host_units(device: DeviceSpec, measured: float | None, usual: float) -> float:
    """Host time in units of ``framework.call_seconds``: as measured, or as usual."""
    return usual if measured is None else measured / device.framework_calls.call_seconds


def _resident_rows(device: DeviceSpec, rows: Floats, threads: Floats, rows_per_block: Floats) -> Floats:
    """Rows that one unit works on at a time."""
    blocks = np.minimum(np.floor(device.limits.threads_per_unit / threads), device.limits.blocks_per_unit)
    return np.minimum(blocks * rows_per_block, rows / device.unit_count)


def _together(
    device: DeviceSpec,
    stages: Mapping[str, Floats],
    kernels: Floats,
    algorithm: ArrayLike,
    last: LibraryTime | None = None,
) -> LibraryTime:
    memory = stages["dram"] + stages["l2"]
    busy = (memory**OVERLAP + stages["arithmetic"] ** OVERLAP) ** (1 / OVERLAP)
    busy = np.maximum(busy, stages.get("turns", 0.0))
    kernel = np.maximum(busy, stages["launch"]) + kernels * kernel_seconds_floor(device)
    if last is not None:
        kernel = kernel + last.kernel_seconds - kernel_seconds_floor(device)
        stages = {**stages, "columns": last.kernel_seconds}
    return library_time(device, stages, kernel, kernels, algorithm)
