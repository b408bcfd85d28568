"""The cooperative fetch: loads, wavefronts, batches and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm
from sokoban.model.gpu.fetch import GUARDED_LOADS, Fetch, _store_passes, fetch
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule

V100 = load_device("v100")
MATMUL = form_of(op="matmul", m=1024, n=1024, k=1024)
PADDED = form_of(op="conv2d", n=8, c=64, h=56, w=56, f=64, kh=3, kw=3, padding="SAME")


def fetched(form: KernelForm, schedule: TileSchedule, tensor: str) -> Fetch:
    table = ScheduleTable.of(form, [schedule])
    (load,) = [load for load in form.body_loads if load.tensor == tensor]
    return fetch(table, load, V100)


def test_a_tile_is_shared_out_among_the_threads() -> None:
    # 64 x 8 words of A by 256 threads: two scalars each, or one vector for half of them.
    scalar = fetched(MATMUL, matmul_schedule((64, 64), (4, 4), 8, vector=(("A", 1),)), "A")
    vector = fetched(MATMUL, matmul_schedule((64, 64), (4, 4), 8, vector=(("A", 4),)), "A")
    assert scalar.elements.tolist() == vector.elements.tolist() == [512]
    assert (scalar.loads.tolist(), vector.loads.tolist()) == ([2], [1])
    assert vector.wavefronts[0] <= scalar.wavefronts[0]


def test_the_widest_access_is_taken_unless_said() -> None:
    free, given = matmul_schedule((64, 64), (4, 4), 8), matmul_schedule((64, 64), (4, 4), 8, vector=(("A", 4),))
    assert fetched(MATMUL, free, "A").loads.tolist() == fetched(MATMUL, given, "A").loads.tolist()


def test_elements_that_are_no_vector_are_loaded_one_by_one() -> None:
    # Six at a time is no access: six loads, whose lanes are six words apart and touch more lines each.
    one, six = (fetched(MATMUL, matmul_schedule((64, 64), (4, 4), 12, vector=(("A", n),)), "A") for n in (1, 6))
    assert six.loads[0] == 6 and six.wavefronts[0] > one.wavefronts[0]


def test_short_rows_touch_more_lines() -> None:
    # The same 2048 words, as 256 rows of 8 or 8 rows of 256.
    short = fetched(MATMUL, matmul_schedule((256, 64), (8, 8), 8, vector=(("A", 1),)), "A")
    long = fetched(MATMUL, matmul_schedule((64, 256), (8, 8), 8, vector=(("B", 1),)), "B")
    assert short.elements.tolist() == long.elements.tolist()
    assert short.wavefronts[0] > long.wavefronts[0]
    assert short.bytes[0] >= long.bytes[0] == 4 * 2048


@pytest.mark.parametrize("unroll", [0, 512])
def test_guarded_loads_wait_for_each_other(unroll: int) -> None:
    schedule = TileSchedule(
        block=(("n", 1), ("f", 16), ("oh", 8), ("ow", 56)),
        thread=(("n", 1), ("f", 4), ("oh", 1), ("ow", 7)),
        step=(("c", 4), ("kh", 3), ("kw", 3)),
        cached=("X", "W"),
        unroll=unroll,
    )
    guarded, plain = fetched(PADDED, schedule, "X"), fetched(PADDED, schedule, "W")
    assert guarded.batches[0] > plain.batches[0]
    assert guarded.instructions[0] / guarded.loads[0] > plain.instructions[0] / plain.loads[0]
    if not unroll:
        assert guarded.batches[0] == guarded.loads[0] / GUARDED_LOADS


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
@pytest.mark.parametrize("vector", [1, 2, 4, 6, 8, 12, 16, 32, 64])
def test_stores_wait_for_each_other_as_often_as_lanes_share_a_bank(vector: int, element_bytes: int) -> None:
    # Count the words that each bank takes: one of every lane, two where elements have two.
    words = max(1, element_bytes // 4)
    starts = {lane * vector * element_bytes // 4 for lane in range(32)}
    banks = [(start + word) % 32 for start in starts for word in range(words)]
    (guarded,) = _store_passes(np.array([vector]), element_bytes, V100, guarded=True).tolist()
    assert guarded * words == max(banks.count(bank) for bank in set(banks))
    # Wide stores need up to 16 bytes' worth fewer.
    (free,) = _store_passes(np.array([vector]), element_bytes, V100, guarded=False).tolist()
    assert free <= guarded <= free * 16 // max(4, element_bytes)


def test_odd_distances_have_no_conflicts() -> None:
    assert _store_passes(np.array([1, 3, 5, 7]), 4, V100, guarded=True).tolist() == [1, 1, 1, 1]


def test_guarded_elements_are_stored_one_by_one() -> None:
    # Sixteen words apart: sixteen passes per word by themselves, four in stores of four words.
    guarded = fetched(PADDED, _padded_schedule(16), "X")
    free = fetched(MATMUL, matmul_schedule((64, 64), (4, 4), 64, vector=(("A", 16),)), "A")
    assert guarded.wavefronts[0] > 16 * guarded.elements[0] / 32
    assert free.wavefronts[0] / free.elements[0] < guarded.wavefronts[0] / guarded.elements[0]


def test_the_elements_of_a_row_wait_together() -> None:
    # Rows of 58 elements: two at a time share their guard, four at a time do not.
    one, two, four = (fetched(PADDED, _padded_schedule(vector), "X") for vector in (1, 2, 4))
    assert two.batches[0] == pytest.approx(one.batches[0] / 2, rel=0.1)
    assert four.batches[0] >= one.batches[0]


def _padded_schedule(vector: int) -> TileSchedule:
    """64 threads whose tile of the padded input has rows of 58 elements."""
    return TileSchedule(
        block=(("n", 1), ("f", 16), ("oh", 8), ("ow", 56)),
        thread=(("n", 1), ("f", 4), ("oh", 4), ("ow", 7)),
        step=(("c", 4), ("kh", 3), ("kw", 3)),
        cached=("X", "W"),
        vector=(("X", vector),),
    )


def test_rows_do_not_depend_on_each_other() -> None:
    rows = [matmul_schedule((64, 64), (4, 4), 8), matmul_schedule((32, 128), (4, 8), 16, vector=(("B", 2),))]
    table = ScheduleTable.of(MATMUL, rows)
    for load in MATMUL.body_loads:
        together = fetch(table, load, V100)
        for position, schedule in enumerate(rows):
            alone: Any = fetch(ScheduleTable.of(MATMUL, [schedule]), load, V100)
            for field in ("elements", "loads", "instructions", "wavefronts", "batches", "bytes"):
                assert np.asarray(getattr(together, field))[position] == getattr(alone, field)[0]


def waits_of_image(width: int, block: tuple[int, int], step: tuple[int, int, int]) -> float:
    """Waits for the tile of a padded image of ``width`` columns per step, one output a thread."""
    form = form_of(op="conv2d", n=8, c=64, h=width, w=width, f=64, kh=3, kw=3, padding="SAME")
    tile = (("n", 4), ("f", 1), ("oh", block[0]), ("ow", block[1]))
    schedule = TileSchedule(
        block=tile, thread=(("n", 4), ("f", 1), ("oh", 1), ("ow", 1)),
        step=(("c", step[0]), ("kh", step[1]), ("kw", step[2])), cached=("X", "W"), unroll=512, vector=(("X", 1),),
    )  # fmt: skip
    return float(fetched(form, schedule, "X").batches[0])


def test_loads_behind_one_guard_overlap() -> None:
    # 56 threads copy rows of 56 columns: 16 loads each, all in the same column. Rows of 58 shift from load to load.
    assert waits_of_image(56, (1, 56), (4, 1, 1)) == 1.0
    assert waits_of_image(56, (1, 56), (4, 1, 3)) > 4.0


def test_guards_of_a_single_step_are_branches() -> None:
    several, single = waits_of_image(56, (1, 56), (4, 3, 3)), waits_of_image(56, (1, 56), (64, 3, 3))
    assert single / (64 / 4) > 2.5 * several
