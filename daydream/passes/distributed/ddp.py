"""Distributed data-parallel training from a trace of one worker (thesis 4.5.1, A.4, algorithm 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.communication import (
    INTERFERENCE,
    MEBIBYTE,
    all_reduce_us,
    all_reduces,
    check,
    check_not_negative,
    message_bytes,
    node_of,
    on_node_us,
    recorded_collectives,
)
from daydream.passes.basis.gradients import ParameterGradient, consumers, find_gradients, last_of_threads, tied
from daydream.trace.trace import Floats, Ints
from hal.spec.node import NodeSpec
from hal.support.errors import InputError

#: The channel on which collectives run: one, as NCCL runs those of a communicator one after another.
NETWORK = Thread(kind=ThreadKind.CHANNEL, label="network")

#: CPU time of PyTorch's call of an all-reduce: the median of 25 `c10d::allreduce_` calls on the host of a V100.
CALL_US = 42.0

#: DDP's `bucket_cap_mb`, MiB.
USUAL_BUCKET_MB = 25.0


@what_if("ddp")
@dataclass(frozen=True, kw_only=True)
class Ddp:
    """Data-parallel training with PyTorch DDP and ring all-reduces (algorithm 6).

    Gradients are gathered in buckets in the order in which they become ready, which is DDP's after its first step:
    a bucket is full as soon as it holds `first_bucket_mb` (the first) or `bucket_mb` MiB. With `bucket_mb` 0 they
    are those that ``daydream record`` saw, else of DDP's usual 25 MiB. Each bucket's all-reduce runs on the channel
    "network" from when its last gradient is there (`overlap`, wait-free backpropagation; else from the end of the
    backward pass), launched by a call of `call_us` on the CPU (none where the trace already has these calls). The
    compute stream goes on to whatever follows the backward pass when all are done: DDP makes the stream wait and
    not the CPU.

    A trace that already holds all-reduce kernels keeps them where they are. With `existing` "replace" their
    durations become those of the formula for `workers`, which also takes off the time they waited for slower
    workers; with "keep" they stay as recorded. All of them count as exchanges of gradients among all workers.

    Assumptions: all workers alike, none waits for another's computation; what every worker computes does not
    change; one exchange a step of every gradient that the trace shows, so with gradients accumulated over several
    backward passes each of them is exchanged; the copies of gradients into buckets and back are not added.
    `bandwidth` is a worker's bus bandwidth in GB/s (12.5: 100 Gbit/s), `latency_us` one step of the ring. Among
    running kernels NCCL's calls took 34 % longer than the formula on average, and what it says when they ran alone
    (4.6.5): `interference` is added to all-reduces that overlap the backward pass, to none with ``overlap=no``. With
    `node`, the name or file of one (``roller devices``), all-reduces take what the model of NCCL gives there, a worker
    on every board, and `bandwidth` and `latency_us` are not used.

    Raises:
        InputError: a parameter is out of range, or no source tells the gradients' sizes.
    """

    workers: int = 8
    bandwidth: float = 12.5
    latency_us: float = 5.0
    bucket_mb: float = 0.0
    first_bucket_mb: float = 1.0
    overlap: bool = True
    interference: float = INTERFERENCE
    gradient_mb: float = 0.0
    call_us: float = CALL_US
    existing: str = "replace"
    node: str = ""

    def __post_init__(self) -> None:
        check("ddp", workers=self.workers, bandwidth=self.bandwidth, first_bucket_mb=self.first_bucket_mb)
        names = ("latency_us", "interference", "call_us", "bucket_mb")
        check_not_negative("ddp", **{name: getattr(self, name) for name in names})
        if self.existing not in ("replace", "keep"):
            raise InputError("ddp: existing", f"{self.existing!r} is unknown", "write replace or keep")

    def __call__(self, graph: TaskGraph) -> Outcome:
        """The graph with all-reduces."""
        # Alone on the board, collectives take what the formula says.
        interference = self.interference if self.overlap else 0.0
        node = node_of("ddp", self.node, self.workers)
        cost = AllReduceCost(self.workers, self.bandwidth, self.latency_us, 1.0 + interference, node)
        recorded = np.intersect1d(all_reduces(graph), recorded_collectives(graph))
        if len(recorded):
            return _reprice(graph, recorded, cost, self.existing)
        if self.workers == 1:
            return Outcome(graph, ("1 worker has no other to exchange gradients with: nothing changed",))
        gradients = find_gradients(graph, self.gradient_mb)
        grouped = Grouping.of(graph, self.first_bucket_mb, self.bucket_mb)
        has_calls = graph.trace is not None and "c10d::allreduce_" in graph.trace.names
        insert = _Insertion(Edit(graph), cost, self.overlap, 0.0 if has_calls else self.call_us)
        for of_step in gradients.steps.values():
            insert.step(grouped(of_step))
        largest = grouped(gradients.steps[gradients.largest_step])
        total = sum(cost.us(sum(g.bytes for g in bucket)) for bucket in largest)
        notes = [
            gradients.summary(),
            f"{len(largest)} all-reduces a step among {self.workers} workers, {total / 1e3:.3f} ms a step on the "
            f"network {cost.where}" + (f", {interference:.0%} slower while kernels run" if interference else ""),
        ]
        if not self.overlap:
            notes.append("no all-reduce starts before the backward pass ends")
        return Outcome(replace(insert.edit.apply(), workers=self.workers), tuple(notes))


@dataclass(frozen=True)
class AllReduceCost:
    """Cost of an all-reduce among so many workers: by a ring's formula, or by the model of NCCL on a node.

    Attributes:
        workers: how many take part.
        bandwidth: of a worker's bus, GB/s; not used with a node.
        latency_us: of one step of the ring; not used with a node.
        slower: factor by which it takes longer while kernels run.
        node: where the workers are.
    """

    workers: int
    bandwidth: float
    latency_us: float
    slower: float
    node: NodeSpec | None = None

    @property
    def where(self) -> str:
        """By what the times are, for people."""
        return f"of {self.node.name}" if self.node is not None else f"at {self.bandwidth:g} GB/s"

    def us(self, size: float) -> float:
        """Microseconds of an all-reduce of `size` bytes."""
        if self.node is not None:
            return on_node_us("all_reduce", size, self.workers, self.node) * self.slower
        return all_reduce_us(size, self.workers, self.bandwidth, self.latency_us) * self.slower

    def each_us(self, sizes: Floats) -> Floats:
        """Microseconds of all-reduces of these sizes, in bytes, an array of any shape."""
        if self.node is None or self.workers <= 1:
            return np.array([self.us(size) for size in sizes.ravel()]).reshape(sizes.shape)
        from roller.library.collectives import collective_seconds

        library_times = collective_seconds(
            "all_reduce", np.maximum(sizes, 1.0), self.workers, self.node, dtype="float32"
        )
        return np.where(sizes < 1, 0.0, library_times.kernel_seconds * 1e6 * self.slower)


def buckets(
    gradients: Sequence[ParameterGradient], first_bytes: float, later_bytes: float
) -> list[list[ParameterGradient]]:
    """Gradients grouped as DDP's reducer does (PyTorch, ``compute_bucket_assignment_by_size``).

    A bucket closes with the gradient by which it reaches its limit, so it may be larger; one bucket holds gradients
    of one dtype in DDP, which makes no difference where all are alike.
    """
    groups: list[list[ParameterGradient]] = []
    size, limit, is_open = 0.0, first_bytes, False
    for gradient in gradients:
        if not is_open:
            groups.append([])
            size = 0.0
        groups[-1].append(gradient)
        size += gradient.bytes
        is_open = size < limit
        if not is_open:
            limit = later_bytes
    return groups


@dataclass(frozen=True)
class Grouping:
    """Way of putting gradients in buckets: by name as recorded, or by size.

    Attributes:
        recorded: number of the bucket by name of the gradient; empty without a recorded list.
        first_bytes: size at which the first bucket closes.
        later_bytes: size at which all others close.
    """

    recorded: dict[str, int]
    first_bytes: float
    later_bytes: float

    @staticmethod
    def of(graph: TaskGraph, first_mb: float, later_mb: float) -> Grouping:
        """The buckets that a graph's recording lists where `later_mb` is 0, else those of these sizes in MiB."""
        listed = graph.trace.metadata.get("buckets") if graph.trace is not None and not later_mb else None
        names = {str(name): i for i, bucket in enumerate(listed or []) for name in bucket}
        return Grouping(names, first_mb * MEBIBYTE, (later_mb or USUAL_BUCKET_MB) * MEBIBYTE)

    def __call__(self, gradients: Sequence[ParameterGradient]) -> list[list[ParameterGradient]]:
        if not all(gradient.name in self.recorded for gradient in gradients):
            return buckets(gradients, self.first_bytes, self.later_bytes)
        groups: dict[int, list[ParameterGradient]] = {}
        for gradient in gradients:
            groups.setdefault(self.recorded[gradient.name], []).append(gradient)
        return [groups[number] for number in sorted(groups)]


