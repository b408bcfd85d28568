"""Interface of quantities to a GPU: facts from its driver, kernels, buffers, and the device time of launches.

:class:`Launcher` is the whole interface; `CupyLauncher` implements it on a real board, and the tests have one that
computes times from a model of a board. A kernel is a text with one entry point and includes no header, so that NVRTC
compiles it wherever CuPy is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class MicrobenchError(RuntimeError):
    """A quantity could not be measured on this board; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """Facts of a GPU by its driver; bytes, hertz, and registers of 32 bits.

    Attributes:
        title: the name the driver gives, ``Tesla V100-SXM2-16GB``.
        compute_capability: (major, minor).
        units: multiprocessors.
        lanes: threads of a warp.
        threads_per_block: limit of one block.
        threads_per_unit: resident threads.
        blocks_per_unit: resident blocks.
        registers_per_unit: the register file.
        shared_per_block: shared memory of a block that asks for no more.
        shared_opt_in: shared memory of a block that does.
        shared_per_unit: of all resident blocks together.
        shared_reserved: what the system takes for each block.
        grid: blocks along x, y and z.
        l2_bytes: capacity of the L2 cache.
        memory_bytes: capacity of the DRAM.
        free_bytes: what of it is free now.
        clock_hz: the highest clock of the multiprocessors.
        memory_clock_hz: clock of the DRAM's interface, 0 where the driver does not say.
        memory_bus_bits: its width, 0 likewise.
        software: versions of driver and compiler, for the provenance.
    """

    title: str
    compute_capability: tuple[int, int]
    units: int
    lanes: int
    threads_per_block: int
    threads_per_unit: int
    blocks_per_unit: int
    registers_per_unit: int
    shared_per_block: int
    shared_opt_in: int
    shared_per_unit: int
    shared_reserved: int
    grid: tuple[int, int, int]
    l2_bytes: int
    memory_bytes: int
    free_bytes: int
    clock_hz: float
    memory_clock_hz: float
    memory_bus_bits: int
    software: str

    @property
    def capability(self) -> int:
        """``70`` for compute capability 7.0."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def memory_peak(self) -> float | None:
        """Bytes per second of the DRAM's interface, two transfers a clock; None where the driver does not say."""
        peak = 2 * self.memory_clock_hz * self.memory_bus_bits / 8
        return peak or None


@dataclass(frozen=True)
class KernelText:
    """CUDA C of one kernel.

    Attributes:
        entry: name of the ``extern "C"`` function.
        source: the text.
        registers: most registers a thread may get; None leaves it to the compiler.
    """

    entry: str
    source: str
    registers: int | None = None


def text(entry: str, template: str, registers: int | None = None, **values: object) -> KernelText:
    """A kernel from a template with ``$NAME`` where ``values`` go; ``$ENTRY`` is its name."""
    return KernelText(entry, Template(template).substitute(ENTRY=entry, **values), registers)


class Kernel(Protocol):
    """A compiled kernel."""

    text: KernelText

    @property
    def registers(self) -> int:
        """Registers of a thread."""

    @property
    def local_bytes(self) -> int:
        """Bytes of a thread that did not fit into registers."""

    def resident_blocks(self, threads: int) -> int:
        """Blocks of that many threads that a unit keeps at a time."""


@dataclass(frozen=True)
class Launch:
    """One launch; buffers and NumPy scalars as arguments, ``shared`` is dynamic shared memory in bytes."""

    kernel: Kernel
    grid: int
    block: int
    arguments: tuple[Any, ...]
    shared: int = 0


#: A launch, or a call into a library that launches something.
Work = Launch | Callable[[], object]


class Launcher(Protocol):
    """A GPU."""

    board: Board

    def kernel(self, kernel: KernelText) -> Kernel:
        """Compile; raises MicrobenchError with the compiler's complaint."""

    def array(self, values: NDArray[Any]) -> Any:
        """A buffer with these values."""

    def empty(self, size_bytes: int) -> Any:
        """A buffer of zeros; raises MicrobenchError where the memory is full."""

    def host(self, buffer: Any, dtype: str) -> NDArray[Any]:
        """The values of a buffer."""

    def seconds(self, work: Sequence[Work], *, ahead: bool = False) -> float:
        """Device time from the start of the first to the end of the last, one stream.

        With ``ahead`` the device is kept busy until all of it has been submitted, so that the host's time between two
        launches does not count.
        """

    def release(self) -> None:
        """Give memory that no buffer uses back to the device."""

    def matmul(self, size: int, dtype: str) -> Callable[[], object] | None:
        """A library's product of two square matrices, or None where no library is at hand."""

    def torch(self) -> Any:
        """The module ``torch`` if it sees this GPU, else None."""


def scalar(value: float, kind: str = "int32") -> Any:
    """A kernel argument of that NumPy type; a plain Python number would be passed with 64 bits."""
    return np.dtype(kind).type(value)
