"""What RATIONAL and the search make of matrix products by warp groups (wgmma of sm_90a)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.model.gpu.occupancy import registers_per_thread
from sokoban.model.gpu.stages import compute_seconds, passes_per_second, power_seconds, shared_seconds
from sokoban.model.gpu.step import BlockStep
from sokoban.model.rational import estimate
from sokoban.schedule.bulk_copies import bulk_schedules
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import with_fall_back
from sokoban.search.search import search
from tests.sokoban.schedules import form_of, matmul_schedule

GEMM = form_of(op="matmul", m=4096, n=4096, k=4096, dtype="float16", accumulate="float32")
A100, H100, H200 = load_device("a100"), load_device("h100"), load_device("h200")


def group(rows: int = 128, width: int = 256, stages: int = 4) -> TileSchedule:
    return matmul_schedule((rows, width), (16, width), 64, instruction=Instruction.WGMMA, stages=stages, cluster=1)


MMA = matmul_schedule((128, 256), (64, 64), 64, instruction=Instruction.MMA_16X8X16, stages=3)


def table_of(*schedules: TileSchedule) -> ScheduleTable:
    return ScheduleTable.of(GEMM, schedules)


def without_l2(device: DeviceSpec) -> DeviceSpec:
    """The board with so fast an L2 that it bounds nothing."""
    fast = [
        msgspec.structs.replace(layer, bandwidth_bytes_per_second=28e12) if layer.name == "l2" else layer
        for layer in device.layers
    ]
    return msgspec.structs.replace(device, layers=tuple(fast))


def test_registers_hold_sums_and_addresses_alone() -> None:
    registers = registers_per_thread(table_of(group(), group(width=128), group(256, 192), MMA))
    # What NVRTC takes for sm_90a: 160 to 168, 90 to 96, 124 to 128; mma.sync: 128 sums, 64 of fragments.
    assert registers.tolist() == [128 + 32, 64 + 32, 96 + 32, 128 + 64 + 36]


def test_products_run_at_the_groups_own_rates() -> None:
    table = table_of(group(), MMA)
    step = BlockStep(table, PlacedForm(GEMM, H200))
    by_group, by_warp = (compute_seconds(step) / step.occupancy.running).tolist()
    groups, warps = H200.warp_group_instruction("float16"), H200.matrix_instruction("float16")
    assert groups is not None
    assert warps is not None
    assert by_warp / by_group == pytest.approx(groups.peak_flops / warps.peak_flops)


@pytest.mark.parametrize(("k", "settled"), [(4096, 0.3), (1 << 18, 0.97)])
def test_the_clock_falls_with_the_length_of_a_kernel(k: int, settled: float) -> None:
    """Warp groups draw more than the board's limit, single warps do not."""
    form = form_of(op="matmul", m=4096, n=4096, k=k, dtype="float16", accumulate="float32")
    step = BlockStep(ScheduleTable.of(form, (group(), MMA)), PlacedForm(form, H200))
    by_group, by_warp = power_seconds(step)
    groups, warps = H200.warp_group_instruction("float16"), H200.matrix_instruction("float16")
    assert groups is not None and groups.best_flops and groups.power_limited_flops
    assert warps is not None
    flops = 2.0 * 4096 * 4096 * k
    assert by_warp == pytest.approx(flops / warps.sustained_flops)
    fresh, limited = flops / groups.best_flops, flops / groups.power_limited_flops
    assert (by_group - fresh) / (limited - fresh) == pytest.approx(settled, abs=0.03)


def test_operands_are_read_once_a_group() -> None:
    """Per step 64 rows and all columns of 128 bytes for each group; rows and columns of 64 for every warp otherwise."""
    table = table_of(group(), MMA)
    step = BlockStep(table, PlacedForm(GEMM, H200))
    seconds = shared_seconds(step)
    rate = passes_per_second(H200)
    parts = step.fetches.values()
    copied = np.where(table.bulk, sum(part.bulk_passes for part in parts), sum(part.wavefronts for part in parts))
    passes = seconds * rate / step.occupancy.running - copied
    np.testing.assert_allclose(passes, [2 * (64 + 256), 8 * (64 + 64)])


@pytest.mark.parametrize("device", [H100, H200])
def test_warp_groups_are_the_faster_ones(device: DeviceSpec) -> None:
    by_group, by_warp = estimate(table_of(group(), MMA), PlacedForm(GEMM, device)).seconds.tolist()
    assert by_group < by_warp
    # Less than the rates of the instructions: both read as much from L2. Without its limit it comes near.
    by_group, by_warp = estimate(table_of(group(), MMA), PlacedForm(GEMM, without_l2(device))).seconds.tolist()
    assert by_warp / by_group > 1.15


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ({"op": "matmul", "m": 512, "n": 512, "k": 508, "dtype": "float16"}, "rows of A"),
        ({"op": "matmul", "m": 512, "n": 510, "k": 512, "dtype": "float16"}, "rows of B"),
        ({"op": "matmul", "m": 512, "n": 512, "k": 512}, "float32"),
        ({"op": "matmul", "m": 512, "n": 512, "k": 512, "dtype": "int8"}, "int8"),
        ({"op": "conv2d", "n": 2, "c": 64, "h": 16, "w": 16, "f": 64, "kh": 3, "kw": 3, "dtype": "float16"}, "windows"),
    ],
)
def test_other_operators_are_left_to_other_instructions(operator: dict[str, Any], reason: str) -> None:
    form = form_of(**operator)
    assert PlacedForm(form, H200).bulk_roles is None, reason
    assert list(bulk_schedules(PlacedForm(form, H200))) == []


def test_no_other_board_is_proposed_any() -> None:
    assert list(bulk_schedules(PlacedForm(GEMM, A100))) == []
    later = msgspec.structs.replace(H200, compute_capability=(10, 0), architecture="sm_100")
    assert list(bulk_schedules(PlacedForm(GEMM, later))) == []
    assert all(schedule.instruction != Instruction.WGMMA for schedule in search(GEMM, A100).schedules)


def test_the_search_finds_them_and_keeps_one_to_fall_back_on() -> None:
    found = search(GEMM, H200)
    assert found.schedules[0].instruction == Instruction.WGMMA
    assert any(schedule.instruction.is_mma for schedule in found.schedules)
    assert len({replace(schedule, stages=1) for schedule in found.schedules}) == len(found.schedules)


@pytest.mark.parametrize(
    ("ranked", "top_k", "expected"),
    [
        (["w1", "w2", "w3", "f1", "m1", "m2"], 3, ["w1", "w2", "m1", "w3", "f1", "m2"]),
        (["w1", "m1", "w2", "w3", "m2"], 3, ["w1", "m1", "w2", "w3", "m2"]),
        (["f1", "f2", "f3", "m1"], 3, ["f1", "f2", "f3", "m1"]),
        (["w1", "w2", "w3"], 2, ["w1", "w2", "w3"]),
        (["w1", "w2", "m1"], 1, ["w1", "w2", "m1"]),
    ],
)
def test_a_program_to_fall_back_on_takes_the_last_place(ranked: list[str], top_k: int, expected: list[str]) -> None:
    instructions = {"w": Instruction.WGMMA, "m": Instruction.MMA_16X8X16, "f": Instruction.FMA}
    assert with_fall_back(ranked, top_k, lambda name: instructions[name[0]]) == expected
