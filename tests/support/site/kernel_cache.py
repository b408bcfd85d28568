"""Kernels that tests have compiled before, by source, options and compiler, in a folder.

Files appear whole, so that any number of processes may share the folder. Tests keep the kernels of their own process,
:mod:`tests.support.kernels`, and ``sitecustomize.py`` those of its children, which have nothing but Python here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: Names the folder.
VARIABLE = "ROLLER_TESTS_KERNELS"
#: Attribute of a function that keeps: the one that it stands for.
AS_WRITTEN = "as_written"

#: Whose headers kernels include; NVRTC tells its own version.
_HEADER_WHEELS = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12")


def keep_cubins(compiler: Any, folder: Path) -> None:
    """Have :mod:`codegen.gpu.source.nvrtc` keep cubins with the compiler's words; errors are compiled anew."""
    compile_anew = compiler._cubin_and_log
    if hasattr(compile_anew, AS_WRITTEN):
        return

    def cubin_and_log(source: str, options: Sequence[bytes], name: str) -> tuple[bytes, str]:
        wheels = tuple(map(_version, _HEADER_WHEELS))
        path = folder / "nvrtc" / _digest(compiler.nvrtc_version(), wheels, source, *options)
        if path.exists():
            size, _, content = path.read_bytes().partition(b"\n")
            return content[int(size) :], content[: int(size)].decode()
        cubin, log = compile_anew(source, options, name)
        words = log.encode()
        _write(path, b"%d\n%b%b" % (len(words), words, cubin))
        return cubin, log

    setattr(cubin_and_log, AS_WRITTEN, compile_anew)
    compiler._cubin_and_log = cubin_and_log


def keep_programs(emulator: Any, folder: Path) -> None:
    """Have :mod:`codegen.verify.emulator` keep its programs, which it names by their source."""
    temporary_folder = emulator._program_folder
    if hasattr(temporary_folder, AS_WRITTEN):
        return

    @lru_cache(maxsize=1)
    def program_folder() -> Path:
        compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
        headers = [path.read_bytes() for path in sorted(emulator._HEADERS.iterdir())]
        programs = folder / "emulator" / _digest(compiler, emulator._COMPILE_OPTIONS, *headers)
        programs.mkdir(parents=True, exist_ok=True)
        return programs

    setattr(program_folder, AS_WRITTEN, temporary_folder)
    emulator._program_folder = emulator._runtime_folder = program_folder


#: Module -> what makes it keep what it compiles.
KEEPERS: dict[str, Callable[[Any, Path], None]] = {
    "codegen.gpu.source.nvrtc": keep_cubins,
    "codegen.verify.emulator": keep_programs,
}


_version = lru_cache(version)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
