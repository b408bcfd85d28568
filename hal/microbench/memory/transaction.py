"""The smallest transfer of DRAM: reads of four bytes at growing distances.

The time per read grows in proportion to the distance while neighbours share a transfer and stays when each has its
own. The array is far larger than L2 and read once per launch, every distance with all units of the board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hal.microbench.launcher import KernelText, Launch, Launcher, MicrobenchError, scalar, text
from hal.microbench.measurement import Found, Measurement
from hal.microbench.memory.dram import array_bytes, filled
from hal.microbench.sampling import Settings, timed

DISTANCES = (8, 16, 32, 64, 128, 256)
#: Time at twice the distance over time at the distance: 2 below the transaction size, 1 from there on.
_STILL_GROWS = 1.4

STRIDED = text(
    "transaction_strided",
    """
extern "C" __global__ void $ENTRY(const unsigned* data, unsigned* out, unsigned long long count, int words) {
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned sum = 0;
  #pragma unroll 4
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(data + i * words));
    sum ^= value;
  }
  if (sum == 0x12345678u) out[0] = sum;
}
""",
)


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (STRIDED,)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``dram.transaction`` in bytes."""
    board = launcher.board
    size = array_bytes(board)
    data, out = filled(launcher, size), launcher.empty(4)
    grid = board.units * (board.threads_per_unit // 256)
    kernel = launcher.kernel(STRIDED)
    readings: dict[int, tuple[float, ...]] = {}
    for distance in DISTANCES:
        count = size // distance
        arguments = (data, out, scalar(count, "uint64"), scalar(distance // 4))
        seconds = timed(launcher, [Launch(kernel, grid, 256, arguments)], settings.repeats)
        readings[distance] = tuple(second / count for second in seconds)
    samples = tuple(
        float(smallest_transfer({distance: readings[distance][index] for distance in DISTANCES}))
        for index in range(settings.repeats)
    )
    method = f"transaction_strided: 4-byte reads {DISTANCES[0]} to {DISTANCES[-1]} bytes apart over {size >> 20} MiB"
    yield Measurement(
        key="dram.transaction",
        unit="B",
        samples=samples,
        method=method,
        path="layers.dram.transaction_bytes",
        low=32,
        high=128,
    )


def smallest_transfer(seconds_per_read: Mapping[int, float]) -> int:
    """The first distance in bytes at which doubling it costs no more; raises MicrobenchError where there is none."""
    for distance in DISTANCES[:-1]:
        if seconds_per_read[2 * distance] < _STILL_GROWS * seconds_per_read[distance]:
            return distance
    raise MicrobenchError(f"reads grow slower up to {DISTANCES[-1]} bytes apart: no transaction size to be seen")
