"""Kernels with a block per row: steps, turns, traffic, names and the boards that measured them."""

from __future__ import annotations

import numpy as np
import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library.calls import LibraryCall, price
from roller.library.streaming.row_kernels import CACHE_SHARE, PORT_BYTES, ROW_KERNELS, row_kernel_seconds
from roller.library.streaming.rowwise import layer_norm_seconds

A100, H100, H200 = load_device("a100-sxm-80gb"), load_device("h100"), load_device("h200")


def test_a_lone_row_waits_for_each_of_its_steps() -> None:
    # 5000 columns by 1024 threads are five steps, each with a second read, and a reduction at the end.
    times = row_kernel_seconds("vllm rms_norm", 1, 5000, A100)
    assert float(times.stages["waits"][0]) == pytest.approx((5 * (1 + CACHE_SHARE) + 1) * A100.dram.latency_seconds)
    # By eight elements a thread, they are one.
    vectors = row_kernel_seconds("vllm fused_add_rms_norm", 1, 5000, A100)
    assert float(vectors.stages["waits"][0]) == pytest.approx((1 + CACHE_SHARE + 1) * A100.dram.latency_seconds)


def test_turns_follow_from_the_threads_that_a_unit_holds() -> None:
    # Two blocks of 1024 threads on each of 108 units: 1080 rows are five turns.
    waits = [float(row_kernel_seconds("vllm act_and_mul", rows, 2048, A100).stages["waits"][0]) for rows in (216, 1080)]
    assert waits[1] == pytest.approx(5 * waits[0])


def test_a_lone_row_moves_no_more_than_its_units_port_passes() -> None:
    times = row_kernel_seconds("vllm act_and_mul by vectors", 2, 28_672, A100)
    assert float(times.stages["ports"][0]) == pytest.approx(28_672 * 3 * 2 / (PORT_BYTES * A100.clocks.boost_hz))
    assert float(times.kernel_seconds[0]) > float(times.stages["ports"][0] + times.stages["waits"][0])


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_large_tensors_are_bound_by_what_moves(name: str) -> None:
    rows, columns = 100_000, 8192
    seconds = float(row_kernel_seconds(name, rows, columns, H100).kernel_seconds[0])
    ideal = ROW_KERNELS[name].moved * rows * columns * 2 / H100.dram.bandwidth_bytes_per_second
    assert ideal < seconds < 6 * ideal


def test_keys_are_walked_after_queries() -> None:
    alone, both = (row_kernel_seconds("vllm rotary_embedding", 300, 512, A100, further=keys) for keys in (0, 64))
    assert float(both.kernel_seconds[0]) > float(alone.kernel_seconds[0])
    assert float(both.stages["waits"][0]) == pytest.approx(1.5 * float(alone.stages["waits"][0]))


def test_unknown_kernels_are_one_line_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no row kernel is called 'apex norm'") as refused:
        row_kernel_seconds("apex norm", 1, 1, A100)
    assert "\n" not in str(refused.value)


def test_a_call_of_rows_has_the_kernel_as_its_name() -> None:
    call = LibraryCall(kind="rows", label="norm", sizes=(77, 3000, 0), dtype="bfloat16", variant="cudnn norm")
    (priced,) = price([call], H200)
    assert (priced.kernel, priced.kernels) == ("cudnn norm", 1)


def test_rms_norm_computes_less_than_layer_norm_and_moves_as_much() -> None:
    whole, rms = (layer_norm_seconds(np.array([8192.0]), 5120, H200, dtype_bytes=2, rms=each) for each in (False, True))
    assert rms.stages["arithmetic"] < whole.stages["arithmetic"]
    assert rms.stages["dram"] == whole.stages["dram"]


@pytest.mark.parametrize(
    ("name", "board", "rows", "columns", "measured_us"),
    [
        ("vllm rms_norm", A100, 4096, 8192, 179),
        ("vllm rms_norm", H100, 4096, 4096, 63),
        ("vllm act_and_mul", A100, 4096, 12288, 295),
        ("cudnn norm", H200, 4096, 16384, 70),
        ("cudnn norm backward", H200, 4096, 16384, 118),
    ],
)
def test_measured_kernels_are_within_a_sixth(
    name: str, board: object, rows: int, columns: int, measured_us: float
) -> None:
    predicted_us = float(row_kernel_seconds(name, rows, columns, board).kernel_seconds[0]) * 1e6  # type: ignore[arg-type]
    assert predicted_us == pytest.approx(measured_us, rel=1 / 6)
