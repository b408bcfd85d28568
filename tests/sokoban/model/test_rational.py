"""RATIONAL's predictions: limits it must reach, and directions in which it must not move."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.model.gpu.breakdown import HOISTING_RISK, MOST_RISK, STAGES, breakdown
from sokoban.model.gpu.step import Occupancy
from sokoban.model.rational import estimate_compiled, estimate_schedules
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule, schedules

V100 = load_device("v100")
MATMUL = form_of(op="matmul", m=1210, n=1130, k=990)
CONV = form_of(op="conv2d", n=3, c=5, h=170, w=190, f=7, kh=3, kw=2, stride=2)
DEPTHWISE = form_of(op="depthwise_conv2d", n=3, c=5, h=170, w=190, kh=3, kw=3)
FORMS = {"matmul": MATMUL, "conv2d": CONV, "depthwise_conv2d": DEPTHWISE}
NAMES = st.sampled_from(sorted(FORMS))
SCHEDULERS = V100.teu.group_size


def with_layer(device: DeviceSpec, name: str, **changes: Any) -> DeviceSpec:
    """The device with one memory layer changed, and the layers above it at least as fast."""
    layers, floor = [], 0.0
    for layer in reversed(device.layers):
        new = replace(layer, **changes) if layer.name == name else layer
        new = replace(new, bandwidth_bytes_per_second=max(floor, new.bandwidth_bytes_per_second))
        floor = new.bandwidth_bytes_per_second
        layers.append(new)
    return replace(device, layers=tuple(reversed(layers)))


def seconds(form: KernelForm, rows: list[TileSchedule], device: DeviceSpec = V100) -> np.ndarray[Any, Any]:
    return estimate_schedules(form, device, rows).seconds


def rows_of(data: st.DataObject, form: KernelForm) -> list[TileSchedule]:
    return data.draw(st.lists(schedules(form, max_threads=256), min_size=1, max_size=4))


# What must be reached


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_perfectly_blocked_matmul_runs_at_the_rate_that_the_power_limit_leaves(share: float) -> None:
    # 80 units x 10 blocks of 128 x 128, 8 x 8 per thread.
    board = replace(V100, clocks=replace(V100.clocks, sustained_hz=share * V100.clocks.boost_hz))
    m, n, k = 128 * 40, 128 * 20, 2048
    form = form_of(op="matmul", m=m, n=n, k=k)
    row = estimate_schedules(form, board, [matmul_schedule((128, 128), (8, 4), 16, vthreads=(1, 2))]).row(0)
    expected = 2 * m * n * k / (share * V100.peak_flops("float32"))
    assert row.bound == "compute"
    assert row.stage_seconds["compute"] == pytest.approx(expected, rel=0.03)
    # What the other stages leave unhidden and the launch come on top.
    assert expected < row.seconds < 1.25 * expected


def test_the_busiest_unit_decides() -> None:
    # 81 blocks on 80 units: one unit has two, and all wait for it. No power limit in the way.
    schedule = matmul_schedule((128, 128), (8, 4), 16, vthreads=(1, 2))
    full, ragged = (form_of(op="matmul", m=128 * blocks, n=128, k=2048) for blocks in (80, 81))
    stage = [float(estimate_schedules(f, V100, [schedule]).stage_seconds["compute"][0]) for f in (full, ragged)]
    assert stage[1] == pytest.approx(2 * stage[0])


def test_an_element_wise_operator_runs_at_the_bandwidth() -> None:
    count = 80 * 2**17
    form = form_of(op="elementwise", function="add", shape=[count])
    row = estimate_schedules(form, V100, [TileSchedule(block=(("i0", 1024),), thread=(("i0", 4),))]).row(0)
    expected = 3 * 4 * count / V100.dram.bandwidth_bytes_per_second
    assert row.bound == "dram"
    assert row.stage_seconds["dram"] == pytest.approx(expected, rel=0.01)
    assert expected < row.seconds < 1.15 * expected


@pytest.mark.parametrize(("dtype", "bytes_"), [("float16", 2), ("float64", 8)])
def test_traffic_follows_the_element_size(dtype: str, bytes_: int) -> None:
    count = 80 * 2**17
    form = form_of(op="elementwise", function="relu", shape=[count], dtype=dtype)
    row = estimate_schedules(form, V100, [TileSchedule(block=(("i0", 1024),), thread=(("i0", 4),))]).row(0)
    expected = 2 * bytes_ * count / V100.dram.bandwidth_bytes_per_second
    assert row.stage_seconds["dram"] == pytest.approx(expected, rel=0.01)


def test_matrix_instructions_run_at_their_own_rate() -> None:
    m, n, k = 128 * 40, 128 * 20, 2048
    form = form_of(op="matmul", m=m, n=n, k=k, dtype="float16")
    schedule = matmul_schedule((128, 128), (64, 32), 32, padding=(("A", 8), ("B", 8)), instruction=Instruction.WMMA)
    row = estimate_schedules(form, V100, [schedule]).row(0)
    instruction = V100.matrix_instruction("float16")
    assert instruction is not None
    assert row.stage_seconds["compute"] == pytest.approx(2 * m * n * k / instruction.sustained_flops, rel=0.03)


def test_the_launch_is_part_of_it() -> None:
    form = form_of(op="elementwise", function="relu", shape=[7])
    schedule = TileSchedule(block=(("i0", 32),), thread=(("i0", 1),))
    base = estimate_schedules(form, V100, [schedule]).row(0)
    slower = estimate_schedules(form, replace(V100, launch_overhead_seconds=40e-6), [schedule]).row(0)
    assert base.seconds > V100.launch_overhead_seconds
    assert slower.seconds - base.seconds == pytest.approx(40e-6 - V100.launch_overhead_seconds)


def test_many_small_blocks_wait_to_be_started() -> None:
    form = form_of(op="elementwise", function="relu", shape=[2**20])
    row = estimate_schedules(form, V100, [TileSchedule(block=(("i0", 32),), thread=(("i0", 1),))]).row(0)
    assert row.stage_seconds["block_launch"] == pytest.approx(2**20 / 32 * V100.block_launch_seconds)


# What cannot run


@pytest.mark.parametrize(
    "schedule",
    [
        matmul_schedule((128, 132), (4, 4), 8),  # 1056 threads
        matmul_schedule((128, 128), (4, 4), 128),  # 128 KiB of shared memory
        matmul_schedule((64, 128), (8, 4), 8, vthreads=(4, 8), padding=(("A", 3000),)),
    ],
)
def test_what_does_not_fit_takes_forever(schedule: TileSchedule) -> None:
    fits = matmul_schedule((64, 64), (4, 4), 8)
    table = estimate_schedules(MATMUL, V100, [fits, schedule])
    assert math.isfinite(table.seconds[0]) and table.seconds[1] == math.inf
    assert table.row(1).blocks_per_unit == 0


# What must not matter, and what must not hurt


@settings(max_examples=30, deadline=None)
@given(st.data(), NAMES)
def test_rows_do_not_depend_on_each_other(data: st.DataObject, name: str) -> None:
    form = FORMS[name]
    rows = rows_of(data, form)
    together = estimate_schedules(form, V100, rows)
    for position, schedule in enumerate(rows):
        assert together.row(position) == estimate_schedules(form, V100, [schedule]).row(0)


def test_rows_of_different_kinds_do_not_depend_on_each_other() -> None:
    form = form_of(op="matmul", m=640, n=96, k=960, dtype="float16", transpose_b=True)
    rows = [
        matmul_schedule((32, 32), (2, 4), 16),
        matmul_schedule((64, 32), (32, 16), 32, padding=(("A", 8), ("B", 8)), instruction=Instruction.WMMA),
        matmul_schedule((32, 32), (2, 4), 16, cached=()),
        TileSchedule(block=(("m", 1), ("n", 2)), thread=(("m", 1), ("n", 1)), reduce_threads=(("k", 64),)),
    ]
    together = estimate_schedules(form, V100, rows)
    for position, schedule in enumerate(rows):
        assert together.row(position) == estimate_schedules(form, V100, [schedule]).row(0)


def test_faster_dram_never_slows_l2_down() -> None:
    rows = [matmul_schedule((1, 1), (1, 1), 1)]
    faster = with_layer(V100, "dram", bandwidth_bytes_per_second=2 * V100.dram.bandwidth_bytes_per_second)
    stages = [estimate_schedules(MATMUL, device, rows).stage_seconds["l2"][0] for device in (V100, faster)]
    assert stages[1] <= stages[0]


@pytest.mark.parametrize("layer", ["shared", "l2"])
@settings(max_examples=30, deadline=None)
@given(st.data(), NAMES, st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(layer: str, data: st.DataObject, name: str, factor: float) -> None:
    form = FORMS[name]
    rows = rows_of(data, form)
    rate = V100.layer(layer).bandwidth_bytes_per_second
    faster = with_layer(V100, layer, bandwidth_bytes_per_second=factor * rate)
    assert (seconds(form, rows, faster) <= seconds(form, rows) * (1 + 1e-9)).all()


@settings(max_examples=25, deadline=None)
@given(st.data(), NAMES, st.floats(1.0, 8.0))
def test_less_latency_is_never_slower(data: st.DataObject, name: str, factor: float) -> None:
    form = FORMS[name]
    rows = rows_of(data, form)
    latency = V100.dram.latency_seconds
    assert latency is not None
    faster = with_layer(V100, "dram", latency_seconds=latency / factor)
    assert (seconds(form, rows, faster) <= seconds(form, rows) * (1 + 1e-9)).all()


@st.composite
def kernels(draw: st.DrawFn) -> tuple[str, list[TileSchedule]]:
    """An operator by name, and schedules of it."""
    name = draw(NAMES)
    return name, draw(st.lists(schedules(FORMS[name], max_threads=256), min_size=1, max_size=4))


@settings(max_examples=25, deadline=None)
@given(kernels(), st.integers(80, 400))
# 170 blocks, of which a unit of 80 runs three at once: 15 warps keep four schedulers busy, the five of one do not. A
# block then takes 13.7 % longer by itself, and 36 % where the step is longer.
@example(("matmul", [matmul_schedule((72, 120), (4, 3), 12, vthreads=(2, 2))]), 170)
@example(("matmul", [matmul_schedule((72, 120), (4, 4), 32, vthreads=(2, 2))]), 170)
def test_more_units_never_work_longer(kernel: tuple[str, list[TileSchedule]], units: int) -> None:
    """Units with the same rates each, their way to L2 included: arithmetic, banks and waiting shrink.

    What a block does by itself, a step of all blocks of its unit by their number, does not: where a unit runs fewer
    blocks, some of its schedulers may be without a warp, and the slowest stage hides less of the others.
    """
    name, rows = kernel
    form = FORMS[name]
    factor = units / 80
    rates = tuple(
        replace(
            r,
            peak_flops=r.peak_flops * factor,
            sustained_flops=r.sustained_flops * factor,
            best_flops=r.peak_flops * factor,
        )
        for r in V100.throughput
    )
    shared_rate = V100.shared.bandwidth_bytes_per_second * factor
    larger = replace(V100, unit_count=units, throughput=rates)
    larger = with_layer(larger, "shared", bandwidth_bytes_per_second=shared_rate)
    assert V100.l2 is not None
    larger = with_layer(larger, "l2", bandwidth_bytes_per_second=V100.l2.bandwidth_bytes_per_second * factor)
    before, after = estimate_schedules(form, V100, rows), estimate_schedules(form, larger, rows)
    for stage in ("compute", "shared", "block_launch"):
        assert (after.stage_seconds[stage] <= before.stage_seconds[stage] * (1 + 1e-9)).all(), stage
    table = ScheduleTable.of(form, rows)
    parts, fewer = (breakdown(table, PlacedForm(form, device)) for device in (V100, larger))
    many, few = parts.step.occupancy, fewer.step.occupancy
    assert (fewer.waiting == parts.waiting).all() and (few.rounds <= many.rounds).all()
    work = parts.together / many.running * most_growth_of_a_block(many, few)
    most = many.rounds * table.step_count * (parts.waiting + work)
    assert (after.stage_seconds["latency"] <= most * (1 + 1e-9)).all()


def most_growth_of_a_block(many: Occupancy, few: Occupancy) -> np.ndarray[Any, Any]:
    """By how much what a block does may take longer when a unit runs ``few.running`` blocks, not ``many.running``.

    Arithmetic and issue wait for the scheduler with most warps, ceil(W / 4) of W: the share of a block is W / 4 at
    best, so that it grows by ceil(W / 4) / (W / 4) at most, 4 for a single warp. Shared memory and the way from L2
    share without rest. Their sum by an exponent grows no more than the one that grows most.
    """
    warps = np.asarray(few.warps * few.running, float)
    idle = np.ceil(warps / SCHEDULERS) / (warps / SCHEDULERS)
    return np.where(few.running < many.running, idle, 1.0)


@settings(max_examples=25, deadline=None)
@given(st.data(), NAMES)
def test_the_slowest_stage_bounds_the_time_from_below(data: st.DataObject, name: str) -> None:
    form = FORMS[name]
    table = estimate_schedules(form, V100, rows_of(data, form))
    for position in range(len(table.seconds)):
        row = table.row(position)
        assert tuple(row.stage_seconds) == STAGES
        assert all(value >= 0 for value in row.stage_seconds.values())
        if math.isfinite(row.seconds):
            slowest = row.stage_seconds[row.bound]
            assert slowest == max(row.stage_seconds.values())
            assert slowest + V100.launch_overhead_seconds <= row.seconds
            most = (1 + MOST_RISK * HOISTING_RISK) * sum(row.stage_seconds.values())
            assert row.seconds <= most + V100.launch_overhead_seconds


@settings(max_examples=25, deadline=None)
@given(st.data(), NAMES)
def test_dram_moves_at_least_what_nobody_can_avoid(data: st.DataObject, name: str) -> None:
    form = FORMS[name]
    table = estimate_schedules(form, V100, rows_of(data, form))
    output_bytes = form.expr.output.size_bytes
    floor = output_bytes / V100.dram.bandwidth_bytes_per_second
    assert (table.stage_seconds["dram"] >= floor).all()
    flops = 2 * form.points / V100.peak_flops("float32")
    assert (table.stage_seconds["compute"] >= flops * (1 - 1e-9)).all()


def test_a_larger_block_moves_less_through_l2() -> None:
    """W = M N K (1/x + 1/y) elements (thesis 5.4.3)."""
    form = form_of(op="matmul", m=4096, n=2048, k=1024)
    small, large = matmul_schedule((32, 64), (2, 4), 8), matmul_schedule((128, 64), (8, 4), 8)
    table = estimate_schedules(form, V100, [small, large])
    stored = 4 * 4096 * 2048

    def moved(x: int, y: int) -> float:
        return 4 * 4096 * 2048 * 1024 * (1 / x + 1 / y) + stored

    l2 = table.stage_seconds["l2"]
    assert l2[0] / l2[1] == pytest.approx(moved(32, 64) / moved(128, 64), rel=0.05)
    assert V100.l2 is not None
    assert l2[1] == pytest.approx(moved(128, 64) / V100.l2.bandwidth_bytes_per_second, rel=0.05)


def test_conflicts_cost_shared_memory_time_and_padding_removes_them() -> None:
    # Lanes walk m down rows of 32 words, four of them at once: 32 passes for four words; padded by a vector, four.
    conflicting = matmul_schedule((256, 8), (1, 8), 32)
    padded = conflicting.with_(padding=(("A", 4),))
    stage = estimate_schedules(MATMUL, V100, [conflicting, padded]).stage_seconds["shared"]
    assert stage[0] > 2 * stage[1]


def test_waves_count_the_last_round() -> None:
    form = form_of(op="matmul", m=64 * 161, n=64, k=512)
    schedule = matmul_schedule((64, 64), (8, 8), 8, padding=(("A", 500),))  # 64 x 508 floats: no two blocks per SM
    row = estimate_schedules(form, V100, [schedule.with_(padding=(("A", 184),))]).row(0)
    assert row.shared_bytes == 4 * (64 * (8 + 184) + 8 * 64)
    assert row.blocks_per_unit == 98304 // row.shared_bytes == 1
    assert row.wave_count == 3  # 161 blocks on 80 units


# Programs that have been compiled


def test_a_compiled_program_is_priced_by_the_registers_that_it_got() -> None:
    schedule = matmul_schedule((64, 64), (8, 4), 8)
    form = form_of(op="matmul", m=4096, n=4096, k=1024)
    expected = estimate_schedules(form, V100, [schedule]).row(0)
    same, more, spilling = (
        estimate_compiled(form, V100, schedule, registers=registers, spill_bytes=spilled)
        for registers, spilled in ((expected.registers, 0), (2 * expected.registers, 0), (expected.registers, 400))
    )
    assert same.seconds == pytest.approx(expected.seconds)
    assert more.blocks_per_unit < expected.blocks_per_unit and more.seconds > expected.seconds
    assert spilling.stage_seconds["shared"] > expected.stage_seconds["shared"]
