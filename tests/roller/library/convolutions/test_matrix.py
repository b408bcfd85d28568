"""Convolutions of halves: layouts, gradients, groups and depthwise kernels."""

from __future__ import annotations

import numpy as np
import pytest

from hal.catalog import load_device
from roller.library.convolutions.float32 import ConvolutionSizes, convolution_seconds
from roller.library.convolutions.matrix import Gradient, matrix_convolution
from roller.library.products.matrix_gemm import matrix_gemm

DEVICE = load_device("rtx-3090")
GRADIENTS: tuple[Gradient, ...] = ("forward", "data", "weights")


def seconds(*, gradient: Gradient = "forward", channels_last: bool = True, **sizes: float) -> float:
    """Kernel seconds of one convolution of 3x3 windows unless sizes say otherwise."""
    usual = {"n": 64, "c": 128, "f": 128, "h": 28, "w": 28, "kh": 3, "kw": 3, "pad": 1}
    each = ConvolutionSizes(**{**usual, **sizes}).broadcast()
    flat = {name: size.ravel() for name, size in each.items()}
    times = matrix_convolution(flat, DEVICE, gradient, dtype="float16", channels_last=channels_last)
    return float((times.multiply + times.transform)[0])


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_transposing_costs_and_depthwise_kernels_take_both_layouts(gradient: Gradient) -> None:
    assert seconds(gradient=gradient, channels_last=False) > seconds(gradient=gradient)
    each = ConvolutionSizes(n=8, c=64, f=64, h=14, w=14, kh=3, kw=3, pad=1, groups=64).broadcast()
    flat = {name: size.ravel() for name, size in each.items()}
    times = matrix_convolution(flat, DEVICE, gradient, dtype="float16", channels_last=False)
    assert times.names.tolist() == ["depthwise"]
    assert times.transform.tolist() == [0.0]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_no_convolution_beats_the_matrix_units_or_the_memory(gradient: Gradient) -> None:
    flops = 2 * 64 * 128 * 128 * 28 * 28 * 9
    instruction = DEVICE.best_matrix_instruction("float16")
    assert instruction is not None
    assert seconds(gradient=gradient) > flops / (1.2 * instruction.peak_flops)
    thin = seconds(gradient=gradient, c=16, f=16, h=112, w=112)
    assert thin > 2 * 64 * 16 * 112 * 112 / DEVICE.dram.bandwidth_bytes_per_second


def test_a_window_is_read_once_from_memory() -> None:
    sizes = (np.array([1.0]), np.array([64.0 * 784]), np.array([128.0]), np.array([9 * 128.0]))
    product = matrix_gemm(*sizes, DEVICE, dtype="float16").seconds[0]
    less = matrix_gemm(
        *sizes, DEVICE, dtype="float16", operand_bytes=(sizes[1] * 128 * 2, sizes[2] * sizes[3] * 2)
    ).seconds[0]  # fmt: skip
    assert less < product


def test_gathering_takes_the_larger_share_the_faster_matrix_units_are() -> None:
    sizes = {"n": 256, "c": 256, "f": 256, "h": 14, "w": 14, "kh": 3, "kw": 3, "pad": 1}
    flat = {name: size.ravel() for name, size in ConvolutionSizes(**sizes).broadcast().items()}
    lost = []
    for board in ("rtx-3090", "a100-sxm-80gb"):
        both = [
            matrix_convolution(flat, load_device(board), gradient, dtype="float16", channels_last=True).multiply[0]
            for gradient in GRADIENTS
        ]
        lost.append(both[2] / both[0])
    assert 1 < lost[0] < 0.8 * lost[1]


def test_channels_that_fill_no_vector_are_copied() -> None:
    assert seconds(c=132) > 1.1 * seconds(c=136)
    assert seconds(c=3, f=64, h=224, w=224) < seconds(c=5, f=64, h=224, w=224)


def test_gradients_of_wide_groups_in_channels_last_lack_matrix_units() -> None:
    wide = {"c": 168, "f": 168, "groups": 3, "gradient": "weights"}
    assert seconds(**wide) > 5 * seconds(**wide, channels_last=False)  # type: ignore[arg-type]
    assert seconds(c=128, f=128, groups=32, gradient="weights") < seconds(**wide)  # type: ignore[arg-type]


def test_few_groups_have_slow_gradients_in_channels_last() -> None:
    slow, eight, quick = ({"c": 32 * groups, "f": 32 * groups, "groups": groups} for groups in (7, 8, 16))
    assert seconds(**slow, gradient="weights") > 2 * seconds(**quick, gradient="weights")
    # Eight wide groups have a kernel with matrix units, eight narrow ones have none.
    assert seconds(**eight, gradient="weights") < seconds(**quick, gradient="weights")
    narrow = {"c": 8 * 16, "f": 8 * 16, "groups": 8}
    assert seconds(**narrow, gradient="weights") > seconds(**eight, gradient="weights")
    halves = {"c": 128, "f": 128, "groups": 32}
    quarters = {"c": 128, "f": 128, "groups": 64}
    assert seconds(**quarters, gradient="weights") > 2 * seconds(**halves, gradient="weights")
    assert seconds(**slow) < seconds(**quick)


def test_wide_groups_run_one_after_the_other() -> None:
    many = {"n": 1, "h": 14, "w": 14, "kh": 1, "kw": 1, "pad": 0}
    wide = seconds(**many, c=384 * 72, f=384 * 72, groups=384)
    assert wide > 384 * DEVICE.launch_overhead_seconds
    assert wide > 5 * seconds(**many, c=432 * 64, f=432 * 64, groups=432)


def test_a_block_for_every_weight_of_a_depthwise_gradient_takes_its_trips() -> None:
    single = {"n": 1, "c": 1 << 18, "f": 1 << 18, "groups": 1 << 18, "h": 7, "w": 7, "channels_last": False}
    assert seconds(**single, gradient="weights") > 3 * seconds(**single, gradient="data")  # type: ignore[arg-type]


def test_wide_windows_have_no_compiled_depthwise_kernel() -> None:
    nine = seconds(c=64, f=64, groups=64, kh=9, kw=9, pad=4)
    seven = seconds(c=64, f=64, groups=64, kh=7, kw=7, pad=3)
    assert nine / seven > 1.5 * 81 / 49


def test_library_calls_of_halves_take_the_layout() -> None:
    sizes = ConvolutionSizes(n=[32, 64], c=64, f=64, h=56, w=56, kh=3, kw=3, pad=1)
    nchw = convolution_seconds(sizes, DEVICE, dtype_bytes=2)
    nhwc = convolution_seconds(sizes, DEVICE, dtype_bytes=2, channels_last=True)
    assert (nhwc.kernel_seconds < nchw.kernel_seconds).all()
    backward = convolution_seconds(sizes, DEVICE, dtype_bytes=2, direction="backward")
    assert {"data_multiply", "weight_multiply", "data_transform"} <= set(backward.stages)
    alone = convolution_seconds(sizes, DEVICE, dtype_bytes=2, direction="backward", input_gradient=False)
    assert (alone.kernel_seconds < backward.kernel_seconds).all()


def test_no_gradient_of_depthwise_weights_is_faster_than_its_blocks_start() -> None:
    channels = 384 * 1152  # of 384 images, each with weights of its own (conditional convolutions)
    sizes = {"n": 1, "c": channels, "f": channels, "groups": channels, "h": 7, "w": 7, "kh": 5, "kw": 5, "pad": 2}
    starting = channels * 25 * DEVICE.block_launch_seconds
    assert starting < seconds(gradient="weights", channels_last=False, **sizes) < 1.1 * starting
