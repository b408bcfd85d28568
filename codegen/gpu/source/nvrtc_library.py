"""NVRTC's shared library from its wheel, called by ctypes.

NVIDIA's own binding comes in one version a process, and PyTorch asks for that of another CUDA than the compiler is
pinned to. The library itself has its CUDA version in its name, so that both can be installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

_LIBRARY = "libnvrtc.so.12"

#: Arguments of the functions that are called; all return a status, 0 for success.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
}


class NvrtcError(RuntimeError):
    """A call that failed, in NVRTC's words."""


class Nvrtc:
    """The library, loaded.

    Raises:
        OSError: there is no such library.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_path())
        self._library.nvrtcGetErrorString.argtypes = (c_int,)
        self._library.nvrtcGetErrorString.restype = c_char_p
        for name, arguments in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = arguments

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NvrtcError(self._library.nvrtcGetErrorString(status).decode())

    def version(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        return major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it compiles for, as ``10 * major + minor``, ascending."""
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        capabilities = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", capabilities)
        return tuple(sorted(capabilities))

    def compiled(self, source: bytes, name: bytes, options: Sequence[bytes]) -> tuple[bytes | None, str, str]:
        """The cubin of a source, None where there is none; what the compiler says; and why there is none.

        Raises:
            NvrtcError: the library fails otherwise than by refusing the source.
        """
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), source, name, 0, None, None)
        try:
            reason = ""
            try:
                self._call("nvrtcCompileProgram", program, len(options), (c_char_p * len(options))(*options))
            except NvrtcError as error:
                reason = str(error)
            log = self._bytes("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
            return None if reason else self._bytes("nvrtcGetCUBIN", program), log, reason
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _bytes(self, name: str, program: c_void_p) -> bytes:
        """Bytes that a function writes into a buffer whose size another one returns."""
        size = c_size_t()
        self._call(f"{name}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(name, program, buffer)
        return buffer.raw


def _path() -> str:
    """The library in its wheel, else by the name that the system's loader looks for."""
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        spec = None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "lib" / _LIBRARY
        if path.is_file():
            return str(path)
    return _LIBRARY
