"""Element-wise library calls: floors, bandwidth, arithmetic and traffic of the backward pass."""

import numpy as np
import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library.cache import flushed_cache
from roller.library.streaming.elementwise import OPERATORS, elementwise_seconds, reuse

BOARDS = ["v100-pcie-16gb", "p100-pcie-16gb", "p4", "t4", "a100-pcie-40gb", "h100-sxm-80gb", "l4"]


@pytest.mark.parametrize("board", BOARDS)
def test_tiny_call_takes_the_hosts_time_and_a_large_one_the_drams(board: str) -> None:
    device = load_device(board)
    tiny = elementwise_seconds("add", 1000, device)
    large = elementwise_seconds("add", 1e9, device)
    assert tiny.call_seconds == pytest.approx(0.9 * device.framework_calls.call_seconds)
    assert tiny.bound == "host"
    assert 12e9 / large.call_seconds == pytest.approx(device.dram.bandwidth_bytes_per_second, rel=0.01)
    assert large.bound == "dram"


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_more_elements_never_take_less(board: str, operator: str) -> None:
    elements = np.logspace(2, 9, 300)
    for direction in ("forward", "backward"):
        times = elementwise_seconds(operator, elements, load_device(board), direction=direction)
        assert (np.diff(times.call_seconds) >= -1e-12).all()
        assert (np.diff(times.kernel_seconds) >= -1e-12).all()


def test_tensors_that_fit_l2_are_read_from_it() -> None:
    device = load_device("a100-pcie-40gb")
    small = elementwise_seconds("mul", 8e5, device)
    assert small.stages["dram"] == 0 and small.stages["l2"] > 0
    assert elementwise_seconds("mul", 8e6, device).stages["l2"] == 0
    assert np.all(np.diff(reuse(device, np.linspace(0, 1e8, 50))) <= 0)


def test_power_is_bound_by_arithmetic_where_memory_is_fast() -> None:
    device = load_device("p100-pcie-16gb")
    assert elementwise_seconds("powu", 1e8, device).bound == "arithmetic"
    assert elementwise_seconds("mulu", 1e8, device).bound == "dram"


def test_operators_and_sizes_broadcast() -> None:
    device = load_device("t4")
    times = elementwise_seconds(np.array([["add"], ["tanh"]]), np.array([1e3, 1e7, 1e8]), device)
    assert times.call_seconds.shape == (2, 3) == times.bound.shape == times.stages["dram"].shape
    alone = elementwise_seconds("tanh", 1e8, device)
    assert times.call_seconds[1, 2] == alone.call_seconds


def test_inputs_and_element_size_set_the_traffic() -> None:
    device = load_device("v100-pcie-16gb")
    one, two = (elementwise_seconds("mul", 1e9, device, inputs=count).kernel_seconds for count in (1, 2))
    half = elementwise_seconds("mul", 1e9, device, dtype_bytes=2).kernel_seconds
    assert two / one == pytest.approx(1.5, rel=1e-3)
    assert two / half == pytest.approx(2.0, rel=1e-3)


def test_backward_moves_what_the_gradient_needs() -> None:
    device = load_device("v100-pcie-16gb")
    forward = elementwise_seconds("relu", 1e9, device).kernel_seconds
    relu = elementwise_seconds("relu", 1e9, device, direction="backward")
    product = elementwise_seconds("mul", 1e9, device, direction="backward")
    passed_on = elementwise_seconds("add", 1e9, device, direction="backward")
    assert relu.kernel_seconds / forward == pytest.approx(1.5, rel=1e-3)
    assert product.kernels == 2 and product.kernel_seconds > relu.kernel_seconds
    assert passed_on.kernels == 0 and passed_on.call_seconds == 0 and passed_on.algorithm == "none"


def test_unknown_operator_is_named() -> None:
    with pytest.raises(InputError, match="softplus"):
        elementwise_seconds(["add", "softplus"], 10, load_device("t4"))


def test_half_of_l2_outlasts_a_stream_from_ada_on_unless_it_is_flushed() -> None:
    h100, a100 = load_device("h100-sxm-80gb"), load_device("a100-sxm-80gb")
    assert h100.l2 is not None and a100.l2 is not None
    assert reuse(h100, 4 * h100.l2.capacity_bytes) == pytest.approx(0.125)
    assert reuse(a100, 4 * a100.l2.capacity_bytes) == 0
    with flushed_cache():
        assert reuse(h100, 1.0) == 0


def test_a_threads_elements_take_their_turns_until_blocks_hide_them() -> None:
    h100 = load_device("h100-sxm-80gb")
    times = elementwise_seconds(["sigmoid", "copy"], 512, h100, inputs=1, dtype_bytes=2)
    assert times.kernel_seconds[0] - times.kernel_seconds[1] > 0.4e-6
    large = elementwise_seconds(["sigmoid", "copy"], 2**30, h100, inputs=1, dtype_bytes=2).kernel_seconds
    assert large[0] == pytest.approx(large[1], rel=0.01)
