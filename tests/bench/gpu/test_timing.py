"""Contenders take turns, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.gpu.fakes import FakeMachine
from bench.gpu.timing import MOST_COPIES, contender, interleaved


class Clocked(FakeMachine):
    """A machine whose time passes only when something runs on it; with `capture` False nothing becomes a graph."""

    def __init__(self, capture: bool = True) -> None:
        super().__init__()
        self.now, self.capture, self.log = 0.0, capture, list[str]()

    def event(self) -> ClockedEvent:
        return ClockedEvent(self)

    def flush(self) -> None:
        self.log.append("flush")
        self.now += 1e-3

    def graph(self, run: Callable[[], object], copies: int) -> Callable[[], object]:
        if not self.capture:
            raise RuntimeError("cannot be captured")
        return super().graph(run, copies)

    def work(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


class ClockedEvent:
    def __init__(self, machine: Clocked) -> None:
        self._machine, self._at = machine, 0.0

    def record(self) -> None:
        self._at = self._machine.now

    def seconds_until(self, later: ClockedEvent) -> float:
        return later._at - self._at


def test_times_are_of_one_call_and_leave_the_flush_out() -> None:
    machine = Clocked()
    slow = contender(machine, "slow", machine.work("slow", 2e-3))
    quick = contender(machine, "quick", machine.work("quick", 1e-5))
    assert (slow.copies, quick.copies) == (1, MOST_COPIES)
    found = interleaved(machine, [slow, quick], 0.1)
    assert found["slow"]["cold"]["median"] == pytest.approx(2e-3)
    assert found["quick"]["cold"]["median"] == pytest.approx(1e-5)
    assert found["quick"]["warm"]["median"] == pytest.approx(1e-5)
    assert found["quick"]["graph"] is True


def test_contenders_take_turns_and_each_begins_a_round() -> None:
    machine = Clocked()
    both = [contender(machine, name, machine.work(name, 2e-3)) for name in "ab"]
    machine.log.clear()
    interleaved(machine, both, 0.0)
    assert machine.log[:12] == ["flush", "a", "flush", "b", "flush", "b", "flush", "a", "flush", "a", "flush", "b"]


def test_what_cannot_be_captured_is_called_directly() -> None:
    machine = Clocked(capture=False)
    one = contender(machine, "x", machine.work("x", 1e-4))
    found = interleaved(machine, [one], 0.1)["x"]
    assert (one.graph, found["graph"]) == (False, False)
    assert found["warm"]["median"] == pytest.approx(1e-4)


def test_a_lost_gpu_is_not_taken_for_a_failed_capture() -> None:
    class Lost(Clocked):
        def graph(self, run: Callable[[], object], copies: int) -> Callable[[], object]:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        contender(Lost(), "x", lambda: None)


def test_nobody_takes_no_time() -> None:
    assert interleaved(Clocked(), [], 1.0) == {}
