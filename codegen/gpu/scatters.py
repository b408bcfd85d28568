"""Scattered rows added up: threads have sums of a few rows of the result, and look through the places in order.

A warp looks at 32 places at a time, a lane each, and votes on which of them name one of its rows; those are gone
through in their order, and what is added is read for them alone. The warps of a block look at neighbouring places each
and list in shared memory which of them name a row of the block, so that every place is looked at by one of them; the
lists take turns, and one barrier a turn is enough. Every thread has a few columns of these rows in registers, so that
no two add to one element, and every element is added up in the order of the places, whatever runs first. A place that
is no row of the result names no row of any thread. In OpenCL C, which has no votes, threads look at one place after
the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.lines import WARP, LineRequest, Lines, Point
from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered, identifier
from codegen.tir.statements import allocate, barrier, local_buffer, named, vector_read, vector_write
from codegen.tir.values import Expr, affine, evaluate
from sokoban.language.expression import Load
from sokoban.schedule.patches import (
    PLACES_AHEAD,
    ROWS_AHEAD,
    column_blocks,
    column_loads,
    scatter_shared_bytes,
    scatter_vector,
)


def takes(request: LineRequest) -> bool:
    """Scattered rows."""
    return request.problem.scatter is not None


def lower(request: LineRequest) -> Lowered:
    """The kernel that adds scattered rows."""
    return _Scatter(request).run()


class _Scatter(Lines):
    """Scattered rows."""

    def __init__(self, request: LineRequest) -> None:
        super().__init__(request)
        scatter = self.kernel.scatter
        assert scatter is not None
        self.scatter, self.vector = scatter, scatter_vector(self.kernel)
        self.rows, self.columns = self.kernel.lines, self.kernel.columns
        self.column_blocks = column_blocks(self.kernel, self.schedule)
        self.wide = column_loads(self.kernel) if self.vector > 1 else ()

    def run(self) -> Lowered:
        """The module and its launch."""
        return Lowered(
            module=written(self.entry, self._function), entry=self.entry,
            grid=(self.schedule.blocks(self.kernel), 1, 1), block=(self.threads, 1, 1),
            shared_bytes=scatter_shared_bytes(self.schedule) if self.shuffles else 0, dynamic_shared_bytes=0,
            has_barriers=self.shuffles and self.warps > 1,
        )  # fmt: skip

    def _function(self) -> None:
        expr = self.kernel.expr
        self.sources = {tensor.name: parameter(tensor, (math.prod(tensor.shape),)) for tensor in expr.inputs}
        self.output = parameter(expr.output, (math.prod(expr.output.shape),))
        with (
            T.launch_thread("blockIdx.x", self.schedule.blocks(self.kernel)) as block,
            T.launch_thread("threadIdx.x", self.threads) as thread,
            T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0),
        ):
            self._block_of_rows(block, thread)

    def _block_of_rows(self, block: Expr, thread: Expr) -> None:
        column = (tirx.floormod(block, self.column_blocks) * self.threads + thread) * self.vector
        self.first_row = tirx.floordiv(block, self.column_blocks) * self.lines
        self.has_columns = [column < self.columns] if self.columns % (self.threads * self.vector) else []
        self.point = self._columns_at(column)
        self.sums = local_buffer(self.name("sums"), self.lines * self.vector, self.dtype)
        with named(T.unroll, self.lines * self.vector, "sum") as each:
            T.buffer_store(self.sums, tirx.const(0, self.dtype), [each])
        self.place, self.row_number = (local_buffer(self.name(name), 1, "int32") for name in ("place", "row"))
        self.places = self.sources[self.scatter.place.tensor]
        if self.shuffles:
            self._by_votes(thread)
        else:
            self._one_by_one()
        with named(T.unroll, self.lines, "row") as row:
            exists = [self.first_row + row < self.rows] if self.rows % self.lines else []
            self.if_all([*exists, *self.has_columns], lambda: self._store(row))

    def _columns_at(self, column: Expr) -> dict[str, Expr]:
        """The point of a thread's first column."""
        point: dict[str, Expr] = {}
        for axis in reversed(self.scatter.columns):
            is_first = axis == self.scatter.columns[0]
            point[axis] = column if is_first else tirx.floormod(column, self.sizes[axis])
            column = tirx.floordiv(column, self.sizes[axis])
        return point

    def _column(self, point: Point, lane: Expr) -> dict[str, Expr]:
        """The point of another one of a thread's columns."""
        last = self.scatter.columns[-1]
        return {**point, last: point[last] + lane}

    # ---- places

    def _is_met(self, place: Expr) -> Expr:
        """Truth of a place naming one of the thread's rows."""
        return tirx.all(place >= self.first_row, place < self.first_row + self.lines)

    def _by_votes(self, thread: Expr) -> None:
        """All turns: places looked at, and what is added for those that name a row of the block."""
        lane, warp = tirx.floormod(thread, WARP), tirx.floordiv(thread, WARP)
        chunks = min(PLACES_AHEAD, -(-self.length // self.threads))
        share = WARP * chunks
        ahead = local_buffer(self.name("ahead"), chunks, "int32")
        self.votes = local_buffer(self.name("votes"), 1, "uint32")
        if self.warps > 1:
            self.listed = local_buffer(self.name("listed"), 1, "int32")
            self.lists = allocate(self.name("lists"), 2 * self.warps * WARP * PLACES_AHEAD, "int32", "shared")
            self.counts = allocate(self.name("counts"), 2 * self.warps, "int32", "shared")
        with named(T.serial, -(-self.length // (self.threads * chunks)), "turn") as turn:
            first = turn * (self.threads * chunks)
            with named(T.unroll, chunks, "chunk") as chunk:
                at = first + warp * share + chunk * WARP + lane
                place: Expr = self.places[at]
                if self.length % (self.threads * chunks):
                    place = tirx.if_then_else(at < self.length, place, tirx.const(-1, "int32"))
                T.buffer_store(ahead, place, [chunk])
            if self.warps == 1:
                with named(T.unroll, chunks, "chunk") as chunk:
                    self._add_voted(ahead[chunk], first + chunk * WARP)
            else:
                half = tirx.floormod(turn, 2) * self.warps
                self._list(ahead, chunks, lane, half + warp)
                barrier()
                with named(T.serial, self.warps, "lister") as lister:
                    self._add_listed(half + lister, first + lister * share)

    def _vote(self, place: Expr) -> None:
        everyone = tirx.const(0xFFFFFFFF, "uint32")
        T.buffer_store(self.votes, tirx.call_extern("uint32", "__ballot_sync", everyone, self._is_met(place)), [0])

    def _add_voted(self, place: Expr, first: Expr) -> None:
        """What a warp by itself adds for 32 places that it looked at, from place ``first`` on."""
        self._vote(place)
        with T.While(tirx.NE(self.votes[0], tirx.const(0, "uint32"))):
            voter = tirx.call_extern("int32", "__ffs", self.votes[0].astype("int32")) - 1
            T.buffer_store(self.place, voter, [0])
            T.buffer_store(self.votes, tirx.bitwise_and(self.votes[0], self.votes[0] - tirx.const(1, "uint32")), [0])
            everyone = tirx.const(0xFFFFFFFF, "uint32")
            row = T.tvm_warp_shuffle(everyone, place, self.place[0], WARP, WARP) - self.first_row
            T.buffer_store(self.row_number, row, [0])
            T.buffer_store(self.place, self.place[0] + first, [0])
            self.if_all(self.has_columns, self._add)

    def _list(self, ahead: Any, chunks: int, lane: Expr, number: Expr) -> None:
        """List which of the places that a warp looked at name a row of the block, in their order."""
        below = tirx.shift_left(tirx.const(1, "uint32"), lane.astype("uint32")) - tirx.const(1, "uint32")
        T.buffer_store(self.listed, tirx.const(0, "int32"), [0])
        with named(T.unroll, chunks, "chunk") as chunk:
            place = ahead[chunk]
            self._vote(place)
            with T.If(self._is_met(place)), T.Then():
                before = tirx.call_extern("int32", "__popc", tirx.bitwise_and(self.votes[0], below))
                entry = (chunk * WARP + lane) * self.lines + place - self.first_row
                T.buffer_store(self.lists, entry, [number * (WARP * PLACES_AHEAD) + self.listed[0] + before])
            T.buffer_store(self.listed, self.listed[0] + tirx.call_extern("int32", "__popc", self.votes[0]), [0])
        with T.If(tirx.EQ(lane, 0)), T.Then():
            T.buffer_store(self.counts, self.listed[0], [number])

    def _add_listed(self, number: Expr, first: Expr) -> None:
        """What is added for the places of a list, the first of which its warp looked at being place ``first``: a few
        are read before the first of them is added."""
        count = self.counts[number]
        values = local_buffer(self.name("values"), ROWS_AHEAD * self.vector, self.dtype)
        with named(T.serial, tirx.floordiv(count + ROWS_AHEAD - 1, ROWS_AHEAD), "group") as group:

            def each(body: Callable[[Expr, Expr], None]) -> None:
                with named(T.unroll, ROWS_AHEAD, "row_ahead") as ahead:
                    entry = group * ROWS_AHEAD + ahead
                    listed = self.lists[number * (WARP * PLACES_AHEAD) + entry]
                    self.if_all([entry < count, *self.has_columns], lambda: body(listed, ahead * self.vector))

            def read(listed: Expr, start: Expr) -> None:
                T.buffer_store(self.place, first + tirx.floordiv(listed, self.lines), [0])
                self._read(values, start)

            def add(listed: Expr, start: Expr) -> None:
                T.buffer_store(self.row_number, tirx.floormod(listed, self.lines), [0])
                self._accumulate(values, start)

            each(read)
            each(add)

    def _one_by_one(self) -> None:
        with named(T.serial, self.length, "turn") as turn:
            T.buffer_store(self.place, turn, [0])
            T.buffer_store(self.row_number, self.places[turn] - self.first_row, [0])
            self.if_all([self._is_met(self.row_number[0] + self.first_row), *self.has_columns], self._add)

    # ---- what is added, and stored

    def _add(self) -> None:
        """Add what is at a place to the row that it names."""
        values = local_buffer(self.name("values"), self.vector, self.dtype)
        start = tirx.const(0, "int32")
        self._read(values, start)
        self._accumulate(values, start)

    def _read(self, values: Any, start: Expr) -> None:
        """What is at a place, in registers from ``start`` on."""
        point = {**self.point, self.axis: self.place[0]}
        buffers = {load: self._vector_of(load, point) for load in self.wide}
        with named(T.unroll, self.vector, "lane") as lane:
            loaded = {load: buffer[lane] for load, buffer in buffers.items()}
            T.buffer_store(values, self._value(self._column(point, lane), loaded), [start + lane])

    def _accumulate(self, values: Any, start: Expr) -> None:
        """Add registers from ``start`` on to the row of a place."""
        with named(T.unroll, self.lines, "row") as row, named(T.unroll, self.vector, "lane") as lane:
            number = row * self.vector + lane
            total = self.sums[number]
            # A choice, and no branch: compilers run out of registers for the ends of so many.
            chosen = tirx.Select(tirx.EQ(self.row_number[0], row), total + values[start + lane], total)
            T.buffer_store(self.sums, chosen, [number])

    def _value(self, point: Point, loaded: dict[Load, Expr]) -> Expr:
        return evaluate(self.scatter.value, point, self._reader(point, loaded, self.dtype), self.dtype)

    def _vector_of(self, load: Load, point: Point) -> Any:
        """Registers with adjacent elements of a load."""
        buffer = local_buffer(self.name(f"{identifier(load.tensor)}_columns"), self.vector,
                              self.tensors[load.tensor].dtype)  # fmt: skip
        indices = [affine(index, point) for index in load.indices]
        address = tirx.floordiv(self.address(load.tensor, indices), self.vector) * self.vector
        vector_write(buffer, 0, self.vector, vector_read(self.sources[load.tensor], address, self.vector))
        return buffer

    def _store(self, row: Expr) -> None:
        """The sums of a row."""
        results = local_buffer(self.name("results"), self.vector, self.kernel.output.dtype)
        first = {**self.point, self.scatter.row: self.first_row + row}
        with named(T.unroll, self.vector, "lane") as lane:
            value = self.final(self._column(first, lane), {}, self.sums[row * self.vector + lane])
            T.buffer_store(results, value, [lane])
        address = self.output_address(first)
        if self.vector > 1:
            address = tirx.floordiv(address, self.vector) * self.vector
        vector_write(self.output, address, self.vector, vector_read(results, 0, self.vector))
