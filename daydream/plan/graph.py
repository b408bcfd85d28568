"""The task graph of a plan: one rank of every stage, with its host, its kernels and its collectives.

Ranks that differ in their data or tensor direction alone do the same at the same time, so that one of them stands for
all: nothing in a plan tells them apart.

Collectives follow PyTorch and Megatron. DDP exchanges buckets of gradients as soon as they are full, on a stream of
their own, during the backward pass. FSDP gathers the parameters of a block while the one before it runs, forward and
backward, and sends its gradients while the next one runs; with a pipeline parameters stay gathered through the step.
Megatron exchanges all gradients behind the last backward pass (``overlap`` false). ZeRO's first stage exchanges as
these do and gathers the parameters behind the update. What a stage makes is sent to the next one while it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, Thread, ThreadKind, TrainingStep
from daydream.passes.basis.sharding import HELD_UNITS
from daydream.plan.costs import Costs, Pass
from daydream.plan.layout import orders
from daydream.plan.offload import HostUpdate
from daydream.plan.sizes import Sizes
from daydream.trace.trace import NONE

#: Streams of a rank: kernels, gathers, exchanges of gradients, messages to other stages forward and backward, copies to
#: the host's memory and from it.
STREAMS = (
    "kernels", "all-gather", "gradients", "to the next stage", "to the stage before", "to the host", "from the host",
)  # fmt: skip

_US = 1e6


def plan_graph(costs: Costs) -> TaskGraph:
    """The graph of one step; its makespan is the step's length."""
    build = _Builder(costs)
    for stage in range(costs.layout.pipeline):
        build.stage(stage)
    return build.graph()


@cache
def _stream(stage: int, which: int) -> Thread:
    """A stream of the rank that stands for a stage."""
    label = f"stage {stage}: {STREAMS[which]}"
    return Thread(kind=ThreadKind.STREAM, label=label, number=which, device=stage, process=stage)


@cache
def _host(stage: int) -> Thread:
    """The host thread of a stage's rank."""
    return Thread(kind=ThreadKind.CPU, label=f"stage {stage}: host", process=stage)


