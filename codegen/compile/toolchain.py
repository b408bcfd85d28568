"""Versions that finished kernels follow from besides the request, and their store. Imports nothing slow."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from codegen.generators import linker
from hal.support.store import Store, cache_folder, code_digest, digest

#: What the bytes of a kernel, or the numbers of its verification, depend on besides our own code.
_COMPILERS = (
    "apache-tvm", "apache-tvm-ffi", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12", "numpy", "pyopencl",
)  # fmt: skip

#: Where Linux lists OpenCL's drivers, a file each with the name of a library and its version.
_OPENCL_DRIVERS = Path("/etc/OpenCL/vendors")

#: Packages of this project that kernels and their order follow from.
_PACKAGES = ("hal", "sokoban", "codegen", "roller")


def kernel_store() -> Store:
    """Where finished kernels are kept between runs."""
    return Store(cache_folder("kernels"))


@cache
def toolchain() -> str:
    """A digest of this project's code and of the compilers at hand."""
    programs = [program for program in (linker(), shutil.which("g++")) if program]
    drivers = sorted(_OPENCL_DRIVERS.glob("*.icd"))
    texts: list[str | bytes] = [sys.version, *(str(_changed(program)) for program in programs)]
    texts += [part for driver in drivers for part in (driver.name, driver.read_bytes())]
    for package in _COMPILERS:
        try:
            texts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            texts.append(package)
    return digest(*texts, code_digest(*_PACKAGES))


def _changed(program: str | Path) -> tuple[str, int]:
    """A program by its place, all links followed, and when it was last changed, in ns."""
    path = os.path.realpath(program)
    return path, os.stat(path).st_mtime_ns
