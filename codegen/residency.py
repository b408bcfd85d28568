"""One more resident block where the compiler took registers without need.

A compiler that is told no more than the size of a block takes what one block may have, often a few registers too many
for another block to fit beside it. RATIONAL counts on what the tile needs; this asks the compiler for the same.
"""

from __future__ import annotations

import re

from codegen.device_compiler import CompiledKernel, CompileError, compile_cuda

#: 32-bit registers of a unit, and how many a warp's are rounded to: the same on every NVIDIA board since compute
#: capability 5.0 (CUDA C++ Programming Guide, technical specifications per compute capability).
UNIT_REGISTERS = 65536
REGISTER_GRANULARITY = 256
WARP_LANES = 32

#: Shared memory of a unit of compute capability 7.0 that blocks can have: the least of those that we tune for.
UNIT_SHARED_BYTES = 96 * 1024

#: Share of the registers that has to be left: with fewer the compiler would compute addresses anew.
LEAST_LEFT = 0.75


def resident_blocks(registers: int, threads: int) -> int:
    """Blocks of ``threads`` threads that the register file of a unit holds."""
    per_warp = -(-registers * WARP_LANES // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    return UNIT_REGISTERS // (per_warp * -(-threads // WARP_LANES))


def squeezed(
    source: str, compiled: CompiledKernel, threads: int, shared_bytes: int, architecture: str, *, name: str
) -> tuple[str, CompiledKernel]:
    """The kernel compiled for one resident block more, if little is missing and nothing spills; else as it is."""
    blocks = resident_blocks(compiled.registers, threads) + 1
    allowed = UNIT_REGISTERS // (blocks * -(-threads // WARP_LANES) * WARP_LANES)
    fits = blocks * shared_bytes <= UNIT_SHARED_BYTES
    if blocks < 2 or compiled.spill_bytes or not fits or allowed < LEAST_LEFT * compiled.registers:
        return source, compiled
    bounded = re.sub(rf"__launch_bounds__\({threads}\)", f"__launch_bounds__({threads}, {blocks})", source)
    try:
        tight = compile_cuda(bounded, architecture, name=name)
    except CompileError:
        return source, compiled
    if tight.spill_bytes or tight.stack_bytes > compiled.stack_bytes:
        return source, compiled
    return (bounded, tight) if resident_blocks(tight.registers, threads) >= blocks else (source, compiled)
