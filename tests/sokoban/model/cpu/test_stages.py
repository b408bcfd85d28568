"""Vectors in registers, reuse distances, and times on devices whose lanes are elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.cpu.stages import SUSTAINED
from sokoban.model.cpu.traffic import Footprint, Traffic, share_retained
from sokoban.model.cpu.work import copies_of, tile_work
from sokoban.model.rational import estimate, estimate_schedules
from sokoban.schedule.cpu_tiles import by_vector_axis
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule, sizes

DEVICE = load_device("xeon-platinum-8375c")
LANES = 16


def form_of(**fields: Any) -> KernelForm:
    return kernel_form(operator_from_data({"name": "op", "dtype": "float32", **fields}))


MATMUL = form_of(op="matmul", m=512, n=512, k=512)
CONV = form_of(op="conv2d", n=1, c=16, h=20, w=20, f=32, kh=3, kw=3, stride=2, padding=1, layout="NCHW")


def matmul(block: tuple[int, int], thread: tuple[int, int], step: int = 512, cached: tuple[str, ...] = ()) -> Any:
    return TileSchedule(
        block=sizes(dict(zip("mn", block, strict=True))),
        thread=sizes(dict(zip("mn", thread, strict=True))),
        step=(("k", step),),
        cached=cached,
    )


def tiles_of(form: KernelForm, *schedules: TileSchedule) -> Any:
    ((_, tiles),) = by_vector_axis(ScheduleTable.of(form, schedules), PlacedForm(form, DEVICE))
    return tiles


# Work


def test_copies_are_made_outside_the_loops_that_use_them_again() -> None:
    a, b = MATMUL.body_loads
    schedules = [matmul((64, 64), (4, 64), cached=("A", "B")), matmul((64, 256), (4, 64), cached=("A", "B"))]
    copies = copies_of(tiles_of(MATMUL, *schedules))
    assert [copies[load].tolist() for load in (a, b)] == [[0, 1], [0, 0]]


def test_a_register_tile_reads_rows_and_vectors_once_a_turn() -> None:
    tiles = tiles_of(MATMUL, matmul((512, 512), (8, 64)))
    work = tile_work(tiles, {})
    assert work.arithmetic[0] == 512**3 / LANES
    # 8 numbers of A and 4 vectors of B a turn, besides one vector for every 16 results.
    assert work.accesses[0] == 512 * 512 * 512 / (8 * 64) * 12 + 512 * 512 / LANES
    assert work.chain_turns[0] == 512 * 512 * 512 / (8 * 64)


def test_partial_sums_are_read_and_written_again() -> None:
    whole, halves = (tile_work(tiles_of(MATMUL, matmul((512, 512), (8, 64), step)), {}) for step in (512, 256))
    assert halves.accesses[0] - whole.accesses[0] == 2 * 512 * 512 / LANES


def test_strided_vectors_are_read_one_by_one_unless_they_are_copied() -> None:
    schedule = TileSchedule(
        block=sizes({"f": 8, "oh": 2, "ow": 10}), thread=sizes({"f": 4, "oh": 1, "ow": 10}), cached=("X",)
    )
    staged, direct = (tiles_of(CONV, s) for s in (schedule, schedule.with_(cached=())))
    assert tile_work(staged, copies_of(staged)).accesses[0] < 0.3 * tile_work(direct, {}).accesses[0]


# Traffic


def test_what_fits_is_read_once() -> None:
    traffic = Traffic(tiles_of(MATMUL, matmul((512, 512), (8, 64))), DEVICE, {})
    matrix = 512 * 512 * 4
    assert traffic.into(DEVICE.layer("l3"))[0] == 2 * matrix + 2 * matrix
    assert traffic.into(DEVICE.layer("l3"), 1.0)[0] == 3 * matrix


def test_what_does_not_fit_is_read_again() -> None:
    """Blocks of 64 rows and columns of a product read as many of both operands as there are blocks along the other."""
    edge = 4112  # rows do not crowd
    wide = form_of(op="matmul", m=edge, n=edge, k=512)
    found = Traffic(tiles_of(wide, matmul((64, 64), (8, 64))), DEVICE, {}).into(DEVICE.layer("l2"), 1.0)[0]
    operands = edge * 512 * 4
    # A row of blocks has the same rows, which stay; all columns do not.
    assert found == pytest.approx(operands + operands * edge / 64 + edge * edge * 4, rel=0.1)


def test_rows_at_a_power_of_two_crowd_into_few_sets() -> None:
    l1 = DEVICE.layer("l1")
    one, stride = np.ones(1), np.array([4096])
    for lines, apart, crowded in ((128, 0, True), (128, 64, False), (l1.associativity or 0, 0, False)):
        rows = Footprint(one * lines * 64, one * 64, stride + apart)
        assert np.all(rows.crowded(l1)) == crowded
        assert not np.any(rows.crowded(DEVICE.layer("l3")))


def test_copies_take_scratch_memory_and_keep_reads_dense() -> None:
    schedule = matmul((512, 256), (8, 64), 256, ("B",))
    tiles = tiles_of(MATMUL, schedule)
    traffic = Traffic(tiles, DEVICE, copies_of(tiles))
    assert traffic.scratch_bytes[0] == 256 * 256 * 4
    direct = tiles_of(MATMUL, schedule.with_(cached=()))
    uncopied, first = Traffic(direct, DEVICE, {}), DEVICE.layer("l1")
    assert traffic.unprefetched_into(first)[0] < uncopied.unprefetched_into(first)[0]


def test_a_cache_indexed_within_pages_keeps_all_or_nothing() -> None:
    l1 = msgspec.structs.replace(DEVICE.layer("l1"), capacity_bytes=32768, associativity=8)
    assert share_retained(l1, np.array([16384.0, 32768.0])).tolist() == [1.0, 0.0]


def test_a_cache_larger_than_its_ways_pages_is_filled_by_chance() -> None:
    """Balls into bins: of pages over sets of places, those that more than the ways want are lost."""
    ways, colours = 16, 16
    l2 = msgspec.structs.replace(DEVICE.layer("l2"), capacity_bytes=ways * colours * 4096, associativity=ways)
    shares = np.array([0.25, 0.5, 0.75, 1.0, 2.0])
    found = share_retained(l2, shares * l2.capacity_bytes)
    assert np.all(np.diff(found) < 0)
    random = np.random.default_rng(0)
    for share, expected in zip(shares.tolist(), found.tolist(), strict=True):
        pages = int(share * ways * colours)
        counts = random.multinomial(pages, [1 / colours] * colours, size=2000)
        lost = np.where(counts > ways, counts, 0).sum() / counts.sum()
        assert 1.0 - lost == pytest.approx(expected, abs=0.03)


# Copies


PAIR = msgspec.structs.replace(DEVICE, unit_count=2)
FEW_ROWS = form_of(op="matmul", m=16, n=3072, k=768)


def copied(form: KernelForm, schedule: TileSchedule) -> list[float]:
    """Bytes that come into the second cache while a core only copies; those not fetched ahead."""
    tiles = tiles_of(form, schedule)
    parts = Traffic(tiles, PAIR, copies_of(tiles)).copied_into(PAIR.layer("l2"))
    return [float(part[0]) for part in parts]


def test_copies_without_turns_to_ask_are_made_alone() -> None:
    narrow = matmul((16, 96), (4, 96), 768, ("B",))
    whole, alone = copied(FEW_ROWS, narrow)
    assert whole == pytest.approx(768 * 3072 * 4)
    # Three of the six lines of every row of a block come before a prefetcher follows.
    assert alone == pytest.approx(whole / 2)
    assert copied(FEW_ROWS, matmul((16, 768), (4, 96), 96, ("B",)))[1] == pytest.approx(whole * 3 / 48)
    assert copied(FEW_ROWS, narrow.with_(cached=())) == [0.0, 0.0]


def test_copies_that_tiles_ask_for_hide_behind_them() -> None:
    many = form_of(op="matmul", m=2048, n=3072, k=768)
    whole, _ = copied(many, matmul((512, 384), (8, 48), 192, ("B",)))
    # Only what the first block of each core begins with: 128 blocks and steps.
    assert whole == pytest.approx(768 * 3072 * 4 * (2048 / 512) * 2 / 128)


def test_copies_of_long_rows_are_faster() -> None:
    table = ScheduleTable.of(FEW_ROWS, [matmul((16, 96), (4, 96), 768, ("B",)), matmul((16, 768), (4, 96), 96, ("B",))])
    found = estimate(table, PlacedForm(FEW_ROWS, PAIR))
    assert found.stage_seconds["copying"][0] > found.stage_seconds["copying"][1] > 0.0
    assert found.seconds[0] - found.stage_seconds["copying"][0] > 0.0


# Times


def seconds(form: KernelForm, *schedules: TileSchedule, device: DeviceSpec = DEVICE) -> list[float]:
    return estimate_schedules(form, device, schedules).seconds.tolist()


def test_a_good_tile_comes_near_the_peak_and_others_do_not() -> None:
    good, narrow, spilling = seconds(
        form_of(op="matmul", m=2048, n=2048, k=512),
        matmul((64, 256), (6, 64), 512, ("B",)),
        matmul((64, 256), (1, 16), 512, ("B",)),
        matmul((64, 256), (16, 64), 512, ("B",)),
    )
    ideal = 2 * 2048 * 2048 * 512 / DEVICE.peak_flops("float32")
    assert ideal < good < 2 * ideal
    assert narrow > 3 * good
    assert spilling > 1.5 * good


def with_sustained(share: float) -> DeviceSpec:
    """The device whose cores sustain a share of their peak."""
    rates = [
        msgspec.structs.replace(rate, sustained_flops=share * rate.peak_flops, best_flops=None)
        for rate in DEVICE.throughput
    ]
    return msgspec.structs.replace(DEVICE, throughput=tuple(rates))


def test_cores_that_others_disturb_are_slower() -> None:
    schedule = matmul((64, 128), (8, 64))
    most, enough, half = (
        estimate_schedules(MATMUL, with_sustained(share), [schedule]).stage_seconds["compute"][0]
        for share in (0.95, SUSTAINED, SUSTAINED / 2)
    )
    assert most == enough == MATMUL.flops / DEVICE.peak_flops("float32")
    assert half == pytest.approx(2 * most)


def test_units_without_a_block_are_idle() -> None:
    one, all_of_them = seconds(MATMUL, matmul((512, 512), (8, 64)), matmul((64, 128), (8, 64)))
    assert one > 10 * all_of_them


def test_the_stages_are_those_of_the_layers() -> None:
    table = estimate_schedules(MATMUL, DEVICE, [matmul((64, 128), (8, 64))])
    assert set(table.stage_seconds) == {
        "compute", "issue", "l1", "chain", "drain", "latency", "copying", "contention", "l2", "l3", "dram",
        "block_launch",
    }  # fmt: skip
    assert table.stage_seconds["dram"][0] == 0.0, "three megabytes stay in the last cache"
    assert table.row(0).bound == "compute"


def contention(block: tuple[int, int], step: int, thread: tuple[int, int] = (4, 96)) -> float:
    """Seconds that cores wait for lines of a product's results, on two of them."""
    two = msgspec.structs.replace(DEVICE, unit_count=2)
    form = form_of(op="matmul", m=128, n=768, k=768)
    table = estimate_schedules(form, two, [matmul(block, thread, step)])
    return float(table.stage_seconds["contention"][0])


