"""The code generators, a row each: what it writes, what it can do, and which engines run that to verify it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from hal.support.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A code generator of :class:`hal.DeviceSpec`.

    Attributes:
        lane: what a lane of its devices is, a ``thread`` or an ``element`` of vectors.
        source_suffix: ending of its source files.
        binary_suffix: ending of its binaries; empty where it stops at source text.
        engines: what runs its kernels to verify them (:mod:`codegen.verify.engines`); the first one by default.
        has_reference: whether the operator is also written in its language, to check kernels on the device.
        needs_linker: whether its kernels are linked by the system's C compiler.
        has_dynamic_shared: whether shared memory can be sized at launch, beyond the 48 KiB that a kernel may declare.
    """

    lane: str
    source_suffix: str
    binary_suffix: str
    engines: tuple[str, ...]
    has_reference: bool
    needs_linker: bool = False
    has_dynamic_shared: bool = False


#: By the name in a device's spec.
GENERATORS: Mapping[str, Generator] = {
    "cuda": Generator(
        lane="thread",
        source_suffix="cu",
        binary_suffix="cubin",
        engines=("emulator", "opencl"),
        has_reference=True,
        has_dynamic_shared=True,
    ),
    "cuda-source": Generator(
        lane="thread",
        source_suffix="cu",
        binary_suffix="",
        engines=("emulator", "opencl"),
        has_reference=True,
        has_dynamic_shared=True,
    ),
    "opencl-source": Generator(
        lane="thread",
        source_suffix="cl",
        binary_suffix="",
        engines=("opencl", "emulator"),
        has_reference=False,
    ),
    "llvm": Generator(
        lane="element",
        source_suffix="s",
        binary_suffix="so",
        engines=("native",),
        has_reference=False,
        needs_linker=True,
    ),
}


def linker() -> str | None:
    """The system's C compiler, which links shared objects; None where there is none."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def check_tools(name: str) -> None:
    """Raises InputError where a code generator cannot work on this machine."""
    if GENERATORS[name].needs_linker and linker() is None:
        raise InputError(
            "--device", "its kernels are linked by a C compiler, and there is none", "install gcc or clang"
        )
