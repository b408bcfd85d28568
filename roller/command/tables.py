"""Tables for the terminal and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from codegen.bundle.manifest import json_of
from codegen.bundle.records import Bundle, KernelRecord
from codegen.verify.result import Verification
from hal.catalog import all_devices, provenance_of
from hal.node_catalog import all_nodes
from hal.spec.device import DeviceSpec
from hal.spec.node import NodeSpec, node_leaves
from hal.spec.numbers import leaves, source_of
from hal.support.tables import new_table, print_line, print_table
from roller.algorithms import DIRECT
from roller.command.known import KnownOperator, print_kernels, print_ranges, record_json
from roller.compile.pipeline import CompiledOperator
from roller.compile.ranked import RankedKernel
from roller.construct.program import Program
from roller.programs import finder_of

#: Columns that a narrow terminal does without, the least important first.
LESS_OF_DEVICES = ("shared KiB", "aliases", "kernels", "fp32 TFLOP/s", "units")
LESS_OF_NODES = ("step µs", "joined by", "GB/s a board", "links")


def device_list() -> Table:
    """All boards, one a line."""
    table = new_table(
        ("name", "board", "aliases"), ("units", "fp32 TFLOP/s", "16-bit TFLOP/s", "DRAM GB/s", "shared KiB", "kernels")
    )
    for device in all_devices():
        table.add_row(
            device.name,
            device.title,
            ", ".join(alias for alias in device.aliases if alias == alias.lower()),
            f"{device.unit_count} {device.unit_name}",
            f"{device.peak_flops('float32') / 1e12:.1f}",
            _matrix_rate(device),
            f"{device.dram.bandwidth_bytes_per_second / 1e9:.0f}",
            f"{device.limits.shared_bytes_per_unit / 1024:.0f}",
            device.code_generator or "none",
        )
    return table


def _matrix_rate(device: DeviceSpec) -> str:
    """Peak TFLOP/s for 16-bit floats and the instruction that reaches it: ``989 wgmma``; ``-`` where there is none."""
    rates = device.best_matrix_instruction("bfloat16") or device.best_matrix_instruction("float16")
    return "-" if rates is None else f"{rates.peak_flops / 1e12:.0f} {rates.name}"


def device_page(device: DeviceSpec) -> None:
    """One board: every number of its spec with where it comes from."""
    rows = [(key, value, provenance_of(device, key)) for key, value in leaves(device)]
    print_table(_numbers(f"{device.title} ({device.name}, {device.architecture})", rows))
    if device.code_generator_reason:
        print_line(device.code_generator_reason)


def node_list() -> Table:
    """All nodes, one a line."""
    table = new_table(("node", "boards", "links", "joined by"), ("GB/s a board", "bus GB/s", "step µs"), ("network",))
    for node in all_nodes():
        link, network = node.link, node.network
        joined = f"{link.topology} that reduces" if link.reduces else link.topology
        table.add_row(
            node.name,
            f"{node.boards} {' or '.join(node.devices)}",
            f"{link.count} {'lanes of PCIe' if link.kind == 'pcie' else 'NVLink'} {link.generation}",
            joined,
            f"{node.peak_bytes_per_second / 1e9:.0f}",
            f"{node.collectives.bus_bytes_per_second / 1e9:.0f}",
            f"{node.collectives.step_seconds * 1e6:.2f}",
            f"{network.title}, {network.bandwidth_bytes_per_second / 1e9:g} GB/s a board" if network else "none",
        )
    return table


def node_page(node: NodeSpec) -> None:
    """One node: every number of its spec with where it comes from."""
    rows = [(key, value, source_of(node.provenance, key) or "") for key, value in node_leaves(node)]
    print_table(_numbers(f"{node.title} ({node.name}: {', '.join(node.devices)})", rows))


def _numbers(title: str, rows: Sequence[tuple[str, int | float, str]]) -> Table:
    """Numbers of a spec by their key paths, with where they come from."""
    table = new_table(("field",), ("value",), ("provenance",), title=title)
    for key, value, source in rows:
        table.add_row(key, f"{value:g}" if isinstance(value, float) else str(value), source)
    return table


def compiled_json(compiled: CompiledOperator, bundle: Bundle) -> str:
    """One operator as one line of JSON: the manifest's kernels plus what this run took."""
    return record_json(_record(compiled, bundle), bundle.directory)


def _record(compiled: CompiledOperator, bundle: Bundle) -> dict[str, Any]:
    """Record that :func:`compiled_json` prints, files by their names in the bundle."""
    record = bundle.manifest
    return {
        "name": record.name,
        "device": record.device,
        "construct_seconds": round(compiled.programs.construct_seconds, 6),
        "total_seconds": round(compiled.total_seconds, 6),
        "considered": compiled.programs.constructed_count,
        "search_seconds": round(compiled.programs.search_seconds, 6),
        "searched": compiled.programs.searched_count,
        "algorithm_seconds": round(compiled.programs.algorithm_seconds, 6),
        "out": "",
        "kernels": [{"binary": None} | json_of(entry) for entry in record.kernels],
        "failures": list(compiled.failures),
        "struck_out": _struck_out(compiled),
        **({} if record.launch_size is None else {"launch_size": json_of(record.launch_size)}),
    }


def refused_json(compiled: CompiledOperator, device: DeviceSpec) -> str:
    """An operator without kernels as one line of JSON."""
    facts = {
        "name": compiled.expr.name, "device": device.name, "error": compiled.error, "kernels": [],
        "failures": list(compiled.failures), "struck_out": _struck_out(compiled),
    }  # fmt: skip
    return msgspec.json.encode(facts).decode()


