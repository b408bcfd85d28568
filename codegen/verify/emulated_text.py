"""Texts of CUDA kernels as the emulator compiles them, and its messages in the words of such a text."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from codegen.launch_shape import SIZE_PARAMETER
from codegen.tensor_map import MAP_ITEM_BYTES, TensorMap

#: The header that stands in for CUDA's.
HEADER_NAME = "cuda_on_cpu.h"

#: What the text is called in messages.
_TEXT_NAME = "kernel.cu"

#: Marks of places in the machine code in the runtime's messages.
_PLACE = re.compile(r"@p([0-9a-f]+)")
_CUDA_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?:cuda[\w/]*|mma)(?:\.h)?>.*$", re.MULTILINE)
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w[\w ]*?)\s+(\w+)\[\];")


class EmulatorError(RuntimeError):
    """A kernel that does not compile for the CPU, or that did something wrong while it ran."""


@dataclass(frozen=True)
class EmulatedKernel:
    """The text of a kernel, as it is compiled for the CPU.

    Attributes:
        source: CUDA C++ text.
        entry: name of the ``__global__`` function in it.
        types: of its parameters.
        names: of its parameters.
        dynamic: name of its dynamic shared memory, empty where it has none.
        maps: the tensor maps among its parameters, by position.
    """

    source: str
    entry: str
    types: tuple[str, ...]
    names: tuple[str, ...]
    dynamic: str
    maps: Mapping[int, TensorMap]

    @property
    def program(self) -> str:
        """The C++ program: the headers, the text less CUDA's own headers, and the call of the kernel."""
        text = _CUDA_INCLUDE.sub("", self.source)
        text = _DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)emulator_dynamic_shared;", text)
        arguments = [
            _map_argument(position, self.maps[position], self.names)
            if position in self.maps
            else f"*(int*)arguments[{position}]"
            if kind == "int"
            else f"({kind})arguments[{position}]"
            for position, kind in enumerate(self.types)
        ]
        return "\n".join(
            [
                f'#include "{HEADER_NAME}"',
                f'#line 1 "{_TEXT_NAME}"',
                text,
                '#line 1 "call.cu"',
                f'extern "C" void emulator_call(void** arguments) {{ {self.entry}({", ".join(arguments)}); }}',
                "",
            ]
        )

    def line(self, number: int) -> str:
        """A line of the text, from 1."""
        lines = self.source.splitlines()
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def _map_argument(position: int, tensor_map: TensorMap, names: Sequence[str]) -> str:
    """The argument of a parameter that is a tensor map, both shapes from the innermost dimension on; the parameters'
    ``names`` say where the size is that is known at launch."""
    ends: list[object] = list(tensor_map.shape)
    if tensor_map.launch_elements:
        ends[0] = f"*(int*)arguments[{names.index(SIZE_PARAMETER)}] * {tensor_map.launch_elements}"
    shapes = (", ".join(map(str, reversed(shape))) for shape in (ends, tensor_map.box))
    described = ", ".join(f"{{{shape}}}" for shape in shapes)
    start = f"(const unsigned char*)arguments[{position}]"
    rounds = "true" if tensor_map.dtype == "tfloat32" else "false"
    return f"TensorMap{{{start}, {MAP_ITEM_BYTES[tensor_map.dtype]}, {len(tensor_map.box)}, {described}, {rounds}}}"


def emulated_kernel(source: str, entry: str, maps: Sequence[TensorMap]) -> EmulatedKernel:
    """The kernel of a CUDA text.

    Raises:
        EmulatorError: there is none of this name, or a parameter is neither a pointer nor one of ``maps``, nor the size
            that is known at launch.
    """
    signature = re.search(rf"\b{re.escape(entry)}\s*\(([^)]*)\)", source)
    if signature is None:
        raise EmulatorError(f"{entry}: the source has no such kernel")
    kinds, names = [], []
    by_position: dict[int, TensorMap] = {}
    for position, parameter in enumerate(signature.group(1).split(",")):
        if "__grid_constant__" in parameter:
            if len(by_position) == len(maps):
                raise EmulatorError(f"{entry}: parameter {parameter.strip()} has no tensor map")
            by_position[position] = maps[len(by_position)]
            kinds.append("const void*")
            names.append(maps[len(by_position) - 1].tensor)
            continue
        if parameter.split() == ["int", SIZE_PARAMETER]:
            kinds.append("int")
            names.append(SIZE_PARAMETER)
            continue
        kind, star, name = parameter.replace("__restrict__", "").rpartition("*")
        if not star:
            raise EmulatorError(f"{entry}: parameter {parameter.strip()} is no pointer")
        kinds.append(kind.strip() + "*")
        names.append(name.strip())
    dynamic = _DYNAMIC_SHARED.search(source)
    return EmulatedKernel(source, entry, tuple(kinds), tuple(names), dynamic.group(2) if dynamic else "", by_position)


def in_words(reason: str, kernel: EmulatedKernel, program: Path, arrays: Sequence[NDArray[Any]]) -> str:
    """A message of the runtime with names in place of its marks (``emulator_runtime/report.h``)."""
    lines = _lines_of(program, set(_PLACE.findall(reason)))

    def line(number: int | None) -> str:
        return f'{_TEXT_NAME}:{number} "{kernel.line(number)}"' if number else "a place without a line"

    def argument(match: re.Match[str]) -> str:
        name, size = kernel.names[int(match.group(1))], arrays[int(match.group(1))].itemsize
        return f"{name}[{int(match.group(2)) // size}]" if match.group(2) else name

    reason = _PLACE.sub(lambda match: line(lines.get(match.group(1))), reason)
    reason = re.sub(r"@l(\d+)", lambda match: line(int(match.group(1))), reason)
    reason = re.sub(r"@a(\d+)(?:\+(\d+))?", argument, reason)
    reason = re.sub(r"@d\+(\d+)", rf"shared {kernel.dynamic}+\1", reason)
    return re.sub(r"@s([0-9a-f]+)", lambda match: _shared_name(program, int(match.group(1), 16)), reason)


def _lines_of(program: Path, addresses: set[str]) -> Mapping[str, int]:
    """Lines of the kernel's text by the addresses that calls of its machine code return to: of the outermost function
    where functions of the text are inlined in each other."""
    tool = shutil.which("addr2line")
    if tool is None or not addresses:
        return {}
    ordered = sorted(addresses)
    calls = [f"{int(address, 16) - 1:x}" for address in ordered]
    process = subprocess.run([tool, "-a", "-i", "-e", program, *calls], capture_output=True, text=True, check=False)
    lines: dict[str, int] = {}
    for address, frames in zip(ordered, re.split(r"^0x.*$", process.stdout, flags=re.MULTILINE)[1:], strict=False):
        lines_of_text = re.findall(rf"{re.escape(_TEXT_NAME)}:(\d+)", frames)
        if lines_of_text:
            lines[address] = int(lines_of_text[-1])
    return lines


def _shared_name(program: Path, address: int) -> str:
    """``shared s+128`` for a byte of a static array."""
    tool = shutil.which("nm")
    symbols = []
    if tool is not None:
        process = subprocess.run([tool, "-C", program], capture_output=True, text=True, check=False)
        symbols = re.findall(r"^([0-9a-f]+) [dDbB] (?:.*::)?(\w+)$", process.stdout, re.MULTILINE)
    start, name = max(((int(start, 16), name) for start, name in symbols if int(start, 16) <= address), default=(0, ""))
    return f"shared {name}+{address - start}" if name else "shared memory"
