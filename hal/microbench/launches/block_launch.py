"""Time between the starts of two blocks: empty kernels of many blocks, a short grid's time taken off."""

from __future__ import annotations

from collections.abc import Iterator

from hal.microbench.launcher import Launch, Launcher
from hal.microbench.launches.launch_overhead import EMPTY, kernels
from hal.microbench.measurement import Found, Measurement
from hal.microbench.sampling import Settings, timed

__all__ = ["kernels", "measure"]

_BLOCKS = (1 << 16, 1 << 20)
_THREADS = 64


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``block.launch`` in seconds per block, the whole device together."""
    kernel = launcher.kernel(EMPTY)
    few, many = (timed(launcher, [Launch(kernel, n, _THREADS, ())], settings.repeats) for n in _BLOCKS)
    samples = tuple((b - a) / (_BLOCKS[1] - _BLOCKS[0]) for a, b in zip(few, many, strict=True))
    method = f"launch_empty: {_BLOCKS[1]} blocks of {_THREADS} threads less {_BLOCKS[0]} of them"
    yield Measurement(
        key="block.launch",
        unit="s",
        samples=samples,
        method=method,
        path="block_launch_seconds",
        low=0.05e-9,
        high=20e-9,
    )
