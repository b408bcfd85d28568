"""Scans, and places and ranks of values, for CPUs: a line after the other, or a vector of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import position, vectors
from codegen.cpu.function import CpuBuffers, LoweredCpu, lanes_of, lowered_blocks, read_flat, reads_inside
from codegen.cpu.functions import CHOSEN, VectorValue
from codegen.tir.carried import NOWHERE, Carried
from codegen.tir.lowering import LoweringRequest
from codegen.tir.statements import local_buffer, named
from codegen.tir.values import Expr
from sokoban.kernel.line import LineKernel
from sokoban.language.expression import Load, Reduction, Value
from sokoban.schedule.patches import LineSchedule, lies_across

Point = Mapping[str, Expr]


def takes(request: LoweringRequest[LineKernel, LineSchedule]) -> bool:
    """Scans, places and ranks; scattered rows have a lowering of their own."""
    return request.problem.scatter is None


def lower(request: LoweringRequest[LineKernel, LineSchedule]) -> LoweredCpu:
    """The kernel of a scan, of places or ranks."""
    walks = _Walks(request)
    return lowered_blocks(request, blocks=walks.blocks, scratch_elements=0, body=walks.block)


class LineValues:
    """Values of a kernel of lines at a point.

    Attributes:
        buffers: what the kernel reads and writes, once it is being written.
    """

    buffers: CpuBuffers

    def __init__(self, kernel: LineKernel) -> None:
        self.kernel, self.sizes, self.tensors = kernel, kernel.sizes, kernel.expr.tensor_by_name

    def value_of(self, value: Value, width: int, dtype: str) -> VectorValue:
        """A value in every lane of a vector."""

        def is_inside(load: Load) -> bool:
            is_result = load.tensor == self.kernel.line.tensor
            return is_result or reads_inside(load, self.tensors[load.tensor], self.sizes)

        return VectorValue(value, dtype, width, is_inside)

    def reader(self, point: Point, dtype: str, result: Expr | None = None) -> Callable[[Load], Expr]:
        """The function that reads a load at a point, where ``result`` is that of the line."""

        def read(load: Load) -> Expr:
            if load.tensor == self.kernel.line.tensor:
                assert result is not None
                return result.astype(dtype)
            return read_flat(load, self.tensors, self.buffers.sources, point, self.sizes, dtype)

        return read


class _Walks(LineValues):
    """One kernel: blocks of lines, or of vectors of neighbouring lines."""

    def __init__(self, request: LoweringRequest[LineKernel, LineSchedule]) -> None:
        kernel, schedule = request.problem, request.schedule
        super().__init__(kernel)
        self.dtype, self.carried = kernel.expr.accumulate, Carried(kernel, CHOSEN)
        last = self.sizes[kernel.row_axes[-1]] if lies_across(kernel) else 1
        self.lanes = min(lanes_of(request), last)
        #: Vectors along the last of the other axes, and all of them.
        self.across = -(-last // self.lanes)
        self.groups = kernel.lines // last * self.across
        self.each = max(1, min(self.groups, schedule.lines // self.lanes))
        self.pieces = vectors(last % self.lanes, self.lanes)

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return -(-self.groups // self.each)

    def block(self, buffers: CpuBuffers, number: Expr) -> None:
        """All lines of a block."""
        self.buffers = buffers
        first = number * self.each
        with named(T.serial, tirx.min(self.each, self.groups - first), "line") as line:
            self._group(first + line)

    def _group(self, group: Expr) -> None:
        """A vector of lines; the last of an axis may be shorter ones."""
        axes = self.kernel.row_axes
        row: dict[str, Expr] = {}
        vector = lies_across(self.kernel)
        if vector:
            row[axes[-1]] = tirx.floormod(group, self.across) * self.lanes
            group = tirx.floordiv(group, self.across)
        for axis in reversed(axes[:-1] if vector else axes):
            row[axis] = tirx.floormod(group, self.sizes[axis]) if axis != axes[0] else group
            group = tirx.floordiv(group, self.sizes[axis])
        if not self.pieces:
            self._line(row, self.lanes)
            return
        last = axes[-1]
        with T.If(row[last] + self.lanes <= self.sizes[last]), T.Then():
            self._line(row, self.lanes)
        with T.If(row[last] + self.lanes > self.sizes[last]), T.Then():
            for start, width in self.pieces:
                self._line({**row, last: row[last] + start}, width)

    def _line(self, row: Point, width: int) -> None:
        """``width`` neighbouring lines from ``row`` on, an element of each at a time."""
        kernel = self.kernel
        if kernel.rank_axis is not None and width == 1:
            self._by_list(row)
            return
        carried = local_buffer("carried", width, self.dtype)
        places = None if kernel.is_scan else local_buffer("places", width, "int32")
        with T.vectorized(width) as lane:
            T.buffer_store(carried, self.carried.first, [lane])
            if places is not None:
                T.buffer_store(places, tirx.const(NOWHERE, "int32"), [lane])
        if kernel.rank_axis is not None:
            assert places is not None
            self._by_rank(row, width, carried, places)
            return
        body = self.value_of(kernel.body, width, self.dtype)
        final = self.value_of(kernel.final.value, width, kernel.expr.final_dtype)
        with named(T.serial, kernel.length, "place") as place:
            index = kernel.length - 1 - place if kernel.is_reversed else place
            with T.vectorized(width) as lane:
                point = self._lane({**row, kernel.axis: index}, lane)
                value = body.at(point, self.reader(point, self.dtype), lane)
                if places is not None:
                    self._take(carried, places, value, place, lane)
                elif kernel.is_exclusive:
                    # What was carried is stored first, the value that it grows by read before that.
                    self._grown(final, point, carried, value, lane)
                else:
                    T.buffer_store(carried, self.carried.combine(carried[lane], value), [lane])
                    self._store(final, point, carried[lane], lane)
        if places is not None:
            with T.vectorized(width) as lane:
                self._store(final, self._lane(row, lane), places[lane], lane)

    def _by_rank(self, row: Point, width: int, best: Any, places: Any) -> None:
        """The values or places of neighbouring lines by rank: for each the best of what comes behind the one before."""
        kernel = self.kernel
        before, place_before = local_buffer("before", width, self.dtype), local_buffer("place_before", width, "int32")
        body = self.value_of(kernel.body, width, self.dtype)
        with named(T.serial, kernel.ranks, "rank") as rank:
            with T.vectorized(width) as lane:
                T.buffer_store(before, best[lane], [lane])
                T.buffer_store(place_before, places[lane], [lane])
            with T.vectorized(width) as lane:
                T.buffer_store(best, self.carried.first, [lane])
                T.buffer_store(places, tirx.const(NOWHERE, "int32"), [lane])
            with named(T.serial, kernel.length, "place") as place, T.vectorized(width) as lane:
                point = self._lane({**row, kernel.axis: place}, lane)
                value = body.at(point, self.reader(point, self.dtype), lane)
                is_behind = self.carried.is_better(before[lane], place_before[lane], value, place)
                self._take(best, places, value, place, lane, tirx.any(tirx.EQ(rank, 0), is_behind))
            self._store_rank(row, rank, width, lambda lane: (best[lane], places[lane]))

    def _by_list(self, row: Point) -> None:
        """The values or places of a line by rank: a list of the best so far, into which few elements come."""
        kernel, ranks = self.kernel, self.kernel.ranks
        values, places = local_buffer("values", ranks, self.dtype), local_buffer("places", ranks, "int32")
        value, worst = local_buffer("value", 1, self.dtype), local_buffer("worst", 1, self.dtype)
        body = self.value_of(kernel.body, 1, self.dtype)
        with named(T.serial, ranks, "rank") as rank:
            T.buffer_store(values, self.carried.first, [rank])
            T.buffer_store(places, tirx.const(NOWHERE, "int32"), [rank])
        T.buffer_store(worst, self.carried.first, [0])
        with named(T.serial, kernel.length, "place") as place:
            point = {**row, kernel.axis: place}
            T.buffer_store(value, body.at(point, self.reader(point, self.dtype), tirx.const(0, "int32")), [0])

            def is_better_than(rank: Expr) -> Expr:
                return self.carried.is_better(value[0], place, values[rank], places[rank])

            # Most elements pass by after one comparison: of equals the first is in the list, and comes first.
            may_join = tirx.any(self.carried.may_be_better(value[0], worst[0]), place < ranks)
            with T.If(may_join), T.Then():
                # As many as there are; a number of turns that is known would bring the whole list into registers, from
                # which each comparison takes its element out again.
                length = tirx.min(place + 1, ranks)
                with named(T.serial, length, "turn") as turn:
                    rank = length - 1 - turn
                    before = tirx.max(rank - 1, 0)
                    is_moved = tirx.all(rank > 0, is_better_than(before))
                    with T.If(is_moved):
                        with T.Then():
                            T.buffer_store(values, values[before], [rank])
                            T.buffer_store(places, places[before], [rank])
                        with T.Else(), T.If(is_better_than(rank)), T.Then():
                            T.buffer_store(values, value[0], [rank])
                            T.buffer_store(places, place, [rank])
                T.buffer_store(worst, values[ranks - 1], [0])
        with named(T.serial, ranks, "rank") as rank:
            self._store_rank(row, rank, 1, lambda lane: (values[rank], places[rank]))

    def _store_rank(self, row: Point, rank: Expr, width: int, result: Callable[[Expr], tuple[Expr, Expr]]) -> None:
        """A value or place of ``width`` neighbouring lines."""
        kernel = self.kernel
        assert kernel.rank_axis is not None
        final = self.value_of(kernel.final.value, width, kernel.expr.final_dtype)
        is_place = isinstance(kernel.walk, Reduction) and kernel.walk.is_place
        with T.vectorized(width) as lane:
            self._store(final, self._lane({**row, kernel.rank_axis: rank}, lane), result(lane)[is_place], lane)

    def _take(self, best: Any, places: Any, value: Expr, place: Expr, lane: Expr, *conditions: Expr) -> None:
        better = tirx.all(self.carried.is_better(value, place, best[lane], places[lane]), *conditions)
        T.buffer_store(places, tirx.Select(better, place, places[lane]), [lane])
        T.buffer_store(best, tirx.Select(tirx.EQ(places[lane], place), value, best[lane]), [lane])

    def _grown(self, final: VectorValue, point: Point, carried: Any, value: Expr, lane: Expr) -> None:
        self._store(final, point, carried[lane], lane)
        T.buffer_store(carried, self.carried.combine(carried[lane], value), [lane])

    def _lane(self, point: Point, lane: Expr) -> Point:
        """A point of the line that is in a lane."""
        if not lies_across(self.kernel):
            return point
        last = self.kernel.row_axes[-1]
        return {**point, last: point[last] + lane}

    def _store(self, final: VectorValue, point: Point, result: Expr, lane: Expr) -> None:
        kernel = self.kernel
        value = result
        if not isinstance(kernel.final.value, Load):
            value = final.at(point, self.reader(point, final.dtype, result), lane)
        place = position([point[axis] for axis in kernel.final.axes], kernel.output.shape)
        T.buffer_store(self.buffers.output, value.astype(kernel.output.dtype), [place])
