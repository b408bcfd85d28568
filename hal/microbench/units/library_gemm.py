"""What the vendor's library reaches: square matrix products by cuBLAS, through PyTorch or CuPy, where one is there."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from hal.microbench.launcher import KernelText, Launcher
from hal.microbench.measurement import Found, Measurement, rates
from hal.microbench.sampling import Settings, timed

_SHORT = (2048, 4096)
_LONG = 8192


def kernels(capability: int) -> tuple[KernelText, ...]:
    """None of ours: the library's."""
    return ()


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``gemm.best`` and ``gemm.long`` of float32 and ``gemm.float16`` in FLOP/s; nothing without a library."""
    high = found["fma.float32"].high if "fma.float32" in found else None
    short = [_rate(launcher, size, "float32", settings) for size in _SHORT]
    long = _rate(launcher, _LONG, "float32", settings)
    if long and all(short):
        # A best rate below the sustained one cannot be: the long product counts as a candidate too.
        best = max(*short, long, key=statistics.median)
        path = "throughput.float32.best_flops"
        method = f"library float32 matrix products of {', '.join(map(str, (*_SHORT, _LONG)))}, the fastest"
        yield Measurement(key="gemm.best", unit="FLOP/s", samples=best, method=method, path=path, low=1e11, high=high)
        path = "throughput.float32.sustained_flops"
        method = f"library float32 matrix product of {_LONG}"
        yield Measurement(key="gemm.long", unit="FLOP/s", samples=long, method=method, path=path, low=1e11, high=high)
    if half := _rate(launcher, _LONG, "float16", settings):
        yield Measurement(
            key="gemm.float16",
            unit="FLOP/s",
            samples=half,
            method=f"library float16 matrix product of {_LONG}",
            path="",
            low=1e11,
        )


def _rate(launcher: Launcher, size: int, dtype: str, settings: Settings) -> tuple[float, ...]:
    product = launcher.matmul(size, dtype)
    if product is None:
        return ()
    return rates(2.0 * size**3, timed(launcher, [product], settings.repeats))
