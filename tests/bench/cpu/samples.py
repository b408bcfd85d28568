"""Made-up comparisons."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from bench.cpu.comparison import read_suite
from bench.cpu.machine import Machine
from bench.cpu.results import FORMAT, Entry, Facts, OperatorResult, Results
from bench.timed.statistics import Check, spread

SUITE = read_suite("cpu24", ())

MACHINE = Machine(
    title="A Processor", llvm="znver5", cpus=(0, 1), core_count=2, simd_bits=512, avx512=("avx512f",), clock_mhz=4100.0,
    private_bytes=1 << 20, pinned=True, load=0.0, system="Linux", python="3.11", packages={"numpy": "2.4.6"},
)  # fmt: skip

CHECK = Check(relative_error=1e-6, tolerance=1e-4, passed=True)


def entry(who: str, *rounds: float, **facts: Any) -> Entry:
    """Somebody's seconds of each round."""
    return Entry(who=who, check=CHECK, time=spread(rounds), rounds=list(rounds), facts=Facts(**facts))


def operator(spec: Mapping[str, Any], *entries: Entry, flop: float = 1e9) -> OperatorResult:
    """An operator by some."""
    return OperatorResult(
        name=spec["name"], op=spec["op"], spec=dict(spec), flop=flop, bytes=1 << 20, sets=2, entries=list(entries)
    )  # fmt: skip


def results(*operators: OperatorResult) -> Results:
    """A comparison of a few rounds."""
    return Results(
        format=FORMAT, started="2026-11-21T12:00:00", machine=MACHINE, suite="cpu24", rounds=3, turn_seconds=0.02,
        notes=[], operators=list(operators),
    )  # fmt: skip


def whole(seed: int = 1, ours: float = 1e-3, **times: float) -> Results:
    """All 24 operators, ours against rivals that take `times` as long, give or take a per cent."""
    noise = random.Random(seed)

    def rounds(seconds: float) -> list[float]:
        return [seconds * noise.uniform(0.99, 1.01) for _ in range(5)]

    found = []
    for spec in SUITE:
        facts = {
            "predicted_seconds": 1.1 * ours, "predicted_then_seconds": 0.9 * ours,
        }  # fmt: skip
        entries = [entry("ours", *rounds(ours), first_choice=1.05, **facts)]
        for who, times_ours in times.items():
            entries.append(entry(who.replace("_", "-"), *rounds(times_ours * ours)))
        found.append(operator(spec, *entries))
    return results(*found)
