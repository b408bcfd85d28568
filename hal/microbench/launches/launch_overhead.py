"""Device time between two dependent kernels of one stream that do nothing.

The device is kept busy until all of them are submitted, so that the host's own time to launch one does not count.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal.microbench.launcher import KernelText, Launch, Launcher, text
from hal.microbench.measurement import Found, Measurement
from hal.microbench.sampling import Settings, timed

EMPTY = text("launch_empty", 'extern "C" __global__ void $ENTRY() {}')
#: Well below the thousand or so that a stream's queue takes before the host has to wait.
_LAUNCHES = 400


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (EMPTY,)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``launch`` in seconds per kernel."""
    work = [Launch(launcher.kernel(EMPTY), 1, 32, ())] * _LAUNCHES
    samples = tuple(s / _LAUNCHES for s in timed(launcher, work, settings.repeats, ahead=True))
    method = f"launch_empty: {_LAUNCHES} empty kernels in one stream, all submitted before the first starts"
    yield Measurement(
        key="launch", unit="s", samples=samples, method=method, path="launch_overhead_seconds", low=0.3e-6, high=20e-6
    )
