"""Operand reads from shared memory: how many words, how wide, how many passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.model.gpu.issue import READS, issued_instructions
from sokoban.model.gpu.loops import loop_nest
from sokoban.model.gpu.operands import OperandReads, operand_reads
from sokoban.model.gpu.stages import (
    LOADED_LATENCY,
    STEP_LATENCY,
    compute_seconds,
    far_latency,
    latency_seconds,
    waiting_seconds,
)
from sokoban.model.gpu.step import BlockStep
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule

V100 = load_device("v100")
MATMUL = form_of(op="matmul", m=1024, n=1024, k=1024)
CONV = form_of(op="conv2d", n=8, c=64, h=58, w=58, f=64, kh=3, kw=3)


def reads(form: KernelForm, schedule: TileSchedule, tensor: str) -> OperandReads:
    table = ScheduleTable.of(form, [schedule])
    (load,) = [load for load in form.body_loads if load.tensor == tensor]
    return operand_reads(table, load, V100, loop_nest(table))


def test_each_operand_of_a_body_is_read_once() -> None:
    schedule = matmul_schedule((64, 64), (4, 8), 8)
    a, b = reads(MATMUL, schedule, "A"), reads(MATMUL, schedule, "B")
    assert (a.words.tolist(), b.words.tolist()) == ([4 * 8], [8 * 8])


def test_what_lies_side_by_side_is_read_four_at_a_time() -> None:
    schedule = matmul_schedule((64, 64), (4, 8), 8, unroll=512)
    # A runs along the unrolled reduction, B along the thread's columns.
    for tensor, words in (("A", 32), ("B", 64)):
        found = reads(MATMUL, schedule, tensor)
        assert found.width.tolist() == [4] and found.instructions.tolist() == [words / 4]


def test_rows_out_of_line_take_single_reads_at_their_ends() -> None:
    def instructions(padding: int) -> float:
        schedule = matmul_schedule((64, 64), (4, 8), 8, padding=(("A", padding),), unroll=512)
        return float(reads(MATMUL, schedule, "A").instructions[0])

    # Four rows of eight words each.
    assert instructions(0) == instructions(4) == 32 / 4
    assert 32 / 4 < instructions(2) < instructions(1) < 32


def test_reads_of_points_that_the_compiler_unrolls_are_merged_at_times() -> None:
    # 32 accumulators: with 16 statements allowed the code generator unrolls none of the reduction.
    written, left = (reads(MATMUL, matmul_schedule((64, 64), (4, 8), 8, unroll=n), "A") for n in (512, 16))
    assert written.words.tolist() == left.words.tolist() == [32]
    merged, separate = 32 / 4, 32.0
    assert written.instructions.tolist() == [merged]
    assert merged < left.instructions[0] < separate


def test_neighbouring_taps_share_what_they_read() -> None:
    def conv(unroll: int, **step: int) -> OperandReads:
        schedule = TileSchedule(
            block=(("n", 1), ("f", 16), ("oh", 4), ("ow", 56)),
            thread=(("n", 1), ("f", 2), ("oh", 1), ("ow", 7)),
            step=tuple(step.items()),
            cached=("X", "W"),
            unroll=unroll,
        )
        return reads(CONV, schedule, "X")

    # Seven outputs under three taps read nine columns, not twenty-one.
    assert conv(0, c=1, kh=1, kw=3).words.tolist() == [9]
    assert conv(0, c=1, kh=3, kw=3).words.tolist() == [27]


@pytest.mark.parametrize(("pitch", "passes"), [(32, 32), (33, 1)])
def test_lanes_down_a_column_meet_in_one_bank_unless_padded(pitch: int, passes: int) -> None:
    schedule = matmul_schedule((256, 8), (1, 8), 32, padding=(("A", pitch - 32),), unroll=0)
    found = reads(MATMUL, schedule, "A")
    assert (found.passes / found.instructions).tolist() == [passes]


def test_words_that_all_lanes_want_cost_one_pass_for_two() -> None:
    schedule = matmul_schedule((8, 256), (8, 4), 8)
    found = reads(MATMUL, schedule, "A")
    assert found.width.tolist() == [4]
    assert found.instructions[0] < found.passes[0] <= 2 * found.instructions[0]


def test_what_is_not_staged_is_read_word_by_word() -> None:
    schedule = matmul_schedule((64, 64), (4, 8), 8, cached=("B",))
    a: Any = reads(MATMUL, schedule, "A")
    assert a.width.tolist() == [1] and a.instructions.tolist() == [32]


def test_a_schedule_reads_the_same_whatever_stands_next_to_it() -> None:
    """Schedules whose reduction the device compiler unrolls, at other widths than one another's, and ones where not."""
    schedules = [
        matmul_schedule((64, 64), (4, 8), 8, unroll=unroll) if step == 8 else matmul_schedule((32, 64), (2, 4), step)
        for unroll, step in ((512, 8), (0, 8), (64, 4), (64, 16), (64, 1))
    ]
    table = ScheduleTable.of(MATMUL, schedules)
    for load in MATMUL.body_loads:
        together = operand_reads(table, load, V100, loop_nest(table))
        apart = [reads(MATMUL, schedule, load.tensor) for schedule in schedules]
        for name in ("words", "instructions", "passes", "width"):
            assert getattr(together, name).tolist() == [getattr(alone, name)[0] for alone in apart]


