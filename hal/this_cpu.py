"""This machine's cores as a device: measured once, then read from the user's cache.

The device is called ``cpu``. What it is made of comes from the operating system and from `hal.microbench.cpu`; the file
in the cache is an ordinary device file, one per processor model and number of cores.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hal.spec.device import DeviceSpec
from hal.spec.file import read_device
from hal.support.errors import InputError
from hal.support.store import cache_folder

if TYPE_CHECKING:
    from hal.microbench.cpu import Topology
    from hal.microbench.sampling import Settings


#: The name under which this machine's own cores are a device.
THIS_CPU = "cpu"

#: Counts up whenever what is measured, or how it becomes a device, changes.
_FORMAT = 7
_REMEASURE = "delete the file to measure again"


def this_cpu() -> DeviceSpec:
    """The cores of this process: from the cache, or measured now, which a line on stderr says.

    Raises:
        InputError: the system does not say which caches there are, or the cached file is damaged.
    """
    from hal.microbench.cpu import read_topology

    topology = read_topology()
    path = cache_path(topology)
    if path.is_file():
        try:
            return read_device(path)
        except InputError as error:
            raise InputError(error.field, error.problem, f"{error.remedy}; {_REMEASURE}") from None
    started = time.perf_counter()
    spec = cpu_now()
    seconds = time.perf_counter() - started
    cache_note = _write(path, spec)
    print(f"measured the {spec.unit_count} cores of this machine in {seconds:.0f} s; {cache_note}", file=sys.stderr)
    return spec


def cache_path(topology: Topology) -> Path:
    """The file of this processor: ``~/.cache/roller/devices/cpu-<format>-<model>-<cores>.toml``, or below
    XDG_CACHE_HOME."""
    model = re.sub(r"[^a-z0-9]+", "-", topology.title.casefold()).strip("-") or "cpu"
    return cache_folder("devices") / f"cpu-{_FORMAT}-{model}-{len(topology.cpus)}.toml"


def cpu_now(settings: Settings | None = None) -> DeviceSpec:
    """The cores of this process, measured now as work on them finds them: by the median of every quantity's readings.

    The fastest reading would be the processor's own; on a machine that others use too, that predicts kernels as they
    run in the rare moments when no other process does.

    Raises:
        InputError: a quantity cannot be measured, or the system does not say which caches there are.
    """
    from hal.microbench.cpu import measure_cpu, read_topology
    from hal.microbench.cpu.assemble import spec_of
    from hal.microbench.cpu.native import host_architecture

    run = measure_cpu(settings=settings)
    for name, reason in run.failures.items():
        raise InputError("device cpu", f"{name} cannot be measured: {reason}", "describe the processor in a file")
    measurements = {key: replace(measurement, best=False) for key, measurement in run.measurements.items()}
    return spec_of(THIS_CPU, read_topology(), measurements, host_architecture())


def _write(path: Path, spec: DeviceSpec) -> str:
    """Keep the spec where the next process finds it; says where, or why it could not be kept."""
    from hal.microbench.numbers import toml_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(toml_text(spec))
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        return f"not kept: {error.strerror}"
    return f"kept in {path}"
