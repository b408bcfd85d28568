"""Values by rank: which of PyTorch's ways a shape takes, and what its kernels wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from roller.library.calls import LibraryCall, price
from roller.library.streaming.elementwise import kernel_seconds_floor
from roller.library.streaming.selection import MULTI_BLOCK, SINGLE_BLOCK, topk_seconds

H100 = load_device("h100-pcie-80gb")


def seconds(rows: Any, columns: Any, k: Any, item_bytes: int = 4) -> Any:
    return topk_seconds(rows, columns, k, item_bytes, H100).kernel_seconds


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 20000), (20, 20000), (21, 10000), (80, 8000), (81, 5000), (200, 3000), (800, 800), (4001, 400)],
)
def test_rows_have_several_blocks_from_pytorchs_thresholds_on(rows: int, columns: int) -> None:
    both = topk_seconds(rows, np.array([columns - 1, columns]), 8, 4, H100)
    assert both.algorithm.tolist() == [SINGLE_BLOCK, MULTI_BLOCK]


def test_a_row_of_one_block_takes_as_long_as_it_has_elements() -> None:
    times = seconds(1, np.array([4096, 8192, 12288]), 8)
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert times[1] > 1.5 * times[0]


def test_rows_of_one_block_run_side_by_side_up_to_a_unit_each() -> None:
    times = seconds(np.array([1, H100.unit_count, 64 * H100.unit_count]), 256, 8)
    assert times[0] == pytest.approx(times[1], rel=0.05)
    assert times[2] > 4 * times[1]


def test_values_of_two_bytes_have_half_the_digits() -> None:
    wide, narrow = (topk_seconds(1, 1 << 17, 8, size, H100) for size in (4, 2))
    assert (wide.kernels[0], narrow.kernels[0]) == (22, 16)
    assert float(wide.kernel_seconds[0]) > float(narrow.kernel_seconds[0]) + 6 * kernel_seconds_floor(H100)


def test_one_value_needs_no_sorting() -> None:
    assert topk_seconds(1, 100, np.array([1, 2]), 4, H100).kernels.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("rows", "columns", "microseconds"), [(8, 16384, 102.0), (8, 65536, 64.1), (20, 16384, 95.6), (1, 65536, 54.6)]
)
def test_times_are_those_of_a_published_study(rows: int, columns: int, microseconds: float) -> None:
    # Of 2048 values that are not sorted, launched as a graph: the sort is taken off.
    times = topk_seconds(rows, columns, 2048, 4, H100)
    network = 78 * 0.3e-6 + kernel_seconds_floor(H100)
    assert (float(times.kernel_seconds[0]) - network) * 1e6 == pytest.approx(microseconds, rel=0.25)


def test_calls_are_priced_with_others() -> None:
    calls = [
        LibraryCall(kind="topk", label="topk", sizes=(64, 128256, 50), dtype=dtype) for dtype in ("float32", "bfloat16")
    ]
    wide, narrow = price(calls, H100)
    assert (wide.kernel, wide.kernels, narrow.kernels) == (MULTI_BLOCK, 22, 16)
    assert wide.call_seconds > wide.seconds > narrow.seconds