def test_windows_of_virtual_threads_that_overlap_are_read_once() -> None:
    image = form_of(expr="Y[y,x] = sum([i,j], X[y+i,x+j] * 0.5)", sizes={"y": 256, "x": 512, "i": 15, "j": 15})
    schedule = TileSchedule(
        block=(("y", 16), ("x", 64)), thread=(("y", 1), ("x", 1)), vthreads=(("y", 8), ("x", 1)), cached=("X",),
        unroll=225 * 8,
    )  # fmt: skip
    found = reads(image, schedule, "X")
    # Eight rows two apart under a window of 15 are 29 rows: 435 reads, as 17 such bodies compiled for sm_86 have.
    assert found.words.tolist() == [29 * 15]
    apart = schedule.with_(block=(("y", 128), ("x", 64)))
    assert reads(image, apart, "X").words.tolist() == [8 * 15 * 15]


def test_values_wait_without_a_register_where_a_body_is_long_and_its_windows_are_far_apart() -> None:
    image = form_of(expr="Y[y,x] = sum([i,j], X[y+i,x+j] * 0.5)", sizes={"y": 4096, "x": 4096, "i": 15, "j": 15})

    def spilled(threads: tuple[int, int], copies: tuple[int, int]) -> float:
        block = (("y", threads[0] * copies[0]), ("x", threads[1] * copies[1]))
        schedule = TileSchedule(
            block=block, thread=(("y", 1), ("x", 1)), vthreads=(("y", copies[0]), ("x", copies[1])), cached=("X",),
            unroll=225 * copies[0] * copies[1],
        )  # fmt: skip
        table = ScheduleTable.of(image, [schedule])
        return float(BlockStep(table, PlacedForm(image, load_device("rtx-3090"))).window_spills[0])

    # What NVRTC made of these for sm_86: nothing, nothing, 492 values.
    assert spilled((2, 64), (8, 1)) == spilled((2, 64), (7, 2)) == 0
    assert 400 < spilled((8, 16), (7, 2)) < 1300


# What kernels of others say of their reads


def filtered(cached: tuple[str, ...], **columns: int) -> BlockStep:
    image = form_of(expr="Y[y,x] = sum([i,j], X[y+i,x+j] * 0.5)", sizes={"y": 512, "x": 512, "i": 5, "j": 5})
    schedule = TileSchedule(block=(("y", 4), ("x", 64)), thread=(("y", 1), ("x", 1)), cached=cached, unroll=25)
    given = {name: {"X": np.array([count])} for name, count in columns.items()}
    table = replace(ScheduleTable.of(image, [schedule]), **given)
    return BlockStep(table, PlacedForm(image, load_device("a100")))


def test_addresses_of_reads_in_place_take_issue_slots_and_time_of_the_arithmetic() -> None:
    plain, addressed = filtered(()), filtered((), address=2)
    assert plain.addresses.tolist() == [0] and addressed.addresses.tolist() == [2 * 25]
    more = issued_instructions(addressed)[READS] - issued_instructions(plain)[READS]
    assert more.tolist() == [50]
    assert compute_seconds(addressed)[0] == pytest.approx(3 * compute_seconds(plain)[0], rel=1e-3)
    # What is staged is read from where the compiler has laid it.
    assert filtered(("X",), address=2).addresses.tolist() == [0]


def test_a_kernel_that_says_how_often_it_waits_waits_as_often_and_holds_few_loads() -> None:
    plain, once, often = filtered(("X",)), filtered(("X",), waits=1), filtered(("X",), waits=9)
    latency = latency_seconds(often.device)
    assert waiting_seconds(once)[0] == pytest.approx(STEP_LATENCY * latency)
    further = waiting_seconds(often)[0] - waiting_seconds(once)[0]
    assert further == pytest.approx(8 * LOADED_LATENCY * latency * far_latency(often)[0])
    assert 0 < far_latency(often)[0] <= 1 and often.occupancy.registers <= plain.occupancy.registers
