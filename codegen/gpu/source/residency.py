"""One more resident block where the compiler took registers without need.

A compiler that knows no more than the size of a block takes what one block may have, often a few registers too many
for another block to fit on the unit. RATIONAL counts on what the tile needs; this asks the compiler for the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from codegen.gpu.source.nvrtc import CompiledKernel, CompileError, compile_cuda

#: 32-bit registers of a unit, and how many a warp's are rounded to: the same on every NVIDIA board since compute
#: capability 5.0 (CUDA C++ Programming Guide, technical specifications per compute capability).
UNIT_REGISTERS = 65536
REGISTER_GRANULARITY = 256
WARP_LANES = 32

#: Registers that a thread can have, likewise.
THREAD_REGISTERS = 255

#: Shared memory of a unit of compute capability 7.0 that blocks can have: the least of those that we tune for.
UNIT_SHARED_BYTES = 96 * 1024

#: Share of the registers that has to be left: with fewer the compiler would compute addresses anew, or spill. Of 162
#: kernels of the 119 operators for V100, A100 and H200 that were asked for less, 29 made it, 4 of them with less than
#: this: chosen on operators of even numbers, where 39 compilations in place of 92 find 16 of 20; of the others 26 in
#: place of 70 find all 9.
LEAST_SHARE = 0.88


def resident_blocks(registers: int, threads: int) -> int:
    """Blocks of ``threads`` threads that the register file of a unit holds, at ``registers`` registers a thread.

    >>> resident_blocks(registers=96, threads=256)
    2
    """
    per_warp = -(-registers * WARP_LANES // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    return UNIT_REGISTERS // (per_warp * -(-threads // WARP_LANES))


def squeezed(
    source: str,
    compiled: CompiledKernel,
    threads: int,
    shared_bytes: int,
    architecture: str,
    *,
    name: str,
    worthwhile: Collection[int] | None = None,
) -> tuple[str, CompiledKernel]:
    """Source and kernel, recompiled where another number of resident blocks suits them better.

    One more block is asked for where few registers are missing for it and nothing then spills; fewer blocks where the
    kernel spills as it is, and not for those.

    Args:
        source: CUDA source with a launch bound of ``threads`` threads.
        compiled: what the compiler made of the source.
        threads: of a block.
        shared_bytes: shared memory of a block.
        architecture: ``"sm_70"``.
        name: stands in messages only.
        worthwhile: numbers of resident blocks that are worth asking for; None for any.
    """
    if compiled.spill_bytes:
        return _relaxed(source, compiled, threads, architecture, name=name)
    blocks = resident_blocks(compiled.registers, threads) + 1
    allowed = UNIT_REGISTERS // (blocks * -(-threads // WARP_LANES) * WARP_LANES)
    fits = blocks * shared_bytes <= UNIT_SHARED_BYTES
    is_wanted = worthwhile is None or blocks in worthwhile
    if blocks < 2 or not is_wanted or not fits or allowed < LEAST_SHARE * compiled.registers:
        return source, compiled
    bounded = _bounded(source, threads, blocks)
    try:
        tight = compile_cuda(bounded, architecture, name=name)
    except CompileError:
        return source, compiled
    if tight.spill_bytes or tight.stack_bytes > compiled.stack_bytes:
        return source, compiled
    return (bounded, tight) if resident_blocks(tight.registers, threads) >= blocks else (source, compiled)


def _relaxed(
    source: str, compiled: CompiledKernel, threads: int, architecture: str, *, name: str
) -> tuple[str, CompiledKernel]:
    """A kernel that spills compiled for half as many resident blocks as it has, or one: left to itself the compiler may
    spill a few registers to fit more small blocks than anybody asked for. One that has all registers that a thread of a
    single block can have gains nothing."""
    granules = UNIT_REGISTERS // REGISTER_GRANULARITY // -(-threads // WARP_LANES)
    if compiled.registers >= min(THREAD_REGISTERS, granules * REGISTER_GRANULARITY // WARP_LANES):
        return source, compiled
    for blocks in dict.fromkeys((max(1, resident_blocks(compiled.registers, threads) // 2), 1)):
        bounded = _bounded(source, threads, blocks)
        try:
            relaxed = compile_cuda(bounded, architecture, name=name)
        except CompileError:
            continue
        if not relaxed.spill_bytes:
            return bounded, relaxed
    return source, compiled


def _bounded(source: str, threads: int, blocks: int) -> str:
    """The source with a number of blocks that are to be resident."""
    return re.sub(rf"__launch_bounds__\({threads}\)", f"__launch_bounds__({threads}, {blocks})", source)
