"""The search against all lists of buckets, and its replays against whole simulations."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, TaskKind
from daydream.graph.simulate import simulate
from daydream.optimize.coarse import coarsened, step_us
from daydream.optimize.exchange import Ends, Exchange
from daydream.optimize.search import Prunings, best_buckets, by_limits, walked
from daydream.passes.basis.communication import all_reduces
from hal.support.errors import InputError
from tests.daydream.graphs import STREAM2
from tests.daydream.optimize.replicated import replicated
from tests.daydream.optimize.steps import every_list, exchange_of, exchanges


def simulated(exchange: Exchange, ends: Ends) -> float:
    """The step's length by a simulation of the whole graph."""
    return step_us(simulate(exchange.with_buckets(ends)), exchange.step)


@given(exchanges(gradients=5))
@settings(max_examples=25)
def test_a_coarse_replay_takes_what_the_whole_graph_takes(exchange: Exchange) -> None:
    step = coarsened(exchange)
    for ends in every_list(len(step)):
        assert step.replay(ends) == pytest.approx(simulated(exchange, ends), rel=1e-9)


@given(exchanges(gradients=8))
@settings(max_examples=30)
def test_the_best_list_is_that_of_all_lists(exchange: Exchange) -> None:
    step = coarsened(exchange)
    shortest = min(step.replay(ends) for ends in every_list(len(step)))
    found = best_buckets(step)
    assert found.length_us == pytest.approx(shortest, rel=1e-9)
    assert simulated(exchange, found.ends) == pytest.approx(shortest, rel=1e-9)


@given(exchanges(gradients=8))
@settings(max_examples=25)
def test_no_pruning_changes_the_answer(exchange: Exchange) -> None:
    step = coarsened(exchange)
    plain = best_buckets(step, prunings=Prunings(bound=False, tensors=False, groups=False))
    for bound, tensors, groups in product((False, True), repeat=3):
        found = best_buckets(step, prunings=Prunings(bound=bound, tensors=tensors, groups=groups))
        assert found.length_us == pytest.approx(plain.length_us, rel=1e-9)
        assert found.replayed <= plain.replayed


@given(exchanges(gradients=6))
@settings(max_examples=25)
def test_algorithm_1_finds_a_list_that_is_never_shorter_than_the_best(exchange: Exchange) -> None:
    step = coarsened(exchange)
    ends = walked(step)
    assert ends[-1] == len(step) - 1 and sorted(set(ends)) == list(ends)
    assert step.replay(ends) >= best_buckets(step).length_us - 1e-6


def test_of_equal_lists_the_known_one_is_the_answer() -> None:
    # Two exchanges of 1 µs hide behind the last kernel of 100 µs in any buckets; the last gradient's never does.
    step = coarsened(exchange_of([(1.0, 10.0, [1e4]), (1.0, 10.0, [1e4]), (1.0, 100.0, [1e4])]))
    assert best_buckets(step, [(0, 1, 2)]).ends == (0, 1, 2)
    assert best_buckets(step).ends == (1, 2)


def test_a_call_that_the_host_has_no_time_for_is_saved() -> None:
    # The host launches every 30 µs what the board does in 10: a call of 20 µs delays everything behind it.
    backward = [(30.0, 10.0, [1e4])] * 4
    free, costly = (coarsened(exchange_of(backward, latency_us=10.0, call_us=call)) for call in (0.0, 20.0))
    # Launches end at 31, 61, 91, 121: the last gradient is there at 131, its bucket alone takes 20 + 1.
    assert free.replay((2, 3)) == pytest.approx(131 + 21 + 5 + 1)
    assert best_buckets(free).ends == (2, 3)
    # A call more costs 20 µs, three gradients fewer at the end save 3.
    assert best_buckets(costly).ends == (3,)


def test_buckets_of_several_steps_take_what_the_graph_takes() -> None:
    exchange = exchange_of([(5.0, 40.0, [1e6]), (5.0, 40.0, [2e6])], latency_us=5.0, call_us=10.0, steps=3)
    timeline = simulate(exchange.with_buckets((0, 1)))
    step = coarsened(exchange)
    # The host waits for every update, so that all steps are as long as the first.
    assert [step_us(timeline, index) for index in range(3)] == pytest.approx([step.replay((0, 1))] * 3)


def test_limits_close_buckets_as_ddp_does() -> None:
    sizes = np.array([3.0, 1.0, 4.0, 4.0, 1.0])
    assert by_limits(sizes, [3.0, 5.0]) == (0, 2, 4)
    assert by_limits(sizes, [100.0]) == (4,)
    # Every list of buckets is that of its own sizes as limits.
    for ends in every_list(5):
        first = np.array([0, *(end + 1 for end in ends[:-1])])
        assert by_limits(sizes, np.add.reduceat(sizes, first).tolist()) == ends


@given(exchanges(gradients=4))
@settings(max_examples=15)
def test_one_of_equal_ranks_takes_as_long_as_all_of_them(exchange: Exchange) -> None:
    step = coarsened(exchange)
    for ends in every_list(len(step)):
        timeline = simulate(replicated(exchange.with_buckets(ends), 3))
        assert step_us(timeline, exchange.step) == pytest.approx(step.replay(ends), rel=1e-9)


def test_recorded_all_reduces_make_room_for_those_of_the_plan() -> None:
    exchange = exchange_of([(1.0, 100.0, [1e6]), (1.0, 100.0, [1e6])])
    last = exchange.of_step[-1]
    edit = Edit(exchange.graph)
    side = edit.thread(STREAM2)
    call = edit.add("launch", TaskKind.CPU, 1.0, after=last.hook)
    recorded = edit.add("ncclDevKernel_AllReduce_Sum_f32_RING", TaskKind.COMMUNICATION, 900.0, thread=side, step=0)
    edit.depend(call, recorded, Dependency.LAUNCH)
    edit.depend(recorded, exchange.waiting(exchange.of_step)[0], Dependency.SYNC)
    graph = edit.apply()
    found = Exchange.of(graph, exchange.cost, 0.0, gradient_mb=2.0)
    assert not len(all_reduces(found.graph))
    # Half of 2 MiB behind each kernel, 105 µs each: the second is ready at 211 and the network free then.
    assert simulated(found, (0, 1)) == pytest.approx(coarsened(found).replay((0, 1)))
    assert simulated(found, (0, 1)) < simulate(graph).step_us[0]


def test_one_worker_has_nobody_to_exchange_with() -> None:
    exchange = exchange_of([(1.0, 100.0, [1e6])])
    with pytest.raises(InputError, match=r"--workers: 1 worker has no other to exchange gradients with"):
        Exchange.of(exchange.graph, replace(exchange.cost, workers=1), 0.0)
