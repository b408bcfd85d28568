"""Which productions of the grammar met which lowering, and which lowering operators took on every device.

A pair that was never met though it could be is a failure of the generator. Which could be is said here, by the form
that a lowering takes: whatever is not excluded has to be met.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bench.fuzz.log import Record
from bench.fuzz.productions import (
    ALL,
    GATHERED,
    INSIDE,
    OPTIONS,
    OUTSIDE,
    PLACED,
    POSITIONS,
    REDUCTIONS,
    SCAN_OPTIONS,
    SCANNED,
)
from sokoban.language.functions import FUNCTIONS

#: Element types of inputs, and what results are stored as.
_ANY_FLOAT = ("reads float16", "reads bfloat16", "reads float32")
_ANY_NUMBER = (*_ANY_FLOAT, "reads float64", "reads int8", "reads int32")
_RESULTS = ("writes float16", "writes bfloat16", "writes float32")

#: What indices of a product's operands may be; those of images move with the steps of a filter.
_OPERANDS = ("mul", "plain", "transposed", "broadcast", "offset", "strided", "window", "pad zero")

#: What indices of a row's columns cannot be where the row is cut into slices.
_MOVED = ("strided", "offset", "reversed", "window", "diagonal", "pad zero", "pad number")

_INFINITE = "pad infinity"
_OUTSIDE = frozenset(row for row in ALL if row.startswith(OUTSIDE) and not row.endswith(_INFINITE))
_INSIDE = frozenset(row for row in ALL if row.startswith(INSIDE) and not row.endswith(_INFINITE))
_BODIES = _INSIDE | frozenset(REDUCTIONS)
_PRODUCTS = frozenset({"sum of a reduction", *(f"{INSIDE} {name}" for name in _OPERANDS)})
_ATTENTION = frozenset(OPTIONS)
#: Functions between the products are inside the second one; neither they nor the last reads beyond a tensor.
_PAIRS = frozenset(
    {"sum of a reduction"}
    | {f"{place} {name}" for place in (INSIDE, OUTSIDE) for name in (*FUNCTIONS, "plain", "broadcast")}
    | {f"{INSIDE} {name}" for name in POSITIONS}
    | {f"{OUTSIDE} {name}" for name in POSITIONS[:2]}
)


#: What is read at places that are read lies in no tile: of a reduction's body nothing is staged then.
_GATHERED_OUTSIDE = frozenset({f"{OUTSIDE} {GATHERED}"})
_GATHERED = _GATHERED_OUTSIDE | {f"{INSIDE} {GATHERED}"}


def _without(rows: frozenset[str], *names: str) -> frozenset[str]:
    return frozenset(row for row in rows if not any(row.endswith(f" {name}") for name in names))


#: Lowering or algorithm -> the productions that can reach it.
POSSIBLE: Mapping[str, frozenset[str]] = {
    "pointwise": _OUTSIDE | _GATHERED_OUTSIDE | {*_ANY_NUMBER, *_RESULTS},
    "rows": _BODIES | _OUTSIDE | _GATHERED | {*_ANY_NUMBER, *_RESULTS},
    "staged": _BODIES | _OUTSIDE | _GATHERED_OUTSIDE | {*_ANY_NUMBER, *_RESULTS},
    "tiles": _BODIES | _OUTSIDE | _GATHERED | {*_ANY_NUMBER, *_RESULTS},
    # Windows walk forwards.
    "windows": _without(_BODIES, "reversed") | _OUTSIDE | {*_ANY_NUMBER, *_RESULTS},
    # A product of two loads.
    "wmma": _PRODUCTS | _OUTSIDE | {"reads float16", *_RESULTS[::2]},
    "mma": _PRODUCTS | _OUTSIDE | _GATHERED_OUTSIDE
    | {*_ANY_FLOAT, "reads int8", "reads float8_e4m3fn", "reads float8_e5m2", *_RESULTS, "writes int32"},
    # Bulk copies and bulk stores pad nothing.
    "bulk": _without(_PRODUCTS | _OUTSIDE, "pad zero", "pad number")
    | {*_ANY_FLOAT, "reads int8", "reads float8_e4m3fn", "reads float8_e5m2", *_RESULTS},
    "walks.pair_warps": _PAIRS | {"reads float16", "reads bfloat16"},
    "walks.pair_multiply_adds": _PAIRS | set(_ANY_FLOAT),
    "walks.attention_warps": _ATTENTION | {"reads float16", "reads bfloat16"},
    "walks.attention_groups": _ATTENTION | {"reads float16", "reads bfloat16"},
    "walks.attention_multiply_adds": _ATTENTION | set(_ANY_FLOAT),
    "walks.slices": _ATTENTION | set(_ANY_FLOAT),
    "gradients.warps": _ATTENTION | {"reads float16", "reads bfloat16"},
    "gradients.groups": _ATTENTION | {"reads float16", "reads bfloat16"},
    "gradients.multiply_adds": _ATTENTION | set(_ANY_FLOAT),
    "gradients.slopes": _ATTENTION | {"reads float16", "reads bfloat16"},
    "patches": frozenset({"reads float32"}),
    "split-k": _BODIES | _OUTSIDE | {*_ANY_NUMBER, *_RESULTS},
    # Every reduction is cut along its columns: what walks those walks them plainly.
    "split-rows": _without(_BODIES - {"prod of a reduction"} | _OUTSIDE, *_MOVED) | {*_ANY_FLOAT},
    # A line is cut where all that is read along it is read plainly.
    "split-line": _without(_INSIDE | _OUTSIDE, *_MOVED) | {*SCANNED, *PLACED, *SCAN_OPTIONS, *_ANY_FLOAT, *_RESULTS},
    "sequence": _BODIES | _OUTSIDE | _GATHERED | {*_ANY_FLOAT},
    "winograd": frozenset({"reads float32"}),
    "flat-image": frozenset(_ANY_FLOAT),
    "lines": _INSIDE | _OUTSIDE | _GATHERED
    | {*SCANNED, *PLACED, *SCAN_OPTIONS, *_ANY_NUMBER, *_RESULTS, "writes int32"},
    "ranks": frozenset(_ANY_FLOAT),
    "scatters": frozenset(_ANY_FLOAT),
    "cpu.scatters": frozenset({"reads float16", "reads float32", "reads float64"}),
    "cpu.walks": _INSIDE | _OUTSIDE | _GATHERED
    | {*SCANNED, *PLACED, *SCAN_OPTIONS, "reads float16", "reads float32", "reads float64", *_RESULTS[::2]},
    "cpu.tiles": _BODIES | _OUTSIDE | _GATHERED | {"reads float16", "reads float32", "reads float64", *_RESULTS[::2]},
    "cpu.rows": _BODIES | _OUTSIDE | _GATHERED | {"reads float16", "reads float32", "reads float64", *_RESULTS[::2]},
    "opencl": _BODIES | _OUTSIDE | _GATHERED | {*_ANY_NUMBER, *_RESULTS},
}  # fmt: skip


@dataclass
class Met:
    """Kernels that were run and agreed.

    Attributes:
        cells: their number by lowering and production.
        kernels: their number by lowering.
        took: number of operators by device and by what its best program is.
        refusals: of candidates, by lowering and reason.
    """

    cells: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kernels: Counter[str] = field(default_factory=Counter)
    took: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)

    @staticmethod
    def of(records: Iterable[Record]) -> Met:
        """All that some records say."""
        met = Met()
        for record in records:
            for device, kind in record["took"].items():
                met.took[device][kind] += 1
            for run in record["runs"]:
                if run["outcome"] == "refused":
                    met.refusals[run["kind"], str(run["reason"]).partition(": ")[2]] += 1
                if run["outcome"] == "agrees":
                    names = [*run["met"], *(("opencl",) if run["engine"] == "opencl" else ())]
                    for name in names:
                        met.kernels[name] += 1
                    for name, productions in run["met"].items():
                        met.cells[name].update(productions)
                        if run["engine"] == "opencl":
                            met.cells["opencl"].update(productions)
        return met

    def missing(self) -> dict[str, list[str]]:
        """By lowering, the productions that could have met it and did not."""
        missing = {}
        for lowering, rows in POSSIBLE.items():
            never = sorted(row for row in rows if not self.cells[lowering][row])
            if never:
                missing[lowering] = never
        return missing


def lines_of(met: Met) -> list[str]:
    """The tables in lines: what operators took, what met what, what is missing."""
    lines = ["Best programs of the operators, by device:"]
    for device, kinds in sorted(met.took.items()):
        lines.append(f"  {device}: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    missing = met.missing()
    lines.append("Kernels that agreed, and productions that met them, of those that can:")
    for lowering, rows in POSSIBLE.items():
        never = missing.get(lowering, [])
        line = f"  {lowering}: {met.kernels[lowering]} kernels, {len(rows) - len(never)} of {len(rows)}"
        lines.append(line + (f"; never {', '.join(never)}" if never else ""))
    unknown = sorted(set(met.kernels) - set(POSSIBLE))
    if unknown:
        lines.append(f"Lowerings without a row in the table: {', '.join(unknown)}")
    lines += [f"refused: {kind}: {reason} ({count})" for (kind, reason), count in met.refusals.most_common(20)]
    return lines
