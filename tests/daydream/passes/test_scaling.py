"""Scale, remove, a faster network and a faster GPU."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes.scaling import bandwidth, gpu_scale, remove, scale
from hal.support.errors import InputError
from tests.daydream.graphs import CHANNEL, MAIN, STREAM2, graph, launched, pairs, task


def network():
    """Launch 0-1, kernel 1-11, all-reduce on the channel 11-31; NCCL kernel and host copy on stream 20."""
    tasks = [
        *launched("volta_sgemm", 10, layer="fc", phase=Phase.FORWARD),
        *launched("ncclKernel_AllReduce_RING_LL_Sum_float", 8, stream=STREAM2, kind=TaskKind.COMMUNICATION),
        *launched("Memcpy HtoD (Pinned -> Device)", 6, stream=STREAM2, kind=TaskKind.MEMCPY),
        task("all-reduce", CHANNEL, 20),
    ]
    return graph(tasks, [*pairs(3), (1, 6, Dependency.COMMUNICATION)])


def test_twice_the_bandwidth_halves_channels_and_nccl_kernels():
    before, after = network(), bandwidth(network()).graph
    # Channel 11 + 20 before, 11 + 10 after; the copy keeps its 6 µs.
    assert simulate(before).makespan_us == 31
    assert simulate(after).makespan_us == 21
    assert after.duration_us.tolist() == [1, 10, 1, 4, 1, 6, 10]


def test_bandwidth_of_copies_or_of_chosen_names():
    assert bandwidth(network(), kind="memcpy", factor=3.0).graph.duration_us.tolist() == [1, 10, 1, 8, 1, 2, 20]
    assert bandwidth(network(), kind="all", match="^nccl", factor=4.0).graph.duration_us[3] == 2
    assert bandwidth(network(), kind="all", match="^nccl", factor=4.0).graph.duration_us[6] == 20


def test_the_bus_does_not_carry_copies_within_the_device():
    assert bandwidth(compute(), kind="memcpy", factor=5.0).graph.duration_us[1::2].tolist() == [12, 6, 1, 4]


def compute():
    tasks = [
        *launched("volta_sgemm_128x64_nn", 12, layer="fc", phase=Phase.FORWARD),
        *launched("vectorized_elementwise_kernel", 6, layer="relu", phase=Phase.BACKWARD),
        *launched("Memcpy DtoH (Device -> Pinned)", 5, kind=TaskKind.MEMCPY),
        *launched("Memcpy DtoD (Device -> Device)", 4, kind=TaskKind.MEMCPY),
    ]
    return graph(tasks, pairs(4))


def test_a_gpu_with_more_arithmetic_than_bandwidth():
    outcome = gpu_scale(compute(), factor=2.0, compute_factor=2.0)
    # The GEMM runs 4 times as fast, what is bound by memory twice; the copy to the host keeps its time.
    assert outcome.graph.duration_us[1::2].tolist() == [3, 3, 5, 2]
    assert outcome.notes[0] == "1 compute-bound kernels run 4 times as fast, 2 others 2 times"
    assert outcome.notes[1] == "GPU time of these tasks: 0.022 ms before, 0.008 ms after"


def test_a_gpu_is_scaled_where_the_choice_says():
    assert gpu_scale(compute(), factor=2.0, phase="backward").graph.duration_us[1::2].tolist() == [12, 3, 5, 4]
    assert gpu_scale(compute(), memory_factor=3.0, layer="^relu$").graph.duration_us[1::2].tolist() == [12, 2, 5, 4]


def test_scaling_a_cpu_task_takes_the_gap_along():
    tasks = [task("aten::relu", MAIN, 4, gap_us=2), *launched("k", 10)]
    some = graph(tasks, [(1, 2, Dependency.LAUNCH)])
    # 4 + 2 + 1 + 10 before; host time halved: 2 + 1 + 0.5 + 10.
    assert simulate(some).makespan_us == 17
    assert simulate(scale(some, factor=0.5, on="cpu").graph).makespan_us == 13.5
    assert simulate(scale(some, factor=0.5).graph).makespan_us == 12
    assert simulate(scale(some, factor=0.5, on="all").graph).makespan_us == 8.5
    assert simulate(scale(some, factor=0.0, match="relu", on="all").graph).makespan_us == 11


def test_removing_takes_the_launch_unless_said_otherwise():
    outcome = remove(compute(), match="elementwise")
    assert len(outcome.graph) == 6
    assert outcome.notes == ("1 tasks of 0.006 ms removed, 1 of their launches",)
    assert len(remove(compute(), layer="fc", launches=False).graph) == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: bandwidth(g, factor=0.0), "factor: 0 is out of range; give a number above 0"),
        (lambda g: bandwidth(g, kind="disk"), "kind: 'disk' is unknown; give communication, memcpy or all"),
        (lambda g: bandwidth(g, match="("), "match: '(' is no regular expression"),
        (lambda g: gpu_scale(g, compute_factor=-1.0), "compute-factor: -1 is out of range"),
        (lambda g: gpu_scale(g, phase="warmup"), "phase: 'warmup' is unknown; give all, forward, backward or update"),
        (lambda g: scale(g, factor=float("nan")), "factor: nan is out of range; give a number, 0 or more"),
        (lambda g: scale(g, factor=1.0, on="tpu"), "on: 'tpu' is unknown"),
        (lambda g: scale(g, factor=1.0, layer="["), "layer: '[' is no regular expression"),
        (lambda g: remove(g), "match: would remove every task; give match, layer or phase"),
    ],
)
def test_bad_parameters_are_named(call, message):
    with pytest.raises(InputError) as caught:
        call(compute())
    assert str(caught.value).startswith(message)
