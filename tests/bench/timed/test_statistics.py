"""Medians with quartiles, and ratios that a slow round does not disturb."""

from __future__ import annotations

import pytest

from bench.timed.statistics import geometric_mean, ratios, spread


def test_a_spread_has_the_median_and_the_quartiles() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert found.width == pytest.approx(2 / 3)


def test_a_single_value_has_no_width() -> None:
    assert spread([2.0]).width == 0.0


def test_what_slows_a_whole_round_down_leaves_the_ratio_alone() -> None:
    found = ratios([2.0, 20.0, 2.2], [1.0, 10.0, 1.1])
    assert (found.low, found.median, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        ratios([1.0, 2.0], [1.0])


def test_the_geometric_mean_of_nothing_is_none() -> None:
    assert geometric_mean([]) is None
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
