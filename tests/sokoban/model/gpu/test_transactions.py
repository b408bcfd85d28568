"""Transactions by closed form against the 32-byte segments that a tile really touches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import Load
from sokoban.language.parser import parse_program
from sokoban.model.gpu.transactions import super_tile, tile_transaction_bytes, touched_bytes
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule

BYTES = 32


def parse(text: str, dtypes: dict[str, str] | None = None, shapes: Any = None, **sizes: int) -> KernelForm:
    return kernel_form(parse_program(text, sizes, dtypes or {}, shapes=shapes))


def closed_form(form: KernelForm, load: Load, tile: Mapping[str, int], by_lane: bool = False) -> float:
    unit = tuple((axis, 1) for axis in form.spatial)
    table = ScheduleTable.of(form, [TileSchedule(block=unit, thread=unit)])
    columns = {axis: np.array([size], dtype=np.int64) for axis, size in tile.items()}
    return float(tile_transaction_bytes(table, load, columns, BYTES, by_lane)[0])


def segments(form: KernelForm, load: Load, tile: Mapping[str, int], block: Mapping[str, int]) -> int:
    """Different segments among the addresses of every point of one block's tile."""
    tensor = form.expr.tensor_by_name[load.tensor]
    found = set()
    for point in itertools.product(
        *(range(block[axis] * size, (block[axis] + 1) * size) for axis, size in tile.items())
    ):
        at = dict(zip(tile, point, strict=True))
        address = 0
        for index, extent in zip(load.indices, tensor.shape, strict=True):
            value = index.offset + sum(c * at[axis] for axis, c in index.terms)
            assert 0 <= value < extent
            address = address * extent + value
        found.add(address * tensor.element_bytes // BYTES)
    return len(found)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2), st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from(["float16", "float32", "float64"]),
)  # fmt: skip
def test_aligned_tiles_are_exact(rows: int, runs: int, blocks: int, position: int, stride: int, dtype: str) -> None:
    """``X[i, stride*j]`` in tiles of whole transactions: dense runs, gaps within and beyond a transaction."""
    assume(position < blocks)
    width = runs * 32
    sizes = {"i": rows * 2, "j": width * blocks}
    form = parse(f"Y[j,i] = X[i,{stride}*j]", {"X": dtype}, {"X": [rows * 2, stride * width * blocks]}, **sizes)
    (load,) = form.body_loads
    tile = {"i": rows, "j": width}
    assert closed_form(form, load, tile) == BYTES * segments(form, load, tile, {"i": 1, "j": position})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.sampled_from(["float16", "float32", "float64"]), st.integers(1, 40))
