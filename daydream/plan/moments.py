"""Moments of a rank's stage: which operator runs when in the passes of micro-batches, and what these make and keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import compress, cycle
from typing import TYPE_CHECKING

import numpy as np

from daydream.graph.graph import Phase
from daydream.graph.memory import MemoryKind
from daydream.memory.footprint import Allocation, allocations
from daydream.plan.context import gathered_bytes
from daydream.plan.layout import Layout, orders
from daydream.trace.trace import NONE, Flags, Floats, Ints

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

    # The same as arrays, in which forward is 1 and backward 0

    @cached_property
    def starts(self) -> Ints:
        """:attr:`begins` by direction, micro-batch and chunk."""
        starts = np.zeros((2, self.micro_batches, len(self.chunks)), np.int64)
        for (forward, micro_batch, chunk), moment in self.begins.items():
            starts[int(forward), micro_batch, chunk] = moment
        return starts

    @cached_property
    def ahead(self) -> Ints:
        """:attr:`within` by direction and unit."""
        ahead = np.zeros((2, self.units.count + 1), np.int64)
        for (forward, unit), moment in self.within.items():
            ahead[int(forward), unit] = moment
        return ahead

    @cached_property
    def spans(self) -> Ints:
        """:attr:`lengths` by direction and chunk."""
        numbers = range(len(self.chunks))
        return np.array([[self.lengths[bool(way), chunk] for chunk in numbers] for way in (0, 1)], np.int64)

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


@dataclass(frozen=True, eq=False)
class Lives:
    """Memory that a micro-batch makes, an entry each: units and phases of its first operator and its last.

    Attributes:
        held: what it is.
        bytes: of it.
        is_gradient: whether it is a gradient of a weight.
        born: unit of the first operator.
        is_forward: 1 where that is in the forward pass, else 0.
        at: its place among the unit's operators.
        died: unit of the last operator; -1 where it outlives the micro-batch.
        dies_forward: 1 where that is in the forward pass, else 0.
        until: its place.
    """

    held: tuple[Allocation, ...]
    bytes: Ints
    is_gradient: Flags
    born: Ints
    is_forward: Ints
    at: Ints
    died: Ints
    dies_forward: Ints
    until: Ints

    def some(self, chosen: Flags) -> Lives:
        """The lives that are chosen."""
        held = tuple(compress(self.held, chosen.tolist()))
        columns = [getattr(self, each.name)[chosen] for each in fields(self) if each.name != "held"]
        return Lives(held, *columns)


@dataclass(frozen=True, eq=False)
class Made:
    """Memory of all micro-batches in a rank's moments, one micro-batch after the other.

    Attributes:
        lives: of each micro-batch.
        bytes: of every allocation.
        born: its first moment.
        died: its last.
    """

    lives: Lives
    bytes: Ints
    born: Ints
    died: Ints

    def curve(self, count: int) -> Floats:
        """Bytes held in every of so many moments."""
        changes = np.bincount(self.born, self.bytes, count + 1)
        changes -= np.bincount(np.minimum(self.died + 1, count), self.bytes, count + 1)
        return np.asarray(np.cumsum(changes)[:count], np.float64)

    def allocations(self) -> Iterator[Allocation]:
        """Each by itself."""
        columns = (each.tolist() for each in (self.bytes, self.born, self.died))
        for held, size, born, died in zip(cycle(self.lives.held), *columns, strict=False):
            yield Allocation(size, born, died, held.kind, held.module)


def _places(units: Units) -> Ints:
    """Place of every operator within its unit's pass, or the update."""
    place = np.zeros(len(units.capture.operators), np.int64)
    for rows in (*units.rows.values(), np.flatnonzero(units.phase == Phase.UPDATE)):
        place[rows] = np.arange(len(rows))
    return place


@lru_cache(maxsize=16)
def lives(units: Units, layout: Layout) -> Lives:
    """Everything that the two passes of the model make, by units; ``layout`` says how a sample's tokens are shared."""
    held, *columns = zip(*_lives_of(units, layout), strict=True)
    born, forward, at, died, dies_forward, until = (np.array(column, np.int64) for column in columns)
    is_gradient = np.array([each.kind is MemoryKind.GRADIENTS for each in held])
    sizes = np.array([each.bytes for each in held], np.int64)
    return Lives(held, sizes, is_gradient, born, forward, at, died, dies_forward, until)


def _lives_of(units: Units, layout: Layout) -> Iterator[tuple[Allocation, int, int, int, int, int, int]]:
    """Columns of :class:`Lives` but for those that follow from the allocation."""
    place = _places(units)
    gathered = {row: gathered_bytes(each, layout) for row, each in enumerate(units.capture.operators)}
    operators = len(units.capture.operators)
    firsts = {int(captured): unit for unit, captured in reversed(list(enumerate(units.captured.tolist())))}
    many, members = units.many
    for each in allocations(units.capture, {row: size for row, size in gathered.items() if size}):
        if each.born == NONE or not each.bytes or units.phase[each.born] == Phase.UPDATE:
            continue
        outlives = each.died >= operators or units.phase[each.died] == Phase.UPDATE
        end = each.born if outlives else each.died
        born, died = int(units.unit[each.born]), int(units.unit[end])
        forward, dies_forward = (int(units.phase[row] == Phase.FORWARD) for row in (each.born, end))
        if born == many:
            near = 0 < died < int(units.captured[-1])
            pairs = [(unit, unit + died - born if near else firsts[died]) for unit in members]
        elif died == many:
            # What begins outside the blocks is held up to the farthest of them.
            far = members[-1] if dies_forward else members[0]
            pairs = [(firsts[born], firsts[born] + died - born if 0 < born < int(units.captured[-1]) else far)]
        else:
            pairs = [(firsts[born], firsts[died])]
        for begin, finish in pairs:
            yield (
                each,
                begin,
                forward,
                int(place[each.born]),
                NONE if outlives else finish,
                dies_forward,
                int(place[end]),
            )
