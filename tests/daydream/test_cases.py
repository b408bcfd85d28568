"""Traces that were once answered wrongly, made anew: who waits for whom, what a collective is, how long a step is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daydream.answers import predict
from daydream.graph.graph import Dependency, TaskKind
from daydream.passes.basis.communication import all_reduces, collective_kind
from daydream.report.analysis import compared
from daydream.report.breakdown import Resource
from daydream.trace.collectives import is_collective_name
from daydream.whatif import parse_pass
from tests.daydream.cases import Job, answered, backlog, looped, means_ms, overlapped, replayed

FASTER = "bandwidth:factor=1000"


# Waits between streams


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(("prefix", "streams", "lag"), [("cuda", (7, 20), 1.0), ("hip", (0, 4), 14.0)])
def test_streams_wait_for_each_other_with_and_without_records(
    records: bool, prefix: str, streams: tuple[int, int], lag: float, tmp_path: Path
) -> None:
    job = Job(records=records, prefix=prefix, streams=streams, lag_us=lag)
    prediction = answered(job.trace, tmp_path, FASTER)
    before, after = means_ms(prediction)
    # 8 products of 0.5 ms, 4 ms of exchange, two updates of 0.1 ms.
    assert before == pytest.approx(8.24, abs=0.05)
    assert after == pytest.approx(before - 4.0, abs=0.02)
    assert prediction.before.analysis().critical_us[Resource.COMMUNICATION] == pytest.approx(4000, rel=0.01)
    said = [warning for warning in prediction.before.graph.warnings if "inferred" in warning]
    assert [warning.partition(" ")[0] for warning in said] == ([] if records else ["6"])


def test_inferred_waits_are_those_that_records_say(tmp_path: Path) -> None:
    def waits(records: bool) -> set[tuple[str, str, int]]:
        graph = replayed(Job(records=records).trace, tmp_path).graph
        between = (graph.edge_kind == Dependency.SYNC) & graph.on_gpu[graph.edge_target]
        pairs = zip(graph.edge_source[between].tolist(), graph.edge_target[between].tolist(), strict=True)
        return {(graph.text(a), graph.text(b), int(graph.step[b])) for a, b in pairs}

    assert waits(records=False) == waits(records=True)


@pytest.mark.parametrize("sizes", [{}, {"exchange_us": 300.0}, {"exchange_us": 2000.0}, {"buckets": 8, "kernels": 3}])
@pytest.mark.parametrize("text", [FASTER, "bandwidth:factor=0.3", "gpu-scale:factor=4"])
def test_overlapped_buckets_need_no_records(text: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    known, inferred = (
        means_ms(answered(overlapped(records=records, **sizes), tmp_path, text)) for records in (True, False)
    )
    assert inferred == pytest.approx(known, rel=1e-6)


def test_a_collective_that_runs_during_kernels_holds_none_of_them(tmp_path: Path) -> None:
    job = Job(records=False)
    # A kernel starts while the exchange is under way: it can't have waited for it.
    job.trace.launch(150.0, 2.0, correlation=9001, name="cudaStreamWaitEvent", thread=300)
    job.trace.operator("aten::add", 160.0, 10.0, thread=300)
    job.trace.launch(162.0, 5.0, correlation=9000, thread=300)
    job.trace.kernel("other", 4500.0, 50.0, correlation=9000, stream=30)
    graph = replayed(job.trace, tmp_path).graph
    (other,) = graph.select(name="other")
    sources = graph.edge_source[(graph.edge_target == other) & (graph.edge_kind == Dependency.SYNC)]
    assert not (graph.kind[sources] == TaskKind.COMMUNICATION).any()


# Collectives

NAMES = [
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "ncclSymkDevKernel_AllReduce_LDMC_sum_bf16",
    "mscclKernel_Sum_half_Simple_0",
    "void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*)",
    "void aiter::cross_device_reduce_2stage<hip_bfloat16, 8>(aiter::RankData*)",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16>(float**)",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)",
    "void deep_ep::internode_ll::combine<true, 4, 7168>(void*)",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8>(AllReduceParams)",
]
OTHERS = [
    "void softmax_block<BlockAllReduce<float>>(float*)",
    "triton_poi_fused_all_reduce_wait_tensor_0",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float>>(ReduceOp<float>)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV",
]


def test_collectives_are_known_by_name() -> None:
    assert [is_collective_name(name) for name in NAMES] == [True] * len(NAMES)
    assert [is_collective_name(name) for name in OTHERS] == [False] * len(OTHERS)


GENERIC = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
RECORDED = {"Collective name": "allreduce", "In msg nelems": 11_689_512, "dtype": "Float", "Group size": 8}


def test_the_profiler_says_what_a_generic_kernel_does(tmp_path: Path) -> None:
    graph = replayed(Job(collective=GENERIC, arguments=RECORDED).trace, tmp_path).graph
    assert [collective_kind(graph, row) for row in all_reduces(graph).tolist()] == ["allreduce"] * 3
    # A kernel of any name counts where the profiler says what it does.
    graph = replayed(Job(collective="kernel_17", arguments=RECORDED).trace, tmp_path).graph
    assert len(all_reduces(graph)) == 3


@pytest.mark.parametrize(
    "request_text",
    ["dgc:workers=8,elementwise-gb-s=1000", "blueconnect:factors=4x2,bandwidths=100x10"],
)
def test_passes_replace_a_generic_all_reduce(request_text: str, tmp_path: Path) -> None:
    prediction = answered(Job(collective=GENERIC, arguments=RECORDED).trace, tmp_path, request_text)
    assert "3 all-reduces" in prediction.applied[0].notes[0]
    before, after = means_ms(prediction)
    assert after < before


def test_ddp_adds_no_second_exchange(tmp_path: Path) -> None:
    prediction = answered(Job(collective=GENERIC, arguments=RECORDED).trace, tmp_path, "ddp:gradient-mb=46.8,workers=8")
    assert "already holds 3 all-reduces" in prediction.applied[0].notes[0]
    assert len(all_reduces(prediction.after.graph)) == 3


def test_symmetric_memory_communicates(tmp_path: Path) -> None:
    name = "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)"
    before, after = means_ms(answered(Job(collective=name).trace, tmp_path, FASTER))
    assert before - after == pytest.approx(4.0, abs=0.02)


# Steps


def test_the_cpu_sets_the_pace_where_the_board_drains_a_backlog(tmp_path: Path) -> None:
    before = replayed(backlog(), tmp_path)
    assert before.timeline.sustained_us == pytest.approx(12_000, rel=0.002)
    faster = predict(before, [parse_pass("gpu-scale:factor=10")])
    assert faster.after.timeline.sustained_us == pytest.approx(12_000, rel=0.002)
    graphs = predict(before, [parse_pass("cuda-graphs")])
    assert graphs.after.timeline.sustained_us == pytest.approx(9_030, rel=0.01)
    steps = compared(before.analysis(), graphs.after.analysis())
    assert steps.paced
    assert steps.before_us / steps.after_us == pytest.approx(np.full(3, 12 / 9.03), rel=0.01)


def test_marks_are_compared_where_no_backlog_hides_them(tmp_path: Path) -> None:
    prediction = answered(looped(), tmp_path, "gpu-scale:factor=2")
    steps = compared(prediction.before.analysis(), prediction.after.analysis())
    assert not steps.paced
    assert steps.means_us == pytest.approx((prediction.before.analysis().mean_us, prediction.after.analysis().mean_us))


@pytest.mark.parametrize(
    ("optional", "words"),
    [
        ({"update": "Optimizer.step#SGD.step"}, "Optimizer.step"),
        ({"batch": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"}, "the batches of the DataLoader"),
        ({"update": "my update"}, "a run of 10 kernels that repeats"),
    ],
)
def test_steps_without_marks_are_recognised_by_what_repeats(
    optional: dict[str, str], words: str, tmp_path: Path
) -> None:
    answer = replayed(looped(6, marks=False, **optional), tmp_path)
    assert len(answer.graph.steps) == 6
    assert answer.timeline.step_us / 1e3 == pytest.approx(np.full(6, 4.05), abs=0.04)
    measured = [step.measured_us for step in answer.graph.steps]
    assert answer.timeline.step_us.tolist() == pytest.approx(measured, abs=0.01)
    assert [f"6 steps are counted by {words}" in warning for warning in answer.graph.warnings] == [True]
    whole = replayed(looped(6, marks=False, **optional), tmp_path, steps_by="none")
    assert len(whole.graph.steps) == 1 and not whole.graph.warnings


def test_equal_kernels_alone_are_no_steps(tmp_path: Path) -> None:
    assert len(replayed(looped(6, marks=False), tmp_path).graph.steps) == 1
    asked = replayed(looped(6, marks=False), tmp_path, steps_by="loader")
    assert asked.graph.warnings == ("--steps-by loader: the trace has no two such steps and is read as one",)


def test_layers_are_no_steps(tmp_path: Path) -> None:
    trace = looped(24, 5, 50.0, marks=False, update="layer")
    last = [event for event in trace.events if event["cat"] == "kernel"][-3:]
    for place, event in enumerate(last):
        event["name"] = f"head_{place}"
    assert len(replayed(trace, tmp_path).graph.steps) == 1
    assert len(replayed(trace, tmp_path, steps_by="kernels").graph.steps) == 23


def test_a_fused_update_is_one_a_step(tmp_path: Path) -> None:
    prediction = answered(looped(6, marks=False, update="Optimizer.step#SGD.step"), tmp_path, "fused-optimizer")
    assert "in 6 steps became 6" in prediction.applied[0].notes[0]


@pytest.mark.parametrize("duration", [None, math.nan, -5.0])
def test_a_step_without_a_duration_ends_with_its_last_child(duration: float | None, tmp_path: Path) -> None:
    trace = looped(3)
    marks = [event for event in trace.events if event["name"].startswith("ProfilerStep#")]
    lengths = [mark["dur"] for mark in marks]
    for mark in marks[:2]:
        if duration is None:
            del mark["dur"]
        else:
            mark["dur"] = duration
    answer = replayed(trace, tmp_path)
    # The wait for the board ends 5 µs before the mark did.
    assert answer.timeline.step_us.tolist() == pytest.approx([lengths[0] - 5, lengths[1] - 5, lengths[2]], abs=0.1)
    assert any("ends where the last event in it does" in warning for warning in answer.graph.warnings)


def test_frames_of_python_do_not_lengthen_a_trace(tmp_path: Path) -> None:
    trace = looped(3, marks=False).python("threading.py(323): wait", -50.0, 600_000.0, thread=2)
    answer = replayed(trace, tmp_path)
    (step,) = answer.graph.steps
    assert step.measured_us == pytest.approx(12_100, rel=0.01)
    assert answer.timeline.step_us[0] == pytest.approx(step.measured_us, abs=0.01)


# Kernels


def test_a_kernel_ends_where_the_next_of_its_stream_starts(tmp_path: Path) -> None:
    trace = looped(3)
    fifth = [event for event in trace.events if event["cat"] == "kernel"][4::10]
    for event in fifth[:2]:
        event["dur"] = 9_000.0
    prediction = answered(trace, tmp_path, "gpu-scale:factor=2")
    before, after = means_ms(prediction)
    assert before / after == pytest.approx(1.96, abs=0.03)
    graph = prediction.before.graph
    assert graph.duration_us[graph.on_gpu].sum() / 3 == pytest.approx(4_000, rel=0.002)
    assert any("2 GPU tasks reach over the start of the next" in warning for warning in graph.warnings)


def test_a_kernel_ends_before_the_wait_for_its_board_returns(tmp_path: Path) -> None:
    trace = looped(3)
    last = [event for event in trace.events if event["cat"] == "kernel"][9::10]
    for event in last:
        event["dur"] = 9_000.0
    before, after = means_ms(answered(trace, tmp_path, "gpu-scale:factor=2"))
    assert before / after == pytest.approx(1.96, abs=0.03)


def test_tasks_of_a_cuda_graph_may_overlap(tmp_path: Path) -> None:
    from tests.daydream.traces import Builder

    trace = Builder().launch(0, 5, correlation=1, name="cudaGraphLaunch")
    trace.kernel("a", 10, 50, correlation=1).kernel("b", 20, 50, correlation=1)
    graph = replayed(trace, tmp_path).graph
    assert graph.duration_us[graph.on_gpu].tolist() == [50, 50]
    assert not graph.warnings


def test_kernels_without_time_are_left_out_and_said(tmp_path: Path) -> None:
    trace = looped(3)
    for event in [event for event in trace.events if event["cat"] == "kernel"][15:]:
        event["ts"], event["dur"] = 0, 0
    answer = replayed(trace, tmp_path)
    (warning,) = [text for text in answer.graph.warnings if "without time" in text]
    assert warning.startswith("15 events on the GPU without time")
    assert answer.graph.on_gpu.sum() == 15
    assert answer.timeline.step_us / 1e3 == pytest.approx(np.full(3, 4.03), abs=0.05)


@pytest.mark.parametrize("kernels", [1, 2])
def test_external_ids_join_calls_and_kernels(kernels: int, tmp_path: Path) -> None:
    trace = looped(3, 10)
    on_stream = [event for event in trace.events if event["cat"] == "kernel"]
    calls = [event for event in trace.events if event["name"] == "cudaLaunchKernel" and event["ph"] == "X"]
    for place, (call, kernel) in enumerate(zip(calls, on_stream, strict=True)):
        del call["args"]["correlation"], kernel["args"]["correlation"]
        call["args"]["External id"] = kernel["args"]["External id"] = 100 + place // kernels
    trace.events = [event for event in trace.events if event["ph"] == "X"]
    prediction = answered(trace, tmp_path, "scale:factor=0.01")
    graph = prediction.before.graph
    assert (graph.launch[graph.on_gpu] >= 0).all()
    before, after = means_ms(prediction)
    assert before / after > 15


def test_kernels_without_launches_are_said(tmp_path: Path) -> None:
    trace = looped(3)
    for event in trace.events:
        event["args"] = {k: v for k, v in event.get("args", {}).items() if k not in ("correlation", "External id")}
    trace.events = [event for event in trace.events if event["ph"] == "X"]
    graph = replayed(trace, tmp_path).graph
    assert any("30 of 30 GPU tasks have no launch" in warning for warning in graph.warnings)


def test_a_queue_holds_back_the_launches_of_its_own_stream_alone(tmp_path: Path) -> None:
    # A collective that waits long for its partners stays in its stream's queue; other streams go on.
    from tests.daydream.traces import Builder

    trace = Builder()
    trace.launch(0, 5, correlation=1).kernel("ncclDevKernel_AllReduce_Sum_f32", 30_000, 10, correlation=1, stream=20)
    for place in range(1200):
        begin = 10.0 + 10.0 * place
        trace.launch(begin, 5, correlation=place + 2).kernel("k", begin + 10, 8, correlation=place + 2)
    answer = replayed(trace, tmp_path)
    assert answer.timeline.step_us[0] == pytest.approx(30_010, abs=1)
    launches = answer.graph.select(name="cudaLaunchKernel", gpu=False)
    recorded = answer.graph.recorded_us[launches]
    assert answer.timeline.start_us[launches].tolist() == pytest.approx(recorded.tolist(), abs=0.01)
