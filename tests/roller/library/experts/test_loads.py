"""Tokens over experts: every pair is somewhere, the busiest board has most, and draws repeat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roller.library.experts.loads import TILE_ROWS, loads, loads_of


@given(
    st.integers(1, 4096), st.sampled_from([(8, 2), (64, 6), (256, 8)]), st.sampled_from(["uniform", "power_law_1.2"])
)
def test_one_board_has_all_pairs(tokens: int, sizes: tuple[int, int], distribution: str) -> None:
    experts, top_k = sizes
    routed = loads(tokens, experts, top_k, distribution, 1)
    assert abs(routed.pairs - tokens * top_k) <= max(2, 0.02 * tokens * top_k) + experts % top_k * tokens
    assert 1 <= routed.active <= experts
    assert routed.tiles[0] >= routed.tiles[-1] >= 1
    assert all(tiles * rows >= routed.pairs - 1e-9 for tiles, rows in zip(routed.tiles, TILE_ROWS, strict=True))


def test_the_busiest_board_has_more_than_its_share() -> None:
    routed = loads(8192, 256, 8, "power_law_1.2", 16)
    assert 1.2 < routed.pairs / (8192 * 8 / 16) < 6
    assert routed.empty_tiles[3] > routed.tiles[3]


def test_even_loads_are_even() -> None:
    routed = loads(256, 64, 8, "uniform", 8)
    assert (routed.pairs, routed.active) == (256 * 8 / 8, 8)


def test_draws_repeat() -> None:
    loads.cache_clear()
    first = loads(777, 160, 8, "power_law_1.01", 4)
    loads.cache_clear()
    assert loads(777, 160, 8, "power_law_1.01", 4) == first


def test_given_sizes_are_summed_up() -> None:
    routed = loads_of((100, 2000, 0, 4))
    assert (routed.pairs, routed.active) == (2104, 3)
    assert routed.tiles[TILE_ROWS.index(128)] == 1 + 16 + 0 + 1


def test_few_tokens_are_spread_over_the_boards() -> None:
    # 48 experts apart, six on a board of 64: of 8 tokens one, of 16 two, of 48 all find an expert there.
    assert [loads(tokens, 384, 8, "uniform", 64).active for tokens in (8, 16, 48)] == [1, 2, 6]


def test_few_tokens_in_order_meet_on_the_first_board() -> None:
    # Of one token all eight experts are on one board of 48, of 384 experts on eight boards.
    assert loads(1, 384, 8, "power_law_1.2_in_order", 8).active == 8
    assert loads(1, 384, 8, "power_law_1.2", 8).active < 4


@pytest.mark.parametrize("tokens", [1, 16, 500])
def test_in_order_keeps_all_pairs(tokens: int) -> None:
    routed = loads(tokens, 256, 8, "power_law_1.2_in_order", 1)
    assert routed.pairs == pytest.approx(8 * tokens, rel=0.02)
