"""Tiles in vector registers: pieces, panels, phases, and where operands are copied."""

from __future__ import annotations

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import AffineIndex, Load
from sokoban.schedule.cpu_tiles import (
    by_vector_axis,
    in_panels,
    phases_of,
    pieces,
    place_of_copy,
    sum_loops,
    vector_axis,
)
from sokoban.schedule.table import ScheduleTable
from tests.sokoban.schedules import form_of, matmul_schedule

DEVICE = load_device("xeon-platinum-8375c")
LANES = 16
MATMUL = form_of(op="matmul", m=512, n=512, k=512)
CONV = form_of(op="conv2d", n=1, c=16, h=20, w=20, f=32, kh=3, kw=3, stride=2, padding=1, layout="NCHW")


@pytest.mark.parametrize(("extent", "count"), [(16, 1), (64, 4), (56, 4), (7, 3), (1, 1), (31, 5)])
def test_pieces_are_whole_vectors_and_falling_powers_of_two(extent: int, count: int) -> None:
    assert pieces(np.array([extent]), LANES).tolist() == [count]


def test_the_last_axis_that_fills_a_vector_has_the_lanes() -> None:
    assert vector_axis("mn", {"m": 32, "n": 16}, LANES) == "n"
    assert vector_axis("mn", {"m": 32, "n": 8}, LANES) == "m"
    assert vector_axis("mn", {"m": 4, "n": 8}, LANES) == "n"


def test_a_table_is_split_by_the_axis_of_its_vectors() -> None:
    threads = ((6, 64), (32, 8), (2, 32))
    table = ScheduleTable.of(MATMUL, [matmul_schedule((64, 64), thread, 512) for thread in threads])
    found = {tiles.axis: positions.tolist() for positions, tiles in by_vector_axis(table, PlacedForm(MATMUL, DEVICE))}
    assert found == {"n": [0, 2], "m": [1]}


def test_operands_lie_in_panels_along_a_plain_axis() -> None:
    a, b = MATMUL.body_loads
    assert not in_panels(a, "n")
    assert in_panels(b, "n")


def test_strides_that_only_the_row_has_are_phases() -> None:
    x = next(load for load in CONV.body_loads if load.tensor == "X")
    assert phases_of(x, "ow") == 2
    assert phases_of(x, "oh") == 1
    diagonal = Load("X", (AffineIndex.axis("i"), AffineIndex((("i", 2),))))
    assert phases_of(diagonal, "i") == 1


def test_a_copy_is_made_outside_the_innermost_loop_that_uses_it_again() -> None:
    a, b = MATMUL.body_loads
    assert place_of_copy(b, ["m", "n"], {"m": 4, "n": 4}) == 0
    assert place_of_copy(a, ["m", "n"], {"m": 4, "n": 4}) == 1
    assert place_of_copy(a, ["m", "n"], {"m": 4, "n": 1}) == 0


def test_the_sum_walks_rows_innermost() -> None:
    nhwc = form_of(op="conv2d", n=1, c=16, h=20, w=20, f=32, kh=3, kw=3, stride=1, padding=1, layout="NHWC")
    assert sum_loops(nhwc, "f")[-1] == "c"
    assert sum_loops(CONV, "ow")[-1] == "kw"
