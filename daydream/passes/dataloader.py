"""Data loading moved from the main thread to worker processes."""

from __future__ import annotations

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.checks import at_least
from daydream.passes.basis.idioms import Mask
from daydream.trace.trace import NONE, Ints


@what_if("dataloader")
def dataloader(
    graph: TaskGraph,
    *,
    workers: int = 4,
    prefetch_factor: int = 2,
    handover_us: float = 200.0,
    contention: float = 1.0,
    warm: bool = True,
) -> Outcome:
    """Batches prepared by `workers` processes ahead of the main thread, as ``DataLoader(num_workers=N)`` does.

    The data-loading tasks of batch i move to worker i mod N. The main thread waits for its batch and spends
    `handover_us` on taking it: reading the queue, mapping shared memory and rebuilding tensors, 0.1 to 0.3 ms for
    a batch of a few tensors. A worker begins its next batch when it has finished one, but has at most
    `prefetch_factor` batches waiting: batch i + N * prefetch begins when batch i is taken. `contention` multiplies
    the workers' time: disk, memory bandwidth and cores that they share with each other and the main thread.

    With `warm` the recording is taken from the middle of a run: the workers are evenly out of step, worker w has
    w/N of its first batch left to do, and no batch waits in the queue. So a loader that keeps up never delays a
    step, and one that doesn't gives a batch every 1/N of its time. Batches prefetched before the recording
    would hide the second case for the first N * prefetch steps, more than most recordings have. Without `warm`
    all workers begin their first batches with the first step.

    A trace whose loader has workers already is left as it is: its tasks are the main thread's waiting.

    Raises:
        InputError: a number out of range.
    """
    at_least("workers", workers, 1)
    at_least("prefetch-factor", prefetch_factor, 1)
    at_least("handover-us", handover_us, 0.0)
    at_least("contention", contention, 0.0)
    loading = (graph.kind == TaskKind.DATA_LOADING) & graph.on_cpu
    if not loading.any():
        return Outcome(graph, ("the trace marks no data loading: nothing changes",))
    if _has_workers(graph):
        return Outcome(graph, ("the loader of this trace has worker processes already: nothing changes",))
    batches = _batches(graph, loading)
    edit = Edit(graph)
    total = float((graph.duration_us + graph.gap_us)[loading].sum())
    taken = []
    for place, rows in enumerate(batches):
        share = place / workers if warm and place < workers else 1.0
        taken.append(_move(edit, rows, place % workers, contention * share, handover_us))
    _limit(edit, batches, taken, workers * prefetch_factor)
    _begin(edit, batches[:workers], loading)
    _rehang(edit, batches, taken)
    each = total / len(batches) / 1000
    notes = (
        f"{len(batches)} batches of {each:.3f} ms moved to {workers} workers, which together give one every "
        f"{each * contention / workers:.3f} ms",
        f"the main thread keeps {handover_us:g} µs a batch",
    )
    return Outcome(edit.apply(), notes)


def _has_workers(graph: TaskGraph) -> bool:
    texts = graph.names if graph.trace is None else graph.trace.names
    return any("_MultiProcessingDataLoaderIter" in text for text in texts)


def _batches(graph: TaskGraph, loading: Mask) -> list[Ints]:
    """Data-loading tasks of each batch: those of a thread that nothing but loading separates, in row order.

    A step loads one batch: what of its loading is interrupted belongs to the same.
    """
    rows = graph.by_thread[loading[graph.by_thread]]
    fresh = (graph.step[rows[1:]] != graph.step[rows[:-1]]) | (graph.thread[rows[1:]] != graph.thread[rows[:-1]])
    unmarked = graph.step[rows[1:]] == NONE
    if len(graph.steps) <= 1:
        unmarked[:] = True
    # Without steps a batch ends where something else comes.
    fresh |= unmarked & (graph.following[rows[:-1]] != rows[1:])
    parts = np.split(rows, np.flatnonzero(fresh) + 1)
    return sorted(parts, key=lambda part: int(part[0]))


def _move(edit: Edit, rows: Ints, worker: int, factor: float, handover_us: float) -> int:
    """Moves a batch to a worker, where it takes `factor` times as long; returns the main thread's hand-over."""
    graph = edit.graph
    process = graph.threads[graph.thread[rows[0]]].process
    lane = edit.thread(
        Thread(
            kind=ThreadKind.CPU, label=f"data loader worker {worker}", number=-2 - worker, device=NONE, process=process
        )
    )
    handover = edit.add("DataLoader hand-over", TaskKind.CPU, handover_us, before=int(rows[0]))
    edit.set("thread", rows, lane)
    edit.set("duration_us", rows, graph.duration_us[rows] * factor)
    edit.set("gap_us", rows, graph.gap_us[rows] * factor)
    # The batch is done when the time behind its last recorded event is over.
    edit.depend(int(rows[-1]), handover, Dependency.HANDOFF, float(graph.gap_us[rows[-1]]) * factor)
    return handover


def _limit(edit: Edit, batches: list[Ints], taken: list[int], ahead: int) -> None:
    for place in range(ahead, len(batches)):
        edit.depend(taken[place - ahead], int(batches[place][0]), Dependency.HANDOFF)


def _begin(edit: Edit, firsts: list[Ints], loading: Mask) -> None:
    """Lets every worker begin no earlier than the main thread reached its first batch."""
    graph = edit.graph
    start = firsts[0][0]
    earlier = np.flatnonzero((graph.thread[:start] == graph.thread[start]) & ~loading[:start])
    if len(earlier):
        for rows in firsts:
            edit.depend(int(earlier[-1]), int(rows[0]), Dependency.HANDOFF, float(graph.gap_us[earlier[-1]]))


def _rehang(edit: Edit, batches: list[Ints], taken: list[int]) -> None:
    """Dependencies of other threads on loading in the main thread, moved to the hand-over.

    Only what loading itself begins, a kernel that decodes for instance, and then waits for is not waited for: the
    hand-over begins it.
    """
    graph = edit.graph
    owner = np.full(len(graph), NONE)
    for rows, handover in zip(batches, taken, strict=True):
        owner[rows] = handover
    source, target = owner[graph.edge_source], owner[graph.edge_target]
    crossing = np.flatnonzero((source != NONE) | (target != NONE))
    edit.drop_edges(crossing)
    behind = _begun(graph, owner)
    for edge in crossing.tolist():
        a = int(graph.edge_source[edge]) if source[edge] == NONE else int(source[edge])
        b = int(graph.edge_target[edge]) if target[edge] == NONE else int(target[edge])
        begun = source[edge] == NONE and a >= behind.get((b, int(graph.thread[a])), len(graph))
        if a != b and not begun:
            edit.depend(a, b, Dependency(int(graph.edge_kind[edge])), float(graph.edge_lag_us[edge]))


def _begun(graph: TaskGraph, owner: Ints) -> dict[tuple[int, int], int]:
    """For every hand-over that ``owner`` names and other ordered thread, the first task there that its loading begins,
    which all tasks after it wait for."""
    first: dict[tuple[int, int], int] = {}
    ordered = graph.thread_kinds[graph.thread[graph.edge_target]] != ThreadKind.CHANNEL
    outward = (owner[graph.edge_source] != NONE) & (owner[graph.edge_target] == NONE)
    for edge in np.flatnonzero(outward & ordered).tolist():
        task = int(graph.edge_target[edge])
        key = (int(owner[graph.edge_source[edge]]), int(graph.thread[task]))
        first[key] = min(task, first.get(key, task))
    return first
