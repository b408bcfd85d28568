"""Turned tiles and steps fetched ahead: which schedules have them, and what RATIONAL makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.parser import parse_program
from sokoban.model.gpu.banks import busiest_bank, lane_words
from sokoban.model.gpu.fetch import fetch, turned_store_passes
from sokoban.model.gpu.loops import loop_nest
from sokoban.model.gpu.operands import operand_reads
from sokoban.model.rational import estimate
from sokoban.schedule.pipelines import (
    BODY_STATEMENTS,
    asynchronous_problem,
    copies_past_registers,
    fetched_ahead,
    fully_staged,
    pipeline_variants,
    turned_tensors,
    with_layouts,
)
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule, sizes
from sokoban.search.padding import bank_padding
from tests.sokoban.schedules import form_of, matmul_schedule

V100, A100 = load_device("v100"), load_device("a100")
MATMUL = form_of(op="matmul", m=1024, n=1024, k=1024)


def schedule(step: int = 8, **changes: Any) -> TileSchedule:
    made = TileSchedule(
        block=sizes({"m": 128, "n": 128}), thread=sizes({"m": 4, "n": 4}), vthreads=sizes({"m": 2, "n": 2}),
        step=sizes({"k": step}), cached=("A", "B"),
    )  # fmt: skip
    return made.with_(**changes)


def table_of(*schedules: TileSchedule) -> ScheduleTable:
    return ScheduleTable.of(MATMUL, schedules)


def test_tensors_that_the_reduction_walks_innermost_are_turned() -> None:
    assert turned_tensors(MATMUL) == ("A",)
    assert turned_tensors(form_of(op="matmul", m=64, n=64, k=64, transpose_a=True, transpose_b=True)) == ("B",)
    assert turned_tensors(form_of(op="batch_matmul", b=4, m=64, n=64, k=64)) == ("A",)
    assert turned_tensors(form_of(op="conv2d", n=4, c=8, h=14, w=14, f=16, kh=3, kw=3)) == ("W",)


def test_a_turned_operand_is_read_as_vectors_and_a_plain_one_word_by_word() -> None:
    load = MATMUL.body_loads[0]
    table = table_of(schedule(1, padding=sizes({"A": 1})), schedule(1, turned=("A",)))
    assert operand_reads(table, load, V100, loop_nest(table)).width.tolist() == [1, 4]
    # Alone or beside others, a schedule is read the same.
    for row in range(2):
        one = table.candidates(slice(row, row + 1))
        assert lane_words(one, load, V100).tolist() == lane_words(table, load, V100)[row : row + 1].tolist()


@pytest.mark.parametrize("step", [4, 8, 16, 32])
@pytest.mark.parametrize("padding", [0, 4])
def test_stores_into_turned_tiles_are_counted_as_their_addresses_say(step: int, padding: int) -> None:
    table = table_of(schedule(step, turned=("A",)))
    load = MATMUL.body_loads[0]
    numbers = np.arange(32) * 4
    addresses = (numbers % step) * (128 + padding) + numbers // step
    counted = busiest_bank(addresses[None, :], 32)
    assert turned_store_passes(table, load, V100, np.array([padding])).tolist() == counted.tolist()


def test_padding_takes_conflicts_from_the_stores_and_leaves_reads_aligned() -> None:
    table = table_of(schedule(8, turned=("A",)), schedule(8))
    assert bank_padding(table, PlacedForm(MATMUL, V100))["A"].tolist()[0] == 4
    padded = table.with_padding(bank_padding(table, PlacedForm(MATMUL, V100)))
    assert turned_store_passes(padded, MATMUL.body_loads[0], V100, padded.padding["A"])[0] == 1.0


def test_steps_fetched_ahead_take_no_longer_than_steps_fetched_one_by_one() -> None:
    for step in (8, 16):
        one, two = (schedule(step, turned=("A",), unroll=512, stages=stages) for stages in (1, 2))
        found = estimate(table_of(one, two), PlacedForm(MATMUL, V100))
        assert found.shared_bytes.tolist() == [8 * step * 128, 16 * step * 128]
        assert found.seconds[1] < found.seconds[0]
        assert found.stage_seconds["latency"][1] < found.stage_seconds["latency"][0]


def test_what_a_pipeline_fetches_is_held_in_registers() -> None:
    shallow, deep = (schedule(step, turned=("A",), unroll=512, stages=2) for step in (8, 32))
    registers = estimate(table_of(shallow, deep), PlacedForm(MATMUL, V100)).registers
    # 128 x 8 elements of either operand among 256 threads, and four times as many; their accesses are distinguished by
    # constants.
    assert registers[1] - registers[0] == 3 * 2 * 128 * 8 // 256


def test_copies_past_the_registers_hold_none_and_take_a_buffer_per_step_ahead() -> None:
    through, past = (
        schedule(16, turned=("A",), unroll=512, stages=2),
        schedule(16, turned=("A",), unroll=512, stages=3, asynchronous=True),
    )
    found = estimate(table_of(through, past), PlacedForm(MATMUL, A100))
    assert found.registers[0] - found.registers[1] == 2 * 128 * 16 // 256
    assert found.shared_bytes.tolist() == [2 * 16 * 1024, 3 * 16 * 1024]
    # Further ahead there is less to wait for.
    waits = [through.with_(stages=stages, asynchronous=True) for stages in (2, 3, 4)]
    latency = estimate(table_of(*waits), PlacedForm(MATMUL, A100)).stage_seconds["latency"]
    assert latency[0] >= latency[1] >= latency[2]


def test_an_asynchronous_copy_into_a_turned_tile_takes_one_element() -> None:
    a, b = MATMUL.body_loads
    table = table_of(schedule(8, turned=("A",), stages=2), schedule(8, turned=("A",), stages=2, asynchronous=True))
    assert fetch(table, a, A100).loads.tolist() == [1.0, 4.0]
    assert fetch(table, b, A100).loads.tolist() == [1.0, 1.0]


def test_only_boards_with_asynchronous_copies_are_proposed_them() -> None:
    assert not copies_past_registers(V100) and not copies_past_registers(load_device("t4"))
    assert copies_past_registers(A100) and copies_past_registers(load_device("h200"))
    assert pipeline_variants(PlacedForm(MATMUL, V100)) == ((2, False),)
    placed = PlacedForm(MATMUL, A100)
    assert pipeline_variants(placed) == ((2, False), (2, True), (3, True), (4, True))
    ahead = fetched_ahead(table_of(schedule(16)), placed)
    assert {(int(part.stages[0]), bool(part.asynchronous[0])) for part in ahead} == set(pipeline_variants(placed))


def test_what_a_copy_cannot_do_is_said() -> None:
    assert asynchronous_problem(MATMUL) is None
    half = form_of(op="matmul", m=64, n=64, k=64, dtype="float16")
    assert asynchronous_problem(half) == "elements of A are smaller than the 4 bytes of a copy"
    assert pipeline_variants(PlacedForm(half, A100)) == ((2, False),)
    mixed = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 8, "j": 8, "k": 8}, {"A": "float64"})
    assert asynchronous_problem(kernel_form(mixed)) == "tensors of float64 and float32 have no buffer in common"


def test_a_guard_worked_out_once_costs_less_and_leaves_vectors_whole() -> None:
    form = form_of(op="conv2d", n=4, c=64, h=28, w=28, f=64, kh=1, kw=1, padding=4)
    tiles = TileSchedule(
        block=sizes({"n": 1, "f": 64, "oh": 4, "ow": 4}), thread=sizes({"n": 1, "f": 4, "oh": 1, "ow": 4}),
        step=sizes({"c": 8, "kh": 1, "kw": 1}), cached=("X", "W"),
    )  # fmt: skip
    steps = tuple((axis, size) for axis, size in tiles.step if axis in form.reduced)
    table = ScheduleTable.of(form, [tiles.with_(step=steps), tiles.with_(step=steps, stages=2)])
    guarded = next(load for load in form.body_loads if load.tensor == "X")
    found = fetch(table, guarded, V100)
    assert found.instructions[1] < found.instructions[0] and found.loads[1] <= found.loads[0]


def test_only_what_stages_everything_is_proposed_ahead() -> None:
    table = table_of(schedule(16), schedule(16, cached=("B",)), schedule(1024), schedule(16, stages=2))
    assert fully_staged(table).tolist() == [True, False, True, True]
    found = fetched_ahead(table, PlacedForm(MATMUL, V100))
    assert all((part.stages == 2).all() for part in found)
    # In its own steps and in halves and quarters; a single step only in parts.
    assert sorted(int(k) for part in found for k in part.step["k"]) == [4, 8, 16, 256, 512]
    laid = with_layouts(table, fully_staged(table))
    assert laid.turned["A"].tolist() == [True, False, True, True] and not laid.turned["B"].any()
    assert laid.unroll.tolist() == [BODY_STATEMENTS, 64, BODY_STATEMENTS, BODY_STATEMENTS]


def test_a_schedule_of_one_tile_per_thread_is_no_pipeline_of_its_own() -> None:
    assert fetched_ahead(table_of(matmul_schedule((64, 64), (4, 4), 8).with_(stages=2)), PlacedForm(MATMUL, V100)) == []
