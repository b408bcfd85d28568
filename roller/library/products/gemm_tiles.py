"""The float32 GEMM kernels of cuBLAS 12.1: their tiles, what a block of each needs, and which board has which.

Tiles, threads and generations are facts about the library: they stand in the kernels' names
(``ampere_sgemm_32x32_sliced1x4_tn``) and launches, as the profiler shows them. cuBLAS is column-major, so in
``sgemm_128x64`` the 128 run along the columns (n) of a row-major result and the 64 along its rows (m).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats

Generation = Literal["maxwell", "volta", "ampere"]


@dataclass(frozen=True, kw_only=True)
class GemmTile:
    """One kernel: a block computes ``m`` x ``n`` of the result and reads ``depth`` of k at a time.

    Attributes:
        name: as in the kernel's name, columns first.
        m: rows of the result per block.
        n: columns of the result per block.
        depth: elements of k per step: 8, and 8 for each of the four slices of a ``sliced1x4`` kernel, whose groups of
            warps divide the k of a step and add up at the end.
        threads: per block.
        registers: per thread. Accumulators, two sets of operands and addresses: 8 x 8 results per thread take about
            122, 8 x 4 about 86, 4 x 4 about 57.
        shared_bytes: per block, two buffers of both operand tiles.
    """

    name: str
    m: int
    n: int
    depth: int
    threads: int
    registers: int
    shared_bytes: int

    @property
    def sliced(self) -> bool:
        """Whether groups of warps share the k of a step."""
        return self.depth > 8


TILES: tuple[GemmTile, ...] = (
    GemmTile(name="128x128", m=128, n=128, depth=8, threads=256, registers=122, shared_bytes=16_384),
    GemmTile(name="128x64", m=64, n=128, depth=8, threads=128, registers=122, shared_bytes=12_288),
    GemmTile(name="64x64", m=64, n=64, depth=8, threads=64, registers=122, shared_bytes=8_192),
    GemmTile(name="128x32", m=32, n=128, depth=8, threads=256, registers=57, shared_bytes=16_384),
    GemmTile(name="32x128", m=128, n=32, depth=8, threads=256, registers=57, shared_bytes=16_384),
    GemmTile(name="128x32_sliced1x4", m=32, n=128, depth=32, threads=256, registers=122, shared_bytes=49_152),
    GemmTile(name="64x32_sliced1x4", m=32, n=64, depth=32, threads=256, registers=86, shared_bytes=49_152),
    GemmTile(name="32x32_sliced1x4", m=32, n=32, depth=32, threads=128, registers=86, shared_bytes=32_768),
)

_BY_SHAPE = {(tile.m, tile.n, tile.sliced): index for index, tile in enumerate(TILES)}


def generation(device: DeviceSpec) -> Generation:
    """Which kernels cuBLAS has for a board: Pascal runs the Maxwell ones, Turing Volta's, newer ones Ampere's."""
    major = (device.compute_capability or (8, 0))[0]
    return "maxwell" if major < 7 else "volta" if major == 7 else "ampere"


# What the profiler shows, most frequent first, leaving out what runs in under 1 % of the calls of that kind. Linear
# layers of Volta and Ampere choose from nearly all tiles; batched calls of Maxwell and Ampere have but one.
_BATCHED: dict[Generation, tuple[str, ...]] = {
    "maxwell": ("128x64",),
    "volta": ("64x64", "128x64", "32x128", "128x32"),
    "ampere": ("128x128",),
}
_SINGLE: dict[Generation, tuple[str, ...]] = {
    "maxwell": ("64x64", "32x128", "128x32"),
    "volta": ("128x64", "128x128", "32x128", "128x32", "64x32_sliced1x4", "32x32_sliced1x4", "128x32_sliced1x4"),
    "ampere": ("128x64", "32x32_sliced1x4", "128x32", "32x128", "64x32_sliced1x4", "128x32_sliced1x4"),
}


def menu(kind: Generation, *, batched: bool) -> tuple[int, ...]:
    """Indices into ``TILES`` of the kernels the library chooses from.

    >>> [TILES[index].name for index in menu("volta", batched=True)]
    ['64x64', '128x64', '32x128', '128x32']
    """
    names = (_BATCHED if batched else _SINGLE)[kind]
    return tuple(next(i for i, tile in enumerate(TILES) if tile.name == name) for name in names)


def tile_index(tile_m: Floats, tile_n: Floats, tile_k: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Index into ``TILES`` of each kernel; the one of nearest area where there is none of these sizes."""
    sizes = np.stack([tile_m, tile_n, np.where(tile_k > 16, 32, 8)], axis=1)
    unique, inverse = np.unique(sizes, axis=0, return_inverse=True)
    positions = np.array([_nearest(*(int(size) for size in row)) for row in unique], dtype=np.int64)
    return positions[inverse.reshape(-1)]


def tile_arrays(index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, Floats]:
    """The numbers of the indexed tiles as arrays, one entry per field of :class:`GemmTile`."""
    return {name: column[index] for name, column in _columns().items()}


@functools.cache
def _columns() -> dict[str, Floats]:
    names = ("m", "n", "depth", "threads", "registers", "shared_bytes")
    return {name: np.array([getattr(tile, name) for tile in TILES], dtype=np.float64) for name in names}


def _nearest(m: int, n: int, depth: int) -> int:
    exact = _BY_SHAPE.get((m, n, depth > 8))
    if exact is not None:
        return exact
    return min(range(len(TILES)), key=lambda i: (abs(TILES[i].m * TILES[i].n - m * n), abs(TILES[i].m - m)))
