"""A cubin taken apart without a GPU: NVIDIA's disassembler, the hottest loop, what it consists of.

The disassembler is the wheel ``nvidia-cuda-nvdisasm`` (``pip install 'roller[inspect]'``), or an ``nvdisasm`` on the
path. Neither TVM nor sympy is imported.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from hal.support.errors import InputError
from roller.inspect.mix import Mix, mix_of
from roller.inspect.sass import INSTRUCTION_BYTES, Instruction, Loop, SassFunction, architecture_of, parse_sass

#: The wheel that brings the disassembler.
PACKAGE = "nvidia-cuda-nvdisasm"

#: Seconds after which the disassembler is taken to hang; a large kernel takes a tenth of one.
TIMEOUT_SECONDS = 120

#: How often a loop is taken to turn for every turn of the loop around it when the hottest one is looked for: the text
#: does not say, and any number from two on gives our kernels' inner loops the same ranking.
NOMINAL_TURNS = 8

#: Multiply-adds that a matrix instruction counts as in that search.
MATRIX_WEIGHT = 32


@dataclass(frozen=True, kw_only=True)
class HotLoop:
    """The piece of a kernel that decides its speed.

    Attributes:
        loop: the loop; None where the kernel has none, and the piece is all of it.
        depth: loops around its instructions, itself included.
        address: of its first instruction, bytes from the start of the function.
        instructions: in order of address, those of inner loops too.
        around: instructions of the loop around it that are in no inner loop; none at depth 1.
        mix: of ``instructions``.
    """

    loop: Loop | None
    depth: int
    address: int
    instructions: tuple[Instruction, ...]
    around: tuple[Instruction, ...]
    mix: Mix

    @property
    def code_bytes(self) -> int:
        """Bytes of a turn in the instruction caches."""
        return INSTRUCTION_BYTES * len(self.instructions)


@dataclass(frozen=True, eq=False)
class Disassembly:
    """A disassembled image.

    Attributes:
        architecture: ``"sm_80"``.
        functions: its kernels.
    """

    architecture: str
    functions: tuple[SassFunction, ...]


# The disassembler


@lru_cache(maxsize=1)
def nvdisasm_path() -> Path | None:
    """The disassembler: the wheel's, else one on the path; None where there is neither."""
    try:
        for file in distribution(PACKAGE).files or ():
            path = Path(str(file.locate()))
            if path.name in ("nvdisasm", "nvdisasm.exe") and path.is_file():
                return path
    except PackageNotFoundError:
        pass
    installed = shutil.which("nvdisasm")
    return Path(installed) if installed else None


@lru_cache(maxsize=1)
def readable_architectures() -> tuple[int, ...]:
    """Compute capabilities that the disassembler reads, as ``10 * major + minor``, ascending.

    Raises:
        InputError: there is no disassembler.
    """
    text = _nvdisasm(["--help"]).stdout
    return tuple(sorted({int(number) for number in re.findall(r"'SM(\d+)[af]?'", text)}))


def readable_architecture(architecture: str) -> str:
    """``architecture``, or where the disassembler does not read it the next newer one that it does: ``sm_70`` ->
    ``sm_75``.

    Raises:
        InputError: there is no disassembler, or nothing that new.
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", architecture)
    if match is None:
        raise InputError("--arch", f"{architecture!r} is not a CUDA architecture", "write it like sm_80")
    number, readable = int(match.group(1)), readable_architectures()
    if number in readable:
        return architecture
    newer = [other for other in readable if other > number]
    if not newer:
        raise InputError("--arch", f"nvdisasm reads up to sm_{readable[-1]}, not {architecture}", "install a newer one")
    return f"sm_{newer[0]}"


def disassemble(cubin: bytes, name: str = "the cubin") -> Disassembly:
    """Machine code -> its kernels.

    Raises:
        InputError: there is no disassembler, or it does not read ``name``.
    """
    with tempfile.TemporaryDirectory(prefix="roller-inspect-") as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        process = _nvdisasm([str(path)])
    functions = tuple(parse_sass(process.stdout))
    if process.returncode or not functions:
        lines = [line for line in process.stderr.splitlines() if "warning" not in line.lower()]
        reason = " ".join(lines[0].split()).removeprefix("nvdisasm fatal : ") if lines else "it holds no machine code"
        raise InputError(name, f"nvdisasm cannot read it: {reason}", "give the kernel's source (.cu) instead")
    number = architecture_of(process.stdout)
    return Disassembly("" if number is None else f"sm_{number}", functions)


def _nvdisasm(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    path = nvdisasm_path()
    if path is None:
        raise InputError("nvdisasm", "is not installed", f"pip install 'roller[inspect]' (the wheel {PACKAGE})")
    try:
        return subprocess.run(
            [str(path), *arguments], capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError("nvdisasm", f"cannot be run: {error}", f"install the wheel {PACKAGE} again") from error


# The hottest loop


def hottest_loop(function: SassFunction) -> HotLoop:
    """The loop with most of a kernel's arithmetic, deeper ones first; the whole kernel where it has no loop.

    A loop's own multiply-adds count, and :data:`NOMINAL_TURNS` times as much for every loop around them. Where no loop
    has any, other arithmetic does, and then whatever a loop does.
    """
    if not function.loops:
        code = function.reachable
        return HotLoop(
            loop=None, depth=0, address=code[0].address if code else 0, instructions=code, around=(), mix=mix_of(code)
        )
    mixes = [mix_of(function.own(loop)) for loop in function.loops]
    for measure in (_multiply_adds, _arithmetic, _instructions):
        heats = [measure(mix) * NOMINAL_TURNS**loop.depth for mix, loop in zip(mixes, function.loops, strict=True)]
        if any(heats):
            break
    hottest = function.loops[heats.index(max(heats))]
    code = function.body(hottest)
    around = () if hottest.parent is None else function.own(function.loops[hottest.parent])
    address = function.instructions[function.blocks[hottest.header].first].address
    return HotLoop(
        loop=hottest, depth=hottest.depth, address=address, instructions=code, around=around, mix=mix_of(code)
    )


def _multiply_adds(mix: Mix) -> int:
    return mix.count("multiply-adds") + (MATRIX_WEIGHT - 1) * mix.matrix


def _arithmetic(mix: Mix) -> int:
    return mix.count("arithmetic")


def _instructions(mix: Mix) -> int:
    return mix.total


__all__ = [
    "Disassembly",
    "HotLoop",
    "disassemble",
    "hottest_loop",
    "nvdisasm_path",
    "readable_architecture",
    "readable_architectures",
]
