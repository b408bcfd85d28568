"""Spaces measured whole: described as the kernels are, and ranked at least as well as the page says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.kernels.tuned_schedules import FOLDER, Space, filter_seconds, spaces
from hal.catalog import load_device

measured_data = pytest.mark.skipif(
    not (default_directory() / FOLDER).is_dir(), reason="the measured spaces are not next to this checkout"
)


def row(**changes: Any) -> dict[str, Any]:
    sizes = {"block_size_x": 64, "block_size_y": 2, "tile_size_x": 2, "tile_size_y": 4}
    return sizes | {"use_padding": 0, "use_shmem": 0.0, "read_only": 0} | changes


def test_reads_that_are_checked_or_have_no_constant_in_their_address_cost_more() -> None:
    rows = [row(), row(tile_size_x=3), row(read_only=1), row(tile_size_x=3, read_only=1), row(use_shmem=None)]
    plain, checked, intrinsic, both, _ = filter_seconds(rows, load_device("a100"))
    assert checked > 1.2 * plain and intrinsic > 1.4 * plain and both > 1.1 * max(checked, intrinsic)


def test_half_of_a_board_is_chosen_on_and_none_of_others() -> None:
    times = np.ones(101)
    assert Space(name="filter", board="rtx-3090", measured=times, predicted=times).chosen.sum() == 50
    assert not Space(name="filter", board="a100-pcie-40gb", measured=times, predicted=times).chosen.any()


@measured_data
def test_spaces_are_ranked() -> None:
    found = {(space.name, space.board): space for space in spaces(default_directory())}
    product, image = found["product", "rtx-3090"], found["filter", "rtx-3090"]
    judged = product.score(~product.chosen)
    assert judged.first <= 1.10 and judged.best_of_ten <= 1.03
    assert judged.rank_correlation >= 0.9 and judged.median_error <= 0.12
    judged = image.score(~image.chosen)
    assert judged.first <= 1.15 and judged.best_of_ten <= 1.05 and judged.rank_correlation >= 0.8
    left_out = found["filter", "a100-pcie-40gb"]
    assert left_out.score(np.ones(len(left_out.measured), dtype=np.bool_)).rank_correlation >= 0.8
