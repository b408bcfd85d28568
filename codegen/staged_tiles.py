"""Data tiles staged in shared memory: where every element lies there, and which thread copies it.

A tile is copied in the order of its tensor, consecutive threads taking consecutive elements, and stored in an order of
its own: a tensor that the reduction walks innermost is turned, so that what a thread multiplies lies side by side and
is read 16 bytes at a time. Everything about a copy that no step changes (addresses, what lies outside the tensor) is
worked out before the loop over steps: a step then costs a load and a store per access and little else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from codegen.values import Expr, constant
from sokoban.expression import Load, Tensor
from sokoban.regions import DataDimension

#: Stands for the address of an element that lies outside its tensor.
OUTSIDE = -(2**31)

#: Tiles start at multiples of this many bytes, as 128-bit accesses ask.
TILE_ALIGNMENT = 16


@dataclass(frozen=True)
class StagedTile:
    """The data tile of one load.

    Attributes:
        load, tensor: what is read.
        dimensions: of the tensor, as coordinates in the tile.
        extents: of the tile, by dimension.
        order: dimensions as they are stored, innermost last.
        padding: elements behind every row as it is stored.
        vector: elements that a thread copies at a time.
        start: first element in its shared buffer.
        padded: sizes of all axes in whole tiles.
        steps: reduction axes that are walked in several steps.
        tile: sizes of block and step, by axis.
    """

    load: Load
    tensor: Tensor
    dimensions: tuple[DataDimension, ...]
    extents: tuple[int, ...]
    order: tuple[int, ...]
    padding: int
    vector: int
    start: int
    padded: Mapping[str, int]
    steps: tuple[str, ...]
    tile: Mapping[str, int]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along every dimension, as stored."""
        strides = [0] * len(self.order)
        pitch = 1
        for position in reversed(self.order):
            strides[position] = pitch
            pitch *= self.extents[position] + (self.padding if position == self.order[-1] else 0)
        return tuple(strides)

    @property
    def size(self) -> int:
        """Elements in shared memory, padding included, in whole units of alignment."""
        extents = [self.extents[position] for position in self.order]
        extents[-1] += self.padding
        unit = max(1, TILE_ALIGNMENT // self.tensor.element_bytes)
        return -(-math.prod(extents) // unit) * unit

    @property
    def is_turned(self) -> bool:
        """Stored with another dimension innermost than the tensor's."""
        return self.order[-1] != len(self.order) - 1

    def place(self, position: int, local: Mapping[str, Expr]) -> Expr:
        """Coordinate along a dimension at ``local``, positions in block and step by axis; missing ones are zero."""
        dimension = self.dimensions[position]
        lowest = sum(-c * (self.tile[axis] - 1) for axis, c in dimension.terms if c < 0)
        return _sum([c * local[axis] for axis, c in dimension.terms if axis in local], lowest)

    def address(self, local: Mapping[str, Expr], *, lowest: bool = True) -> Expr:
        """Element of the tile at ``local``; without ``lowest`` only what the axes in ``local`` add to it."""
        total: Expr = tirx.const(0, "int32")
        for position, stride in enumerate(self.strides):
            place = self.place(position, local)
            total = total + (place if lowest else place - self.place(position, {})) * stride
        return total

    # ---- copying

    def turns(self, threads: int) -> int:
        """Accesses of one thread per step."""
        return -(-math.prod(self.extents) // (self.vector * threads))

    def coordinates(self, number: Expr) -> list[Expr]:
        """Coordinates of the first element of an access, ``number`` counting them in the tensor's order."""
        rest = number * self.vector
        found = []
        for extent in reversed(self.extents[1:]):
            found.append(tirx.floormod(rest, extent))
            rest = tirx.floordiv(rest, extent)
        return [rest, *reversed(found)]

    def index(self, position: int, coordinate: Expr, origin: Mapping[str, Expr]) -> Expr:
        """Index into the tensor along a dimension, for a tile that starts at ``origin`` by axis."""
        dimension = self.dimensions[position]
        lowest = sum(c * (self.tile[axis] - 1) for axis, c in dimension.terms if c < 0)
        base = _sum([c * origin[axis] for axis, c in dimension.terms if axis in origin], lowest)
        return (base + coordinate) * dimension.stride + dimension.offset

    def walks(self, position: int) -> bool:
        """Whether steps move along a dimension."""
        return any(axis in self.steps for axis, _ in self.dimensions[position].terms)

    def bounds(self, position: int) -> tuple[bool, bool]:
        """Whether indices along a dimension may fall short of the tensor, and whether they may exceed it."""
        dimension = self.dimensions[position]
        low = dimension.offset + dimension.stride * sum(
            c * (self.padded[axis] - 1) for axis, c in dimension.terms if c < 0
        )
        high = low + (dimension.extent(self.padded) - 1) * dimension.stride
        return low < 0, high >= self.tensor.shape[position]

    def inside(self, positions: Sequence[int], indices: Sequence[Expr]) -> list[Expr]:
        """Conditions that indices along some dimensions are within the tensor; only those that may fail."""
        conditions = []
        for position in positions:
            short, far = self.bounds(position)
            if short:
                conditions.append(indices[position] >= 0)
            if far:
                conditions.append(indices[position] < self.tensor.shape[position])
        return conditions

    @cached_property
    def tensor_strides(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        return tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))


class TileCopy:
    """The copy of one tile by all threads of a block, in three parts: :meth:`prepare` before all steps, then for every
    step :meth:`load` into registers and :meth:`store` to shared memory."""

    def __init__(self, tile: StagedTile, source: Any, shared: Any, threads: int, thread: Expr, name: str) -> None:
        self.tile, self.source, self.shared = tile, source, shared
        self.threads, self.thread = threads, thread
        self.turns = tile.turns(threads)
        self.partial = math.prod(tile.extents) % (tile.vector * threads) != 0
        dimensions = range(len(tile.dimensions))
        self.fixed = [position for position in dimensions if not tile.walks(position)]
        self.moving = [p for p in dimensions if tile.walks(p) and any(tile.bounds(p))]
        self.from_ = local_buffer(f"{name}_from", self.turns, "int32")
        self.values = local_buffer(f"{name}_values", self.turns * tile.vector, tile.tensor.dtype)
        self.places = [local_buffer(f"{name}_at{p}", self.turns, "int32") for p in self.moving]
        self.to = local_buffer(f"{name}_to", self.turns, "int32") if self._needs_places else None

    @property
    def _needs_places(self) -> bool:
        """Whether a store's address is worth keeping: it is no plain multiple of the turn."""
        return self.tile.is_turned or self.tile.padding > 0

    def _number(self, turn: Expr) -> Expr:
        return turn * self.threads + self.thread

    def prepare(self, origin: Mapping[str, Expr]) -> None:
        """Where every access starts in the tensor and in shared memory; ``origin`` has the block's spatial axes."""
        tile = self.tile
        with named(T.unroll, self.turns, "turn") as turn:
            coordinates = tile.coordinates(self._number(turn))
            indices = [tile.index(position, c, origin) for position, c in enumerate(coordinates)]
            address = _sum([i * stride for i, stride in zip(indices, tile.tensor_strides, strict=True)], 0)
            conditions = tile.inside(self.fixed, indices)
            if self.partial:
                conditions.append(self._number(turn) < math.prod(tile.extents) // tile.vector)
            # In units of a vector, so that TVM sees that vectors are aligned.
            address = tirx.floordiv(address, tile.vector)
            if conditions:
                address = tirx.if_then_else(tirx.all(*conditions), address, tirx.const(OUTSIDE, "int32"))
            self.is_guarded = bool(conditions)
            T.buffer_store(self.from_, address, [turn])
            for place, position in zip(self.places, self.moving, strict=True):
                T.buffer_store(place, indices[position], [turn])
            if self.to is not None:
                to = _sum([c * stride for c, stride in zip(coordinates, tile.strides, strict=True)], tile.start)
                T.buffer_store(self.to, to if tile.is_turned else tirx.floordiv(to, tile.vector), [turn])

    def load(self, steps: Mapping[str, Expr]) -> None:
        """The elements of the step that starts at ``steps`` by reduction axis, into registers."""
        tile = self.tile
        moved = {p: tile.index(p, tirx.const(0, "int32"), steps) for p in range(len(tile.dimensions))}
        still = {p: tile.index(p, tirx.const(0, "int32"), {}) for p in range(len(tile.dimensions))}
        walked = _sum([(moved[p] - still[p]) * s for p, s in enumerate(tile.tensor_strides) if tile.walks(p)], 0)
        with named(T.unroll, self.turns, "turn") as turn:
            conditions = [self.from_[turn] != OUTSIDE] if self.is_guarded else []
            places = {p: place[turn] + moved[p] - still[p] for p, place in zip(self.moving, self.places, strict=True)}
            conditions += tile.inside(self.moving, [places.get(p, 0) for p in range(len(tile.dimensions))])
            lanes = tile.vector
            value = vector_read(self.source, self.from_[turn] * lanes + walked, lanes)
            if conditions:
                outside = constant(tile.load.pad or 0.0, tile.tensor.dtype)
                outside = outside if lanes == 1 else tirx.Broadcast(outside, lanes)
                value = tirx.if_then_else(tirx.all(*conditions), value, outside)
            vector_write(self.values, turn * lanes, lanes, value)

    def store(self, at: Expr) -> None:
        """The elements from registers to the shared buffer that starts at ``at``."""
        tile = self.tile
        with named(T.unroll, self.turns, "turn") as turn:
            if not self.partial:
                self._store(turn, at)
                return
            with T.If(self._number(turn) < math.prod(tile.extents) // tile.vector), T.Then():
                self._store(turn, at)

    def _store(self, turn: Expr, at: Expr) -> None:
        tile, lanes = self.tile, self.tile.vector
        stride = tile.strides[-1]
        if stride == 1:
            to = self._number(turn) * lanes + tile.start if self.to is None else self.to[turn] * lanes
            vector_write(self.shared, to + at, lanes, vector_read(self.values, turn * lanes, lanes))
            return
        assert self.to is not None
        for lane in range(lanes):
            T.buffer_store(self.shared, self.values[turn * lanes + lane], [self.to[turn] + at + lane * stride])


def vector_read(buffer: Any, first: Expr, lanes: int) -> Expr:
    """``lanes`` adjacent elements."""
    return buffer[first] if lanes == 1 else tirx.BufferLoad(buffer, [tirx.Ramp(first, 1, lanes)])


def vector_write(buffer: Any, first: Expr, lanes: int, value: Expr) -> None:
    """Store ``lanes`` adjacent elements."""
    T.buffer_store(buffer, value, [first if lanes == 1 else tirx.Ramp(first, 1, lanes)])


def local_buffer(name: str, elements: int, dtype: str) -> Any:
    """Registers of a thread."""
    return allocate(name, elements, dtype, "local")


def allocate(name: str, elements: int, dtype: str, scope: str) -> Any:
    """A one-dimensional buffer with a name in the source."""
    buffer = T.alloc_buffer((elements,), dtype, scope=scope)
    IRBuilder.name(name, buffer)
    return buffer


class named:
    """A loop whose variable has a name of its own in the source."""

    def __init__(self, loop: Callable[[int], Any], extent: int, name: str) -> None:
        self._loop, self._name = loop(extent), name

    def __enter__(self) -> Expr:
        variable = self._loop.__enter__()
        IRBuilder.name(self._name, variable)
        return variable

    def __exit__(self, *error: Any) -> None:
        self._loop.__exit__(*error)


def _sum(terms: Sequence[Expr], offset: int) -> Expr:
    total: Expr = tirx.const(offset, "int32")
    for term in terms:
        total = total + term
    return total
