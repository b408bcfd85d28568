"""Cost formulas worked out by hand, what must hold for all sizes, and collectives found in graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daydream.graph.graph import TaskKind
from daydream.passes.basis.communication import (
    all_gather_us,
    all_reduce_us,
    all_reduces,
    check,
    check_not_negative,
    message_bytes,
    numbers,
    pull_us,
    push_us,
    recorded_collectives,
    reduce_scatter_us,
    tensor_bytes,
    transfer_us,
)
from daydream.tasks.build import read_graph
from daydream.trace.dtypes import element_bytes
from hal.support.errors import InputError
from tests.daydream.graphs import CHANNEL, MAIN, STREAM2, graph, task
from tests.daydream.traces import Builder

COLLECTIVES = [all_reduce_us, reduce_scatter_us, all_gather_us]

sizes = st.floats(0, 1e12)
workers = st.integers(2, 1024)
bandwidths = st.floats(0.01, 1000)
latencies = st.floats(0, 1000)


def test_one_message_is_latency_and_bytes_over_bandwidth():
    # 1 MB at 10 GB/s = 10,000 bytes a microsecond: 100 µs, and 5 of latency.
    assert transfer_us(1e6, 10, 5) == pytest.approx(105)


def test_a_ring_all_reduce_moves_twice_n_minus_1_nths():
    # 4 workers: 2 x 3/4 x 1 MB / 10 GB/s = 150 µs, 6 steps of 2 µs.
    assert all_reduce_us(1e6, 4, 10, 2) == pytest.approx(162)


def test_its_halves_are_a_reduce_scatter_and_an_all_gather():
    # 3/4 x 1 MB / 10 GB/s = 75 µs, 3 steps of 2 µs.
    assert reduce_scatter_us(1e6, 4, 10, 2) == pytest.approx(81)
    assert all_gather_us(1e6, 4, 10, 2) == pytest.approx(81)


@pytest.mark.parametrize(("servers", "us"), [(1, 405), (2, 205), (4, 105), (8, 105)])
def test_few_servers_are_the_bottleneck_of_four_workers(servers: int, us: float):
    # The worker's own link needs 100 µs for 1 MB; a server's carries 4 / servers times that.
    assert push_us(1e6, 4, servers, 10, 5) == pytest.approx(us)
    assert pull_us(1e6, 4, servers, 10, 5) == pytest.approx(us)


@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(deadline=None)
@given(size=sizes, bandwidth=bandwidths, latency=latencies)
def test_one_worker_communicates_nothing(collective, size, bandwidth, latency):
    assert collective(size, 1, bandwidth, latency) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(deadline=None)
@given(size=sizes, more=st.floats(1, 1e9), workers=workers, bandwidth=bandwidths, latency=latencies)
def test_more_bytes_take_longer_and_more_bandwidth_is_faster(collective, size, more, workers, bandwidth, latency):
    time = collective(size, workers, bandwidth, latency)
    assert collective(size + more, workers, bandwidth, latency) >= time
    assert collective(size, workers, 2 * bandwidth, latency) <= time


@settings(deadline=None)
@given(size=sizes, workers=workers, bandwidth=bandwidths, latency=latencies)
def test_an_all_reduce_gets_slower_with_workers_but_never_twice_a_transfer(size, workers, bandwidth, latency):
    time = all_reduce_us(size, workers, bandwidth)
    assert time <= all_reduce_us(size, workers + 1, bandwidth) * (1 + 1e-12)
    assert time <= 2 * transfer_us(size, bandwidth)


@pytest.mark.parametrize(
    ("name", "size"),
    [("float", 4), ("c10::Half", 2), ("c10::BFloat16", 2), ("double", 8), ("torch.float16", 2), ("", 4)],
)
def test_bytes_of_an_element(name: str, size: int):
    assert element_bytes(name) == size


def test_bytes_of_an_operators_tensors():
    # 2 x 3 floats, a scalar tensor of doubles, and what are no tensors.
    arguments = {"Input Dims": [[2, 3], [], [], []], "Input type": ["float", "double", "Scalar", ""]}
    assert tensor_bytes(arguments) == [24, 8, 0, 0]
    assert tensor_bytes({}) == []


@pytest.mark.parametrize("text", ["", "8x", "a", "8x0", "8x-2", "8xinf", "nan"])
def test_malformed_numbers_are_refused(text: str):
    with pytest.raises(InputError, match=r"blueconnect: factors: .*8x4"):
        numbers("blueconnect: factors", text)


def test_numbers_joined_by_x():
    assert numbers("f", "150x12.5") == [150, 12.5]


def test_parameters_out_of_range_are_named():
    with pytest.raises(InputError, match="ddp: workers: 0 is no number of workers"):
        check("ddp", workers=0)
    with pytest.raises(InputError, match=r"ddp: bucket-mb: -1\.0 is not above 0"):
        check("ddp", workers=1, bucket_mb=-1.0)
    with pytest.raises(InputError, match="ddp: latency-us: nan is below 0"):
        check_not_negative("ddp", latency_us=float("nan"))


def test_all_reduces_are_found_on_streams_and_channels():
    tasks = [
        task("c10d::allreduce_", MAIN, 1),
        task("ncclKernel_AllReduce_RING_LL_Sum_float", STREAM2, 1, kind=TaskKind.COMMUNICATION),
        task("ncclKernel_SendRecv", STREAM2, 1, kind=TaskKind.COMMUNICATION),
        task("ncclDevKernel_AllGather_RING_LL", STREAM2, 1, kind=TaskKind.COMMUNICATION),
        task("ncclAllReduce bucket 0", CHANNEL, 1, bytes=8.0),
    ]
    some = graph(tasks)
    assert all_reduces(some).tolist() == [1, 4]
    assert recorded_collectives(some).tolist() == [1, 2, 3]
    np.testing.assert_equal(message_bytes(some, all_reduces(some)), [np.nan, 8])


def test_message_sizes_come_from_the_kernel_or_the_calls_around_its_launch(tmp_path: Path):
    trace = Builder("2024")
    trace.operator("c10d::allreduce_", 0, 40, external=1, dims=[[], []], types=["TensorList", ""])
    trace.operator("record_param_comms", 1, 38, external=2)
    trace.annotation("nccl:all_reduce", 2, 36, **{"Input Dims": [[10, 100]], "Input type": ["c10::Half"]})
    trace.launch(5, 5, correlation=9, external=2)
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_half", 20, 30, correlation=9, stream=20)
    # A newer profiler writes the size to the kernel; nothing at all says how large the third is.
    trace.launch(60, 5, correlation=10)
    more = {"In msg nelems": 500, "dtype": "Float"}
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32", 70, 30, correlation=10, stream=20, **more)
    trace.launch(110, 5, correlation=11)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32", 120, 30, correlation=11, stream=20)
    built = read_graph(trace.write(tmp_path / "trace.json"))
    np.testing.assert_equal(message_bytes(built, all_reduces(built)), [2000, 2000, np.nan])
