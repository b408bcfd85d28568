"""The step of a block: its quantities are worked out once, whichever stages ask for them."""

from __future__ import annotations

import pytest

from hal.catalog import load_device
from sokoban.kernel.placed import PlacedForm
from sokoban.model.gpu import step as step_module
from sokoban.model.gpu.breakdown import breakdown
from sokoban.model.gpu.step import BlockStep
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule

V100 = load_device("v100")
MATMUL = form_of(op="matmul", m=1024, n=1024, k=512)
PLACED = PlacedForm(MATMUL, V100)


def test_one_breakdown_asks_for_the_occupancy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BlockStep] = []
    original = step_module.occupancy_of

    def counted(step: BlockStep) -> step_module.Occupancy:
        asked.append(step)
        return original(step)

    monkeypatch.setattr(step_module, "occupancy_of", counted)
    found = breakdown(ScheduleTable.of(MATMUL, [matmul_schedule((64, 64), (4, 4), 16)]), PLACED)
    assert asked == [found.step]


def test_rounds_are_the_blocks_of_the_busiest_unit_by_those_that_run() -> None:
    step = BlockStep(ScheduleTable.of(MATMUL, [matmul_schedule((64, 64), (4, 4), 16)]), PLACED)
    occupancy = step.occupancy
    # 256 blocks on 80 units: four for the busiest of them.
    assert (occupancy.rounds * occupancy.running).tolist() == [4.0]
    assert occupancy.running <= occupancy.resident


def test_point_wise_operators_have_no_operands_to_read() -> None:
    form = form_of(op="elementwise", shape=[64, 64], function="relu")
    axis = form.spatial[0]
    table = ScheduleTable.of(form, [TileSchedule(block=((axis, 256),), thread=((axis, 4),))])
    step = BlockStep(table, PlacedForm(form, V100))
    assert step.reads == {} and step.rows is None
