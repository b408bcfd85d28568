"""Pages and JSON of ``roller inspect``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from roller.inspect.disassembly import HotLoop
from roller.inspect.inspection import Inspection
from roller.inspect.mix import CLASSES, mix_of
from roller.inspect.model import density_record
from roller.inspect.sass import INSTRUCTION_BYTES, SassFunction
from roller.text.quantities import count_text

#: Width of a bar that stands for all instructions.
BAR = 40


def json_line(inspection: Inspection) -> str:
    """Line that ``roller inspect --json`` prints."""
    return msgspec.json.encode(record_of(inspection)).decode()


def record_of(inspection: Inspection) -> dict[str, Any]:
    """A kernel as JSON data."""
    hot, model = inspection.hot, inspection.model
    return {
        "name": inspection.name,
        "entry": inspection.function.name,
        "architecture": inspection.architecture,
        "in_place_of": inspection.in_place_of,
        "registers": inspection.registers,
        "shared_bytes": inspection.shared_bytes,
        "spill_bytes": inspection.spill_bytes,
        "local_accesses": inspection.local_accesses,
        "own_registers": inspection.as_built.registers if inspection.as_built else inspection.registers,
        "own_spill_bytes": inspection.as_built.spill_bytes if inspection.as_built else inspection.spill_bytes,
        "instructions": inspection.mix.total,
        "loops": [_loop_record(inspection.function, position) for position in range(len(inspection.function.loops))],
        "hot_loop": {
            "address": hot.address,
            "depth": hot.depth,
            "instructions": hot.mix.total,
            "bytes": hot.code_bytes,
            "multiply_add_share": round(hot.mix.share("multiply-adds"), 4),
            "classes": dict(hot.mix.counts),
            "kinds": {name: dict(kinds) for name, kinds in hot.mix.kinds.items()},
        },
        "density": {
            "assumed": density_record(model.assumed) if model else None,
            "found": density_record(model.found) if model else None,
            "reason": model.reason if model else inspection.model_reason,
        },
        "banks": [
            {"tensor": use.tensor, "bytes": use.bytes, "passes": round(use.passes, 3), "least": use.least}
            for use in (model.banks if model else ())
        ],
    }


def _loop_record(function: SassFunction, position: int) -> dict[str, Any]:
    loop = function.loops[position]
    code = function.body(loop)
    address = function.instructions[function.blocks[loop.header].first].address
    return {
        "address": address,
        "depth": loop.depth,
        "instructions": len(code),
        "bytes": INSTRUCTION_BYTES * len(code),
        "multiply_adds": mix_of(code).count("multiply-adds"),
    }


def inspection_text(inspection: Inspection, *, listing: bool = False) -> str:
    """Page of a kernel; with ``listing`` the code of its hottest loop behind it."""
    parts = ["\n".join(_head(inspection)), "\n".join(_loop_lines(inspection)), "\n".join(_mix_lines(inspection.hot))]
    parts += ["\n".join(_density_lines(inspection)), "\n".join(_bank_lines(inspection))]
    if listing:
        parts.append("\n".join(_listing(inspection.hot)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(inspection: Inspection) -> Iterator[str]:
    yield f"{inspection.name}: {inspection.function.name} for {inspection.architecture}"
    if inspection.in_place_of:
        reason = f"nvdisasm does not read {inspection.in_place_of}"
        yield f"  compiled from its source for {inspection.architecture}: {reason}"
        if inspection.as_built is not None:
            registers, spilled = inspection.as_built
            yield f"  for {inspection.in_place_of} it has {registers} registers and {spilled or 'no'} bytes of spills"
    total = inspection.mix.total
    yield f"  {total} instructions, {total * INSTRUCTION_BYTES / 1000:.1f} kB of code"
    spills = "no spills"
    if inspection.spill_bytes:
        spills = f"{inspection.spill_bytes} bytes spilled per thread"
    elif inspection.local_accesses:
        spills = f"{count_text(inspection.local_accesses, 'instruction')} on local memory"
    shared = f"{inspection.shared_bytes} bytes of shared memory per block"
    yield f"  {inspection.registers} registers per thread, {shared}, {spills}"


def _loop_lines(inspection: Inspection) -> Iterator[str]:
    function = inspection.function
    if not function.loops:
        yield "No loop: what follows is the whole kernel"
        return
    yield "Loops; how often they turn is not in the code"
    yield f"  {'at':>7} {'depth':>5} {'instructions':>12} {'bytes':>7} {'multiply-adds':>13}"
    for position, loop in enumerate(function.loops):
        row = _loop_record(function, position)
        mark = "  the hottest" if loop is inspection.hot.loop else ""
        yield (
            f"  {row['address']:>#7x} {row['depth']:>5} {row['instructions']:>12} {row['bytes']:>7} "
            f"{row['multiply_adds']:>13}{mark}"
        )


def _mix_lines(hot: HotLoop) -> Iterator[str]:
    yield "The hottest loop" if hot.loop else "The kernel"
    for name in CLASSES:
        count = hot.mix.count(name)
        if count:
            share = hot.mix.share(name)
            kinds = ", ".join(f"{kind} {number}" for kind, number in hot.mix.kinds[name].items())
            bar = "█" * round(BAR * share) or "▏"
            yield f"  {name:13} {count:5} {100 * share:5.1f}%  {bar}  {kinds}"


def _density_lines(inspection: Inspection) -> Iterator[str]:
    model = inspection.model
    if model is None or model.assumed is None or model.found is None:
        yield f"No density to compare: {model.reason if model else inspection.model_reason}"
        return
    rows = (
        ("shared loads", model.assumed.shared_loads, model.found.shared_loads),
        ("fetch, addresses, loops", model.assumed.others, model.found.others),
        ("in all", model.assumed.total, model.found.total),
    )
    yield "Instructions of a step per arithmetic instruction"
    yield f"  {'':24} {'RATIONAL assumed':>16} {'found':>6}"
    for name, assumed, counted in rows:
        yield f"  {name:24} {assumed:16.3f} {counted:6.3f}"


def _bank_lines(inspection: Inspection) -> Iterator[str]:
    if inspection.model is None or not inspection.model.banks:
        return
    yield "Shared-memory banks, counted from the addresses of a warp"
    for use in inspection.model.banks:
        verdict = "no conflicts" if not use.conflicts else f"{use.conflicts:.3g} too many"
        passes = f"{use.passes:.3g} {'pass' if use.passes == 1 else 'passes'} per read"
        kinds = inspection.hot.mix.kinds.get("shared loads", {})
        is_read = f"LDS.{8 * use.bytes}" in kinds or any("LDSM" in kind for kind in kinds)
        by_groups = inspection.hot.mix.kind("HGMMA") > 0
        other = "" if is_read else "; read by the products" if by_groups else "; not so in the code"
        yield f"  {use.tensor}: {use.bytes} bytes a lane{other}, {passes}, {use.least} at least: {verdict}"


def _listing(hot: HotLoop) -> Iterator[str]:
    yield "The code of the hottest loop" if hot.loop else "The code"
    for instruction in hot.instructions:
        yield f"  /*{instruction.address:04x}*/  {instruction.text}"
