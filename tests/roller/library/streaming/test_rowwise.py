"""Softmax and layer norm calls: kernels, second reads and floors."""

from collections.abc import Callable

import numpy as np
import pytest

from hal.catalog import load_device
from roller.library.streaming import passes
from roller.library.streaming.elementwise import LibraryTime
from roller.library.streaming.rowwise import layer_norm_seconds, softmax_block_threads, softmax_seconds

BOARDS = ["v100-pcie-16gb", "p100-pcie-16gb", "p4", "t4", "a100-pcie-40gb", "h100-sxm-80gb", "l4"]


def test_row_length_selects_the_softmax_kernel() -> None:
    times = softmax_seconds(4096, [16, 1024, 1025, 4096], load_device("v100-pcie-16gb"))
    assert list(times.algorithm) == ["softmax_warp_forward"] * 2 + ["cunn_SoftMaxForward"] * 2


def test_softmax_block_sizes_are_pytorchs() -> None:
    columns = [1025, 1031, 1032, 2053, 2056, 4094, 8192, 100_000]
    assert list(softmax_block_threads(columns)) == [128, 128, 256, 256, 512, 512, 1024, 1024]


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("seconds", [softmax_seconds, layer_norm_seconds])
def test_floor_and_bandwidth(board: str, seconds: Callable[..., LibraryTime]) -> None:
    device = load_device(board)
    tiny = seconds(4, 512, device)
    assert tiny.bound == "host"
    assert 0.9 < tiny.call_seconds / device.framework_calls.call_seconds < 1.7
    large = seconds(200_000, 1024, device)
    moved = 8 * 200_000 * 1024
    outlasting = device.l2.capacity_bytes if device.l2 else 0
    rate = device.dram.bandwidth_bytes_per_second
    assert (moved - outlasting) / rate <= large.kernel_seconds < 2.5 * moved / rate


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("seconds", [softmax_seconds, layer_norm_seconds])
def test_more_rows_and_the_way_back_take_longer(board: str, seconds: Callable[..., LibraryTime]) -> None:
    device = load_device(board)
    rows = np.logspace(0, 6, 100)
    for columns in (64, 700, 1500, 4096):
        forward = seconds(rows, columns, device)
        backward = seconds(rows, columns, device, direction="backward")
        assert (np.diff(forward.kernel_seconds) >= 0).all()
        # With hardly any rows both are the latency of their kernels.
        assert (backward.kernel_seconds >= forward.kernel_seconds).all()
        assert backward.kernel_seconds[-1] > 1.1 * forward.kernel_seconds[-1]


def test_long_rows_are_read_again_from_dram_only_where_no_cache_holds_them() -> None:
    pascal, volta = load_device("p100-pcie-16gb"), load_device("v100-pcie-16gb")
    long_row, short_row = (layer_norm_seconds(100_000, columns, volta) for columns in (4096, 512))
    once = 8 * 100_000 / volta.dram.bandwidth_bytes_per_second
    assert short_row.stages["dram"] == pytest.approx(512 * once)
    assert long_row.stages["dram"] == pytest.approx(1.5 * 4096 * once)
    # Volta keeps the rows of its softmax blocks in L1, which Pascal does not use for loads.
    times = [softmax_seconds(100_000, 4000, device).stages["dram"] for device in (volta, pascal)]
    ideal = [8 * 4e8 / device.dram.bandwidth_bytes_per_second for device in (volta, pascal)]
    assert times[0] == pytest.approx(ideal[0]) and times[1] > 1.1 * ideal[1]


def test_unaligned_layer_norm_takes_two_kernels_and_more_time() -> None:
    times = layer_norm_seconds(50_000, [1000, 1001], load_device("t4"))
    assert list(times.kernels) == [1, 2]
    assert times.kernel_seconds[1] > times.kernel_seconds[0]
    assert times.algorithm[0] == "vectorized_layer_norm_kernel"


def test_short_layer_norm_rows_are_bound_by_instructions() -> None:
    assert layer_norm_seconds(100_000, 256, load_device("p100-pcie-16gb")).bound == "arithmetic"


def test_few_columns_are_summed_by_few_blocks_unless_rows_are_sliced() -> None:
    few, many, sliced = (
        layer_norm_seconds(rows, columns, load_device("h200"), "backward", 2, rms=True).kernel_seconds.item()
        for rows, columns in ((65_536, 128), (65_536 // 128, 128 * 128), (65_537, 128))
    )
    assert few > 2 * many
    assert few > 2 * sliced


def test_second_reads_miss_earlier_in_turings_smaller_l1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "RESIDENT_FULL", 0.01)
    monkeypatch.setattr(passes, "RESIDENT_NONE", 0.02)  # nothing hits in L2
    # Eight rows of 6 KiB on a unit of T4 fill 48 of 32 KiB, sixteen on V100 98,304 of 98,304 bytes.
    size, row_bytes = np.array([1e9]), np.array([6144.0])
    missed = {}
    for name, resident in (("t4", 8.0), ("v100-pcie-16gb", 16.0)):
        device = load_device(name)
        once = passes.passes_seconds(device, size, 0 * size, np.array([resident]), row_bytes)["dram"]
        twice = passes.passes_seconds(device, size, size, np.array([resident]), row_bytes)["dram"]
        missed[name] = (twice / once).item() - 1
    assert missed == {"t4": pytest.approx(0.7), "v100-pcie-16gb": pytest.approx(0.2)}
