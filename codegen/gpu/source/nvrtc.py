"""CUDA source to cubin by NVRTC: no GPU, no driver and no CUDA toolkit needed, only the wheels."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from codegen.gpu.source.nvrtc_library import Nvrtc

#: Wheels whose headers kernels include: fp16 and bf16, the WMMA headers, libcu++.
_HEADER_PACKAGES = ("nvidia.cuda_runtime", "nvidia.cuda_nvcc", "nvidia.cuda_cccl")

_ARCHITECTURE = re.compile(r"sm_(\d+)[af]?")


class CompileError(RuntimeError):
    """NVRTC cannot make a cubin of a source.

    Attributes:
        kernel: the name given to the source.
        reason: the first error, one line.
        log: the compiler's whole output; may be empty.
    """

    def __init__(self, kernel: str, reason: str, log: str = "") -> None:
        self.kernel = kernel
        self.reason = " ".join(reason.split())
        self.log = log
        super().__init__(f"{kernel}: {self.reason}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str, str]]:
        return CompileError, (self.kernel, self.reason, self.log)


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A cubin and what ptxas reports about it.

    Attributes:
        cubin: the ELF image that ``cuModuleLoadData`` takes.
        registers: registers per thread.
        spill_bytes: bytes per thread of spill stores and spill loads together; 0 is what a good kernel has.
        stack_bytes: stack frame per thread.
        shared_bytes: shared memory per block that the source declares statically.
        log: the compiler's messages, those that differ from run to run left out.
    """

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    log: str


def supported_architectures() -> tuple[int, ...]:
    """Compute capabilities that NVRTC compiles for, as ``10 * major + minor``."""
    return _nvrtc().architectures()


def unsupported_reason(architecture: str) -> str | None:
    """Why there can be no cubin for ``architecture`` (``"sm_37"``); None where there can be one."""
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return f"{architecture!r} is not a CUDA architecture such as 'sm_70'"
    supported = supported_architectures()
    if int(match.group(1)) not in supported:
        version = ".".join(map(str, nvrtc_version()))
        return f"NVRTC {version} compiles for sm_{supported[0]} to sm_{supported[-1]}, not for {architecture}"
    return None


def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler, which a cubin's bytes depend on."""
    return _nvrtc().version()


def compile_cuda(source: str, architecture: str, *, name: str) -> CompiledKernel:
    """Compile ``source``, which holds one kernel, for ``architecture`` (``"sm_70"``).

    ``name`` stands in messages only; the same source gives the same bytes under any name. Raises `CompileError` where
    the compiler fails and where it does not know the architecture.
    """
    reason = unsupported_reason(architecture)
    if reason is not None:
        raise CompileError(name, reason)
    options = [
        f"--gpu-architecture={architecture}".encode(),
        b"--std=c++17",
        b"--ptxas-options=-v",
        b"-default-device",
        b"--minimal",  # no textures, surfaces and device runtime: a fifth less time for a small kernel, same bytes
        b"-w",
        *(b"-I" + directory for directory in _include_directories()),
    ]
    cubin, log = _cubin_and_log(source, options, name)
    resources = parse_resources(log)
    if resources is None:
        raise CompileError(name, "the source holds no __global__ function", log)
    return CompiledKernel(cubin=cubin, **resources._asdict(), log=log)


def _cubin_and_log(source: str, options: list[bytes], name: str) -> tuple[bytes, str]:
    """The cubin that NVRTC makes of a source, and the log of the compilation."""
    try:
        cubin, messages, reason = _nvrtc().compiled(source.encode(), b"kernel.cu", options)
    except RuntimeError as error:
        raise CompileError(name, str(error)) from error
    log = _steady_log(messages)
    if cubin is None:
        raise CompileError(name, _first_error(log) or reason, log)
    return cubin, log


class Resources(NamedTuple):
    """Resources of a kernel: registers per thread, bytes spilled and of stack per thread, static shared bytes per
    block."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def parse_resources(log: str) -> Resources | None:
    """The resources of a kernel from what ``ptxas -v`` prints.

    The worst of each where the source holds several kernels; None where the log tells of none.

    >>> frame = "0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads"
    >>> parse_resources(frame + ", Used 32 registers, 96 bytes smem")
    Resources(registers=32, spill_bytes=12, stack_bytes=0, shared_bytes=96)
    """
    registers = [int(number) for number in re.findall(r"\bUsed (\d+) registers", log)]
    if not registers:
        return None
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    shared = [int(number) for number in re.findall(r"(\d+) bytes smem", log)]
    spill_bytes = max((int(stores) + int(loads) for _, stores, loads in frames), default=0)
    stack_bytes = max((int(stack) for stack, _, _ in frames), default=0)
    return Resources(max(registers), spill_bytes, stack_bytes, max(shared, default=0))


def _steady_log(log: str) -> str:
    """The log without what would differ between two runs, or between two machines: times and header directories."""
    # What ptxas says of itself begins with a zero byte.
    lines = [
        line.rstrip()
        for line in log.replace("\0", "").splitlines()
        if line.strip() and "Compile time =" not in line and "are deprecated and may be removed" not in line
    ]
    text = "\n".join(lines)
    for directory in _include_directories():
        text = text.replace(directory.decode() + "/", "")
    return text


def _first_error(log: str) -> str:
    """The first line of a log that says ``error``; ptxas calls its own ``fatal`` or ``error``."""
    return next((line for line in log.splitlines() if re.search(r"\berror\b|\bfatal\b", line, re.IGNORECASE)), "")


@lru_cache(maxsize=1)
def _nvrtc() -> Nvrtc:
    """The library, loaded when first needed: it has 100 MB."""
    from codegen.gpu.source.nvrtc_library import Nvrtc

    try:
        return Nvrtc()
    except OSError as error:
        raise CompileError("nvrtc", f"cannot be loaded ({error}); install the nvidia-cuda-nvrtc-cu12 wheel") from error


@lru_cache(maxsize=1)
def _include_directories() -> tuple[bytes, ...]:
    """Header directories of the installed CUDA wheels; the order is fixed and no compiler environment is read."""
    directories = []
    for package in _HEADER_PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        for location in (spec.submodule_search_locations or ()) if spec else ():
            directory = Path(location) / "include"
            if directory.is_dir():
                directories.append(str(directory).encode())
    return tuple(directories)
