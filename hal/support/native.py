"""C that comes with the package, compiled once by the machine's own compiler and kept in the user's cache."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

from hal.support.store import cache_folder, digest

COMPILERS = ("cc", "gcc", "clang")

#: No contraction of multiplications and additions, so that the results have the bits that NumPy's have.
OPTIONS = ("-O2", "-std=c99", "-ffp-contract=off", "-shared", "-fPIC")


class NativeLibrary:
    """The functions of a C file, once there are any.

    Whoever asks first starts the compiler and goes on without: the library is there from the moment the compiler is
    done. It is never there without a compiler, without a cache to write to, or where ``ROLLER_CACHE`` is 0.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self._compilation: subprocess.Popen[bytes] | None = None
        self._is_hopeless = False
        self._library: ctypes.CDLL | None = None

    def library(self) -> ctypes.CDLL | None:
        """The loaded library, None as long as there is none."""
        if os.environ.get("ROLLER_CACHE") == "0":
            return None
        if self._library is None and not self._is_hopeless:
            self._look()
        return self._library

    def built(self) -> ctypes.CDLL | None:
        """The library as soon as the compiler is done; None where there will never be one."""
        library = self.library()
        if self._compilation is not None:
            self._compilation.wait()
            library = self.library()
        return library

    def _look(self) -> None:
        """Load what is there; start the compiler where nothing is."""
        if self._compilation is None and not self._path.exists():
            self._compilation = self._started()
        if self._compilation is not None and self._compilation.poll() is None:
            return
        try:
            self._library = ctypes.CDLL(os.fspath(self._path))
        except OSError:
            self._is_hopeless = True

    @cached_property
    def _path(self) -> Path:
        key = digest(self.source.read_bytes(), " ".join(OPTIONS), platform.machine(), *platform.libc_ver())
        return cache_folder("native") / f"{self.source.stem}-{key[:32]}.so"

    def _started(self) -> subprocess.Popen[bytes] | None:
        """The compiler at work on a file next to the library's, which it becomes when complete; None without one."""
        compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
        if compiler is None:
            return None
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(prefix=f".{self._path.name}.", suffix=".part", dir=self._path.parent)
            os.close(handle)
            script = '"$@" && mv -f "$PART" "$WHOLE" || rm -f "$PART"'
            return subprocess.Popen(
                ["sh", "-c", script, "sh", compiler, *OPTIONS, "-o", part, os.fspath(self.source), "-lm"],
                env={**os.environ, "PART": part, "WHOLE": os.fspath(self._path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return None


@cache
def native_library(source: Path) -> NativeLibrary:
    """The library of a C file, one in every process."""
    return NativeLibrary(source)
