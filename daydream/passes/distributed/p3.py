"""Priority-based Parameter Propagation over a parameter server (thesis 4.5.1, A.5, algorithm 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.communication import (
    MEBIBYTE,
    all_reduces,
    check,
    check_not_negative,
    pull_us,
    push_us,
    transfer_us,
)
from daydream.passes.basis.gradients import ParameterGradient, consumers, find_gradients, last_of_threads
from daydream.passes.basis.idioms import idle_hosts
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError

SEND = Thread(kind=ThreadKind.CHANNEL, label="send")
RECEIVE = Thread(kind=ThreadKind.CHANNEL, label="receive")

#: 50,000 parameters of 4 bytes: the slice that the P3 paper found best (section 4.2).
SLICE_MB = 0.2


@what_if("p3")
@dataclass(frozen=True, kw_only=True)
class P3:
    """Training with a parameter server whose pushes and pulls are sliced and ordered by priority (algorithm 7).

    Every gradient is cut into slices of `slice_mb` MiB (0: not at all). A slice is pushed on the channel "send" when
    its gradient is ready and pulled on "receive"; the next step's first forward GPU task of the gradient's layer
    waits for the pull (and the first one of the step where the layer is unknown). With `priority` the slices whose
    gradients become ready last, which the next forward pass needs first, overtake others; without, transfers go in
    the order in which they become ready. So ``slice_mb=0,priority=false`` is the plain parameter server that P3 is
    to be compared with.

    `servers` 0 puts one server on every worker's machine, as the paper does: of n slices the machine here serves one.
    For that one it receives the other workers' pushes and then sends their pulls, n - 1 slices each, while the
    others are pushed and pulled over the network. (Algorithm 7 also sends this machine's own push of that slice and
    only one pull; that leaves most of a server's traffic out.) With more than 0 they are machines of their own, and
    n / `servers` times as slow where that is more than 1.

    `update` "server" takes the GPU tasks of the update phase off and the host time of its operators, all but calls
    that wait or launch something else, since servers update parameters, at no cost here;
    "worker" leaves them: then they wait for all pulls, and the forward pass for them.

    All-reduces that the graph holds, recorded or inserted, are taken out.

    Assumptions: full-duplex links of `bandwidth` GB/s (1.25: 10 Gbit/s); all workers alike; `latency_us` delays a
    slice and does not occupy the link; a server passes a slice on once every worker's has come in, which are sent at
    the same time. The last step has no next one to wait.

    Raises:
        InputError: a parameter is out of range, or no source tells the gradients' sizes.
    """

    workers: int = 4
    bandwidth: float = 1.25
    latency_us: float = 20.0
    servers: int = 0
    slice_mb: float = SLICE_MB
    priority: bool = True
    update: str = "server"
    gradient_mb: float = 0.0

    def __post_init__(self) -> None:
        check("p3", workers=self.workers, bandwidth=self.bandwidth)
        check_not_negative("p3", latency_us=self.latency_us, slice_mb=self.slice_mb, servers=self.servers)
        if self.update not in ("server", "worker"):
            raise InputError("p3: update", f"{self.update!r} is unknown", "write server or worker")

    def __call__(self, graph: TaskGraph) -> Outcome:
        """The graph with pushes and pulls."""
        if self.workers == 1:
            return Outcome(graph, ("1 worker has no other to exchange gradients with: nothing changed",))
        gradients = find_gradients(graph, self.gradient_mb)
        insert = _Insertion(Edit(graph), self)
        for step, of_step in gradients.steps.items():
            insert.step(of_step, _Needs.of(graph, step, of_step, self.update))
        removed, host_us = _remove_updates(insert.edit) if self.update == "server" else (0, 0.0)
        replaced = all_reduces(graph)
        insert.edit.remove(replaced, launches=True)
        steps = len(gradients.steps)
        placement = f"{self.servers} machines of their own" if self.servers else "the workers' machines"
        notes = [
            gradients.summary(),
            f"{insert.slices / steps:.0f} slices a step between {self.workers} workers and servers on {placement}, "
            f"{self.busy_us(gradients.bytes_of(gradients.largest_step)) / 1e3:.3f} ms a step on each link "
            f"at {self.bandwidth:g} GB/s" + ("" if self.priority else ", first come, first served"),
        ]
        if removed:
            host = f"{host_us / 1e3:.3f} ms of host time go with them"
            notes.append(f"{removed} GPU tasks of the update phase are done by servers; {host}")
        if len(replaced):
            notes.append(f"{len(replaced)} all-reduces that the graph held are gone")
        if insert.unknown:
            notes.append(f"{insert.unknown} gradients of no known forward layer are needed when the next step begins")
        return Outcome(insert.edit.apply(), tuple(notes))

    def is_local(self, number: int) -> bool:
        """True if this machine's own server has the slice: servers take turns, ours first (algorithm 7, line 12)."""
        return not self.servers and number % self.workers == 0

    def push_us(self, size: float) -> float:
        """Microseconds in which a worker sends a slice of `size` bytes to its server."""
        return push_us(size, self.workers, self.servers, self.bandwidth) if self.servers else self.once_us(size)

    def pull_us(self, size: float) -> float:
        """Microseconds in which a worker fetches a slice of `size` bytes."""
        return pull_us(size, self.workers, self.servers, self.bandwidth) if self.servers else self.once_us(size)

    def once_us(self, size: float) -> float:
        """Microseconds of `size` bytes over one link."""
        return transfer_us(size, self.bandwidth)

    def others_us(self, size: float) -> float:
        """A slice from, or to, every other worker."""
        return transfer_us(size * (self.workers - 1), self.bandwidth)

    def gathering_us(self, size: float) -> float:
        """Time from our push until the server has the slice of every other worker."""
        return self.latency_us if self.servers else self.latency_us + (self.workers - 2) * self.once_us(size)

    def busy_us(self, size: float) -> float:
        """Time for which a step's gradients occupy a worker's link in each direction."""
        return self.push_us(size) if self.servers else 2 * self.others_us(size) / self.workers


@dataclass(frozen=True)
class _Needs:
    """Tasks behind a step's gradients: by layer the rows of the next forward pass, and those for all the rest."""

    layers: dict[int, int]
    rest: list[int]

    @staticmethod
    def of(graph: TaskGraph, step: int, gradients: Sequence[ParameterGradient], update: str) -> _Needs:
        if update == "worker":
            ready: Ints = np.array(last_of_threads(graph, (g.ready for g in gradients)), np.int64)
            return _Needs({}, consumers(graph, step, ready))
        forward = graph.select(step=step + 1, phase=Phase.FORWARD, gpu=True)
        layers: dict[int, int] = {}
        for row in forward[::-1].tolist():
            layers[int(graph.layer[row])] = row
        layers.pop(NONE, None)
        if not len(forward):
            forward = graph.select(step=step + 1, gpu=True)
        return _Needs(layers, forward[:1].tolist())


@dataclass
class _Insertion:
    """Adds one step's pushes and pulls after another."""

    edit: Edit
    network: P3
    slices: int = 0
    unknown: int = 0

    def __post_init__(self) -> None:
        self._send, self._receive = self.edit.thread(SEND), self.edit.thread(RECEIVE)

    def step(self, gradients: Sequence[ParameterGradient], needs: _Needs) -> None:
        """Adds a step's; the rank of a gradient is its place in the order of readiness."""
        number = 0
        for rank, gradient in enumerate(gradients):
            has_consumer = gradient.layer in needs.layers
            waiting = [needs.layers[gradient.layer]] if has_consumer else needs.rest
            self.unknown += bool(needs.layers) and not has_consumer
            for size in self._cut(gradient.bytes):
                self._slice(gradient, size, rank if self.network.priority else 0, number, waiting)
                number += 1
        self.slices += number

    def _cut(self, size: float) -> list[float]:
        most = self.network.slice_mb * MEBIBYTE
        if not most or size <= most:
            return [size]
        slice_count = int(size // most)
        remainder = size - slice_count * most
        return [most] * slice_count + [remainder] * (remainder > 0)

    def _slice(self, gradient: ParameterGradient, size: float, priority: int, number: int, waiting: list[int]) -> None:
        """One slice: its push once the gradient is ready, its pull, and who waits."""
        network = self.network
        ready = gradient.ready if gradient.ready != NONE else gradient.hook
        if network.is_local(number):
            # The others' slices, one message under way as well, come in here, and the results go out to them.
            push = self._transfer("push to us", self._receive, network.others_us(size), gradient, priority, size)
            pull = self._transfer("pull from us", self._send, network.others_us(size), gradient, priority, size)
            before, between, done, behind = network.latency_us, 0.0, push, 0.0
        else:
            push = self._transfer("push", self._send, network.push_us(size), gradient, priority, size)
            pull = self._transfer("pull", self._receive, network.pull_us(size), gradient, priority, size)
            before, between, done, behind = 0.0, network.gathering_us(size), pull, network.latency_us
        if ready != NONE:
            self.edit.depend(ready, push, Dependency.COMMUNICATION, before)
        self.edit.depend(push, pull, Dependency.COMMUNICATION, between)
        for row in waiting:
            self.edit.depend(done, row, Dependency.COMMUNICATION, behind)

    def _transfer(
        self, what: str, channel: int, duration_us: float, gradient: ParameterGradient, priority: int, size: float
    ) -> int:
        return self.edit.add(
            f"{what} {gradient.name}",
            TaskKind.COMMUNICATION,
            duration_us,
            thread=channel,
            phase=Phase.BACKWARD,
            step=gradient.step,
            layer=gradient.layer,
            bytes=size,
            priority=priority,
        )


def _remove_updates(edit: Edit) -> tuple[int, float]:
    """Takes the GPU tasks of the update phase off, with their launches and operators.

    Returns how many GPU tasks, and the host time that goes with them, microseconds.
    """
    rows = edit.graph.select(phase=Phase.UPDATE, gpu=True)
    hosts = idle_hosts(edit.graph, rows) if len(rows) else rows
    edit.remove(rows, launches=True)
    edit.remove(hosts)
    return len(rows), float((edit.graph.duration_us + edit.graph.gap_us)[hosts].sum())
