"""Bandwidth of L2: all units read a quarter of it over and over, past L1, 16 bytes per thread and access.

A quarter, because boards with two partitions keep a copy of a line in each.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal.microbench.launcher import KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement, rates
from hal.microbench.memory.dram import filled
from hal.microbench.sampling import Settings, long_enough, timed

_BLOCK = 256
_READS = 4
#: Blocks that a block moves on by after each read, so that a unit does not read its own lines again.
_STEP = 7

L2_READ = text(
    "l2_read",
    """
extern "C" __global__ void $ENTRY(const uint4* data, unsigned* out, unsigned count, unsigned step, int rounds) {
  unsigned sum = 0, at = blockIdx.x * blockDim.x + threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    uint4 values[$READS];
    // All reads first, then their use; no division, which would take longer to issue than L2 takes to answer.
    #pragma unroll
    for (int j = 0; j < $READS; ++j) {
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(values[j].x), "=r"(values[j].y), "=r"(values[j].z), "=r"(values[j].w) : "l"(data + at));
      at += step; if (at >= count) at -= count;
    }
    #pragma unroll
    for (int j = 0; j < $READS; ++j) { sum ^= values[j].x ^ values[j].y; sum ^= values[j].z ^ values[j].w; }
  }
  if (sum == 0x12345678u) out[0] = sum;
}
""",
    READS=_READS,
)


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (L2_READ,)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``l2.read`` in bytes per second, all units together."""
    board = launcher.board
    grid = board.units * (board.threads_per_unit // _BLOCK)
    # Whole multiples of the grid: all parts are read equally often.
    count = max(1, board.l2_bytes // 4 // 16 // (grid * _BLOCK)) * grid * _BLOCK
    step = (grid + _STEP if count > grid * _BLOCK else _STEP) * _BLOCK
    data, out = filled(launcher, count * 16), launcher.empty(4)
    kernel = launcher.kernel(L2_READ)

    def work(rounds: int) -> Launch:
        arguments = (data, out, scalar(count, "uint32"), scalar(step, "uint32"), scalar(rounds))
        return Launch(kernel, grid, _BLOCK, arguments)

    rounds = long_enough(launcher, work, settings)
    moved = 16.0 * _READS * rounds * grid * _BLOCK
    samples = rates(moved, timed(launcher, [work(rounds)], settings.repeats))
    method = f"l2_read: {count * 16 >> 10} KiB read again and again by all units, 16 bytes per thread and read"
    low = found["dram.add"].value if "dram.add" in found else None
    high = 128.0 * board.units * board.clock_hz
    yield Measurement(
        key="l2.read",
        unit="B/s",
        samples=samples,
        method=method,
        path="layers.l2.bandwidth_bytes_per_second",
        low=low,
        high=high,
    )
