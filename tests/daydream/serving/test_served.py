"""Answers of servings: percentiles, replicas, requests from files, and what cannot be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daydream.serving.requests import drawn, read_requests
from daydream.serving.scheduler import Host
from daydream.serving.search import SearchOutcome
from daydream.serving.served import Promise, served
from hal.support.errors import InputError
from tests.daydream.serving.conftest import flat_costs


def test_replicas_take_requests_in_turns() -> None:
    requests = drawn(20, rate=None, prompt="4", output="5", seed=0)
    one, two = (served(requests, flat_costs(), Host(), replicas=replicas) for replicas in (1, 2))
    assert two.tokens_per_second == pytest.approx(one.tokens_per_second * one.seconds / two.seconds)
    assert (two.boards, len(two.ttft)) == (2, 20)
    assert two.seconds < one.seconds


def test_times_of_requests_and_tokens_are_reported() -> None:
    answer = served(drawn(4, rate=None, prompt="4", output="5", seed=0), flat_costs(), Host())
    assert answer.ttft.tolist() == pytest.approx([2.6] * 4)
    assert answer.tpot.tolist() == pytest.approx([1.4] * 4)
    assert answer.gap(50) == pytest.approx(1.4, rel=0.01)
    assert answer.user_tokens_per_second == pytest.approx(1 / 1.4)
    assert answer.keeps(Promise(ttft=2.7, tpot=1.5))
    assert not answer.keeps(Promise(tpot=1.3))


def test_answers_of_one_token_have_no_time_between() -> None:
    answer = served(drawn(4, rate=None, prompt="4", output="1", seed=0), flat_costs(), Host())
    assert len(answer.tpot) == 0
    assert answer.keeps(Promise(tpot=1e-9))


def test_requests_are_the_same_for_a_seed_and_differ_for_others() -> None:
    first, again, other = (drawn(50, rate=2.0, prompt="10..90", output="5", seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first.prompt, again.prompt)
    np.testing.assert_array_equal(first.arrival, again.arrival)
    assert not np.array_equal(first.prompt, other.prompt)
    assert first.prompt.min() >= 10
    assert first.prompt.max() <= 90


@pytest.mark.parametrize("text", ["0", "", "9..3", "a", "1..", "-4", "1.5"])
def test_lengths_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--prompt"):
        drawn(5, rate=None, prompt=text, output="5", seed=0)


def test_a_file_of_requests_is_sorted_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("output,prompt,arrival\n5,10,2.5\n6,20,1.5\n")
    requests = read_requests(path)
    assert (requests.arrival.tolist(), requests.prompt.tolist(), requests.output.tolist()) == ([0, 1], [20, 10], [6, 5])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "holds 0 requests"),
        ("arrival,prompt\n1,2\n", "output: is no column"),
        ("arrival,prompt,output\n1,2,x\n", "line 2: output"),
        ("arrival,prompt,output\n1,2,3\n1,0,3\n", "line 3: prompt"),
        ("arrival,prompt,output\n-1,2,3\n", "line 2: arrival"),
        ("arrival,prompt,output\n1,2.5,3\n", "line 2: prompt"),
        ("arrival,prompt,output\nnan,2,3\n", "line 2: arrival"),
    ],
)
def test_files_that_hold_no_requests_are_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=word):
        read_requests(path)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"blocks": 0}, "no room for keys and values"),
        ({"blocks": 1}, "a request has 34 tokens"),
        ({"engine": {"sequences": 32}}, "32 sequences need a token each"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], word: str) -> None:
    requests = drawn(2, rate=None, prompt="30", output="4", seed=0)
    with pytest.raises(InputError, match=word):
        served(requests, flat_costs(**changed), Host())


def test_the_frontier_has_what_nothing_beats_in_both() -> None:
    requests = drawn(64, rate=None, prompt="4", output="20", seed=0)
    tried = tuple(served(requests, flat_costs(engine={"sequences": limit}), Host()) for limit in (1, 2, 4, 8))
    outcome = SearchOutcome(best=(), tried=tried, hourly={})
    frontier = outcome.frontier(tried[0].costs.device.name)
    speeds = [(each.user_tokens_per_second, each.tokens_per_second) for each in frontier]
    assert [each[0] for each in speeds] == sorted((each[0] for each in speeds), reverse=True)
    assert [each[1] for each in speeds] == sorted(each[1] for each in speeds)
    assert len(speeds) == 4
    assert outcome.frontier("another") == ()
