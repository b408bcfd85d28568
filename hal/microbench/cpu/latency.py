"""Latency of every level: one core follows pointers through its lines in random order.

Pages are those that the system gives: in DRAM and large caches the walk waits for address translations too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.microbench.cpu.bandwidth import level_sets
from hal.microbench.cpu.machine import Machine
from hal.microbench.measurement import Measurement, Turns

#: Dependent reads of a walk.
READS = 1 << 16
_TYPICAL_LINE_BYTES = 64


def measure(machine: Machine) -> Turns:
    """``l1.latency`` down to ``dram.latency`` in seconds."""
    caches = machine.topology.caches
    line = caches[0].line_bytes if caches else _TYPICAL_LINE_BYTES
    for level, size in level_sets(machine.topology).items():
        cells = machine.array(size)
        link(cells.view(np.int64), line)
        samples, place = [], np.full(1, cells.ctypes.data)
        for _ in range(machine.settings.repeats):
            if level == "dram":
                # From where the last walk ended: one that began anew would find all of it in a large cache.
                samples.append(walk_seconds(machine, place))
            else:
                samples.append(latency(machine, cells))
            if (yield None):
                break
        method = f"{READS} dependent reads of one core in {cells.nbytes >> 10} KiB, random order, pages as they come"
        path = f"layers.{level}.latency_seconds"
        yield Measurement(
            key=f"{level}.latency",
            unit="s",
            samples=tuple(samples),
            method=method,
            path=path,
            low=0.3e-9,
            high=1e-6,
            best=True,
        )


def latency(machine: Machine, array: NDArray[np.float32]) -> float:
    """Seconds of a random read by one core of lines that are linked, after it has read the array from end to end."""
    out = machine.array(machine.turn_bytes)
    read = partial(machine.loops["read"], array.ctypes.data, out.ctypes.data, array.size, 1)
    nothing = partial(machine.loops["read"], out.ctypes.data, out.ctypes.data, out.size, 1)
    machine.cores.seconds([read, *[nothing] * (machine.cores.count - 1)])
    place = np.full(1, array.ctypes.data)
    if array.nbytes <= READS * _TYPICAL_LINE_BYTES:
        walk_seconds(machine, place)  # comes by all lines
    return walk_seconds(machine, place)


def walk_seconds(machine: Machine, place: NDArray[Any]) -> float:
    """Seconds of a read of one core that follows pointers from the address in ``place``, where it leaves the last."""
    nowhere = np.zeros(1, np.int64)
    idle = [partial(machine.loops["chase"], int(place[0]), nowhere.ctypes.data, 1)] * (machine.cores.count - 1)
    walk = partial(machine.loops["chase"], int(place[0]), place.ctypes.data, READS)
    return machine.cores.seconds([walk, *idle]) / READS


def link(cells: NDArray[Any], line_bytes: int) -> None:
    """One random round trip through the first 8 bytes of every line."""
    words = line_bytes // 8
    order = np.random.default_rng(1).permutation(cells.size // words)
    cells[order * words] = cells.ctypes.data + np.roll(order, -1) * line_bytes
