"""Convolution calls: which algorithms are possible, what they cost, and the two gradients."""

import numpy as np
import pytest
from numpy.typing import ArrayLike

from hal.catalog import load_device
from roller.library.convolutions.algorithms import ConvolutionProblem, gemm_rate, tiled_seconds
from roller.library.convolutions.float32 import ConvolutionSizes, convolution_seconds, forward_algorithms

BOARDS = ["v100-pcie-16gb", "p100-pcie-16gb", "p4", "t4", "a100-pcie-80gb", "h100-sxm-80gb", "l4"]


def square(*sizes: float) -> ConvolutionProblem:
    """A 3x3 convolution of stride 1 with padding: images, channels, filters, rows and columns."""
    n, c, f, h = (np.array([size], dtype=float) for size in sizes)
    window, groups = np.array([9.0]), np.array([1.0])
    return ConvolutionProblem(
        n=n, c=c, f=f, h=h, w=h, out_h=h, out_w=h, window=window, groups=groups, volume=np.zeros(1)
    )


def windows(n: ArrayLike, c: ArrayLike, f: ArrayLike, h: ArrayLike, **more: ArrayLike) -> ConvolutionSizes:
    """Square images under a 3x3 window of stride 1 with padding, unless ``more`` says otherwise."""
    return ConvolutionSizes(**{"n": n, "c": c, "f": f, "h": h, "w": h, "kh": 3, "kw": 3, "pad": 1, **more})


@pytest.mark.parametrize("board", BOARDS)
def test_winograd_is_for_windows_of_3x3_with_stride_1(board: str) -> None:
    window, stride, groups = [1, 3, 5, 7, 3, 3], [1, 2, 1, 2, 1, 1], [1, 1, 1, 1, 4, 1]
    sizes = ConvolutionSizes(
        n=32, c=256, f=256, h=28, w=28, kh=window, kw=window, stride=stride, pad=1, groups=groups
    )  # fmt: skip
    times = convolution_seconds(sizes, load_device(board))
    assert list(times.algorithm[:5]) == ["implicit_gemm"] * 5
    assert times.algorithm[5].startswith("winograd")


@pytest.mark.parametrize("board", BOARDS)
def test_winograd_beats_the_direct_peak_and_never_its_own(board: str) -> None:
    device = load_device(board)
    times = convolution_seconds(windows(64, 512, 512, 32), device)
    direct = 2 * 64 * 512 * 512 * 32 * 32 * 9 / device.best_flops("float32")
    assert direct / 4 < times.kernel_seconds < direct


@pytest.mark.parametrize("board", BOARDS)
def test_fastest_possible_algorithm_is_taken(board: str) -> None:
    device = load_device(board)
    for sizes in ((32, 64, 64, 56), (8, 16, 32, 128), (64, 1024, 1024, 7)):
        n, c, f, h = sizes
        times = convolution_seconds(windows(n, c, f, h), device)
        each = {name: item.seconds[0] for name, item in forward_algorithms(device, square(*sizes)).items()}
        del each["depthwise"]
        assert times.algorithm == min(each, key=lambda name: each[name])
        assert times.kernel_seconds == pytest.approx(min(each.values()))


def test_more_images_and_channels_take_longer() -> None:
    for board in BOARDS:
        device = load_device(board)
        images = convolution_seconds(windows([1, 8, 64, 512], 128, 128, 28), device)
        channels = convolution_seconds(windows(32, [8, 64, 512, 2048], 128, 28), device)
        assert (np.diff(images.kernel_seconds) > 0).all()
        assert (np.diff(channels.kernel_seconds) > 0).all()


def test_depthwise_convolution_is_bound_by_memory_or_by_the_places_of_its_results() -> None:
    device = load_device("v100-pcie-16gb")
    times = convolution_seconds(windows(64, 512, 512, 28, groups=512), device)
    moved = 2 * 64 * 512 * 28 * 28 * 4
    assert times.algorithm == "depthwise"
    places = 64 * 512 * 28 * 28 * 100 / (device.peak_flops("int32") / 2)
    assert times.kernel_seconds > moved / device.dram.bandwidth_bytes_per_second
    assert places < times.kernel_seconds < 2 * places


def test_backward_is_two_convolutions() -> None:
    for board in BOARDS:
        device = load_device(board)
        channels, extents, taps = [64, 256, 512], [56, 14, 7], [3, 1, 3]
        sizes = windows(32, channels, channels, extents, kh=taps, kw=taps, pad=[1, 0, 1])
        forward = convolution_seconds(sizes, device)
        backward = convolution_seconds(sizes, device, direction="backward")
        weights = convolution_seconds(sizes, device, direction="backward", input_gradient=False)
        ratio = backward.kernel_seconds / forward.kernel_seconds
        assert ((ratio > 1.4) & (ratio < 4)).all()
        assert (weights.kernel_seconds < backward.kernel_seconds).all()
        assert all("+" in name for name in backward.algorithm)


def test_tensor_cores_speed_up_half_precision() -> None:
    sizes = windows(64, 256, 256, 28, kh=1, kw=1, pad=0)
    volta, pascal = load_device("v100-pcie-16gb"), load_device("p4")
    single, half = (convolution_seconds(sizes, volta, dtype_bytes=size).kernel_seconds for size in (4, 2))
    assert half < 0.5 * single
    assert gemm_rate(pascal, 2) == gemm_rate(pascal, 4)


def test_host_time_grows_with_the_shapes_a_process_has_seen() -> None:
    device = load_device("t4")
    sizes = windows(1, 8, 8, 8)
    early, late = (convolution_seconds(sizes, device, shapes_seen=seen) for seen in (0, 5000))
    assert early.bound == late.bound == "host"
    assert early.call_seconds == pytest.approx(2.2 * device.framework_calls.call_seconds)
    assert late.call_seconds > 3 * early.call_seconds
    assert late.kernel_seconds == early.kernel_seconds


def test_blocks_come_in_waves_and_few_threads_run_slower() -> None:
    device = load_device("v100-pcie-16gb")
    rate, work = device.best_flops("float32"), 1e6
    full = tiled_seconds(device, np.array([2.0, 2.0 * device.unit_count, 2.0 * device.unit_count + 1]), work, 256, rate)
    assert full[1] == pytest.approx(2 * work * device.unit_count / rate)
    assert full[0] < full[1] < full[2]
    small = tiled_seconds(device, np.array([1.0]), work, 64, rate)
    large = tiled_seconds(device, np.array([1.0]), work, 256, rate)
    assert small > 2 * large
