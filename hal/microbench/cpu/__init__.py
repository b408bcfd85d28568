"""Micro-benchmarks of this machine's cores: bandwidth and latency per level, multiply-add rate, barrier.

Nothing of it needs a GPU. Each quantity is a module; the loops are LLVM IR (`vector_ir`) and run on all cores at once
(`cores`). On a shared machine other work only ever makes a reading slower, so the best of many counts. Quantities take
turns, a reading each: what else happens for a second spoils a few readings of each then, and not all of one. Readings
of the peak that were taken in a row were once half of it, all 15. A quantity whose readings take long, of memory and
large caches, takes fewer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

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

#: Seconds after which a quantity has readings enough, and how many it takes in any case.
ENOUGH_SECONDS, LEAST_READINGS = 1.0, 5

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
        quantities = {
            name: _Quantity(measure(machine)) for name, measure in QUANTITIES.items() if not names or name in names
        }
        under_way = dict(quantities)
        while under_way:
            for name, quantity in list(under_way.items()):
                progress(name)
                try:
                    is_under_way = quantity.read()
                except (RuntimeError, MemoryError) as error:
                    run.failures[name] = str(error) or type(error).__name__
                    is_under_way = False
                if not is_under_way:
                    del under_way[name]
    run.measurements.update({each.key: each for quantity in quantities.values() for each in quantity.measurements})
    return run


@dataclass
class _Quantity:
    """A quantity that takes turns with others: its measurements, and the readings of the next one so far."""

    turns: Turns
    measurements: list[Measurement] = field(default_factory=list)
    readings: int = 0
    seconds: float = 0.0

    def read(self) -> bool:
        """Take a reading; False where none is left."""
        has_enough = self.readings >= LEAST_READINGS and self.seconds >= ENOUGH_SECONDS
        start = time.perf_counter()
        try:
            measurement = self.turns.send(has_enough if self.readings else None)
        except StopIteration:
            return False
        if measurement is not None:
            self.measurements.append(measurement)
            self.readings, self.seconds = 0, 0.0
            return True
        if self.readings:  # the first one made the arrays
            self.seconds += time.perf_counter() - start
        self.readings += 1
        return True


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
