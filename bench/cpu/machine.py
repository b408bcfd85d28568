"""The machine that measures: processor, the cores that everybody is kept on, versions, and whether it was idle."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from hal.microbench.cpu import read_topology
from hal.microbench.cpu.native import host_architecture, host_features
from hal.support.errors import InputError

PACKAGES = ("numpy", "torch", "apache-tvm", "apache-tvm-ffi", "xgboost-cpu")

#: A run queue longer than this per core before we begin: somebody else is at work.
BUSY_LOAD = 0.25


class Machine(Struct, frozen=True, kw_only=True):
    """Facts of the machine that stand with every result.

    Attributes:
        title: what the processor calls itself.
        llvm: LLVM's name of it, ``znver5``.
        cpus: logical processors that all contenders are kept on, one thread each.
        core_count: cores there are.
        simd_bits: width of a vector register.
        avx512: the AVX-512 features, by LLVM's names.
        clock_mhz: what the system says at the start, None where it does not.
        private_bytes: the largest cache that a core has alone, 0 where the system does not say.
        pinned: whether processes could be kept on `cpus`.
        load: run queue over the last minute, before the first measurement.
    """

    title: str
    llvm: str
    cpus: tuple[int, ...]
    core_count: int
    simd_bits: int
    avx512: tuple[str, ...]
    clock_mhz: float | None
    private_bytes: int
    pinned: bool
    load: float
    system: str
    python: str
    packages: dict[str, str]

    @property
    def threads(self) -> int:
        return len(self.cpus)


def this_machine(threads: int) -> Machine:
    """The machine, with one core chosen per thread.

    Raises:
        InputError: it has fewer cores for us than threads are asked for.
    """
    topology = read_topology()
    if threads > len(topology.cpus):
        raise InputError("--threads", f"{threads} is more than there are cores", f"at most {len(topology.cpus)} here")
    return Machine(
        title=topology.title,
        llvm=host_architecture(),
        cpus=topology.cpus[:threads],
        core_count=len(topology.cpus),
        simd_bits=topology.simd_bits,
        avx512=tuple(sorted(name for name in host_features() if name.startswith("avx512"))),
        clock_mhz=_clock_mhz(),
        private_bytes=max((cache.size_bytes for cache in topology.caches if cache.private), default=0),
        pinned=hasattr(os, "sched_getaffinity") and pin(tuple(os.sched_getaffinity(0))),
        load=load(),
        system=platform.platform(),
        python=sys.version.split()[0],
        packages=versions(PACKAGES),
    )


def load() -> float:
    """The run queue over the last minute; 0 where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return 0.0


def versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    version_by_name = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version_by_name[name] = importlib.metadata.version(name)
    return version_by_name


def _clock_mhz() -> float | None:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return None
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    return float(match[1]) if match else None


def pin(cpus: Sequence[int]) -> bool:
    """Keep this process on some processors; False where the system does not let us."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, AttributeError):
        return False
    return True


def thread_environment(cpus: Sequence[int]) -> dict[str, str]:
    """Variables that libraries read when they are loaded: as many threads as processors.

    Blocks that malloc gives back stay with the process, so that outputs which a library allocates anew at every call
    cost it no page faults.
    """
    count = str(len(cpus))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS")
    return {
        **dict.fromkeys(names, count),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    }


def openmp_environment(cpus: Sequence[int]) -> dict[str, str]:
    """Every OpenMP thread on a processor of its own. The first one too, and what it starts inherits that: nothing for a
    process that has children or another pool of threads."""
    return {"OMP_PROC_BIND": "true", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in cpus)}


def busy_notes(machine: Machine, widest: tuple[str, float] | None, wide: float) -> list[str]:
    """Doubts about the times: work of others before we began, quartiles far apart."""
    notes = []
    if machine.load > BUSY_LOAD * machine.core_count:
        notes.append(
            f"the machine was busy: load {machine.load:.2f} on {machine.core_count} cores before the first run"
        )
    if widest is not None and widest[1] > wide:
        notes.append(f"the spread is wide: quartiles of {widest[0]} are {widest[1]:.0%} of the median apart")
    if not machine.pinned:
        notes.append("threads could not be kept on their cores")
    return notes
