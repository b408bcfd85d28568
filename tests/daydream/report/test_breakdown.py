"""Breakdowns, critical paths and tables, on graphs whose numbers are worked out in comments."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.graph.graph import Dependency, Mark, Phase, TaskKind, TrainingStep
from daydream.graph.simulate import simulate
from daydream.report.breakdown import (
    Busy,
    Cover,
    PhaseTimes,
    Resource,
    chosen_steps,
    find_step,
    layer_times,
    path_tasks,
    phase_times,
    recorded_busy,
    step_breakdowns,
    top_kernels,
)
from daydream.report.idle import BETWEEN_TASKS, COMMUNICATION, COPY, LAUNCH, LOADING, STREAM, SYNCHRONISED, idle_times
from hal.support.errors import InputError
from tests.daydream.graphs import AUTOGRAD, CHANNEL, MAIN, STREAM2, graph, launched, pairs, task
from tests.daydream.graphs import STREAM as STREAM7


def synchronised():
    """Launch 0-2, kernel a 2-12, operator 2-5 with a gap to 9, a call that waits for a 12-13; the step is 0-13."""
    tasks = [
        task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN, recorded_us=100),
        task("cudaLaunchKernel", MAIN, 2, recorded_us=100),
        task("a", STREAM7, 10, recorded_us=102),
        task("aten::x", MAIN, 3, gap_us=4, recorded_us=102),
        task("cudaDeviceSynchronize", MAIN, 1, recorded_us=113),
        task("step ends", MAIN, 0, mark=Mark.STEP_END, recorded_us=114),
    ]
    return graph(tasks, [(1, 2, Dependency.LAUNCH), (2, 4, Dependency.SYNC)])


def test_a_union_counts_overlaps_once():
    cover = Cover(np.array([5.0, 0.0, 1.0, 7.0]), np.array([8.0, 2.0, 3.0, 7.5]))
    assert cover.start_us.tolist() == [0, 5]
    assert cover.end_us.tolist() == [3, 8]
    assert cover.within(np.array([0.0, 2.5, 3.0, -5.0]), np.array([10.0, 6.0, 5.0, 1.0])).tolist() == [6, 1.5, 0, 1]
    assert Cover(np.empty(0), np.empty(0)).within(np.array([0.0]), np.array([9.0])).tolist() == [0]


def test_waiting_for_the_gpu_is_gpu_only():
    # CPU 0-9 and 12-13, GPU 2-12: CPU alone 0-2 and 12-13, GPU alone 9-12, both 2-9.
    (step,) = step_breakdowns(simulate(synchronised()), [0])
    assert step.busy == Busy(cpu_only_us=3, gpu_only_us=3, both_us=7, neither_us=0, communication_us=0)
    assert step.busy.total_us == step.length_us == 13


def test_recorded_times_have_the_same_breakdown():
    # As above, but the call was recorded 1 later: nobody works 112-113.
    assert recorded_busy(synchronised(), [0]) == [Busy(3, 3, 7, 1, 0)]


def test_without_recorded_times_there_is_no_recorded_breakdown():
    assert recorded_busy(graph([task("op", MAIN, 1)]), [0]) is None


def test_the_critical_path_decides_the_bottleneck():
    # Launch 0-2, kernel 2-12, synchronisation 12-13.
    (step,) = step_breakdowns(simulate(synchronised()), [0])
    assert step.critical_us == (3, 10, 0, 0, 0)
    assert step.bottleneck is Resource.COMPUTE
    assert [resource.label for resource in Resource] == [
        "CPU", "GPU compute", "memory copy", "communication", "data loading",
    ]  # fmt: skip


def test_only_the_network_works_while_kernels_wait_for_it():
    # Launches 0-2, kernel 1-4, all-reduce 4-9, kernel 9-11: from 4 to 9 only the channel works.
    tasks = [*launched("a", 3), *launched("update", 2), task("allreduce", CHANNEL, 5)]
    edges = [*pairs(2), (1, 4, Dependency.COMMUNICATION), (4, 3, Dependency.COMMUNICATION)]
    (step,) = step_breakdowns(simulate(graph(tasks, edges)), [0])
    assert step.busy == Busy(cpu_only_us=1, gpu_only_us=4, both_us=1, neither_us=5, communication_us=5)
    assert step.critical_us == (1, 5, 0, 5, 0)


def two_steps():
    """Two steps of 4 and 8 on the CPU; the kernel of the first runs into the second."""
    tasks = [
        task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN),
        task("cudaLaunchKernel", MAIN, 4),
        task("a", STREAM7, 5, phase=Phase.FORWARD, layer="conv"),
        task("step ends", MAIN, 0, mark=Mark.STEP_END),
        task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN, step=1),
        task("batch", MAIN, 7, kind=TaskKind.DATA_LOADING, step=1),
        task("cudaMemcpyAsync", MAIN, 1, step=1),
        task("Memcpy HtoD", STREAM7, 2, kind=TaskKind.MEMCPY, step=1, phase=Phase.BACKWARD, layer="conv"),
        task("step ends", MAIN, 0, mark=Mark.STEP_END, step=1),
    ]
    steps = (TrainingStep("ProfilerStep#7", 4.0), TrainingStep("ProfilerStep#8", 8.0, full=False))
    return graph(tasks, [(1, 2, Dependency.LAUNCH), (6, 7, Dependency.LAUNCH)], steps=steps)


def test_a_kernel_that_runs_into_the_next_step_counts_there():
    # a runs 4-9, all of it in step 1 (4-12), in which the CPU works throughout.
    first, second = step_breakdowns(simulate(two_steps()), [0, 1])
    assert first.busy == Busy(4, 0, 0, 0, 0)
    assert second.busy == Busy(3, 0, 5, 0, 0)
    # The path ends with the copy, 12-14: launch 0-4, batch 4-11, call 11-12.
    assert first.critical_us == (4, 0, 0, 0, 0)
    assert second.critical_us == (1, 0, 0, 0, 7)
    assert second.bottleneck is Resource.LOADING


def test_steps_are_found_by_number_and_by_index():
    some = two_steps()
    assert (find_step(some, 8), find_step(some, 1), chosen_steps(some), chosen_steps(some, 8)) == (1, 1, (0,), (1,))
    with pytest.raises(InputError, match="--step: there is no step 9; the trace has ProfilerStep#7 and ProfilerStep#8"):
        find_step(some, 9)


def test_a_trace_of_partial_steps_shows_them_all():
    some = graph([task("op", MAIN, 1)], steps=(TrainingStep("trace", 1.0, full=False),))
    assert chosen_steps(some) == (0,)


def test_tables_are_per_step():
    some = two_steps()
    timeline = simulate(some)
    (kernel, copy) = top_kernels(some, [0, 1])
    assert (kernel.name, kernel.count, kernel.total_us, kernel.share) == ("a", 0.5, 2.5, 5 / 7)
    assert (copy.name, copy.total_us, copy.longest_us) == ("Memcpy HtoD", 1, 2)
    assert [kernel.name for kernel in top_kernels(some, [1])] == ["Memcpy HtoD"]
    (layer,) = layer_times(some, [0, 1])
    assert (layer.name, layer.gpu_us, layer.gpu_tasks) == ("conv", (2.5, 1, 0, 0), 1)
    # Of the copy, 12-14, nothing lies within the steps.
    assert phase_times(timeline, [0, 1])[:2] == [PhaseTimes("forward", 0, 2.5, 0.5), PhaseTimes("backward", 0, 0, 0.5)]
    assert phase_times(timeline, [0, 1])[2] == PhaseTimes("other", 6, 0, 0)


def test_what_is_longest_on_the_path():
    found = path_tasks(simulate(two_steps()), [0, 1], 2)
    assert [(kind, share.name, share.total_us) for kind, share in found] == [
        (Resource.LOADING, "batch", 3.5), (Resource.CPU, "cudaLaunchKernel", 2),
    ]  # fmt: skip


def test_time_behind_a_task_is_not_said_to_be_the_tasks():
    tasks = [task("aten::x", MAIN, 1, gap_us=9), task("aten::y", MAIN, 5)]
    found = path_tasks(simulate(graph(tasks)), [0], 5)
    assert [(share.name, share.total_us) for _, share in found] == [("untraced, after aten::x", 10), ("aten::y", 5)]


# Idle


def test_a_late_launch_is_the_cpus_fault():
    # Launch 0-1 and busy to 11, kernel 1-2, launch 11-12, kernel 12-13: idle 0-1 and 2-12.
    tasks = [task("cudaLaunchKernel", MAIN, 1, gap_us=10), task("a", STREAM7, 1), *launched("b", 1)]
    idle = idle_times(simulate(graph(tasks, pairs(2))), [0])
    (lane,) = idle.lanes
    assert (lane.name, lane.idle_us, lane.pauses, lane.by_reason) == ("GPU 0", 11, 2, {LAUNCH: 11})
    # The first launch delays from 0 to 1 and, with what follows it, from 2 to 11.
    assert [(share.name, share.total_us) for share in idle.operators] == [
        ("untraced, after cudaLaunchKernel", 10), ("cudaLaunchKernel", 1),
    ]  # fmt: skip


def test_an_empty_queue_after_waiting_is_the_synchronisation():
    # Launch 0-1, kernel 1-11, wait ends 12, launch 12-13, kernel 13-14: idle 11-13 (and 0-1 for the first launch).
    tasks = [*launched("a", 10), task("cudaStreamSynchronize", MAIN, 1), *launched("b", 1)]
    edges = [(0, 1, Dependency.LAUNCH), (1, 2, Dependency.SYNC), (3, 4, Dependency.LAUNCH)]
    (lane,) = idle_times(simulate(graph(tasks, edges)), [0]).lanes
    assert lane.by_reason == {LAUNCH: 1, SYNCHRONISED: 2}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"thread": STREAM2, "kind": TaskKind.MEMCPY}, COPY),
        ({"thread": STREAM2}, STREAM),
        ({"thread": STREAM2, "kind": TaskKind.COMMUNICATION}, COMMUNICATION),
        ({"thread": CHANNEL}, COMMUNICATION),
        ({"thread": AUTOGRAD, "kind": TaskKind.DATA_LOADING}, LOADING),
    ],
)
def test_a_kernel_that_waits_for_others_says_for_whom(columns, reason):
    # Both kernels are launched by 2; a runs 1-2, b waits for what runs 0-8.
    tasks = [*launched("a", 1), *launched("b", 1), task("other", duration_us=8, **columns)]
    timeline = simulate(graph(tasks, [*pairs(2), (4, 3, Dependency.SYNC)]))
    lanes = {lane.name: lane for lane in idle_times(timeline, [0]).lanes}
    stream = lanes.get("stream 7", lanes["GPU 0"])
    assert stream.by_reason[reason] == 6


def test_a_pause_between_kernels_of_a_full_queue_is_the_streams_own():
    tasks = [*launched("a", 5, gap_us=2), *launched("b", 1)]
    (lane,) = idle_times(simulate(graph(tasks, pairs(2))), [0]).lanes
    assert lane.by_reason == {LAUNCH: 1, BETWEEN_TASKS: 2}


def test_a_graph_without_gpu_tasks_has_no_idle_times():
    assert idle_times(simulate(graph([task("op", MAIN, 1)])), [0]).lanes == []
