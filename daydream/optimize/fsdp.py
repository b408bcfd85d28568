"""FSDP2 put around a step's modules, and which wrapping and prefetch of it makes the step shortest.

In which order units are gathered and scattered says :mod:`daydream.passes.basis.sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.simulate import CycleError, simulate
from daydream.optimize.coarse import step_us
from daydream.optimize.exchange import Exchange
from daydream.passes.basis.communication import all_gather_us
from daydream.passes.basis.sharding import HELD_UNITS, backward_gatherings, forward_gatherings
from daydream.passes.distributed.ddp import NETWORK, AllReduceCost
from daydream.passes.memory.recompute import blocks_of, repeated_block
from daydream.trace.trace import NONE
from hal.support.errors import InputError

#: How far gathering runs ahead in calls: FSDP2's own, and what ``set_modules_to_..._prefetch`` may ask for.
FORWARD, BACKWARD = (0, 1, 2), (1, 2)

#: Microseconds by which one wrapping must be better than another.
SAME_US = 1e-6


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """How a model is wrapped.

    Attributes:
        cuts: the blocks behind which a unit ends; the last block's end is always one.
        forward: units that are called ahead in the forward pass.
        backward: units that are called ahead in the backward pass.
    """

    cuts: tuple[int, ...]
    forward: int = 0
    backward: int = 1


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """The tasks of a unit in one pass: first and last on the host, first and last on the board."""

    first_call: int
    last_call: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Sharding:
    """A step whose parameters are sharded.

    Attributes:
        exchange: the training of one rank, its step and network.
        blocks: repeated modules by path, in the order of the forward pass.
        sizes: bytes of the parameters of each.
        rest: bytes of all other parameters, which the whole model's own unit holds.
    """

    exchange: Exchange
    blocks: tuple[str, ...]
    sizes: tuple[float, ...]
    rest: float

    @staticmethod
    def of(exchange: Exchange) -> Sharding:
        """The repeated modules of a step.

        Raises:
            InputError: the trace names none, or nothing runs on a board.
        """
        graph = exchange.graph
        if not graph.on_gpu.any():
            raise InputError("--shard", "the step runs on no board", "leave it out, or predict a step on one")
        layers = blocks_of(graph)
        sizes = dict.fromkeys(layers, 0.0)
        for gradient in exchange.of_step:
            block = repeated_block(gradient.name)
            if block in sizes:
                sizes[block] += gradient.bytes
        found = {
            block: ways[Phase.FORWARD].first
            for block in layers
            if sizes[block] and len(ways := _passes(exchange, layers[block])) == 2
        }
        if not found:
            raise InputError("--shard", "the trace names no repeated modules with parameters", "record their names")
        blocks = tuple(sorted(found, key=lambda block: found[block]))
        held = tuple(sizes[block] for block in blocks)
        total = sum(gradient.bytes for gradient in exchange.of_step)
        return Sharding(exchange, blocks, held, total - sum(held))

    def modules(self, wrapping: Wrapping) -> list[list[str]]:
        """The blocks of every unit."""
        return [list(self.blocks[begin:end]) for begin, end in _spans(wrapping)]

    def gathered(self, wrapping: Wrapping) -> float:
        """Most bytes of gathered parameters at a time: two units or more, and what the model's own unit holds."""
        sizes = [sum(self.sizes[begin:end]) for begin, end in _spans(wrapping)]
        together = max(wrapping.forward, wrapping.backward, 1) + 1
        return self.rest + max(sum(sizes[place : place + together]) for place in range(len(sizes)))

    def length_us(self, wrapping: Wrapping) -> float:
        """The step's length, by a simulation of the whole graph.

        Raises:
            InputError: units are not computed one after another.
        """
        try:
            return step_us(simulate(self.wrapped(wrapping)), self.exchange.step)
        except CycleError:
            problem, remedy = "modules are not computed one after another", "leave it out"
            raise InputError("--shard", problem, remedy) from None

    def wrapped(self, wrapping: Wrapping) -> TaskGraph:
        """The graph of the step that gathers and scatters; the update works on a shard."""
        graph, exchange = self.exchange.graph, self.exchange
        layers = blocks_of(graph)
        spans = list(_spans(wrapping))
        units = [
            _passes(exchange, frozenset().union(*(layers[block] for block in self.blocks[begin:end])))
            for begin, end in spans
        ]
        sizes = [sum(self.sizes[begin:end]) for begin, end in spans]
        calls = _Calls(Edit(graph), exchange)
        calls.root(self.rest)
        calls.forward([unit[Phase.FORWARD] for unit in units], sizes, wrapping.forward)
        backwards = sorted(range(len(units)), key=lambda place: units[place][Phase.BACKWARD].first)
        calls.backward(
            [units[place][Phase.BACKWARD] for place in backwards],
            [sizes[place] for place in backwards],
            wrapping.backward,
        )
        calls.root_gradients(self.rest)
        updates = np.flatnonzero(graph.on_gpu & (graph.phase == Phase.UPDATE) & (graph.step == exchange.step))
        calls.edit.set("duration_us", updates, graph.duration_us[updates] / exchange.cost.workers)
        return replace(calls.edit.apply(), workers=exchange.cost.workers)


