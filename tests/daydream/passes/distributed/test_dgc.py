"""Deep Gradient Compression, scheduled by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.passes.basis.communication import all_reduces
from daydream.passes.distributed.dgc import elementwise_rate
from daydream.tasks.build import read_graph
from hal.support.errors import InputError
from tests.daydream.graphs import CHANNEL, STREAM, STREAM2, graph, launched, pairs, task
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import Builder

ddp = registered()["ddp"]
dgc = registered()["dgc"]

# 1 MB through memory 8 and 2 times at 100 GB/s: 80 and 20 µs.
USUAL = {"elementwise_gb_s": 100.0, "launch_us": 1.0}


def exchange() -> TaskGraph:
    """A kernel 1-11, an all-reduce of 1 MB 11-111, an update 111-116."""
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD),
        *launched("update", 5, phase=Phase.UPDATE),
        task("ncclAllReduce bucket 0", CHANNEL, 100, kind=TaskKind.COMMUNICATION, bytes=1e6),
    ]
    return graph(tasks, [*pairs(2), (1, 4, Dependency.COMMUNICATION), (4, 3, Dependency.COMMUNICATION)])


def times(made: TaskGraph) -> dict[str, tuple[float, float]]:
    timeline = simulate(made)
    rows = [row for row in range(len(made)) if not made.on_cpu[row]]
    return {made.text(row): (round(timeline.start_us[row], 6), round(timeline.end_us[row], 6)) for row in rows}


def test_gradients_are_compressed_exchanged_and_decompressed():
    made = dgc(exchange(), **USUAL).graph
    assert times(made) == {
        "b": (1, 11),
        "DGC compress": (11, 91),
        # A hundredth of the elements, each with its index: 2 % of 100 µs.
        "ncclAllReduce bucket 0": (91, 93),
        "DGC decompress": (93, 113),
        "update": (113, 118),
    }
    # Both kernels have launches, in the order of the kernels.
    calls = made.launch[made.select(name="^(b|DGC.*|update)$")]
    assert calls.tolist() == sorted(calls.tolist())
    assert len(set(calls.tolist())) == 4
    assert made.bytes[made.select(name="ncclAllReduce")].tolist() == [20_000]


def test_sparse_all_gathers_grow_with_the_workers():
    # 0.01 x 2 x 8 / 2 = 8 % of 100 µs.
    assert times(dgc(exchange(), **USUAL, workers=8).graph)["ncclAllReduce bucket 0"] == (91, 99)


def test_the_workers_are_those_of_ddp():
    tasks = [*launched("b", 10, phase=Phase.BACKWARD), *launched("update", 5, phase=Phase.UPDATE)]
    whole = ddp(graph(tasks, pairs(2)), workers=32, gradient_mb=1.0).graph
    before, after = (made.duration_us[all_reduces(made)] for made in (whole, dgc(whole, **USUAL).graph))
    # 0.01 x 2 x 32 / 2 = 32 %; who says 2 workers means a sparse all-reduce, 2 %.
    assert after.tolist() == pytest.approx((0.32 * before).tolist())
    sparse = dgc(whole, **USUAL, workers=2)
    assert sparse.graph.duration_us[all_reduces(sparse.graph)].tolist() == pytest.approx((0.02 * before).tolist())


def test_latency_is_not_compressed():
    # 10 µs stay, of the other 90 2 %.
    assert times(dgc(exchange(), **USUAL, latency_us=10.0).graph)["ncclAllReduce bucket 0"] == (91, 102.8)


def test_so_many_workers_that_nothing_is_saved():
    assert "no smaller than dense" in dgc(exchange(), **USUAL, workers=100).notes[-1]


def test_a_recorded_all_reduce_is_compressed_on_the_compute_stream():
    tasks = [
        *launched("b", 10, phase=Phase.BACKWARD),
        *launched("ncclKernel_AllReduce", 100, stream=STREAM2, kind=TaskKind.COMMUNICATION, bytes=1e6),
        *launched("update", 5, phase=Phase.UPDATE),
    ]
    edges = [*pairs(3), (1, 3, Dependency.SYNC), (3, 5, Dependency.SYNC)]
    made = dgc(graph(tasks, edges), **USUAL).graph
    found = times(made)
    assert found["ncclKernel_AllReduce"] == (91, 93)
    assert found["update"] == (113, 118)
    kernels = made.select(name="DGC")
    assert {made.threads[thread] for thread in made.thread[kernels]} == {STREAM}


def test_a_lonely_all_reduce_is_compressed_on_its_own_stream():
    tasks = [*launched("ncclKernel_AllReduce", 100, kind=TaskKind.COMMUNICATION, bytes=1e6)]
    found = times(dgc(graph(tasks, pairs(1)), **USUAL).graph)
    assert found["DGC compress"] == (1, 81)
    assert found["ncclKernel_AllReduce"] == (81, 83)
    assert found["DGC decompress"] == (83, 103)


def test_the_rate_is_that_of_large_copies_and_fills():
    copy = {"kind": TaskKind.MEMCPY, "bytes": 2.0**20}
    tasks = [
        task("Memset (Device)", STREAM, 4, kind=TaskKind.MEMSET, bytes=2.0**21),
        task("Memcpy DtoD (Device -> Device)", STREAM, 4, **copy),
        # Too small, and over the bus.
        task("Memset (Device)", STREAM, 100, kind=TaskKind.MEMSET, bytes=64.0),
        task("Memcpy HtoD (Pageable -> Device)", STREAM, 1000, **copy),
    ]
    # 2 MiB written, 1 MiB read and written, in 8 µs.
    assert elementwise_rate(graph(tasks)) == pytest.approx(4 * 2**20 / 8 / 1e3)


def test_the_grid_tells_what_an_element_wise_kernel_moves(tmp_path: Path):
    trace = Builder("2024")
    # 1024 blocks of 128 threads of 16 bytes: 2 MiB a tensor; 1, 2 and 3 of them in 10, 20 and 30 µs.
    functors = ("FillFunctor<float>", "AUnaryFunctor<float>", "CUDAFunctor_add<float>")
    for place, functor in enumerate(functors):
        name = f"void at::native::vectorized_elementwise_kernel<4, at::native::{functor} >"
        trace.launch(100 * place, 5, correlation=place + 1)
        grid, block = (1024, 1, 1), (128, 1, 1)
        start, duration = 100 * place + 20, 10 * (place + 1)
        trace.kernel(name, start, duration, correlation=place + 1, grid=grid, block=block)
    made = read_graph(trace.write(tmp_path / "trace.json"))
    assert elementwise_rate(made) == pytest.approx(2**21 / 10 / 1e3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "peak"), [("resnet50_v100_nw0", 900), ("trace_diff_control_a100", 1555)])
def test_recorded_element_wise_kernels_come_near_the_memorys_bandwidth(name: str, peak: float):
    path = recorded_trace(name)
    assert 0.5 * peak < elementwise_rate(read_graph(path)) < peak


def test_without_anything_element_wise_a_rate_is_needed():
    with pytest.raises(InputError, match=r"dgc: elementwise-gb-s: .* write the rate in GB/s"):
        dgc(exchange())


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"ratio": 0.0}, "dgc: ratio: 0"),
        ({"index_factor": -1.0}, "dgc: index-factor"),
        ({"workers": -1}, "dgc: workers: -1"),
        ({"compress_passes": -1.0}, "dgc: compress-passes"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(InputError, match=message):
        dgc(exchange(), **{**USUAL, **parameters})


def test_without_all_reduce_ddp_has_to_come_first():
    with pytest.raises(InputError, match="put the pass ddp before it"):
        dgc(graph(launched("b", 1), pairs(1)), **USUAL)
