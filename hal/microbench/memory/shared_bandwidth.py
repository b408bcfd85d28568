"""Bandwidth of shared memory: reads of 16 bytes per thread without a bank conflict, all units at once."""

from __future__ import annotations

from collections.abc import Iterator

from hal.microbench.launcher import KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement, rates
from hal.microbench.sampling import Settings, long_enough, timed

_BLOCK = 1024
_READS = 16

SHARED_READ = text(
    "shared_read",
    """
extern "C" __global__ void __launch_bounds__($BLOCK) $ENTRY(unsigned* out, int rounds) {
  __shared__ uint4 tile[$BLOCK];
  tile[threadIdx.x] = make_uint4(threadIdx.x, 2, 3, 4);
  __syncthreads();
  unsigned sum = 0, at = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
  for (int round = 0; round < rounds; ++round) {
    #pragma unroll
    for (int j = 0; j < $READS; ++j) {
      unsigned x, y, z, w;
      // Volatile to nvcc and, through the sum, to ptxas: half an instruction of arithmetic per word read.
      asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(at));
      sum ^= x ^ y; sum ^= z ^ w;
    }
  }
  if (sum == 0x12345678u) out[0] = sum;
}
""",
    BLOCK=_BLOCK,
    READS=_READS,
)


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (SHARED_READ,)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``shared.read`` in bytes per second, all units together."""
    board = launcher.board
    grid, out = board.units * (board.threads_per_unit // _BLOCK), launcher.empty(4)
    kernel = launcher.kernel(SHARED_READ)

    def work(rounds: int) -> Launch:
        return Launch(kernel, grid, _BLOCK, (out, scalar(rounds)))

    rounds = long_enough(launcher, work, settings)
    moved = 16.0 * _READS * rounds * grid * _BLOCK
    samples = rates(moved, timed(launcher, [work(rounds)], settings.repeats))
    method = "shared_read: 16 bytes per thread and read, no conflicts, all resident threads of all units"
    high = 256.0 * board.units * board.clock_hz
    yield Measurement(
        key="shared.read",
        unit="B/s",
        samples=samples,
        method=method,
        path="layers.shared.bandwidth_bytes_per_second",
        low=high / 8,
        high=high,
    )