def test_unaligned_runs_are_right_on_average(width: int, dtype: str, more: int) -> None:
    """Odd widths start at every residue equally often, and the closed form is their mean."""
    width = 2 * width + 1
    blocks = 32
    form = parse("Y[j] = exp(X[j])", {"X": dtype}, j=width * blocks)
    (load,) = form.body_loads
    tile = {"j": width}
    mean = sum(segments(form, load, tile, {"j": block}) for block in range(blocks)) / blocks
    assert closed_form(form, load, tile) == pytest.approx(BYTES * mean)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 2, 3, 5]), st.integers(1, 3),
    st.integers(1, 3), st.integers(0, 3),
)  # fmt: skip
def test_windows_lie_between_their_elements_and_one_more_transaction_per_row(
    rows: int, columns: int, window: int, stride: int, dilation: int, blocks: int, offset: int
) -> None:
    reach = stride * (columns * blocks - 1) + dilation * (window - 1) + offset + 1
    form = parse(
        f"Y[i,j] = sum(k, X[i, {stride}*j + {dilation}*k + {offset}] * W[k] * V[j])",
        shapes={"X": [rows, reach]}, i=rows, j=columns * blocks, k=window,
    )  # fmt: skip
    load = next(load for load in form.body_loads if load.tensor == "X")
    tile = {axis: {"i": rows, "j": columns, "k": window}[axis] for axis in (*form.spatial, *form.reduced)}
    value = closed_form(form, load, tile)
    span = stride * (columns - 1) + dilation * (window - 1) + 1
    for block in range(blocks):
        exact = BYTES * segments(form, load, tile, {"i": 0, "j": block, "k": 0})
        # A row of the hull touches at most this many; the closed form averages, so it may be one less or more.
        assert exact <= BYTES * rows * (4 * span // BYTES + 2)
        assert value <= BYTES * rows * (4 * span // BYTES + 2)
        assert value >= exact - BYTES * rows


def test_matmul_tiles_by_hand() -> None:
    form = form_of(op="matmul", m=128, n=256, k=64)
    a, b = form.body_loads
    tile = {"m": 32, "n": 48, "k": 8}
    assert closed_form(form, a, tile) == 32 * (8 * 4)  # 32 rows of one transaction
    assert closed_form(form, b, tile) == 8 * (48 * 4)  # 8 rows of six
    # Twelve floats at multiples of 48 bytes: 16-byte alignment, (48 + 32 - 16) / 32 = 2 transactions a row.
    assert closed_form(form, b, {**tile, "n": 12}) == 8 * 2 * BYTES
    # Whole rows run on: 8 rows of 1024 bytes are one piece.
    assert closed_form(form, b, {**tile, "n": 256}) == 8 * 256 * 4


def test_a_thin_tile_pays_a_transaction_per_element_at_most() -> None:
    form = form_of(op="matmul", m=128, n=256, k=64)
    a = form.body_loads[0]
    assert closed_form(form, a, {"m": 16, "n": 1, "k": 1}) == 16 * BYTES
    assert closed_form(form, a, {"m": 16, "n": 1, "k": 8}, by_lane=True) == 16 * 8 * BYTES


def test_narrow_rows_that_are_whole_run_on() -> None:
    form = parse("Y[j,i] = X[i,j]", i=64, j=6)
    (load,) = form.body_loads
    tile = {"i": 16, "j": 6}
    # 16 rows of 24 bytes are 384 contiguous bytes: twelve transactions; the start may straddle one more.
    assert 12 * BYTES <= closed_form(form, load, tile) < 13 * BYTES
    assert {segments(form, load, tile, {"i": block, "j": 0}) for block in range(4)} == {12}


def test_a_scalar_is_one_transaction() -> None:
    form = parse("Y[i] = X[i] * s[0]", i=64)
    load = next(load for load in form.body_loads if load.tensor == "s")
    assert closed_form(form, load, {"i": 8}) == BYTES


# What runs together


def super_sizes(blocks: int, **more: Any) -> tuple[dict[str, int], float]:
    form = form_of(op="matmul", m=1000, n=700, k=64)
    table = ScheduleTable.of(form, [matmul_schedule((100, 50), (5, 5), 8)])
    together = super_tile(table, np.array([blocks]))
    return {axis: int(column[0]) for axis, column in together.tile.items()}, float(together.rounds[0])


@pytest.mark.parametrize(
    ("blocks", "m", "n", "rounds"),
    [
        (1, 100, 50, 10 * 14),
        (5, 100, 5 * 50, 10 * 3),  # 14 blocks along n in fives: three rounds, the last one of four
        (14, 100, 700, 10),
        (28, 200, 700, 5),
        (41, 200, 700, 5),  # two whole rows of blocks; a third does not fit
        (42, 300, 700, 4),
        (140, 1000, 700, 1),
        (999, 1000, 700, 1),
    ],
)
def test_blocks_that_run_together_cover_the_last_axis_first(blocks: int, m: int, n: int, rounds: int) -> None:
    assert super_sizes(blocks) == ({"m": m, "n": n, "k": 64}, rounds)


def test_what_an_operator_touches_of_a_tensor() -> None:
    dense = form_of(op="matmul", m=100, n=70, k=64)
    assert [touched_bytes(dense, load, BYTES) for load in dense.body_loads] == [4 * 100 * 64, 4 * 64 * 70]
    # Every second row of every channel, and all transactions of each: half of the tensor, at most one more a row.
    strided = form_of(op="conv2d", n=1, c=16, h=64, w=64, f=8, kh=1, kw=1, stride=2)
    x = next(load for load in strided.body_loads if load.tensor == "X")
    row_bytes = 4 * 64
    assert 16 * 32 * row_bytes <= touched_bytes(strided, x, BYTES) <= 16 * 32 * (row_bytes + BYTES)
    # One column in sixteen: a transaction for each element.
    sparse = parse("Y[j] = X[16*j] + 1", shapes={"X": [16 * 100]}, j=100)
    assert touched_bytes(sparse, sparse.body_loads[0], BYTES) == 100 * BYTES
