"""``results.json`` of a comparison as types; docs/bench-cpu.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.cpu.machine import Machine
from bench.timed.files import read_file, write_file
from bench.timed.statistics import Check, Spread, ratios

FORMAT = 1

#: Who counts as PyTorch's oneDNN: the better of both layouts.
ONEDNN = ("torch", "torch-turned")


class Facts(Struct, frozen=True, kw_only=True):
    """Facts of a rival besides its time, as far as it has them.

    Attributes:
        predicted_seconds: what RATIONAL predicted of the kernel that ran when it was compiled, from the device file.
        predicted_then_seconds: the same from a spec measured right before and after it ran.
        first_choice: measured time of RATIONAL's first choice over that of the best of its top 50.
        detail: in words, such as the kernels that OpenBLAS chose.
    """

    predicted_seconds: float | None = None
    predicted_then_seconds: float | None = None
    first_choice: float | None = None
    detail: str = ""


class Entry(Struct, frozen=True, kw_only=True):
    """One who computed an operator. Without ``time`` it was struck out, for the ``reason`` given.

    ``rounds`` has the seconds of every round, the same rounds for all entries of an operator.
    """

    who: str
    reason: str = ""
    check: Check | None = None
    time: Spread | None = None
    rounds: list[float] = []
    facts: Facts = Facts()
    setup_seconds: float = 0.0


class OperatorResult(Struct, frozen=True, kw_only=True):
    """An operator by everybody; ``sets`` of inputs took turns, ``bytes`` are its compulsory ones."""

    name: str
    op: str
    spec: dict[str, Any]
    flop: float
    bytes: int
    sets: int
    entries: list[Entry]

    def entry(self, who: str) -> Entry | None:
        """Who was timed; None where it was struck out or did not take part."""
        return next((one for one in self.entries if one.who == who and one.time is not None), None)

    def ratio(self, *who: str) -> Spread | None:
        """The time of the fastest of these as a multiple of ours; None where either side was struck out."""
        ours = self.entry("ours")
        entries = [entry for name in who if (entry := self.entry(name)) is not None]
        if ours is None or not entries:
            return None
        return min((ratios(each.rounds, ours.rounds) for each in entries), key=lambda one: one.median)

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured of our kernel, predicted when it was compiled."""
        ours = self.entry("ours")
        return None if ours is None else _error(ours, ours.facts.predicted_seconds)

    @property
    def error_then(self) -> float | None:
        """The same, predicted from a spec measured right before and after."""
        ours = self.entry("ours")
        return None if ours is None else _error(ours, ours.facts.predicted_then_seconds)


def _error(ours: Entry, predicted: float | None) -> float | None:
    return None if ours.time is None or predicted is None else predicted / ours.time.median - 1.0


class Results(Struct, frozen=True, kw_only=True):
    """A comparison on one machine; ``turn_seconds`` is how long each took its turn in each of ``rounds``."""

    format: int
    started: str
    machine: Machine
    suite: str
    rounds: int
    turn_seconds: float
    notes: list[str]
    operators: list[OperatorResult]


def write_results(path: Path, results: Results) -> None:
    """Write ``results.json`` in one step."""
    write_file(path, results)


def read_results(path: Path) -> Results:
    """The results in a file.

    Raises:
        InputError: it cannot be read, is damaged, or of another format.
    """
    return read_file(path, Results, FORMAT, "a file of python -m bench.cpu", "measure again with python -m bench.cpu")
