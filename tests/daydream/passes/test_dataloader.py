"""Data loading moved to worker processes."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Mark, TaskKind, ThreadKind
from daydream.graph.simulate import simulate
from daydream.passes.dataloader import dataloader
from daydream.trace.trace import NONE
from hal.support.errors import InputError
from tests.daydream.graphs import AUTOGRAD, MAIN, STREAM, graph, task
from tests.daydream.passes.traced import traced


def training(steps, load_us=60, work_us=40):
    """Steps that load for `load_us` (two tasks, the second with a gap of a third of it) and then work."""
    tasks = []
    for step in range(steps):
        tasks += [
            task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN, step=step),
            task("read", MAIN, load_us / 3, kind=TaskKind.DATA_LOADING, step=step),
            task("collate", MAIN, load_us / 3, gap_us=load_us / 3, kind=TaskKind.DATA_LOADING, step=step),
            task("train", MAIN, work_us, step=step),
            task("step ends", MAIN, 0, mark=Mark.STEP_END, step=step),
        ]
    return graph(tasks)


def steps_us(outcome):
    return simulate(outcome.graph).step_us.tolist()


def test_a_loader_that_keeps_up_leaves_the_hand_over():
    before = training(4)
    outcome = dataloader(before, workers=2, handover_us=5.0)
    assert simulate(before).step_us.tolist() == [100] * 4
    # Two workers give a batch every 30 µs, at 0, 30, 60, ...; a step takes 5 + 40.
    assert steps_us(outcome) == [45] * 4
    assert outcome.notes == (
        "4 batches of 0.060 ms moved to 2 workers, which together give one every 0.030 ms",
        "the main thread keeps 5 µs a batch",
    )
    after = outcome.graph
    assert [t.label for t in after.threads if t.kind is ThreadKind.CPU][1:] == [
        "data loader worker 0",
        "data loader worker 1",
    ]


def test_a_loader_that_is_too_slow_sets_the_pace():
    # A batch takes 120 µs: one every 60 µs. Batches are ready at 0, 60, 120, ...
    # Steps: 0-45, then 60 - 45 = 15 of waiting: 45-105, 105-165, ...
    outcome = dataloader(training(5, load_us=120), workers=2, handover_us=5.0)
    assert steps_us(outcome) == pytest.approx([45, 60, 60, 60, 60])
    # Twice as slow by contention: ready at 0, 120, 240.
    outcome = dataloader(training(3, load_us=120), workers=2, handover_us=5.0, contention=2.0)
    assert steps_us(outcome) == pytest.approx([45, 120, 120])


def test_a_cold_start_waits_for_the_first_batch():
    # Both workers begin at 0: batches at 60, 60, 120, 120. Steps end at 105, 150, 195, 240.
    outcome = dataloader(training(4), workers=2, handover_us=5.0, warm=False)
    assert steps_us(outcome) == [105, 45, 45, 45]


def test_workers_do_not_run_further_ahead_than_they_may():
    # One worker, one batch ahead, batches of 6 µs: batch 1 begins when batch 0 is taken, at 5.
    outcome = dataloader(training(3, load_us=6), workers=1, prefetch_factor=1, handover_us=5.0)
    after, timeline = outcome.graph, simulate(outcome.graph)
    begun = [float(timeline.start_us[row]) for row in after.select(name="read")]
    # Hand-overs at 0-5, 45-50, 90-95.
    assert begun == [0, 5, 50]


def test_edges_of_loading_go_to_the_hand_over():
    tasks = [
        task("other", AUTOGRAD, 50),
        task("read", MAIN, 10, kind=TaskKind.DATA_LOADING),
        task("train", MAIN, 5),
    ]
    some = graph(tasks, [(0, 1, Dependency.HANDOFF, 2.0)])
    # The main thread, not the worker, waits for the other thread: 50 + 2, hand-over 1, work 5.
    after = dataloader(some, workers=1, handover_us=1.0, warm=False).graph
    timeline = simulate(after)
    assert timeline.start_us[after.select(name="read")].tolist() == [0]
    assert timeline.makespan_us == 58


def test_loading_that_waits_for_its_own_work_on_the_gpu_does_not_wait_for_itself():
    # Decoding on the GPU: a launch, its kernel, another thread's kernel behind it, and a wait for both.
    loading = {"kind": TaskKind.DATA_LOADING}
    tasks = [
        task("decode", MAIN, 10, **loading),
        task("cudaLaunchKernel", AUTOGRAD, 1),
        task("decoded", STREAM, 20),
        task("other", STREAM, 7),
        task("cudaStreamSynchronize (return)", MAIN, 5, **loading),
        task("train", MAIN, 5),
    ]
    launches = [(0, 2, Dependency.LAUNCH), (1, 3, Dependency.LAUNCH)]
    some = graph(tasks, [*launches, (3, 4, Dependency.SYNC)])
    after = dataloader(some, workers=1, handover_us=1.0, warm=False).graph
    # The worker reads for 15 µs; the hand-over launches the kernel.
    timeline = simulate(after)
    assert timeline.start_us[after.select(name="decoded")].tolist() == [16]
    assert timeline.start_us[after.select(name="train")].tolist() == [16]


def test_a_trace_without_loading_or_with_workers_stays_as_it_is():
    idle = graph([task("train", MAIN, 1)])
    assert dataloader(idle).graph is idle
    tasks = [task("read", MAIN, 1, kind=TaskKind.DATA_LOADING)]
    busy = graph(tasks, **traced(["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"], [NONE]))
    outcome = dataloader(busy)
    assert outcome.graph is busy
    assert "has worker processes already" in outcome.notes[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "workers: 0 is out of range; give a number, 1 or more"),
        ({"prefetch_factor": 0}, "prefetch-factor: 0 is out of range"),
        ({"handover_us": -1.0}, "handover-us: -1 is out of range"),
        ({"contention": float("nan")}, "contention: nan is out of range"),
    ],
)
def test_bad_parameters_are_named(given, message):
    with pytest.raises(InputError) as caught:
        dataloader(training(1), **given)
    assert str(caught.value).startswith(message)
