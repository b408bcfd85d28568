"""Contenders take turns: every round times all of them, beginning with another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from bench.timed.statistics import turn

#: A contender gives the seconds of one call, the median of its turn.
Turn = Callable[[], float]

#: Pools of threads spin after their last work, and would share the cores with who comes next: those of OpenBLAS for
#: 2**26 ticks of the processor's counter, which are 27 ms at 2.5 GHz.
PAUSE_SECONDS = 0.04


class TurnError(RuntimeError):
    """A contender could not take its turn; the text says why."""


def interleaved(
    turns: Mapping[str, Turn], rounds: int, pause: Callable[[], object] = lambda: time.sleep(PAUSE_SECONDS)
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of every contender, one value a round, and the reasons of those that failed on the way.

    Who fails is out at once and has no times: a few good rounds would compare it with other rounds of the others.
    """
    found: dict[str, list[float]] = {name: [] for name in turns}
    failed: dict[str, str] = {}
    for number in range(rounds):
        names = [name for name in turns if name not in failed]
        for name in turn(names, number):
            pause()
            try:
                found[name].append(turns[name]())
            except TurnError as error:
                failed[name] = str(error)
    return {name: seconds for name, seconds in found.items() if name not in failed}, failed
