"""Traces of a job's ranks to one graph: read, paired, aligned, cut, joined."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.graph.ranks import joined
from daydream.ranks.clocks import Clocks, align, as_recorded
from daydream.ranks.collectives import Collectives, find_collectives
from daydream.ranks.cutting import cut, on_common_clock, roles
from daydream.ranks.files import Roll, read_rank, trace_files
from daydream.ranks.pairing import Meetings, pair
from daydream.tasks.build import build_graph
from daydream.trace.text import no_collection
from daydream.trace.trace import Floats, Trace

#: Files from which several processes read: with fewer, starting them takes longer than they save.
MANY_FILES = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Rank:
    """A rank as recorded.

    Attributes:
        number: its rank.
        path: its file.
        host: whose clock it has.
        base_us, origin_us: when its recording began, by that clock: the sum of both, which a float would round.
        graph: its own graph.
        collectives: those of the graph.
    """

    number: int
    path: Path
    host: str
    base_us: float
    origin_us: float
    graph: TaskGraph
    collectives: Collectives


@dataclass(frozen=True, eq=False, kw_only=True)
class Merged:
    """A job's ranks in one graph.

    Attributes:
        graph: all ranks; `graph.ranks` names them.
        paths: file of every rank.
        meetings: which collectives are the same.
        clocks: how times of a rank become times of the graph.
        measured_us: length of every step (column) on every rank (row), in the common clock; NaN where it has none.
        aligned: whether clocks were aligned, or taken as they are.
    """

    graph: TaskGraph
    paths: tuple[Path, ...]
    meetings: Meetings
    clocks: Clocks
    measured_us: Floats
    aligned: bool


def rank_of(trace: Trace, number: int, path: Path, host: str) -> Rank:
    """A rank from its trace."""
    graph = build_graph(replace(trace, steps_by="none"))
    return Rank(
        number=number,
        path=path,
        host=host,
        base_us=trace.base_us,
        origin_us=trace.origin_us,
        graph=graph,
        collectives=find_collectives(graph),
    )


def read_ranks(
    paths: Sequence[Path],
    *,
    hosts: int = 0,
    partial: bool = False,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Rank]:
    """All ranks, in order of their numbers.

    Args:
        paths: files, or folders of them.
        hosts: how many ranks share a host, rank by rank; 0 for what the files say.
        partial: whether ranks may be missing.
        jobs: processes that read, where there are many files.
        progress: called with how many files are read, and how many there are.

    Raises:
        InputError: a file cannot be used, two are of one rank, or ranks are missing.
    """
    files = trace_files(paths)
    ranks, roll = [], Roll()
    with no_collection():
        for count, rank in enumerate(_read(files, hosts, jobs), start=1):
            trace = rank.graph.trace
            roll.add(rank.number, rank.path, trace.distributed.get("world_size") if trace is not None else None)
            ranks.append(rank)
            if progress is not None:
                progress(count, len(files))
    if not partial:
        roll.check_all()
    return sorted(ranks, key=lambda rank: rank.number)


def _read(files: Sequence[Path], hosts: int, jobs: int) -> Iterator[Rank]:
    """The ranks of these files, in their order."""
    if jobs == 1 or len(files) < MANY_FILES:
        yield from map(_rank, files, repeat(hosts))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(files)), mp_context=context, initializer=_leave_interrupts) as pool:
        try:
            yield from pool.map(_rank, files, repeat(hosts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _leave_interrupts() -> None:
    # Ctrl-C reaches the whole process group; the one that was called tells of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _rank(path: Path, hosts: int) -> Rank:
    with no_collection():
        file = read_rank(path, hosts)
        return rank_of(file.trace, file.rank, file.path, file.host)


def merge(ranks: Sequence[Rank], *, aligned: bool = True) -> Merged:
    """One graph of these ranks.

    Args:
        ranks: in order of their numbers.
        aligned: whether clocks are aligned first, or taken as they are.

    Raises:
        InputError: the ranks' collectives do not fit each other, or their clocks do not.
    """
    paths = tuple(rank.path for rank in ranks)
    steps = [[step.name for step in rank.graph.steps] for rank in ranks]
    meetings = pair([rank.number for rank in ranks], [rank.collectives for rank in ranks], steps, paths)
    origins = np.array([rank.base_us - ranks[0].base_us + rank.origin_us for rank in ranks])
    clocks = as_recorded(origins, [rank.host for rank in ranks])
    if aligned:
        clocks = align(meetings, clocks, paths)
    parts = roles(meetings, clocks)
    order = np.argsort(meetings.rank, kind="stable")
    bounds = np.searchsorted(meetings.rank[order], np.arange(len(ranks) + 1))
    graphs = []
    for index, rank in enumerate(ranks):
        graph = on_common_clock(rank.graph, float(clocks.shift_us[index]), float(clocks.rate[index]))
        graphs.append(cut(graph, rank.collectives, meetings, order[bounds[index] : bounds[index + 1]], parts))
    names = list(dict.fromkeys(name for names_of_rank in steps for name in names_of_rank))
    measured = np.full((len(ranks), len(names)), np.nan)
    for index, rank in enumerate(ranks):
        for step in rank.graph.steps:
            measured[index, names.index(step.name)] = step.measured_us * clocks.rate[index]
    return Merged(
        graph=joined(graphs, [rank.number for rank in ranks]),
        paths=paths,
        meetings=meetings,
        clocks=clocks,
        measured_us=measured,
        aligned=aligned,
    )
