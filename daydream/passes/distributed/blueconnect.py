"""BlueConnect: all-reduces decomposed for a hierarchy of networks (thesis 4.5.2, A.6, algorithm 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.communication import (
    INTERFERENCE,
    all_gather_us,
    check_not_negative,
    node_of,
    numbers,
    on_node_us,
    reduce_scatter_us,
    stage_bytes,
)
from daydream.passes.basis.gradients import sized_all_reduces
from daydream.trace.trace import Ints
from hal.spec.node import NodeSpec
from hal.support.errors import InputError


@what_if("blueconnect")
def blueconnect(
    graph: TaskGraph,
    *,
    factors: str,
    bandwidths: str,
    latencies_us: str = "5",
    interference: float = INTERFERENCE,
    node: str = "",
) -> Outcome:
    """Every all-reduce as reduce-scatters and all-gathers, one pair for each level of the network (algorithm 8).

    `factors` are the workers of each level, innermost first: "8x4" is 8 in a machine, 4 machines. `bandwidths` and
    `latencies_us` are each level's bus bandwidth (GB/s) and ring-step latency, in the same order; one number serves
    all levels. The chain of an all-reduce of S bytes is reduce-scatter p1, ..., pk, all-gather pk, ..., p1, where
    level i works on S / (p1...p(i-1)) bytes (BlueConnect, section 3). Each level has a channel of its own, so
    stages of different buckets run side by side on different levels, as the paper's do; the two stages of a level
    share its links. `interference` makes every stage that much slower, as what overlaps in the pass ddp. With `node`,
    the name or file of one (``roller devices``), the stages of the innermost level take what the model of NCCL gives
    there, and that level's bandwidth and latency are not used.

    Works on the all-reduces that the pass ddp inserted and on recorded ones. A recorded one keeps its place on its
    stream, which waits there for the chain: so recorded all-reduces do not overlap each other.

    Assumptions: as in ddp; the size of an all-reduce does not depend on the number of workers.

    Raises:
        InputError: malformed or mismatched numbers, no all-reduce in the graph, or none of known size.
    """
    levels = _levels(factors, bandwidths, latencies_us, node)
    check_not_negative("blueconnect", interference=interference)
    graph, rows, sizes, unknown = sized_all_reduces("blueconnect", graph)
    before = float(graph.duration_us[rows].sum())
    edit = Edit(graph)
    chains = _Chains(edit, levels, 1.0 + interference)
    after = sum(chains.replace(int(row), float(size)) for row, size in zip(rows, sizes, strict=True))
    workers = int(np.prod([level.workers for level in levels]))
    notes = [
        f"{len(rows)} all-reduces among {workers} workers became chains of {2 * len(levels)} stages on "
        f"{len(levels)} channels ({factors} workers at {bandwidths} GB/s{f', inside as on {node}' * bool(node)})",
        f"one after another the stages take {after / 1e3:.3f} ms, the all-reduces took {before / 1e3:.3f} ms",
    ]
    if unknown:
        notes.append(f"{unknown} all-reduces of unknown size stay as they were")
    return Outcome(edit.apply(), tuple(notes))


@dataclass(frozen=True)
class _Level:
    workers: int
    bandwidth: float
    latency_us: float
    node: NodeSpec | None = None

    def reduce_scatter_us(self, size: float) -> float:
        """Microseconds in which the level's members add up `size` bytes and each keeps its part."""
        if self.node is not None:
            return on_node_us("reduce_scatter", size, self.workers, self.node)
        return reduce_scatter_us(size, self.workers, self.bandwidth, self.latency_us)

    def all_gather_us(self, size: float) -> float:
        """Microseconds in which each sends its part of `size` bytes to all others of the level."""
        if self.node is not None:
            return on_node_us("all_gather", size, self.workers, self.node)
        return all_gather_us(size, self.workers, self.bandwidth, self.latency_us)


def _levels(factors: str, bandwidths: str, latencies_us: str, node: str) -> list[_Level]:
    workers = numbers("blueconnect: factors", factors)
    if any(count != int(count) for count in workers):
        raise InputError("blueconnect: factors", f"{factors!r} holds no whole numbers", "write for example 8x4")
    speeds = _for_all("blueconnect: bandwidths", bandwidths, len(workers))
    waits = [0.0] if latencies_us.strip() == "0" else numbers("blueconnect: latencies-us", latencies_us)
    delays = _repeated("blueconnect: latencies-us", waits, len(workers))
    levels = [_Level(int(w), b, d) for w, b, d in zip(workers, speeds, delays, strict=True)]
    inside = replace(levels[0], node=node_of("blueconnect", node, levels[0].workers))
    return [inside, *levels[1:]]


