"""Capacity of the cache which all cores share, as a process finds it: random reads of what was read just before.

What the system says is the processor's. A virtual machine may be given a part of the cache, or neighbours use it: of
the 32 MiB that two cores of an EPYC report, lines beyond 10 MiB came from memory.
"""

from __future__ import annotations

import numpy as np

from hal.microbench.cpu.bandwidth import level_sets
from hal.microbench.cpu.latency import READS, latency, link
from hal.microbench.cpu.machine import Machine
from hal.microbench.measurement import Measurement, Turns

#: Arrays as shares of the capacity that the system says. Of one that is larger than the part that a process finds, that
#: part stays in the cache.
_SHARES = (1.0, 0.5, 0.25)


def measure(machine: Machine) -> Turns:
    """``l3.capacity`` in bytes, of the last cache where it is not a core's own."""
    caches, sets = machine.topology.caches, level_sets(machine.topology)
    if not caches or f"l{caches[-1].level}" not in sets or caches[-1].private:
        return
    last = caches[-1]
    name = f"l{last.level}"
    sizes = {*(int(share * last.size_bytes) for share in _SHARES), sets[name], sets["dram"]}
    arrays = {size: machine.array(size) for size in sorted(sizes)}
    for array in arrays.values():
        link(array.view(np.int64), last.line_bytes)
    samples = []
    for _ in range(machine.settings.repeats):
        seconds = {size: latency(machine, array) for size, array in arrays.items()}
        samples.append(held_bytes(seconds, cached=sets[name], uncached=sets["dram"], most=last.size_bytes))
        if (yield None):
            break
    sizes_text = ", ".join(f"{int(share * last.size_bytes) >> 10}" for share in _SHARES)
    yield Measurement(
        key=f"{name}.capacity",
        unit="B",
        samples=tuple(samples),
        method=f"share of {READS} random reads of {sizes_text} KiB, read just before, that do not wait for memory",
        path=f"layers.{name}.capacity_bytes",
        low=float(sets[name]),
        high=float(last.size_bytes),
    )


def held_bytes(seconds: dict[int, float], *, cached: int, uncached: int, most: int) -> float:
    """Bytes that a cache holds, by the seconds of a random read in arrays of several sizes.

    >>> held_bytes({1: 1.0, 4: 1.0, 8: 6.0, 99: 11.0}, cached=1, uncached=99, most=8)
    4.0

    Args:
        seconds: by the bytes of an array.
        cached: bytes of the array that it holds whole.
        uncached: bytes of the array that is far larger.
        most: what it has.
    """
    near, far = seconds[cached], seconds[uncached]
    if far <= near:
        return float(most)
    held = [size * (far - each) / (far - near) for size, each in seconds.items() if size <= most]
    return float(min(max(*held, cached), most))
