"""The code generators, a row each: what it writes, what it can do; and the engines that verify kernels by running
them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal.support.errors import InputError, listed


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A code generator of :class:`hal.DeviceSpec`.

    Attributes:
        lane: what a lane of its devices is, a ``thread`` or an ``element`` of vectors.
        source_suffix: ending of its source files.
        binary_suffix: ending of its binaries; empty where it stops at source text.
        has_chains: whether its kernels can be launched one after the other, with tensors between them.
        has_reference: whether the operator is also written in its language, to check kernels on the device.
        needs_linker: whether its kernels are linked by the system's C compiler.
        has_dynamic_shared: whether shared memory can be sized at launch, beyond the 48 KiB that a kernel may declare.
    """

    lane: str
    source_suffix: str
    binary_suffix: str
    has_chains: bool
    has_reference: bool
    needs_linker: bool = False
    has_dynamic_shared: bool = False


#: By the name in a device's spec.
GENERATORS: Mapping[str, Generator] = {
    "cuda": Generator(
        lane="thread",
        source_suffix="cu",
        binary_suffix="cubin",
        has_chains=True,
        has_reference=True,
        has_dynamic_shared=True,
    ),
    "cuda-source": Generator(
        lane="thread",
        source_suffix="cu",
        binary_suffix="",
        has_chains=True,
        has_reference=True,
        has_dynamic_shared=True,
    ),
    "opencl-source": Generator(
        lane="thread", source_suffix="cl", binary_suffix="", has_chains=True, has_reference=False
    ),
    "llvm": Generator(
        lane="element", source_suffix="s", binary_suffix="so", has_chains=False, has_reference=False, needs_linker=True
    ),
}

#: The engines that run kernels to verify them, by what a lane of the device is; the first unless another is asked for.
ENGINES: Mapping[str, tuple[str, ...]] = {"thread": ("opencl", "emulator"), "element": ("native",)}


def linker() -> str | None:
    """The system's C compiler, which links shared objects; None where there is none."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def check_tools(name: str) -> None:
    """Raises InputError where a code generator cannot work on this machine."""
    if GENERATORS[name].needs_linker and linker() is None:
        raise InputError(
            "--device", "its kernels are linked by a C compiler, and there is none", "install gcc or clang"
        )


def has_chains(name: str | None) -> bool:
    """Whether devices of a code generator run several kernels one after the other; False without a generator.

    >>> has_chains("cuda"), has_chains("llvm"), has_chains(None)
    (True, False, False)
    """
    return name is not None and GENERATORS[name].has_chains


def engine_for(lane: str, wanted: str | None = None) -> str:
    """The engine that verifies kernels of devices whose lanes are ``lane``: the first that can, unless ``wanted``.

    >>> engine_for("thread"), engine_for("thread", "emulator"), engine_for("element")
    ('opencl', 'emulator', 'native')

    Raises:
        InputError: ``wanted`` does not run such kernels.
    """
    engines: Sequence[str] = ENGINES[lane]
    if wanted is None:
        return engines[0]
    if wanted not in engines:
        raise InputError("--engine", f"{wanted!r} does not run kernels of this device", f"use {listed(engines)}")
    return wanted
