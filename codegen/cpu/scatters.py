"""Scattered rows added up, for CPUs: blocks of rows of the result, whose sums lie in scratch memory, and all places."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import position, vectors
from codegen.cpu.function import CpuBuffers, LoweredCpu, lanes_of, lowered_blocks
from codegen.cpu.walks import LineValues, Point
from codegen.tir.lowering import LoweringRequest
from codegen.tir.statements import named
from codegen.tir.values import Expr
from sokoban.kernel.line import LineKernel
from sokoban.schedule.patches import LineSchedule


def takes(request: LoweringRequest[LineKernel, LineSchedule]) -> bool:
    """Scattered rows."""
    return request.problem.scatter is not None


def lower(request: LoweringRequest[LineKernel, LineSchedule]) -> LoweredCpu:
    """The kernel that adds scattered rows."""
    scatter = _Scatter(request)
    return lowered_blocks(
        request, blocks=request.schedule.blocks(request.problem), scratch_elements=scatter.scratch, body=scatter.block
    )


class _Scatter(LineValues):
    """One kernel: blocks of rows, each of which looks through all places."""

    def __init__(self, request: LoweringRequest[LineKernel, LineSchedule]) -> None:
        super().__init__(request.problem)
        scatter = self.kernel.scatter
        assert scatter is not None
        self.scatter, self.rows = scatter, request.schedule.lines
        self.dtype, self.lanes = self.kernel.expr.accumulate, lanes_of(request)
        self.scratch = self.rows * self.kernel.columns

    def block(self, buffers: CpuBuffers, number: Expr) -> None:
        """All places for the rows of a block."""
        self.buffers = buffers
        first = number * self.rows
        count = tirx.min(self.rows, self.kernel.lines - first)
        with named(T.serial, self.scratch, "sum") as each:
            T.buffer_store(buffers.scratch, tirx.const(0, self.dtype), [each])
        with named(T.serial, self.kernel.length, "place") as place:
            row = buffers.sources[self.scatter.place.tensor][place] - first
            with T.If(tirx.all(row >= 0, row < count)), T.Then():
                self._over_columns({self.kernel.axis: place}, lambda point, width: self._add(point, width, row))
        with named(T.serial, count, "row") as number_of_row:
            point = {self.scatter.row: first + number_of_row}
            self._over_columns(point, lambda point, width: self._store(point, width, number_of_row))

    def _over_columns(self, point: Point, body: Callable[[Point, int], None]) -> None:
        """``body`` of vectors of all columns."""

        def along(axes: tuple[str, ...], point: Point) -> None:
            if len(axes) > 1:
                with named(T.serial, self.sizes[axes[0]], axes[0]) as number:
                    along(axes[1:], {**point, axes[0]: number})
                return
            size = self.sizes[axes[0]]
            full = size // self.lanes * self.lanes
            if full:
                with named(T.serial, size // self.lanes, "vector") as vector:
                    body({**point, axes[0]: vector * self.lanes}, self.lanes)
            for start, width in vectors(size % self.lanes, self.lanes):
                body({**point, axes[0]: tirx.const(full + start, "int32")}, width)

        along(self.scatter.columns, point)

    def _sum_at(self, point: Point, row: Expr) -> Expr:
        columns = self.scatter.columns
        return row * self.kernel.columns + position([point[axis] for axis in columns], [self.sizes[a] for a in columns])

    def _at(self, point: Point, lane: Expr) -> Point:
        last = self.scatter.columns[-1]
        return {**point, last: point[last] + lane}

    def _add(self, point: Point, width: int, row: Expr) -> None:
        value = self.value_of(self.scatter.value, width, self.dtype)
        with T.vectorized(width) as lane:
            at = self._at(point, lane)
            number = self._sum_at(at, row)
            total = self.buffers.scratch[number] + value.at(at, self.reader(at, self.dtype), lane)
            T.buffer_store(self.buffers.scratch, total, [number])

    def _store(self, point: Point, width: int, row: Expr) -> None:
        dtype = self.kernel.expr.final_dtype
        final = self.value_of(self.kernel.final.value, width, dtype)
        with T.vectorized(width) as lane:
            at = self._at(point, lane)
            result = self.buffers.scratch[self._sum_at(at, row)]
            value = final.at(at, self.reader(at, dtype, result), lane)
            place = position([at[axis] for axis in self.kernel.final.axes], self.kernel.output.shape)
            T.buffer_store(self.buffers.output, value.astype(self.kernel.output.dtype), [place])
