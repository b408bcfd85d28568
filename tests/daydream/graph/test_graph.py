"""Primitives of the task graph and the simulation, on graphs whose answers are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskKind
from daydream.graph.simulate import CycleError, simulate
from tests.daydream.graphs import AUTOGRAD, CHANNEL, MAIN, STREAM, STREAM2, graph, launched, pairs, task


def two_kernels():
    """Launch 0-1, kernel a 1-11; launch 1-2, kernel b 11-16."""
    return graph([*launched("a", 10), *launched("b", 5)], pairs(2))


def test_kernels_queue_behind_each_other():
    timeline = simulate(two_kernels())
    assert timeline.start_us.tolist() == [0, 1, 1, 11]
    assert timeline.makespan_us == 16
    assert timeline.critical_path.tolist() == [0, 1, 3]


def test_removing_a_kernel_with_its_launch_closes_the_gap():
    edit = Edit(two_kernels())
    edit.remove([1], launches=True)
    smaller = edit.apply()
    assert [smaller.text(row) for row in range(len(smaller))] == ["cudaLaunchKernel", "b"]
    assert simulate(smaller).makespan_us == 6


def test_removing_a_synchronised_kernel_lets_the_wait_be_for_the_one_before():
    tasks = [*launched("a", 10), *launched("b", 5), task("cudaDeviceSynchronize", MAIN, 1)]
    waits = graph(tasks, [*pairs(2), (3, 4, Dependency.SYNC)])
    assert simulate(waits).makespan_us == 17
    edit = Edit(waits)
    edit.remove([3])
    assert simulate(edit.apply()).makespan_us == 12


def test_an_inserted_kernel_brings_its_launch():
    edit = Edit(two_kernels())
    added = edit.add_kernel("c", 2, after=1, launch_us=1)
    edit.add_kernel("d", 3, after=added, launch_us=1)
    bigger = edit.apply()
    assert [bigger.text(row) for row in bigger.select(gpu=True)] == ["a", "c", "d", "b"]
    assert (bigger.edge_kind == Dependency.LAUNCH).sum() == 4
    assert simulate(bigger).makespan_us == 21


def test_tasks_added_before_and_after_keep_the_order_in_which_they_were_added():
    edit = Edit(graph([task("x", MAIN, 1), task("y", MAIN, 1)]))
    one = edit.add("1", TaskKind.CPU, 1, after=0)
    edit.add("3", TaskKind.CPU, 1, after=0)
    edit.add("2", TaskKind.CPU, 1, after=one)
    edit.add("4", TaskKind.CPU, 1, before=1)
    edit.add("5", TaskKind.CPU, 1, thread=0)
    done = edit.apply()
    assert [done.text(row) for row in range(len(done))] == ["x", "1", "2", "3", "4", "y", "5"]


def test_selection_by_every_criterion():
    tasks = [
        *launched("volta_sgemm_128x64", 3, layer="fc", phase=Phase.FORWARD),
        *launched("elementwise_kernel", 3, layer="relu", phase=Phase.BACKWARD, stream=STREAM2),
    ]
    some = graph(tasks, pairs(2))
    assert some.select(name="SGEMM").tolist() == [1]
    assert some.select(layer="relu", gpu=True).tolist() == [3]
    assert some.select(phase=Phase.FORWARD).tolist() == [0, 1]
    assert some.select(stream=20).tolist() == [3]
    assert some.select(kind=TaskKind.CPU).tolist() == [0, 2]
    assert some.select(where=lambda g, row: g.duration_us[row] > 2).tolist() == [1, 3]


def test_scaling_leaves_the_original_alone():
    before = two_kernels()
    after = before.scaled(before.select(name="^a$"), 0.5)
    assert simulate(after).makespan_us == 11
    assert simulate(before).makespan_us == 16


def test_the_gap_holds_back_the_thread_and_not_the_kernel():
    tasks = [task("cudaLaunchKernel", MAIN, 2, gap_us=7), task("k", STREAM, 1), task("op", MAIN, 1)]
    timeline = simulate(graph(tasks, [(0, 1, Dependency.LAUNCH)]))
    assert timeline.start_us.tolist() == [0, 2, 9]


def test_a_lag_delays_only_its_target():
    timeline = simulate(graph([task("a", MAIN, 2), task("b", AUTOGRAD, 1)], [(0, 1, Dependency.HANDOFF, 5.0)]))
    assert timeline.start_us.tolist() == [0, 7]


def test_a_channel_serves_the_highest_priority_of_those_ready():
    tasks = [task("first", CHANNEL, 10), task("low", CHANNEL, 1, priority=1), task("high", CHANNEL, 1, priority=2)]
    tasks += [task("cause", MAIN, 3)]
    sends = graph(tasks, [(3, 1, Dependency.COMMUNICATION), (3, 2, Dependency.COMMUNICATION)])
    assert simulate(sends).start_us.tolist() == [0, 11, 10, 0]


def test_a_full_launch_queue_holds_back_the_cpu():
    rows = [row for i in range(6) for row in launched(f"k{i}", 10)]
    free, full = graph(rows, pairs(6)), graph(rows, pairs(6), queue_depth=2)
    launches = free.select(kind=TaskKind.CPU)
    assert simulate(free).start_us[launches].tolist() == [0, 1, 2, 3, 4, 5]
    # Kernels start at 1, 11, 21, ...: launch 3 waits until kernel 1 leaves the queue, at 11.
    assert simulate(full).start_us[launches].tolist() == [0, 1, 2, 11, 21, 31]


def test_a_cycle_is_named():
    tied = graph([task("a", MAIN, 1), task("b", AUTOGRAD, 1)], [(0, 1, Dependency.SYNC), (1, 0, Dependency.SYNC)])
    with pytest.raises(CycleError, match="2 tasks wait for each other in a circle; one of them is 'a'"):
        simulate(tied)


def test_a_duration_below_zero_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        two_kernels().with_durations(np.array([1]), -1.0)
