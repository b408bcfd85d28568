"""Measurements of this machine's cores, as a file of its own.

Layers and rates are the types of a device file. `hal.this_cpu` makes a whole device of the same measurements.
"""

from __future__ import annotations

import datetime
import platform

import msgspec
import numpy as np

from hal.microbench.cpu.topology import Topology
from hal.microbench.measurement import Measurement, Measurements
from hal.spec.parts import Count, MemoryLayer, Positive, Text, Throughput
from hal.support.errors import InputError


class CpuDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cores of one machine.

    Attributes:
        name: short name of the file's owner.
        title: what the processor calls itself.
        kind: always ``cpu``.
        architecture: instruction set, ``x86_64``.
        core_count: cores that take part.
        simd_bits: width of a vector register.
        clock_hz: clock of one core in a loop of integer additions.
        barrier_seconds: a barrier between all cores; absent on a single one.
        layers: caches and DRAM, nearest first; ``unit`` is a core.
        throughput: float32: ``peak_flops`` of multiply-adds in registers, ``sustained_flops`` of a matrix product.
        provenance: where the numbers come from, by key path.
    """

    name: Text
    title: Text
    architecture: Text
    core_count: Count
    simd_bits: Count
    clock_hz: Positive
    layers: tuple[MemoryLayer, ...]
    throughput: tuple[Throughput, ...]
    provenance: dict[str, str]
    barrier_seconds: Positive | None = None
    kind: Text = "cpu"


def describe(topology: Topology, measurements: Measurements, day: str = "") -> CpuDescription:
    """The description; raises InputError where a number was not measured."""
    missing = [key for key in ("clock", "fma", "gemm", "dram.add", "dram.latency") if key not in measurements]
    if missing:
        raise InputError("--out", f"a description needs {', '.join(missing)}", "measure all quantities, without --only")
    day = day or datetime.date.today().isoformat()
    by_path = {measurement.path: measurement for measurement in measurements.values() if measurement.path}
    peak, product = measurements["fma"], measurements["gemm"]
    rate = Throughput(
        dtype="float32", peak_flops=_rounded(peak.value), sustained_flops=_rounded(min(product.value, peak.value))
    )
    barrier = measurements.get("barrier")
    provenance = {path: _source(measurement, day) for path, measurement in by_path.items()}
    for path in ("core_count", "simd_bits", "layers"):
        provenance[path] = "read from the operating system"
    return CpuDescription(
        name="this-machine",
        title=topology.title,
        architecture=topology.architecture,
        core_count=len(topology.cpus),
        simd_bits=topology.simd_bits,
        clock_hz=_rounded(measurements["clock"].value),
        layers=tuple(_layers(topology, measurements)),
        throughput=(rate,),
        barrier_seconds=_rounded(barrier.value) if barrier else None,
        provenance=dict(sorted(provenance.items())),
    )


def _layers(topology: Topology, measurements: Measurements) -> list[MemoryLayer]:
    layers = []
    line = topology.caches[0].line_bytes if topology.caches else 64
    shapes = {f"l{cache.level}": (cache.size_bytes, cache.private) for cache in topology.caches}
    for name, (size, private) in {**shapes, "dram": (topology.memory_bytes, False)}.items():
        bandwidth, latency = (
            measurements.get("dram.add" if name == "dram" else f"{name}.read"),
            measurements.get(f"{name}.latency"),
        )
        capacity = measurements.get(f"{name}.capacity")
        if bandwidth is None or latency is None:
            continue
        layers.append(
            MemoryLayer(
                name=name,
                capacity_bytes=size if capacity is None else min(size, int(capacity.value)),
                shared_by="unit" if private else "device",
                bandwidth_bytes_per_second=_rounded(bandwidth.value),
                transaction_bytes=line,
                latency_seconds=_rounded(latency.value),
            )
        )
    return layers


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _source(measurement: Measurement, day: str) -> str:
    software = f"Python {platform.python_version()}, NumPy {np.__version__}"
    return f"measured {day} by roller microbench, {software}: {measurement.method}; {measurement.readings}"
