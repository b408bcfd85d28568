"""Whole answers of ``roller compile`` kept: the same file for the same board with the same options is compiled once.

Nothing here imports what finds or builds programs, nor NumPy, so that a known answer is given at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from codegen.compile.toolchain import kernel_store, toolchain
from hal.spec.device import DeviceSpec
from hal.support.atomic import staged_directory
from hal.support.store import decoded, digest
from hal.support.tables import new_table, print_line, print_table

#: Bytes of an answer that are worth keeping once more; the kernels of longer ones are kept one by one alone.
LARGEST_ANSWER_BYTES = 32 << 20

#: What a lane of the device is -> whose memory a kernel is given: of a block, or for the operands that a thread packs.
_MEMORY = {"thread": "shared B", "element": "scratch B"}

#: The heading of tiles that lie in registers, likewise.
_TILE = {"thread": "thread tile", "element": "register tile"}


@dataclass(frozen=True, kw_only=True)
class KnownOperator:
    """An operator's bundle as it was compiled before.

    Attributes:
        name: the operator's, and its folder's.
        files: name -> contents of every file of the bundle.
        rows: cells of the table of kernels, best kernel first.
        record: what ``--json`` prints; paths are names of files.
    """

    name: str
    files: dict[str, bytes]
    rows: tuple[tuple[str, ...], ...]
    record: dict[str, Any]

    def write(self, out: Path) -> Path:
        """Write ``out/<name>/`` whole or not at all; returns the folder."""
        out.mkdir(parents=True, exist_ok=True)
        with staged_directory(out / self.name) as directory:
            for name, data in self.files.items():
                (directory / name).write_bytes(data)
        return out / self.name


def answer_key(file: Path, device: DeviceSpec, *options: object) -> str:
    """The key of an answer: the contents of the file of operators, the board, and every option that changes it."""
    return digest(toolchain(), "answer", file.read_bytes(), repr(device), repr(options))


def stored_answer(key: str) -> list[KnownOperator] | None:
    """The answer of that key; None where it is not known."""
    operators: list[KnownOperator] | None = decoded(kernel_store().read(key), list[KnownOperator])
    return operators


def keep_answer(key: str, operators: Sequence[KnownOperator]) -> None:
    """Keep an answer, unless it is empty, and the store within its limit."""
    total = sum(len(data) for operator in operators for data in operator.files.values())
    if operators and total <= LARGEST_ANSWER_BYTES:
        kernel_store().write(key, msgspec.msgpack.encode(operators))
    kernel_store().trim()


def record_json(record: Mapping[str, Any], directory: Path) -> str:
    """An operator as one line of JSON, its files by their paths in ``directory``."""
    kernels = []
    for entry in record["kernels"]:
        launches = [_placed(launch, directory) for launch in entry.get("launches", [])]
        kernels.append(_placed(entry, directory) | ({"launches": launches} if launches else {}))
    return msgspec.json.encode({**record, "out": str(directory), "kernels": kernels}).decode()


def _placed(record: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """A kernel's record with paths instead of names."""
    files = {key: str(directory / record[key]) for key in ("source", "binary", "schedule") if record.get(key)}
    return {**record, **files}


def show_stored(
    operators: Sequence[KnownOperator], device: DeviceSpec, out: Path, start: float, *, as_json: bool
) -> None:
    """Write the bundles of a known answer and tell of it; ``start`` is when the command began."""
    for operator in operators:
        began = time.perf_counter()
        directory = operator.write(out)
        if as_json:
            nothing = dict.fromkeys(("construct_seconds", "search_seconds", "algorithm_seconds"), 0.0)
            total = {"total_seconds": round(time.perf_counter() - began, 6)}
            print(record_json({**operator.record, **nothing, **total}, directory))
    if not as_json:
        seconds = time.perf_counter() - start
        rows = [(operator.name, operator.rows) for operator in operators]
        launch_size = operators[0].record.get("launch_size")
        if len(operators) == 1 and launch_size is not None:
            print_ranges(launch_size)
        print_kernels(rows, device, f"in {seconds:.1f} s (known from an earlier run)", out / operators[0].name)


def print_ranges(launch_size: Mapping[str, Any]) -> None:
    """Sizes that are known at launch and the kernel that is launched for each, by what a manifest says of them."""
    axis = launch_size["axis"]
    table = new_table((axis, "kernel", "predicted"), (f"best for the largest {axis} alone",))
    for each in launch_size["ranges"]:
        sizes = str(each["first"]) if each["first"] == each["last"] else f"{each['first']} to {each['last']}"
        times = (f"{each[key] * 1e6:.1f} µs" for key in ("seconds", "best_seconds"))
        table.add_row(sizes, str(each["rank"]), *times)
    print_table(table)
    if launch_size["multiple"] > 1:
        print_line(f"{axis} is a multiple of {launch_size['multiple']}")


def print_kernels(
    operators: Sequence[tuple[str, Sequence[Sequence[str]]]], device: DeviceSpec, took: str, first: Path
) -> None:
    """The table of kernels, and the line under it.

    Args:
        operators: the name of every operator and the cells of its kernels, best first.
        took: how long it took, and what of it.
        first: the folder of the first bundle.
    """
    is_single = len(operators) == 1
    tile, memory = _TILE[device.teu.lane], _MEMORY[device.teu.lane]
    table = new_table(
        ("rank" if is_single else "operator", "block tile", tile, "step"),
        ("grid", "threads", memory, "regs", "spill", "predicted"),
        ("bound", "verified", "found by"),
    )
    for name, rows in operators:
        for rank, cells in enumerate(rows if is_single else rows[:1], start=1):
            table.add_row(str(rank) if is_single else name, *cells)
    print_table(table, drop=("step", "grid", "threads", memory, "spill", "regs", tile))
    count = sum(len(rows) for _, rows in operators)
    print_line(f"{count} kernels for {device.title} {took}, written to {first if is_single else first.parent}")
    if device.code_generator_reason:
        print_line(device.code_generator_reason)
