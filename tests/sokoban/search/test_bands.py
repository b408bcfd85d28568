"""Bands of blocks: what runs together, counted block by block, and the widths that are proposed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from roller.construct.construct import construct
from sokoban.kernel.placed import PlacedForm
from sokoban.model.gpu.transactions import super_tile
from sokoban.model.rational import estimate, estimate_schedules
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule, sizes
from sokoban.search.bands import bands, in_bands
from sokoban.search.search import search
from tests.sokoban.schedules import form_of

A100 = load_device("a100")
LARGE = {"op": "matmul", "m": 8192, "n": 8192, "k": 8192, "dtype": "float16"}


def small_l2(device: DeviceSpec) -> DeviceSpec:
    """The same board with an L2 that large products do not fit into at all."""
    layers = [
        msgspec.structs.replace(layer, capacity_bytes=1 << 20) if layer.name == "l2" else layer
        for layer in device.layers
    ]
    return msgspec.structs.replace(device, layers=tuple(layers))


def schedule(raster: int) -> TileSchedule:
    return TileSchedule(
        block=sizes({"m": 100, "n": 50}), thread=sizes({"m": 5, "n": 5}), step=sizes({"k": 8}), cached=("A", "B"),
        raster=raster,
    )  # fmt: skip


@pytest.mark.parametrize("raster", [1, 2, 4, 7, 14, 64])
@pytest.mark.parametrize("blocks", [1, 5, 20, 28, 60])
def test_blocks_that_run_together_cover_what_their_order_says(raster: int, blocks: int) -> None:
    form = form_of(op="matmul", m=1000, n=700, k=64)
    table = ScheduleTable.of(form, [schedule(raster), schedule(0)])
    together = super_tile(table, np.array([blocks, blocks]))
    rows, columns = 10, 14
    width = min(raster, columns)
    # Bands as wide as the last one is not are counted as whole ones, as rows of blocks are that are not done.
    order = [(m, n) for band in range(0, columns, width) for m in range(rows) for n in range(band, band + width)]
    first = order[:blocks]
    covered = [len({block[axis] for block in first}) for axis in (0, 1)]
    reached = [int(together.tile["m"][0]) // 100, -(-int(together.tile["n"][0]) // 50)]
    assert reached[0] <= covered[0] and reached[1] <= covered[1]
    # No more blocks than there are, and more than half of them.
    assert min(blocks, len(order)) / 2 < max(1, reached[0]) * max(1, reached[1]) <= blocks
    plain = super_tile(table.candidates(np.array([1])), np.array([blocks]))
    assert int(together.tile["m"][1]) == int(plain.tile["m"][0]) and together.rounds[1] == plain.rounds[0]


def test_the_width_of_bands_is_about_the_best_of_all() -> None:
    form, device = form_of(op="matmul", m=16384, n=16384, k=1024), small_l2(A100)
    table = ScheduleTable.of(
        form, [schedule(0).with_(block=sizes({"m": 128, "n": 128}), thread=sizes({"m": 8, "n": 8}))]
    )
    placed = PlacedForm(form, device)
    found = estimate(table, placed)
    slow = replace(found, seconds=found.stage_seconds["dram"])
    chosen = int(bands(table, slow, PlacedForm(table.form, device))[0])
    dram = {
        width: float(estimate(table.with_raster(np.array([width])), placed).stage_seconds["dram"][0])
        for width in (0, 1, 2, 4, 8, 16, 32, 64)
    }
    assert chosen > 0 and dram[chosen] < dram[0]
    assert dram[chosen] <= 1.1 * min(dram.values())


def test_bands_are_proposed_where_they_spare_traffic_that_counts() -> None:
    form = form_of(**LARGE)
    device = small_l2(A100)
    for best in (construct(form, device).programs[0], search(form, device)):
        made = best.schedules[0] if hasattr(best, "schedules") else best.schedule
        assert made.raster > 0
        plain, banded = estimate_schedules(form, device, [made.with_(raster=0), made]).seconds
        assert banded < plain
    # An operand that stays in L2 is read once in any order.
    small = construct(form_of(op="matmul", m=1024, n=1024, k=1024), A100)
    assert all(program.schedule.raster == 0 for program in small.programs)


def test_without_bands_nothing_is_estimated_anew() -> None:
    form = form_of(op="matmul", m=1024, n=1024, k=1024)
    table = ScheduleTable.of(form, [schedule(0)])
    raster, found = in_bands(
        table, np.array([0]), estimate(table, PlacedForm(table.form, A100)), PlacedForm(table.form, A100)
    )
    assert (
        raster.tolist() == [0]
        and found.seconds.tolist() == estimate(table, PlacedForm(table.form, A100)).seconds.tolist()
    )
