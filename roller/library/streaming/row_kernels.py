"""Kernels of serving and training libraries that give every row a block: norms, gates, rotary embeddings.

Their sources say how many threads a block has, how many adjacent elements a thread loads, and whether a row stays in
registers. A block goes over its row in steps, each of which waits for the one before: for DRAM where a tensor is read
for the first time, for the cache where the block read the row itself. Blocks of a unit run in step, so that waiting,
moving and arithmetic add up; what follows is

    seconds = turns * (steps * waits + fixed) * latency + bytes / bandwidth + instructions / rate

where `turns` are the rows over the blocks that all units hold at once. That is the pessimistic bound of a closed
queueing network (Lazowska and others, *Quantitative System Performance*, 1984, table 5.2): threads that load 16 bytes
hide their waits, as the bytes of a step grow and the steps shrink, and those that load two do not.

The constants of a kernel are counted in its source; instructions, and the share of the latency that a cache takes, are
chosen on an A100's and an H100's layers of Sarathi (vidur's profiles of models on one and on four boards).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library.streaming.elementwise import (
    LibraryTime,
    block_seconds,
    host_seconds,
    instruction_seconds,
    kernel_seconds_floor,
    library_time,
)
from roller.library.streaming.passes import passes_seconds

#: Latency of what a block's unit read before, over that of DRAM.
CACHE_SHARE = 0.45

#: Bytes that a unit takes out of L2 in a cycle (NVIDIA, A100 white paper: 64 bytes per clock and SM).
PORT_BYTES = 64

#: Bytes of the longest load of a thread.
VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class RowKernel:
    """A kernel with a block per row.

    Attributes:
        threads: of a block at most; a row with fewer loads has fewer.
        moved: elements that pass memory, for each column.
        vector: whether a thread loads 16 bytes; one element without.
        loaded: columns that a thread loads in a step, one load or several, where other than those two.
        in_registers: whether a row is loaded at once and stays, as Triton's kernels have it: one step.
        waits: loads of a step that follow one another, each of something not read before.
        again: loads of a step of what the block read before, in a cache where the rows of all blocks fit into one.
        fixed: waits of a row besides: reductions, places looked up.
        instructions: for each column, besides loads and stores.
        thread_elements: columns of a thread, where a row is in registers and other than a load's.
        least: threads of a block at least, which short rows share.
        unit_blocks: blocks that the kernel starts for a unit, which then walk all rows; 0 for a block per row.
    """

    threads: int
    moved: float
    vector: bool = False
    loaded: int = 0
    in_registers: bool = False
    waits: float = 1.0
    again: float = 0.0
    fixed: float = 0.0
    instructions: float = 6.0
    thread_elements: int = 0
    least: int = 0
    unit_blocks: int = 0


def _triton(moved: float, *, least: int = 0, unit_blocks: int = 0, instructions: float = 4.0) -> RowKernel:
    """A program of Triton per row that loads it at once, or a program per unit that walks all rows.

    A thread has about 16 columns, as Liger and TorchInductor choose their warps.
    """
    return RowKernel(
        threads=1024,
        thread_elements=16,
        moved=moved,
        vector=True,
        in_registers=True,
        fixed=1,
        instructions=instructions,
        least=least,
        unit_blocks=unit_blocks,
    )


#: Kernels by name: the library, and the kernel as its source calls it. A column of ``rotary`` is a pair of elements.
#: Backward passes of norms keep the gradients of weights in registers and leave a row of them for each unit.
ROW_KERNELS: Mapping[str, RowKernel] = {
    "vllm rms_norm": RowKernel(threads=1024, moved=2, again=1, fixed=1, instructions=4),
    "vllm fused_add_rms_norm": RowKernel(threads=1024, moved=4, vector=True, again=1, fixed=1),
    "vllm act_and_mul": RowKernel(threads=1024, moved=3, instructions=8),
    "vllm act_and_mul by vectors": RowKernel(threads=1024, moved=3, vector=True, instructions=8),
    "vllm activation": RowKernel(threads=1024, moved=2, instructions=8),
    "vllm rotary_embedding": RowKernel(threads=512, moved=4, fixed=1, instructions=25),
    "flashinfer rmsnorm": RowKernel(threads=1024, moved=2, vector=True, again=1, fixed=1),
    "flashinfer fused_add_rmsnorm": RowKernel(threads=1024, moved=4, vector=True, again=1, fixed=1),
    "flashinfer act_and_mul": RowKernel(threads=1024, moved=3, vector=True, instructions=8),
    "torch indexSelectLargeIndex": RowKernel(threads=128, unit_blocks=8, moved=2, again=1, instructions=45),
    "torch indexSelectSmallIndex": RowKernel(threads=128, unit_blocks=8, moved=2, again=1, instructions=45),
    "cudnn norm": RowKernel(
        threads=1024, least=128, moved=2, vector=True, in_registers=True, fixed=1, instructions=0, unit_blocks=16
    ),
    "cudnn norm backward": RowKernel(
        threads=1024, least=128, moved=3, vector=True, in_registers=True, fixed=3, instructions=0, unit_blocks=16
    ),
    # A column of partial sums for each unit, which blocks of 32 warps add, 32 columns a block.
    "cudnn norm partial sums": RowKernel(threads=1024, moved=1, fixed=1),
    # Rows are tiles: 32 columns of all rows, eight rows a thread in a step (GammaBetaBackwardCUDAKernel), and what
    # Inductor's heuristics for outer reductions give a block, 512 elements a step.
    "torch norm columns": RowKernel(threads=1024, moved=2, loaded=8, fixed=1, instructions=2),
    "inductor norm columns": RowKernel(threads=128, moved=2, loaded=4, fixed=1, instructions=2),
    "inductor norm": _triton(2, least=128),
    "inductor norm backward": _triton(3, least=128),
    "triton rms_norm": _triton(2),
    "triton rms_norm backward": _triton(3, unit_blocks=1, instructions=50),
    "triton fused_add_rms_norm": _triton(4),
    "triton fused_add_rms_norm backward": _triton(4, unit_blocks=1, instructions=50),
    "triton layer_norm": _triton(2),
    "triton layer_norm backward": _triton(3, unit_blocks=1, instructions=65),
    "triton softmax": _triton(2),
    "triton glu": _triton(3, instructions=7),
    "triton glu backward": _triton(5, instructions=14),
    "triton activation": _triton(2),
    "triton activation backward": _triton(3),
    "triton rotary": _triton(4),
    "triton cross_entropy": replace(_triton(2, instructions=8), again=1),
}


def row_kernel_seconds(
    name: str, rows: ArrayLike, columns: ArrayLike, device: DeviceSpec, *, dtype_bytes: int = 2, further: ArrayLike = 0
) -> LibraryTime:
    """Time of calls of a kernel.

    Args:
        name: one of :data:`ROW_KERNELS`.
        rows: rows of the result: tokens, as a rule.
        columns: columns of the result.
        device: the board.
        dtype_bytes: bytes per element.
        further: columns of a second tensor that a block walks after the first, such as the keys of rotary embeddings.

    Raises:
        InputError: there is no such kernel.
    """
    kernel = ROW_KERNELS.get(name)
    if kernel is None:
        raise InputError("kernel", f"no row kernel is called {name!r}", f"known: {', '.join(ROW_KERNELS)}")
    high, first, second = (
        np.atleast_1d(array)
        for array in np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (rows, columns, further)))
    )
    whole = high
    width = kernel.loaded or (VECTOR_BYTES // dtype_bytes if kernel.vector else 1)
    each = kernel.thread_elements or width
    threads = np.clip(np.ceil(first / each), 1.0 if kernel.least else 32.0, kernel.threads)
    if kernel.least:
        # Short rows share a block.
        high, threads = np.ceil(high * np.minimum(threads / kernel.least, 1.0)), np.maximum(threads, kernel.least)
    if kernel.in_registers:
        steps = np.ones(first.shape)
    else:
        steps = np.ceil(first / (threads * width)) + np.ceil(second / (threads * width))
    latency = device.dram.latency_seconds or 400e-9
    most = kernel.unit_blocks or device.limits.blocks_per_unit
    resident = np.minimum(np.floor(device.limits.threads_per_unit / threads), most)
    places = device.unit_count * np.maximum(resident, 1)
    turns = np.maximum(high / places, 1.0)
    started = np.minimum(high, places) if kernel.unit_blocks else high
    waits = turns * (steps * (kernel.waits + kernel.again * CACHE_SHARE) + kernel.fixed) * latency
    row_bytes = (first + second) * dtype_bytes * whole / high
    size, held = high * row_bytes, np.minimum(resident, high / device.unit_count)
    # Where there are fewer rows than units, a row's instructions are those of one unit.
    spread = np.maximum(high, device.unit_count)
    stages = {
        "host": host_seconds(device, np.ones(high.shape)),
        "launch": block_seconds(device, started),
        **passes_seconds(device, kernel.moved * size, kernel.again * size, held, row_bytes),
        "arithmetic": instruction_seconds(device, kernel.instructions * spread * row_bytes / dtype_bytes),
        "waits": waits,
    }
    # Few blocks draw no more than what their units' ports to L2 pass.
    stages["ports"] = (
        kernel.moved * size / (np.minimum(started, device.unit_count) * PORT_BYTES * device.clocks.boost_hz)
    )
    memory, arithmetic = np.maximum(stages["dram"] + stages["l2"], stages["ports"]), stages["arithmetic"]
    # Rows in registers of several blocks take turns at memory and arithmetic; steps and lone blocks do not.
    turned = kernel.in_registers and not kernel.unit_blocks
    busy = np.hypot(np.hypot(memory, arithmetic), stages["waits"]) if turned else memory + arithmetic + stages["waits"]
    seconds = np.maximum(busy, stages["launch"]) + kernel_seconds_floor(device)
    return library_time(device, stages, seconds, np.ones(high.shape), name)
