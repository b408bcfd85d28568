"""CUDA graphs: one launch for a region."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes.kernels.cuda_graphs import cuda_graphs
from hal.support.errors import InputError
from tests.daydream.graphs import AUTOGRAD, MAIN, STREAM, STREAM2, graph, launched, pairs, task


def names(after, threads=(MAIN, AUTOGRAD)):
    return [after.text(row) for row in range(len(after)) if after.threads[after.thread[row]] in threads]


def test_launches_and_operators_become_one_call():
    tasks = [task("aten::zeros", MAIN, 5)]
    for _ in range(3):
        tasks += [*launched("k", 4, call_us=6), task("aten::relu", MAIN, 2, gap_us=1)]
    some = graph(tasks, [(1, 2, Dependency.LAUNCH), (4, 5, Dependency.LAUNCH), (7, 8, Dependency.LAUNCH)])
    outcome = cuda_graphs(some, launch_us=10.0, per_kernel_us=0.5)
    # Before: launches end at 11, 20, 29; the last kernel at 33, the last operator at 31.
    assert simulate(some).makespan_us == 33
    # After: 5 + 10, then 4 + 0.5 + 4 + 0.5 + 4; the operator behind the last launch stays.
    timeline = simulate(outcome.graph)
    assert names(outcome.graph) == ["aten::zeros", "cudaGraphLaunch", "aten::relu"]
    assert timeline.makespan_us == 5 + 10 + 13
    assert outcome.notes[0] == "3 GPU tasks of 1 steps are launched by 1 graph launches of 10 µs"
    # Two calls of 6 µs and two operators of 2 + 1 µs.
    assert outcome.notes[1].startswith("4 CPU tasks with 0.018 ms of host time are gone")


def test_waits_and_host_copies_split_the_region_and_stay():
    tasks = [
        *launched("a", 3),
        *launched("b", 3),
        *launched("Memcpy DtoH (Device -> Pageable)", 2, kind=TaskKind.MEMCPY),
    ]
    tasks += [task("cudaStreamSynchronize", MAIN, 1), task("cudaStreamSynchronize (return)", MAIN, 1)]
    tasks += [*launched("c", 3), *launched("d", 3)]
    launches = [(0, 1), (2, 3), (4, 5), (8, 9), (10, 11)]
    some = graph(tasks, [*[(a, b, Dependency.LAUNCH) for a, b in launches], (5, 7, Dependency.SYNC)])
    outcome = cuda_graphs(some, launch_us=2.0, per_kernel_us=0.0)
    assert names(outcome.graph) == [
        "cudaGraphLaunch",
        "cudaLaunchKernel",
        "cudaStreamSynchronize",
        "cudaStreamSynchronize (return)",
        "cudaGraphLaunch",
    ]
    # 2, kernels 2-8, copy 8-10, return 10-11, launch 11-13, kernels 13-19.
    assert simulate(outcome.graph).makespan_us == 19
    assert outcome.notes[2].endswith("split the region into 2.0 a step")


def test_the_autograd_thread_is_captured_with_the_rest():
    tasks = [*launched("forward", 5), task("aten::sum", AUTOGRAD, 4)]
    tasks += [task("cudaLaunchKernel", AUTOGRAD, 3), task("backward", STREAM2, 7), *launched("update", 2)]
    edges = [(0, 1, Dependency.LAUNCH), (3, 4, Dependency.LAUNCH), (5, 6, Dependency.LAUNCH)]
    edges += [(0, 2, Dependency.HANDOFF), (3, 5, Dependency.HANDOFF), (1, 4, Dependency.SYNC)]
    after = cuda_graphs(graph(tasks, edges), launch_us=10.0).graph
    assert names(after) == ["cudaGraphLaunch"]
    # Forward 10-15, backward on the other stream waits for it: 15-22; update 15.6-17.6 behind forward.
    timeline = simulate(after)
    assert timeline.start_us[[1, 2, 3]].tolist() == [10, 15, 15.6]
    assert timeline.makespan_us == 22


def test_a_phase_alone():
    tasks = [*launched("f1", 1, phase=Phase.FORWARD), *launched("f2", 1, phase=Phase.FORWARD)]
    tasks += [*launched("b1", 1, phase=Phase.BACKWARD), *launched("b2", 1, phase=Phase.BACKWARD)]
    after = cuda_graphs(graph(tasks, pairs(4)), phase="backward").graph
    assert names(after) == ["cudaLaunchKernel", "cudaLaunchKernel", "cudaGraphLaunch"]
    outcome = cuda_graphs(graph(tasks, pairs(4)), phase="update")
    assert outcome.notes == ("no launch belongs to the region: nothing is captured",)


def test_a_replay_waits_for_the_one_before():
    tasks = [row for step in range(3) for _ in range(2) for row in launched("k", 20, step=step)]
    some = graph(tasks, pairs(6))
    after = cuda_graphs(some, launch_us=5.0, per_kernel_us=0.0).graph
    calls = after.select(name="cudaGraphLaunch")
    # 40 µs of kernels a step: launches at 0, 5 + 40 and 5 + 40 + 5 + 40.
    assert simulate(after).start_us[calls].tolist() == [0, 45, 90]
    after = cuda_graphs(some, launch_us=5.0, per_kernel_us=0.0, replays_ahead=2).graph
    assert simulate(after).start_us[calls].tolist() == [0, 5, 45]


def test_a_replay_does_not_wait_for_what_its_own_kernels_precede():
    # A damaged trace: the second kernel of step 0 stands on the stream behind the first one of step 1.
    calls = [task("cudaLaunchKernel", MAIN, 1, step=step) for step in (0, 0, 1)]
    some = graph(
        [*calls, *(task("k", STREAM, 20, step=step) for step in (0, 1, 0))],
        [(0, 3, Dependency.LAUNCH), (2, 4, Dependency.LAUNCH), (1, 5, Dependency.LAUNCH)],
    )
    after = cuda_graphs(some, launch_us=5.0, per_kernel_us=0.0).graph
    # Calls at 0 and, behind the first kernel, at 25.
    assert simulate(after).start_us.tolist() == [0, 25, 5, 30, 50]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"launch_us": -1.0}, "launch-us: -1 is out of range"),
        ({"per_kernel_us": float("inf")}, "per-kernel-us: inf is out of range"),
        ({"replays_ahead": 0}, "replays-ahead: 0 is out of range"),
        ({"phase": "loss"}, "phase: 'loss' is unknown"),
    ],
)
def test_bad_parameters_are_named(given, message):
    with pytest.raises(InputError) as caught:
        cuda_graphs(graph(launched("k", 1), pairs(1)), **given)
    assert str(caught.value).startswith(message)
