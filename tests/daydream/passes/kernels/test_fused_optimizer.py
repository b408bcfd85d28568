"""A fused optimizer: one kernel a step for the whole weight update."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase, TaskKind
from daydream.graph.simulate import simulate
from daydream.passes.kernels.fused_optimizer import fused_optimizer
from hal.support.errors import InputError
from tests.daydream.graphs import MAIN, graph, launched, pairs, task

ADD = "vectorized_elementwise_kernel<AddFunctor>"


def update(step=0):
    """A backward kernel of 5 µs, then three launches of 4 µs with kernels of 2, 2 and 6 µs, 3 µs of operators each."""
    tasks = launched("bgrad", 5, phase=Phase.BACKWARD, step=step)
    for duration in (2, 2, 6):
        tasks += [task("aten::add_", MAIN, 3, phase=Phase.UPDATE, step=step)]
        tasks += launched(ADD, duration, call_us=4, phase=Phase.UPDATE, step=step)
    return tasks


LAUNCHES = [(0, 1), (3, 4), (6, 7), (9, 10)]


def one_step():
    return graph(update(), [(a, b, Dependency.LAUNCH) for a, b in LAUNCHES])


def test_one_kernel_takes_the_time_of_all():
    before, outcome = one_step(), fused_optimizer(one_step(), host_us=10.0)
    # Before: launches end at 1, 8, 15, 22; kernels 1-6, 8-10, 15-17, 22-28.
    assert simulate(before).makespan_us == 28
    # After: launch to 1, host time to 11, launch to 15, kernel of 2 + 2 + 6 to 25.
    after = outcome.graph
    assert simulate(after).makespan_us == 25
    assert [after.text(row) for row in range(len(after))] == [
        "cudaLaunchKernel",
        "bgrad",
        "fused optimizer (host)",
        "cudaLaunchKernel",
        "fused optimizer",
    ]
    assert outcome.notes == (
        "3 kernels of the weight update in 1 steps became 1; their GPU time went from 0.010 to 0.010 ms a step",
        "5 CPU tasks of the update are gone; 10 µs of host time a step stay",
    )


def test_traffic_counts_every_tensor_once():
    outcome = fused_optimizer(one_step(), duration="traffic", traffic_ratio=0.5, host_us=0.0)
    # Launches end at 1 and 5, the fused kernel waits for the backward one: 6 + 10 * 0.5.
    assert simulate(outcome.graph).makespan_us == 11
    # Without a named optimizer 5/11 of the traffic is taken to remain.
    assert fused_optimizer(one_step(), duration="traffic").graph.duration_us[-1] == pytest.approx(10 * 5 / 11)


def test_what_is_fused_already_keeps_its_time():
    tasks = [*launched("multi_tensor_apply_kernel<AdamFunctor>", 6, phase=Phase.UPDATE)]
    tasks += launched("elementwise_kernel", 4, phase=Phase.UPDATE)
    outcome = fused_optimizer(graph(tasks, pairs(2)), duration="traffic", traffic_ratio=0.25)
    assert outcome.graph.duration_us[-1] == 7
    assert "1 of the kernels belong to a fused optimizer already and keep their time" in outcome.notes


def test_every_step_keeps_its_own_kernels():
    tasks = [*update(0), *update(1)]
    edges = [(base + a, base + b, Dependency.LAUNCH) for base in (0, 11) for a, b in LAUNCHES]
    after = fused_optimizer(graph(tasks, edges), kernels=2, host_us=0.0).graph
    fused = after.select(name="^fused optimizer$")
    assert after.step[fused].tolist() == [0, 0, 1, 1]
    assert after.duration_us[fused].tolist() == [5, 5, 5, 5]
    assert (after.edge_kind == Dependency.LAUNCH).sum() == 6


def test_copies_and_waits_of_the_update_stay():
    tasks = [*launched(ADD, 2, phase=Phase.UPDATE), *launched(ADD, 3, phase=Phase.UPDATE)]
    tasks += launched("Memcpy DtoH", 1, phase=Phase.UPDATE, kind=TaskKind.MEMCPY)
    tasks += [task("cudaStreamSynchronize (return)", MAIN, 1, phase=Phase.UPDATE)]
    some = graph(tasks, [*pairs(3), (5, 6, Dependency.SYNC)])
    after = fused_optimizer(some, host_us=0.0).graph
    kept = [after.text(row) for row in range(len(after))]
    assert kept == [
        "cudaLaunchKernel",
        "fused optimizer",
        "cudaLaunchKernel",
        "Memcpy DtoH",
        "cudaStreamSynchronize (return)",
    ]
    # Launch to 1, kernel 1-6, copy 6-7, return 7-8.
    assert simulate(after).makespan_us == 8


def test_no_update_changes_nothing():
    some = graph(launched("k", 1), pairs(1))
    outcome = fused_optimizer(some)
    assert outcome.graph is some
    assert outcome.notes == ("no kernel belongs to a weight update: nothing is fused",)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"kernels": 0}, "kernels: 0 is out of range"), ({"duration": "max"}, "duration: 'max' is unknown"),
     ({"host_us": -1.0}, "host-us: -1 is out"), ({"traffic_ratio": -0.1}, "traffic-ratio: -0.1 is out")],
)  # fmt: skip
def test_bad_parameters_are_named(given, message):
    with pytest.raises(InputError) as caught:
        fused_optimizer(one_step(), **given)
    assert str(caught.value).startswith(message)