def _struck_out(compiled: CompiledOperator) -> list[dict[str, Any]]:
    """The kernels that failed their verification."""
    return [
        {"policy": each.program.policy, "block": dict(getattr(each.program.main.schedule, "block", ())),
         "engine": each.verification.engine, "reason": each.verification.reason}
        for each in compiled.struck_out
    ]  # fmt: skip


def struck_out_lines(results: Sequence[CompiledOperator]) -> list[str]:
    """A line per kernel that failed its verification, of operators that others compute."""
    return [
        f"{compiled.expr.name}: struck out {each.program.main.schedule.cells[0]} ({each.program.policy}): "
        f"{each.verification.method}: {each.verification.reason}"
        for compiled in results
        for each in compiled.struck_out
    ]


def print_compiled(results: Sequence[tuple[CompiledOperator, Bundle]], device: DeviceSpec, seconds: float) -> None:
    """All kernels of a single operator, or the best kernel of every operator of a list."""
    rows = [(bundle.name, kernel_rows(compiled, bundle)) for compiled, bundle in results]
    counts = ", ".join(_finding([compiled for compiled, _ in results]))
    launch_size = results[0][1].manifest.launch_size
    if len(results) == 1 and launch_size is not None:
        print_ranges(json_of(launch_size))
    print_kernels(rows, device, f"in {seconds:.1f} s ({counts})", results[0][1].directory)


def kernel_rows(compiled: CompiledOperator, bundle: Bundle) -> tuple[tuple[str, ...], ...]:
    """The cells of every kernel of an operator, best first, for :func:`roller.command.known.print_kernels`."""
    pairs = zip(bundle.kernels, compiled.kernels, strict=True)
    return tuple(_kernel_cells(entry, kernel) for entry, kernel in pairs)


def stored_operator(compiled: CompiledOperator, bundle: Bundle) -> KnownOperator:
    """A compiled operator as it is kept for the next time."""
    return KnownOperator(
        name=bundle.name,
        files={path.name: path.read_bytes() for path in sorted(bundle.directory.iterdir())},
        rows=kernel_rows(compiled, bundle),
        record=_record(compiled, bundle),
    )


def is_lasting(compiled: CompiledOperator, verify: int) -> bool:
    """True if the next run would come to the same: everything was built, and every check that was asked for did run."""
    count = verify if compiled.launch_size is None or not verify else len(compiled.kernels)
    checks = [kernel.built.verification for kernel in compiled.kernels[:count]]
    is_complete = not compiled.failures and not compiled.struck_out
    return is_complete and all(check is not None and check.passed for check in checks)


def _kernel_cells(entry: KernelRecord, kernel: RankedKernel) -> tuple[str, ...]:
    """A kernel's tiles, launch, resources, time, and who found it."""
    return (
        *kernel.program.main.schedule.cells,
        _extents(entry.grid),
        _extents(entry.block),
        str(entry.shared_bytes),
        _count_cell(entry.registers),
        _count_cell(entry.spill_bytes),
        _microseconds(entry.seconds),
        entry.bound,
        _verdict(kernel.built.verification),
        _finder(kernel.program),
    )


def _extents(extents: Sequence[int]) -> str:
    """``80x2`` of a launch, without its dimensions of one."""
    return "x".join(str(extent) for extent in extents if extent != 1) or "1"


def _count_cell(count: int | None) -> str:
    return "-" if count is None else str(count)


def _finding(operators: Sequence[CompiledOperator]) -> list[str]:
    """The times that looking for programs took: ``3.1 ms of it construction``, ``210 ms search``."""
    constructed = sum(compiled.programs.construct_seconds for compiled in operators)
    searched = sum(compiled.programs.search_seconds for compiled in operators)
    composed = sum(compiled.programs.algorithm_seconds for compiled in operators)
    shares = [f"{1e3 * constructed:.1f} ms of it construction"] if constructed else []
    if searched:
        shares.append(f"{1e3 * searched:.0f} ms{'' if shares else ' of it'} search")
    if composed >= 1e-3:
        shares.append(f"{1e3 * composed:.1f} ms algorithms")
    return shares


def _finder(program: Program) -> str:
    """Who found a program, or how it was composed."""
    if len(program.parts) > 1:
        return f"{program.policy}: longest of {len(program.parts)}"
    return finder_of(program.policy) if program.algorithm == DIRECT else program.algorithm


def _verdict(check: Verification | None) -> str:
    if check is None or not check.passed:
        return "unverified"
    return f"yes, {check.relative_error:.0e}" if check.relative_error else "yes, exact"


def verified_json(name: str, device: DeviceSpec, checks: Sequence[Verification]) -> str:
    """The checks of one operator as one line of JSON."""
    return msgspec.json.encode({"name": name, "device": device.name, "checks": checks}).decode()


def print_verified(results: Sequence[tuple[str, Sequence[Verification]]]) -> None:
    """Every check that did not pass, what kernels wait for needlessly, and the count of checks that passed."""
    checks = [check for _, checked in results for check in checked]
    for name, checked in results:
        for rank, check in enumerate(checked, start=1):
            if not check.passed:
                print_line(f"{name} rank {rank}: {check.method}: {check.reason}")
            for place in check.needless:
                print_line(f"{name} rank {rank}: orders nothing: {place}")
    worst = max((check.relative_error or 0.0 for check in checks if check.passed), default=0.0)
    methods = sorted({check.method for check in checks})
    orders = max((len(check.seeds) for check in checks), default=0)
    how = "; ".join(methods) + (f" in {orders} orders of threads" if orders else "")
    passed = sum(check.passed for check in checks)
    print_line(
        f"{passed} of {len(checks)} schedules of {len(results)} operators agree with the reference "
        f"(largest relative error {worst:.1e}; run by {how})"
    )


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
