"""The device ``cpu`` as tests meet it: the cores of this machine, at speeds that are written down here.

It lies in the cache of the tests' home directory, so that no test measures the machine, which takes sixteen seconds of
every core, and none has its kernels chosen by the load of the moment. What measures is tested by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hal.microbench.cpu import read_topology
from hal.microbench.cpu.assemble import spec_of
from hal.microbench.cpu.native import host_architecture
from hal.microbench.measurement import Measurement
from hal.microbench.numbers import toml_text
from hal.support.errors import InputError
from hal.this_cpu import THIS_CPU, cache_path

#: What a device is made of: values and units.
QUANTITIES = {
    "clock": (3e9, "Hz"),
    "fma": (380e9, "FLOP/s"),
    "issue": (21e9, "instr/s"),
    "gemm": (300e9, "FLOP/s"),
    "l1.read": (700e9, "B/s"),
    "l2.read": (280e9, "B/s"),
    "l3.read": (50e9, "B/s"),
    "dram.add": (23e9, "B/s"),
    "l1.latency": (1.3e-9, "s"),
    "l2.latency": (6e-9, "s"),
    "l3.latency": (60e-9, "s"),
    "dram.latency": (80e-9, "s"),
    "barrier": (1e-7, "s"),
}


def measurements(**changes: float) -> Mapping[str, Measurement]:
    """Measurements of all quantities, some of them of other values."""
    return {
        key: Measurement(key=key, unit=unit, samples=(changes.get(key, value),), method="by hand")
        for key, (value, unit) in QUANTITIES.items()
    }


def pytest_sessionstart() -> None:
    """Put the device where a measured one would be, unless a session above has."""
    try:
        topology = read_topology()
        spec = spec_of(THIS_CPU, topology, measurements(), host_architecture())
    except (InputError, OSError):  # no Linux, or one that tells nothing of its caches
        return
    path = cache_path(topology)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(toml_text(spec), "utf-8")
    part.replace(path)
