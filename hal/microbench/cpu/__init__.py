"""Micro-benchmarks of this machine's cores: bandwidth and latency per level, multiply-add rate, barrier.

Nothing of it needs a GPU. Each quantity is a module; the loops are LLVM IR (`vector_ir`) and run on all cores at once
(`cores`). On a shared machine other work only ever makes a reading slower, so the best of many counts. Quantities take
turns, a reading each: what else happens for a second spoils a few readings of each then, and not all of one. Readings
of the peak that were taken in a row were once half of it, all 15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hal.microbench.cpu import arithmetic, bandwidth, barrier, capacity, latency
from hal.microbench.cpu.description import CpuDescription, describe
from hal.microbench.cpu.machine import Machine, this_machine
from hal.microbench.cpu.topology import Topology, read_topology
from hal.microbench.measurement import Measurement, Measurements, Turns
from hal.microbench.quantities import QuantityResults
from hal.microbench.sampling import Settings
from hal.support.errors import InputError

#: Name for ``--only`` to the function that measures it.
QUANTITIES: dict[str, Callable[[Machine], Turns]] = {
    "clock": arithmetic.clock,
    "arithmetic": arithmetic.measure,
    "bandwidth": bandwidth.measure,
    "latency": latency.measure,
    "capacity": capacity.measure,
    "barrier": barrier.measure,
}

#: No turn is left.
_END = object()

#: Our figure and the one that NumPy reaches in the same run.
NUMPY_COUNTERPARTS = (("gemm", "numpy.gemm"), ("dram.copy", "numpy.copy"), ("dram.add", "numpy.add"))


def measure_cpu(
    names: Sequence[str] = (), settings: Settings | None = None, progress: Callable[[str], None] = lambda name: None
) -> QuantityResults:
    """Measure the quantities of these names, all where empty; InputError for an unknown one."""
    for name in names:
        if name not in QUANTITIES:
            raise InputError("--only", f"{name!r} is not measured on CPUs", f"name one of {', '.join(QUANTITIES)}")
    run = QuantityResults()
    with this_machine(settings or Settings()) as machine:
        turns = {name: measure(machine) for name, measure in QUANTITIES.items() if not names or name in names}
        found: dict[str, list[Measurement]] = {name: [] for name in turns}
        while turns:
            for name in list(turns):
                progress(name)
                try:
                    measurement = next(turns[name], _END)
                except (RuntimeError, MemoryError) as error:
                    run.failures[name] = str(error) or type(error).__name__
                    measurement = _END
                if isinstance(measurement, Measurement):
                    found[name].append(measurement)
                elif measurement is _END:
                    del turns[name]
    run.measurements.update({each.key: each for measurements in found.values() for each in measurements})
    return run


def against_numpy(measurements: Measurements) -> Iterator[tuple[Measurement, Measurement, float]]:
    """Our figure, NumPy's, and ours over NumPy's, for what both were measured of."""
    for ours, numpy in NUMPY_COUNTERPARTS:
        if ours in measurements and numpy in measurements:
            yield measurements[ours], measurements[numpy], measurements[ours].value / measurements[numpy].value


__all__ = [
    "NUMPY_COUNTERPARTS",
    "QUANTITIES",
    "CpuDescription",
    "Topology",
    "against_numpy",
    "describe",
    "measure_cpu",
    "read_topology",
]
