"""The kernel-granularity dependency graph (thesis 4.4): tasks as columns, dependencies as edge lists.

A graph never changes: every primitive returns a new one, built through :class:`daydream.graph.edit.Edit`. Rows of one
ordered thread stand in execution order, so the sequential dependencies of a CPU thread and of a CUDA stream (the
first two kinds of 4.4.2) follow from the rows; only the other kinds are stored as edges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daydream.graph.memory import HeldMemory
from daydream.trace.trace import NONE, Floats, Ints, Trace


class TaskKind(IntEnum):
    """The task types of 4.4.2; copies and sets are told apart from kernels."""

    CPU = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    DATA_LOADING = 4
    COMMUNICATION = 5


class Phase(IntEnum):
    """Phase of a training iteration (4.2)."""

    NONE = -1
    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


class Dependency(IntEnum):
    """Kinds of edges: the five of 4.4.2, and the hand-over between CPU threads that autograd needs."""

    CPU_ORDER = 0
    STREAM_ORDER = 1
    LAUNCH = 2
    SYNC = 3
    COMMUNICATION = 4
    HANDOFF = 5


class Mark(IntEnum):
    """Tasks without duration at which a step is measured. No primitive removes them."""

    NONE = 0
    STEP_BEGIN = 1
    STEP_END = 2


class ThreadKind(IntEnum):
    """The execution threads of 4.4.2."""

    CPU = 0
    STREAM = 1
    CHANNEL = 2


@dataclass(frozen=True, kw_only=True)
class Thread:
    """An execution thread. On an `ordered` one tasks run in row order; on another (a communication channel) the
    scheduler picks among those that are ready. `device` is -1 except for streams. A thread that `polls` looks at
    something by the clock, so its last task says nothing about when the training is done. A channel of process -1
    belongs to no rank: on it the ranks of a joined graph meet (:mod:`daydream.graph.ranks`)."""

    kind: ThreadKind
    label: str
    number: int = 0
    device: int = NONE
    process: int = 0
    polls: bool = False

    @property
    def ordered(self) -> bool:
        """Whether its tasks run in row order."""
        return self.kind is not ThreadKind.CHANNEL

    @property
    def is_meeting(self) -> bool:
        """Whether ranks meet on it."""
        return self.kind is ThreadKind.CHANNEL and self.process == NONE


class Boards(NamedTuple):
    """For every thread the number of its board, -1 where it is no stream; and names of the boards."""

    of_thread: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class TrainingStep:
    """A training step as recorded. `full` is false where the recording began or ended inside it."""

    name: str
    measured_us: float
    full: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskGraph:
    """Tasks (one entry a row in every column) and their dependencies.

    `duration_us` is how long a task occupies its thread, `gap_us` how long its thread then stays busy with what no
    event records (4.4.2). An edge lets its target start `edge_lag_us` after its source ended. `recorded_us` is
    the start in the trace (NaN for inserted tasks): for display and for building, never read by the simulation.
    `operator` and `event` are rows of `trace` (-1 without): the innermost CPU operator a task belongs to, and the
    event it was made from. `priority` orders ready tasks of a channel, higher first.
    """

    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    layers: tuple[str, ...]
    steps: tuple[TrainingStep, ...]
    name: Ints
    kind: Ints
    thread: Ints
    duration_us: Floats
    gap_us: Floats
    layer: Ints
    phase: Ints
    step: Ints
    mark: Ints
    operator: Ints
    event: Ints
    bytes: Floats
    priority: Ints
    recorded_us: Floats
    edge_source: Ints
    edge_target: Ints
    edge_kind: Ints
    edge_lag_us: Floats
    queue_depth: int = 0
    """GPU tasks that may wait for their start before the next launch blocks; 0 = no limit."""
    trace: Trace | None = None
    enclosing: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """For each row of `trace`, the innermost CPU event around it on its thread (-1 without)."""
    warnings: tuple[str, ...] = ()
    workers: int = 0
    """Among how many workers the all-reduces are that a pass inserted or priced; 0 where none did."""
    memory: HeldMemory | None = None
    """What a step holds, as far as a pass has changed it; None before any has."""
    ranks: tuple[int, ...] = ()
    """The ranks of a distributed job that the graph joins, each the `process` of its threads; empty for one process."""

    def __len__(self) -> int:
        return len(self.name)

    # What a task is

    def text(self, row: int) -> str:
        """The task's name."""
        return self.names[self.name[row]]

    @cached_property
    def on_gpu(self) -> NDArray[np.bool_]:
        """Which tasks run on a stream."""
        return self.thread_kinds[self.thread] == ThreadKind.STREAM

    @cached_property
    def on_cpu(self) -> NDArray[np.bool_]:
        """Which tasks run on a CPU thread."""
        return self.thread_kinds[self.thread] == ThreadKind.CPU

    @cached_property
    def working(self) -> NDArray[np.bool_]:
        """Which tasks are part of the training: all but those of threads that poll."""
        return ~np.array([thread.polls for thread in self.threads], np.bool_)[self.thread]

    @cached_property
    def thread_kinds(self) -> Ints:
        """The :class:`ThreadKind` of every thread."""
        return np.array([t.kind for t in self.threads], np.int64)

    @cached_property
    def boards(self) -> Boards:
        """The boards that streams belong to; ranks may call theirs by the same number."""
        keys = [(thread.process if self.ranks else 0, thread.device) for thread in self.threads]
        boards = sorted({key for key in keys if key[1] != NONE})
        number = {key: place for place, key in enumerate(boards)}
        names = [f"rank {rank}, GPU {device}" if self.ranks else f"GPU {device}" for rank, device in boards]
        return Boards(np.array([number.get(key, NONE) for key in keys], np.int64), tuple(names))

    @cached_property
    def launch(self) -> Ints:
        """For each task the CPU task that launches it, -1 without."""
        rows = np.full(len(self), NONE)
        edges = self.edge_kind == Dependency.LAUNCH
        rows[self.edge_target[edges]] = self.edge_source[edges]
        return rows

    def operators(self, row: int) -> list[int]:
        """The trace rows of the CPU events around a task, innermost first."""
        events, event = [], int(self.operator[row])
        while event != NONE:
            events.append(event)
            event = int(self.enclosing[event])
        return events

    @cached_property
    def step_marks(self) -> Ints:
        """Rows of the marks that steps are measured by; of several ranks those of the first."""
        rows = np.flatnonzero(self.mark != Mark.NONE)
        if not self.ranks:
            return rows
        processes = np.array([thread.process for thread in self.threads], np.int64)
        return rows[processes[self.thread[rows]] == self.ranks[0]]

    # Thread order

    @cached_property
    def by_thread(self) -> Ints:
        """All rows, thread by thread, in execution order within each."""
        return np.argsort(self.thread, kind="stable")

    @cached_property
    def following(self) -> Ints:
        """For each task the next one of its thread where that thread is ordered, -1 without."""
        rows = self.by_thread
        after = np.full(len(self), NONE)
        if len(rows) > 1:
            same = self.thread[rows[1:]] == self.thread[rows[:-1]]
            same &= self.thread_kinds[self.thread[rows[1:]]] != ThreadKind.CHANNEL
            after[rows[:-1][same]] = rows[1:][same]
        return after

    @cached_property
    def queue(self) -> tuple[Ints, Ints]:
        """Edges by which a full launch queue holds back the CPU: launches i wait until task i - depth may start.

        Returns sources (GPU tasks) and targets (launches). A launch call returns only when less than
        `queue_depth` earlier GPU tasks of its stream are waiting; the one that leaves the queue does so when its
        predecessor on the stream ends. Streams have queues of their own: a collective that waits for its partners
        holds nothing back that other streams have begun since. Counted anew for every graph, since passes add and
        remove launches.
        """
        edges = np.flatnonzero(self.edge_kind == Dependency.LAUNCH)
        if not self.queue_depth or len(edges) <= self.queue_depth:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        streams = self._streams[self.thread[self.edge_target[edges]]]
        sources, targets = [], []
        for stream in np.unique(streams):
            launching = edges[streams == stream]
            launching = launching[np.argsort(self.edge_source[launching], kind="stable")]
            launches, tasks = self.edge_source[launching], self.edge_target[launching]
            # One call may launch many tasks (a CUDA graph); it takes one place.
            _, first = np.unique(launches, return_index=True)
            launches, tasks = launches[first], tasks[first]
            depth = self.queue_depth + 1
            held, holding = launches[depth:], tasks[:-depth]
            # What a damaged trace shows to start later can't have left the queue before.
            sound = holding < held
            sources.append(holding[sound])
            targets.append(held[sound])
        return np.concatenate(sources), np.concatenate(targets)

    @property
    def _streams(self) -> Ints:
        """For every thread a number of its stream: tasks of one stream that overlap stand on several threads."""
        number: dict[tuple[int, int, int], int] = {}
        keys = [(thread.process, thread.device, thread.number) for thread in self.threads]
        return np.array([number.setdefault(key, len(number)) for key in keys], np.int64)

    def dependencies(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Every dependency: source rows, target rows, kind (:class:`Dependency`) and lag in microseconds.

        The stored edges come first, then the sequential ones of threads and streams.
        """
        sources = np.flatnonzero(self.following != NONE)
        on_stream = self.on_gpu[sources]
        kinds = np.where(on_stream, Dependency.STREAM_ORDER, Dependency.CPU_ORDER)
        return (
            np.concatenate([self.edge_source, sources]),
            np.concatenate([self.edge_target, self.following[sources]]),
            np.concatenate([self.edge_kind, kinds]),
            np.concatenate([self.edge_lag_us, np.zeros(len(sources))]),
        )

    # Select (4.4.4)

    def select(
        self,
        *,
        kind: TaskKind | Iterable[TaskKind] | None = None,
        name: str | None = None,
        layer: str | None = None,
        phase: Phase | None = None,
        stream: int | None = None,
        step: int | None = None,
        gpu: bool | None = None,
        where: Callable[[TaskGraph, int], bool] | None = None,
    ) -> Ints:
        """Rows that fit every condition given, in row order; marks never do.

        `name` and `layer` are regular expressions searched for anywhere in the text, regardless of case; `stream`
        is a stream number, `step` an index of `steps`; `where` is called with graph and row, last.

        Raises:
            re.error: `name` or `layer` is no regular expression.
        """
        chosen = self.mark == Mark.NONE
        if kind is not None:
            kinds = [kind] if isinstance(kind, TaskKind) else list(kind)
            chosen &= np.isin(self.kind, kinds)
        if gpu is not None:
            chosen &= self.on_gpu == gpu
        if phase is not None:
            chosen &= self.phase == phase
        if step is not None:
            chosen &= self.step == step
        if stream is not None:
            numbers = np.array([t.number if t.kind is ThreadKind.STREAM else NONE for t in self.threads])
            chosen &= numbers[self.thread] == stream
        if name is not None:
            chosen &= matching(self.names, name)[self.name]
        if layer is not None:
            # The last entry is for tasks without layer: -1 finds it.
            chosen &= np.append(matching(self.layers, layer), False)[self.layer]
        rows = np.flatnonzero(chosen)
        if where is not None:
            rows = np.array([row for row in rows if where(self, int(row))], np.int64)
        return rows

    # Shrink, scale, replace

    def without_waiting(self) -> TaskGraph:
        """The graph with a GPU and links that take no time: what the CPU takes by itself."""
        on_cpu = self.on_cpu
        between = on_cpu[self.edge_source] & on_cpu[self.edge_target]
        return replace(
            self,
            duration_us=np.where(on_cpu, self.duration_us, 0.0),
            gap_us=np.where(on_cpu, self.gap_us, 0.0),
            edge_lag_us=np.where(between, self.edge_lag_us, 0.0),
            queue_depth=0,
        )

    def with_durations(self, rows: Ints, duration_us: Floats | float) -> TaskGraph:
        """The graph with other durations for these rows (scalar, or one for each).

        Raises:
            ValueError: a duration is negative or not finite.
        """
        changed = self.duration_us.copy()
        changed[rows] = duration_us
        if not (np.isfinite(changed).all() and (changed >= 0).all()):
            raise ValueError("a duration must be a finite number of microseconds, 0 or more")
        return replace(self, duration_us=changed)

    def scaled(self, rows: Ints, factor: Floats | float) -> TaskGraph:
        """The graph with the durations of these rows multiplied by `factor`."""
        return self.with_durations(rows, self.duration_us[rows] * factor)


def matching(texts: Sequence[str], pattern: str) -> NDArray[np.bool_]:
    """Which texts the regular expression is found in, regardless of case."""
    search = re.compile(pattern, re.IGNORECASE).search
    return np.array([search(text) is not None for text in texts], np.bool_)