@dataclass
class _Insertion:
    """Adds one step's all-reduces after another."""

    edit: Edit
    cost: AllReduceCost
    overlap: bool
    call_us: float

    def step(self, groups: list[list[ParameterGradient]]) -> None:
        """Adds the all-reduces of a step's buckets."""
        graph = self.edit.graph
        everything = [gradient for group in groups for gradient in group]
        last = last_of_threads(graph, (g.ready for g in everything))
        waiting = consumers(graph, everything[0].step, np.array(last, np.int64))
        for rank, group in enumerate(groups):
            sources = group if self.overlap else everything
            task = self._all_reduce(rank, group)
            for row in last_of_threads(graph, (g.ready for g in sources)):
                self.edit.depend(row, task, Dependency.COMMUNICATION)
            for caller in self._callers(sources):
                self.edit.depend(caller, task, Dependency.COMMUNICATION)
            for row in waiting:
                self.edit.depend(task, row, Dependency.COMMUNICATION)

    def _all_reduce(self, rank: int, group: list[ParameterGradient]) -> int:
        size = sum(gradient.bytes for gradient in group)
        return self.edit.add(
            f"ncclAllReduce bucket {rank}",
            TaskKind.COMMUNICATION,
            self.cost.us(size),
            thread=self.edit.thread(NETWORK),
            phase=Phase.BACKWARD,
            step=group[0].step,
            layer=group[-1].layer,
            bytes=size,
            # DDP launches buckets in order, whichever is ready first.
            priority=-rank,
        )

    def _callers(self, sources: Sequence[ParameterGradient]) -> Iterator[int]:
        """The CPU tasks that launch an all-reduce: a call behind the last hook of every thread."""
        for hook in last_of_threads(self.edit.graph, (g.hook for g in sources)):
            if self.call_us:
                name = "c10d::allreduce_"
                yield self.edit.add(name, TaskKind.CPU, self.call_us, after=hook, phase=Phase.BACKWARD)
            else:
                yield hook


