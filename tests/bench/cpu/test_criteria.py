"""Each line of what must be shown: met, not met, and not measured where something is missing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bench.cpu.criteria import Criterion, criteria, error_then, near_limit, prediction_error
from bench.cpu.results import Results
from tests.bench.cpu.samples import SUITE, entry, operator, results, whole


def line(made: Results, start: str) -> Criterion:
    return next(one for one in criteria(made, SUITE) if one.text.startswith(start))


GOOD = {"torch": 1.5, "openblas": 1.0, "metaschedule_64": 1.1, "metaschedule_512": 1.0, "limit": 0.1}


def test_everything_met() -> None:
    lines = criteria(whole(**GOOD), SUITE)
    assert [one.verdict for one in lines] == ["met"] * 11


@pytest.mark.parametrize(
    ("times", "start"),
    [
        ({"openblas": 0.9}, "gemm_512"),
        ({"metaschedule_64": 0.9}, "geometric mean over 24"),
        ({"metaschedule_512": 0.9}, "geometric mean over 4"),
        ({"torch": 0.9}, "convolutions"),
        ({"torch": 1.1}, "all others"),
    ],
)
def test_a_faster_rival_breaks_its_line(times: dict[str, float], start: str) -> None:
    found = line(whole(**{**GOOD, **times}), start)
    assert found.verdict == "not met"


def test_who_moves_bytes_as_fast_as_they_can_be_moved_need_not_beat_pytorch() -> None:
    made = whole(**{**GOOD, "torch": 1.0, "limit": 0.95})
    assert line(made, "all others").met and not line(whole(**{**GOOD, "torch": 1.0}), "all others").met
    assert all(near_limit(one) for one in made.operators)


def test_a_part_of_the_suite_meets_no_line_about_all_of_it() -> None:
    made = whole(**GOOD)
    part = replace(made, operators=made.operators[:3])
    found = line(part, "geometric mean over 24")
    assert found.met is None and found.found.endswith("3 of 24 operators")
    assert line(part, "gemm_1024").met


def test_a_part_that_breaks_a_bar_of_each_operator_breaks_the_line() -> None:
    made = whole(**{**GOOD, "torch": 0.5})
    found = line(replace(made, operators=made.operators[6:8]), "convolutions")
    assert found.met is False
    assert found.found == "0 of 7, 2 measured; not conv3x3_64x56_nchw, conv3x3_64x56_nhwc"


def test_a_gemm_without_one_of_the_rivals_is_not_judged() -> None:
    found = line(whole(torch=1.5, openblas=1.0), "gemm_512")
    assert found.met is None and found.found.endswith("without metaschedule-64")


def test_the_search_costs_as_a_share_of_the_tuning_of_the_same_operators() -> None:
    made = whole(**GOOD)
    # 2 ms and half a second of ours against 90 s of MetaSchedule's, on every operator.
    assert line(made, "construction:").found == "1/45000"
    assert line(made, "construction and profiling:").found == "1/179"


def test_nothing_measured_gives_no_verdict() -> None:
    assert {one.verdict for one in criteria(results(), SUITE)} == {"not measured"}


def test_the_error_of_a_prediction_is_relative_to_what_was_measured() -> None:
    one = operator(SUITE[0], entry("ours", 1e-3, 1e-3, predicted_seconds=0.8e-3))
    assert prediction_error(one) == pytest.approx(-0.2)
    assert error_then(one) is None
    assert prediction_error(operator(SUITE[0], entry("torch", 1.0))) is None


def test_a_spec_of_the_same_minute_has_a_line_of_its_own() -> None:
    made = whole(**GOOD)
    then = [
        operator(one.spec, entry("ours", 1e-3, 1e-3, predicted_seconds=1e-3, predicted_then_seconds=1.5e-3))
        for one in made.operators
    ]
    assert line(results(*then), "median error").found == "0.0%"
    assert line(results(*then), "the same").found == "50.0%"
    assert line(results(*then), "the same").verdict == "not met"


def test_wrong_predictions_and_a_bad_first_choice_break_their_lines() -> None:
    made = whole(**GOOD)
    worse = [
        operator(one.spec, entry("ours", 1e-3, 1e-3, predicted_seconds=2e-3, first_choice=1.4))
        for one in made.operators
    ]
    assert line(results(*worse), "RATIONAL").verdict == "not met"
    assert line(results(*worse), "median error").verdict == "not met"
