"""Steps of a few gradients, drawn or written by hand, and every list of buckets that they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from hypothesis import strategies as st

from daydream.graph.graph import Dependency, Mark, Phase
from daydream.optimize.exchange import Ends, Exchange
from daydream.passes.basis.gradients import Gradients, ParameterGradient
from daydream.passes.distributed.ddp import AllReduceCost
from hal.node_catalog import load_node
from tests.daydream.graphs import MAIN, STREAM, graph, task

#: GB/s at which 1 MB takes 100 µs.
TEN_GB = 10.0


def exchange_of(
    backward: Sequence[tuple[float, float, Sequence[float]]],
    *,
    workers: int = 2,
    bandwidth: float = TEN_GB,
    latency_us: float = 0.0,
    call_us: float = 0.0,
    gap_us: float = 0.0,
    syncs: Sequence[int] = (),
    steps: int = 1,
    update_us: float = 5.0,
) -> Exchange:
    """Steps of a forward kernel, backward operators, and an update for which the host waits.

    Args:
        backward: of each operator the call's and the kernel's microseconds, and the bytes of its gradients.
        workers: as `AllReduceCost` takes it, like `bandwidth` and `latency_us`.
        bandwidth: GB/s.
        latency_us: of a step of the ring.
        call_us: what a call of an all-reduce takes.
        gap_us: behind every task of the host.
        syncs: the operators for whose kernel the host waits.
        steps: how many alike.
        update_us: of the update's kernel.
    """
    tasks: list[dict[str, Any]] = []
    edges: list[tuple[Any, ...]] = []
    gradients: dict[int, tuple[ParameterGradient, ...]] = {}

    def add(name: str, call: float, kernel: float, step: int, phase: Phase) -> int:
        shared = {"step": step, "phase": phase}
        tasks.append(task("launch", MAIN, call, gap_us=gap_us, **shared))
        tasks.append(task(name, STREAM, kernel, **shared))
        edges.append((len(tasks) - 2, len(tasks) - 1, Dependency.LAUNCH))
        return len(tasks) - 1

    def wait(row: int, step: int) -> None:
        tasks.append(task("wait", MAIN, 1.0, step=step))
        edges.append((row, len(tasks) - 1, Dependency.SYNC))

    for step in range(steps):
        tasks.append(task("begin", MAIN, 0.0, step=step, mark=Mark.STEP_BEGIN))
        add("forward", 1.0, 10.0, step, Phase.FORWARD)
        of_step = []
        for place, (call, kernel, sizes) in enumerate(backward):
            row = add(f"backward {place}", call, kernel, step, Phase.BACKWARD)
            of_step += [
                ParameterGradient(name=f"{place}.{i}", bytes=size, step=step, ready=row, hook=row - 1)
                for i, size in enumerate(sizes)
            ]
            if place in syncs:
                wait(row, step)
        wait(add("update", 1.0, update_us, step, Phase.UPDATE), step)
        tasks.append(task("end", MAIN, 0.0, step=step, mark=Mark.STEP_END))
        gradients[step] = tuple(of_step)
    cost = AllReduceCost(workers, bandwidth, latency_us, 1.0)
    return Exchange(graph(tasks, edges), Gradients("given", gradients), 0, cost, call_us)


def every_list(count: int) -> Iterator[Ends]:
    """Every way to cut so many gradients into buckets."""
    for cuts in range(count):
        for ends in combinations(range(count - 1), cuts):
            yield (*ends, count - 1)


_TIMES = st.floats(0.0, 200.0).map(lambda time: round(time, 1))
_SIZES = st.lists(st.floats(1e3, 3e6).map(round), min_size=1, max_size=2)


@st.composite
def exchanges(draw: st.DrawFn, gradients: int = 8) -> Exchange:
    """A step of at most so many gradients, bound by the host, the board, the network, or here and there by each."""
    backward = draw(st.lists(st.tuples(_TIMES, _TIMES, _SIZES), min_size=1, max_size=gradients))
    while sum(len(sizes) for _, _, sizes in backward) > gradients:
        backward = backward[:-1]
    exchange = exchange_of(
        backward,
        workers=draw(st.sampled_from([2, 8])),
        bandwidth=draw(st.sampled_from([1.0, 10.0, 100.0])),
        latency_us=draw(st.sampled_from([0.0, 5.0, 50.0])),
        call_us=draw(st.sampled_from([0.0, 3.0, 42.0])),
        gap_us=draw(st.sampled_from([0.0, 2.5])),
        syncs=draw(st.lists(st.integers(0, gradients - 1), max_size=2)),
    )
    # NCCL changes its algorithm with the size, so that a byte more is not always worth the same.
    node = draw(st.sampled_from([None, None, None, "hgx-h100"]))
    return exchange if node is None else replace(exchange, cost=replace(exchange.cost, node=load_node(node)))
