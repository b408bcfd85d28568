"""Jobs of several ranks written by hand: graphs whose ranks meet, and recordings on gloo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.ranks.collectives import Collectives, Group, Kind
from tests.daydream.graphs import STREAM, graph, task
from tests.daydream.traces import Builder


def channel(group: str) -> Thread:
    """Where the ranks of a group meet."""
    return Thread(kind=ThreadKind.CHANNEL, label=f"group {group}", process=-1)


def rank_graph(works: Sequence[float], groups: Sequence[str], moves: Sequence[float]) -> TaskGraph:
    """A rank that works on its stream, meets a group, moves data, and so on."""
    tasks, edges = [], []
    count: dict[str, int] = {}
    for work_us, group, move_us in zip(works, groups, moves, strict=True):
        row = len(tasks)
        number = count[group] = count.get(group, -1) + 1
        tasks += [
            task("work", STREAM, work_us),
            task(f"meeting {number}", channel(group), 0.0, kind=TaskKind.CPU),
            task("ncclAllReduce", STREAM, move_us, kind=TaskKind.COMMUNICATION),
        ]
        edges += [(row, row + 1, Dependency.COMMUNICATION), (row + 1, row + 2, Dependency.COMMUNICATION)]
    return graph(tasks, edges)


def gloo_trace(folder: Path, rank: int, *, work_us: float, end_us: float, ranks: int = 2) -> Path:
    """A rank's step on gloo: it works, calls an all-reduce that ends at `end_us`, and lies idle until then."""
    called = 10.0 + work_us
    builder = Builder(head={"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": ranks}})
    builder.head["host_name"] = "here"
    builder.step(1, 0.0, end_us + 200.0)
    builder.operator("aten::linear", 10.0, work_us, external=1)
    builder.operator("c10d::allreduce_", called + 5.0, 40.0, external=2, dims=[[]], types=["TensorList"])
    builder.operator("aten::copy_", called + 50.0, 30.0, external=3)
    builder.annotation(
        "gloo:all_reduce", called + 60.0, end_us - called - 60.0, thread=200,
        **{"Input Dims": [[1000]], "Input type": ["float"]},
    )  # fmt: skip
    builder.operator("aten::add_", end_us + 20.0, 100.0, external=4)
    return builder.write(folder / f"rank{rank}.json.gz")


def collectives(kinds: list[Kind], sizes: list[float] | None = None, **columns: Any) -> Collectives:
    """A rank's collectives: 5 µs each, one every 10 µs, in one group of two ranks; `columns` are others."""
    count = len(kinds)
    none = np.full(count, -1)
    given = {
        name: v if name == "groups" else np.array(v) if name.endswith("_us") else np.array(v, np.int64)
        for name, v in columns.items()
    }
    return Collectives(**{
        "groups": (Group("all", (0, 1)),), "group": np.zeros(count, np.int64), "kind": np.array(kinds, np.int64),
        "row": np.arange(count), "start_us": np.arange(count) * 10.0, "end_us": np.arange(count) * 10.0 + 5.0,
        "bytes": np.array(sizes or [8.0] * count), "sequence": none, "step": np.zeros(count, np.int64), "root": none,
        "peer": none, **given,
    })  # fmt: skip
