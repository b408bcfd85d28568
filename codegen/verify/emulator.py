"""Generated CUDA kernels executed on the CPU, for verification where there is no GPU.

The kernel's text is compiled as C++ by g++ with headers that stand in for CUDA (``emulator_headers``), and linked to
a runtime (``emulator_runtime``) that schedules threads as fibers, in orders drawn from seeds. g++ tells the runtime of
every load and store (``-fsanitize=thread``, whose calls the runtime answers instead of the sanitizer's library), and
the runtime holds them against each other: what no barrier, wait or fence orders is an error, whether or not it did harm
this time. It is an interpreter of the text's meaning and says nothing about speed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codegen.tensor_map import TensorMap
from codegen.verify.emulated_text import HEADER_NAME, EmulatedKernel, EmulatorError, emulated_kernel, in_words
from hal.support.store import cache_folder

#: Folders of the headers that stand in for CUDA's, and of what executes a kernel.
_HEADERS = Path(__file__).parent / "emulator_headers"
_HEADER = _HEADERS / HEADER_NAME
_RUNTIME = Path(__file__).parent / "emulator_runtime"

#: What orders some threads of a block, but not all.
_PARTIAL_ORDER = re.compile(r"\b__syncwarp\b")
_SHARED_BARRIERS = re.compile(r"\bbarrier_wait\b")
_CLUSTER = re.compile(r"__cluster_dims__\((\d+)")
_LANGUAGE = (
    "-std=c++20",
    "-w",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-pie",
    "-fno-threadsafe-statics",
)
_COMPILE_OPTIONS = (
    *(*_LANGUAGE, "-fexcess-precision=16", "-ffp-contract=off"),
    # A vector access that is not aligned, an index beyond a declared array: an illegal instruction instead.
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
)
#: Calls before every access, with the line of the text that makes it.
_CHECK_OPTIONS = ("-g1", "-gdwarf-4", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")


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
        trace: a digest of all accesses, waits and values read, thread by thread: the same for kernels that do the same.
        steps: accesses of all threads together, by the seed that took most.
    """

    outputs: list[NDArray[Any]]
    needless: tuple[Synchronization, ...]
    seeds: tuple[int, ...]
    trace: int
    steps: int


@lru_cache(maxsize=1)
def emulator_available() -> str | None:
    """None where kernels can be run, otherwise the reason why not."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no g++"
    if not hasattr(os, "fork") or os.uname().sysname != "Linux":
        return "fibers and guard pages are set up for Linux only"
    if _runtime_file().exists():
        return None  # This compiler has compiled it.
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
    extents: Sequence[int] | None = None,
    most_steps: int | None = None,
    timeout_s: float = 600,
    maps: Sequence[TensorMap] = (),
    fills: bool = True,
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
        extents: elements of every argument, what follows being a guard that must be neither read nor written; then
            every element of an output has to be written, once. Where None, a kernel may write what it likes of outputs.
        most_steps: accesses of all threads together after which a kernel counts as one that never ends.
        timeout_s: after which it does in any case.
        maps: of the parameters that are tensor maps, in their order.
        fills: whether every element of an output has to be written, where there are ``extents``.

    Returns:
        The arrays at ``output_indices`` after the kernel has run, and what synchronizations were needless.

    Raises:
        EmulatorError: g++ refuses the source, or the kernel crashes, hangs or breaks a rule of CUDA.
    """
    kernel = emulated_kernel(source, entry, maps)
    if len(kernel.types) != len(arguments):
        raise EmulatorError(f"{entry}: {len(arguments)} arguments for {len(kernel.types)} parameters")
    program = _compiled(kernel, "-O2" if optimized else "-O0", checked)
    arrays = [np.ascontiguousarray(array) for array in arguments]
    launch = [*grid, 1, 1][:3] + [*block, 1, 1][:3] + [dynamic_shared_bytes]
    seen = _seen(arrays, output_indices, extents, inputs_are_constant, fills and extents is not None)
    words = [*launch, _flags(source, checked), most_steps or 0, ",".join(map(str, seeds)), *seen]
    try:
        said, results = _executed(program, words, arrays, timeout_s)
    except EmulatorError as error:
        raise EmulatorError(f"{entry}: {in_words(str(error), kernel, program, arrays)}") from error
    outputs = [results[position] for position in output_indices]
    (trace, steps), *needless = (line.split() for line in said.splitlines())
    return Emulation(
        outputs=outputs,
        needless=tuple(Synchronization(kind, int(line), kernel.line(int(line))) for kind, line in needless)
        if checked
        else (),
        seeds=tuple(seeds),
        trace=int(trace),
        steps=int(steps),
    )


def _flags(source: str, checked: bool) -> str:
    """What the emulator is to know of a text besides its arguments."""
    cluster = _CLUSTER.search(source)
    flags = "c" * checked + "p" * bool(_PARTIAL_ORDER.search(source)) + "b" * bool(_SHARED_BARRIERS.search(source))
    return flags + (cluster[1] if cluster else "") + "-"


