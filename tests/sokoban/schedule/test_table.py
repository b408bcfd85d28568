"""Columns of schedules against the schedules themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.pipelines import fully_staged
from sokoban.schedule.table import Lines, ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule, schedules

CONV = form_of(op="conv2d", n=3, c=5, h=17, w=19, f=7, kh=3, kw=2, stride=2)
MATMUL = form_of(op="matmul", m=121, n=113, k=99)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from([CONV, MATMUL]))
def test_rows_answer_as_their_schedules_do(data: st.DataObject, form: KernelForm) -> None:
    rows = data.draw(st.lists(schedules(form), min_size=1, max_size=5))
    table = ScheduleTable.of(form, rows)
    assert table.count == len(rows)
    for position, schedule in enumerate(rows):
        assert table.threads_per_block[position] == schedule.threads_per_block
        assert table.block_count[position] == schedule.grid_blocks(form.sizes)
        for axis in form.spatial:
            assert table.register_tile[axis][position] == schedule.register_tile[axis]
            assert table.threads[axis][position] == schedule.threads_of[axis]
        assert table.accumulators[position] == math.prod(schedule.register_tile.values())
        steps = math.prod(-(-form.sizes[axis] // size) for axis, size in schedule.step)
        assert table.step_count[position] == steps
        assert {axis: int(column[position]) for axis, column in table.block_tile.items()} == {
            **schedule.block_of,
            **schedule.step_of,
        }
        for tensor, column in table.padding.items():
            assert column[position] == schedule.padding_of.get(tensor, 0)


def test_schedules_of_different_kinds_share_a_table() -> None:
    reducing = TileSchedule(block=(("m", 2), ("n", 1)), thread=(("m", 1), ("n", 1)), reduce_threads=(("k", 64),))
    matrix = matmul_schedule((64, 32), (32, 16), 16, instruction=Instruction.WMMA)
    plain = matmul_schedule((24, 40), (3, 5), 9, vthreads=(2, 1), cached=("B",))
    table = ScheduleTable.of(MATMUL, [reducing, matrix, plain])
    assert table.threads_per_block.tolist() == [2 * 64, 2 * 2 * 32, (24 // 6) * (40 // 5)]
    assert table.reduce_threads.tolist() == [64, 1, 1]
    assert table.warp_tile.tolist() == [False, True, False]
    assert table.cached["A"].tolist() == [False, True, False]
    assert table.cached["B"].tolist() == [False, True, True]
    # Without a step of its own the reduction is one step.
    assert table.step["k"].tolist() == [99, 16, 9]
    assert table.step_count.tolist() == [1, math.ceil(99 / 16), 99 // 9]


def test_the_columns_of_a_row_are_in_its_tile() -> None:
    form = form_of(op="softmax", shape=[5, 33])
    table = ScheduleTable.of(
        form, [TileSchedule(block=(("i0", 2),), thread=(("i0", 1),), reduce_threads=(("i1", 32),))]
    )
    assert {axis: column.tolist() for axis, column in table.block_tile.items()} == {"i0": [2], "i1": [33]}


def test_pointwise_operators_have_no_steps() -> None:
    form = form_of(op="elementwise", function="relu", shape=[17, 19])
    (axis,) = form.spatial
    table = ScheduleTable.of(form, [TileSchedule(block=((axis, 96),), thread=((axis, 3),))])
    assert (table.step, table.step_count.tolist()) == ({}, [1])
    assert table.block_count.tolist() == [math.ceil(17 * 19 / 96)]


def test_other_padding_leaves_everything_else_as_it_was() -> None:
    rows = [matmul_schedule((24, 40), (3, 5), 9), matmul_schedule((12, 8), (3, 2), 11, padding=(("A", 1),))]
    table = ScheduleTable.of(MATMUL, rows)
    block_count = table.block_count
    padded = table.with_padding({"A": np.array([3, 5]), "B": np.array([0, 7])})
    assert padded.padding["B"].tolist() == [0, 7]
    assert table.padding["A"].tolist() == [0, 1]
    assert padded.block_count is block_count
    assert padded.block is table.block


def test_lines_are_the_columns_however_a_table_is_made() -> None:
    rows = [
        matmul_schedule((24, 40), (3, 5), 9, vector=(("A", 2),), stages=2, asynchronous=True),
        matmul_schedule((12, 8), (3, 2), 11, cached=("A",), turned=("A",), padding=(("A", 1),), raster=4),
        matmul_schedule((12, 8), (3, 2), 99, unroll=7),
    ]
    table = ScheduleTable.of(MATMUL, rows)
    # A table of the same columns, of which nothing else is known.
    np.testing.assert_array_equal(replace(table).lines, table.lines)
    chosen, which = table.candidates(np.array([2, 0])), np.array([2, 0])
    np.testing.assert_array_equal(chosen.lines, table.lines[:, which])
    np.testing.assert_array_equal(replace(chosen).lines, chosen.lines)
    assert chosen.raster.tolist() == [0, 0] and table.candidates(slice(1, 2)).raster.tolist() == [4]
    assert chosen.asynchronous.tolist() == [False, True] and chosen.unroll.tolist() == [7, 64]


def test_lines_and_tables_agree_on_what_is_staged_and_walked_in_steps() -> None:
    rows = [
        matmul_schedule((24, 40), (3, 5), 9),
        matmul_schedule((24, 40), (3, 5), 9, cached=("A",)),
        matmul_schedule((24, 40), (3, 5), 1024),
        matmul_schedule((24, 40), (3, 5), 9, reduce_threads=(("k", 2),)),
    ]
    lines, table = Lines(MATMUL), ScheduleTable.of(MATMUL, rows)
    matrix = lines.of(rows)
    assert lines.fully_staged(matrix).tolist() == fully_staged(table).tolist() == [True, False, True, False]
    assert lines.has_steps(matrix).tolist() == (table.step_count > 1).tolist()
    matrix[lines.turned("B"), 1] = 1
    assert lines.table(matrix, rows).turned["B"].tolist() == [False, True, False, False]


def test_a_tile_of_other_axes_is_refused() -> None:
    with pytest.raises(ValueError):
        ScheduleTable.of(MATMUL, [TileSchedule(block=(("m", 2),), thread=(("m", 1),))])
