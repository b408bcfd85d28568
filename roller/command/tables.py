"""Tables for the terminal and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from codegen.bundle.manifest import json_of
from codegen.bundle.records import Bundle
from codegen.verify.result import Verification
from hal.catalog import all_devices, provenance_of
from hal.spec.device import DeviceSpec
from hal.spec.numbers import leaves
from roller.algorithms import ChainProgram
from roller.compile.pipeline import CompiledOperator
from roller.programs import SEARCH_POLICY, Program
from roller.text.quantities import sizes_text
from sokoban.schedule.patches import PatchSchedule, Schedule

#: What a lane of the device is -> whose memory a kernel is given: of a block, or for the operands that a thread packs.
_MEMORY = {"thread": "shared B", "element": "scratch B"}

#: The heading of tiles that lie in registers, likewise.
_TILE = {"thread": "thread tile", "element": "register tile"}

_CONSOLE = Console(soft_wrap=False, highlight=False)


def print_table(table: Table) -> None:
    """Print to stdout; a pipe gets the full width the table needs."""
    console = _CONSOLE if _CONSOLE.is_terminal else Console(width=200, highlight=False)
    console.print(table)


def device_list() -> Table:
    """All boards, one a line."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "board", "aliases"):
        table.add_column(column, overflow="fold")
    for column in ("units", "fp32 TFLOP/s", "DRAM GB/s", "shared KiB", "kernels"):
        table.add_column(column, justify="right")
    for device in all_devices():
        table.add_row(
            device.name,
            device.title,
            ", ".join(alias for alias in device.aliases if alias == alias.lower()),
            f"{device.unit_count} {device.unit_name}",
            f"{device.peak_flops('float32') / 1e12:.1f}",
            f"{device.dram.bandwidth_bytes_per_second / 1e9:.0f}",
            f"{device.limits.shared_bytes_per_unit / 1024:.0f}",
            device.code_generator or "none",
        )
    return table


def device_page(device: DeviceSpec) -> None:
    """One board: every number of its spec with where it comes from."""
    table = Table(
        box=None, pad_edge=False, title=f"{device.title} ({device.name}, {device.architecture})", title_justify="left"
    )
    table.add_column("field")
    table.add_column("value", justify="right")
    table.add_column("provenance", overflow="fold")
    for key, value in leaves(device):
        table.add_row(key, f"{value:g}" if isinstance(value, float) else str(value), provenance_of(device, key))
    print_table(table)
    if device.code_generator_reason:
        print_line(device.code_generator_reason)


def print_line(text: str) -> None:
    """A line as it is, without markup."""
    _CONSOLE.print(text, markup=False, soft_wrap=True)


def compiled_json(compiled: CompiledOperator, bundle: Bundle) -> str:
    """One operator as one line of JSON: the manifest's kernels plus what this run took."""
    record, directory = bundle.manifest, bundle.directory
    kernels: list[dict[str, Any]] = []
    for entry in record.kernels:
        kernel = json_of(entry)
        kernel["source"] = str(directory / entry.source)
        kernel["binary"] = str(directory / entry.binary) if entry.binary else None
        kernel["schedule"] = str(directory / entry.schedule)
        for launch in kernel.get("launches", []):
            launch |= {key: str(directory / launch[key]) for key in ("source", "binary", "schedule") if launch[key]}
        kernels.append(kernel)
    return msgspec.json.encode(
        {
            "name": record.name,
            "device": record.device,
            "construct_seconds": round(compiled.construction.seconds, 6),
            "total_seconds": round(compiled.total_seconds, 6),
            "considered": compiled.construction.considered,
            "search_seconds": round(compiled.construction.search_seconds, 6),
            "searched": compiled.construction.searched,
            "algorithm_seconds": round(compiled.construction.algorithm_seconds, 6),
            "out": str(directory),
            "kernels": kernels,
            "failures": list(compiled.failures),
        }
    ).decode()


