"""Iterations of a server: who is in each, when tokens come, and what happens where pages run out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daydream.serving import scheduler
from daydream.serving.costs import PAGE
from daydream.serving.requests import Requests, drawn
from daydream.serving.scheduler import Host, bin_seconds, schedule
from tests.daydream.serving.conftest import flat_costs


def _requests(arrival: list[float], prompt: list[int], output: list[int], **more: Any) -> Requests:
    return Requests(arrival=np.array(arrival), prompt=np.array(prompt), output=np.array(output), **more)


def test_a_request_alone_waits_for_its_chunks_then_for_a_token_an_iteration() -> None:
    # Sixteen tokens, then four; then two iterations of one token.
    result = schedule(_requests([2.0], [20], [3]), flat_costs(), Host())
    assert result.first[0] == pytest.approx(2.0 + 2.6 + 1.4)
    assert result.finished[0] == pytest.approx(result.first[0] + 2 * 1.1)
    assert (result.iterations, result.preemptions, result.arrived[0]) == (4, 0, 2.0)


def test_what_decodes_comes_before_prompts_and_takes_of_their_budget() -> None:
    result = schedule(_requests([0.0, 0.0], [15, 20], [2, 1]), flat_costs(), Host())
    # 15 + 1 tokens, then one that decodes and 15 of the second prompt, then its last 4.
    assert result.first.tolist() == pytest.approx([2.6, 2.6 + 2.6 + 1.4])
    assert result.finished[0] == pytest.approx(5.2)


def test_no_more_sequences_run_than_a_batch_has() -> None:
    result = schedule(_requests([0.0] * 8, [1] * 8, [4] * 8), flat_costs(), Host())
    assert (result.iterations, result.running) == (8, 4.0)
    assert result.first[4:].min() > result.finished[:4].max()


def test_requests_of_a_limited_concurrency_are_sent_when_one_is_answered() -> None:
    result = schedule(_requests([0.0] * 4, [1] * 4, [2] * 4, concurrency=2), flat_costs(), Host())
    assert result.arrived.tolist() == pytest.approx([0.0, 0.0, result.finished[0], result.finished[1]])


def test_where_pages_run_out_the_last_is_computed_again_and_all_get_their_tokens() -> None:
    requests = _requests([0.0, 0.0], [PAGE, PAGE], [PAGE + 2, PAGE + 2])
    costs = flat_costs(blocks=3, engine={"tokens": 64})
    result = schedule(requests, costs, Host())
    assert result.preemptions == 1
    assert result.finished[1] > result.finished[0] > 0
    assert result.pages <= 3


def test_who_reserves_is_never_preempted_and_waits_longer_for_the_first_token() -> None:
    requests = _requests([0.0, 0.0], [PAGE, PAGE], [PAGE + 2, PAGE + 2])
    costs = flat_costs(blocks=3, engine={"tokens": 64})
    reserved, other = (schedule(requests, costs, Host(), reserves=each) for each in (True, False))
    assert reserved.preemptions == 0
    assert reserved.first[1] > reserved.finished[0] > other.first[1]


def test_a_shared_prefix_is_neither_computed_nor_kept_twice() -> None:
    costs = flat_costs(engine={"tokens": 256})
    prompts = [4 * PAGE + 1] * 4
    result = schedule(_requests([0.0] * 4, prompts, [1] * 4, shared=4 * PAGE), costs, Host())
    assert result.first[0] == pytest.approx(1.4)
    assert result.pages == 4 + 4


def test_the_host_adds_to_an_iteration_unless_it_works_ahead() -> None:
    requests, costs = _requests([0.0], [1], [10]), flat_costs()
    alone, before, ahead, slow = (
        schedule(requests, costs, Host(*each)).finished[0]
        for each in ((), (0.5, 0.1), (0.5, 0.1, True), (5.0, 0.0, True))
    )
    assert (before, ahead, slow) == pytest.approx((alone + 10 * 0.6, alone, 50.0))


def test_kernels_launched_one_by_one_take_the_hosts_time() -> None:
    requests, costs = _requests([0.0], [1], [10]), flat_costs(launch=3.0)
    assert schedule(requests, costs, Host(graphs=False)).finished[0] == pytest.approx(30.0)


def test_gaps_between_tokens_are_those_of_sequences_that_decode() -> None:
    result = schedule(_requests([0.0], [1], [10]), flat_costs(), Host())
    place = int(np.argmax(result.gaps))
    assert result.gaps.sum() == 9
    assert bin_seconds()[place] == pytest.approx(1.1, rel=0.01)


def test_accepted_drafts_are_tokens_of_the_same_iteration() -> None:
    # Every draft is accepted: the prompt's iteration, then two of four tokens each; the last has what the answer lacks.
    requests, costs = _requests([0.0], [1], [8]), flat_costs(engine={"draft": 3, "acceptance": 1.0})
    result = schedule(requests, costs, Host())
    assert result.iterations == 3
    assert result.finished[0] == pytest.approx(1.1 + 2 * 1.4)


def test_refused_drafts_cost_their_tokens_and_bring_none() -> None:
    requests, costs = _requests([0.0], [1], [8]), flat_costs(engine={"draft": 3, "acceptance": 0.0})
    result = schedule(requests, costs, Host())
    assert result.finished[0] == pytest.approx(1.1 + 7 * 1.4)


def test_drafts_are_accepted_as_often_as_said() -> None:
    costs = flat_costs(engine={"draft": 3, "acceptance": 0.6, "sequences": 1})
    result = schedule(_requests([0.0] * 20, [1] * 20, [401] * 20), costs, Host())
    assert 20 * 400 / (result.iterations - 20) == pytest.approx(1 + 0.6 + 0.36 + 0.216, rel=0.02)


def test_a_model_that_drafts_runs_as_often_as_it_drafts() -> None:
    drafts = flat_costs(body=np.full(17, 0.5))
    costs = flat_costs(engine={"draft": 2, "acceptance": 1.0}, draft=drafts)
    result = schedule(_requests([0.0], [1], [4]), costs, Host())
    assert result.finished[0] == pytest.approx(1.1 + 1.3 + 2 * 2 * 0.5)


def test_prompts_that_are_carried_decode_at_once_and_are_computed_again_where_preempted() -> None:
    requests = _requests([1.0, 1.0], [PAGE, PAGE], [PAGE + 2, PAGE + 2], carried=True)
    plenty, few = (schedule(requests, flat_costs(blocks=blocks, engine={"tokens": 64}), Host()) for blocks in (9, 5))
    assert plenty.finished.tolist() == pytest.approx([1 + 17 * 1.2] * 2)
    assert (plenty.preemptions, few.preemptions) == (0, 1)
    assert few.finished[1] > few.finished[0] == pytest.approx(1 + 16 * 1.2 + 1.1)


@pytest.mark.parametrize("draft", [0, 2])
def test_machine_code_and_python_agree(monkeypatch: pytest.MonkeyPatch, draft: int) -> None:
    requests = drawn(40, rate=0.5, prompt="1..60", output="1..40", seed=3)
    costs = flat_costs(blocks=14, engine={"draft": draft})
    compiled = schedule(requests, costs, Host(0.1, 0.01))
    monkeypatch.setattr(scheduler, "compiled_run", lambda: scheduler._run)
    plain = schedule(requests, costs, Host(0.1, 0.01))
    assert compiled.preemptions == plain.preemptions > 0
    assert compiled.iterations == plain.iterations
    np.testing.assert_allclose(compiled.finished, plain.finished)
    np.testing.assert_array_equal(compiled.gaps, plain.gaps)
