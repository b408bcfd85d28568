"""Convolutions of float32 whose operands are rounded to TF32: layouts, volumes, strides and groups."""

from __future__ import annotations

import numpy as np

from hal.catalog import load_device
from roller.library import library_calls
from roller.library.calls import price
from roller.library.convolutions.float32 import ConvolutionSizes, convolution_seconds

H100, V100 = load_device("h100-sxm-80gb"), load_device("v100-pcie-16gb")
SIZES = {"n": 64, "c": 64, "f": 128, "h": 128, "w": 128, "kh": 3, "kw": 3, "pad": 1}


def seconds(*, board: str = "h100", tf32: bool = True, last: bool = False, back: bool = False, **sizes: float) -> float:
    """Kernel seconds of a convolution."""
    device = V100 if board == "v100" else H100
    times = convolution_seconds(
        ConvolutionSizes(**{**SIZES, **sizes}), device, tf32=tf32, channels_last=last,
        direction="backward" if back else "forward",
    )  # fmt: skip
    return float(times.kernel_seconds)


def test_tensor_cores_round_where_there_are_some() -> None:
    assert seconds() < 0.7 * seconds(tf32=False)
    assert seconds(board="v100") == seconds(board="v100", tf32=False)


def test_images_are_transposed_but_for_windows_of_one_element() -> None:
    moved = 2 * 4 * 64 * 128 * 128 * (64 + 128) / H100.dram.bandwidth_bytes_per_second
    assert np.isclose(seconds() - seconds(last=True), moved, rtol=1e-6)
    assert seconds(kh=1, kw=1, pad=0) == seconds(kh=1, kw=1, pad=0, last=True)


def test_gradients_are_transposed_whatever_their_window() -> None:
    assert seconds(kh=1, kw=1, pad=0, back=True) > seconds(kh=1, kw=1, pad=0, back=True, last=True)


def test_strided_groups_have_gradients_without_matrix_units() -> None:
    groups = {"f": 64, "groups": 4, "back": True}
    # A quarter of the results takes longer than all of them.
    assert seconds(**groups, stride=2, c=64) > 1.5 * seconds(**groups, c=64)  # type: ignore[arg-type]


def test_volumes_of_few_channels_run_without_tensor_cores() -> None:
    volumes = {"h": 1024, "kh": 9, "out_h": 1008, "out_w": 126, "volume": 1, "n": 8}
    assert seconds(c=4, **volumes) < seconds(c=3, **volumes)
    assert seconds(c=3, **volumes) == seconds(c=3, tf32=False, **volumes)


def test_strided_gradients_write_zeros_first() -> None:
    whole = convolution_seconds(ConvolutionSizes(**SIZES), H100, tf32=True, direction="backward")
    strided = convolution_seconds(
        ConvolutionSizes(**{**SIZES, "stride": 2}), H100, tf32=True, direction="backward"
    )  # fmt: skip
    zeros = 4 * 64 * 64 * 128 * 128 / H100.dram.bandwidth_bytes_per_second
    # Gradients are transposed as those of halves are.
    outputs = 1.07 * 2 * 4 * 64 * 128 * (128 * 128 - 64 * 64) / H100.dram.bandwidth_bytes_per_second
    gained = float(strided.stages["data_transform"] - whole.stages["data_transform"])
    assert np.isclose(gained, zeros - outputs, rtol=1e-6)


def test_an_operator_says_whether_it_may_round() -> None:
    conv = {"op": "conv2d", "n": 64, "c": 64, "h": 128, "w": 128, "f": 128, "kh": 3, "kw": 3, "padding": 1}
    product = {"op": "matmul", "m": 4096, "n": 4096, "k": 4096}
    for operator in (conv, product):
        exact, rounded = (library_calls(operator | {"allow_tf32": way}) for way in (False, True))
        assert [call.dtype for call in (*exact, *rounded)] == ["float32", "tfloat32"]
        assert price(rounded, H100)[0].seconds < price(exact, H100)[0].seconds
