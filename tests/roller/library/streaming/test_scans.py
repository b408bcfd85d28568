"""Cumulative sums and products: blocks and steps by the shape, and what they wait for."""

from __future__ import annotations

import numpy as np
import pytest

from hal.catalog import load_device
from roller.library.calls import LibraryCall, price
from roller.library.streaming.scans import ROUND_WAIT, scan_seconds

A100, H100 = load_device("a100-sxm-40gb"), load_device("h100-sxm-80gb")


def test_a_row_waits_for_every_step_and_round() -> None:
    # 1024 rows of 11264 have 64 threads each: 88 steps of seven rounds, in one turn of 128 blocks.
    times = scan_seconds(1024, 11_264, 1, 1024 * 11_264 * 8, 0, A100)
    waits = 88 * (A100.dram.latency_seconds + 7 * ROUND_WAIT / A100.clocks.boost_hz)
    assert float(times.stages["waits"][0]) == pytest.approx(waits)
    assert times.algorithm.tolist() == ["tensor_kernel_scan_innermost_dim"]


def test_longer_rows_have_more_threads() -> None:
    # 128 threads go over 1024 columns in four steps of eight rounds, 256 over 1025 in three of nine.
    shorter, longer = scan_seconds(16, np.array([1024, 1025]), 1, 0, 0, A100).stages["waits"]
    assert longer < shorter


def test_another_dimension_is_walked_element_by_element() -> None:
    times = scan_seconds(1, 4096, 4096, 2 * 4 * 4096**2, 0, H100)
    assert float(times.stages["waits"][0]) == pytest.approx(4096 * H100.dram.latency_seconds)
    assert float(times.kernel_seconds[0]) > float((times.stages["dram"] + times.stages["waits"])[0])


def test_many_columns_are_bound_by_memory() -> None:
    size = 2.0 * 4 * 16 * 2**24
    times = scan_seconds(1, 16, 2**24, size, 0, H100)
    assert times.stages["dram"][0] > 2 * times.stages["waits"][0]


def test_dearer_combinations_take_longer() -> None:
    sizes = (4096.0, 4096.0, 1.0, 2.0 * 4 * 4096**2)
    calls = [
        LibraryCall(kind="scan", label=name, sizes=sizes, variant=name) for name in ("cumsum", "cummax", "logcumsumexp")
    ]
    seconds = [priced.seconds for priced in price(calls, H100)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[2]
