"""Fully sharded training on gloo (PyTorch's FSDP2, `fully_shard`) from a recording of other training."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.graph import Phase, TaskGraph, TaskKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.communication import (
    BYTES_PER_US,
    all_gather_us,
    check,
    check_not_negative,
    reduce_scatter_us,
)
from daydream.passes.basis.gradients import ParameterGradient, find_gradients
from daydream.passes.basis.hosted import Exchange, caller_rows, on_every_rank, without_exchange
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError


@what_if("fsdp")
@dataclass(frozen=True, kw_only=True)
class Fsdp:
    """Fully sharded training with FSDP2 on gloo: parameters gathered for every unit, gradients reduced and scattered.

    A unit is a module whose whole path the regular expression `wrap` fits, with all that is below it; the whole model
    is one more unit with what is left, and is gathered once a step. On the host FSDP2 waits for each collective where
    it asks for it, so nothing overlaps: before a unit's forward pass its parameters are copied together, gathered
    and copied out; again before its backward pass; behind that its gradients are copied together, reduced and
    scattered, and copied out. A recorded exchange is taken away first, DDP's copies with it. The optimizer's work
    shrinks to the shard, its calls stay.

    Assumptions: workers are alike and shards even. A gather takes (n-1)/n S / `bandwidth` (GB/s) and (n-1) times
    `latency_us`, a reduce-scatter the same with `reduce_bandwidth` and `reduce_latency_us` (0: as the gather); gloo
    reduces with an all-reduce, so measure both. Copies run at `copy_gbps`, which counts each byte copied once; every
    gather and every reduce-scatter costs its caller `call_us` besides.

    Raises:
        InputError: a parameter is out of range, `wrap` fits no module with parameters, no source tells the gradients'
            sizes, or tasks run on a GPU.
    """

    wrap: str
    workers: int = 2
    bandwidth: float = 1.0
    latency_us: float = 100.0
    reduce_bandwidth: float = 0.0
    reduce_latency_us: float = 0.0
    copy_gbps: float = 10.0
    call_us: float = 0.0

    def __post_init__(self) -> None:
        check("fsdp", workers=self.workers, bandwidth=self.bandwidth, copy_gbps=self.copy_gbps)
        names = ("latency_us", "reduce_bandwidth", "reduce_latency_us", "call_us")
        check_not_negative("fsdp", **{name: getattr(self, name) for name in names})
        try:
            re.compile(self.wrap)
        except re.error as error:
            problem = f"{self.wrap!r} is no regular expression: {error}"
            raise InputError("fsdp: wrap", problem, r"write layers\.\d+") from None

    def __call__(self, graph: TaskGraph) -> Outcome:
        """The graph with gathers, reduce-scatters and copies."""
        sizes: dict[str, float] = {}

        def change(part: TaskGraph, joined: bool) -> TaskGraph:
            stripped = without_exchange(part, copies=True).graph
            gradients = find_gradients(stripped)
            exchange = Exchange(stripped, joined)
            for step, of_step in gradients.steps.items():
                members = self.members(of_step)
                sizes.update({unit: sum(gradient.bytes for gradient in group) for unit, group in members.items()})
                _Sharded(exchange, self, step, caller_rows(stripped, of_step)).put_in(members)
            return replace(_smaller_updates(exchange.edit.apply(), self.workers), workers=self.workers)

        changed = on_every_rank("fsdp", graph, change)
        wrapped = {unit: size for unit, size in sizes.items() if unit}
        if not wrapped:
            problem = f"{self.wrap!r} fits no module with parameters"
            raise InputError("fsdp: wrap", problem, "write for example layers\\.\\d+")
        total = sum(self.step_us(size, 2 if unit else 1) for unit, size in sizes.items())
        least, most, other = (each / 1e6 for each in (min(wrapped.values()), max(wrapped.values()), sizes.get("", 0.0)))
        note = (
            f"{len(wrapped)} units of {least:.1f} to {most:.1f} MB and the rest of {other:.1f} MB among {self.workers} "
            f"workers, {total / 1e3:.3f} ms a step for collectives and copies"
        )
        return Outcome(changed, (note,))

    def gather_us(self, size: float) -> float:
        """Microseconds of the gather of `size` bytes in all."""
        return all_gather_us(size, self.workers, self.bandwidth, self.latency_us)

    def reduce_us(self, size: float) -> float:
        """Microseconds of the reduce-scatter of `size` bytes in all."""
        pace = (self.reduce_bandwidth, self.reduce_latency_us)
        return reduce_scatter_us(
            size, self.workers, *(pace if self.reduce_bandwidth else (self.bandwidth, self.latency_us))
        )

    def copy_us(self, size: float) -> float:
        """Microseconds of a copy."""
        return size / (self.copy_gbps * BYTES_PER_US)

    def step_us(self, size: float, gathers: int) -> float:
        """Microseconds of a unit's collectives and copies in a step."""
        copies = gathers * (1 + 1 / self.workers) + 2 + 1 / self.workers
        calls = (gathers + 1) * self.call_us
        return gathers * self.gather_us(size) + self.reduce_us(size) + self.copy_us(size) * copies + calls

    def unit(self, path: str) -> str:
        """The unit that a module or parameter belongs to: the longest path above it that fits, "" for the rest."""
        parts = path.split(".")
        above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((unit for unit in above if re.fullmatch(self.wrap, unit)), "")

    def members(self, gradients: tuple[ParameterGradient, ...]) -> dict[str, list[ParameterGradient]]:
        """The gradients of every unit, units in the order in which the backward pass completes them."""
        members: dict[str, list[ParameterGradient]] = {}
        for gradient in gradients:
            members.setdefault(self.unit(gradient.name), []).append(gradient)
        return members