def usual_wrapping(sharding: Sharding) -> Wrapping:
    """What tutorials do: every block a unit, no prefetch beyond FSDP2's own."""
    return Wrapping(cuts=tuple(range(len(sharding.blocks))))


def best_wrapping(
    sharding: Sharding, progress: Callable[[str], None] = lambda text: None
) -> tuple[Wrapping, float, int]:
    """The best wrapping found, the step with it, and how many were simulated.

    Not exact: units of equal numbers of blocks first, with every prefetch; then one cut more or less, one at a time, as
    long as that helps.
    """
    count = len(sharding.blocks)
    lengths: dict[Wrapping, float] = {}

    def length(wrapping: Wrapping) -> float:
        if wrapping not in lengths:
            lengths[wrapping] = sharding.length_us(wrapping)
        return lengths[wrapping]

    usual = best = usual_wrapping(sharding)
    length(usual)
    for size in range(1, count + 1):
        progress(f"trying units of {size} blocks")
        cuts = (*range(size - 1, count - 1, size), count - 1)
        for forward in FORWARD:
            for backward in BACKWARD:
                wrapping = Wrapping(cuts=cuts, forward=forward, backward=backward)
                if length(wrapping) < length(best) - SAME_US:
                    best = wrapping
    while True:
        progress("trying one unit more or less")
        others = [
            replace(best, cuts=tuple(sorted({*best.cuts} ^ {place}))) for place in range(count - 1)
        ]  # fmt: skip
        better = min(others, key=length, default=best)
        if not length(better) < length(best) - SAME_US:
            return best, length(best), len(lengths)
        best = better


def _spans(wrapping: Wrapping) -> Iterator[tuple[int, int]]:
    begins = (0, *(cut + 1 for cut in wrapping.cuts[:-1]))
    return zip(begins, (cut + 1 for cut in wrapping.cuts), strict=True)


def _passes(exchange: Exchange, layers: frozenset[int]) -> dict[Phase, _Pass]:
    """The tasks of some layers in the forward and the backward pass, where they have any on host and board."""
    graph = exchange.graph
    of_layers = np.isin(graph.layer, list(layers)) & (graph.step == exchange.step)
    found = {}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        board = np.flatnonzero(of_layers & graph.on_gpu & (graph.phase == phase))
        host = np.flatnonzero(of_layers & graph.on_cpu & (graph.phase == phase))
        if len(board) and len(host):
            found[phase] = _Pass(
                first_call=int(host[0]), last_call=int(host[-1]), first=int(board[0]), last=int(board[-1])
            )
    return found


