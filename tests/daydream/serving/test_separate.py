"""Prompts and decoding on boards of their own: what travels, how long it takes, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from daydream.serving.costs import Engine, IterationCosts, iteration_costs
from daydream.serving.parts import served_model
from daydream.serving.requests import drawn
from daydream.serving.scheduler import Host
from daydream.serving.search import search
from daydream.serving.separate import decoded, link_rates, prefilled
from daydream.serving.served import Promise, served
from hal.catalog import load_device
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")


@pytest.fixture
def costs(configuration: Callable[[str], str]) -> Callable[..., IterationCosts]:
    """Costs of a small model on a board by the number of tensor ranks."""
    model = served_model(configuration("llama"))
    return lambda ranks=1, device="h100": iteration_costs(
        model, load_device(device), Engine(ranks=ranks, sequences=64, tokens=2048)
    )


def test_a_prompt_travels_with_what_a_board_keeps_of_it(costs: Callable[..., IterationCosts]) -> None:
    requests = drawn(1, rate=None, prompt="1000", output="10", seed=0)
    one = costs()
    answer = decoded(prefilled(requests, one, Host()), one, Host())
    latency, rate = link_rates(one, one, "network")
    assert answer.prompts is not None
    assert answer.prompts.seconds[0] == pytest.approx(latency + 1000 * one.cache_bytes / rate)
    assert one.cache_bytes == 5 * 2 * 4 * 64 * 2
    alone = served(requests, one, Host())
    assert answer.seconds == pytest.approx(alone.seconds + answer.prompts.seconds[0])
    assert answer.ttft[0] == pytest.approx(alone.ttft[0])


def test_the_side_with_fewer_boards_sets_the_pace_and_prompts_wait_for_each_other(
    costs: Callable[..., IterationCosts],
) -> None:
    requests = drawn(8, rate=None, prompt="250", output="10", seed=0)
    one, two = costs(), costs(2)
    latency, rate = link_rates(one, two, "network")
    wide, narrow = (decoded(prefilled(requests, each, Host()), two, Host()).prompts for each in (two, one))
    assert wide is not None
    assert narrow is not None
    # Eight prompts are computed in one iteration and leave one after the other.
    steps = np.arange(1, 9) * 250 / rate
    assert np.sort(wide.seconds - latency) == pytest.approx(steps * two.cache_bytes)
    assert np.sort(narrow.seconds - latency) == pytest.approx(steps * one.cache_bytes)


def test_answers_of_one_token_never_leave_the_boards_for_prompts(costs: Callable[..., IterationCosts]) -> None:
    requests = drawn(4, rate=None, prompt="100", output="1", seed=0)
    answer = decoded(prefilled(requests, costs(), Host()), costs(), Host())
    assert (answer.schedules, answer.boards) == ((), 2)
    assert answer.finished.tolist() == answer.first.tolist()
    assert answer.record()["prefill"]["boards"] == 1


def test_links_that_two_boards_lack_are_refused(costs: Callable[..., IterationCosts]) -> None:
    with pytest.raises(InputError, match="no NVLink in common"):
        link_rates(costs(), costs(1, "l40s"), "nvlink")
    assert link_rates(costs(), costs(), "nvlink")[1] > 4 * link_rates(costs(), costs(), "network")[1]


def test_requests_that_wait_for_answers_are_refused(costs: Callable[..., IterationCosts]) -> None:
    requests = drawn(4, rate=None, prompt="100", output="5", seed=0, concurrency=2)
    with pytest.raises(InputError, match="needs boards that do both"):
        prefilled(requests, costs(), Host())


def test_a_search_tries_boards_for_prompts_alone_where_a_link_is_named(costs: Callable[..., IterationCosts]) -> None:
    one = costs()
    requests = drawn(100, rate=200.0, prompt="500..1500", output="20", seed=0)
    find = partial(
        search, one.model, [one.device], requests, Promise(ttft=0.1, tpot=0.01), Host(1e-3), one.engine, tensors=(1,)
    )
    both, alone = find(link="network"), find()
    assert not any(each.prompts for each in alone.tried)
    separate = [each for each in both.best if each.prompts is not None]
    assert separate
    assert both.price(separate[0]) == separate[0].boards >= 2
    assert all(each.keeps(Promise(ttft=0.1, tpot=0.01)) for each in separate)