def _seen(
    arrays: Sequence[NDArray[Any]],
    output_indices: Sequence[int],
    extents: Sequence[int] | None,
    inputs_are_constant: bool,
    is_exact: bool,
) -> Iterator[str]:
    """Of every argument its bytes, those before its guard, and whether it is an input, an output, or any."""
    for position, array in enumerate(arrays):
        yield str(array.nbytes)
        yield str(array.nbytes if extents is None else extents[position] * array.itemsize)
        if position in output_indices:
            yield "o" if is_exact else "u"
        else:
            yield "i" if inputs_are_constant else "u"


def _executed(
    program: Path, words: Sequence[object], arrays: Sequence[NDArray[Any]], timeout_s: float
) -> tuple[str, list[NDArray[Any]]]:
    """What a compiled kernel prints, and all of its arguments afterwards.

    Raises:
        EmulatorError: it fails, or runs longer than ``timeout_s``.
    """
    with tempfile.TemporaryDirectory(prefix="cuda-on-cpu-") as directory:
        data = Path(directory) / "arrays"
        data.write_bytes(b"".join(array.tobytes() for array in arrays))
        command = [str(word) for word in (program, data, *words)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise EmulatorError(f"still running after {timeout_s:g} s") from error
        if process.returncode:
            raise EmulatorError(process.stderr.strip() or f"exit status {process.returncode}")
        content = data.read_bytes()
    starts = np.cumsum([0] + [array.nbytes for array in arrays])
    return process.stdout, [
        np.frombuffer(content, array.dtype, array.size, start).reshape(array.shape).copy()
        for array, start in zip(arrays, starts, strict=False)
    ]


@lru_cache(maxsize=1)
def _program_folder() -> Path:
    """Where compiled programs are kept: until this process ends. A worker process calls nothing of ``atexit``'s."""
    folder = tempfile.mkdtemp(prefix="cuda-on-cpu-programs-")
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
    return Path(folder)


@lru_cache(maxsize=1)
def _runtime_folder() -> Path:
    """Where the compiled runtime is kept: in the user's cache, or in this process's folder where there is none."""
    try:
        folder = cache_folder("emulator")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # no home directory, or one that cannot be written
        pass
    return _program_folder()


@lru_cache(maxsize=1)
def _runtime_file() -> Path:
    """Where this compiler's object file of the runtime lies, if there is one."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=False).stdout
    texts = [
        path.read_bytes() for folder in (_HEADERS, _RUNTIME) for path in sorted(folder.iterdir()) if path.is_file()
    ]
    digest = hashlib.sha256(b"\0".join([compiler, *texts])).hexdigest()[:32]
    return _runtime_folder() / f"{digest}.o"


def _runtime() -> Path:
    """The runtime's object file, compiled where this compiler has not compiled it before."""
    built = _runtime_file()
    if not built.exists():
        _run_compiler("emulator", ["-O2", "-c", _RUNTIME / "runtime.cpp"], built)
    return built


def _read_headers(options: Sequence[str]) -> Path:
    """The folder of the headers as g++ has read them with some options: reading them takes it longer than most kernels.

    Where g++ finds that they do not fit, it reads the headers themselves.
    """
    digest = hashlib.sha256("\n".join(options).encode()).hexdigest()[:16]
    folder = _runtime_file().with_suffix("") / digest
    read = folder / f"{_HEADER.name}.gch"
    if not read.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _run_compiler("emulator", [*options, "-x", "c++-header", _HEADER], read)
    return folder


def prepare_emulator() -> None:
    """Compile what is the same for every kernel, which takes g++ some seconds, where this machine has not yet.

    Raises:
        EmulatorError: g++ refuses it.
    """
    _runtime()
    for level in ("-O0", "-O2"):
        _read_headers([*_COMPILE_OPTIONS, *_CHECK_OPTIONS, level])


def _compiled(kernel: EmulatedKernel, level: str, checked: bool) -> Path:
    """The compiled program of a kernel, from this process's cache where it was compiled before."""
    reason = emulator_available()
    if reason is not None:
        raise EmulatorError(f"{kernel.entry}: {reason}")
    text, runtime = kernel.program, _runtime()
    options = [*_COMPILE_OPTIONS, *(_CHECK_OPTIONS if checked else ()), level]
    name = hashlib.sha256("\n".join([*options, runtime.name, text]).encode()).hexdigest()[:32]
    program = _program_folder() / name
    if program.exists():
        return program
    # Other processes may be compiling the same.
    unit = program.with_suffix(f".{os.getpid()}.cpp")
    unit.write_text(text)
    made = unit.with_suffix(".o")
    try:
        _run_compiler(kernel.entry, [*options, f"-I{_read_headers(options)}", f"-I{_HEADERS}", "-c", unit], made)
        _run_compiler(kernel.entry, [*_linker_options(), "-no-pie", made, runtime], program)
    finally:
        unit.unlink()
        made.unlink(missing_ok=True)
    return program


@lru_cache(maxsize=1)
def _linker_options() -> tuple[str, ...]:
    """binutils's other linker where it is installed: it takes half of the usual one's time."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


def _run_compiler(entry: str, arguments: Sequence[str | Path], target: Path) -> None:
    """Have g++ make a file, which appears whole."""
    partial = target.with_suffix(f".{os.getpid()}.partial")
    done = subprocess.run(["g++", *_LANGUAGE, *arguments, "-o", partial], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise EmulatorError(f"{entry}: g++: {lines[0].strip() if lines else 'failed'}")
    partial.rename(target)
