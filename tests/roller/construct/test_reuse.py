"""The data-reuse score by hand."""

from __future__ import annotations

import pytest

from hal.catalog import load_device
from roller.construct.performance import MicroModel, data_reuse_score
from roller.construct.rtile import TileSpace
from tests.sokoban.schedules import form_of


def test_the_score_is_traffic_saved_per_footprint_added() -> None:
    assert data_reuse_score(traffic=900.0, grown_traffic=500.0, footprint=40, grown_footprint=56) == 400 / 16


def test_growth_that_costs_nothing_scores_what_it_saves() -> None:
    assert data_reuse_score(900.0, 500.0, 40, 40) == 400


def test_growth_that_moves_more_scores_below_zero() -> None:
    assert data_reuse_score(500.0, 900.0, 40, 56) == -400 / 16


def matmul_scores(x: int, y: int, k: int) -> list[float]:
    """Scores of doubling each axis of a shared-memory tile of a 1024 x 512 x 256 product."""
    model = MicroModel(TileSpace.of(form_of(op="matmul", m=1024, n=512, k=256)), load_device("v100"), 1e12, 2.0)
    now, scores = (x, y, k), []
    for grown in ((2 * x, y, k), (x, 2 * y, k), (x, y, 2 * k)):
        footprints = model.footprint("shared", now), model.footprint("shared", grown)
        scores.append(data_reuse_score(model.traffic(now), model.traffic(grown), *footprints))
    return scores


@pytest.mark.parametrize(("x", "y", "k"), [(16, 16, 8), (64, 16, 8), (16, 128, 4)])
def test_scores_of_a_matmul(x: int, y: int, k: int) -> None:
    """Q = 4 M N K (1/x + 1/y); doubling x saves half of its term and holds 4 x k bytes more."""
    q = 4 * 1024 * 512 * 256
    assert matmul_scores(x, y, k) == [
        pytest.approx(q * (1 / x - 1 / (2 * x)) / (4 * x * k)),
        pytest.approx(q * (1 / y - 1 / (2 * y)) / (4 * y * k)),
        0.0,
    ]


def test_the_shorter_side_is_worth_more() -> None:
    m, n, k = matmul_scores(64, 16, 8)
    assert n > m > k == 0


def test_element_wise_operators_score_nothing_on_any_axis() -> None:
    """Constant reuse: the traffic is the tensor, whatever the tile (6.3.2)."""
    space = TileSpace.of(form_of(op="transpose", shape=[1024, 512], perm=[1, 0]))
    model = MicroModel(space, load_device("v100"), 1e12, 1.0)
    now = (8, 8)
    for grown in ((16, 8), (8, 16)):
        footprints = model.footprint("shared", now), model.footprint("shared", grown)
        assert data_reuse_score(model.traffic(now), model.traffic(grown), *footprints) == 0
