"""How a CPU kernel is cut up: blocks that threads take, register tiles within them, operands staged for a block.

Every extent is a number known while the kernel is written. What is left over at the end of an axis gets a register
tile of its own size, so that nothing is computed twice and no inner loop asks where it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.lower import LoweringError
from codegen.values import Expr, affine, constant
from sokoban.expression import Load, Tensor
from sokoban.simd_tiles import CONFLICT_BYTES, ROW_PADDING


@dataclass(frozen=True)
class Cut:
    """One output axis: ``size`` elements in blocks of ``block``, those in register tiles of ``tile``."""

    axis: str
    size: int
    block: int
    tile: int

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)

    @property
    def tiles_per_block(self) -> int:
        return -(-min(self.block, self.size) // self.tile)

    @property
    def rest(self) -> int:
        """Elements of the last register tile where it is no whole one, otherwise 0."""
        return self.size % self.tile


def cut(axis: str, size: int, block: int, tile: int) -> Cut:
    """The axis cut up; tiles longer than the axis are cut down to it."""
    if block % tile and block < size:
        raise LoweringError(f"{tile} elements of {axis} per thread do not divide a block of {block}")
    tile = min(tile, size)
    return Cut(axis, size, size if block >= size else block // tile * tile, tile)


def vectors(extent: int, lanes: int) -> list[tuple[int, int]]:
    """``extent`` elements as (start, width) of vectors: whole ones of ``lanes``, then falling powers of two."""
    found, start, width = [], 0, lanes
    while start < extent:
        while width > extent - start:
            width //= 2
        found.append((start, width))
        start += width
    return found


def points(extents: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """All points of a box, the last axis fastest."""
    for indices in itertools.product(*(range(extent) for extent in extents.values())):
        yield dict(zip(extents, indices, strict=True))


def position(indices: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """Row-major position of an element."""
    total: Expr = tirx.const(0, "int32")
    for index, extent in zip(indices, shape, strict=True):
        total = total * extent + index
    return total


@dataclass(frozen=True)
class Staged:
    """A part of an operand, copied to where the kernel reads it in the order in which it lies there.

    With a ``panel`` axis every index is a plain axis, and the elements of one register tile along it lie side by side:
    panels of ``tile`` elements, each walked through by the loops over the sum. Otherwise it is a box of the tensor, row
    by row, in which every access is inside: what lies outside the tensor is filled with the load's pad value.

    Attributes:
        load: the access it serves. tensor: what it reads.
        start: first element of the scratch memory.
        sizes: how much of every axis it covers.
        panel, tile: axis of the panels and elements of one; "" and 1 for a box.
        inner: the other axes of a panel, in the order of the loops that walk it.
        along: axis of the vectors that read a box in strides; "" where none do. Every ``phases``-th element of a row
            lies beside the next one then, so that these are neighbours.
        phases: the stride.
    """

    load: Load
    tensor: Tensor
    start: int
    sizes: Mapping[str, int]
    panel: str = ""
    tile: int = 1
    inner: tuple[str, ...] = ()
    along: str = ""
    phases: int = 1

    @property
    def phase(self) -> int:
        """Elements of a row that one phase has."""
        return -(-self._extent(len(self.load.indices) - 1) // self.phases)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.panel:
            return (-(-self.sizes[self.panel] // self.tile), *(self.sizes[axis] for axis in self.inner), self.tile)
        extents = [self._extent(depth) for depth in range(len(self.load.indices))]
        extents[-1] = self.phase * self.phases
        if len(extents) > 1 and extents[-1] * self.tensor.element_bytes % CONFLICT_BYTES == 0:
            extents[-1] += ROW_PADDING
        return tuple(extents)

    def _extent(self, depth: int) -> int:
        """Elements along a dimension that the copy covers."""
        terms = self.load.indices[depth].terms
        return 1 + sum(coefficient * (self.sizes[axis] - 1) for axis, coefficient in terms)

    @property
    def elements(self) -> int:
        """Of scratch memory, in whole cache lines."""
        return -(-math.prod(self.shape) // ROW_PADDING) * ROW_PADDING

    def element(self, buffer: Any, local: Mapping[str, Expr], within: Expr | None = None) -> Expr:
        """The element at axis values counted from where this part starts.

        Of a panel's axis ``local`` is the first element of a register tile, and ``within`` counts on from there.
        """
        if self.panel:
            inner = [local[axis] for axis in self.inner]
            number = tirx.floordiv(local[self.panel], self.tile)
            return buffer[self.start + position([number, *inner, within], self.shape)]
        indices = []
        for index in self.load.indices:
            total: Expr = tirx.const(0, "int32")
            for axis, coefficient in index.terms:
                if axis != self.along:
                    total = total + local[axis] * coefficient
            indices.append(total)
        if self.along:
            rest = indices[-1]
            indices[-1] = self._in_row(rest) + local[self.along]
        return buffer[self.start + position(indices, self.shape)]

    def _in_row(self, index: Expr) -> Expr:
        """Where an element of a row lies in it."""
        if self.phases == 1:
            return index
        return tirx.floormod(index, self.phases) * self.phase + tirx.floordiv(index, self.phases)

    def copy(self, source: Any, buffer: Any, origin: Mapping[str, Expr], limits: Mapping[str, int], lanes: int) -> None:
        """Write the loops that fill it. ``origin``: its first element; ``limits``: axis sizes; both by axis."""
        if self.panel:
            self._copy_panels(source, buffer, origin, limits, lanes)
        else:
            self._copy_box(source, buffer, origin, 0, [])

    def _copy_panels(
        self, source: Any, buffer: Any, origin: Mapping[str, Expr], limits: Mapping[str, int], lanes: int
    ) -> None:
        panels, rest = self.shape[0], limits[self.panel] % self.tile
        left = limits[self.panel] - origin[self.panel]
        whole = tirx.min(panels, tirx.floordiv(left, self.tile))

        def vectors_of(number: Expr, at: Sequence[Expr], here: Mapping[str, Expr], width: int) -> None:
            for start, count in vectors(width, lanes):
                with T.vectorized(count) as lane:
                    place = {**here, self.panel: origin[self.panel] + number * self.tile + start + lane}
                    indices = [place[index.axes[0]] for index in self.load.indices]
                    value = source[position(indices, self.tensor.shape)].astype(buffer.dtype)
                    T.buffer_store(buffer, value, [self.start + position([number, *at, start + lane], self.shape)])

        def walk(axes: Sequence[str], at: list[Expr], here: dict[str, Expr], inside: Callable[..., None]) -> None:
            if not axes:
                inside(at, here)
                return
            extent = tirx.min(self.sizes[axes[0]], limits[axes[0]] - origin[axes[0]])
            with T.serial(0, extent) as index:
                walk(axes[1:], [*at, index], {**here, axes[0]: origin[axes[0]] + index}, inside)

        def through_panels(at: list[Expr], here: dict[str, Expr]) -> None:
            with T.serial(0, whole) as number:
                vectors_of(number, at, here, self.tile)
            if rest:
                with T.If(whole * self.tile < tirx.min(left, panels * self.tile)), T.Then():
                    vectors_of(whole, at, here, rest)

        if self.load.indices[-1].axes == (self.panel,):
            # The tensor's rows run through all panels, and a page may hold no more than one of them: each is read
            # once, from end to end.
            walk(self.inner, [], {}, through_panels)
            return
        with T.serial(0, whole) as number:
            walk(self.inner, [], {}, lambda at, here: vectors_of(number, at, here, self.tile))
        if rest:
            with T.If(whole * self.tile < tirx.min(left, panels * self.tile)), T.Then():
                walk(self.inner, [], {}, lambda at, here: vectors_of(whole, at, here, rest))

    def _copy_box(self, source: Any, buffer: Any, origin: Mapping[str, Expr], depth: int, at: list[Expr]) -> None:
        """Loops over the dimensions from ``depth`` on; ``at`` holds the indices of those before."""
        low = affine(self.load.indices[depth], origin)
        # Of a row that is read, not of what it is lengthened by.
        extent, size = self._extent(depth), self.tensor.shape[depth]
        inside = tirx.max(0, tirx.min(extent, -low)), tirx.max(0, tirx.min(extent, size - low))
        last = depth == len(self.shape) - 1
        fills = self.load.pad is not None
        if fills:
            with T.serial(0, inside[0]) as index:
                self._fill(buffer, depth, [*at, index])
        if last:
            self._copy_row(source, buffer, origin, at, inside)
        else:
            with T.serial(0, tirx.max(0, inside[1] - inside[0])) as index:
                self._copy_box(source, buffer, origin, depth + 1, [*at, inside[0] + index])
        if fills:
            with T.serial(0, extent - tirx.max(inside[0], inside[1])) as index:
                self._fill(buffer, depth, [*at, tirx.max(inside[0], inside[1]) + index])

    def _copy_row(
        self, source: Any, buffer: Any, origin: Mapping[str, Expr], at: list[Expr], inside: tuple[Expr, Expr]
    ) -> None:
        """The elements of one row that lie in the tensor, phase by phase."""
        lows = [affine(load_index, origin) for load_index in self.load.indices]
        for phase in range(self.phases):
            first, end = (tirx.floordiv(bound - phase + self.phases - 1, self.phases) for bound in inside)
            with T.serial(0, tirx.max(0, end - first)) as index:
                here = [*at, (first + index) * self.phases + phase]
                places = [base + offset for base, offset in zip(lows, here, strict=True)]
                value = source[position(places, self.tensor.shape)].astype(buffer.dtype)
                place = position([*at, phase * self.phase + first + index], self.shape)
                T.buffer_store(buffer, value, [self.start + place])

    def _fill(self, buffer: Any, depth: int, at: list[Expr]) -> None:
        """The pad value at every element below these indices."""
        inner = math.prod(self.shape[depth + 1 :])
        if depth == len(self.shape) - 1:
            at = [*at[:-1], self._in_row(at[-1])]
        start = position([*at, *(tirx.const(0, "int32") for _ in self.shape[depth + 1 :])], self.shape)
        value = constant(self.load.pad or 0.0, buffer.dtype)
        with T.serial(0, inner) as index:
            T.buffer_store(buffer, value, [self.start + start + index])
