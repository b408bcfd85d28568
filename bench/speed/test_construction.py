"""Construction, warm: everything is imported, the operator is parsed, and it has been constructed before."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from bench.speed.construction import construct_once, medians, suite_forms
from bench.suites import suite_path
from hal.spec.device import DeviceSpec
from roller.construct.construct import construct
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import load_operators
from sokoban.model.rational import estimate, estimate_schedules
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule

#: The promise: top ten programs of one operator, median and worst over the 119.
MEDIAN_LIMIT_MS = 2.0
WORST_LIMIT_MS = 50.0

#: One of each kind: a matmul with a reduction of 2, a large regular one, convolutions with few and with many
#: channels, a depthwise convolution, a reduction of long rows.
SINGLE = ("M0", "M3", "C0", "C3", "D0", "R2")

RANKED_SCHEDULES = 10_000


@cache
def thesis_forms() -> dict[str, KernelForm]:
    return suite_forms("roller119")


@cache
def thesis_expressions() -> dict[str, TensorExpr]:
    return {expr.name: expr for expr in load_operators(suite_path("roller119"))}


def test_construct_all_119(benchmark: Any, v100: DeviceSpec, limits: bool) -> None:
    """The time shown is that of all 119 together; per operator there are median and worst under `recorded`."""
    forms = thesis_forms()
    rounds: list[dict[str, float]] = []
    benchmark.pedantic(lambda: rounds.append(construct_once(forms, v100)), rounds=5, warmup_rounds=1)
    times = medians(rounds[1:])
    name, worst_seconds = times.worst
    median_ms, worst_ms = 1e3 * times.median_seconds, 1e3 * worst_seconds
    benchmark.extra_info.update(median_ms=round(median_ms, 3), worst_ms=round(worst_ms, 3), worst_operator=name)
    assert len(times.by_operator) == 119
    if limits:
        assert median_ms <= MEDIAN_LIMIT_MS
        assert worst_ms <= WORST_LIMIT_MS


@pytest.mark.parametrize("operator", SINGLE)
def test_construct(benchmark: Any, v100: DeviceSpec, operator: str) -> None:
    """The top ten programs of one operator."""
    construction = benchmark(construct, thesis_forms()[operator], v100, 10)
    benchmark.extra_info.update(programs=len(construction.programs), considered=construction.considered)
    assert construction.programs


@pytest.mark.parametrize("operator", ("M3", "C0"))
def test_kernel_form(benchmark: Any, operator: str) -> None:
    """Inlining and axis fusion of a parsed operator; done once per operator, before construction."""
    form = benchmark(kernel_form, thesis_expressions()[operator])
    assert form.is_tile


@pytest.mark.parametrize("known", ("schedules", "table"))
def test_rank_10000_schedules(benchmark: Any, v100: DeviceSpec, known: str) -> None:
    """RATIONAL's estimate of 10,000 schedules of a matmul and their order, from objects or from columns."""
    form = thesis_forms()["M3"]
    schedules = matmul_schedules(RANKED_SCHEDULES)
    table = ScheduleTable.of(form, schedules)

    def rank() -> Any:
        placed = PlacedForm(form, v100)
        estimates = estimate_schedules(form, v100, schedules) if known == "schedules" else estimate(table, placed)
        return np.argsort(estimates.seconds, kind="stable")

    order = benchmark(rank)
    assert len(order) == RANKED_SCHEDULES


@cache
def matmul_schedules(count: int) -> tuple[TileSchedule, ...]:
    """The first ``count`` schedules of a grid over register tiles, threads, strided copies and steps of a matmul."""
    found = []
    sizes = product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32), (1, 2), (1, 2), (4, 8, 16, 32, 64)
    )
    for m, n, m_threads, n_threads, m_copies, n_copies, k in sizes:
        found.append(
            TileSchedule(
                block=(("m", m * m_threads * m_copies), ("n", n * n_threads * n_copies)),
                thread=(("m", m), ("n", n)),
                vthreads=(("m", m_copies), ("n", n_copies)),
                step=(("k", k),),
                cached=("A", "B"),
            )
        )
        if len(found) == count:
            return tuple(found)
    raise ValueError(f"the grid has {len(found)} schedules, not {count}")
