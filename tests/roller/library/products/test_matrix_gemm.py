"""The model of products on Tensor Cores: what must hold whatever the constants are, and how near it is to calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hal
from roller.library.products.matrix_gemm import CONSTANTS, STAGES, MatrixTimes, has_matrix_gemm, matrix_gemm
from roller.library.products.matrix_tiles import aligned, kernels_of

DATA = Path(__file__).parents[4].parent / "shared" / "data" / "tensor_core" / "gemm.parquet"

V100, P4, A100, L40S, H100, H200, B200 = (
    hal.load_device(name) for name in ("v100", "p4", "a100-sxm-80gb", "l40s", "h100-sxm-80gb", "h200", "b200")
)
BOARDS = [V100, A100, L40S, H100, H200, B200, *(hal.load_device(name) for name in ("rtx-3090", "rtx-pro-6000", "t4"))]


def named(device: hal.DeviceSpec) -> str:
    return device.name


def times(device: hal.DeviceSpec, m: Any, n: Any, k: Any, dtype: str = "float16", b: Any = 1, **rest: Any) -> Any:
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, dtype=np.float64)) for size in (b, m, n, k)))
    return matrix_gemm(*arrays, device, dtype=dtype, **rest)


def seconds(device: hal.DeviceSpec, m: Any, n: Any, k: Any, **rest: Any) -> Any:
    return times(device, m, n, k, **rest).seconds


@pytest.mark.parametrize("device", BOARDS, ids=named)
def test_sizes_of_every_kind_have_finite_times_that_no_board_could_beat(device: hal.DeviceSpec) -> None:
    m, n, k = (axis.ravel() for axis in np.meshgrid([1, 2, 17, 500, 4097], [1, 33, 64, 5000], [1, 40, 70_000]))
    found: MatrixTimes = times(device, m, n, k)
    instruction = device.best_matrix_instruction("float16")
    assert instruction is not None
    assert np.isfinite(found.seconds).all()
    assert (found.seconds > device.launch_overhead_seconds).all()
    assert (2.0 * m * n * k / found.seconds < instruction.peak_flops).all()
    assert all((found.stages[name] >= 0).all() and np.isfinite(found.stages[name]).all() for name in STAGES)


@pytest.mark.parametrize("device", BOARDS, ids=named)
def test_more_work_never_takes_clearly_less(device: hal.DeviceSpec) -> None:
    sizes = 2.0 ** np.arange(4, 15)
    for grown in (
        seconds(device, sizes, 4096, 4096),
        seconds(device, 512, sizes, 4096),
        seconds(device, 64, 64, sizes),
    ):
        assert (grown[1:] > 0.93 * grown[:-1]).all()


def test_the_many_together_take_what_each_takes_alone() -> None:
    m, n, k = np.array([1, 300, 4096, 20]), np.array([4096, 70, 4096, 64]), np.array([4096, 5000, 512, 8192])
    alone = [seconds(A100, *sizes)[0] for sizes in zip(m, n, k, strict=True)]
    assert seconds(A100, m, n, k).tolist() == pytest.approx(alone)


def test_few_tokens_wait_for_the_weights() -> None:
    found = times(H100, 16, 16384, 16384)
    read = 2 * 16384**2 / H100.dram.bandwidth_bytes_per_second
    assert found.stages["dram"][0] > found.stages["compute"][0]
    assert read < found.seconds[0] < 1.3 * read


def test_weights_that_fit_into_the_cache_in_turn_are_read_from_there() -> None:
    found = times(L40S, 8, [2048, 4096], 2048)
    assert found.stages["dram"][1] > 3 * found.stages["dram"][0]
    assert found.seconds[1] > 1.4 * found.seconds[0]


def test_long_sums_of_few_results_are_shared_between_blocks() -> None:
    found = times(A100, [64, 8192], [64, 8192], [16384, 4096])
    assert found.splits[0] > 4
    assert found.splits[1] == 1


def test_rows_that_bulk_copies_cannot_read_go_through_warps() -> None:
    assert aligned(np.array([4096.0, 4096.0, 33.0]), np.array([4096.0, 4095.0, 64.0]), 2).tolist() == [
        True,
        False,
        False,
    ]
    found = times(H100, 4096, 4096, [4096, 4095])
    assert found.instruction.tolist() == ["wgmma", "mma.sync"]
    assert found.seconds[1] > 1.2 * found.seconds[0]


def test_narrow_types_are_faster_and_tensorfloat32_is_slower() -> None:
    wide, half, narrow, whole = (
        seconds(H100, 8192, 8192, 8192, dtype=dtype)[0] for dtype in ("tfloat32", "bfloat16", "float8_e4m3fn", "int8")
    )
    assert 1.5 * half < wide < 2.5 * half
    assert narrow < 0.7 * half and whole < 0.7 * half


def test_a_batch_of_products_fills_the_board_as_one_of_as_many_rows() -> None:
    batch, single = seconds(A100, 256, 512, 512, b=64)[0], seconds(A100, 256 * 64, 512, 512)[0]
    assert batch == pytest.approx(single, rel=0.4)
    assert batch < 20 * seconds(A100, 256, 512, 512)[0]


def test_one_token_has_a_kernel_of_its_own_where_warps_copy() -> None:
    assert times(A100, [1, 2], 512, 768).is_vector.tolist() == [True, False]
    assert not times(H100, 1, 512, 768).is_vector.any()


def test_boards_without_the_instruction_have_no_kernels() -> None:
    assert not has_matrix_gemm(P4, "float16")
    assert has_matrix_gemm(V100, "float16") and not has_matrix_gemm(V100, "bfloat16")
    pair = kernels_of(B200, "bfloat16", is_aligned=True)
    assert pair is not None and (pair.name, pair.feed) == ("tcgen05", "bulk")


def test_the_power_limit_slows_long_products_alone() -> None:
    free = replace(CONSTANTS, limited_share=10.0)
    long, short = (
        seconds(B200, m, 8192, 8192)[0] / seconds(B200, m, 8192, 8192, constants=free)[0] for m in (32768, 64)
    )
    assert long > 1.05
    assert short < 1.01


def test_rows_that_are_no_multiples_of_sixteen_bytes_are_loaded_in_pieces() -> None:
    assert seconds(A100, 4096, 1025, 1024)[0] > 1.4 * seconds(A100, 4096, 1032, 1024)[0]


def test_products_of_a_few_columns_and_summands_stream() -> None:
    rows = float(1 << 24)
    streamed = seconds(A100, rows, 8, 8)[0]
    assert streamed < 1.5 * 2 * rows * 8 * 2 / A100.dram.bandwidth_bytes_per_second
    assert seconds(A100, 8, 8, rows)[0] < 4 * streamed


def test_what_lies_past_a_remainder_of_k_is_not_multiplied() -> None:
    shallow, whole = (times(A100, 32768, 4096, k).stages["compute"][0] for k in (32, 64))
    assert shallow < 0.95 * whole


@pytest.mark.skipif(not DATA.exists(), reason="the measured products are not here")
@pytest.mark.parametrize(
    ("name", "device", "all_of_them", "long_ones"),
    [("a100_sxm", A100, 0.085, 0.08), ("h100_sxm", H100, 0.062, 0.064), ("l40s", L40S, 0.122, 0.106),
     ("b200_sxm", B200, 0.085, 0.08)],
)  # fmt: skip
def test_measured_products_are_met(name: str, device: hal.DeviceSpec, all_of_them: float, long_ones: float) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(DATA, filters=[("board", "=", name)])
    m, n, k, milliseconds = (table[column].to_numpy().astype(float) for column in ("m", "n", "k", "latency_ms"))
    error = np.abs(1e3 * seconds(device, m, n, k, dtype="bfloat16") / milliseconds - 1)
    assert error.mean() < all_of_them
    assert error[milliseconds >= 0.02].mean() < long_ones
