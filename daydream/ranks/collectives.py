"""The collectives of one rank's recording: which process group, what they do, how many bytes, from when until when.

PyTorch tells them in several ways. Since 2.3 a kernel of NCCL has the arguments of its ``record_param_comms`` (group's
name and ranks, elements, dtype; sequence numbers since 2.12). Before that the calls around its launch have them
(2.1, 2.2), or only a name such as ``nccl:all_reduce`` (1.9 to 2.0). Gloo's run on the host, as ranges such as
``gloo:all_reduce`` that begin with the call and end with the work.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from daydream.graph.graph import Mark, TaskGraph, TaskKind
from daydream.passes.basis.communication import collective_arguments, message_bytes
from daydream.trace.collectives import collective_word
from daydream.trace.trace import NONE, Flags, Floats, Ints, argument


class Kind(IntEnum):
    """What a collective does. Names are those of ``torch.distributed``."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    BARRIER = 4
    BROADCAST = 5
    SCATTER = 6
    GATHER = 7
    REDUCE = 8
    SEND = 9
    RECV = 10
    OTHER = 11

    @property
    def text(self) -> str:
        """As people call it."""
        return self.name.lower().replace("_", "-")

    @property
    def symmetric(self) -> bool:
        """Whether no member can end before every member has begun."""
        return self <= Kind.BARRIER

    @property
    def from_root(self) -> bool:
        """Whether one member sends, and the others receive."""
        return self in (Kind.BROADCAST, Kind.SCATTER)

    @property
    def to_root(self) -> bool:
        """Whether one member receives, and the others send."""
        return self in (Kind.GATHER, Kind.REDUCE)

    @property
    def point_to_point(self) -> bool:
        """Whether a message goes from one rank to one other."""
        return self in (Kind.SEND, Kind.RECV)


#: Kinds by NCCL's words.
_KINDS = {kind.name.lower().replace("_", ""): kind for kind in Kind}


@dataclass(frozen=True)
class Group:
    """A process group: its name, and its ranks where the trace tells them, ascending."""

    name: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Collectives:
    """The collectives of a rank in order of begin, one entry each. Times are microseconds in the rank's own trace.

    Attributes:
        groups: the process groups.
        group: index into `groups`.
        kind: a :class:`Kind`.
        row: task of the rank's graph.
        start_us: when this rank arrived.
        end_us: when it was done.
        bytes: what the rank puts in; NaN where the trace does not tell.
        sequence: the group's sequence number; -1 where the trace does not tell.
        step: index of the step of the call; -1 without.
        root: rank within the group that sends to all or receives from all; -1 where that is unknown.
        peer: the other rank of a message; -1 elsewhere.
    """

    groups: tuple[Group, ...]
    group: Ints
    kind: Ints
    row: Ints
    start_us: Floats
    end_us: Floats
    bytes: Floats
    sequence: Ints
    step: Ints
    root: Ints
    peer: Ints

    def __len__(self) -> int:
        return len(self.row)


def find_collectives(graph: TaskGraph) -> Collectives:
    """The collectives of a rank's graph, as :func:`daydream.tasks.build.build_graph` makes it."""
    trace = graph.trace
    rows = np.flatnonzero(_is_collective(graph))
    if trace is None:
        rows = rows[:0]
    recorded = began(graph)
    rows = rows[np.argsort(recorded[rows], kind="stable")]
    told = [collective_arguments(graph, row) for row in rows.tolist()]
    streams = _streams(graph, rows)
    group_of: dict[Group, int] = {}
    group = [group_of.setdefault(_group(each, streams[i], graph), len(group_of)) for i, each in enumerate(told)]
    kinds = [_kind(each, graph.text(row)) for each, row in zip(told, rows.tolist(), strict=True)]
    start = recorded[rows]
    return Collectives(
        groups=tuple(group_of),
        group=np.array(group, np.int64),
        kind=np.array(kinds, np.int64),
        row=rows,
        start_us=start,
        end_us=start + graph.duration_us[rows],
        bytes=message_bytes(graph, rows),
        sequence=np.array([_whole(each.get("Seq")) for each in told], np.int64),
        step=graph.step[rows],
        root=np.array([_root(each, kind) for each, kind in zip(told, kinds, strict=True)], np.int64),
        peer=np.array([_peer(each, kind) for each, kind in zip(told, kinds, strict=True)], np.int64),
    )


