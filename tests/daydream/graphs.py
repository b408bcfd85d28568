"""Small graphs written by hand, for answers worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, Thread, ThreadKind, TrainingStep
from daydream.trace.trace import NONE

MAIN = Thread(kind=ThreadKind.CPU, label="main", number=1)
AUTOGRAD = Thread(kind=ThreadKind.CPU, label="autograd", number=2)
STREAM = Thread(kind=ThreadKind.STREAM, label="stream 7", number=7, device=0)
STREAM2 = Thread(kind=ThreadKind.STREAM, label="stream 20", number=20, device=0)
CHANNEL = Thread(kind=ThreadKind.CHANNEL, label="network")


def task(name: str, thread: Thread, duration_us: float, **columns: Any) -> dict[str, Any]:
    """A task as :func:`graph` takes it; `columns` may name any column but the thread, layer as text."""
    return {"name": name, "thread": thread, "duration_us": duration_us, **columns}


def graph(tasks: Sequence[dict[str, Any]], edges: Sequence[tuple[Any, ...]] = (), **fields: Any) -> TaskGraph:
    """A graph of these tasks; an edge is (source row, target row, Dependency[, lag in µs]).

    Kinds follow from the threads unless given; a task marked STEP_BEGIN or STEP_END needs its `step`.
    """
    defaults = {ThreadKind.CPU: TaskKind.CPU, ThreadKind.STREAM: TaskKind.KERNEL}
    threads = tuple(dict.fromkeys(row["thread"] for row in tasks))
    names = tuple(dict.fromkeys(row["name"] for row in tasks))
    layers = tuple(dict.fromkeys(row["layer"] for row in tasks if "layer" in row))

    def column(key: str, default: float, kind: type = int) -> Any:
        return np.array([row.get(key, default) for row in tasks], np.float64 if kind is float else np.int64)

    steps = 1 + max((row.get("step", 0) for row in tasks), default=0)
    values: dict[str, Any] = {
        "names": names,
        "threads": threads,
        "layers": layers,
        "steps": tuple(TrainingStep(f"step {i}", 0.0) for i in range(steps)),
        "name": np.array([names.index(row["name"]) for row in tasks], np.int64),
        "kind": np.array(
            [row.get("kind", defaults.get(row["thread"].kind, TaskKind.COMMUNICATION)) for row in tasks], np.int64
        ),
        "thread": np.array([threads.index(row["thread"]) for row in tasks], np.int64),
        "duration_us": column("duration_us", 0, float),
        "gap_us": column("gap_us", 0, float),
        "layer": np.array([layers.index(row["layer"]) if "layer" in row else NONE for row in tasks], np.int64),
        "phase": column("phase", Phase.NONE),
        "step": column("step", 0),
        "mark": column("mark", Mark.NONE),
        "operator": column("operator", NONE),
        "event": column("event", NONE),
        "bytes": column("bytes", np.nan, float),
        "priority": column("priority", 0),
        "recorded_us": column("recorded_us", np.nan, float),
        "edge_source": np.array([edge[0] for edge in edges], np.int64),
        "edge_target": np.array([edge[1] for edge in edges], np.int64),
        "edge_kind": np.array([edge[2] for edge in edges], np.int64),
        "edge_lag_us": np.array([edge[3] if len(edge) > 3 else 0.0 for edge in edges], np.float64),
    }
    return TaskGraph(**{**values, **fields})


def launched(name: str, duration_us: float, *, call_us: float = 1.0, stream: Thread = STREAM, **columns: Any) -> Any:
    """A launch on the main thread and its kernel, two tasks in a row: pair them with (i, i + 1, LAUNCH)."""
    shared = {key: columns[key] for key in ("phase", "layer", "step") if key in columns}
    return [task("cudaLaunchKernel", MAIN, call_us, **shared), task(name, stream, duration_us, **columns)]


def pairs(count: int) -> list[tuple[int, int, Dependency]]:
    """Launch edges of `count` consecutive :func:`launched` pairs."""
    return [(2 * i, 2 * i + 1, Dependency.LAUNCH) for i in range(count)]
