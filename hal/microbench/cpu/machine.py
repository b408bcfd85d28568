"""Common parts of the CPU's quantities: the cores, the loops, aligned arrays, and loops made long enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hal.microbench.cpu.cores import Cores
from hal.microbench.cpu.native import Loops, loops
from hal.microbench.cpu.topology import Topology, read_topology
from hal.microbench.cpu.vector_ir import UNROLL
from hal.microbench.sampling import Settings

_ALIGNMENT = 4096


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        topology: what the system says of it.
        cores: its cores, each with a thread.
        loops: the loops that load them.
        settings: how much to measure.
    """

    topology: Topology
    cores: Cores
    loops: Loops
    settings: Settings

    @property
    def turn_bytes(self) -> int:
        """Bytes that one turn of a loop reads."""
        return 4 * self.topology.lanes * UNROLL

    def array(self, size_bytes: int) -> NDArray[np.float32]:
        """float32 ones, page-aligned, written once so that they have memory; as many whole turns of a loop as fit into
        so many bytes, one at least."""
        step = self.turn_bytes
        size = max(step, size_bytes // step * step)
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        values: NDArray[np.float32] = raw[start : start + size].view(np.float32)
        values[:] = 1.0
        return values

    def passes(self, run: Callable[[int], float], start: int = 1) -> int:
        """Number of passes of a loop for a reading of the target length: ``run(passes)`` gives seconds."""
        count = start
        # The least of three: a single one may have been disturbed.
        while (seconds := min(run(count) for _ in range(3))) < self.settings.target_seconds / 2:
            count *= max(2, min(64, int(self.settings.target_seconds / max(seconds, 1e-9))))
        return count


@contextmanager
def this_machine(settings: Settings) -> Iterator[Machine]:
    """The machine that runs this; its threads end with the block."""
    topology = read_topology()
    with Cores(topology.cpus) as cores:
        yield Machine(topology, cores, loops(topology.lanes, topology.vector_registers), settings)
