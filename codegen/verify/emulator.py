"""Generated CUDA kernels executed on the CPU, for verification where there is no GPU.

The kernel's text is compiled as C++ by g++ beside a header that stands in for CUDA: threads of a block are fibers that
take turns, matrix fragments are plain arrays. It is an interpreter of the text's meaning and says nothing about speed.
It notices what a GPU might not: accesses beyond an array, shared memory read before it was written, fragments that are
not aligned, threads that wait at different barriers.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Folder of the headers that stand in for CUDA's.
_HEADERS = Path(__file__).parent / "emulator_headers"

_CUDA_INCLUDE = re.compile(r"^\s*#\s*include\s*<(?:cuda[\w/]*|mma)(?:\.h)?>.*$", re.MULTILINE)
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\[\];")
_CRASHES: dict[int, str] = {
    signal.SIGSEGV: "an access outside an array",
    signal.SIGBUS: "an access outside an array",
    signal.SIGILL: "a vector access that is not aligned, or an index beyond a shared or local array",
}
_RUN_TIMEOUT_S = 600
_COMPILE_OPTIONS = (
    *("-std=c++20", "-w", "-fno-strict-aliasing", "-fexcess-precision=16", "-ffp-contract=off"),
    # A vector access that is not aligned, an index beyond a declared array: an illegal instruction instead.
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
)


class EmulatorError(RuntimeError):
    """A kernel that does not compile for the CPU, or that did something wrong while it ran."""


class Synchronization(NamedTuple):
    """A place of a kernel's text where threads wait.

    Attributes:
        kind: "barrier", "wait", "commit", "fence" or "warp".
        line: of the text, from 1.
        text: of that line.
    """

    kind: str
    line: int
    text: str


class Emulation(NamedTuple):
    """A kernel that has run without a fault.

    Attributes:
        outputs: the arrays asked for, which all seeds left the same.
        needless: what ordered nothing, whatever the seed.
        seeds: orders of threads, warps and blocks in which it ran.
    """

    outputs: list[NDArray[Any]]
    needless: tuple[Synchronization, ...]
    seeds: tuple[int, ...]


@lru_cache(maxsize=1)
def emulator_available() -> str | None:
    """None where kernels can be run, otherwise the reason why not."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no g++"
    if not hasattr(os, "fork") or os.uname().sysname != "Linux":
        return "fibers and guard pages are set up for Linux only"
    test = "int main() { _Float16 x = 1; return x == (_Float16)1 ? 0 : 1; }"
    process = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-xc++", "-"], input=test, capture_output=True, text=True, check=False
    )
    return None if process.returncode == 0 else "this g++ has no _Float16; version 12 does"


