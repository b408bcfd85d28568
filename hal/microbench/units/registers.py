"""Registers: how many values a thread keeps before the compiler spills, and in what portions a warp gets them.

Spilling: register tiles of growing size as matrix products have them, accumulators and one row and column of operands,
until the compiler puts something into local memory. Portions: one kernel compiled for different numbers of registers;
the resident blocks that the driver promises for each tell how the number was rounded up. Nothing is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hal.microbench.launcher import KernelText, Launcher, MicrobenchError, text
from hal.microbench.measurement import Found, Measurement
from hal.microbench.sampling import Settings

TILES = ((8, 8), (8, 12), (8, 16), (12, 12), (12, 14), (12, 16), (14, 14), (15, 15))
LIMITS = (32, 36, 40, 44, 48, 52, 60, 64, 68, 76, 84, 92, 100, 116, 124)
PORTIONS = (512, 256, 128, 64)
_SCHEDULERS = 4
_THREADS = 64

_TILE = """
extern "C" __global__ void $ENTRY(const float* a, const float* b, float* c, int k) {
  float sums[$M][$N], left[$M], right[$N];
  #pragma unroll
  for (int i = 0; i < $M; ++i)
    #pragma unroll
    for (int j = 0; j < $N; ++j) sums[i][j] = 0;
  #pragma unroll 1
  for (int step = 0; step < k; ++step) {
    #pragma unroll
    for (int i = 0; i < $M; ++i) left[i] = a[step * $M + i];
    #pragma unroll
    for (int j = 0; j < $N; ++j) right[j] = b[step * $N + j];
    #pragma unroll
    for (int i = 0; i < $M; ++i)
      #pragma unroll
      for (int j = 0; j < $N; ++j) sums[i][j] += left[i] * right[j];
  }
  #pragma unroll
  for (int i = 0; i < $M; ++i)
    #pragma unroll
    for (int j = 0; j < $N; ++j) c[(threadIdx.x * $M + i) * $N + j] = sums[i][j];
}
"""


def tile_text(m: int, n: int, registers: int | None = None) -> KernelText:
    """The kernel with an m x n tile of accumulators, of at most that many registers."""
    suffix = f"_{registers}" if registers else ""
    return text(f"tile_{m}x{n}{suffix}", _TILE, registers, M=m, N=n)


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (*(tile_text(m, n) for m, n in TILES), *(tile_text(12, 12, limit) for limit in LIMITS))


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``registers.values``: the most values of a tile without a spill; ``registers.portion``: registers a warp gets."""
    fitting = [m * n + m + n for m, n in TILES if launcher.kernel(tile_text(m, n)).local_bytes == 0]
    if not fitting:
        raise MicrobenchError("the compiler spills every register tile")
    method = f"accumulators and operands of tiles of {TILES[0]} to {TILES[-1]} that compile without local memory"
    yield Measurement(
        key="registers.values", unit="", samples=(float(max(fitting)),), method=method, path="", low=80, high=255
    )
    blocks = {}
    for limit in LIMITS:
        kernel = launcher.kernel(tile_text(12, 12, limit))
        blocks[kernel.registers] = kernel.resident_blocks(_THREADS)
    found_portion = portion(blocks, launcher.board.registers_per_unit, launcher.board.lanes)
    method = f"occupancy that the driver gives {len(blocks)} kernels of {min(blocks)} to {max(blocks)} registers"
    path = "limits.register_allocation_granularity"
    yield Measurement(
        key="registers.portion", unit="", samples=(float(found_portion),), method=method, path=path, low=64, high=512
    )


def portion(blocks: Mapping[int, int], registers_per_unit: int, lanes: int) -> int:
    """The number of registers that a warp's are rounded up to, from resident blocks by registers per thread.

    The register file is divided among the schedulers, and a block's warps among them. Only kernels that the register
    file limits decide: those with the most blocks may be held by another limit. Raises MicrobenchError where no
    portion explains the rest.
    """
    most, warps = max(blocks.values()), _THREADS // lanes
    for candidate in PORTIONS:
        for schedulers in (_SCHEDULERS, 2):
            promised = {}
            for registers in blocks:
                per_warp = -(-registers * lanes // candidate) * candidate
                promised[registers] = registers_per_unit // schedulers // per_warp * schedulers // warps
            if all(promised[r] == count or (count == most and promised[r] > count) for r, count in blocks.items()):
                return candidate
    raise MicrobenchError("no rounding explains the resident blocks that the driver gives")
