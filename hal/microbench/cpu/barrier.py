"""Cost of a barrier between all cores: a counter that everyone raises and everyone watches."""

from __future__ import annotations

from functools import partial

import numpy as np

from hal.microbench.cpu.machine import Machine
from hal.microbench.measurement import Measurement, Turns

_ROUNDS = 20_000


def measure(machine: Machine) -> Turns:
    """``barrier`` in seconds; nothing on a single core."""
    count = machine.cores.count
    if count < 2:
        return
    samples = []
    # Short and many: where cores are shared, a thread that has to wait for its turn spoils a reading.
    for _ in range(machine.settings.repeats):
        for _ in range(4):
            counter = np.zeros(1, np.int64)
            call = partial(machine.loops["barrier"], counter.ctypes.data, count, _ROUNDS)
            samples.append(machine.cores.seconds([call] * count) / _ROUNDS)
        if (yield None):
            break
    method = f"{_ROUNDS} barriers of {count} threads on a shared counter"
    yield Measurement(
        key="barrier",
        unit="s",
        samples=tuple(samples),
        method=method,
        path="barrier_seconds",
        low=5e-9,
        high=1e-5,
        best=True,
    )
