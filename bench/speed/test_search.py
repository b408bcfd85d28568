"""Exhaustive search, warm: time per operator over the suites, and the memory that one search needs."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from functools import cache
from typing import Any

import pytest

from bench.speed.construction import suite_forms
from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.search.search import search

#: The promise: any operator of either suite.
WORST_LIMIT_SECONDS = 3.0
MEMORY_LIMIT_BYTES = 2**30

#: A small matmul, a large one, the convolution and the depthwise convolution with most tiles, a row reduction.
SINGLE = ("M2", "M3", "C23", "D18", "R2")


@cache
def forms(suite: str) -> dict[str, KernelForm]:
    return suite_forms(suite)


def search_once(suite: str, device: DeviceSpec) -> dict[str, float]:
    """Search every operator of a suite once; seconds by name."""
    seconds = {}
    for name, form in forms(suite).items():
        start = time.perf_counter()
        search(form, device)
        seconds[name] = time.perf_counter() - start
    return seconds


def peak_bytes(form: KernelForm, device: DeviceSpec) -> int:
    """The most memory that Python and NumPy held at once during a search."""
    tracemalloc.start()
    try:
        search(form, device)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suite", ("roller119", "modern"))
def test_search_all(benchmark: Any, v100: DeviceSpec, limits: bool, suite: str) -> None:
    """The time shown is that of all operators together; median, worst and memory per operator are `recorded`."""
    rounds: list[dict[str, float]] = []
    benchmark.pedantic(lambda: rounds.append(search_once(suite, v100)), rounds=1, warmup_rounds=1)
    times = rounds[-1]
    worst = max(times, key=lambda name: times[name])
    # What takes longest looks at most tiles, and so holds most.
    peak = max(peak_bytes(forms(suite)[name], v100) for name in sorted(times, key=lambda n: -times[n])[:5])
    benchmark.extra_info.update(
        median_ms=round(1e3 * statistics.median(times.values()), 1),
        worst_ms=round(1e3 * times[worst], 1),
        worst_operator=worst,
        peak_mib=round(peak / 2**20, 1),
    )
    assert len(times) == len(forms(suite))
    if limits:
        assert times[worst] <= WORST_LIMIT_SECONDS
        assert peak <= MEMORY_LIMIT_BYTES


@pytest.mark.parametrize("operator", SINGLE)
def test_search(benchmark: Any, v100: DeviceSpec, operator: str) -> None:
    """The ten best schedules of one operator."""
    result = benchmark.pedantic(search, (forms("roller119")[operator], v100), rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(enumerated=result.enumerated, scored=result.scored)
    assert len(result.schedules) == 10