@dataclass
class _Calls:
    """Adds a step's collectives in the order in which they are called."""

    edit: Edit
    exchange: Exchange
    _last: int = NONE
    _issued: int = 0

    def root(self, size: float) -> None:
        """The gathering of what no unit holds, before everything; it stays gathered."""
        graph = self.edit.graph
        forward = (graph.phase == Phase.FORWARD) & (graph.step == self.exchange.step)
        host, board = np.flatnonzero(forward & graph.on_cpu), np.flatnonzero(forward & graph.on_gpu)
        if size:
            task = self._issue("ncclAllGather root", size, before=int(host[0]), phase=Phase.FORWARD)
            self.edit.depend(task, int(board[0]), Dependency.COMMUNICATION)

    def forward(self, units: Sequence[_Pass], sizes: Sequence[float], ahead: int) -> None:
        """The gatherings of the forward pass."""
        for unit, caller, behind in forward_gatherings(len(units), ahead):
            name = f"ncclAllGather {unit}"
            task = self._issue(name, sizes[unit], before=units[caller].first_call, phase=Phase.FORWARD)
            if behind >= 0:
                self._behind(units[behind].first, task)
            self.edit.depend(task, units[unit].first, Dependency.COMMUNICATION)

    def backward(self, units: Sequence[_Pass], sizes: Sequence[float], ahead: int) -> None:
        """The gatherings of the backward pass, and the scattering behind each unit; units in the order of that pass."""
        gathered: list[int] = []
        scattered: list[int] = []
        calls = list(backward_gatherings(len(units), ahead))
        for place, unit in enumerate(units):
            for number, _, behind in (call for call in calls if call.caller == place):
                name = f"ncclAllGather backward {number}"
                task = self._issue(name, sizes[number], before=unit.first_call, phase=Phase.BACKWARD)
                if behind >= 0:
                    self._behind(units[behind].first, task)
                gathered.append(task)
            self.edit.depend(gathered[place], unit.first, Dependency.COMMUNICATION)
            if place >= HELD_UNITS:
                self.edit.depend(scattered[place - HELD_UNITS], unit.first, Dependency.COMMUNICATION)
            scattered.append(self._scatter(f"ncclReduceScatter {place}", sizes[place], unit.last_call, unit.last))

    def root_gradients(self, size: float) -> None:
        """The scattering of the last gradients, and the update behind all."""
        graph = self.edit.graph
        backward = (graph.phase == Phase.BACKWARD) & (graph.step == self.exchange.step)
        host, board = np.flatnonzero(backward & graph.on_cpu), np.flatnonzero(backward & graph.on_gpu)
        if size:
            self._scatter("ncclReduceScatter root", size, int(host[-1]), int(board[-1]))
        for row in self.exchange.waiting(self.exchange.of_step):
            self.edit.depend(self._last, row, Dependency.COMMUNICATION)

    def _scatter(self, name: str, size: float, call: int, last: int) -> int:
        task = self._issue(name, size, after=call, phase=Phase.BACKWARD)
        self.edit.depend(last, task, Dependency.COMMUNICATION)
        return task

    def _behind(self, row: int, task: int) -> None:
        """Lets a collective begin no earlier than a task of the board."""
        graph = self.edit.graph
        before = np.flatnonzero(graph.following == row)
        if len(before):
            self.edit.depend(int(before[0]), task, Dependency.COMMUNICATION)

    def _issue(
        self, name: str, size: float, *, phase: Phase, before: int | None = None, after: int | None = None
    ) -> int:
        """A collective behind the one that was called before it, and the call."""
        step, cost = self.exchange.step, self.exchange.cost
        task = self.edit.add(
            name,
            TaskKind.COMMUNICATION,
            _half_us(cost, size),
            thread=self.edit.thread(NETWORK),
            phase=phase,
            step=step,
            bytes=size,
            priority=-self._issued,
        )
        call = self.edit.add(
            "c10d::call", TaskKind.CPU, self.exchange.call_us, before=before, after=after, phase=phase, step=step
        )
        self.edit.depend(call, task, Dependency.COMMUNICATION)
        if self._last != NONE:
            self.edit.depend(self._last, task, Dependency.COMMUNICATION)
        self._last = task
        self._issued += 1
        return task


def _half_us(cost: AllReduceCost, size: float) -> float:
    """Microseconds of an all-gather, and of a reduce-scatter: each is half of an all-reduce by rings."""
    if cost.node is None:
        return all_gather_us(size, cost.workers, cost.bandwidth, cost.latency_us) * cost.slower
    from roller.library.collectives import collective_seconds

    told = collective_seconds("all_gather", max(size, 1.0), cost.workers, cost.node)
    return float(told.kernel_seconds) * 1e6 * cost.slower
