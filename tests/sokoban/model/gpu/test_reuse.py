"""Data that steps read again: what a cache has still."""

from __future__ import annotations

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import data_tile_shape
from sokoban.model.gpu.reuse import bytes_of_all_steps, is_read_again, turns_between
from sokoban.model.gpu.stages import l2_bytes
from sokoban.model.gpu.step import BlockStep
from sokoban.model.gpu.transactions import SuperTile, dram_bytes
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule

V100 = load_device("v100")
#: A row of 32 outputs needs 34 columns of three rows of an image, a row and a column at a step.
WINDOW = form_of(op="depthwise_conv2d", n=2, c=64, h=34, w=34, kh=3, kw=3, padding="VALID")
STEPS = TileSchedule(
    block=(("n", 1), ("c", 1), ("oh", 4), ("ow", 32)), thread=(("n", 1), ("c", 1), ("oh", 1), ("ow", 1)),
    step=(("kh", 1), ("kw", 1)), cached=("X", "W"),
)  # fmt: skip


def all_steps(form: KernelForm, schedule: TileSchedule, tensor: str, capacity: float) -> float:
    """Elements of a tensor that a block takes from beyond a cache of so many."""
    table = ScheduleTable.of(form, [schedule])
    (load,) = [load for load in form.body_loads if load.tensor == tensor]
    moved = bytes_of_all_steps(
        table, load, table.block, capacity, lambda each, tile: np.prod(data_tile_shape(each, tile), axis=0)
    )
    return float(moved[0])


def test_a_cache_with_room_has_each_element_once() -> None:
    assert all_steps(WINDOW, STEPS, "X", capacity=1e6) == pytest.approx(6 * 34)


def test_without_room_every_step_reads_its_tile() -> None:
    assert all_steps(WINDOW, STEPS, "X", capacity=1.0) == pytest.approx(9 * 4 * 32)


def test_less_room_than_a_step_takes_keeps_a_share() -> None:
    # A step touches 128 elements and one of the filter, a turn over the rows 136 and three.
    assert all_steps(WINDOW, STEPS, "X", capacity=139.0) == pytest.approx(6 * 34)
    assert 6 * 34 < all_steps(WINDOW, STEPS, "X", capacity=90.0) < 9 * 4 * 32


def test_strides_put_turns_between() -> None:
    strided = form_of(op="conv2d", n=1, c=8, h=33, w=33, f=8, kh=3, kw=3, stride=2, padding="VALID")
    (image,) = [load for load in strided.body_loads if load.tensor == "X"]
    assert [turns_between(strided, image, axis) for axis in strided.reduced] == [1.0, 2.0, 2.0]


def test_products_read_no_element_again() -> None:
    product = form_of(op="matmul", m=64, n=64, k=64)
    assert not any(is_read_again(product, load) for load in product.body_loads)
    assert [load.tensor for load in WINDOW.body_loads if is_read_again(WINDOW, load)] == ["X"]


def test_l1_saves_the_ends_of_transactions() -> None:
    # Rows of four elements of A are half a transaction of 32 bytes; the next step finds the other half in L1.
    product = form_of(op="matmul", m=1024, n=1024, k=1024)
    short, long = (
        float(l2_bytes(BlockStep(table, PlacedForm(product, V100)))[0]) / step
        for step in (4, 8)
        for table in [ScheduleTable.of(product, [matmul_schedule((64, 64), (4, 4), step)])]
    )
    assert short == pytest.approx(long, rel=0.02)


def test_rows_that_l2_has_not_room_for_come_from_dram_again() -> None:
    form = form_of(op="depthwise_conv2d", n=512, c=512, h=34, w=34, kh=3, kw=3, padding="VALID")
    (image,) = [load for load in form.body_loads if load.tensor == "X"]
    table = ScheduleTable.of(form, [STEPS])
    sizes = {axis: np.array([form.sizes[axis]]) for axis in (*form.spatial, *form.reduced)}
    few = SuperTile({**sizes, "n": np.array([1]), "c": np.array([512])}, np.array([512.0]))
    all_at_once = SuperTile(sizes, np.array([1.0]))
    once = dram_bytes(table, image, V100, few)[0]
    assert once == pytest.approx(512 * 512 * 34 * 34 * 4, rel=0.05)
    assert dram_bytes(table, image, V100, all_at_once)[0] > 2.5 * once