def run_cuda_on_cpu(
    source: str,
    entry: str,
    arguments: Sequence[NDArray[Any]],
    grid: Sequence[int],
    block: Sequence[int],
    output_indices: Sequence[int],
    dynamic_shared_bytes: int = 0,
    *,
    optimized: bool = True,
    seeds: Sequence[int] = (0, 1, 2),
    checked: bool = True,
    inputs_are_constant: bool = True,
    written: Sequence[int] | None = None,
) -> Emulation:
    """Run one kernel.

    Args:
        source: CUDA C++ text.
        entry: name of the ``__global__`` function in it.
        arguments: one array per parameter, all of them pointers; outputs give the initial contents.
        grid, block: launch extents; missing ones are 1.
        output_indices: which arguments come back.
        dynamic_shared_bytes: size of ``extern __shared__`` memory.
        optimized: whether g++ optimises, which takes it half a second; a short kernel has run to its end by then
            without.
        seeds: of the orders in which threads, warps and blocks run.
        checked: whether accesses are held against each other (races, stores into inputs).
        inputs_are_constant: whether arguments other than the outputs must not be written.
        written: how many elements every output has, each of which is written once and none behind; where None, a
            kernel may write what it likes of them.

    Returns:
        The arrays at ``output_indices`` after the kernel has run, and what synchronizations were needless.

    Raises:
        EmulatorError: g++ refuses the source, or the kernel crashes, hangs or breaks a rule of CUDA.
    """
    program = _program(source, entry, len(arguments), optimized)
    arrays = [np.ascontiguousarray(array) for array in arguments]
    extents = [*grid, 1, 1][:3] + [*block, 1, 1][:3]
    with tempfile.TemporaryDirectory(prefix="cuda-on-cpu-") as directory:
        data = Path(directory) / "arrays"
        data.write_bytes(b"".join(array.tobytes() for array in arrays))
        numbers = [*extents, dynamic_shared_bytes, *(array.nbytes for array in arrays)]
        command = [str(program), str(data), *map(str, numbers)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise EmulatorError(f"{entry}: still running after {_RUN_TIMEOUT_S} s") from error
        if process.returncode:
            reason = process.stderr.strip() or _CRASHES.get(-process.returncode, f"exit status {process.returncode}")
            raise EmulatorError(f"{entry}: {reason}")
        content = data.read_bytes()
    results, offset = [], 0
    for position, array in enumerate(arrays):
        if position in output_indices:
            part = np.frombuffer(content, array.dtype, array.size, offset)
            results.append((position, part.reshape(array.shape).copy()))
        offset += array.nbytes
    by_position = dict(results)
    return Emulation([by_position[position] for position in output_indices], (), tuple(seeds))


def cpu_source(source: str, entry: str, parameters: int) -> str:
    """The C++ program that stands for a kernel: its own text, less CUDA's headers, between header and runner."""
    kernel = _CUDA_INCLUDE.sub("", source)
    kernel = _DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)emulator::dynamic_shared;", kernel)
    types = _parameter_types(kernel, entry)
    if len(types) != parameters:
        raise EmulatorError(f"{entry}: {parameters} arguments for {len(types)} parameters")
    call = ", ".join(f"({kind})arguments[{position}]" for position, kind in enumerate(types))
    return "\n".join(
        [
            '#include "cuda_on_cpu.h"',
            kernel,
            '#include "runner.h"',
            f"static void emulator_call(void** arguments) {{ {entry}({call}); }}",
            "",
        ]
    )


def _parameter_types(kernel: str, entry: str) -> list[str]:
    """Types of the parameters of ``entry``: ``half*`` for ``half* __restrict__ A``."""
    signature = re.search(rf"\b{re.escape(entry)}\s*\(([^)]*)\)", kernel)
    if signature is None:
        raise EmulatorError(f"{entry}: the source has no such kernel")
    kinds = []
    for parameter in signature.group(1).split(","):
        kind, star, _ = parameter.replace("__restrict__", "").rpartition("*")
        if not star:
            raise EmulatorError(f"{entry}: parameter {parameter.strip()} is no pointer")
        kinds.append(kind.strip() + "*")
    return kinds


def _program(source: str, entry: str, parameters: int, optimized: bool) -> Path:
    """The compiled program of a kernel, from this process's cache where it was compiled before."""
    text = cpu_source(source, entry, parameters)
    return _compiled(text, entry, "-O2" if optimized else "-O0")


@lru_cache(maxsize=1)
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda-on-cpu-programs-")


def _program_folder() -> Path:
    """Where compiled programs are kept: until this process ends."""
    return Path(_temporary_folder().name)


def _compiled(text: str, entry: str, level: str) -> Path:
    reason = emulator_available()
    if reason is not None:
        raise EmulatorError(f"{entry}: {reason}")
    program = _program_folder() / hashlib.sha256(f"{level}\n{text}".encode()).hexdigest()[:32]
    if program.exists():
        return program
    # Other processes may be compiling the same.
    unit = program.with_suffix(f".{os.getpid()}.cpp")
    unit.write_text(text)
    partial = program.with_suffix(f".{os.getpid()}.partial")
    command = ["g++", *_COMPILE_OPTIONS, level, f"-I{_HEADERS}", str(unit), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    unit.unlink()
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise EmulatorError(f"{entry}: g++: {lines[0].strip() if lines else 'failed'}")
    partial.rename(program)
    return program
