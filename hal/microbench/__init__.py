"""Micro-benchmarks: every number of a device file, measured in a minute or two on the board itself.

`measure_gpu` runs the quantities on a GPU, `spec_from` makes a device of what they give, `hal.microbench.cpu` measures
the cores of this machine. Names are imported when they are first used: measuring alone needs no msgspec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.microbench.assemble import spec_from
    from hal.microbench.launcher import Board, KernelText, Launcher, MicrobenchError
    from hal.microbench.measurement import Measurement
    from hal.microbench.numbers import json_text, number_at, toml_text
    from hal.microbench.quantities import QUANTITIES, QuantityResults, kernel_texts, measure_gpu
    from hal.microbench.sampling import Settings

_HOMES = {
    "assemble": ("spec_from",),
    "launcher": ("Board", "KernelText", "Launcher", "MicrobenchError"),
    "measurement": ("Measurement",),
    "numbers": ("json_text", "number_at", "toml_text"),
    "quantities": ("QUANTITIES", "QuantityResults", "kernel_texts", "measure_gpu"),
    "sampling": ("Settings",),
}


def __getattr__(name: str) -> Any:
    """A name of the package's face, imported when it is first asked for."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hal.microbench.{home}"), name)


__all__ = [
    "QUANTITIES",
    "Board",
    "KernelText",
    "Launcher",
    "Measurement",
    "MicrobenchError",
    "QuantityResults",
    "Settings",
    "json_text",
    "kernel_texts",
    "measure_gpu",
    "number_at",
    "spec_from",
    "toml_text",
]
