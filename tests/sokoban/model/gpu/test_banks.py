"""Passes through shared memory against a warp simulated lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.regions import data_dimension
from sokoban.language.expression import Load
from sokoban.model.gpu.banks import busiest_bank, lane_words, read_parts, read_passes
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule, schedules

V100 = load_device("v100")
FORMS = [
    form_of(op="matmul", m=121, n=113, k=99),
    form_of(op="matmul", m=121, n=113, k=99, transpose_a=True, transpose_b=True),
    form_of(op="matmul", m=121, n=113, k=99, dtype="float16"),
    form_of(op="conv2d", n=3, c=5, h=17, w=19, f=7, kh=3, kw=2, stride=2, dilation=[1, 3]),
    form_of(op="depthwise_conv2d", n=3, c=5, h=17, w=19, kh=3, kw=3, layout="NHWC"),
]


def simulated(form: KernelForm, schedule: TileSchedule, load: Load, device: DeviceSpec) -> int:
    """Different words of the busiest bank, from the address of every lane of the first warp."""
    tile = {**schedule.block_of, **schedule.step_of}
    element_bytes = form.expr.tensor_by_name[load.tensor].element_bytes
    banks, width = device.shared.bank_count, device.shared.bank_width_bytes
    assert banks is not None and width is not None
    shape = [data_dimension(index).extent(tile) for index in load.indices]
    shape[-1] += schedule.padding_of.get(load.tensor, 0)
    words: dict[int, set[int]] = {}
    for lane in range(min(device.warp_lanes, schedule.threads_per_block)):
        position, number = {}, lane
        for axis, _ in reversed(schedule.block):
            position[axis] = number % schedule.threads_of[axis] * schedule.thread_of[axis]
            number //= schedule.threads_of[axis]
        address = 0
        for index, extent in zip(load.indices, shape, strict=True):
            terms = data_dimension(index).terms
            address = address * extent + sum(c * position.get(axis, 0) for axis, c in terms)
        word = address * element_bytes // width
        words.setdefault(word % banks, set()).add(word)
    return max(len(found) for found in words.values())


def scalar_passes(form: KernelForm, rows: list[TileSchedule], tensor: str, device: DeviceSpec = V100) -> list[float]:
    load = next(load for load in form.body_loads if load.tensor == tensor)
    table = ScheduleTable.of(form, rows)
    return [float(p) for p in busiest_bank(lane_words(table, load, device), device.shared.bank_count or 32)]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(FORMS))
def test_scalar_reads_take_as_many_passes_as_a_simulated_warp(data: st.DataObject, form: KernelForm) -> None:
    rows = data.draw(st.lists(schedules(form), min_size=1, max_size=3))
    for load in form.body_loads:
        expected = [simulated(form, schedule, load, V100) for schedule in rows]
        assert scalar_passes(form, rows, load.tensor) == expected


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(FORMS), st.sampled_from([2, 4]))
def test_vector_reads_move_all_their_words(data: st.DataObject, form: KernelForm, width: int) -> None:
    """Never fewer passes than a read has parts, never more than one per lane."""
    schedule = data.draw(schedules(form))
    table = ScheduleTable.of(form, [schedule])
    for load in form.body_loads:
        lanes = lane_words(table, load, V100)
        (passes,), (parts,) = read_passes(lanes, width, 32), read_parts(lanes, width)
        assert width // 2 <= parts <= passes <= 32


def test_lanes_that_read_one_word_are_served_together() -> None:
    # 32 lanes along n: all read the same A[m, k], and 32 neighbours of B[k, n].
    schedule = matmul_schedule((8, 32), (8, 1), 8)
    assert scalar_passes(FORMS[0], [schedule], "A") == [1]
    assert scalar_passes(FORMS[0], [schedule], "B") == [1]


def test_lanes_down_a_column_of_one_bank_wait_for_each_other() -> None:
    # 32 lanes along m, rows of 32 words: every lane's word is in bank 0. One word of padding spreads them.
    narrow = matmul_schedule((32, 8), (1, 8), 32)
    assert scalar_passes(FORMS[0], [narrow, narrow.with_(padding=(("A", 1),))], "A") == [32, 1]


def test_two_halves_share_a_word() -> None:
    # float16: 32 lanes read 32 neighbours, two to a word: 16 words, no conflict; B's column of 2-byte rows likewise.
    schedule = matmul_schedule((8, 32), (8, 1), 8)
    assert scalar_passes(FORMS[2], [schedule], "B") == [1]
    # Two lanes, four elements (two words) apart, one word each.
    assert scalar_passes(FORMS[2], [matmul_schedule((2, 4), (1, 4), 4)], "A") == [1]


def test_half_a_warp_is_no_more_than_its_lanes() -> None:
    schedule = matmul_schedule((5, 8), (1, 8), 32)
    assert schedule.threads_per_block == 5
    assert scalar_passes(FORMS[0], [schedule], "A") == [5]


def test_figure_6_5_b() -> None:
    """A [3, 4] tile in four banks, read [3, 1] at a time: three conflicting words, none after padding by one."""
    device = _with_banks(V100, 4)
    form = form_of(op="matmul", m=3, n=1, k=4, name="figure")
    load = form.body_loads[0]
    assert load.tensor == "A"
    schedule = TileSchedule(block=(("m", 3),), thread=(("m", 1),), step=(("k", 4),), cached=("A", "B"))
    assert form.spatial == ("m",)
    assert scalar_passes(form, [schedule, schedule.with_(padding=(("A", 1),))], "A", device) == [3, 1]


@pytest.mark.parametrize("lanes_along_n, passes", [(1, 2), (4, 4), (8, 4), (32, 4)])
def test_vectors_return_a_register_per_lane_and_pass(lanes_along_n: int, passes: int) -> None:
    # Lanes read four adjacent words each: quarters of a warp one after the other, however many lanes read the same,
    # unless all of them are pairs of neighbours.
    schedule = matmul_schedule((32 // lanes_along_n, 4 * lanes_along_n), (1, 4), 8)
    load = next(load for load in FORMS[0].body_loads if load.tensor == "B")
    lanes = lane_words(ScheduleTable.of(FORMS[0], [schedule]), load, V100)
    assert read_passes(lanes, 4, 32).tolist() == [passes]
    assert read_passes(lanes, 4, 32, merges=False).tolist() == [4]


def test_quarters_that_meet_in_banks_wait_for_each_other() -> None:
    # Lanes 16 words apart: of the eight lanes of a quarter four meet in the same four banks.
    assert read_passes(np.arange(0, 512, 16)[None, :], 4, 32).tolist() == [4 * 4]


def _with_banks(device: DeviceSpec, banks: int) -> DeviceSpec:
    from msgspec.structs import replace

    def changed(layer: Any) -> Any:
        return replace(layer, bank_count=banks) if layer.name == "shared" else layer

    return replace(device, layers=tuple(changed(layer) for layer in device.layers))
