"""The search for constants of products: what it may change, what it finds, and how data falls into halves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.fit_products import BOARDS, FIXED, Products, mean_error, names, read_products, scaled, search
from hal.catalog import load_device
from roller.library.matrix_gemm import CONSTANTS, matrix_gemm

DATA = Path(__file__).parents[3].parent / "shared" / "data"


def test_every_constant_but_the_fixed_ones_is_chosen() -> None:
    assert (
        len(names()) == len(set(names())) == len(vars(CONSTANTS)) - len(FIXED) + 2 * len(vars(CONSTANTS.feeds["bulk"]))
    )


def test_a_constant_is_scaled_alone_and_a_share_stays_one() -> None:
    assert scaled(CONSTANTS, "band_tiles", 2.0).band_tiles == 2 * CONSTANTS.band_tiles
    feeds = scaled(CONSTANTS, "bulk.stages", 2.0).feeds
    assert feeds["bulk"].stages == 2 * CONSTANTS.feeds["bulk"].stages
    assert feeds["warps"] == CONSTANTS.feeds["warps"]
    assert scaled(CONSTANTS, "warps.whole_waves", 9.0).feeds["warps"].whole_waves == 1.0


def test_the_search_comes_back_to_constants_that_made_the_times() -> None:
    draw = np.random.default_rng(1)
    m, n, k = (2.0 ** draw.integers(4, 13, 60) for _ in range(3))
    a100 = load_device("a100-sxm-80gb")
    seconds = matrix_gemm(np.ones(60), m, n, k, a100, dtype="bfloat16").seconds
    products = [Products(a100, m, n, k, seconds, np.zeros(60))]
    start = scaled(CONSTANTS, "warps.step_seconds", 1.6)
    found = search(lambda constants: mean_error(products, constants), start, 2, draw)
    assert mean_error(products, CONSTANTS) == 0
    assert mean_error(products, found) < 0.4 * mean_error(products, start)


@pytest.mark.skipif(not (DATA / "tensor_core").exists(), reason="the measured products are not here")
def test_all_tokens_of_a_shape_of_weights_are_in_one_half() -> None:
    pytest.importorskip("pyarrow")
    found = read_products(DATA)
    assert list(found) == list(BOARDS)
    for each in found.values():
        halves = [set(zip(each.n[each.half == half], each.k[each.half == half], strict=True)) for half in (0, 1)]
        assert halves[0] and not halves[0] & halves[1]
