"""Device time of functions that take turns: medians and spread, with L2 flushed and with it warm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.gpu.machine import CudaMachine, Run
from bench.timed.statistics import spread, turn

#: Rounds in which every function is timed once; how many is chosen by the time there is.
FEWEST_ROUNDS, MOST_ROUNDS = 3, 15
#: Calls in one graph of the warm measurement last about this long together, so that launching it does not count.
WARM_SECONDS = 400e-6
MOST_COPIES = 32
WARM_ROUNDS = 5


@dataclass(kw_only=True)
class Contender:
    """One of the functions that are compared.

    Attributes:
        single, many: replay one call, and `copies` calls in a row.
        graph: False if it could not be captured and is called directly.
    """

    name: str
    single: Run
    many: Run
    copies: int
    estimate_seconds: float
    graph: bool = True


def contender(machine: CudaMachine, name: str, run: Run) -> Contender:
    """Capture `run` once and several times in a row; where that fails, call it directly."""
    try:
        single, graph = machine.graph(run, 1), True
    except Exception as error:
        if machine.is_broken(error):
            raise
        single, graph = run, False
    single()
    estimate = min(_once(machine, single) for _ in range(2))
    copies = max(1, min(MOST_COPIES, int(WARM_SECONDS / max(estimate, 1e-7))))
    many = single
    if copies > 1 and graph:
        many = machine.graph(run, copies)
    elif copies > 1:
        many = _repeated(run, copies)
    return Contender(name=name, single=single, many=many, copies=copies, estimate_seconds=estimate, graph=graph)


def _repeated(run: Run, copies: int) -> Run:
    def many() -> None:
        for _ in range(copies):
            run()

    return many


def _once(machine: CudaMachine, run: Run) -> float:
    start, end = machine.event(), machine.event()
    start.record()
    run()
    end.record()
    machine.synchronize()
    return start.seconds_until(end)


def interleaved(machine: CudaMachine, contenders: Sequence[Contender], seconds: float) -> dict[str, dict[str, Any]]:
    """Times of each contender by name: ``cold`` after a flush of L2, ``warm`` as one of several calls in a row.

    Each round times all of them, beginning with another one, so that clocks and temperature are the same for all. There
    are as many rounds as fit into `seconds`, within bounds.
    """
    total = sum(one.estimate_seconds for one in contenders)
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(seconds / max(total, 1e-6) / 2)))
    cold = _rounds(machine, contenders, rounds, flush=True)
    warm = _rounds(machine, contenders, min(rounds, WARM_ROUNDS), flush=False)
    return {
        one.name: {
            "cold": asdict(spread(cold[one.name])),
            "warm": asdict(spread([value / one.copies for value in warm[one.name]])),
            "graph": one.graph,
        }
        for one in contenders
    }


def _rounds(
    machine: CudaMachine, contenders: Sequence[Contender], rounds: int, *, flush: bool
) -> dict[str, list[float]]:
    pairs: dict[str, list[tuple[Any, Any]]] = {one.name: [] for one in contenders}
    for number in range(rounds):
        for one in turn(contenders, number):
            start, end = machine.event(), machine.event()
            if flush:
                machine.flush()  # keeps the device busy while the next launches are queued
            start.record()
            (one.single if flush else one.many)()
            end.record()
            pairs[one.name].append((start, end))
    machine.synchronize()
    return {name: [start.seconds_until(end) for start, end in found] for name, found in pairs.items()}


def warm_up(machine: CudaMachine, run: Run, seconds: float) -> None:
    """Repeat `run` for a while, so that the clocks have come up."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        run()
        machine.synchronize()