def test_cores_that_write_halves_of_the_same_rows_again_take_lines_from_each_other() -> None:
    halves = contention((128, 384), 16)
    # 47 times 128 rows of 20 lines, 84 % of them on the page where the part before ends, 10 on their way at a time.
    latency = DEVICE.layer("l3").latency_seconds
    assert latency and halves == pytest.approx(47 * 128 * 20 * 54 / 64 * latency / 10, rel=0.02)
    assert contention((128, 384), 96) == pytest.approx(halves * 7 / 47, rel=0.02)


def test_cores_whose_results_lie_apart_are_left_alone() -> None:
    assert contention((64, 768), 16) == 0.0, "rows of their own"
    assert contention((128, 384), 768) == 0.0, "written once"
    assert contention((128, 48), 16, (8, 48)) == 0.0, "a part of a row that stays in the first cache"


def test_tensors_beyond_the_last_cache_come_from_memory() -> None:
    form = form_of(op="elementwise", function="add", shape=[8192, 8192])
    axis = form.final.axes[0]
    schedule = TileSchedule(block=((axis, 2**20),), thread=((axis, 64),))
    (found,) = seconds(form, schedule)
    assert found == pytest.approx(3 * 2**28 / DEVICE.dram.bandwidth_bytes_per_second, rel=0.3)


