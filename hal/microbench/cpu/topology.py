"""Topology of this machine's cores by the operating system: how many, how wide, which caches."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from hal.microbench.cpu.native import host_features

_CACHES = Path("/sys/devices/system/cpu")
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: What Linux says of processors, and which of it are features, on x86 and on ARM.
_PROCESSORS, _FEATURES = Path("/proc/cpuinfo"), ("flags", "Features")
_TYPICAL_LINE_BYTES = 64
_SYSCONF = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE", 3: "SC_LEVEL3_CACHE_SIZE"}


@dataclass(frozen=True)
class Cache:
    """One level: bytes of one copy, whether a core has it alone, and its lines per set where the system says so."""

    level: int
    size_bytes: int
    line_bytes: int
    private: bool
    ways: int | None = None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The cores that this process may use.

    Attributes:
        title: what the processor calls itself.
        architecture: ``x86_64``, ``aarch64``.
        cpus: numbers of the logical processors to run on, one per core.
        simd_bits: width of a vector register.
        vector_registers: how many there are.
        caches: data caches, the first level first; empty where the system does not say.
        memory_bytes: of the machine, or as much of it as a container may use.
    """

    title: str
    architecture: str
    cpus: tuple[int, ...]
    simd_bits: int
    vector_registers: int
    caches: tuple[Cache, ...]
    memory_bytes: int

    @property
    def lanes(self) -> int:
        """float32 values of a vector register."""
        return self.simd_bits // 32


def read_topology(root: Path = _CACHES) -> Topology:
    """This machine, as Linux describes it under ``root``; elsewhere what POSIX tells."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    bits, registers = _vectors(_features())
    return Topology(
        title=_title(),
        architecture=platform.machine(),
        cpus=_one_per_core(root, allowed),
        simd_bits=bits,
        vector_registers=registers,
        caches=_caches(root, allowed[0]) or _posix_caches(),
        memory_bytes=int(min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit_bytes())),
    )


def memory_limit_bytes(groups: Path = _GROUPS, own: Path = _OWN_GROUP) -> float:
    """Bytes of memory that Linux lets this process's control group, or one above it, use; infinite without a limit.

    Args:
        groups: where control groups are mounted, of version 2.
        own: the file that says which is the process's own.
    """
    path = next((line[3:] for line in _read(own).splitlines() if line.startswith("0::")), "/")
    folder = groups / path.lstrip("/")
    limits = (_read(each / "memory.max") for each in (folder, *folder.parents) if each.is_relative_to(groups))
    return min((int(limit) for limit in limits if limit.isdigit()), default=math.inf)


def _features() -> frozenset[str]:
    """Features of the instruction set, as Linux names them or, elsewhere, LLVM, which takes long to load."""
    named = (line.partition(":") for line in _read(_PROCESSORS).splitlines())
    found = next((text.split() for name, _, text in named if name.strip() in _FEATURES), None)
    return host_features() if found is None else frozenset(found)


def _vectors(features: frozenset[str]) -> tuple[int, int]:
    """Bits and number of vector registers by the features of the instruction set."""
    if "avx512f" in features:
        return 512, 32
    if "avx" in features:
        return 256, 16
    return 128, 32 if features & {"neon", "asimd"} else 16


def _one_per_core(root: Path, allowed: list[int]) -> tuple[int, ...]:
    """The first logical processor of every core, in the order of ``allowed``."""
    first_by_siblings: dict[str, int] = {}
    for cpu in allowed:
        path = root / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        first_by_siblings.setdefault(_read(path) or str(cpu), cpu)
    return tuple(first_by_siblings.values())


def _caches(root: Path, cpu: int) -> tuple[Cache, ...]:
    caches = []
    for index in sorted((root / f"cpu{cpu}" / "cache").glob("index*")):
        size = _read(index / "size")
        if _read(index / "type") in ("Data", "Unified") and size.endswith("K"):
            line = _read(index / "coherency_line_size")
            private = _read(index / "shared_cpu_list") == (_read(root / f"cpu{cpu}/topology/thread_siblings_list"))
            level = int(_read(index / "level"))
            ways = int(_read(index / "ways_of_associativity") or 0) or None
            caches.append(Cache(level, int(size[:-1]) << 10, int(line or _TYPICAL_LINE_BYTES), private, ways))
    return tuple(sorted(caches, key=lambda cache: cache.level))


def _posix_caches() -> tuple[Cache, ...]:
    caches = []
    for level, name in _SYSCONF.items():
        size = os.sysconf(name) if name in os.sysconf_names else 0
        if size > 0:
            caches.append(Cache(level, size, _TYPICAL_LINE_BYTES, level < 3))
    return tuple(caches)


def _title() -> str:
    for line in _read(_PROCESSORS).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