def began(graph: TaskGraph) -> Floats:
    """When every task began in the recording; one that stands for a gap when the task before it had ended."""
    before = np.full(len(graph), NONE)
    has_next = graph.following != NONE
    before[graph.following[has_next]] = np.flatnonzero(has_next)
    ends = graph.recorded_us + graph.duration_us
    made = np.isnan(graph.recorded_us) & (graph.kind == TaskKind.COMMUNICATION) & (before != NONE)
    return np.where(made, ends[before], graph.recorded_us)


def _is_collective(graph: TaskGraph) -> Flags:
    """Kernels of a collective, and what threads of gloo move data with."""
    return (graph.on_gpu | graph.on_cpu) & (graph.kind == TaskKind.COMMUNICATION) & (graph.mark == Mark.NONE)


def _streams(graph: TaskGraph, rows: Ints) -> list[int]:
    """The number of each task's thread among those with collectives: a communicator has a stream of its own."""
    order: dict[int, int] = {}
    return [order.setdefault(thread, len(order)) for thread in graph.thread[rows].tolist()]


def _kind(told: dict[str, Any], text: str) -> Kind:
    return _KINDS.get(collective_word(told.get("Collective name"), told.get("call"), text), Kind.OTHER)


def _group(told: dict[str, Any], stream: int, graph: TaskGraph) -> Group:
    assert graph.trace is not None
    name = argument(told, "Process Group Name", "Process Group ID", "Process Group Description")
    listed = graph.trace.distributed.get("pg_config")
    known = _configured(listed, str(name)) if name is not None else ()
    ranks = _ranks(told) or known
    if name is None and not ranks:
        # Older profilers name no group; every communicator has a stream of its own.
        return Group(f"stream {stream}" if graph.on_gpu.any() else "gloo")
    return Group(str(name if name is not None else "group"), ranks)


def _ranks(told: dict[str, Any]) -> tuple[int, ...]:
    """Ranks of a group as a list, cut short with dots in large groups, or as a first one and a stride."""
    text = told.get("Process Group Ranks")
    if isinstance(text, str) and "..." not in text:
        try:
            text = json.loads(text)
        except ValueError:
            text = None
    if isinstance(text, list) and text and all(type(rank) is int and rank >= 0 for rank in text):
        return tuple(sorted(text))
    first, stride = _whole(told.get("Global rank start")), _whole(told.get("Global rank stride"))
    size = _whole(told.get("Group size"))
    if first >= 0 and size > 0 and (stride > 0 or size == 1):
        return tuple(range(first, first + max(stride, 1) * size, max(stride, 1)))
    return ()


def _configured(listed: Any, name: str) -> tuple[int, ...]:
    """Ranks of the group of this name in the head of the trace."""
    for entry in listed if isinstance(listed, list) else ():
        ranks = entry.get("ranks") if isinstance(entry, dict) and str(entry.get("pg_name")) == name else None
        if isinstance(ranks, list) and ranks and all(type(rank) is int and rank >= 0 for rank in ranks):
            return tuple(sorted(ranks))
    return ()


def _root(told: dict[str, Any], kind: Kind) -> int:
    return _whole(told.get("Rank")) if kind.from_root or kind.to_root else NONE


def _peer(told: dict[str, Any], kind: Kind) -> int:
    spelling = {Kind.SEND: "Dst Rank", Kind.RECV: "Src Rank"}.get(kind)
    return _whole(told.get(spelling)) if spelling is not None else NONE


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else NONE
