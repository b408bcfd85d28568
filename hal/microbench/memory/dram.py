"""DRAM bandwidth that long kernels sustain: read, copy and add of arrays far larger than L2.

The add is the number of a device file, as what element-wise operators reach: two arrays read, one written. Every
thread moves 16 bytes at a time and all resident threads of all units take part, so arithmetic and issue are idle most
of the time. Values are hashed: lines of zeros take less power.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hal.microbench.launcher import Board, KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement, rates
from hal.microbench.sampling import Settings, timed

_LOOP = """
extern "C" __global__ void $ENTRY($SIGNATURE, unsigned long long count) {
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  $BEFORE
  #pragma unroll 4
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    $BODY
  }
  $AFTER
}
"""
_FILL = """unsigned h = (unsigned)i * 2654435761u; h ^= h >> 15;
    a[i] = make_float4(h & 1023, (h >> 5) & 1023, (h >> 10) & 1023, (h >> 20) & 1023);"""
_ADD = "float4 x = a[i], y = b[i]; c[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);"
_READ = "float4 x = a[i]; sum += x.x + x.y + x.z + x.w;"

FILL = text("dram_fill", _LOOP, SIGNATURE="float4* a", BEFORE="", BODY=_FILL, AFTER="")
READ = text(
    "dram_read",
    _LOOP,
    SIGNATURE="const float4* __restrict__ a, float* out",
    BEFORE="float sum = 0;",
    BODY=_READ,
    AFTER="if (sum == -1.0f) out[0] = sum;",
)
COPY = text(
    "dram_copy",
    _LOOP,
    SIGNATURE="const float4* __restrict__ a, float4* __restrict__ b",
    BEFORE="",
    BODY="b[i] = a[i];",
    AFTER="",
)
ADD = text(
    "dram_add",
    _LOOP,
    SIGNATURE="const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ c",
    BEFORE="",
    BODY=_ADD,
    AFTER="",
)

_BLOCK = 256


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return FILL, READ, COPY, ADD


def array_bytes(board: Board) -> int:
    """Size of one array: sixteen times L2 and 256 MiB at least, an eighth of the free memory at most."""
    wanted = max(16 * board.l2_bytes, 256 << 20)
    return min(wanted, board.free_bytes // 8) // 4096 * 4096


def filled(launcher: Launcher, size_bytes: int) -> Any:
    """A buffer of hashed values."""
    buffer = launcher.empty(size_bytes)
    launcher.seconds([_launch(launcher, FILL, size_bytes, buffer)])
    return buffer


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``dram.read``, ``dram.copy`` and ``dram.add`` in bytes read and written per second."""
    size = array_bytes(launcher.board)
    a, b, c = (filled(launcher, size) for _ in range(3))
    peak = launcher.board.memory_peak
    for key, kernel, buffers, arrays, path in (
        ("dram.read", READ, (a, c), 1, ""),
        ("dram.copy", COPY, (a, b), 2, ""),
        ("dram.add", ADD, (a, b, c), 3, "layers.dram.bandwidth_bytes_per_second"),
    ):
        seconds = timed(launcher, [_launch(launcher, kernel, size, *buffers)], settings.repeats)
        method = f"{kernel.entry}: {arrays} arrays of {size >> 20} MiB, 16 bytes per thread and access"
        samples = rates(arrays * size, seconds)
        yield Measurement(
            key=key, unit="B/s", samples=samples, method=method, path=path, low=0.5 * peak if peak else None, high=peak
        )


def _launch(launcher: Launcher, kernel: KernelText, size_bytes: int, *buffers: Any) -> Launch:
    board = launcher.board
    grid = board.units * (board.threads_per_unit // _BLOCK)
    return Launch(launcher.kernel(kernel), grid, _BLOCK, (*buffers, scalar(size_bytes // 16, "uint64")))