def test_short_steps_begin_and_end_more_tiles() -> None:
    found = estimate_schedules(MATMUL, DEVICE, [matmul((64, 128), (8, 64), 16), matmul((64, 128), (8, 64))])
    short, long = found.stage_seconds["drain"]
    assert short == pytest.approx(512 // 16 * long)
    tiles = 512 // 8 * 512 // 64
    assert long == pytest.approx(tiles * 35 / (DEVICE.clocks.boost_hz * DEVICE.unit_count))


def test_rows_take_what_their_walks_take() -> None:
    softmax, layer_norm = (form_of(op=op, shape=[4096, 1024]) for op in ("softmax", "layer_norm"))
    for form in (softmax, layer_norm):
        rows = TileSchedule(block=((form.spatial[0], 64),), thread=((form.spatial[0], 1),))
        (found,) = seconds(form, rows)
        assert 0 < found < 1e-3


def test_more_units_and_wider_vectors_are_faster() -> None:
    half = msgspec.structs.replace(DEVICE, unit_count=DEVICE.unit_count // 2)
    schedule = matmul((32, 128), (8, 64))
    slow, fast = (seconds(MATMUL, schedule, device=device)[0] for device in (half, DEVICE))
    assert slow > fast


def test_many_schedules_are_as_each_alone() -> None:
    schedules = [
        matmul((64, 128), (8, 64), 256, ("B",)),
        matmul((64, 64), (32, 8)),
        matmul((6, 64), (6, 64), 64, ("A",)),
    ]
    assert seconds(MATMUL, *schedules) == [seconds(MATMUL, each)[0] for each in schedules]


def test_numbers_without_axes_have_a_time() -> None:
    form = form_of(op="reduce", function="sum", shape=[64], axes=[0])
    schedule = TileSchedule(
        block=tuple((axis, 1) for axis in form.spatial),
        thread=tuple((axis, 1) for axis in form.spatial),
        reduce_threads=tuple((axis, LANES) for axis in form.reduced),
    )
    (found,) = seconds(form, schedule)
    assert 0 < found < 1e-4
    assert replace(schedule, block=schedule.block) == schedule
