"""Exhaustive search: inside every limit, the same every time, and as good as brute force where that is possible."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.table import ScheduleTable, join
from sokoban.schedule.tile import TileSchedule
from sokoban.search.columns import schedule_at
from sokoban.search.padding import bank_padding, formula_padding
from sokoban.search.screen import BAND, efficient
from sokoban.search.search import SearchResult, families, search
from sokoban.search.space import MOST_PADDING, Family, axis_sizes, block_tiles, step_tiles, thread_tiles
from tests.codegen.lowering import lower
from tests.sokoban.schedules import form_of, matmul_schedule

V100 = load_device("v100")
DEVICES = ("v100", "a100", "k80", "mi50", "ipu-mk1")

FORMS = {
    "matmul": form_of(op="matmul", m=128, n=256, k=256),
    "matmul_odd": form_of(op="matmul", m=127, n=1023, k=511),
    "matmul_half": form_of(op="matmul", m=256, n=512, k=128, dtype="float16"),
    "matrix_vector": form_of(op="matmul", m=1, n=1000, k=2048),
    "conv2d": form_of(op="conv2d", n=2, c=12, h=14, w=14, f=24, kh=3, kw=3, stride=2),
    "depthwise": form_of(op="depthwise_conv2d", n=2, c=20, h=15, w=15, kh=3, kw=3),
    "pool": form_of(op="max_pool2d", n=2, c=20, h=15, w=15, kh=3, kw=3, stride=2),
    "reduction": form_of(op="reduce", function="sum", shape=[500, 300], axes=[1]),
    "columns": form_of(op="reduce", function="sum", shape=[500, 300], axes=[0]),
    "elementwise": form_of(op="elementwise", shape=[33, 1000], function="relu"),
    "transpose": form_of(op="transpose", shape=[65, 130], perm=[1, 0]),
    "softmax": form_of(op="softmax", shape=[33, 1000], axis=-1),
}
NAMES = sorted(FORMS)


def test_the_same_schedules_in_the_same_order_every_time() -> None:
    first, second = (search(FORMS["conv2d"], V100, 20) for _ in range(2))
    assert first.schedules == second.schedules
    assert first.estimates == second.estimates
    assert (first.enumerated, first.scored) == (second.enumerated, second.scored)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device_name", DEVICES)
def test_schedules_respect_every_limit(name: str, device_name: str) -> None:
    device, form = load_device(device_name), FORMS[name]
    result = search(form, device, 12)
    assert 0 < len(result.schedules) == len(result.estimates) <= 12
    for schedule, estimate in zip(result.schedules, result.estimates, strict=True):
        assert 1 <= schedule.threads_per_block <= device.limits.threads_per_block
        assert estimate.shared_bytes <= device.limits.shared_bytes_per_block_opt_in
        assert estimate.blocks_per_unit >= 1
        assert device.code_generator is None or schedule.grid_blocks(form.sizes) <= device.limits.grid_x
        assert all(size % schedule.register_tile[axis] == 0 for axis, size in schedule.block)
        assert set(schedule.cached) <= {load.tensor for load in form.body_loads}
        assert (schedule.instruction == "fma") or device.matrix_instruction("float16") is not None


@pytest.mark.parametrize("name", NAMES)
def test_estimates_are_those_of_the_schedules_given(name: str) -> None:
    """What comes out as objects is what was scored as columns."""
    result = search(FORMS[name], V100, 10)
    again = estimate_schedules(FORMS[name], V100, result.schedules)
    assert again.rows(range(len(result.schedules))) == list(result.estimates)
    seconds = [estimate.seconds for estimate in result.estimates]
    assert seconds == sorted(seconds)


def test_no_two_schedules_share_all_their_tiles() -> None:
    result = search(FORMS["matmul"], V100, 30)
    keys = {(s.block, tuple(s.register_tile.items()), bool(s.cached), s.reduce_threads) for s in result.schedules}
    assert len(keys) == len(result.schedules) == 30


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def brute_force(form: KernelForm) -> float:
    """Best seconds of all schedules whose tiles divide the axes, staged as a whole or not at all, adjacent elements."""
    found: list[TileSchedule] = []
    staged = tuple(dict.fromkeys(load.tensor for load in form.body_loads))
    for block in itertools.product(*(divisors(form.sizes[axis]) for axis in form.spatial)):
        for thread in itertools.product(*(divisors(size) for size in block)):
            if math.prod(thread) > 64:
                continue
            for step in itertools.product(*(divisors(form.sizes[axis]) for axis in form.reduced)):
                found.append(
                    TileSchedule(
                        block=tuple(zip(form.spatial, block, strict=True)),
                        thread=tuple(zip(form.spatial, thread, strict=True)),
                        step=tuple(zip(form.reduced, step, strict=True)),
                        cached=staged if form.reduced else (),
                        vector=tuple((name, 4) for name in staged) if form.reduced else (),
                    )
                )
    whole = tuple((axis, form.sizes[axis]) for axis in form.reduced)
    found += [s.with_(cached=(), vector=(), step=whole) for s in found if s.step == whole]
    table = ScheduleTable.of(form, found)
    padding = bank_padding(table, PlacedForm(form, V100))
    padded = [
        s.with_(padding=tuple((name, int(column[row])) for name, column in padding.items() if column[row]))
        for row, s in enumerate(found)
    ]
    return float(estimate_schedules(form, V100, padded).seconds.min())


@pytest.mark.parametrize(
    "operator",
    [
        {"op": "matmul", "m": 12, "n": 20, "k": 24},
        {"op": "matmul", "m": 7, "n": 9, "k": 15},
        {"op": "batch_matmul", "b": 3, "m": 4, "n": 6, "k": 10},
        {"op": "elementwise", "shape": [7, 30], "function": "relu"},
        {"op": "transpose", "shape": [12, 18], "perm": [1, 0]},
        {"op": "reduce", "function": "sum", "shape": [15, 21], "axes": [0]},
        {"op": "conv2d", "n": 1, "c": 3, "h": 6, "w": 6, "f": 4, "kh": 3, "kw": 3},
    ],
    ids=lambda operator: operator["op"] + str(operator.get("m", "")),
)
def test_tiny_operators_get_the_optimum_of_brute_force(operator: dict[str, object]) -> None:
    form = form_of(**operator)
    assert search(form, V100, 1).estimates[0].seconds <= brute_force(form) * (1 + 1e-9)


def test_a_matrix_instruction_is_used_where_the_device_has_one() -> None:
    instructions = {s.instruction for s in search(FORMS["matmul_half"], V100, 10).schedules}
    assert "wmma_16x16x16" in instructions
    assert {s.instruction for s in search(FORMS["matmul_half"], load_device("k80"), 10).schedules} == {"fma"}
    assert {s.instruction for s in search(FORMS["matmul"], V100, 10).schedules} == {"fma"}


def test_families_are_the_structures_that_an_operator_may_have() -> None:
    def names(name: str) -> list[str]:
        return [family.name for family in families(PlacedForm(FORMS[name], V100))]

    assert names("matmul_half") == ["matrix", "staged", "direct"]
    assert names("matmul") == ["staged", "direct"]
    assert names("elementwise") == ["element-wise"]
    assert names("transpose") == ["element-wise", "transposed"]


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_lowered(name: str) -> None:
    for schedule in search(FORMS[name], V100, 3).schedules:
        lowered = lower(FORMS[name], schedule, entry="kernel")
        assert math.prod(lowered.block) == schedule.threads_per_block
        assert math.prod(lowered.grid) == schedule.grid_blocks(FORMS[name].sizes)


@pytest.mark.parametrize(
    "operator",
    [
        {"op": "matmul", "m": 1, "n": 1, "k": 1},
        {"op": "matmul", "m": 3, "n": 1009, "k": 1},
        {"op": "matmul", "m": 64, "n": 64, "k": 64, "dtype": "float64"},
        {"op": "elementwise", "function": "relu", "shape": [2_000_000_000]},
        {"op": "elementwise", "function": "add", "shapes": [[7, 1, 13], [11, 13]]},
        {"op": "reduce", "function": "sum", "shape": [1_000_000], "axes": [0]},
        {"expr": "C[i,j] = 3.0", "sizes": {"i": 5, "j": 70}},
        {"expr": "C[i] = sum(k, A[k])", "sizes": {"i": 5, "k": 9}},
        {"expr": "C[i] = A[i] * s[0]", "sizes": {"i": 5}},
        {
            "expr": "C[a,b,c,d,e,f] = sum((k,l), A[a,b,c,k,l] * B[d,e,f,l,k])",
            "sizes": {"a": 5, "b": 6, "c": 7, "d": 8, "e": 9, "f": 10, "k": 11, "l": 12},
        },
    ],
    ids=str,
)
def test_odd_operators_have_schedules_that_can_be_lowered(operator: dict[str, object]) -> None:
    form = form_of(**operator)
    result = search(form, V100, 2)
    for schedule in result.schedules:
        assert math.prod(lower(form, schedule, entry="kernel").grid) == schedule.grid_blocks(form.sizes)
    assert all(0 < estimate.seconds < 60 for estimate in result.estimates)


# Sizes


def test_sizes_of_an_axis_are_odd_ones_too() -> None:
    assert axis_sizes(7, 1024, 40).tolist() == [1, 2, 4, 7, 8]
    assert {7, 49} <= set(axis_sizes(49, 1024, 12).tolist())
    assert axis_sizes(1, 1024, 40).tolist() == [1]
    assert axis_sizes(40, 64, 40, multiple=16).tolist() == [16, 48]


@settings(deadline=None)
@given(
    size=st.integers(1, 10**6), largest=st.sampled_from([16, 1024, 16384]), count=st.integers(4, 40),
    multiple=st.sampled_from([1, 16]),
)  # fmt: skip
def test_sizes_of_an_axis_waste_little_and_are_few(size: int, largest: int, count: int, multiple: int) -> None:
    sizes = axis_sizes(size, largest, count, multiple)
    waste = -size % sizes
    assert 1 <= len(sizes) <= count
    assert (np.diff(sizes) > 0).all() and (sizes % multiple == 0).all() and sizes[-1] <= max(largest, multiple)
    least = min(-size % n for n in range(multiple, max(multiple, min(largest, 2 * size)) + 1, multiple))
    assert (waste <= max(MOST_PADDING * size, least)).all()


def test_thread_tiles_are_all_the_divisors_of_their_blocks() -> None:
    form, family = FORMS["matmul"], Family("staged", ("A", "B"))
    blocks = np.array([[12, 7], [64, 48]])
    rows, tiles = thread_tiles(PlacedForm(form, V100), family, blocks)
    wanted = {
        (row, m, n)
        for row, (rows_m, rows_n) in enumerate(blocks.tolist())
        for m in divisors(rows_m)
        for n in divisors(rows_n)
        if m <= 16 and n <= 16
        and m * n <= V100.limits.registers_per_thread_usable and (rows_m // m) * (rows_n // n) <= 1024
    }  # fmt: skip
    assert set(zip(rows.tolist(), *tiles.T.tolist(), strict=True)) == wanted
    assert len(rows) == len(wanted)


def test_blocks_and_steps_stay_within_grid_and_reduction() -> None:
    form = form_of(op="conv2d", n=2, c=64, h=14, w=14, f=24, kh=3, kw=3)
    family = Family("staged", ("X", "W"))
    blocks, steps = block_tiles(PlacedForm(form, V100), family), step_tiles(form, family)
    assert blocks.shape[1] == len(form.spatial) and steps.shape[1] == len(form.reduced)
    assert len(np.unique(blocks, axis=0)) == len(blocks)
    assert {tuple(step[1:]) for step in steps.tolist()} <= {(1, 1), (1, 3), (3, 1), (3, 3)}
    assert step_tiles(form, Family("direct", whole_reduction=True)).tolist() == [[64, 3, 3]]


# Screening


def test_efficient_tiles_are_near_the_best_smallest_first() -> None:
    seconds, footprint = np.array([3.0, 1.0, 1.0, 1.4, 9.0]), np.array([1.0, 20.0, 10.0, 1.0, 1.0])
    assert efficient(seconds, footprint, 0.5, 4).tolist() == [2, 1, 3]
    assert efficient(seconds, footprint, 2.5, 4).tolist() == [2, 1, 3, 0]
    # Room for all: there is nothing to prune.
    assert efficient(seconds, footprint, 0.5, 5).tolist() == [2, 1, 3, 0, 4]
    assert efficient(np.zeros(0), np.zeros(0), 0.5, 10).tolist() == []


def test_of_many_equal_tiles_the_rest_is_sampled() -> None:
    seconds, footprint = np.ones(1000), np.arange(1000.0)
    chosen = efficient(seconds, footprint, 0.5, 10).tolist()
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert chosen[5] == 5 and chosen[-1] == 999 and len(set(chosen)) == 10
    assert BAND > 1


# Tables


def test_rows_come_back_as_the_schedules_they_were() -> None:
    given_schedules = [
        matmul_schedule((32, 64), (4, 4), 8, vthreads=(2, 1), vector=(("A", 4), ("B", 4)), padding=(("A", 1),)),
        matmul_schedule((16, 16), (1, 2), 256, cached=("A",), vector=(("A", 4),)),
    ]
    table = ScheduleTable.of(FORMS["matmul"], given_schedules)
    turned = join([table, table]).candidates(np.array([3, 0]))
    back = [schedule_at(turned, row) for row in range(2)]
    assert [s.padding for s in back] == [(), (("A", 1),)]
    assert [(s.block, s.register_tile, s.step, s.cached) for s in back] == [
        (s.block, s.register_tile, s.step, s.cached) for s in reversed(given_schedules)
    ]


def test_the_padding_formula_takes_numbers_and_columns() -> None:
    # 32 banks of one element: a row of 64 read 8 at a time is moved by 8 banks, one of 33 by 7.
    assert formula_padding(64, 8, banks=32, width=1) == 8
    assert formula_padding(np.array([64, 33]), np.array([8, 8]), banks=32, width=1).tolist() == [8, 7]


def test_counts_say_how_much_was_looked_at() -> None:
    result = search(FORMS["matmul"], V100, 5)
    assert isinstance(result, SearchResult)
    assert result.enumerated > result.scored > len(result.schedules) == 5
    assert result.seconds > 0
