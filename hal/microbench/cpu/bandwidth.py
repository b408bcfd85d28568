"""Bandwidth of every level: reads of arrays that fit into it and not into the one above, and DRAM's copy and add.

All cores at once, each with memory of its own. The DRAM loops run in turn with NumPy's, on the same memory and threads
(STREAM's copy and add), so that both see the same machine; and so do reads of one array in one place and in several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hal.microbench.cpu.cores import Call
from hal.microbench.cpu.machine import Machine
from hal.microbench.cpu.topology import Topology
from hal.microbench.cpu.vector_ir import COPY_ELEMENTS, PAGE_ELEMENTS, UNROLL
from hal.microbench.measurement import Measurement, Turns, rates

Array = NDArray[np.float32]
_LEAST_DRAM_BYTES = 128 << 20
#: Passes that bring arrays back to where they are read from, after others' turns. A shared cache holds on to what
#: streamed through it: after one pass that of a Xeon gave 31 GB/s, what memory does, after three 37.
_PASSES_BEFORE = 3


def measure(machine: Machine) -> Turns:
    """``l1.read`` down to the last cache's, ``dram.read`` and ``dram.read_apart``, ``dram.copy`` and ``dram.add`` with
    NumPy's, bytes per second."""
    for name, size in level_sets(machine.topology).items():
        if name != "dram":
            yield from _reads(machine, name, size)
    yield from _streams(machine)


def level_sets(topology: Topology) -> dict[str, int]:
    """Bytes per core that reside in each level: ``{"l1": ..., "l2": ..., "dram": ...}``.

    Half of a private cache. Of a shared one a quarter for all cores together, as other machines may be using the rest,
    but twice what the private levels above hold. A multiple of all caches for DRAM.
    """
    sets: dict[str, int] = {}
    cores, private = len(topology.cpus), 0
    for cache in topology.caches:
        if cache.private:
            size = cache.size_bytes // 2
            private = cache.size_bytes
        else:
            size = min(max(cache.size_bytes // 4 // cores, 2 * private), cache.size_bytes // cores)
        if size > private // 2 or cache.private:
            sets[f"l{cache.level}"] = size
    last = topology.caches[-1].size_bytes if topology.caches else 0
    sets["dram"] = min(max(4 * last, _LEAST_DRAM_BYTES), topology.memory_bytes // 16) // cores
    return sets


@dataclass(frozen=True)
class Reading:
    """Memory that is read alone.

    Attributes:
        bytes_per_second: rate within pages, all cores together.
        page_start_seconds: seconds that a core which reads in one place waits at the beginning of a page; None where
            several places are not faster.
    """

    bytes_per_second: float
    page_start_seconds: float | None

    @staticmethod
    def of(measurements: Mapping[str, Measurement], cores: int) -> Reading | None:
        """Figures of ``dram.read`` and ``dram.read_apart`` together; None where they were not measured.

        Of :data:`UNROLL` places one waits while the others are read: a page takes ``4096 / rate + wait / places``.
        """
        one, apart = (measurements.get(key) for key in ("dram.read", "dram.read_apart"))
        if one is None or apart is None:
            return None
        page = 4.0 * PAGE_ELEMENTS * cores
        in_one, in_several = page / one.value, page / apart.value
        if in_several >= in_one:
            return Reading(apart.value, None)
        start = (in_one - in_several) / (1.0 - 1.0 / UNROLL)
        return Reading(page / (in_one - start), start)


def _reads(machine: Machine, level: str, size: int) -> Turns:
    arrays = [machine.array(size) for _ in range(machine.cores.count)]
    outs = [machine.array(4096) for _ in arrays]

    def seconds(passes: int) -> float:
        pairs = zip(arrays, outs, strict=True)
        return machine.cores.seconds(
            [
                partial(machine.loops["read"], array.ctypes.data, out.ctypes.data, array.size, passes)
                for array, out in pairs
            ]
        )

    passes = machine.passes(seconds)
    samples = []
    for _ in range(machine.settings.repeats):
        seconds(_PASSES_BEFORE)
        samples.append(seconds(passes))
        if (yield None):
            break
    moved = passes * sum(array.nbytes for array in arrays)
    width = machine.topology.simd_bits
    method = f"{width}-bit reads of {arrays[0].nbytes >> 10} KiB per core, {passes} times"
    yield Measurement(
        key=f"{level}.read",
        unit="B/s",
        samples=rates(moved, tuple(samples)),
        method=method,
        path=f"layers.{level}.bandwidth_bytes_per_second",
        low=1e9,
        high=1e14,
        best=True,
    )


def _streams(machine: Machine) -> Turns:
    # Whole, in two and in three arrays: a machine whose memory nobody has used takes seconds to give a process a few
    # gigabytes of it.
    alignment = 6 * 4 * COPY_ELEMENTS
    size = max(1, level_sets(machine.topology)["dram"] // alignment) * alignment
    memory = [machine.array(size) for _ in machine.topology.cpus]
    kinds: dict[str, tuple[int, Callable[[Sequence[Array]], Call]]] = {
        "dram.read": (1, lambda arrays: _ours(machine, "read", *arrays, machine.array(4096))),
        "dram.read_apart": (1, lambda arrays: _ours(machine, "read_apart", *arrays, machine.array(4096))),
        "dram.copy": (2, lambda arrays: _ours(machine, "copy", *arrays)),
        "numpy.copy": (2, lambda arrays: partial(np.copyto, arrays[1], arrays[0])),
        "dram.add": (3, lambda arrays: _ours(machine, "add", *arrays)),
        "numpy.add": (3, lambda arrays: partial(np.add, arrays[0], arrays[1], out=arrays[2])),
    }
    readings: dict[str, list[float]] = {key: [] for key in kinds}
    for _ in range(machine.settings.repeats):
        for key, (count, call) in kinds.items():
            readings[key].append(machine.cores.seconds([call(np.split(each, count)) for each in memory]))
        if (yield None):
            break
    for key, (count, _) in kinds.items():
        who = "NumPy" if key.startswith("numpy") else f"{machine.topology.simd_bits}-bit loop"
        read = "1 array" if count == 1 else f"{count} arrays"
        apart = f" in {UNROLL} places at a time" if key == "dram.read_apart" else ""
        path = "layers.dram.bandwidth_bytes_per_second" if key == "dram.add" else ""
        method = f"{who}: {read} of {size // count >> 20} MiB per core{apart}, in turn with the others"
        yield Measurement(
            key=key,
            unit="B/s",
            samples=rates(len(memory) * size, tuple(readings[key])),
            method=method,
            path=path,
            low=1e9,
            high=2e12,
            best=True,
        )


def _ours(machine: Machine, loop: str, *arrays: Array) -> Call:
    pointers = [array.ctypes.data for array in arrays]
    return partial(machine.loops[loop], *pointers, arrays[0].size, 1)
