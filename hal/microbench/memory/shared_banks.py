"""Banks of shared memory by their conflicts, and its latency.

The lanes of one warp follow pointers that point at themselves, so each step takes the latency plus one pass for every
further row that one bank has to deliver. A whole row of banks is the least distance between lanes at which all of
them meet in one bank. Half of the lanes are then moved on by a few bytes: as soon as that reaches the next bank, the
passes halve, which gives the width of a bank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hal.microbench.launcher import KernelText, Launch, Launcher, MicrobenchError, scalar, text
from hal.microbench.measurement import Found, Measurement
from hal.microbench.sampling import Settings, long_enough, timed

SHARED_CHASE = text(
    "shared_chase",
    """
extern "C" __global__ void $ENTRY(unsigned* out, int steps, int distance, int shift) {
  extern __shared__ unsigned tile[];
  unsigned offset = threadIdx.x * distance + (threadIdx.x & 1 ? shift : 0);
  unsigned at = (unsigned)__cvta_generic_to_shared(tile) + offset;
  tile[offset / 4] = at;
  __syncthreads();
  #pragma unroll 32
  for (int i = 0; i < steps; ++i) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(at) : "r"(at) : "memory");
  out[threadIdx.x] = at;
}
""",
)
DISTANCES = (4, 8, 16, 32, 64, 128, 256, 512)
SHIFTS = (0, 4, 8, 16, 32)


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (SHARED_CHASE,)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``shared.latency`` in seconds, ``shared.banks`` and ``shared.width`` in bytes."""
    lanes, out = launcher.board.lanes, launcher.empty(4 * launcher.board.lanes)
    kernel = launcher.kernel(SHARED_CHASE)
    dynamic = lanes * DISTANCES[-1] + SHIFTS[-1]

    def work(steps: int, distance: int = 4, shift: int = 0) -> Launch:
        return Launch(kernel, 1, lanes, (out, scalar(steps), scalar(distance), scalar(shift)), dynamic)

    steps = long_enough(launcher, work, settings, start=1024)

    def per_step(distance: int, shift: int = 0) -> tuple[float, ...]:
        return tuple(s / steps for s in timed(launcher, [work(steps, distance, shift)], settings.repeats))

    by_distance = {distance: per_step(distance) for distance in DISTANCES}
    latency = by_distance[DISTANCES[0]]
    method = f"shared_chase: {steps} dependent reads of a warp without conflicts"
    yield Measurement(
        key="shared.latency",
        unit="s",
        samples=latency,
        method=method,
        path="layers.shared.latency_seconds",
        low=5e-9,
        high=80e-9,
    )
    rows = [row_bytes({d: by_distance[d][i] for d in DISTANCES}) for i in range(settings.repeats)]
    row = sorted(rows)[len(rows) // 2]
    by_shift = {shift: per_step(row, shift) for shift in SHIFTS if shift < row}
    widths = [
        bank_width({s: by_shift[s][i] for s in by_shift}, latency[i], by_distance[row][i])
        for i in range(settings.repeats)
    ]
    banks = tuple(each / width for each, width in zip(rows, widths, strict=True))
    method = f"shared_chase: lanes {DISTANCES[0]} to {DISTANCES[-1]} bytes apart, conflicts complete at {row}"
    yield Measurement(
        key="shared.banks", unit="", samples=banks, method=method, path="layers.shared.bank_count", low=16, high=64
    )
    method = f"shared_chase: half of the lanes shifted by {SHIFTS[1]} to {SHIFTS[-1]} bytes in rows of {row}"
    yield Measurement(
        key="shared.width",
        unit="B",
        samples=tuple(map(float, widths)),
        method=method,
        path="layers.shared.bank_width_bytes",
        low=4,
        high=16,
    )


def row_bytes(seconds: Mapping[int, float]) -> int:
    """Bytes of all banks side by side: the least distance between lanes at which a step takes as long as at the most.

    Seconds per step by distance in bytes. Raises MicrobenchError where no distance is slower than the first.
    """
    fastest, slowest = seconds[DISTANCES[0]], max(seconds.values())
    if slowest < 1.5 * fastest:
        raise MicrobenchError("reads at no distance are slower than those side by side: no banks to be seen")
    return next(d for d in DISTANCES if seconds[d] - fastest > 0.75 * (slowest - fastest))


def bank_width(seconds: Mapping[int, float], fastest: float, slowest: float) -> int:
    """The least shift in bytes that takes half of the lanes to another bank.

    Seconds per step by shift; ``fastest`` is a step without conflicts and ``slowest`` one where all lanes share a bank.
    """
    for shift in sorted(seconds):
        if shift and seconds[shift] - fastest < 0.75 * (slowest - fastest):
            return shift
    raise MicrobenchError("lanes shifted against each other stay in one bank: no bank width to be seen")
