"""Registers, shared memory and resident blocks by hand: one limit at a time binds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.gpu.matrix.wmma import WmmaKernel
from hal.catalog import load_device
from sokoban.kernel.instructions import Instruction
from sokoban.model.gpu.occupancy import (
    OVERHEAD_REGISTERS,
    blocks_per_unit,
    granted_registers,
    registers_per_thread,
    shared_bytes,
    spilled_registers,
)
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule, schedules

V100 = load_device("v100")
MATMUL = form_of(op="matmul", m=1024, n=1024, k=1024)


def resident(schedule: TileSchedule, registers: int, shared: int, device: str = "v100") -> int:
    table = ScheduleTable.of(MATMUL, [schedule])
    return int(blocks_per_unit(table, load_device(device), np.array([registers]), np.array([shared]))[0])


THREADS_256 = matmul_schedule((64, 64), (4, 4), 8)
THREADS_32 = matmul_schedule((8, 64), (4, 4), 8)
THREADS_1024 = matmul_schedule((128, 128), (4, 4), 8)


@pytest.mark.parametrize(
    ("schedule", "registers", "shared", "blocks"),
    [
        # V100: 2048 threads, 32 blocks, 65536 registers, 96 KiB of shared memory per SM.
        (THREADS_256, 32, 0, 2048 // 256),
        (THREADS_1024, 32, 0, 2048 // 1024),
        (THREADS_32, 32, 0, 32),
        (THREADS_256, 64, 0, 65536 // (64 * 256)),
        # 65 registers x 32 lanes = 2080, given in multiples of 256: 2304 per warp, 8 warps.
        (THREADS_256, 65, 0, 65536 // (2304 * 8)),
        (THREADS_256, 255, 0, 65536 // (8192 * 8)),
        (THREADS_1024, 64, 0, 1),
        (THREADS_256, 32, 40_000, 98304 // 40_000),
        (THREADS_256, 32, 49_152, 2),
        (THREADS_256, 32, 49_153, 1),
        (THREADS_256, 32, 98_304, 1),
    ],
)
def test_the_tightest_limit_binds(schedule: TileSchedule, registers: int, shared: int, blocks: int) -> None:
    assert resident(schedule, registers, shared) == blocks


def test_what_exceeds_a_limit_alone_does_not_run() -> None:
    assert resident(THREADS_256, 32, 98_305) == 0
    assert resident(matmul_schedule((128, 132), (4, 4), 8), 32, 0) == 0  # 1056 threads
    assert resident(THREADS_1024, 65, 0) == 0  # 72 x 1024 registers of 65536


def test_a_partial_warp_takes_the_place_of_a_whole_one() -> None:
    schedule = matmul_schedule((20, 20), (4, 4), 8)  # 25 threads
    assert resident(schedule, 128, 0) == min(32, 65536 // (128 * 32))
    assert resident(matmul_schedule((20, 28), (4, 4), 8), 200, 0) == 65536 // (200 * 32 * 2)  # 35 threads, two warps


def test_reserved_shared_memory_counts_per_block() -> None:
    # A100: 164 KiB per SM, one of them reserved for every block, 163 for one block at most.
    a100 = load_device("a100").limits
    assert (a100.shared_bytes_per_unit, a100.shared_bytes_reserved_per_block) == (164 * 1024, 1024)
    assert resident(THREADS_256, 32, 41 * 1024, "a100") == 164 // (41 + 1)
    assert resident(THREADS_256, 32, 163 * 1024, "a100") == 1
    assert resident(THREADS_256, 32, 163 * 1024 + 1, "a100") == 0


def test_registers_hold_accumulators_and_a_fragment_of_each_operand() -> None:
    schedules_ = [matmul_schedule((48, 70), (3, 5), 8), matmul_schedule((48, 70), (3, 5), 8, vthreads=(2, 1))]
    registers = registers_per_thread(ScheduleTable.of(MATMUL, schedules_))
    assert registers.tolist() == [
        3 * 5 + (3 + 5) + OVERHEAD_REGISTERS,
        6 * 5 + (6 + 5) + OVERHEAD_REGISTERS,
    ]


def test_doubles_take_two_registers() -> None:
    form = form_of(op="matmul", m=99, n=99, k=99, dtype="float64", accumulate="float64")
    registers = registers_per_thread(ScheduleTable.of(form, [matmul_schedule((48, 70), (3, 5), 8)]))
    assert registers.tolist() == [2 * (3 * 5 + 3 + 5) + OVERHEAD_REGISTERS]


def test_the_tile_of_a_warp_is_spread_over_its_lanes() -> None:
    form = form_of(op="matmul", m=99, n=99, k=99, dtype="float16")
    schedule = matmul_schedule((64, 64), (32, 48), 16, instruction=Instruction.WMMA)
    registers = registers_per_thread(ScheduleTable.of(form, [schedule]))
    assert registers.tolist() == [-(-(32 * 48 + 32 + 48) // 32) + OVERHEAD_REGISTERS]


def test_pointwise_operators_hold_their_results_alone() -> None:
    form = form_of(op="elementwise", function="relu", shape=[1000])
    schedule = TileSchedule(block=(("i0", 96),), thread=(("i0", 3),))
    assert registers_per_thread(ScheduleTable.of(form, [schedule])).tolist() == [3 + OVERHEAD_REGISTERS]


def test_staged_tiles_fill_shared_memory_with_their_padding() -> None:
    rows = [
        matmul_schedule((48, 70), (3, 5), 8),
        matmul_schedule((48, 70), (3, 5), 8, padding=(("A", 1), ("B", 3))),
        matmul_schedule((48, 70), (3, 5), 8, cached=("B",)),
        matmul_schedule((48, 70), (3, 5), 8, cached=()),
    ]
    assert shared_bytes(ScheduleTable.of(MATMUL, rows)).tolist() == [
        4 * (48 * 8 + 8 * 70),
        4 * (48 * (8 + 1) + 8 * (70 + 3)),
        4 * (8 * 70),
        0,
    ]


def test_a_staged_window_holds_its_halo() -> None:
    form = form_of(op="conv2d", n=3, c=5, h=17, w=19, f=7, kh=3, kw=2, stride=2, dtype="float16")
    schedule = TileSchedule(
        block=(("n", 1), ("f", 7), ("oh", 4), ("ow", 3)),
        thread=(("n", 1), ("f", 1), ("oh", 1), ("ow", 1)),
        step=(("c", 5), ("kh", 3), ("kw", 2)),
        cached=("X", "W"),
    )
    x_tile, w_tile = 5 * (2 * (4 - 1) + 3) * (2 * (3 - 1) + 2), 7 * 5 * 3 * 2
    assert shared_bytes(ScheduleTable.of(form, [schedule])).tolist() == [2 * (x_tile + w_tile)]


@pytest.mark.parametrize("transpose", [False, True])
def test_results_of_matrix_instructions_pass_through_a_strip_as_generated(transpose: bool) -> None:
    form = form_of(op="matmul", m=129, n=260, k=99, dtype="float16", transpose_a=transpose, transpose_b=transpose)
    schedule = matmul_schedule(
        (64, 96), (32, 48), 32, padding=(("A", 8), ("B", 16)), instruction=Instruction.WMMA
    )  # fmt: skip
    a, b = ((32, 64 + 8), (96, 32 + 16)) if transpose else ((64, 32 + 8), (32, 96 + 16))
    strip = (64 // 32) * 16 * (96 + 8)
    expected = 2 * (a[0] * a[1] + b[0] * b[1]) + 4 * strip
    assert shared_bytes(ScheduleTable.of(form, [schedule])).tolist() == [expected]
    assert WmmaKernel.shared_bytes(schedule, form.roles) == expected


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 255), st.integers(0, 98_304))
def test_resident_blocks_fit_together_and_one_more_does_not(data: st.DataObject, registers: int, shared: int) -> None:
    schedule = data.draw(schedules(MATMUL))
    blocks = resident(schedule, registers, shared)
    warps = -(-schedule.threads_per_block // 32)
    per_warp = -(-registers * 32 // 256) * 256

    def fits(count: int) -> bool:
        return (
            count <= 32
            and count * warps * 32 <= 2048
            and count * warps * per_warp <= 65536
            and count * shared <= 98_304
        )

    assert fits(blocks) and not fits(blocks + 1)


def test_a_large_block_gets_the_registers_that_let_it_run() -> None:
    table = ScheduleTable.of(MATMUL, [THREADS_1024, THREADS_256, THREADS_32])
    needed = np.array([90, 90, 300])
    granted = granted_registers(table, V100, needed)
    # 65536 registers / 32 warps = 2048 a warp, 64 a thread; 256 threads may have all they need; 255 can be named.
    assert granted.tolist() == [64, 90, 255]
    assert spilled_registers(V100, needed, granted).tolist() == [
        90 - 64,
        0,
        300 - 255,
    ]


def test_local_accumulators_need_no_registers() -> None:
    table = ScheduleTable.of(MATMUL, [matmul_schedule((48, 70), (3, 5), 8)] * 2)
    registers = registers_per_thread(table, np.array([False, True]))
    assert registers.tolist() == [3 * 5 + 8 + OVERHEAD_REGISTERS, 8 + OVERHEAD_REGISTERS]
