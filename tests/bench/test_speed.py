"""The figures of the benchmarks and of the suite report are what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.speed.construction import ConstructionTimes, construct_once, construction_times, medians, suite_forms
from bench.speed.construction_against import main as against
from bench.speed.suite_report import OperatorResult, SuiteReport, main
from bench.speed.test_construction import RANKED_SCHEDULES, SINGLE, matmul_schedules
from bench.speed.test_estimates import OPERATORS, attentions
from hal.catalog import load_device
from roller.library import library_calls


def test_an_operators_time_is_the_median_of_its_rounds() -> None:
    times = medians([{"M0": 3.0, "M1": 1.0}, {"M0": 5.0, "M1": 1.0}, {"M0": 4.0, "M1": 9.0}])
    assert times == ConstructionTimes({"M0": 4.0, "M1": 1.0})
    assert times.median_seconds == (4.0 + 1.0) / 2
    assert times.worst == ("M0", 4.0)


def test_construction_is_timed_once_per_round_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("bench.speed.construction.construct", lambda form, device, top_k: calls.append(form.expr.name))
    forms = {name: form for name, form in suite_forms("roller119").items() if name in ("M0", "R2")}
    times = construction_times(forms, load_device("v100"), rounds=3)
    assert calls == ["M0", "R2"] * (1 + 3)
    assert all(seconds > 0 for seconds in times.by_operator.values())


def test_two_trees_take_turns_and_the_fastest_turn_of_each_operator_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[bool] = []
    seconds = {True: [{"M0": 8e-3, "M1": 2e-3}, {"M0": 9e-3, "M1": 1e-3}], False: [{"M0": 3e-3, "M1": 1e-3}] * 2}

    def turn(tree: Path, suite: str, device: str, rounds: int) -> dict[str, float]:
        assert (suite, device, rounds) == ("roller119", "v100", 3)
        asked.append(tree == tmp_path)
        return seconds[asked[-1]][(len(asked) - 1) // 2]

    monkeypatch.setattr("bench.speed.construction_against.turn", turn)
    result = CliRunner().invoke(against, [str(tmp_path), "--turns", "2"])
    assert asked == [True, False, True, False]
    assert result.output.splitlines() == [
        "other  median 4.50 ms per operator",
        "here   median 2.00 ms per operator",
        "ratio of the medians 0.444, of the single operators 0.612 (geometric mean)",
    ]


def test_the_single_benchmarks_are_operators_of_the_suite() -> None:
    forms = suite_forms("roller119")
    assert set(SINGLE) <= set(forms)
    assert construct_once({"R2": forms["R2"]}, load_device("v100"))["R2"] > 0


def test_the_estimated_attentions_are_all_different() -> None:
    calls = [call.sizes for operator in attentions(OPERATORS) for call in library_calls(operator)]
    assert len(set(calls)) == OPERATORS == 10_000


def test_the_ranked_schedules_are_all_different() -> None:
    assert len(set(matmul_schedules(RANKED_SCHEDULES))) == RANKED_SCHEDULES == 10_000
    with pytest.raises(ValueError, match=r"the grid has 11520 schedules, not 20000"):
        matmul_schedules(20_000)


def test_the_report_counts_candidates_cubins_spills_and_checks() -> None:
    results = [
        OperatorResult(name="M0", programs=14, kernels=10, cubins=10, spills=(0,) * 9 + (8,), verified=(True, True)),
        OperatorResult(
            name="R2",
            programs=9,
            kernels=9,
            cubins=9,
            spills=(16,) * 9,
            verified=(True, False),
            needless=("rank 1, line 4: __syncthreads();",),
        ),
        OperatorResult(name="E5", programs=10, kernels=10, cubins=0, spills=(), verified=()),
    ]
    times = ConstructionTimes({"M0": 0.001, "R2": 0.0005, "E5": 0.02})
    assert SuiteReport(
        suite="roller119", device="v100-sxm2-16gb", times=times, results=results, compile_seconds=12.34
    ).lines() == [
        "suite                    roller119, 3 operators, for v100-sxm2-16gb",
        "construction, median     1.00 ms per operator",
        "construction, worst      20.00 ms (E5)",
        "ten or more candidates   2 of 3",
        "ten kernels              2 of 3",
        "operators with a cubin   2 of 3",
        "cubins                   19",
        "cubins that spill        10",
        "rank 1 spills            R2",
        "kernels verified         3 of 4",
        "wrong or not run         R2, rank 2",
        "order nothing            R2, rank 1, line 4: __syncthreads();",
        "compilation              12.3 s",
    ]
    assert (
        len(
            SuiteReport(
                suite="roller119", device="v100-sxm2-16gb", times=times, results=None, compile_seconds=None
            ).lines()
        )
        == 3
    )


def test_the_report_names_an_unknown_device() -> None:
    result = CliRunner().invoke(main, ["--device", "v10000"])
    assert result.exit_code == 1
    assert "no device is called 'v10000'" in result.output
