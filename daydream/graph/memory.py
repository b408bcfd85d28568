"""Memory of one training step, held next to its graph: intervals of moments and bytes, which passes change.

A moment is an operator of the trace: :attr:`Held.born` and :attr:`Held.died` count moments, so that passes which change
durations, or add tasks, leave them valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import numpy as np

from daydream.trace.trace import NONE, Floats, Ints


class MemoryKind(StrEnum):
    """Kinds of memory: TBD's five types (thesis 3.4.4), with its "dynamic" one divided by what is allocated."""

    WEIGHTS = "weights"
    GRADIENTS = "weight gradients"
    OPTIMIZER = "optimizer states"
    FEATURE_MAPS = "feature maps"
    WORKSPACE = "workspace"
    INPUTS = "inputs"
    TEMPORARY = "temporary"


class Holding(Protocol):
    """Memory held from one moment to another, of a step's graph or of a capture."""

    @property
    def bytes(self) -> float:
        """As asked for."""

    @property
    def born(self) -> int:
        """The moment in which it is made, -1 for what exists before."""

    @property
    def died(self) -> int:
        """The last moment in which it is held."""

    @property
    def kind(self) -> MemoryKind:
        """Kind of the data."""


def curve_of(holdings: Iterable[Holding], moments: int) -> Floats:
    """Bytes held in every of so many moments."""
    changes = np.zeros(moments + 1)
    for each in holdings:
        changes[max(each.born, 0)] += each.bytes
        changes[min(each.died + 1, moments)] -= each.bytes
    return np.cumsum(changes)[:moments]


def kinds_at(holdings: Iterable[Holding], moment: int) -> dict[MemoryKind, float]:
    """Bytes held in a moment by kind, 0 for kinds that nothing is held of."""
    sums = dict.fromkeys(MemoryKind, 0.0)
    for each in holdings:
        if each.born <= moment <= each.died:
            sums[each.kind] += each.bytes
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Memory that is held for a while.

    Attributes:
        bytes: as asked for, before an allocator rounds.
        born: the moment in which it is made, -1 for what exists before the step.
        died: the last moment in which it is held; the number of moments where it outlives the step.
        kind: what it holds.
        layer: index of the graph's layers, -1 without.
    """

    bytes: float
    born: int
    died: int
    kind: MemoryKind
    layer: int = NONE


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldMemory:
    """The memory of one step.

    Attributes:
        step: index of the graph's steps.
        source: where the sizes come from, in words.
        events: the trace row of every moment's operator.
        phase: of every moment.
        layer: of every moment, as :attr:`Held.layer`.
        held: in any order.
    """

    step: int
    source: str
    events: Ints
    phase: Ints
    layer: Ints
    held: tuple[Held, ...]

    @cached_property
    def curve(self) -> Floats:
        """Bytes held in every moment."""
        return curve_of(self.held, len(self.events))

    @property
    def peak_bytes(self) -> float:
        """Bytes held at the peak."""
        return float(self.curve.max(initial=0.0))

    @property
    def peak(self) -> int:
        """The moment in which most is held, -1 without moments."""
        return int(self.curve.argmax()) if len(self.curve) else NONE

    def at_peak(self) -> dict[MemoryKind, float]:
        """Bytes at the peak by kind."""
        return kinds_at(self.held, self.peak)

    def moments(self, phase: int, layers: Iterable[int] | None = None) -> Ints:
        """The moments of a phase; of these layers alone where they are given."""
        wanted = self.phase == phase
        if layers is not None:
            wanted &= np.isin(self.layer, list(layers))
        return np.flatnonzero(wanted)


def difference(before: HeldMemory, after: HeldMemory) -> dict[str, float]:
    """Bytes by kind at the peak after less those at the peak before; kinds that stay are left out."""
    old, new = before.at_peak(), after.at_peak()
    return {kind.value: new[kind] - old[kind] for kind in MemoryKind if abs(new[kind] - old[kind]) >= 1}
