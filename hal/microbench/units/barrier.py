"""What a barrier of a block costs: ``__syncthreads`` in a loop, one block per unit, by number of threads."""

from __future__ import annotations

from collections.abc import Iterator

from hal.microbench.launcher import KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement
from hal.microbench.sampling import Settings, long_enough, timed

_THREADS = (64, 128, 256, 512, 1024)

BARRIER = text(
    "barrier_loop",
    """
extern "C" __global__ void $ENTRY(int* out, int rounds) {
  #pragma unroll 16
  for (int i = 0; i < rounds; ++i) __syncthreads();
  if (rounds < 0) out[0] = rounds;
}
""",
)


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (BARRIER,)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``barrier.THREADS`` in seconds; a device file has no such number."""
    kernel, out = launcher.kernel(BARRIER), launcher.empty(4)
    for threads in _THREADS:

        def work(rounds: int, threads: int = threads) -> Launch:
            return Launch(kernel, launcher.board.units, threads, (out, scalar(rounds)))

        rounds = long_enough(launcher, work, settings, start=1024)
        samples = tuple(s / rounds for s in timed(launcher, [work(rounds)], settings.repeats))
        method = f"barrier_loop: {rounds} barriers of one block of {threads} threads per unit"
        yield Measurement(
            key=f"barrier.{threads}", unit="s", samples=samples, method=method, path="", low=1e-9, high=1e-6
        )
