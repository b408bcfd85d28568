"""What the compilers make of the inner loops: bodies, and accumulators that lose their registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sokoban.model.gpu.loops import COMPILER_UNROLL, PROMOTED_STATEMENTS, loop_nest
from sokoban.schedule.table import ScheduleTable
from tests.sokoban.schedules import form_of, matmul_schedule

MATMUL = form_of(op="matmul", m=1024, n=1024, k=1024)
CONV = form_of(op="conv2d", n=8, c=64, h=56, w=56, f=64, kh=3, kw=3)


def table_of(thread: tuple[int, int], step: int, unroll: int, vthreads: tuple[int, int] = (1, 1)) -> ScheduleTable:
    block = (thread[0] * vthreads[0] * 8, thread[1] * vthreads[1] * 8)
    return ScheduleTable.of(MATMUL, [matmul_schedule(block, thread, step, vthreads=vthreads, unroll=unroll)])


@pytest.mark.parametrize("unroll", [0, 16, 1024])
def test_a_short_body_is_unrolled_by_somebody(unroll: int) -> None:
    nest = loop_nest(table_of((4, 4), 8, unroll))
    assert nest.unrolled["k"].tolist() == [8] and nest.unrolled_points.tolist() == [8]
    assert not nest.local.any()


def test_a_body_ends_where_it_gets_too_long() -> None:
    # 64 accumulators: 16 points of the reduction are 1024 statements, 32 are too many.
    assert 64 * 16 <= COMPILER_UNROLL < 64 * 32
    assert loop_nest(table_of((8, 8), 16, 0)).unrolled_points.tolist() == [16]
    assert loop_nest(table_of((8, 8), 32, 0)).unrolled_points.tolist() == [1]
    assert loop_nest(table_of((8, 8), 32, 4096)).unrolled_points.tolist() == [32]


def test_windows_are_unrolled_from_the_inside() -> None:
    schedule = matmul_schedule((8, 8), (4, 4), 8).with_(
        block=(("n", 1), ("f", 64), ("oh", 8), ("ow", 8)),
        thread=(("n", 1), ("f", 16), ("oh", 1), ("ow", 8)),
        vthreads=(),
        step=(("c", 8), ("kh", 3), ("kw", 3)),
        cached=("X", "W"),
        unroll=0,
    )
    nest = loop_nest(ScheduleTable.of(CONV, [schedule]))
    # 128 accumulators leave room for 3 points along kw, not for 9.
    assert {axis: int(values[0]) for axis, values in nest.unrolled.items()} == {"c": 1, "kh": 1, "kw": 3}


def test_many_accumulators_need_the_schedule_to_unroll_them() -> None:
    tile, many = (16, 32), 512
    assert many > PROMOTED_STATEMENTS
    assert loop_nest(table_of(tile, 1, 16)).local.tolist() == [True]
    assert loop_nest(table_of(tile, 1, many)).local.tolist() == [False]


def test_virtual_threads_are_written_out_up_to_a_point() -> None:
    few, crowd = table_of((2, 2), 1, 0, vthreads=(3, 5)), table_of((2, 2), 1, 0, vthreads=(8, 16))
    assert not loop_nest(few).local.any()
    # 128 copies in a loop of their own, four elements around them: more than the compiler unrolls.
    assert loop_nest(crowd).local.tolist() == [True]


def test_an_outer_accumulator_loop_counts_what_is_inside_it() -> None:
    """A loop over accumulators around a long reduction loop is longer than the same loop inside it."""
    table = table_of((8, 8), 32, 0)
    inside = loop_nest(table).local
    outside = loop_nest(replace(table, inner_thread={"m": np.array([1]), "n": np.array([1])})).local
    assert (inside.tolist(), outside.tolist()) == ([False], [True])
