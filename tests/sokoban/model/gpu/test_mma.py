"""What RATIONAL and search make of matrix products by ``mma.sync`` over a pipeline of asynchronous copies."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.gpu.matrix.mma import MmaKernel
from hal.catalog import load_device
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.model.gpu.breakdown import breakdown
from sokoban.model.gpu.issue import issue_seconds
from sokoban.model.gpu.occupancy import registers_per_thread, shared_bytes
from sokoban.model.gpu.stages import between_tiles_seconds, passes_per_second, shared_seconds
from sokoban.model.gpu.step import BlockStep
from sokoban.model.rational import estimate
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from sokoban.search.search import search
from tests.sokoban.schedules import form_of, matmul_schedule

GEMM = form_of(op="matmul", m=4096, n=4096, k=4096, dtype="float16", accumulate="float32")
A100 = load_device("a100")


def mma(
    block: tuple[int, int] = (128, 256), warp: tuple[int, int] = (64, 64), step: int = 64, stages: int = 3
) -> TileSchedule:
    return matmul_schedule(block, warp, step, instruction=Instruction.MMA_16X8X16, stages=stages)


def table_of(*schedules: TileSchedule) -> ScheduleTable:
    return ScheduleTable.of(GEMM, schedules)


def test_registers_hold_sums_two_depths_of_fragments_and_addresses() -> None:
    registers = registers_per_thread(table_of(mma(), mma(warp=(32, 32)), mma(warp=(64, 32))))
    # What NVRTC takes for sm_80: 224 to 240, 84, 136 to 146.
    assert registers.tolist() == [128 + 64 + 36, 32 + 32 + 36, 64 + 48 + 36]


def test_copies_beyond_sixteen_of_a_thread_take_registers() -> None:
    """Steps of 64 and 128 elements by four warps: 12 copies a thread, and 24; those of eight warps are 16 at most."""
    shapes = [((128, 64), (32, 64)), ((128, 128), (32, 64))]
    registers = [registers_per_thread(table_of(*(mma(*shape, step) for step in (64, 128)))) for shape in shapes]
    # NVRTC takes 154 and 198 for sm_80, 152 and 156 with eight warps.
    assert [each.tolist() for each in registers] == [[148, 148 + 8 * 6], [148, 148]]


@pytest.mark.parametrize(
    "schedule", [mma(), mma(stages=2), mma((64, 64), (32, 32), 32, 4), mma((128, 128), (16, 128), 16, 1)]
)
def test_shared_memory_is_what_is_generated(schedule: TileSchedule) -> None:
    assert shared_bytes(table_of(schedule)).tolist() == [MmaKernel.shared_bytes(schedule, GEMM.roles)]


def test_a_block_with_more_threads_than_its_sums_leave_registers_for_spills() -> None:
    table = table_of(mma(), mma((256, 256)))
    spilled = BlockStep(table, PlacedForm(GEMM, A100)).occupancy.spilled
    assert spilled[0] == 0
    assert spilled[1] == 228 - 65536 // 512


def test_a_warp_issues_a_product_of_16x8_at_a_time_and_a_load_per_fragment() -> None:
    table = table_of(mma(), mma(step=128))
    step = BlockStep(table, PlacedForm(GEMM, A100))
    seconds = issue_seconds(step)
    per_step = seconds * A100.clocks.boost_hz / 2  # warps of a scheduler
    products, loads, copies = 4 * 8, 4 + 4, 6
    assert per_step[0] == pytest.approx(4 * (products + loads) + 4 * 2 * copies + 10)
    assert np.diff(per_step) == pytest.approx(4 * (products + loads) + 4 * 2 * copies)


def test_fragments_leave_shared_memory_at_full_width() -> None:
    table = table_of(mma())
    step = BlockStep(table, PlacedForm(GEMM, A100))
    seconds = shared_seconds(step)
    passes = seconds * passes_per_second(A100)
    copied = sum(part.wavefronts for part in step.fetches.values())
    # Eight warps, four depths, eight fragments of 512 bytes.
    assert passes == pytest.approx(8 * 4 * 8 * 4 + copied)


def test_more_stages_wait_less_until_nothing_is_left_to_hide() -> None:
    small = [mma((64, 64), (32, 32), 16, stages) for stages in (1, 2, 3, 4)]
    waiting = breakdown(table_of(*small), PlacedForm(GEMM, A100)).waiting
    assert waiting[0] > waiting[1] > waiting[2] >= waiting[3] > 0
    large = breakdown(table_of(mma(stages=3), mma(stages=4)), PlacedForm(GEMM, A100)).waiting
    assert large[0] == large[1] == pytest.approx(40 / A100.clocks.boost_hz)


def test_a_pipeline_is_filled_once_per_block() -> None:
    filling = breakdown(table_of(mma(stages=1), mma(stages=3)), PlacedForm(GEMM, A100)).filling
    assert filling[0] == 0
    assert filling[1] >= A100.dram.latency_seconds  # type: ignore[operator]


def test_results_pass_by_strips_of_sixteen_rows_between_two_tiles() -> None:
    table = table_of(mma(), mma((128, 128), (64, 32)), mma((64, 64), (32, 32)))
    found = breakdown(table, PlacedForm(GEMM, A100))
    assert found.step.occupancy.running.tolist() == [1, 1, 3]
    width = A100.shared.bandwidth_bytes_per_second / A100.unit_count
    rounds = found.step.occupancy.rounds
    # The first block of a unit starts with the kernel.
    whole, half, quarter = (
        2 * 4 * elements / width + (2100 * (1 - 1 / rounds[row]) + 2 * 40 * strips) / A100.clocks.boost_hz
        for row, (elements, strips) in enumerate(((128 * 256, 4), (128 * 128, 4), (64 * 64, 2)))
    )
    # Other blocks of a unit multiply meanwhile.
    assert between_tiles_seconds(found.step) == pytest.approx([whole, half, quarter / 3])
    assert found.finishing == pytest.approx(between_tiles_seconds(found.step))


def test_rank_1_of_a_large_product_reaches_70_percent_of_the_peak_of_a100() -> None:
    found = search(GEMM, A100, top_k=1)
    schedule, seconds = found.schedules[0], found.estimates[0].seconds
    instruction = A100.matrix_instruction("float16")
    assert instruction is not None
    assert (schedule.instruction, schedule.padding) == ("mma_16x8x16", ())
    assert schedule.stages >= 2
    assert 0.70 < 2 * 4096**3 / seconds / instruction.peak_flops < instruction.fresh_flops / instruction.peak_flops


def test_the_same_tiles_take_longer_by_wmma() -> None:
    plain = matmul_schedule(
        (128, 128), (64, 64), 32, instruction=Instruction.WMMA, padding=(("A", 8), ("B", 8))
    )  # fmt: skip
    times = estimate(table_of(plain, mma((128, 128), (64, 64), 32, 3)), PlacedForm(GEMM, A100)).seconds
    assert times[0] > 1.1 * times[1]
