"""The copy of a staged tile by all threads of a block, a few accesses per thread and step.

What no step changes is worked out before all steps: where an access starts in the tensor and in shared memory, and
which elements lie outside the tensor. An access whose elements are outside at every step (the border of a padded
convolution) is no branch in the loop: the pad value is stored once, and the copy diverted to where it does no harm,
from an element that exists to padding that is not read. Surplus threads repeat the tile's last access. Elements needed
only by outputs past the end are read from the tensor's last elements, so no bounds check is needed. A step then costs
each access a load, a store and a little address arithmetic; or, past the registers, one asynchronous copy. Every access
is checked only where steps move along a dimension with a border.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import ir, sym, tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.staged.tiles import StagedTile
from codegen.tir.statements import local_buffer, total_of, vector_read, vector_write, wide
from codegen.tir.values import Expr, stored_constant

#: Most bytes between two accesses of a thread whose distance is a constant in the instructions.
MOST_OFFSET_BYTES = 2**31

#: Least address of an access that lies outside its tensor at every step, whichever way steps lead.
OUTSIDE = -(2**31)


@dataclass(frozen=True)
class Room:
    """The shared buffer that a tile lies in.

    Attributes:
        buffer: all stages of all tiles of the same dtype.
        stages: how many there are.
        stage_elements: how far they lie apart.
        unread: an element that is never read, in every stage, with as many behind it as an access copies; None where
            there is none.
    """

    buffer: Any
    stages: int
    stage_elements: int
    unread: int | None


class _PerTurn:
    """A number per turn of a thread, in registers: one for all turns where constants tell them apart."""

    def __init__(self, name: str, distances: tuple[int, ...] | None, turns: int) -> None:
        self.apart = distances  # elements between a turn's and the first one's
        #: The turns that have a register.
        self.stored = range(turns if distances is None else 1)
        self.buffer = local_buffer(name, len(self.stored), "int32")

    def put(self, turn: int, value: Expr) -> None:
        T.buffer_store(self.buffer, value, [turn])

    def register(self, turn: int) -> tuple[Expr, int]:
        """The register of a turn, and what is to be added to it."""
        return (self.buffer[turn], 0) if self.apart is None else (self.buffer[0], self.apart[turn])


class TileCopy:
    """The copy of one tile: made before all steps, it works out where every access starts in the tensor and in shared
    memory. Then, step after step from the first one, either :meth:`load` into registers and :meth:`store` to shared
    memory, or :meth:`copy` past the registers."""

    def __init__(
        self,
        tile: StagedTile,
        source: Any,
        room: Room,
        *,
        threads: int,
        thread: Expr,
        name: str,
        origin: Mapping[str, Expr],
        holds: bool,
    ) -> None:
        """``source`` is the tensor as one run of elements; ``thread`` is one of ``threads``; ``name`` begins the names
        of registers; ``origin`` has the block's spatial axes; elements are held in registers where a copy ``holds``
        them before it stores them."""
        self.tile, self.source, self.room, self.name = tile, source, room, name
        self.threads, self.thread, self.origin = threads, thread, origin
        self.accesses = math.prod(tile.extents) // tile.vector
        self.turns = tile.turns(threads)
        dimensions = range(len(tile.dimensions))
        self.fixed = [position for position in dimensions if not tile.walks(position)]
        self.moving = [p for p in dimensions if tile.walks(p) and any(tile.bounds(p)) and not tile.is_spare(p)]
        self.border = any(any(tile.bounds(p)) and not tile.is_spare(p) for p in self.fixed)
        #: Whether accesses at the border go elsewhere rather than being checked at every step.
        self.diverts = self.border and not self.moving and bool(tile.steps) and room.unread is not None
        self.checks = bool(self.moving) or (self.border and not self.diverts)
        steady = not self.border and not any(tile.is_spare(p) for p in self.fixed)
        #: Of every access, where it starts in the tensor and in shared memory, both in units of what is read at once,
        #: and its indices along dimensions that are checked at every step.
        self.from_ = self._per_turn("from", self._first, steady)
        self.to = self._per_turn("to", self._place, not self.diverts)
        self.indices = [local_buffer(f"{self.name}_at{p}", self.turns, "int32") for p in self.moving]
        self._write_starts()
        elements = self.turns * tile.vector
        #: Elements that are loaded before they are stored.
        self.values: Any = local_buffer(f"{self.name}_values", elements, tile.tensor.dtype) if holds else None

    def _write_starts(self) -> None:
        """The registers that say where every access starts; pad values where accesses are diverted."""
        for turn in range(self.turns):
            conditions = self.tile.inside(self.fixed, self._indices(turn)) if self.border else []
            inside = tirx.all(*conditions) if conditions else None
            if turn in self.from_.stored:
                first = self._first(turn)
                if inside is not None and not self.diverts:
                    first = tirx.if_then_else(inside, first, tirx.const(self._outside(), "int32"))
                self.from_.put(turn, first)
            if turn in self.to.stored:
                self.to.put(turn, self._place(turn))
            if inside is not None and self.diverts:
                with T.If(tirx.Not(inside)), T.Then():
                    self._fill(turn)
                    self.from_.put(turn, self._existing())
                    self.to.put(turn, self._unread())
        for turn in range(self.turns):
            for indices, position in zip(self.indices, self.moving, strict=True):
                T.buffer_store(indices, self._indices(turn)[position], [turn])

    def load(self, steps: Mapping[str, Expr], after: Mapping[str, Expr]) -> None:
        """The elements of the step that starts at ``steps`` by reduction axis, into registers; ``after`` is the
        next."""
        tile, lanes = self.tile, self.tile.vector
        for turn in range(self.turns):
            value = vector_read(self.source, self._from(turn), lanes)
            conditions = self._conditions(turn, steps)
            if conditions:
                outside = stored_constant(tile.load.pad or 0.0, tile.tensor.dtype)
                outside = outside if lanes == 1 else tirx.Broadcast(outside, lanes)
                value = tirx.if_then_else(tirx.all(*conditions), value, outside)
            vector_write(self.values, tirx.const(turn * lanes, "int32"), lanes, value)
        self._advance(steps, after)

    def store(self, stage: Expr) -> None:
        """The elements from registers to a stage of the shared buffer."""
        tile, lanes = self.tile, self.tile.vector
        stage_start = wide(stage * self.room.stage_elements)
        unit = self._unit
        for turn in range(self.turns):
            to, more = self.to.register(turn)
            first = wide(to) * unit + stage_start + more * unit
            if tile.strides[-1] == 1:
                value = vector_read(self.values, tirx.const(turn * lanes, "int32"), lanes)
                vector_write(self.room.buffer, first, lanes, value)
                continue
            for lane in range(lanes):
                T.buffer_store(self.room.buffer, self.values[turn * lanes + lane], [first + lane * tile.strides[-1]])

    def copy(self, stage: Expr, steps: Mapping[str, Expr], after: Mapping[str, Expr]) -> None:
        """The elements of the step that starts at ``steps``, asynchronously to a stage of the shared buffer; those
        outside become zero."""
        lanes, element_bytes = self.tile.vector, self.tile.tensor.element_bytes
        unit = self._unit
        for turn in range(self.turns):
            to, to_more = self.to.register(turn)
            from_, from_more = self.from_.register(turn)
            shared, offset = self.room.buffer.data, (to * unit + stage * self.room.stage_elements) * element_bytes
            first = wide(from_) * lanes
            conditions = self._conditions(turn, steps)
            name = f"copy_async_{lanes * element_bytes}"
            if conditions or from_more * lanes * element_bytes >= MOST_OFFSET_BYTES:
                source = T.address_of(self.source[first + from_more * lanes])
                inside = tirx.all(*conditions) if conditions else tirx.const(True, "bool")
                to_byte = offset + to_more * unit * element_bytes
                T.evaluate(T.call_extern("void", f"{name}_guarded", shared, to_byte, source, inside))
                continue
            to_bytes, from_bytes = to_more * unit * element_bytes, from_more * lanes * element_bytes
            source = T.address_of(self.source[first])
            T.evaluate(T.call_extern("void", f"{name}_apart", shared, offset, to_bytes, source, from_bytes))
        self._advance(steps, after)

    # ---- accesses

    def _number(self, turn: int) -> Expr:
        """The access of a thread in a turn; the last one for those that would have none."""
        number = self.thread + turn * self.threads
        return number if (turn + 1) * self.threads <= self.accesses else tirx.min(number, self.accesses - 1)

    def _indices(self, turn: int) -> list[Expr]:
        """Indices into the tensor of an access's first element in the first step."""
        tile = self.tile
        indices = []
        for position, coordinate in enumerate(tile.coordinates(self._number(turn))):
            index = tile.index(position, coordinate, self.origin)
            if tile.is_spare(position):
                lanes = tile.vector if position == len(tile.dimensions) - 1 else 1
                index = tirx.min(index, tile.end(position) - lanes)
            indices.append(index)
        return indices

    def _first(self, turn: int) -> Expr:
        """Address of an access's first element in the first step, in units of a vector so that TVM sees that vectors
        are aligned."""
        terms = zip(self._indices(turn), self.tile.tensor_strides, strict=True)
        return tirx.floordiv(total_of([index * stride for index, stride in terms]), self.tile.vector)

    def _existing(self) -> Expr:
        """An address that is inside the tensor at every step, in the same units."""
        tile = self.tile
        indices = [tile.index(p, tirx.const(0, "int32"), {}) if tile.walks(p) else 0 for p in range(len(tile.extents))]
        terms = zip(indices, tile.tensor_strides, strict=True)
        return tirx.floordiv(total_of([index * stride for index, stride in terms]), tile.vector)

    def _outside(self) -> int:
        """An address that stays negative at every step, in the same units."""
        tile, back = self.tile, 0
        for dimension, stride in zip(tile.dimensions, tile.tensor_strides, strict=True):
            walked = [c * (tile.padded[axis] - tile.tile[axis]) for axis, c in dimension.terms if axis in tile.steps]
            back += sum(min(0, way) for way in walked) * dimension.stride * stride
        return OUTSIDE - back // tile.vector

    @property
    def _unit(self) -> int:
        """Elements that places in shared memory are counted in: a vector where its elements lie side by side."""
        return self.tile.vector if self.tile.strides[-1] == 1 else 1

    def _place(self, turn: int) -> Expr:
        """Place of an access in the first stage, in units."""
        tile = self.tile
        coordinates = tile.coordinates(self._number(turn))
        to = total_of([c * stride for c, stride in zip(coordinates, tile.strides, strict=True)], tile.start)
        return tirx.floordiv(to, self._unit)

    def _unread(self) -> Expr:
        unread = self.room.unread
        assert unread is not None
        return tirx.const(unread // self._unit, "int32")

    def _fill(self, turn: int) -> None:
        """The pad value to all stages, in place of an access that is diverted."""
        tile, lanes = self.tile, self.tile.vector
        pad = stored_constant(tile.load.pad or 0.0, tile.tensor.dtype)
        place = self.to.buffer[turn] * self._unit
        for stage in range(self.room.stages):
            for lane in range(lanes):
                element = place + stage * self.room.stage_elements + lane * tile.strides[-1]
                T.buffer_store(self.room.buffer, pad, [element])

    def _per_turn(self, part: str, value_of: Callable[[int], Expr], steady: bool) -> _PerTurn:
        """Registers for what ``of`` says of every turn."""
        analyzer = sym.Analyzer()
        analyzer.bind(self.thread, ir.Range.from_min_extent(0, self.threads))
        first = value_of(0)
        distances = [analyzer.simplify(value_of(turn) - first) for turn in range(self.turns)] if steady else []
        is_constant = bool(distances) and all(isinstance(difference, tirx.IntImm) for difference in distances)
        constants = tuple(int(difference) for difference in distances) if is_constant else None
        return _PerTurn(f"{self.name}_{part}", constants, self.turns)

    # ---- steps

    def _from(self, turn: int) -> Expr:
        """Address of an access's first element in the step that is loaded."""
        first, more = self.from_.register(turn)
        return wide(first) * self.tile.vector + more * self.tile.vector

    def _advance(self, steps: Mapping[str, Expr], after: Mapping[str, Expr]) -> None:
        """Go on to the next step."""
        tile = self.tile
        moved = [
            (tile.index(p, tirx.const(0, "int32"), after) - tile.index(p, tirx.const(0, "int32"), steps)) * stride
            for p, stride in enumerate(tile.tensor_strides)
            if tile.walks(p)
        ]
        if not moved:
            return
        by = sym.Analyzer().simplify(tirx.floordiv(total_of(moved), tile.vector))
        for turn in self.from_.stored:
            self.from_.put(turn, self.from_.buffer[turn] + by)

    def _conditions(self, turn: int, steps: Mapping[str, Expr]) -> list[Expr]:
        """Conditions under which the elements of an access exist in the step that starts at ``steps``."""
        if not self.checks:
            return []
        tile = self.tile
        places = dict.fromkeys(range(len(tile.dimensions)), tirx.const(0, "int32"))
        for indices, p in zip(self.indices, self.moving, strict=True):
            zero = tirx.const(0, "int32")
            places[p] = indices[turn] + tile.index(p, zero, steps) - tile.index(p, zero, {})
        exists = [self.from_.register(turn)[0] >= 0] if self.border else []
        return exists + tile.inside(self.moving, [places[p] for p in range(len(tile.dimensions))])
