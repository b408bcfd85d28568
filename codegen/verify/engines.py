"""Which engine runs a kernel to verify it, and what it looks at."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.generators import GENERATORS
from codegen.verify.emulator import emulator_available
from hal.support.errors import InputError, listed

#: Seeds of the orders in which the emulator runs threads, warps and blocks unless others are asked for.
ORDER_SEEDS = (0, 1, 2)

#: What an engine checks while it runs a kernel, in the words of manifests (docs/bundles.md says what they mean).
CHECKS: Mapping[str, tuple[str, ...]] = {
    "emulator": ("values", "guards", "bounds", "alignment", "uninitialized", "races", "orders", "written once"),
    "opencl": ("values", "guards"),
    "native": ("values", "guards", "scratch"),
}


def engine_for(generator: str, wanted: str | None = None) -> str:
    """The engine that verifies kernels of a code generator: the first one, or the next where g++ is missing, unless
    ``wanted``.

    >>> engine_for("llvm"), engine_for("opencl-source"), engine_for("cuda", "opencl")
    ('native', 'opencl', 'opencl')

    Raises:
        InputError: ``wanted`` does not run such kernels.
    """
    engines = GENERATORS[generator].engines
    if wanted is None:
        return engines[1] if fallback_reason(generator) else engines[0]
    if wanted not in engines:
        raise InputError(
            "--engine", f"{wanted!r} does not run kernels of this device", f"use {listed(sorted(engines))}"
        )
    return wanted


def fallback_reason(generator: str) -> str:
    """Why kernels of a code generator are not run by the engine that would see most; empty where they are."""
    return (emulator_available() or "") if GENERATORS[generator].engines[0] == "emulator" else ""
