"""The step of a block: its quantities are worked out once, whichever stages ask for them."""

from __future__ import annotations

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import FUNCTION_INSTRUCTIONS, NEAR_INSTRUCTIONS, Instruction, value_instructions
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import Call, Constant
from sokoban.model.gpu import step as step_module
from sokoban.model.gpu.breakdown import breakdown
from sokoban.model.gpu.stages import between_tiles_seconds, final_seconds_per_block, local_bytes, waiting_seconds
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


@pytest.mark.parametrize("device", ["v100", "a100"])
def test_final_statements_take_what_stores_and_other_blocks_do_not_hide(device: str) -> None:
    board = load_device(device)
    per_instruction = 2 / (board.peak_flops("float32") / board.unit_count)
    instructions = 64 * 64 * value_instructions(Call("gelu", (Constant(1.0),)))
    for name, epilogue in {"none": [], "relu": ["relu"], "gelu": ["gelu"], "twice": ["gelu", "gelu"]}.items():
        form = form_of(op="matmul", m=1024, n=1024, k=512, epilogue=epilogue)
        found = breakdown(ScheduleTable.of(form, [matmul_schedule((64, 64), (4, 4), 16)]), PlacedForm(form, board))
        final = final_seconds_per_block(found.step)
        expected = {"none": 0, "relu": 64 * 64, "gelu": instructions, "twice": 2 * instructions}[name] * per_instruction
        assert final == pytest.approx(expected)
        running, steps = found.step.occupancy.running, 512 / 16
        step_time = np.maximum(found.together, found.alone) + found.unfilled
        left = (1 - 1 / running) * steps * (step_time - found.busy["compute"])
        assert found.finishing == pytest.approx(np.maximum(0, running * final - found.stores - left))
        assert found.whole["compute"] >= found.step.occupancy.rounds * running * final


def test_a_block_by_itself_has_nobody_to_hide_its_final_statement() -> None:
    schedule = matmul_schedule((128, 256), (64, 64), 64, instruction=Instruction.MMA_16X8X16, stages=3)
    units = {}
    for epilogue in ("relu", "gelu"):
        form = form_of(
            op="matmul", m=4096, n=4096, k=512, dtype="float16", accumulate="float32", epilogue=[epilogue]
        )  # fmt: skip
        found = breakdown(ScheduleTable.of(form, [schedule]), PlacedForm(form, load_device("a100")))
        assert found.step.occupancy.running.tolist() == [1]
        final = np.maximum(0, final_seconds_per_block(found.step) - found.stores)
        assert found.finishing == pytest.approx(final + between_tiles_seconds(found.step))
        units[epilogue] = found.units
    assert units["gelu"] > units["relu"]


def test_matrix_instructions_end_with_the_near_functions() -> None:
    form = form_of(op="matmul", m=1024, n=1024, k=512, dtype="float16", accumulate="float32", epilogue=["gelu"])
    schedule = matmul_schedule((128, 128), (64, 64), 32, instruction=Instruction.MMA_16X8X16, stages=3)
    table = ScheduleTable.of(form, [schedule, matmul_schedule((128, 128), (8, 8), 16)])
    near, exact = final_seconds_per_block(BlockStep(table, PlacedForm(form, load_device("a100"))))
    assert near / exact == pytest.approx(NEAR_INSTRUCTIONS["gelu"] / (FUNCTION_INSTRUCTIONS["erf"] + 4))


def test_memory_brings_what_any_of_the_reductions_reads() -> None:
    text = "A[i] = sum(j, X[i,j]); B[i] = sum(j, Z[i,j]); Y[i] = A[i] * B[i] + W[i]"
    form = form_of(expr=text, sizes={"i": 512, "j": 8192})
    assert [load.tensor for load in form.later_loads] == ["Z", "W"]
    schedule = TileSchedule(block=(("i", 1),), thread=(("i", 1),), reduce_threads=(("j", 256),))
    seconds = breakdown(ScheduleTable.of(form, [schedule]), PlacedForm(form, V100)).dram
    moved = (2 * 512 * 8192 + 2 * 512) * 4
    assert seconds == pytest.approx(moved / V100.dram.bandwidth_bytes_per_second)


def test_point_wise_operators_have_no_operands_to_read() -> None:
    form = form_of(op="elementwise", shape=[64, 64], function="relu")
    axis = form.spatial[0]
    table = ScheduleTable.of(form, [TileSchedule(block=((axis, 256),), thread=((axis, 4),))])
    step = BlockStep(table, PlacedForm(form, V100))
    assert step.reads == {} and step.rows is None


def test_what_spills_goes_through_to_l2() -> None:
    """A store of a spilled value takes its bytes to L2 at every point of the reduction."""
    form = form_of(op="matmul", m=4096, n=4096, k=4096)
    schedule = matmul_schedule((128, 128), (16, 16), 32, unroll=1024)
    step = BlockStep(ScheduleTable.of(form, [schedule]), PlacedForm(form, load_device("rtx-3090")))
    (spilled,) = step.occupancy.spilled.tolist()
    assert spilled > 0
    assert local_bytes(step).tolist() == [spilled * 32 * 4 * 64]


def test_operands_in_place_wait_for_new_lines_only() -> None:
    """Along rows of a tensor 32 points find what they need in one line, down its columns in as many."""
    form = form_of(expr="Y[m] = sum([k], X[m,k])", sizes={"m": 4096, "k": 4096})
    turned = form_of(expr="Y[m] = sum([k], X[k,m])", sizes={"m": 4096, "k": 4096})
    schedule = TileSchedule(block=(("m", 128),), thread=(("m", 1),), step=(("k", 64),), unroll=0)

    def waiting(operator: KernelForm) -> float:
        step = BlockStep(ScheduleTable.of(operator, [schedule]), PlacedForm(operator, load_device("v100")))
        return float(waiting_seconds(step)[0])

    assert waiting(form) < waiting(turned)
