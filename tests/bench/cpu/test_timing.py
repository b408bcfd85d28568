"""Turns: every round another one begins, and who fails is out."""

from __future__ import annotations

from collections.abc import Callable

from bench.cpu.rivals import timed
from bench.cpu.timing import TurnError, interleaved


def contender(log: list[str], name: str, fails_at: int = 99) -> Callable[[], float]:
    """One that takes as many seconds as turns it has had."""
    turns = 0

    def turn() -> float:
        nonlocal turns
        turns += 1
        log.append(name)
        if turns == fails_at:
            raise TurnError("its process ended with -11")
        return float(turns)

    return turn


def test_every_round_begins_with_another_one() -> None:
    log: list[str] = []
    seconds, failed = interleaved({name: contender(log, name) for name in "abc"}, 3, lambda: log.append("-"))
    assert "".join(log) == "-a-b-c" + "-b-c-a" + "-c-a-b"
    assert seconds == {name: [1.0, 2.0, 3.0] for name in "abc"} and failed == {}


def test_who_fails_has_no_times_and_no_further_turns() -> None:
    log: list[str] = []
    turns = {"a": contender(log, "a"), "b": contender(log, "b", fails_at=2)}
    seconds, failed = interleaved(turns, 4, lambda: None)
    assert seconds == {"a": [1.0, 2.0, 3.0, 4.0]}
    assert failed == {"b": "its process ended with -11"} and log.count("b") == 2


def test_nobody_left_is_no_error() -> None:
    seconds, failed = interleaved({"a": contender([], "a", fails_at=1)}, 3, lambda: None)
    assert seconds == {} and list(failed) == ["a"]


def test_calls_rotate_and_the_first_is_not_timed() -> None:
    calls = iter([lambda: 9.0, lambda: 1.0, lambda: 2.0])
    assert timed(calls, 0.0, self_timed=True) == [1.0]
