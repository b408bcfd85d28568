"""Readings, their median, spread and range; loops made long enough."""

from __future__ import annotations

import pytest

from hal.microbench.launcher import MicrobenchError, scalar, text
from hal.microbench.measurement import Measurement, rates
from hal.microbench.sampling import Settings, long_enough, power_of_two, timed
from tests.hal.microbench.fake_board import FakeLauncher


def test_the_number_is_the_median_or_the_fastest() -> None:
    samples = (4.0, 1.0, 2.0)
    assert Measurement(key="x", unit="s", samples=samples, method="how").value == 2.0
    assert Measurement(key="x", unit="s", samples=samples, method="how", best=True).value == 1.0
    assert Measurement(key="x", unit="B/s", samples=samples, method="how", best=True).value == 4.0


def test_spread_is_the_distance_of_the_quartiles() -> None:
    assert Measurement(key="x", unit="s", samples=(1.0,), method="how").spread == 0
    assert Measurement(key="x", unit="s", samples=(9.0, 10.0, 11.0, 10.0, 10.0), method="how").spread == 0
    assert Measurement(key="x", unit="s", samples=(8.0, 9.0, 10.0, 11.0, 12.0), method="how").spread == pytest.approx(
        0.2
    )


@pytest.mark.parametrize(
    ("low", "high", "plausible"), [(None, None, True), (1, 3, True), (3, None, False), (None, 1, False)]
)
def test_plausible_means_within_what_bounds_there_are(low: float, high: float, plausible: bool) -> None:
    measurement = Measurement(key="x", unit="s", samples=(2.0,), method="how").within(low, high)
    assert measurement.plausible is plausible
    assert measurement.record()["plausible"] is plausible


def test_readings_are_reported_in_words() -> None:
    assert Measurement(key="x", unit="s", samples=(1.0,), method="how").readings == "one reading"
    assert (
        Measurement(key="x", unit="s", samples=(8.0, 9.0, 10.0, 11.0, 12.0), method="how").readings
        == "median of 5, quartiles 20.0 % apart"
    )
    assert rates(10.0, (2.0, 5.0)) == (5.0, 2.0)


def test_the_first_reading_is_thrown_away() -> None:
    calls: list[int] = []

    def work() -> float:
        calls.append(1)
        return float(len(calls))

    assert timed(FakeLauncher(), [work], 3) == (2.0, 3.0, 4.0)


def test_loops_grow_until_they_take_long_enough() -> None:
    settings = Settings(target_seconds=1e-2)
    count = long_enough(FakeLauncher(), lambda n: lambda: n * 1e-6 + 1e-5, settings)
    assert 5e-3 <= count * 1e-6 + 1e-5 <= 0.2
    assert long_enough(FakeLauncher(), lambda n: lambda: 1e-9, settings, limit=1000) == 1000
    with pytest.raises(MicrobenchError, match="report no time"):
        long_enough(FakeLauncher(), lambda n: lambda: 0.0, settings)


@pytest.mark.parametrize(("value", "power"), [(0.4, 1), (1, 1), (62.1, 64), (64.9, 64), (70, 128), (2540, 4096)])
def test_lanes_are_the_next_power_of_two(value: float, power: int) -> None:
    assert power_of_two(value) == power


def test_arguments_have_the_width_that_the_kernel_expects() -> None:
    assert scalar(3).nbytes == 4
    assert scalar(3, "uint64").nbytes == 8


def test_templates_name_their_entry() -> None:
    kernel = text("copy_it", "void $ENTRY($KIND* a)", KIND="float")
    assert kernel.source == "void copy_it(float* a)"
    with pytest.raises(KeyError):
        text("copy_it", "void $ENTRY($KIND* a)")
