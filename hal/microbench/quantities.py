"""All quantities in the order they are measured, and the run over them.

A quantity is a module with two functions: ``kernels(capability)`` gives the CUDA C that it launches on boards of that
compute capability, and ``measure(launcher, found, settings)`` yields measurements. To add one, write the module and
name it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from hal.microbench.launcher import KernelText, Launcher
from hal.microbench.launches import block_launch, framework_calls, launch_overhead
from hal.microbench.measurement import Measurement
from hal.microbench.memory import (
    dram,
    l2_bandwidth,
    latency,
    scattered,
    shared_bandwidth,
    shared_banks,
    transaction,
    translation,
)
from hal.microbench.sampling import Settings
from hal.microbench.units import arithmetic, barrier, library_gemm, matrix, power, registers
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Name for ``--only`` to module; later ones may use what earlier ones found.
QUANTITIES: dict[str, ModuleType] = {
    "arithmetic": arithmetic,
    "matrix": matrix,
    "dram": dram,
    "scattered": scattered,
    "transaction": transaction,
    "latency": latency,
    "translation": translation,
    "l2": l2_bandwidth,
    "shared": shared_bandwidth,
    "banks": shared_banks,
    "launch": launch_overhead,
    "blocks": block_launch,
    "barrier": barrier,
    "registers": registers,
    "framework": framework_calls,
    "gemm": library_gemm,
    # Last: it leaves the board hot and its clock low.
    "power": power,
}

#: A reading outside these shares of the shipped number of the same board is marked.
_FAR_OFF = (0.7, 1.35)


@dataclass
class Run:
    """What a run over quantities gave.

    Attributes:
        found: measurements by key.
        failures: name of a quantity to why it could not be measured.
    """

    found: dict[str, Measurement] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def chosen(only: Sequence[str]) -> tuple[str, ...]:
    """The names in ``only`` in the order of measurement, all where it is empty; InputError for an unknown one."""
    for name in only:
        if name not in QUANTITIES:
            raise InputError("--only", f"{name!r} is not measured on GPUs", f"name one of {', '.join(QUANTITIES)}")
    return tuple(name for name in QUANTITIES if not only or name in only)


def kernel_texts(capability: int) -> Iterator[KernelText]:
    """The CUDA C of every quantity for one compute capability (70 for 7.0), each text once."""
    seen: set[KernelText] = set()
    for module in QUANTITIES.values():
        for kernel in module.kernels(capability):
            if kernel not in seen:
                seen.add(kernel)
                yield kernel


def measure_gpu(
    launcher: Launcher,
    names: Sequence[str] = (),
    settings: Settings | None = None,
    datasheet: DeviceSpec | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Run:
    """Measure the quantities of these names (all where empty); one that fails does not stop the others.

    ``datasheet`` is the shipped spec of the same board, against which readings are checked beside physical limits.
    """
    run = Run()
    for name in chosen(names):
        progress(name)
        try:
            for measurement in QUANTITIES[name].measure(launcher, run.found, settings or Settings()):
                run.found[measurement.key] = _checked(measurement, datasheet)
        except (RuntimeError, MemoryError) as error:
            # Ours and those of the CUDA runtime, which leave the board usable or make the next ones fail too.
            run.failures[name] = " ".join(str(error).split()) or type(error).__name__
        launcher.release()
    return run


def _checked(measurement: Measurement, datasheet: DeviceSpec | None) -> Measurement:
    """With the sanity range that the shipped number of the board gives, where it has one."""
    if datasheet is None or not measurement.path:
        return measurement
    from hal.microbench.numbers import number_at

    known = number_at(datasheet, measurement.path)
    if known is None:
        return measurement
    low, high = (share * known for share in _FAR_OFF)
    if measurement.high is not None:
        high = min(high, max(measurement.high, known))
    return measurement.within(low, high)
