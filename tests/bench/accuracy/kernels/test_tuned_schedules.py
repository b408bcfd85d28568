"""Spaces measured whole: described as the kernels are, and ranked at least as well as the page says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.kernels.tuned_schedules import BOARDS, FOLDER, Space, filter_schedule, filter_seconds, spaces
from hal.catalog import load_device

measured_data = pytest.mark.skipif(
    not (default_directory() / FOLDER).is_dir(), reason="the measured spaces are not next to this checkout"
)


def row(**changes: Any) -> dict[str, Any]:
    sizes = {"block_size_x": 48, "block_size_y": 2, "tile_size_x": 2, "tile_size_y": 4}
    others = {"use_padding": 1, "use_shmem": None, "filter_width": 15, "filter_height": 15, "m": 4096, "n": 4096}
    return sizes | others | changes


def test_rows_of_the_tile_are_padded_where_their_ends_would_meet() -> None:
    found = filter_schedule(row())
    # 48 * (2 - 1) + 14 = 62 beyond a warp's lanes: two more make a multiple of 32.
    assert found["padding"] == {"X": 2} and found["cached"] == ["X"]
    assert filter_schedule(row(block_size_x=64))["padding"] == {"X": 0}
    assert filter_schedule(row(use_shmem=0.0))["cached"] == []


def test_bodies_that_are_too_long_are_unrolled_along_one_axis() -> None:
    assert filter_schedule(row())["unroll"] == 225 * 8
    assert filter_schedule(row(tile_size_x=4, tile_size_y=6))["unroll"] == 15 * 24


def test_reads_that_are_checked_cost_more() -> None:
    plain, checked = row(use_shmem=0.0, block_size_x=64), row(use_shmem=0.0, tile_size_x=3)
    seconds = filter_seconds([plain, checked], load_device("a100"))
    assert seconds[1] > 1.2 * seconds[0]


def test_half_of_a_board_is_chosen_on_and_none_of_others() -> None:
    times = np.ones(101)
    assert Space(name="filter", board="rtx-3090", measured=times, predicted=times).chosen.sum() == 50
    assert not Space(name="filter", board="a100-pcie-40gb", measured=times, predicted=times).chosen.any()


@measured_data
def test_spaces_are_ranked() -> None:
    found = {(space.name, space.board): space for space in spaces(default_directory())}
    assert {board for _, board in found} == set(BOARDS.values())
    product, image = found["product", "rtx-3090"], found["filter", "rtx-3090"]
    judged = product.score(~product.chosen)
    assert judged.first <= 1.10 and judged.best_of_ten <= 1.03
    assert judged.rank_correlation >= 0.9 and judged.median_error <= 0.12
    judged = image.score(~image.chosen)
    assert judged.first <= 1.15 and judged.best_of_ten <= 1.07 and judged.rank_correlation >= 0.8
    left_out = found["filter", "a100-pcie-40gb"]
    assert left_out.score(np.ones(len(left_out.measured), dtype=np.bool_)).rank_correlation >= 0.6
