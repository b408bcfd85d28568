"""What is proposed for operators without tiles: patches of windows, rows for a part of a warp, vectors that exist."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hal.catalog import load_device
from roller.construct.flat import SHORT_ROW, Flat
from roller.construct.rtile import TileSpace
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.windows import PATCH_STATEMENTS, reads_patches


def flat(**data: Any) -> tuple[KernelForm, Flat]:
    form = kernel_form(operator_from_data(data))
    return form, Flat(TileSpace.of(form), load_device("v100"), 0.1)


@pytest.mark.parametrize("op", ["depthwise_conv2d", "avg_pool2d"])
def test_windows_are_proposed_as_columns_and_pairs_of_columns(op: str) -> None:
    form, proposals = flat(op=op, n=8, c=16, h=42, w=42, kh=3, kw=3, stride=1, padding=1)
    schedules = [c.schedule for c in proposals.direct() if c.policy == "windows in registers"]
    assert all(reads_patches(form, schedule) for schedule in schedules)
    tiles = {(s.register_tile["oh"], s.register_tile["ow"]) for s in schedules}
    # 42 rows in columns of 2, of 4 as 11 times 4, of 8 as 6 times 7, of 16 as 3 times 14.
    assert tiles >= {(rows, columns) for rows in (2, 4, 7, 14) for columns in (1, 2)}


def test_a_patch_that_is_too_large_is_not_unrolled() -> None:
    form, proposals = flat(op="depthwise_conv2d", n=2, c=4, h=64, w=64, kh=11, kw=11, padding=5)
    points = math.prod(form.sizes[axis] for axis in form.reduced)
    for candidate in proposals.direct():
        schedule = candidate.schedule
        fits = math.prod(schedule.register_tile.values()) * points <= PATCH_STATEMENTS
        assert reads_patches(form, schedule) == (fits and not schedule.cached)


@pytest.mark.parametrize(("columns", "fewest"), [(49, 8), (16 * SHORT_ROW, 16), (1024, 32)])
def test_short_rows_are_shared_by_a_part_of_a_warp(columns: int, fewest: int) -> None:
    _, proposals = flat(op="reduce", function="sum", shape=[4096, columns], axes=[1])
    threads = [math.prod(c.schedule.reduce_threads_of.values()) for c in proposals.rows()]
    assert min(threads) == fewest
    # Whole warps all the same.
    assert all(c.schedule.threads_per_block % 32 == 0 for c in proposals.rows())


@pytest.mark.parametrize(("shape", "widest"), [([64, 256], 8), ([3, 36], 4), ([3, 7], 1)])
def test_threads_take_adjacent_elements_only_where_vectors_exist(shape: list[int], widest: int) -> None:
    """Both axes are one: 16384, 108 and 21 halves."""
    form, proposals = flat(op="elementwise", function="relu", shape=shape, dtype="float16")
    assert max(c.schedule.thread_of[form.spatial[-1]] for c in proposals.pointwise()) == widest


def test_every_block_has_an_output_where_a_warp_is_one_thread() -> None:
    form = kernel_form(operator_from_data({"op": "reduce", "function": "sum", "shape": [64, 48], "axes": [0]}))
    proposed = list(Flat(TileSpace.of(form), load_device("ipu"), 0.1).rows())
    assert [candidate.schedule.block_of[form.spatial[-1]] for candidate in proposed] == [1]