@dataclass(eq=False)
class _Builder:
    costs: Costs
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    threads: dict[Thread, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    # (forward, micro-batch, part of the model) -> the kernels and the message behind which another stage may begin.
    sent: dict[tuple[bool, int, int], int] = field(default_factory=dict)
    awaited: list[tuple[tuple[bool, int, int], int]] = field(default_factory=list)

    # Rows

    def add(
        self,
        name: str,
        thread: Thread,
        seconds: float,
        *,
        kind: TaskKind,
        phase: Phase,
        layer: str = "",
        size: float = np.nan,
        after: Sequence[int] = (),
        mark: Mark = Mark.NONE,
    ) -> int:
        """A task at the end of its thread, behind others."""
        row = len(self.rows)
        self.rows.append((
            self.names.setdefault(name, len(self.names)), int(kind),
            self.threads.setdefault(thread, len(self.threads)), _US * seconds,
            self.layers.setdefault(layer, len(self.layers)) if layer else NONE, int(phase), int(mark), size,
        ))  # fmt: skip
        between = Dependency.COMMUNICATION if kind is TaskKind.COMMUNICATION else Dependency.SYNC
        self.edges += [(source, row, int(between)) for source in after]
        return row

    def run(self, stage: int, name: str, taken: Pass, phase: Phase, layer: str, after: Sequence[int]) -> int:
        """Kernels of some units behind what they wait for; the task at whose end all of them are done."""
        host, kernels = _host(stage), _stream(stage, 0)
        first = self.add(f"launch {name}", host, taken.lead, kind=TaskKind.CPU, phase=phase, layer=layer)
        host_remainder = max(taken.host - taken.lead, 0.0)
        last = self.add(f"launch rest of {name}", host, host_remainder, kind=TaskKind.CPU, phase=phase, layer=layer)
        busy = self.add(name, kernels, taken.device, kind=TaskKind.KERNEL, phase=phase, layer=layer, after=after)
        self.edges.append((first, busy, int(Dependency.LAUNCH)))
        done = self.add(f"end of {name}", kernels, 0.0, kind=TaskKind.KERNEL, phase=phase, layer=layer)
        self.edges.append((last, done, int(Dependency.LAUNCH)))
        return done

    # A stage

    def stage(self, stage: int) -> None:
        """All tasks of a stage's rank, in the order in which its host asks for them."""
        _Stage(self, stage).build()

    def graph(self) -> TaskGraph:
        """The graph of all stages."""
        self.edges += [
            (self.sent[key], row, int(Dependency.COMMUNICATION)) for key, row in self.awaited if key in self.sent
        ]
        name, kind, thread, duration, layer, phase, mark, size = (
            np.array(column) for column in zip(*self.rows, strict=True)
        )
        count = len(self.rows)
        edges = np.array(self.edges, np.int64).reshape(-1, 3)
        return TaskGraph(
            names=tuple(self.names), threads=tuple(self.threads), layers=tuple(self.layers),
            steps=(TrainingStep("planned step", float("nan")),), name=name.astype(np.int64), kind=kind.astype(np.int64),
            thread=thread.astype(np.int64), duration_us=duration.astype(np.float64), gap_us=np.zeros(count),
            layer=layer.astype(np.int64), phase=phase.astype(np.int64), step=np.zeros(count, np.int64),
            mark=mark.astype(np.int64), operator=np.full(count, NONE), event=np.full(count, NONE),
            bytes=size.astype(np.float64), priority=np.zeros(count, np.int64), recorded_us=np.full(count, np.nan),
            edge_source=edges[:, 0], edge_target=edges[:, 1], edge_kind=edges[:, 2], edge_lag_us=np.zeros(len(edges)),
            workers=self.costs.layout.sharers,
        )  # fmt: skip


@dataclass(eq=False)
class _Stage:
    """The tasks of one rank."""

    build_: _Builder
    stage: int

    def __post_init__(self) -> None:
        layout, units = self.costs.layout, self.costs.units
        runs = units.stages(layout.pipeline * layout.chunks, layout.blocks)
        self.parts = [runs[chunk * layout.pipeline + self.stage] for chunk in range(layout.chunks)]
        self.parallel = layout.sharers > 1 and self.costs.node is not None
        self.sharded = self.parallel and layout.shard == "fsdp"
        self.exchanged: list[int] = []
        self.filling = Sizes()
        self.waits = layout.waits and layout.pipeline > 1
        # The message that kernels wait for, where sends block them.
        self.sending: list[int] = []
        # The kernels of every pass so far, in order, and of the units' forward passes.
        self.passed: list[int] = []
        self.forward: dict[str, int] = {}

    @property
    def costs(self) -> Costs:
        """Times."""
        return self.build_.costs

    def build(self) -> None:
        """Every pass of every micro-batch, then the update."""
        layout = self.costs.layout
        last = layout.micro_batches - 1
        for forward, micro_batch, chunk in orders(layout, self.stage):
            members = self.parts[chunk]
            first_of_step = micro_batch == 0
            if forward:
                self._forward(
                    members, micro_batch, chunk, gathers=self.sharded and (first_of_step or layout.pipeline == 1)
                )
            else:
                each = self.sharded or layout.shard == "zero2"
                exchanges = self.parallel and (micro_batch == last or (each and layout.pipeline == 1))
                self._backward(members, micro_batch, chunk, exchanges=exchanges)
        self._update()

    # Passes

    def _key(self, forward: bool, micro_batch: int, chunk: int, *, sent: bool) -> tuple[bool, int, int]:
        """Key of a pass that another waits for: the part of the model that makes its result."""
        place = chunk * self.costs.layout.pipeline + self.stage
        if sent:
            return forward, micro_batch, place
        return forward, micro_batch, place - 1 if forward else place + 1

    def _forward(self, members: Sequence[int], micro_batch: int, chunk: int, *, gathers: bool) -> None:
        units = self.costs.units
        if not gathers:
            done = self._run("forward", members, Phase.FORWARD, micro_batch, chunk, (), first=True)
        else:
            # The root's parameters are needed before everything else.
            root = [unit for unit in members if units.is_root(unit)]
            before = self._gather(root, "root", Phase.FORWARD)
            done = before[0] if before else NONE
            for place, unit in enumerate(members):
                after = list(before)
                if unit not in root:
                    after += self._gather([unit], self._name(unit), Phase.FORWARD)
                done = self._run("forward", [unit], Phase.FORWARD, micro_batch, chunk, after, first=place == 0)
        self._send(True, micro_batch, chunk, done)

    def _backward(self, members: Sequence[int], micro_batch: int, chunk: int, *, exchanges: bool) -> None:
        layout, units = self.costs.layout, self.costs.units
        regathers = self.sharded and layout.pipeline == 1
        if not (exchanges and layout.overlap) and not regathers:
            done = self._run("backward", members, Phase.BACKWARD, micro_batch, chunk, (), first=True)
            if exchanges:
                self._exchange_all(members, done)
            self._send(False, micro_batch, chunk, done)
            return
        root = [unit for unit in members if units.is_root(unit)]
        before = self._gather(root, "root", Phase.BACKWARD) if regathers else []
        done = NONE
        for place, unit in enumerate(reversed(members)):
            after = list(before)
            if regathers and unit not in root and unit != units.count - 2:
                after += self._gather([unit], self._name(unit), Phase.BACKWARD)
            done = self._run("backward", [unit], Phase.BACKWARD, micro_batch, chunk, after, first=place == 0)
            if exchanges and not (self.sharded and unit in root):
                self._exchange(unit, done)
        if exchanges and self.sharded:
            self._reduce(root, "root", done)
        elif exchanges:
            self._flush(done)
        self._send(False, micro_batch, chunk, done)

    def _run(
        self, name: str, members: Sequence[int], phase: Phase, micro_batch: int, chunk: int, after: Sequence[int],
        *, first: bool,
    ) -> int:  # fmt: skip
        layer = self._name(members[0]) if len(members) == 1 else ""
        taken = self.costs.passing(members, phase)
        taken = taken._replace(device=taken.device + self._exchange_seconds(members, phase, micro_batch))
        title = f"{name} {micro_batch}" + (f" of {layer}" if layer else "")
        # The first task of a pass is the host's, the third its kernels.
        launch, kernels = len(self.build_.rows), len(self.build_.rows) + 2
        done = self.build_.run(self.stage, title, taken, phase, layer, [*after, *self.sending])
        self.sending = []
        if first:
            waiting = launch if self.waits else kernels
            self.build_.awaited.append((self._key(phase == Phase.FORWARD, micro_batch, chunk, sent=False), waiting))
            if self.waits and self.passed:
                self.build_.edges.append((self.passed[-1], launch, int(Dependency.SYNC)))
        self.passed.append(done)
        if phase == Phase.FORWARD and len(members) == 1:
            self.forward["root" if self.costs.units.is_root(members[0]) else layer] = done
        return done

    def _exchange_seconds(self, members: Sequence[int], phase: Phase, micro_batch: int) -> float:
        """Seconds of kernels that collectives need or slow down: copies of FSDP, and what the exchanges take away."""
        costs, layout = self.costs, self.costs.layout
        if not self.parallel:
            return 0.0
        backward = phase == Phase.BACKWARD
        last = micro_batch == layout.micro_batches - 1
        total = exchanges = 0.0
        if self.sharded and (layout.pipeline == 1 or (not backward and micro_batch == 0)):
            total += sum(costs.copied_out(unit) for unit in members)
            exchanges += sum(costs.exchange("all_gather", costs.unit_bytes(unit)) for unit in members)
        if backward and (last or ((self.sharded or layout.shard == "zero2") and layout.pipeline == 1)):
            sizes = [costs.gradient_bytes(unit) for unit in members]
            if self.sharded:
                total += sum(costs.copied_in(unit) for unit in members)
            if self.sharded or layout.overlap:
                collective = "all_reduce" if layout.shard == "none" else "reduce_scatter"
                exchanges += sum(costs.exchange(collective, size) for size in sizes)
        return total + costs.slowed(min(exchanges, costs.passing(members, phase).device))

    def _name(self, unit: int) -> str:
        units = self.costs.units
        if unit == 0:
            return "before the blocks"
        return "behind the blocks" if unit == units.count - 1 else units.blocks[unit - 1]

    # Messages

    def _send(self, forward: bool, micro_batch: int, chunk: int, done: int) -> None:
        """Hands a pass's result to the stage that waits for it."""
        layout = self.costs.layout
        place = chunk * layout.pipeline + self.stage
        goal = place + 1 if forward else place - 1
        key = self._key(forward, micro_batch, chunk, sent=True)
        if not 0 <= goal < layout.pipeline * layout.chunks:
            return
        seconds = self.costs.hand_over(self.stage, goal % layout.pipeline)
        thread = _stream(self.stage, 3 if forward else 4)
        phase = Phase.FORWARD if forward else Phase.BACKWARD
        self.build_.sent[key] = self.build_.add(
            "send", thread, seconds, kind=TaskKind.COMMUNICATION, phase=phase,
            size=self.costs.boundary_bytes, after=[done],
        )  # fmt: skip
        if layout.blocking:
            self.sending = [self.build_.sent[key]]

    def _gather(self, members: Sequence[int], name: str, phase: Phase) -> list[int]:
        """FSDP's all-gather of some units' parameters: the task to wait for."""
        size = self._sum(self.costs.unit_bytes, members)
        if not size.total:
            return []
        # The host asks for it in its turn: after it has launched what stands before. The array of the unit before the
        # last one must have been copied out, and a unit that is gathered again must have been given up.
        asked = [*self._host_row(), *self.passed[-HELD_UNITS - 1 : -HELD_UNITS]]
        if phase == Phase.BACKWARD:
            asked += [self.forward[name]] if name in self.forward else []
        update = self.costs.host_update
        if update is not None and self.costs.layout.offload == "parameters":
            part = size.shared / self.costs.layout.group() + size.experts / self.costs.layout.group(experts=True)
            asked = [self.build_.add(
                f"{name} from the host", _stream(self.stage, 6), update.copy_seconds(part),
                kind=TaskKind.COMMUNICATION, phase=phase, size=part, after=asked,
            )]  # fmt: skip
        thread = _stream(self.stage, 1)
        row = self.build_.add(
            f"all-gather {name}", thread, self.costs.exchange("all_gather", size), kind=TaskKind.COMMUNICATION,
            phase=phase, size=size.total, after=asked,
        )  # fmt: skip
        return [row]

    def _host_row(self) -> list[int]:
        """The last task of the rank's host thread, as far as there is one."""
        thread = self.build_.threads.get(_host(self.stage))
        for row in range(len(self.build_.rows) - 1, max(len(self.build_.rows) - 12, 0) - 1, -1):
            if self.build_.rows[row][2] == thread:
                return [row]
        return []

    def _exchange(self, unit: int, done: int) -> None:
        """Gradients of a unit: sent at once by FSDP, put into a bucket by DDP."""
        if self.sharded:
            self._reduce([unit], self._name(unit), done)
            return
        self.filling = self.filling.plus(self.costs.gradient_bytes(unit))
        count = int(self.filling.total // self.costs.layout.bucket_bytes)
        if count:
            bucket = self.filling.times(self.costs.layout.bucket_bytes / self.filling.total)
            self._all_reduce(bucket, done, count)
            self.filling = self.filling.plus(bucket.times(-float(count)))

    def _flush(self, done: int) -> None:
        if self.filling.total:
            self._all_reduce(self.filling, done)
            self.filling = Sizes()

    def _exchange_all(self, members: Sequence[int], done: int) -> None:
        """All gradients behind the backward pass."""
        self._all_reduce(self._sum(self.costs.gradient_bytes, members), done)

    @staticmethod
    def _sum(bytes_of: Callable[[int], Sizes], members: Sequence[int]) -> Sizes:
        return reduce(Sizes.plus, map(bytes_of, members), Sizes())

    def _all_reduce(self, size: Sizes, done: int, count: int = 1) -> None:
        collective = "reduce_scatter" if self.costs.layout.shard != "none" else "all_reduce"
        self._exchange_task(collective, f"{collective.replace('_', '-')} of gradients", size, done, count)

    def _reduce(self, members: Sequence[int], name: str, done: int) -> None:
        size = self._sum(self.costs.gradient_bytes, members)
        self._exchange_task("reduce_scatter", f"reduce-scatter {name}", size, done)

    def _exchange_task(self, collective: str, name: str, size: Sizes, done: int, count: int = 1) -> None:
        """An exchange of gradients, or several equal ones one after the other."""
        if not size.total:
            return
        seconds = count * self.costs.exchange(collective, size)
        thread = _stream(self.stage, 2)
        row = self.build_.add(
            name,
            thread,
            seconds,
            kind=TaskKind.COMMUNICATION,
            phase=Phase.BACKWARD,
            size=count * size.total,
            after=[done],
        )
        self.exchanged.append(row)

    def _update(self) -> None:
        members = [unit for part in self.parts for unit in part]
        if self.costs.host_update is not None:
            done = self._update_on_host(self.costs.host_update, members)
        else:
            taken = self.costs.update(members)
            done = self.build_.run(self.stage, "update", taken, Phase.UPDATE, "", self.exchanged[-1:])
        if self.parallel and self.costs.layout.shard in ("zero1", "zero2"):
            size = self._sum(self.costs.unit_bytes, members)
            self.build_.add(
                "all-gather of parameters", _stream(self.stage, 1), self.costs.exchange("all_gather", size),
                kind=TaskKind.COMMUNICATION, phase=Phase.UPDATE, size=size.total, after=[done],
            )  # fmt: skip

    def _update_on_host(self, update: HostUpdate, members: Sequence[int]) -> int:
        """The processors update behind the last gradient's copy, and parameters come back while they do."""
        costs = self.costs
        elements = costs.kept(members)
        sent, back = costs.element_bytes
        behind = self.exchanged[-1:] or self.passed[-1:]
        # Copies of gradients began with the first of them.
        first = self.exchanged[:1] or self.passed[-1:]
        copied = self.build_.add(
            "gradients to the host", _stream(self.stage, 5), update.copy_seconds(elements * sent),
            kind=TaskKind.COMMUNICATION, phase=Phase.UPDATE, size=elements * sent, after=first,
        )  # fmt: skip
        waited = self.build_.add(
            "wait for gradients", _host(self.stage), 0.0, kind=TaskKind.CPU, phase=Phase.UPDATE,
            after=[copied, *behind],
        )  # fmt: skip
        seconds = update.update_seconds(elements, costs.states, sent, back)
        done = self.build_.add("update on the host", _host(self.stage), seconds, kind=TaskKind.CPU, phase=Phase.UPDATE)
        if costs.layout.offload == "parameters":
            return done
        returned = self.build_.add(
            "parameters from the host", _stream(self.stage, 6), update.copy_seconds(elements * back),
            kind=TaskKind.COMMUNICATION, phase=Phase.UPDATE, size=elements * back, after=[waited],
        )  # fmt: skip
        return self.build_.add(
            "end of the update", _stream(self.stage, 6), 0.0, kind=TaskKind.COMMUNICATION,
            phase=Phase.UPDATE, after=[returned, done],
        )  # fmt: skip
