"""What the power limit leaves: clock and multiply-add rate of a board kept under load for seconds.

The load is the library's float32 matrix product where there is one, which draws the most, otherwise our multiply-add
kernel. Between batches a millisecond of multiply-adds reads the clock. The last third of the readings counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hal.microbench.launcher import KernelText, Launcher, Work
from hal.microbench.measurement import Found, Measurement
from hal.microbench.sampling import Settings, long_enough
from hal.microbench.units import arithmetic

_SIZE = 8192
_BATCH_SECONDS = 0.25
#: Rate at the end over rate at the start below which the limit binds.
_BINDS = 0.97


def kernels(capability: int) -> tuple[KernelText, ...]:
    """The multiply-add kernel of float32."""
    return (arithmetic.kernel_text(arithmetic.INSTRUCTIONS[0]),)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``clock.sustained`` in hertz and ``power.float32`` in FLOP/s."""
    load = arithmetic.Load(launcher, arithmetic.INSTRUCTIONS[0])
    rounds = long_enough(launcher, load.launch, settings)
    product = launcher.matmul(_SIZE, "float32")
    work: Work = product or load.launch(rounds)
    operations = 2.0 * _SIZE**3 if product else load.operations(rounds)
    name = f"library matrix products of {_SIZE}" if product else "fma_float32"
    batch = [work] * max(1, round(_BATCH_SECONDS / max(launcher.seconds([work]), 1e-6)))
    samples: list[float] = []
    clocks: list[float] = []
    elapsed = 0.0
    while elapsed < settings.long_seconds or len(samples) < 6:
        seconds = launcher.seconds(batch)
        launcher.seconds([load.launch(max(1, rounds // 4))])
        clocks.append(load.clock_hz())
        samples.append(operations * len(batch) / seconds)
        elapsed += seconds
    method = f"{elapsed:.0f} s of {name} in a row, the last third of the readings"
    board = launcher.board
    path = "clocks.sustained_hz"
    low, high = 0.3 * board.clock_hz, 1.03 * board.clock_hz
    yield Measurement(
        key="clock.sustained", unit="Hz", samples=_tail(clocks), method=method, path=path, low=low, high=high
    )
    path = "throughput.float32.power_limited_flops" if product and limited(samples) else ""
    yield Measurement(
        key="power.float32", unit="FLOP/s", samples=_tail(samples), method=method, path=path, low=1e11, high=None
    )


def limited(rates: Sequence[float]) -> bool:
    """Whether the last third of the readings is clearly slower than the first."""
    return statistics.median(_tail(rates)) < _BINDS * statistics.median(rates[: len(rates) // 3])


def _tail(samples: Sequence[float]) -> tuple[float, ...]:
    return tuple(samples[-(len(samples) // 3) :])
