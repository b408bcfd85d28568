"""Timing of construction, shared by the benchmarks and the suite report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.suites import suite_path
from hal.spec.device import DeviceSpec
from roller.construct.construct import construct
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import load_operators


@dataclass(frozen=True)
class ConstructionTimes:
    """Seconds of construction per operator, each the median of its repetitions."""

    by_operator: Mapping[str, float]

    @property
    def median_seconds(self) -> float:
        """The operator in the middle."""
        return statistics.median(self.by_operator.values())

    @property
    def worst(self) -> tuple[str, float]:
        """The slowest operator and its seconds."""
        name = max(self.by_operator, key=lambda operator: self.by_operator[operator])
        return name, self.by_operator[name]


def suite_forms(suite: str) -> dict[str, KernelForm]:
    """The operators of a suite in canonical form, by name."""
    return {expr.name: kernel_form(expr) for expr in load_operators(suite_path(suite))}


def construct_once(forms: Mapping[str, KernelForm], device: DeviceSpec, top_k: int = 10) -> dict[str, float]:
    """Construct every operator once; seconds by name."""
    seconds = {}
    for name, form in forms.items():
        start = time.perf_counter()
        construct(form, device, top_k)
        seconds[name] = time.perf_counter() - start
    return seconds


def medians(rounds: Sequence[Mapping[str, float]]) -> ConstructionTimes:
    """``[{"M0": 3, "M1": 1}, {"M0": 5, "M1": 1}, {"M0": 4, "M1": 9}]`` -> 4 seconds for M0, 1 second for M1."""
    return ConstructionTimes({name: statistics.median(r[name] for r in rounds) for name in rounds[0]})


def construction_times(
    forms: Mapping[str, KernelForm], device: DeviceSpec, *, top_k: int = 10, rounds: int = 5
) -> ConstructionTimes:
    """Warm times: everything is constructed once first, then ``rounds`` times by the clock."""
    construct_once(forms, device, top_k)
    return medians([construct_once(forms, device, top_k) for _ in range(rounds)])