def print_compiled(results: Sequence[tuple[CompiledOperator, Bundle]], device: DeviceSpec, seconds: float) -> None:
    """All kernels of a single operator, or the best kernel of every operator of a list."""
    table = Table(box=None, pad_edge=False)
    single = len(results) == 1
    for column in ("rank" if single else "operator", "block tile", _TILE[device.teu.lane], "step"):
        table.add_column(column, overflow="fold")
    for column in ("grid", "threads", _MEMORY[device.teu.lane], "regs", "spill", "predicted"):
        table.add_column(column, justify="right")
    for column in ("bound", "verified", "found by"):
        table.add_column(column)
    for compiled, bundle in results:
        for entry, kernel in zip(bundle.kernels, compiled.kernels, strict=True):
            if not single and entry.rank > 1:
                break
            program = kernel.program
            tiles = _tile_cells(program.main.schedule if isinstance(program, ChainProgram) else program.schedule)
            table.add_row(
                str(entry.rank) if single else bundle.name,
                *tiles,
                "x".join(str(n) for n in entry.grid if n != 1) or "1",
                "x".join(str(n) for n in entry.block if n != 1) or "1",
                str(entry.shared_bytes),
                "-" if entry.registers is None else str(entry.registers),
                "-" if entry.spill_bytes is None else str(entry.spill_bytes),
                _microseconds(entry.seconds),
                entry.bound,
                _verdict(kernel.built.verification),
                _finder(program),
            )
    print_table(table)
    kernels = sum(len(compiled.kernels) for compiled, _ in results)
    directory = results[0][1].directory
    where = directory if single else directory.parent
    constructed = sum(compiled.construction.seconds for compiled, _ in results)
    searched = sum(compiled.construction.search_seconds for compiled, _ in results)
    finding = [f"{1e3 * constructed:.1f} ms of it construction"] if constructed else []
    finding += [f"{1e3 * searched:.0f} ms{' of it' if not finding else ''} search"] if searched else []
    weighed = sum(compiled.construction.algorithm_seconds for compiled, _ in results)
    finding += [f"{1e3 * weighed:.1f} ms algorithms"] if weighed >= 1e-3 else []
    print_line(f"{kernels} kernels for {device.title} in {seconds:.1f} s ({', '.join(finding)}), written to {where}")
    if device.code_generator_reason:
        print_line(device.code_generator_reason)


def _tile_cells(schedule: Schedule) -> tuple[str, str, str]:
    """Tile of a block, of a thread, and of a step."""
    if isinstance(schedule, PatchSchedule):
        return f"{schedule.threads} patches", "a patch", ""
    return (
        sizes_text(schedule.block), sizes_text(tuple(schedule.register_tile.items())), sizes_text(schedule.step)
    )  # fmt: skip


def _finder(program: Program) -> str:
    if isinstance(program, ChainProgram):
        return f"{program.policy}: {len(program.parts)} kernels, the longest shown"
    return "search" if program.policy == SEARCH_POLICY else "construction"


def _verdict(check: Verification | None) -> str:
    if check is None:
        return "-"
    if check.passed:
        return f"yes, {check.relative_error:.0e}" if check.relative_error else "yes, exact"
    return "NO" if check.relative_error is not None else "not run"


def verified_json(name: str, device: DeviceSpec, checks: Sequence[Verification]) -> str:
    """The checks of one operator as one line of JSON."""
    return msgspec.json.encode({"name": name, "device": device.name, "checks": checks}).decode()


def print_verified(results: Sequence[tuple[str, Sequence[Verification]]]) -> None:
    """Every check that did not pass, and the count of those that did."""
    passed = sum(check.passed for _, checks in results for check in checks)
    total = sum(len(checks) for _, checks in results)
    worst = max((check.relative_error or 0.0 for _, checks in results for check in checks if check.passed), default=0.0)
    for name, checks in results:
        for rank, check in enumerate(checks, start=1):
            if not check.passed:
                print_line(f"{name} rank {rank}: {check.method}: {check.reason}")
    methods = sorted({check.method for _, checks in results for check in checks})
    print_line(
        f"{passed} of {total} schedules of {len(results)} operators agree with the reference "
        f"(largest relative error {worst:.1e}; run by {'; '.join(methods)})"
    )


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
