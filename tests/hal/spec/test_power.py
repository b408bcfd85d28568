"""A board whose clock has settled in a job of hours."""

from __future__ import annotations

import pytest

from hal.catalog import load_device
from hal.spec.power import OPERANDS, SETTLED_EXPONENT, settled, settled_clock, with_power

A100, H100, V100 = load_device("a100-sxm-80gb"), load_device("h100-sxm-80gb"), load_device("v100-pcie-16gb")


def test_everything_that_the_clock_drives_runs_at_that_of_large_products() -> None:
    for board in (A100, H100):
        share, job = settled_clock(board), settled(board)
        (first,) = {
            each.best_flops for each in board.matrix_instructions if each.input_dtype == "bfloat16" and each.best_flops
        }
        best = next(each for each in job.matrix_instructions if each.best_flops and each.input_dtype == "bfloat16")
        assert best.best_flops == pytest.approx(first * share) == best.power_limited_flops
        assert job.clocks.boost_hz == pytest.approx(board.clocks.boost_hz * share)
        assert job.peak_flops("float32") == pytest.approx(board.peak_flops("float32") * share)
        # Memory has a clock of its own.
        assert job.dram == board.dram


def test_operands_of_a_job_draw_more_than_those_of_a_benchmark() -> None:
    (limit,) = {each.power_limited_flops for each in A100.matrix_instructions if each.input_dtype == "bfloat16"}
    assert limit is not None
    # Between what two sources measured with normal numbers.
    assert 257e12 <= OPERANDS * limit <= 264.5e12


def test_a_board_that_nobody_measured_keeps_its_clock() -> None:
    assert settled_clock(V100) == 1.0 and settled(V100).clocks == V100.clocks


def test_a_clock_that_jobs_were_seen_to_keep_counts_for_all_rates() -> None:
    board = load_device("gb300")
    clock = board.clocks.job_hz
    assert clock is not None and settled_clock(board) == clock / board.clocks.boost_hz
    job = settled(board)
    assert job.clocks.boost_hz == pytest.approx(clock) and settled_clock(job) == pytest.approx(1.0)
    for before, after in zip(board.matrix_instructions, job.matrix_instructions, strict=True):
        if before.best_flops is not None:
            assert after.best_flops == pytest.approx(before.best_flops * settled_clock(board))
    lower = with_power(board, 0.5).clocks.job_hz
    assert lower is not None and lower == pytest.approx(clock * 0.5**SETTLED_EXPONENT)


def test_settling_twice_changes_a_board_by_its_operands_alone() -> None:
    assert settled_clock(settled(H100)) == pytest.approx(OPERANDS)
