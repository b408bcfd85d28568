"""Symmetry (dPRO, section 5.3): equal ranks take equal decisions at equal times, so one of them is simulated for all.

An all-reduce begins when the last rank is ready and ends everywhere at once. Where all ranks do the same in the same
time no rank waits for another, and the graph of one rank, with all-reduces of all, is the graph of each. Here is the
graph of all of them, against which that is checked and whose cost is what symmetry saves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from daydream.graph.graph import TaskGraph, TaskKind, Thread, ThreadKind
from daydream.trace.trace import NONE


def replicated(graph: TaskGraph, ranks: int) -> TaskGraph:
    """The graph of so many ranks that all do what this one does; all-reduces on channels wait for every rank."""
    count, threads = len(graph), len(graph.threads)
    every = np.arange(ranks)
    exchanges = (graph.kind == TaskKind.COMMUNICATION) & (graph.thread_kinds[graph.thread] == ThreadKind.CHANNEL)
    shared = exchanges[graph.edge_target] & ~exchanges[graph.edge_source]
    # Within each rank; and from each rank to the exchanges of the others.
    shift = count * every[:, None]
    source, target = graph.edge_source + shift, graph.edge_target + shift
    pairs = [(here, there) for here in range(ranks) for there in range(ranks) if here != there]
    across = [
        (graph.edge_source[shared] + count * here, graph.edge_target[shared] + count * there) for here, there in pairs
    ]
    devices = 1 + max(thread.device for thread in graph.threads)
    columns: dict[str, Any] = {
        name: np.tile(getattr(graph, name), ranks)
        for name in (
            "name", "kind", "duration_us", "gap_us", "layer", "phase", "step", "mark", "operator", "event", "bytes",
            "priority", "recorded_us",
        )
    }  # fmt: skip
    return replace(
        graph,
        **columns,
        threads=tuple(_of_rank(thread, rank, devices) for rank in range(ranks) for thread in graph.threads),
        thread=(graph.thread + threads * every[:, None]).ravel(),
        edge_source=np.concatenate([source.ravel(), *(each for each, _ in across)]),
        edge_target=np.concatenate([target.ravel(), *(each for _, each in across)]),
        edge_kind=np.concatenate([np.tile(graph.edge_kind, ranks), np.tile(graph.edge_kind[shared], len(across))]),
        edge_lag_us=np.concatenate(
            [np.tile(graph.edge_lag_us, ranks), np.tile(graph.edge_lag_us[shared], len(across))]
        ),
    )


def _of_rank(thread: Thread, rank: int, devices: int) -> Thread:
    """The thread of a rank, whose boards have numbers of their own: each has its own queue of launches."""
    device = thread.device + rank * devices if thread.device != NONE else NONE
    return replace(thread, process=rank, device=device)
