"""Latency of L1, L2 and DRAM: one thread follows pointers, each read needing the value of the one before.

The pointers are whole addresses, so nothing but the read itself is in the chain. L2 is read past L1 (``ld.global.cg``)
from lines that a first walk has brought there. For DRAM a walk visits each line of a few MiB once, right after other
arrays have replaced everything in L2: few pages, so translations do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.microbench.launcher import KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement
from hal.microbench.memory.dram import READ, array_bytes
from hal.microbench.sampling import Settings

LINK = text(
    "latency_link",
    """
extern "C" __global__ void $ENTRY(unsigned long long* cells, const unsigned* cell, const unsigned* next, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) cells[cell[i]] = (unsigned long long)(cells + cell[next[i]]);
}
""",
)
_CHASE = """
extern "C" __global__ void $ENTRY(const unsigned long long* cells, unsigned first, int steps, unsigned long long* out) {
  unsigned long long at = (unsigned long long)(cells + first);
  #pragma unroll 16
  for (int i = 0; i < steps; ++i) asm volatile("ld.global.$CACHE.u64 %0, [%1];" : "=l"(at) : "l"(at) : "memory");
  out[0] = at;
}
"""
CHASE = text("latency_chase", _CHASE, CACHE="cg")
CHASE_L1 = text("latency_chase_l1", _CHASE, CACHE="ca")

_LINE_BYTES = 128
_DRAM_LINE_BYTES = 256
_DRAM_STEPS = 16384
_SPLIT = 512


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return LINK, CHASE, CHASE_L1


def linked(launcher: Launcher, cell: NDArray[np.int64], buffer: Any) -> None:
    """Write into ``buffer`` one random round trip through its 8-byte cells of these numbers."""
    order = np.random.default_rng(1).permutation(len(cell))
    following = np.empty(len(cell), np.uint32)
    following[order] = np.roll(order, -1)
    arguments = (
        buffer,
        launcher.array(cell.astype(np.uint32)),
        launcher.array(following),
        scalar(len(cell)),
    )
    launcher.seconds([Launch(launcher.kernel(LINK), -(-len(cell) // _SPLIT), _SPLIT, arguments)])


def chase(launcher: Launcher, kernel: KernelText, buffer: Any, first: int, steps: int, out: Any) -> Launch:
    """One thread's walk of ``steps`` reads."""
    return Launch(launcher.kernel(kernel), 1, 1, (buffer, scalar(first, "uint32"), scalar(steps), out))


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``l1.latency``, ``l2.latency`` and ``dram.latency`` in seconds from a read to the next that needs it."""
    l2_bytes = launcher.board.l2_bytes
    yield _cached(launcher, settings, "l1.latency", CHASE_L1, 8 << 10, "", (3e-9, 100e-9))
    window = max(64 << 10, min(l2_bytes // 8, 1 << 20))
    yield _cached(launcher, settings, "l2.latency", CHASE, window, "layers.l2.latency_seconds", (40e-9, 500e-9))
    yield _uncached(launcher, settings)


def _cached(
    launcher: Launcher,
    settings: Settings,
    key: str,
    kernel: KernelText,
    window: int,
    path: str,
    plausible: tuple[float, float],
) -> Measurement:
    cells = np.arange(window // _LINE_BYTES) * (_LINE_BYTES // 8)
    buffer, out = launcher.empty(window), launcher.empty(8)
    linked(launcher, cells, buffer)
    steps = 1 << 14
    walk = chase(launcher, kernel, buffer, 0, steps, out)
    launcher.seconds([walk])
    samples = tuple(launcher.seconds([walk]) / steps for _ in range(settings.repeats))
    method = f"{kernel.entry}: {steps} dependent reads of one thread in {window >> 10} KiB, random order"
    low, high = plausible
    return Measurement(key=key, unit="s", samples=samples, method=method, path=path, low=low, high=high)


def _uncached(launcher: Launcher, settings: Settings) -> Measurement:
    window = _DRAM_STEPS * _DRAM_LINE_BYTES
    buffer, out = launcher.empty(window), launcher.empty(8)
    linked(launcher, np.arange(_DRAM_STEPS) * (_DRAM_LINE_BYTES // 8), buffer)
    other_bytes = array_bytes(launcher.board)
    other = launcher.empty(other_bytes)
    replace = Launch(
        launcher.kernel(READ), launcher.board.units * 8, 256, (other, out, scalar(other_bytes // 16, "uint64"))
    )
    walk = chase(launcher, CHASE, buffer, 0, _DRAM_STEPS, out)
    samples = []
    for _ in range(settings.repeats):
        launcher.seconds([replace])
        samples.append(launcher.seconds([walk]) / _DRAM_STEPS)
    method = f"latency_chase: each {_DRAM_LINE_BYTES}-byte line of {window >> 20} MiB once, L2 replaced before"
    return Measurement(
        key="dram.latency",
        unit="s",
        samples=tuple(samples),
        method=method,
        path="layers.dram.latency_seconds",
        low=150e-9,
        high=1500e-9,
    )
