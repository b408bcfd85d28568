"""Which tile a library takes for a scaled product: the tables of its callers, by board and rows of activations.

CUTLASS as vLLM calls it (``csrc/quantization/w8a8/cutlass``, configurations by ``M``): tokens become columns of the
tile where they are few. Blocks of a cluster that have no rows run, too. DeepGEMM and FlashInfer's CuTe kernels pick the
fastest of some tiles; vLLM's Triton kernel for blocks has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from roller.library.arrays import Bools, Floats

#: How a board feeds its matrix units.
Generation = Literal["warps", "warp groups", "unit pairs"]


@dataclass(frozen=True, eq=False)
class Tiles:
    """One tile a call: sides, bytes of a step along k, and blocks of a cluster along rows and columns.

    Attributes:
        ends: whether its few warps each walk part of k.
    """

    m: Floats
    n: Floats
    depth_bytes: Floats
    cluster_m: Floats
    cluster_n: Floats
    ends: Bools

    @property
    def buffer_bytes(self) -> Floats:
        """Shared memory of a block whose warps copy for themselves."""
        large = (self.m * self.n >= 64 * 128) & (self.depth_bytes == 128) | (self.m == 256)
        return np.asarray(np.where(large, _LARGE_STAGES, _STAGES) * (self.m + self.n) * self.depth_bytes)

    @property
    def threads(self) -> Floats:
        """Threads of a block whose warps copy for themselves: warps make 64x64, or 16 or 32 rows where the tile is low,
        and two of them share the sum of each part where a step is 128 bytes."""
        return np.asarray(np.where(self.m == 256, 256.0, np.where(self.m == 16, 64.0, 128.0)))

    def blocks(self, m: Floats, n: Floats) -> Floats:
        """Blocks of calls, those that only fill clusters included."""
        along_m, along_n = np.ceil(m / self.m), np.ceil(n / self.n)
        filled = np.ceil(along_m / self.cluster_m) * self.cluster_m * np.ceil(along_n / self.cluster_n) * self.cluster_n
        return np.asarray(filled)


#: A row of a table: for at most so many rows and columns, the tile, its depth, and its cluster.
_Row = tuple[float, float, int, int, int, int, int]

_ANY = np.inf

#: CUTLASS for ``wgmma`` and ``tcgen05`` (a pair's tile is halved: sides are those of a unit), and for ``mma.sync``.
_CUTLASS: dict[Generation, tuple[_Row, ...]] = {
    "warp groups": (
        (16, 1280, 16, 64, 256, 2, 1), (16, _ANY, 16, 64, 256, 1, 1), (64, 1280, 16, 64, 256, 4, 1),
        (64, _ANY, 64, 64, 256, 1, 1), (128, _ANY, 64, 128, 128, 2, 1), (_ANY, _ANY, 128, 128, 128, 2, 1),
    ),
    "unit pairs": (
        (16, _ANY, 32, 128, 128, 1, 4), (64, _ANY, 64, 128, 256, 1, 4), (256, _ANY, 64, 128, 128, 2, 1),
        (_ANY, _ANY, 128, 128, 128, 2, 2),
    ),
    "warps": (
        (16, 8192, 16, 64, 128, 1, 1), (16, 16384, 16, 128, 64, 1, 1), (16, _ANY, 32, 64, 128, 1, 1),
        (32, 8192, 32, 64, 128, 1, 1), (32, 16384, 32, 128, 128, 1, 1), (32, _ANY, 32, 64, 128, 1, 1),
        (64, 8192, 64, 64, 128, 1, 1), (64, 16384, 64, 128, 128, 1, 1),
        (64, _ANY, 64, 64, 128, 1, 1), (128, 8192, 64, 128, 128, 1, 1), (128, 16384, 128, 128, 64, 1, 1),
        (128, _ANY, 128, 64, 128, 1, 1), (256, 4096, 64, 128, 128, 1, 1), (256, _ANY, 128, 128, 64, 1, 1),
        (_ANY, 4096, 128, 128, 64, 1, 1), (_ANY, 8192, 256, 128, 64, 1, 1), (_ANY, _ANY, 128, 128, 64, 1, 1),
    ),
}  # fmt: skip

#: First boards whose CUTLASS kernels feed single warps by bulk copies.
BULK_WARPS_CAPABILITY = (12, 0)

#: CUTLASS for ``mma.sync`` with bulk copies.
_CUTLASS_BULK_WARPS: tuple[_Row, ...] = (
    (16, _ANY, 16, 64, 128, 1, 1), (32, _ANY, 32, 64, 128, 1, 1), (256, _ANY, 64, 64, 128, 1, 1),
    (_ANY, _ANY, 128, 128, 128, 1, 1),
)  # fmt: skip

#: Buffers of one step that CUTLASS's blocks for ``mma.sync`` hold: of large tiles with deep steps, and of others.
_LARGE_STAGES, _STAGES = 3, 5

#: Tiles to choose from: DeepGEMM's by generation, and CuTe's for four bits.
DEEP_GEMM: dict[Generation, tuple[tuple[int, int], ...]] = {
    "warp groups": ((64, 32), (64, 64), (64, 128), (128, 64), (128, 96), (128, 128), (128, 160)),
    "unit pairs": ((32, 128), (64, 128), (128, 64), (128, 128), (128, 192)),
    "warps": ((64, 64), (64, 128), (128, 128)),
}
CUTE_FP4 = ((32, 128), (64, 128), (128, 64), (128, 128), (128, 192), (128, 256), (256, 128), (256, 256))
TRITON_BLOCK = ((64, 128),)

#: Bytes of a step along k where tiles are chosen among.
DEPTH_BYTES = 128


def cutlass_tiles(generation: Generation, capability: tuple[int, int], m: Floats, n: Floats) -> Tiles:
    """CUTLASS's tile for every call."""
    bulk_warps = generation == "warps" and capability >= BULK_WARPS_CAPABILITY
    table = _CUTLASS_BULK_WARPS if bulk_warps else _CUTLASS[generation]
    # Tables by powers of two say so of columns only.
    rows, columns = np.asarray(m, np.float64), np.asarray(n, np.float64)
    place = np.full(rows.shape, len(table) - 1)
    for number, (most_m, most_n, *_) in reversed(list(enumerate(table))):
        place = np.where((rows <= most_m) & (columns <= most_n), number, place)
    values = np.array([row[2:] for row in table], np.float64)[place]
    tile_m, tile_n, depth, cluster_m, cluster_n = np.moveaxis(values, -1, 0)
    if generation == "unit pairs":
        # Exactly 64 tokens with a short k run unswapped; the table's row serves all others.
        cluster_n = np.where(rows == 64, 1.0, cluster_n)
    ends = (tile_n == 64) & (tile_m >= 32) & (tile_m <= 64) & (generation == "warps") & (not bulk_warps)
    return Tiles(tile_m, tile_n, depth, cluster_m, cluster_n, ends)
