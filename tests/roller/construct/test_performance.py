"""The micro-performance model against the thesis's formulas for a matmul."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.catalog import load_device
from roller.construct.performance import MicroModel, data_reuse_score
from roller.construct.rtile import TileSpace
from tests.sokoban.schedules import form_of

V100 = load_device("v100")
RATE = V100.sustained_flops("float32")


def model_of(**operator: object) -> MicroModel:
    space = TileSpace.of(form_of(**operator))
    return MicroModel(space, V100, RATE, float(space.form.body_operations))


M, N, K = 4096, 2048, 512
MATMUL = model_of(op="matmul", m=M, n=N, k=K)


@pytest.mark.parametrize(("x", "y", "k"), [(1, 1, 1), (64, 128, 8), (128, 32, 16), (4096, 2048, 512)])
def test_traffic_of_a_matmul(x: int, y: int, k: int) -> None:
    """W = M N K (1/x + 1/y) elements (thesis 5.4.3), whatever the step."""
    assert MATMUL.traffic((x, y, k)) == 4 * M * N * K * (1 / x + 1 / y)


@pytest.mark.parametrize(("x", "y", "k"), [(1, 1, 1), (64, 128, 8), (7, 5, 3)])
def test_footprint_of_a_matmul(x: int, y: int, k: int) -> None:
    """Registers hold x y accumulators, an x k and a k y fragment; shared memory both data tiles."""
    assert MATMUL.footprint("registers", (x, y, k)) == x * y + x * k + k * y
    assert MATMUL.footprint("shared", (x, y, k)) == 4 * (x * k + k * y)


def test_partial_tiles_count_in_full() -> None:
    model = model_of(op="matmul", m=91, n=37, k=23)
    tiles = math.ceil(91 / 16) * math.ceil(37 / 8) * math.ceil(23 / 4)
    assert model.traffic((16, 8, 4)) == tiles * 4 * (16 * 4 + 4 * 8)


def test_a_window_s_tiles_overlap() -> None:
    model = model_of(op="conv2d", n=2, c=5, h=34, w=34, f=7, kh=3, kw=3, dtype="float16")
    shape = (1, 7, 8, 16, 5, 3, 3)
    held = 5 * (8 + 2) * (16 + 2) + 7 * 5 * 3 * 3
    assert model.footprint("shared", shape) == 2 * held
    assert model.footprint("registers", shape) == 7 * 8 * 16 + held
    assert model.traffic(shape) == 2 * (32 // 8) * (32 // 16) * 2 * held


def test_memory_feeds_a_tile_at_its_intensity_times_the_bandwidth() -> None:
    """2 M N K operations over W bytes: 2 / (4 (1/x + 1/y)) FLOP per byte."""
    for layer, below in (("registers", V100.shared), ("shared", V100.dram)):
        intensity = 2 / (4 * (1 / 64 + 1 / 128))
        expected = intensity * below.bandwidth_bytes_per_second
        assert MATMUL.mem_perf(layer, (64, 128, 8)) == pytest.approx(expected)
    assert MATMUL.max_compute_perf() == RATE


def test_dram_feeds_the_arithmetic_from_some_tile_on() -> None:
    balance = RATE / V100.dram.bandwidth_bytes_per_second
    edge = 4 * balance  # x = y with x / 4 FLOP per byte
    assert MATMUL.mem_perf("shared", (32, 32, 8)) < RATE < MATMUL.mem_perf("shared", (128, 128, 8))
    assert 32 < edge < 128


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_growing_an_axis_holds_more_and_never_moves_more(data: st.DataObject) -> None:
    """As long as tiles divide the operator."""
    shape = tuple(2 ** data.draw(st.integers(0, bits)) for bits in (11, 10, 8))
    axis = data.draw(st.integers(0, 2))
    grown = tuple(size * 2 if position == axis else size for position, size in enumerate(shape))
    for layer in ("registers", "shared"):
        assert MATMUL.footprint(layer, grown) > MATMUL.footprint(layer, shape)
    assert MATMUL.traffic(grown) <= MATMUL.traffic(shape)
    assert MATMUL.mem_perf("shared", grown) >= MATMUL.mem_perf("shared", shape)


def test_what_reads_nothing_is_fed_at_any_rate() -> None:
    space = TileSpace.of(form_of(expr="Y[i] = i * 2", sizes={"i": 8}))
    assert MicroModel(space, V100, RATE, 1.0).mem_perf("shared", (8,)) == math.inf


# The data-reuse score by hand


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
