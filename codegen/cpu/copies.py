"""Packed operands of a CPU kernel: copied into scratch memory in the order in which the inner loop reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import position, vectors
from codegen.cpu.lines import ALL_CACHES, prefetch
from codegen.cpu.vectors import register_vector, store_vector, transposed, value_of_buffer, vector_at
from codegen.tir.values import Expr, affine, constant
from hal.spec.parts import CPU_AHEAD_BYTES, CPU_LINE_BYTES
from sokoban.language.expression import Load, Tensor
from sokoban.schedule.cpu_tiles import CONFLICT_BYTES, ROW_PADDING

#: Lanes from which on squares are transposed in registers.
_LEAST_SQUARE = 4
#: Vectors of a row that is copied without a loop.
_MOST_VECTORS = 16


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A part of an operand, copied into scratch memory in the order in which the inner loop reads it.

    With a ``panel`` axis every index is a plain axis, and the elements of one register tile along it lie side by side:
    panels of ``tile`` elements, each walked through by the loops over the sum. Otherwise it is a box of the tensor, row
    by row, in which every access is inside: what lies outside the tensor is filled with the load's pad value.

    Attributes:
        load: the access that the copy serves.
        tensor: what the access reads.
        start: first element of the scratch memory.
        sizes: elements of every axis that the copy covers.
        panel: axis of the panels; None for a box.
        tile: elements of a panel along that axis; 1 for a box.
        inner: the other axes of a panel, in the order of the loops that walk it.
        along: axis of the vectors that read a box in strides; None where none do. Every ``phases``-th element of a row
            is then adjacent to the next one, so that a vector reads neighbours.
        phases: the stride.
    """

    load: Load
    tensor: Tensor
    start: int
    sizes: Mapping[str, int]
    panel: str | None = None
    tile: int = 1
    inner: tuple[str, ...] = ()
    along: str | None = None
    phases: int = 1

    @property
    def phase(self) -> int:
        """Elements of a row that belong to one phase."""
        return -(-self.extent(len(self.load.indices) - 1) // self.phases)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of the copy along every dimension in scratch memory, padding included."""
        if self.panel is not None:
            return (-(-self.sizes[self.panel] // self.tile), *(self.sizes[axis] for axis in self.inner), self.tile)
        extents = [self.extent(depth) for depth in range(len(self.load.indices))]
        extents[-1] = self.phase * self.phases
        if len(extents) > 1 and extents[-1] * self.tensor.element_bytes % CONFLICT_BYTES == 0:
            extents[-1] += ROW_PADDING
        return tuple(extents)

    def extent(self, depth: int) -> int:
        """Elements of the tensor along a dimension that the copy covers."""
        terms = self.load.indices[depth].terms
        return 1 + sum(coefficient * (self.sizes[axis] - 1) for axis, coefficient in terms)

    @property
    def elements(self) -> int:
        """Elements of scratch memory that the copy takes, in whole cache lines."""
        return -(-math.prod(self.shape) // ROW_PADDING) * ROW_PADDING

    def element(self, buffer: Any, local: Mapping[str, Expr], within: Expr | None = None) -> Expr:
        """The element at axis values counted from where this part starts.

        Of a panel's axis ``local`` is the first element of a register tile, and ``within`` counts on from there.
        """
        if self.panel is not None:
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
        if self.along is not None:
            row_index = indices[-1]
            indices[-1] = self.in_row(row_index) + local[self.along]
        return buffer[self.start + position(indices, self.shape)]

    def in_row(self, index: Expr) -> Expr:
        """Position in scratch memory, within its row, of the element ``index`` of a row of the tensor."""
        if self.phases == 1:
            return index
        return tirx.floormod(index, self.phases) * self.phase + tirx.floordiv(index, self.phases)

    def copy(self, source: Any, buffer: Any, origin: Mapping[str, Expr], limits: Mapping[str, int], lanes: int) -> None:
        """Write the loops that fill the copy. ``origin`` is its first element and ``limits`` the axes' sizes, by axis;
        ``lanes`` are the elements of a vector."""
        if self.panel is not None:
            self._copy_panels(self.panel, source, buffer, origin, limits, lanes)
        else:
            _Box(self, source, buffer, origin, lanes).write(0, [])

    def _copy_panels(
        self, panel: str, source: Any, buffer: Any, origin: Mapping[str, Expr], limits: Mapping[str, int], lanes: int
    ) -> None:
        panels, remainder = self.shape[0], limits[panel] % self.tile
        remaining = limits[panel] - origin[panel]
        full_panels = tirx.min(panels, tirx.floordiv(remaining, self.tile))

        def vectors_of(number: Expr, place: Sequence[Expr], point: Mapping[str, Expr], width: int) -> None:
            for start, count in vectors(width, lanes):
                with T.vectorized(count) as lane:
                    element = {**point, panel: origin[panel] + number * self.tile + start + lane}
                    indices = [element[index.axes[0]] for index in self.load.indices]
                    value = source[position(indices, self.tensor.shape)].astype(buffer.dtype)
                    T.buffer_store(buffer, value, [self.start + position([number, *place, start + lane], self.shape)])

        def walk(axes: Sequence[str], place: list[Expr], point: dict[str, Expr], inside: Callable[..., None]) -> None:
            if not axes:
                inside(place, point)
                return
            extent = tirx.min(self.sizes[axes[0]], limits[axes[0]] - origin[axes[0]])
            with T.serial(0, extent) as index:
                walk(axes[1:], [*place, index], {**point, axes[0]: origin[axes[0]] + index}, inside)

        def through_panels(place: list[Expr], point: dict[str, Expr]) -> None:
            with T.serial(0, full_panels) as number:
                vectors_of(number, place, point, self.tile)
            if remainder:
                with T.If(full_panels * self.tile < tirx.min(remaining, panels * self.tile)), T.Then():
                    vectors_of(full_panels, place, point, remainder)

        if self.load.indices[-1].axes == (panel,):
            # The tensor's rows run through all panels, and a page may hold no more than one of them: each is read
            # once, from end to end.
            walk(self.inner, [], {}, through_panels)
            return
        with T.serial(0, full_panels) as number:
            self._copy_columns(panel, source, buffer, origin, limits, number, vectors(self.tile, lanes))
        if remainder:
            with T.If(full_panels * self.tile < tirx.min(remaining, panels * self.tile)), T.Then():
                self._copy_columns(panel, source, buffer, origin, limits, full_panels, vectors(remainder, lanes))

    def _copy_columns(
        self,
        panel: str,
        source: Any,
        buffer: Any,
        origin: Mapping[str, Expr],
        limits: Mapping[str, int],
        number: Expr,
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        """A panel of a tensor whose rows do not run through panels: each vector of it is a column there. Squares are
        read row by row and transposed in registers."""
        last = self.load.indices[-1].axes[0]
        joined = self._joined(limits)
        outer = [axis for axis in self.inner if axis not in joined]
        zero = tirx.const(0, "int32")
        columns = tirx.min(self.sizes[joined[0]], limits[joined[0]] - origin[joined[0]])
        columns = columns * math.prod(self.sizes[axis] for axis in joined[1:])

        def place(start: int, walked: Mapping[str, Expr], column: Expr) -> Expr:
            """The place of a vector in scratch memory."""
            indices = [{**walked, last: column}[axis] for axis in self.inner]
            return self.start + position([number, *indices, start], self.shape)

        def read(row: Expr, walked: Mapping[str, Expr], column: Expr) -> Expr:
            """The place of an element of the tensor; ``row``: of the panel."""
            element_axes = {axis: origin[axis] + value for axis, value in {**walked, last: column}.items()}
            element_axes[panel] = origin[panel] + number * self.tile + row
            return position([element_axes[index.axes[0]] for index in self.load.indices], self.tensor.shape)

        def one_by_one(start: int, width: int, walked: Mapping[str, Expr], column: Expr) -> None:
            with T.vectorized(width) as lane:
                value = source[read(start + lane, walked, column)].astype(buffer.dtype)
                T.buffer_store(buffer, value, [place(start, walked, column) + lane])

        def square(start: int, width: int, walked: Mapping[str, Expr], column: Expr) -> None:
            values = [vector_at(source, read(start + row, walked, column), width, buffer.dtype) for row in range(width)]
            rows = [register_vector(f"row_{row}", width, buffer.dtype, value) for row, value in enumerate(values)]
            for row, column_vector in enumerate(transposed(rows)):
                store_vector(buffer, place(start, walked, column + row), value_of_buffer(column_vector), width)

        def walk(axes: Sequence[str], walked: dict[str, Expr]) -> None:
            if axes:
                extent = tirx.min(self.sizes[axes[0]], limits[axes[0]] - origin[axes[0]])
                with T.serial(0, extent) as index:
                    walk(axes[1:], {**walked, axes[0]: index})
                return
            for start, width in pieces:
                squares = tirx.floordiv(columns, width) if width >= _LEAST_SQUARE else zero
                if width >= _LEAST_SQUARE:
                    with T.serial(0, squares) as index:
                        square(start, width, walked, index * width)
                with T.serial(0, columns - squares * width) as index:
                    one_by_one(start, width, walked, squares * width + index)

        walk(outer, dict.fromkeys(joined, zero))

    def _joined(self, limits: Mapping[str, int]) -> list[str]:
        """The axes at the end of the tensor's rows that can be walked as one: they lie in a panel as in the tensor, and
        of all but the first everything is copied."""
        axes = [index.axes[0] for index in self.load.indices]
        joined = [axes[-1]]
        if self.inner[-1] != joined[0]:
            return joined
        while self.sizes[joined[0]] == limits[joined[0]] and len(joined) < len(self.inner):
            following = axes[-len(joined) - 1]
            if following != self.inner[-len(joined) - 1]:
                break
            joined.insert(0, following)
        return joined


class _Box:
    """The copy of a box, row by row."""

    def __init__(self, staged: Staged, source: Any, buffer: Any, origin: Mapping[str, Expr], lanes: int) -> None:
        self.staged, self.source, self.buffer, self.lanes = staged, source, buffer, lanes
        self.lows = [affine(index, origin) for index in staged.load.indices]
        self.extents = [staged.extent(depth) for depth in range(len(self.lows))]
        self.fills = staged.load.pad is not None

    def write(self, depth: int, indices: list[Expr]) -> None:
        """Loops over the dimensions from ``depth`` on; ``at`` holds the indices of those before."""
        if depth == len(self.extents) - 1:
            self._row(indices)
            return
        first, end = self._inside(depth)
        self._fill_before(first, indices)
        with T.serial(0, tirx.max(0, end - first)) as index:
            self.write(depth + 1, [*indices, first + index])
        self._fill_after(first, end, indices)

    def _inside(self, depth: int) -> tuple[Expr, Expr]:
        """Indices of the box along a dimension that lie in the tensor: the first, and the one after the last."""
        # Of a row that is read, not of what it is lengthened by.
        low, extent, size = self.lows[depth], self.extents[depth], self.staged.tensor.shape[depth]
        return tirx.max(0, tirx.min(extent, -low)), tirx.max(0, tirx.min(extent, size - low))

    def _ahead(self) -> tuple[int, int]:
        """The dimension, and how many further along it, in which rows are asked for while others are copied; (0, 0)
        for none."""
        size = self.staged.tensor.element_bytes * self.extents[-1]
        for depth in range(len(self.extents) - 2, -1, -1):
            further = -(-CPU_AHEAD_BYTES // size)
            if 2 * further <= self.extents[depth]:
                return depth, further
            size *= self.extents[depth]
        return 0, 0

    def _ask_for_row(self, indices: Sequence[Expr]) -> None:
        depth, further = self._ahead()
        if not further:
            return
        ahead = [*indices[:depth], indices[depth] + further, *indices[depth + 1 :]]
        line = CPU_LINE_BYTES // self.staged.tensor.element_bytes
        for start in range(0, self.extents[-1], line):
            places = [low + offset for low, offset in zip(self.lows, [*ahead, tirx.const(start, "int32")], strict=True)]
            prefetch(self.source[position(places, self.staged.tensor.shape)], ALL_CACHES)

    def _row(self, indices: list[Expr]) -> None:
        self._ask_for_row(indices)
        first, end = self._inside(len(indices))
        count, extent = end - first, self.extents[-1]
        if self.staged.phases > 1:
            self._part_of_row(first, end, indices, self._phases)
        elif all(isinstance(bound, tirx.IntImm) for bound in (first, end)):
            self._part_of_row(
                first, end, indices, lambda *part: self._constant_part(int(first), max(0, int(count)), indices)
            )
        else:
            # Nearly all rows lie in the tensor from end to end. How long the others are is found out for each: LLVM
            # makes calls of the C library of that, which take longer than the rows.
            with T.If(tirx.all(first == 0, end == extent)):
                with T.Then():
                    self._constant_part(0, extent, indices)
                with T.Else():
                    self._part_of_row(first, end, indices, self._counted)

    def _part_of_row(
        self, first: Expr, end: Expr, indices: list[Expr], copy: Callable[[Expr, Expr, list[Expr]], None]
    ) -> None:
        """A row with what lies outside the tensor before and after the rest."""
        self._fill_before(first, indices)
        copy(first, end, indices)
        self._fill_after(first, end, indices)

    def _constant_part(self, first: int, count: int, indices: list[Expr]) -> None:
        """``count`` elements of a row from ``first`` on: whole vectors, and where elements remain one more vector that
        ends with the row."""
        width = self.lanes
        while width > count:
            width //= 2
        if not width:
            return
        full_vectors, start = count // width, tirx.const(first, "int32")
        if full_vectors > _MOST_VECTORS:
            with T.serial(0, full_vectors) as index:
                self._vector(start + index * width, width, indices)
        else:
            for number in range(full_vectors):
                self._vector(start + number * width, width, indices)
        if count % width:
            self._vector(start + (count - width), width, indices)

    def _counted(self, first: Expr, end: Expr, indices: list[Expr]) -> None:
        with T.serial(0, tirx.max(0, end - first)) as index:
            self._vector(first + index, 1, indices)

    def _vector(self, start: Expr, width: int, indices: list[Expr]) -> None:
        element = [*indices, start]
        places = [low + offset for low, offset in zip(self.lows, element, strict=True)]
        value = vector_at(self.source, position(places, self.staged.tensor.shape), width, self.buffer.dtype)
        store_vector(self.buffer, self.staged.start + position(element, self.staged.shape), value, width)

    def _phases(self, first: Expr, end: Expr, indices: list[Expr]) -> None:
        """The elements of a row phase by phase."""
        phases = self.staged.phases
        for phase in range(phases):
            begin, stop = (tirx.floordiv(bound - phase + phases - 1, phases) for bound in (first, end))
            with T.serial(0, tirx.max(0, stop - begin)) as index:
                element = [*indices, (begin + index) * phases + phase]
                places = [low + offset for low, offset in zip(self.lows, element, strict=True)]
                value = self.source[position(places, self.staged.tensor.shape)].astype(self.buffer.dtype)
                place = position([*indices, phase * self.staged.phase + begin + index], self.staged.shape)
                T.buffer_store(self.buffer, value, [self.staged.start + place])

    def _fill_before(self, first: Expr, indices: list[Expr]) -> None:
        if self.fills:
            with T.serial(0, first) as index:
                self._fill([*indices, index])

    def _fill_after(self, first: Expr, end: Expr, indices: list[Expr]) -> None:
        if self.fills:
            end = tirx.max(first, end)
            with T.serial(0, self.extents[len(indices)] - end) as index:
                self._fill([*indices, end + index])

    def _fill(self, indices: list[Expr]) -> None:
        """The pad value at every element below these indices."""
        staged, depth = self.staged, len(indices) - 1
        inner = math.prod(staged.shape[depth + 1 :])
        if depth == len(staged.shape) - 1:
            indices = [*indices[:-1], staged.in_row(indices[-1])]
        start = position([*indices, *(tirx.const(0, "int32") for _ in staged.shape[depth + 1 :])], staged.shape)
        value = constant(staged.load.pad or 0.0, self.buffer.dtype)
        with T.serial(0, inner) as index:
            T.buffer_store(self.buffer, value, [staged.start + start + index])
