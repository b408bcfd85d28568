"""Data tiles staged in shared memory: where every element lies there, and which access copies it.

A tile is copied in the order of its tensor, consecutive threads taking consecutive elements, and stored in an order of
its own: a tensor that the reduction walks innermost is turned, so that what a thread multiplies lies side by side and
is read 16 bytes at a time. :mod:`codegen.gpu.staged.copies` writes the copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from codegen.tir.bounds import Bounds
from codegen.tir.statements import total_of
from codegen.tir.values import Expr
from sokoban.kernel.regions import DataDimension
from sokoban.language.expression import Load, Tensor

#: Tiles start at multiples of this many bytes, as 128-bit accesses ask.
TILE_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
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
        outputs: axes of the output.
        ends: of axes and tensors.
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
    outputs: tuple[str, ...]
    ends: Bounds

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
    def unread(self) -> int | None:
        """The first element of its padding, which is never read, nor those a row on; None where it has none."""
        return self.start + self.extents[self.order[-1]] if self.padding >= self.vector else None

    @property
    def is_turned(self) -> bool:
        """Stored with another dimension innermost than the tensor's."""
        return self.order[-1] != len(self.order) - 1

    def place(self, position: int, local: Mapping[str, Expr]) -> Expr:
        """Coordinate along a dimension at ``local``, positions in block and step by axis; missing ones are zero."""
        dimension = self.dimensions[position]
        lowest = sum(-c * (self.tile[axis] - 1) for axis, c in dimension.terms if c < 0)
        return total_of([c * local[axis] for axis, c in dimension.terms if axis in local], lowest)

    def address(self, local: Mapping[str, Expr], *, lowest: bool = True) -> Expr:
        """Element of the tile at ``local``; without ``lowest`` only what the axes in ``local`` add to it."""
        total: Expr = tirx.const(0, "int32")
        for position, stride in enumerate(self.strides):
            place = self.place(position, local)
            total = total + (place if lowest else place - self.place(position, {})) * stride
        return total

    @property
    def lowest(self) -> int:
        """Element of the tile where every axis stands at its first: reversed ones start at the other end."""
        pairs = zip(self.dimensions, self.strides, strict=True)
        terms = [(c, stride, axis) for dimension, stride in pairs for axis, c in dimension.terms if c < 0]
        return sum(-c * (self.tile[axis] - 1) * stride for c, stride, axis in terms)

    def apart(self, axis: str) -> int:
        """Elements between neighbours along an axis."""
        pairs = zip(self.dimensions, self.strides, strict=True)
        return sum(c * stride for dimension, stride in pairs for other, c in dimension.terms if other == axis)

    # ---- copying

    def turns(self, threads: int) -> int:
        """Accesses of one thread per step."""
        return -(-math.prod(self.extents) // (self.vector * threads))

    def coordinates(self, number: Expr) -> list[Expr]:
        """Coordinates of the first element of an access, ``number`` counting them in the tensor's order."""
        element = number * self.vector
        coordinates = []
        for extent in reversed(self.extents[1:]):
            coordinates.append(tirx.floormod(element, extent))
            element = tirx.floordiv(element, extent)
        return [element, *reversed(coordinates)]

    def index(self, position: int, coordinate: Expr, origin: Mapping[str, Expr]) -> Expr:
        """Index into the tensor along a dimension, for a tile that starts at ``origin`` by axis."""
        dimension = self.dimensions[position]
        lowest = sum(c * (self.tile[axis] - 1) for axis, c in dimension.terms if c < 0)
        base = total_of([c * origin[axis] for axis, c in dimension.terms if axis in origin], lowest)
        return (base + coordinate) * dimension.stride + dimension.offset

    def walks(self, position: int) -> bool:
        """True if steps move along a dimension."""
        return any(axis in self.steps for axis, _ in self.dimensions[position].terms)

    def bounds(self, position: int) -> tuple[bool, bool]:
        """Truth of indices along a dimension falling short of the tensor, and of their exceeding it."""
        dimension = self.dimensions[position]
        low = dimension.offset + dimension.stride * sum(
            c * (self.padded[axis] - 1) for axis, c in dimension.terms if c < 0
        )
        high = low + (dimension.extent(self.padded) - 1) * dimension.stride
        return low < 0, high >= self.tensor.shape[position]

    def end(self, position: int) -> Expr | int:
        """End of the tensor along a dimension."""
        return self.ends.extent(self.tensor.name, position, self.tensor.shape[position])

    def is_spare(self, position: int) -> bool:
        """True if elements beyond the tensor's end along a dimension belong to results that are not stored: only axes
        of the output lead there, past their own ends."""
        axes = [axis for axis, _ in self.dimensions[position].terms]
        short, far = self.bounds(position)
        return far and not short and self.load.pad is None and all(axis in self.outputs for axis in axes)

    def inside(self, positions: Sequence[int], indices: Sequence[Expr]) -> list[Expr]:
        """Conditions that indices along some dimensions are within the tensor; only those that may fail."""
        conditions = []
        for position in positions:
            if self.is_spare(position):
                continue
            short, far = self.bounds(position)
            if short:
                conditions.append(indices[position] >= 0)
            if far:
                conditions.append(indices[position] < self.end(position))
        return conditions

    @cached_property
    def tensor_strides(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        return tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))
