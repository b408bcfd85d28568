"""From synthetic traces to graphs: every kind of dependency, and waiting told from work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind
from daydream.graph.simulate import simulate
from daydream.tasks.build import read_graph
from tests.daydream.recorded import TRACES, recorded_trace
from tests.daydream.traces import GENERATIONS, Builder


def built(builder: Builder, folder: Path) -> TaskGraph:
    return read_graph(builder.write(folder / "trace.json"))


def row(graph: TaskGraph, name: str) -> int:
    (found,) = [r for r in range(len(graph)) if graph.text(r) == name]
    return found


def edges(graph: TaskGraph, kind: Dependency) -> list[tuple[str, str]]:
    source, target, kinds, _ = graph.dependencies()
    chosen = kinds == kind
    return [(graph.text(a), graph.text(b)) for a, b in zip(source[chosen], target[chosen], strict=True)]


def replays(graph: TaskGraph, within_us: float = 1e-3) -> bool:
    """Whether every recorded start is reproduced."""
    start = simulate(graph).start_us
    known = ~np.isnan(graph.recorded_us)
    origin = graph.recorded_us[known].min()
    return bool((abs(start - graph.recorded_us + origin)[known] <= within_us).all())


def one_kernel(generation: str) -> Builder:
    trace = Builder(generation)
    trace.step(3, 0, 100).operator("aten::mm", 10, 20, external=1)
    trace.launch(15, 5, correlation=9, external=1).kernel("sgemm", 27, 30, correlation=9, external=1)
    return trace


@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_operator_launches_a_kernel_in_every_generation(generation: str, tmp_path: Path) -> None:
    graph = built(one_kernel(generation), tmp_path)
    assert edges(graph, Dependency.LAUNCH) == [("cudaLaunchKernel", "sgemm")]
    kernel, call = row(graph, "sgemm"), row(graph, "cudaLaunchKernel")
    # The operator's own 5 µs, the call, then 7 µs until the kernel starts; the rest of the step is a gap.
    assert graph.duration_us[row(graph, "aten::mm")] == pytest.approx(5)
    assert graph.edge_lag_us[graph.edge_target == kernel] == pytest.approx([7])
    assert graph.gap_us[call] == pytest.approx(80)
    assert [step.name for step in graph.steps] == ["ProfilerStep#3"]
    assert simulate(graph).step_us == pytest.approx([100])
    assert replays(graph)


def test_a_kernel_behind_another_waits_for_it_and_not_for_its_launch(tmp_path: Path) -> None:
    trace = Builder()
    trace.launch(0, 5, correlation=1).kernel("a", 10, 50, correlation=1)
    trace.launch(6, 5, correlation=2).kernel("b", 61, 5, correlation=2)
    graph = built(trace, tmp_path)
    assert replays(graph)
    faster = graph.scaled(np.array([row(graph, "a")]), 0.1)
    # a: 10 to 15; then b follows after the stream's gap of 1 µs or its launch's usual 5 µs, at 16 either way.
    assert simulate(faster).start_us[row(graph, "b")] == pytest.approx(16)


@pytest.mark.parametrize("call", ["cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"])
def test_the_length_of_a_synchronising_call_is_waiting(call: str, tmp_path: Path) -> None:
    trace = Builder()
    trace.launch(0, 5, correlation=1).kernel("a", 10, 90, correlation=1)
    trace.launch(10, 93, correlation=2, name=call).operator("aten::next", 110, 5)
    graph = built(trace, tmp_path)
    assert edges(graph, Dependency.SYNC) == [("a", f"{call} (return)")]
    assert graph.duration_us[row(graph, call)] <= 2
    assert graph.duration_us[row(graph, f"{call} (return)")] == pytest.approx(3)
    assert replays(graph)
    faster = graph.scaled(np.array([row(graph, "a")]), 0.5)
    assert simulate(faster).start_us[row(graph, "aten::next")] == pytest.approx(110 - 45)


def test_a_copy_to_the_host_holds_its_call_back(tmp_path: Path) -> None:
    trace = Builder()
    trace.launch(0, 5, correlation=1).kernel("a", 10, 90, correlation=1)
    trace.launch(10, 95, correlation=2, name="cudaMemcpyAsync")
    trace.memcpy(101, 2, bytes=4, correlation=2, name="Memcpy DtoH (Device -> Pageable)")
    trace.operator("aten::next", 110, 5)
    graph = built(trace, tmp_path)
    assert ("Memcpy DtoH (Device -> Pageable)", "cudaMemcpyAsync (return)") in edges(graph, Dependency.SYNC)
    assert replays(graph)
    faster = graph.scaled(np.array([row(graph, "a")]), 0.5)
    assert simulate(faster).start_us[row(graph, "aten::next")] == pytest.approx(110 - 45)


def test_the_main_thread_sleeps_while_autograd_works(tmp_path: Path) -> None:
    trace = Builder()
    trace.step(1, 0, 1000).operator("aten::linear", 0, 100, sequence=5)
    trace.operator(
        "autograd::engine::evaluate_function: AddmmBackward0", 150, 600, thread=200, sequence=5, forward_thread=1
    )
    trace.operator("aten::step", 800, 100)
    graph = built(trace, tmp_path)
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    handoffs = edges(graph, Dependency.HANDOFF)
    assert ("aten::linear", backward) in handoffs and (backward, "aten::step") in handoffs
    assert replays(graph)
    half = graph.scaled(np.array([row(graph, backward)]), 0.5)
    assert simulate(half).step_us == pytest.approx([700])


def test_a_thread_that_polls_holds_nobody_back(tmp_path: Path) -> None:
    trace = Builder()
    trace.operator("aten::a", 0, 300).operator("aten::b", 1000, 100)
    trace.launch(10, 2, correlation=None, name="cudaEventQuery", thread=300)
    trace.launch(1200, 2, correlation=None, name="cudaEventQuery", thread=300)
    graph = built(trace, tmp_path)
    polls = [("trace begins", "cudaEventQuery")] * 2
    assert sorted(edges(graph, Dependency.HANDOFF)) == [("trace begins", "aten::a"), *polls]
    assert replays(graph)
    assert not graph.gap_us[graph.select(name="EventQuery")].any()
    # Nor does it end anything.
    assert simulate(graph).makespan_us == pytest.approx(1100)
    assert graph.text(int(simulate(graph).critical_path[-1])) == "aten::b"


def test_a_stream_waits_for_an_event_of_another(tmp_path: Path) -> None:
    trace = Builder()
    trace.launch(0, 5, correlation=1).kernel("compute", 10, 100, correlation=1)
    trace.launch(6, 1, correlation=2, name="cudaEventRecord")
    trace.launch(8, 1, correlation=3, name="cudaStreamWaitEvent")
    trace.launch(10, 5, correlation=4).kernel("ncclKernel_AllReduce", 112, 50, correlation=4, stream=20)
    graph = built(trace, tmp_path)
    assert edges(graph, Dependency.SYNC) == [("compute", "ncclKernel_AllReduce")]
    assert graph.kind[row(graph, "ncclKernel_AllReduce")] == TaskKind.COMMUNICATION
    assert replays(graph)
    faster = graph.scaled(np.array([row(graph, "compute")]), 0.5)
    assert simulate(faster).start_us[row(graph, "ncclKernel_AllReduce")] == pytest.approx(62)


def test_one_graph_launch_starts_many_kernels_on_several_lanes(tmp_path: Path) -> None:
    trace = Builder()
    trace.launch(0, 10, correlation=1, name="cudaGraphLaunch")
    trace.kernel("root", 15, 20, correlation=1)
    trace.kernel("left", 36, 40, correlation=1).kernel("right", 36, 30, correlation=1)
    trace.kernel("join", 77, 10, correlation=1)
    graph = built(trace, tmp_path)
    assert len(edges(graph, Dependency.LAUNCH)) == 4
    assert ("root", "right") in edges(graph, Dependency.SYNC) or ("root", "left") in edges(graph, Dependency.SYNC)
    assert replays(graph)
    faster = graph.scaled(graph.select(gpu=True), 0.5)
    # root 15-25, left 26-46, join 47-52: the gaps of 1 µs stay.
    assert simulate(faster).makespan_us == pytest.approx(52)


def test_a_full_launch_queue_is_a_dependency_and_no_work(tmp_path: Path) -> None:
    trace = Builder()
    called = 0.0
    for i in range(1300):
        # Kernels start 100 µs apart; the queue takes 1022, so launch i returns when kernel i - 1022 starts.
        returned = max(called + 5, 10 + 100 * (i - 1022))
        trace.launch(called, returned - called, correlation=i + 1)
        trace.kernel("k", 10 + 100 * i, 99, correlation=i + 1)
        called = returned
    graph = built(trace, tmp_path)
    calls = graph.select(name="cudaLaunchKernel")
    assert graph.queue_depth in (1022, 1023)
    assert graph.duration_us[calls].max() < 10
    last = simulate(graph).start_us[calls[-1]]
    faster = simulate(graph.scaled(graph.select(gpu=True), 0.5)).start_us[calls[-1]]
    assert last == pytest.approx(10 + 100 * (1299 - 1022), rel=0.02)
    assert faster == pytest.approx(last - 0.495 * 100 * (1299 - 1022), rel=0.02)


def test_launches_of_an_earlier_step_and_missing_correlations(tmp_path: Path) -> None:
    trace = Builder()
    trace.step(1, 0, 100).launch(10, 5, correlation=1).kernel("late", 150, 20, correlation=1)
    trace.step(2, 100, 100).kernel("orphan", 180, 10, correlation=77).kernel("stray", 195, 3, correlation=None)
    graph = built(trace, tmp_path)
    assert graph.step[row(graph, "late")] == 0
    assert graph.launch[row(graph, "orphan")] == -1
    assert simulate(graph).step_us == pytest.approx([100, 100])
    assert replays(graph)


def test_data_loading_and_phases_and_layers(tmp_path: Path) -> None:
    trace = Builder()
    trace.step(1, 0, 1000)
    trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 95).operator(
        "aten::stack", 20, 30
    )
    trace.operator("aten::conv2d", 110, 50, sequence=7).launch(120, 5, correlation=1).kernel(
        "conv", 130, 20, correlation=1
    )
    trace.operator("aten::relu", 170, 20, sequence=8).operator("aten::conv2d", 200, 50, sequence=9)
    for name, sequence, start in (
        ("ConvolutionBackward0", 9, 300),
        ("ReluBackward0", 8, 400),
        ("ConvolutionBackward0", 7, 500),
    ):
        trace.operator(name, start, 50, thread=200, sequence=sequence, forward_thread=1)
    trace.operator("torch::autograd::AccumulateGrad", 560, 20, thread=200)
    trace.launch(565, 5, correlation=2, thread=200).kernel("wgrad", 575, 10, correlation=2)
    trace.annotation("Optimizer.step#SGD.step", 700, 100).operator("aten::add_", 710, 10)
    graph = built(trace, tmp_path)
    assert graph.kind[row(graph, "aten::stack")] == TaskKind.DATA_LOADING
    layer_of = {name: graph.layers[graph.layer[row(graph, name)]] for name in ("conv", "aten::relu", "wgrad")}
    assert layer_of == {"conv": "conv2d_0", "aten::relu": "relu_0", "wgrad": "conv2d_0"}
    assert graph.phase[row(graph, "conv")] == Phase.FORWARD
    assert graph.phase[row(graph, "wgrad")] == Phase.BACKWARD
    assert graph.phase[row(graph, "aten::add_")] == Phase.UPDATE
    assert replays(graph)


def test_modules_name_layers_where_recorded(tmp_path: Path) -> None:
    trace = Builder()
    trace.python("nn.Module: Net_0", 0, 500).python("nn.Module: layer1.0.conv1", 10, 100)
    trace.operator("aten::conv2d", 20, 50, sequence=7).launch(30, 5, correlation=1).kernel("k", 40, 5, correlation=1)
    trace.operator("ConvolutionBackward0", 600, 50, thread=200, sequence=7, forward_thread=1)
    graph = built(trace, tmp_path)
    assert graph.layers[graph.layer[row(graph, "k")]] == "layer1.0.conv1"
    assert graph.layers[graph.layer[row(graph, "ConvolutionBackward0")]] == "layer1.0.conv1"


def test_marks_stand_where_the_step_begins_and_ends(tmp_path: Path) -> None:
    trace = Builder()
    trace.operator("aten::before", 0, 10).step(1, 20, 60).operator("aten::inside", 30, 20).step(2, 80, 40)
    graph = built(trace, tmp_path)
    marks = [(graph.text(r), int(graph.step[r])) for r in np.flatnonzero(graph.mark != Mark.NONE)]
    assert marks == [("step begins", 0), ("step ends", 0), ("step begins", 1), ("step ends", 1)]
    assert simulate(graph).step_us == pytest.approx([60, 40])


def test_a_step_without_half_its_launches_is_not_full(tmp_path: Path) -> None:
    trace = Builder()
    for number, launches in enumerate((1, 4, 4)):
        trace.step(number, 100 * number, 100)
        for i in range(launches):
            at, key = 100 * number + 20 * i, 10 * number + i + 1
            trace.launch(at + 1, 5, correlation=key).kernel("k", at + 8, 5, correlation=key)
    assert [step.full for step in built(trace, tmp_path).steps] == [False, True, True]


@pytest.mark.parametrize("name", TRACES)
def test_real_traces_replay(name: str) -> None:
    graph = read_graph(recorded_trace(name))
    assert (graph.edge_lag_us >= 0).all() and (graph.duration_us >= 0).all() and (graph.gap_us >= 0).all()
    measured = np.array([step.measured_us for step in graph.steps])
    assert abs(simulate(graph).step_us / measured - 1).max() < 0.005