class _Sharded:
    """Puts a step's collectives and copies in. All stand on the thread that trains, which waits for each."""

    def __init__(self, exchange: Exchange, plan: Fsdp, step: int, rows: Ints) -> None:
        """`rows` are the tasks of the step on the thread that trains."""
        self._exchange, self._plan, self._step, self._rows = exchange, plan, step, rows
        graph = exchange.edit.graph
        named = [plan.unit(layer) for layer in graph.layers]
        self._unit = [named[layer] if layer != NONE else "" for layer in graph.layer[self._rows].tolist()]

    def put_in(self, members: dict[str, list[ParameterGradient]]) -> None:
        """Adds the collectives of these units."""
        phase = self._exchange.edit.graph.phase[self._rows]
        sizes = {unit: sum(gradient.bytes for gradient in group) for unit, group in members.items()}
        # What no unit holds is gathered before the first and reduced behind the last.
        for unit in sorted(members):
            is_of_unit = np.array([name == unit or not unit for name in self._unit], np.bool_)
            for of_phase in (Phase.FORWARD, Phase.BACKWARD) if unit else (Phase.FORWARD,):
                rows = self._rows[is_of_unit & (phase == of_phase)]
                if len(rows):
                    self._gather(unit, int(rows[0]), sizes[unit])
        for unit in sorted(members, key=lambda unit: not unit):
            self._reduce(unit, self._behind(members[unit], phase, of_pass=not unit), sizes[unit])

    def _behind(self, group: list[ParameterGradient], phase: Ints, *, of_pass: bool) -> int:
        """The task behind which gradients are reduced: the last hook of the unit, or of the whole backward pass."""
        if of_pass:
            return int(self._rows[phase == Phase.BACKWARD][-1])
        return max(gradient.hook for gradient in group)

    def _gather(self, unit: str, row: int, size: float) -> None:
        edit, share = self._exchange.edit, size / self._plan.workers
        phase = int(edit.graph.phase[row])
        layer = int(edit.graph.layer[row])
        into = edit.add(
            f"FSDP::all_gather_copy_in {unit}", TaskKind.CPU, self._plan.copy_us(share) + self._plan.call_us,
            before=row, phase=phase, layer=layer,
        )  # fmt: skip
        task = self._exchange.collective(
            f"all_gather {unit}", self._plan.gather_us(size), [into], step=self._step, size=size
        )
        out = edit.add(
            f"FSDP::all_gather_copy_out {unit}", TaskKind.CPU, self._plan.copy_us(size),
            before=row, phase=phase, layer=layer,
        )  # fmt: skip
        self._exchange.wait(task, out)

    def _reduce(self, unit: str, row: int, size: float) -> None:
        edit, share = self._exchange.edit, size / self._plan.workers
        # Copied together, and once more by gloo, which reduces in place.
        into = edit.add(
            f"FSDP::chunk_cat {unit}", TaskKind.CPU, 2 * self._plan.copy_us(size) + self._plan.call_us,
            after=row, phase=Phase.BACKWARD,
        )  # fmt: skip
        task = self._exchange.collective(
            f"reduce_scatter {unit}", self._plan.reduce_us(size), [into], step=self._step, size=size
        )
        out = edit.add(
            f"FSDP::post_backward {unit}", TaskKind.CPU, self._plan.copy_us(share), after=into, phase=Phase.BACKWARD
        )
        self._exchange.wait(task, out)


def _smaller_updates(graph: TaskGraph, workers: int) -> TaskGraph:
    """The optimizer's operators on a shard: what lasts longer than the shortest of its kind shrinks."""
    updating = np.flatnonzero((graph.phase == Phase.UPDATE) & (graph.event != NONE) & graph.on_cpu)
    duration = graph.duration_us.copy()
    for name in np.unique(graph.name[updating]).tolist():
        rows = updating[graph.name[updating] == name]
        least = float(duration[rows].min())
        duration[rows] = least + (duration[rows] - least) / workers
    return graph.with_durations(updating, duration[updating])
