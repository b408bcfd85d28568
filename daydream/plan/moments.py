"""Moments of a rank's stage: which operator runs when in the passes of micro-batches, and what these make and keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.graph.graph import Phase
from daydream.memory.footprint import Allocation, allocations
from daydream.plan.context import gathered_bytes
from daydream.plan.layout import Layout, orders
from daydream.trace.trace import NONE, Ints

if TYPE_CHECKING:
    from daydream.plan.units import Units


@dataclass(frozen=True, eq=False)
class Moments:
    """Passes of a stage, one after the other.

    Attributes:
        units: of the step.
        chunks: units of every chunk of the stage.
        chunk: of every unit of the stage.
        begins: first moment of every pass by whether forward, micro-batch and chunk.
        within: moments of a pass before each unit, by whether forward and unit.
        lengths: of every chunk's passes by whether forward and chunk.
        place: of every operator within its unit's pass, or the update.
        update: first moment of the update.
        count: of moments.
        micro_batches: that go through.
    """

    units: Units
    chunks: tuple[tuple[int, ...], ...]
    chunk: Mapping[int, int]
    begins: Mapping[tuple[bool, int, int], int]
    within: Mapping[tuple[bool, int], int]
    lengths: Mapping[tuple[bool, int], int]
    place: Ints
    update: int
    count: int
    micro_batches: int

    @classmethod
    def of(cls, units: Units, layout: Layout, stage: int) -> Moments:
        """The passes of a stage."""
        runs = units.stages(layout.pipeline * layout.chunks, layout.blocks)
        chunks = tuple(tuple(runs[chunk * layout.pipeline + stage]) for chunk in range(layout.chunks))
        place = _places(units)
        within, lengths = {}, {}
        for number, members in enumerate(chunks):
            for forward, order in ((True, members), (False, members[::-1])):
                at = 0
                for unit in order:
                    within[forward, unit] = at
                    at += cls._length(units, unit, forward=forward)
                lengths[forward, number] = at
        begins, at = {}, 0
        for forward, micro_batch, number in orders(layout, stage):
            begins[forward, micro_batch, number] = at
            at += lengths[forward, number]
        count = at + max(int((units.phase == Phase.UPDATE).sum()), 1)
        chunk = {unit: number for number, members in enumerate(chunks) for unit in members}
        return cls(units, chunks, chunk, begins, within, lengths, place, at, count, layout.micro_batches)

    @staticmethod
    def _length(units: Units, unit: int, *, forward: bool) -> int:
        rows = units.rows[int(units.captured[unit]), Phase.FORWARD if forward else Phase.BACKWARD]
        # A unit without operators still has a moment.
        return max(len(rows), 1)

    def at(self, unit: int, micro_batch: int, place: int, *, forward: bool) -> int:
        """The moment of an operator of a unit."""
        return self.begins[forward, micro_batch, self.chunk[unit]] + self.within[forward, unit] + place

    def end(self, unit: int, micro_batch: int, *, forward: bool) -> int:
        """The last moment of a unit in a pass."""
        return self.at(unit, micro_batch, self._length(self.units, unit, forward=forward) - 1, forward=forward)

    def pass_end(self, unit: int, micro_batch: int, *, forward: bool) -> int:
        """The last moment of the pass that a unit is part of."""
        chunk = self.chunk[unit]
        return self.begins[forward, micro_batch, chunk] + self.lengths[forward, chunk] - 1


class Life(NamedTuple):
    """Memory of a micro-batch: the unit and the phase of its first operator and of its last, and their places.

    ``died`` is -1 where it outlives the micro-batch.
    """

    held: Allocation
    born: int
    is_forward: bool
    at: int
    died: int
    dies_forward: bool
    until: int


def moved(held: Allocation, born: int, died: int, size: int | None = None) -> Allocation:
    """The allocation at other moments; ``size`` in place of its bytes."""
    return Allocation(held.bytes if size is None else size, born, died, held.kind, held.module)


def _places(units: Units) -> Ints:
    """Place of every operator within its unit's pass, or the update."""
    place = np.zeros(len(units.capture.operators), np.int64)
    for rows in (*units.rows.values(), np.flatnonzero(units.phase == Phase.UPDATE)):
        place[rows] = np.arange(len(rows))
    return place


@lru_cache(maxsize=8)
def lives(units: Units, layout: Layout) -> tuple[Life, ...]:
    """Everything that the two passes of the model make, by units; ``layout`` says how a sample's tokens are shared."""
    return tuple(_lives_of(units, layout))


def _lives_of(units: Units, layout: Layout) -> Iterator[Life]:
    """Everything that the two passes of the model make, by units."""
    place = _places(units)
    gathered = {row: gathered_bytes(each, layout) for row, each in enumerate(units.capture.operators)}
    operators, last = len(units.capture.operators), units.count - 1
    firsts = {int(captured): unit for unit, captured in reversed(list(enumerate(units.captured.tolist())))}
    many = None if units.whole else 2
    for each in allocations(units.capture, {row: size for row, size in gathered.items() if size}):
        if each.born == NONE or not each.bytes or units.phase[each.born] == Phase.UPDATE:
            continue
        outlives = each.died >= operators or units.phase[each.died] == Phase.UPDATE
        end = each.born if outlives else each.died
        born, died = int(units.unit[each.born]), int(units.unit[end])
        forward, ends_forward = units.phase[each.born] == Phase.FORWARD, units.phase[end] == Phase.FORWARD
        near = 0 < died < int(units.captured[-1])

        def life(
            begin: int, finish: int, each: Allocation = each, forward: bool = bool(forward), end: int = end,
            ends_forward: bool = bool(ends_forward), outlives: bool = outlives,
        ) -> Life:  # fmt: skip
            finish = NONE if outlives else finish
            return Life(each, begin, forward, int(place[each.born]), finish, ends_forward, int(place[end]))

        if born == many:
            for unit in range(2, last - 1):
                yield life(unit, unit + died - born if near else firsts[died])
        elif died == many:
            # What begins outside the blocks is held up to the farthest of them.
            far = last - 2 if ends_forward else 2
            yield life(firsts[born], firsts[born] + died - born if 0 < born < int(units.captured[-1]) else far)
        else:
            yield life(firsts[born], firsts[died])
