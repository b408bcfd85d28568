"""Scaled products: more work takes longer, narrower numbers are faster, tiles are those of the tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time, library_times
from roller.library.scaled.families import CONSTANTS
from roller.library.scaled.products import scaled_times
from roller.library.scaled.tiled import MatrixRate, Tiling, tiled_seconds
from roller.library.scaled.tiles import cutlass_tiles

H100, B200, L40S = load_device("h100"), load_device("b200"), load_device("l40s")


def layer(m: int, n: int, k: int, precision: str = "fp8-rowwise") -> dict[str, object]:
    return {"op": "scaled_matmul", "m": m, "n": n, "k": k, "precision": precision}


def product(m: int, n: int, k: int) -> dict[str, object]:
    return {"op": "matmul", "m": m, "n": n, "k": k, "dtype": "bfloat16", "transpose_b": True}


@pytest.mark.parametrize("device", [H100, B200, L40S], ids=lambda device: str(device.name))
def test_a_layer_takes_longer_than_its_product_alone(device) -> None:  # type: ignore[no-untyped-def]
    m, n, k = (np.array([value]) for value in (512.0, 4096.0, 4096.0))
    times = scaled_times("fp8-rowwise", m, n, k, device)
    assert times.quantise[0] > 2e-6
    assert times.seconds[0] == pytest.approx(times.quantise[0] + times.product.seconds[0])


def test_eight_bits_are_faster_than_sixteen_for_large_products() -> None:
    narrow, wide = library_times([layer(8192, 8192, 8192), product(8192, 8192, 8192)], H100)
    assert 0.5 * wide.seconds < narrow.seconds < 0.8 * wide.seconds


def test_four_bits_are_faster_than_eight_on_blackwell() -> None:
    four, eight = library_times([layer(8192, 8192, 8192, name) for name in ("nvfp4", "fp8-rowwise")], B200)
    assert four.seconds < 0.7 * eight.seconds


def test_a_scale_for_the_tensor_takes_a_kernel_more() -> None:
    tensor, row = library_times([layer(64, 1024, 1024, name) for name in ("fp8-tensorwise", "fp8-rowwise")], H100)
    assert (tensor.kernels, row.kernels) == (3, 2)
    assert tensor.seconds > row.seconds


def test_tokens_choose_cutlass_tiles() -> None:
    m, n = np.array([8.0, 64.0, 100.0, 4096.0]), np.full(4, 4096.0)
    tiles = cutlass_tiles("warp groups", (9, 0), m, n)
    assert list(zip(tiles.m, tiles.n, strict=True)) == [(16, 64), (64, 64), (64, 128), (128, 128)]
    # Three rows of tiles fill a cluster of two rows twice.
    assert tiles.blocks(np.full(4, 300.0), n)[3] == 4 * 32


@pytest.mark.parametrize(
    ("threads", "tile", "rate"), [(128, 128, L40S.l2.bandwidth_bytes_per_second), (256, 256, 0.875 * 725e9)]
)
def test_blocks_wait_for_what_those_before_them_wrote(threads: int, tile: int, rate: float) -> None:
    # 31 MB of arguments of all threads of large blocks do not stay in L2 while others run; 16 MB do.
    n = np.array([128.0 * L40S.unit_count, 128.0 * L40S.unit_count * 2])
    some = np.ones_like(n)
    tiling = Tiling(
        m=tile * some, n=n, k=some, tile_m=tile * some, tile_n=128 * some, depth_bytes=64 * some, blocks=n / 128,
        rows=tile * some, weight_bytes=some, activation_bytes=some, turn_bytes=some, element_bytes=1.0,
        threads=threads * some,
    )  # fmt: skip
    matrix_rate = MatrixRate.of(L40S, "float8_e4m3fn")
    assert matrix_rate is not None
    constants = CONSTANTS.families["cutlass, warps"]
    whole = tiled_seconds(tiling, L40S, matrix_rate, constants).compute
    alone = tiled_seconds(tiling, L40S, matrix_rate, replace(constants, argument_bytes=0)).compute
    between = L40S.unit_count * (threads * 864 / rate + tile * 128 * 2 / (0.875 * 725e9))
    assert whole - alone == pytest.approx([0, between], abs=1e-12)


def test_hosts_wait_in_calls_of_blocks_alone() -> None:
    short = library_time(layer(16, 1024, 1024, "fp8-block"), B200)
    assert short.call_seconds > 1.7e-4 > short.seconds
    padded = library_time(layer(17, 1024, 1024, "fp8-block"), B200)
    assert padded.call_seconds > short.call_seconds + 4e-5


def test_the_backward_pass_is_two_products() -> None:
    back = library_time(layer(512, 1024, 2048), H100, "backward")
    assert [part.label for part in back.parts] == ["gradient of the activations", "gradient of the weights"]


@pytest.mark.parametrize(("device", "precision"), [("a100", "fp8-rowwise"), ("h100", "nvfp4")])
def test_boards_without_matrix_units_for_a_precision_say_so(device: str, precision: str) -> None:
    with pytest.raises(InputError, match="has no matrix units"):
        library_time(layer(64, 64, 64, precision), load_device(device))


def test_times_grow_with_every_size() -> None:
    sizes = [(256, 1024, 1024), (4096, 1024, 1024), (4096, 8192, 1024), (4096, 8192, 8192)]
    for precision in ("fp8-rowwise", "fp8-block", "fp8-tensorwise", "int8-rowwise"):
        seconds = [each.seconds for each in library_times([layer(*size, precision) for size in sizes], L40S)]
        assert seconds == sorted(seconds)