def _reprice(graph: TaskGraph, recorded: Ints, cost: AllReduceCost, existing: str) -> Outcome:
    """Durations by the formula for all-reduces that the trace holds; those of unknown size keep theirs."""
    others = len(recorded_collectives(graph)) - len(recorded)
    recorded_text = f"the trace already holds {len(recorded)} all-reduces"
    untouched = (f"{others} other collectives stay as recorded",) if others else ()
    if existing == "keep":
        return Outcome(tied(graph, recorded), (f"{recorded_text}: they stay as recorded", *untouched))
    sizes = message_bytes(graph, recorded)
    priced = recorded[~np.isnan(sizes)]
    if not len(priced):
        raise InputError(
            "ddp: existing", f"{recorded_text} of unknown size", "write existing=keep, or record with shapes"
        )
    durations: Floats = np.array([cost.us(size) for size in sizes[~np.isnan(sizes)]])
    before = float(graph.duration_us[priced].sum()) / 1e3
    notes = [
        f"{recorded_text}: they stay in place and take what the formula gives for {cost.workers} workers "
        f"{cost.where}, {durations.sum() / 1e3:.3f} ms in all instead of {before:.3f} ms"
        + (f", {cost.slower - 1:.0%} slower while kernels run" if cost.slower > 1 else "")
    ]
    if len(priced) < len(recorded):
        notes.append(f"{len(recorded) - len(priced)} all-reduces of unknown size stay as recorded")
    written = graph.bytes.copy()
    written[recorded] = sizes
    return Outcome(
        replace(tied(graph, recorded).with_durations(priced, durations), bytes=written, workers=cost.workers),
        (*notes, *untouched),
    )
