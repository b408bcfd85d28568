"""Passes and buckets searched in turns, on steps small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daydream.graph.edit import Edit
from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.optimize.coarse import coarsened, step_us
from daydream.optimize.exchange import Exchange
from daydream.optimize.plan import buckets_of, plan_record
from daydream.optimize.strategies import carried, no_later, optimized
from daydream.passes import Outcome
from daydream.trace.trace import NONE
from daydream.whatif import PassRequest
from hal.support.errors import InputError
from tests.daydream.optimize.steps import exchange_of

#: 1 MB takes 100 µs; the last gradient of 10 kB 1 µs.
BACKWARD = [(1.0, 100.0, [1e6]), (1.0, 100.0, [1e6]), (1.0, 100.0, [1e4])]


def with_events(exchange: Exchange) -> Exchange:
    """The exchange with an event for every task, as a recording has them."""
    return replace(exchange, graph=replace(exchange.graph, event=np.arange(len(exchange.graph))))


def scaled(name: str, factor: float) -> PassRequest:
    """A pass that makes all kernels of this name shorter or longer."""

    def change(graph: TaskGraph) -> Outcome:
        return Outcome(graph.scaled(graph.select(name=name, gpu=True), factor), (f"{name} by {factor:g}",))

    return PassRequest(text=f"{name} x {factor:g}", name=name, function=change, parameters={}, defaults={})


def test_a_pass_that_shortens_the_step_is_taken_and_one_that_does_not_is_left() -> None:
    answer = optimized(with_events(exchange_of(BACKWARD)), [scaled("backward 2", 2.0), scaled("forward", 0.5)])
    assert answer.best.title == "forward x 0.5"
    assert answer.best.length_us == pytest.approx(answer.before.length_us - 5)
    assert [word for _, word in answer.tried] == ["taken: nothing happens later", "saves nothing"]


def test_every_pass_that_helps_is_taken_the_one_that_saves_most_first() -> None:
    requests = [scaled("update", 0.9), scaled("backward 2", 0.5), scaled("backward 1", 0.5)]
    answer = optimized(with_events(exchange_of(BACKWARD, bandwidth=100.0)), requests)
    assert {request.text for request in answer.best.requests} == {request.text for request in requests}
    lengths = [each.length_us for each, _ in answer.tried]
    assert lengths == sorted(lengths, reverse=True)


def test_a_step_with_less_to_wait_for_is_never_later() -> None:
    plain, quick = coarsened(exchange_of(BACKWARD)), coarsened(exchange_of([(1.0, 50.0, [1e6]), *BACKWARD[1:]]))
    assert no_later(quick, plain) and not no_later(plain, quick)
    for ends in ((2,), (0, 2), (1, 2), (0, 1, 2)):
        assert quick.replay(ends) <= plain.replay(ends)


def test_a_step_that_exchanges_something_else_is_not_compared() -> None:
    assert not no_later(coarsened(exchange_of(BACKWARD, bandwidth=20.0)), coarsened(exchange_of(BACKWARD)))


def test_a_gradient_of_a_fused_kernel_is_complete_with_that() -> None:
    exchange = with_events(exchange_of(BACKWARD))
    edit = Edit(exchange.graph)
    first, second, _ = exchange.of_step
    edit.remove([second.ready], launches=True)
    fused = edit.apply()
    kept = carried(exchange.gradients, exchange.graph, fused).steps[0]
    assert fused.text(kept[0].ready) == fused.text(kept[1].ready) == "backward 0"
    assert fused.text(kept[2].ready) == "backward 2"
    assert fused.event[kept[1].hook] == exchange.graph.event[first.hook]


def test_what_no_event_stands_for_is_not_found_again() -> None:
    exchange = exchange_of(BACKWARD)
    assert {each.ready for each in carried(exchange.gradients, exchange.graph, exchange.graph).steps[0]} == {NONE}


def test_of_several_steps_their_pace_counts() -> None:
    exchange = with_events(exchange_of(BACKWARD, steps=3, latency_us=5.0))
    answer = optimized(exchange)
    timeline = simulate(exchange.with_buckets(answer.best.best))
    assert answer.best.length_us == pytest.approx(timeline.sustained_us)
    assert answer.best.length_us == pytest.approx(step_us(timeline, 1), rel=0.01)


def test_memory_that_nobody_knows_cannot_be_kept_to() -> None:
    with pytest.raises(InputError, match=r"--memory-gb: the trace does not tell what the step holds"):
        optimized(exchange_of(BACKWARD), memory_bytes=1e9)


def test_the_plan_lists_buckets_by_size_and_by_name() -> None:
    answer = optimized(exchange_of(BACKWARD))
    # 2 MB behind the second kernel take 200 µs, 100 of them behind the third: apart, the first hides.
    record = plan_record(answer, "a step")
    assert record["ddp"]["buckets"] == [["0.0"], ["1.0"], ["2.0"]]
    assert record["ddp"]["bucket_cap_mb_list"] == [1e6 / 2**20, 1e6 / 2**20, 1e4 / 2**20]
    buckets = buckets_of(answer.best.exchange, answer.best.step, answer.best.best)
    # Kernels end at 111, 211 and 311; every exchange of 1 MB takes 100.
    assert [(each.ready_us, each.start_us, each.end_us) for each in buckets] == [
        (111.0, 111.0, 211.0), (211.0, 211.0, 311.0), (311.0, 311.0, 312.0),
    ]  # fmt: skip
    # The host waits for the update's 5 µs, and takes 1 to return.
    assert record["step_seconds"]["after"] == pytest.approx((312 + 5 + 1) * 1e-6)