def _for_all(field: str, text: str, count: int) -> list[float]:
    return _repeated(field, numbers(field, text), count)


def _repeated(field: str, values: list[float], count: int) -> list[float]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise InputError(
            field, f"{len(values)} numbers for {count} factors", f"write one number, or {count} joined by x"
        )
    return values


@dataclass
class _Chains:
    edit: Edit
    levels: Sequence[_Level]
    slower: float

    def replace(self, row: int, size: float) -> float:
        """Puts the chain in the place of an all-reduce; returns the time of its stages together, microseconds."""
        stages = self._stages(row, size)
        graph = self.edit.graph
        first, last = stages[0], stages[-1]
        for source, target in pairwise(stages):
            self.edit.depend(source, target, Dependency.COMMUNICATION)
        if graph.thread_kinds[graph.thread[row]] == ThreadKind.CHANNEL:
            for edge in np.flatnonzero(graph.edge_target == row).tolist():
                self.edit.depend(int(graph.edge_source[edge]), first, *self._edge(edge))
            for edge in np.flatnonzero(graph.edge_source == row).tolist():
                self.edit.depend(last, int(graph.edge_target[edge]), *self._edge(edge))
            self.edit.remove([row])
        else:
            self._replace_recorded(row, first, last)
        return float(sum(self._durations(size)))

    def _edge(self, edge: int) -> tuple[Dependency, float]:
        graph = self.edit.graph
        return Dependency(int(graph.edge_kind[edge])), float(graph.edge_lag_us[edge])

    def _replace_recorded(self, row: int, first: int, last: int) -> None:
        """A recorded all-reduce: a task without duration in its place starts the chain, itself it ends it."""
        graph = self.edit.graph
        begin = self.edit.add(
            f"{graph.text(row)} (begins)",
            TaskKind.COMMUNICATION,
            0.0,
            before=row,
            phase=int(graph.phase[row]),
            layer=int(graph.layer[row]),
            operator=int(graph.operator[row]),
        )
        incoming = np.flatnonzero(graph.edge_target == row)
        for edge in incoming.tolist():
            self.edit.depend(int(graph.edge_source[edge]), begin, *self._edge(edge))
        self.edit.drop_edges(incoming[graph.edge_kind[incoming] != Dependency.LAUNCH])
        self.edit.depend(begin, first, Dependency.COMMUNICATION)
        self.edit.depend(last, row, Dependency.COMMUNICATION)
        self.edit.set("duration_us", [row], 0.0)

    def _durations(self, size: float) -> list[float]:
        arrays = stage_bytes(size, [level.workers for level in self.levels])
        pairs = list(zip(arrays, self.levels, strict=True))
        scatters = [level.reduce_scatter_us(array) for array, level in pairs]
        gathers = [level.all_gather_us(array) for array, level in reversed(pairs)]
        return [duration * self.slower for duration in (*scatters, *gathers)]

    def _stages(self, row: int, size: float) -> list[int]:
        """The chain's tasks in order, each on the channel of its level."""
        graph = self.edit.graph
        count = len(self.levels)
        order: Ints = np.array([*range(count), *reversed(range(count))])
        arrays = stage_bytes(size, [level.workers for level in self.levels])
        tasks = []
        for place, (level, duration) in enumerate(zip(order, self._durations(size), strict=True)):
            kind = "reduce-scatter" if place < count else "all-gather"
            channel = Thread(kind=ThreadKind.CHANNEL, label=f"network level {level + 1}", number=int(level))
            tasks.append(
                self.edit.add(
                    f"{kind} among {self.levels[level].workers}",
                    TaskKind.COMMUNICATION,
                    duration,
                    thread=self.edit.thread(channel),
                    phase=int(graph.phase[row]),
                    step=int(graph.step[row]),
                    layer=int(graph.layer[row]),
                    bytes=arrays[level],
                    priority=int(graph.priority[row]),
                )
            )
        return tasks
