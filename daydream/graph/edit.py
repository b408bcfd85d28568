"""Insert and remove (thesis 4.4.4, figure 4.4): many changes collected, applied at once to a new graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, Thread
from daydream.trace.trace import NONE, Ints

_KIND_OF_COLUMN = {
    "name": int,
    "kind": int,
    "thread": int,
    "duration_us": float,
    "gap_us": float,
    "layer": int,
    "phase": int,
    "step": int,
    "mark": int,
    "operator": int,
    "event": int,
    "bytes": float,
    "priority": int,
    "recorded_us": float,
}


@dataclass
class Edit:
    """Changes to a graph. Rows are those of `graph`; an added task gets an id from `len(graph)` on, good as a row
    in every later call. Nothing happens before :meth:`apply`.

    Removing a task keeps what depended on it in order: edges out of it start at the task before it on its thread
    instead, edges into it end at the task after it. A launch edge ends with the task it launches.
    """

    graph: TaskGraph
    _added: list[dict[str, Any]] = field(init=False, default_factory=list)
    _after: dict[int, list[int]] = field(init=False, default_factory=dict)
    _before: dict[int, list[int]] = field(init=False, default_factory=dict)
    _loose: list[int] = field(init=False, default_factory=list)
    _anchor: dict[int, list[int]] = field(init=False, default_factory=dict)
    _removed: list[Ints] = field(init=False, default_factory=list)
    _edges: list[tuple[int, int, int, float]] = field(init=False, default_factory=list)
    _dropped: list[Ints] = field(init=False, default_factory=list)
    _names: dict[str, int] = field(init=False, default_factory=dict)
    _threads: list[Thread] = field(init=False, default_factory=list)
    _columns: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._names = {text: i for i, text in enumerate(self.graph.names)}
        self._threads = list(self.graph.threads)

    # Threads

    def thread(self, thread: Thread) -> int:
        """The index of this thread, added where the graph has none like it."""
        if thread not in self._threads:
            self._threads.append(thread)
        return self._threads.index(thread)

    # Insert

    def add(
        self,
        name: str,
        kind: TaskKind,
        duration_us: float,
        *,
        after: int | None = None,
        before: int | None = None,
        thread: int | None = None,
        gap_us: float = 0.0,
        phase: Phase | int = Phase.NONE,
        layer: int = NONE,
        step: int | None = None,
        operator: int = NONE,
        bytes: float = np.nan,
        priority: int = 0,
    ) -> int:
        """Adds a task and returns its id.

        It stands right after task `after` (or before `before`) on that task's thread, and takes its step. With
        `thread` it goes to that thread: next to the anchor in row order, at the end without anchor. Several tasks
        added after the same one run in the order in which they were added.

        Raises:
            ValueError: a negative or non-finite duration; neither anchor nor thread.
        """
        if not (np.isfinite(duration_us) and duration_us >= 0):
            raise ValueError(f"{name}: a duration must be a finite number of microseconds, 0 or more")
        neighbour = after if after is not None else before
        if neighbour is None and thread is None:
            raise ValueError(f"{name}: needs a neighbouring task, or a thread")
        identity = len(self.graph) + len(self._added)
        self._added.append(
            {
                "name": self._names.setdefault(name, len(self._names)),
                "kind": int(kind),
                "thread": thread if thread is not None else self._of(neighbour, "thread"),
                "duration_us": duration_us,
                "gap_us": gap_us,
                "layer": layer,
                "phase": int(phase),
                "step": step if step is not None else (self._of(neighbour, "step") if neighbour is not None else NONE),
                "mark": int(Mark.NONE),
                "operator": operator,
                "event": NONE,
                "bytes": bytes,
                "priority": priority,
                "recorded_us": np.nan,
            }
        )
        self._place(identity, after, before)
        return identity

    def add_kernel(
        self,
        name: str,
        duration_us: float,
        *,
        after: int,
        launch_us: float,
        launch_after: int | None = None,
        kind: TaskKind = TaskKind.KERNEL,
        launch_name: str = "cudaLaunchKernel",
        **columns: Any,
    ) -> int:
        """Adds a GPU task behind GPU task `after`, with the CPU call of `launch_us` that launches it (figure 4.4b).

        The call stands behind the launch of `after` (or behind CPU task `launch_after`). Returns the GPU task's id.
        """
        task = self.add(name, kind, duration_us, after=after, **columns)
        caller = launch_after if launch_after is not None else self._launch_of(after)
        if caller != NONE:
            call = self.add(launch_name, TaskKind.CPU, launch_us, after=caller, **_without_bytes(columns))
            self.depend(call, task, Dependency.LAUNCH)
        return task

    def depend(self, source: int, target: int, kind: Dependency, lag_us: float = 0.0) -> None:
        """Lets `target` start no earlier than `lag_us` after `source` ended."""
        self._edges.append((source, target, int(kind), lag_us))

    def drop_edges(self, edges: Ints) -> None:
        """Forgets these edges (positions in the graph's edge columns)."""
        self._dropped.append(np.asarray(edges, np.int64))

    # Remove and change

    def remove(self, rows: Ints | Sequence[int], *, launches: bool = False) -> None:
        """Removes tasks; with `launches` also the CPU calls that launch them and nothing else. Marks stay."""
        rows = np.asarray(rows, np.int64)
        self._removed.append(rows)
        if launches and len(rows):
            edges = self.graph.edge_kind == Dependency.LAUNCH
            calls, tasks = self.graph.edge_source[edges], self.graph.edge_target[edges]
            gone = np.isin(tasks, rows)
            # A call that launches several tasks stays as long as one of them does.
            self._removed.append(np.setdiff1d(calls[gone], calls[~gone]))

    def set(self, column: str, rows: Ints | Sequence[int], values: Any) -> None:
        """Gives rows of the graph other values in a column (``gap_us``, ``priority``, ``thread``...)."""
        changed = self._columns.get(column)
        if changed is None:
            changed = self._columns[column] = getattr(self.graph, column).copy()
        changed[np.asarray(rows, np.int64)] = values

    # Result

    def apply(self) -> TaskGraph:
        """The new graph."""
        graph, count = self.graph, len(self.graph) + len(self._added)
        remains = np.ones(count, np.bool_)
        for rows in self._removed:
            remains[rows] = False
        remains[: len(graph)] |= graph.mark != Mark.NONE
        order = self._order()
        columns: dict[str, Any] = {
            name: np.concatenate(
                [
                    self._columns.get(name, getattr(graph, name)),
                    np.array([task[name] for task in self._added], np.float64 if type_ is float else np.int64),
                ]
            )
            for name, type_ in _KIND_OF_COLUMN.items()
        }
        source, target, kind, lag = self._all_edges()
        source, target, alive = _slid(columns["thread"], self._unordered(), order, remains, source, target, kind)
        order = order[remains[order]]
        place = np.full(count, NONE)
        place[order] = np.arange(len(order))
        return replace(
            graph,
            **{name: values[order] for name, values in columns.items()},
            names=tuple(self._names),
            threads=tuple(self._threads),
            edge_source=place[source[alive]],
            edge_target=place[target[alive]],
            edge_kind=kind[alive],
            edge_lag_us=lag[alive],
        )

    # Inner workings

    def _of(self, task: int | None, column: str) -> int:
        assert task is not None
        if task >= len(self.graph):
            return int(self._added[task - len(self.graph)][column])
        return int(getattr(self.graph, column)[task])

    def _launch_of(self, task: int) -> int:
        if task < len(self.graph):
            return int(self.graph.launch[task])
        for source, target, kind, _ in reversed(self._edges):
            if target == task and kind == Dependency.LAUNCH:
                return source
        return NONE

    def _place(self, identity: int, after: int | None, before: int | None) -> None:
        if after is None and before is None:
            places, position = self._loose, len(self._loose)
        elif after is not None and after >= len(self.graph):
            places = self._anchor[after]
            position = places.index(after) + 1
        elif before is not None and before >= len(self.graph):
            places = self._anchor[before]
            position = places.index(before)
        elif after is not None:
            places = self._after.setdefault(int(after), [])
            position = len(places)
        else:
            assert before is not None
            places = self._before.setdefault(int(before), [])
            position = len(places)
        places.insert(position, identity)
        self._anchor[identity] = places

    def _order(self) -> Ints:
        """Old rows and added ids in their new row order."""
        size = len(self.graph)
        added = len(self._added)
        if not added:
            return np.arange(size)
        # Row of the anchor, then before or behind it, then rank among those at the same place.
        key = np.zeros((3, size + added))
        key[2, :size] = np.arange(size)
        for side, anchors in ((-1, self._before), (1, self._after)):
            for row, places in anchors.items():
                key[2, places] = row
                key[1, places] = side
                key[0, places] = np.arange(len(places))
        key[2, self._loose] = size
        key[0, self._loose] = np.arange(len(self._loose))
        return np.lexsort(key)

    def _all_edges(self) -> tuple[Ints, Ints, Ints, Any]:
        graph = self.graph
        keep = np.ones(len(graph.edge_source), np.bool_)
        for edges in self._dropped:
            keep[edges] = False
        added = np.array(self._edges, np.float64).reshape(-1, 4)
        return (
            np.concatenate([graph.edge_source[keep], added[:, 0].astype(np.int64)]),
            np.concatenate([graph.edge_target[keep], added[:, 1].astype(np.int64)]),
            np.concatenate([graph.edge_kind[keep], added[:, 2].astype(np.int64)]),
            np.concatenate([graph.edge_lag_us[keep], added[:, 3]]),
        )

    def _unordered(self) -> Any:
        return np.array([not thread.ordered for thread in self._threads])


def _without_bytes(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns that a launch shares with the task it launches: step, layer, phase and operator, not the size."""
    return {name: value for name, value in columns.items() if name in ("step", "layer", "phase", "operator")}


def _slid(
    thread: Ints, unordered: Any, order: Ints, remains: Any, source: Ints, target: Ints, kind: Ints
) -> tuple[Ints, Ints, Any]:
    """Edges of removed tasks moved to their neighbours on the thread; `alive` says which edges remain."""
    if remains.all():
        return source, target, np.ones(len(source), np.bool_)
    before, after = _remaining_neighbours(thread, order, remains)
    gone_source, gone_target = ~remains[source], ~remains[target]
    source = np.where(gone_source, before[source], source)
    moved_target = np.where(gone_target, after[target], target)
    alive = ~(gone_source & gone_target) & (source != NONE) & (moved_target != NONE)
    alive &= ~(gone_target & (kind == Dependency.LAUNCH))
    # A channel has no order that could stand in for a removed task.
    alive &= ~(gone_source & unordered[thread[source]]) & ~(gone_target & unordered[thread[target]])
    return source, moved_target, alive


def _remaining_neighbours(thread: Ints, order: Ints, remains: Any) -> tuple[Ints, Ints]:
    """For every task the nearest kept one before and behind it on its thread, -1 without."""
    rows = order[np.argsort(thread[order], kind="stable")]
    position = np.arange(len(rows))
    alive = remains[rows]
    lane = thread[rows]
    position_before = np.maximum.accumulate(np.where(alive, position, -1))
    position_after = np.minimum.accumulate(np.where(alive, position, len(rows))[::-1])[::-1]
    before, after = np.full(len(rows), NONE), np.full(len(rows), NONE)
    has_neighbour = position_before >= 0
    has_neighbour[has_neighbour] = lane[position_before[has_neighbour]] == lane[has_neighbour]
    before[rows[has_neighbour]] = rows[position_before[has_neighbour]]
    has_neighbour = position_after < len(rows)
    has_neighbour[has_neighbour] = lane[position_after[has_neighbour]] == lane[has_neighbour]
    after[rows[has_neighbour]] = rows[position_after[has_neighbour]]
    return before, after
