"""Scans, and places of largest and smallest values, along lines: by threads that share a line, or a line each.

Threads that share a line take adjacent vectors of it, a piece of the line at a turn. Of a scan each accumulates its own
vector; warps bring what theirs came to together by shuffles, a block through shared memory, whose two halves take turns
so that one barrier a piece is enough; what all pieces before came to is carried in registers. A place needs no order:
threads keep the best that they have met, and are brought together once, at the end of the line. In OpenCL C, which has
no shuffles, both go through shared memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.tir.carried import NOWHERE, Carried
from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered, identifier
from codegen.tir.lowering import LoweringRequest
from codegen.tir.reads import guarded_read, places
from codegen.tir.statements import allocate, barrier, local_buffer, named, vector_read, vector_write
from codegen.tir.values import Expr, evaluate
from sokoban.kernel.line import LineKernel
from sokoban.language.expression import AffineIndex, Load, loads
from sokoban.language.names import fresh_name
from sokoban.schedule.patches import AHEAD, LineSchedule, adjacent_loads, is_stored_along, line_vector, turns

#: Threads that exchange values by shuffles.
WARP = 32

LineRequest = LoweringRequest[LineKernel, LineSchedule]
Point = Mapping[str, Expr]


def takes(request: LineRequest) -> bool:
    """Scans and places; ranks and scattered rows have lowerings of their own."""
    return request.problem.rank_axis is None and request.problem.scatter is None


def lower(request: LineRequest) -> Lowered:
    """The kernel of a scan or place."""
    return (_Scan if request.problem.is_scan else _Place)(request).run()


class Lines:
    """One kernel of lines, its statements in the order in which they are written.

    Attributes:
        sources: input tensors, by name, once the kernel is being written.
        output: the result.
        lane: number of a thread among those of a line.
        row: the line of a thread, by axis.
    """

    sources: dict[str, Any]
    output: Any
    lane: Expr
    row: dict[str, Expr]

    def __init__(self, request: LineRequest) -> None:
        self.kernel, self.schedule, self.entry = request.problem, request.schedule, request.entry
        kernel, expr = self.kernel, self.kernel.expr
        self.dtype, self.final_dtype, self.tensors = expr.accumulate, expr.final_dtype, expr.tensor_by_name
        self.sizes, self.axis, self.length = expr.sizes, kernel.axis, kernel.length
        self.threads, self.lines = self.schedule.threads, self.schedule.lines
        self.vector, self.turns = line_vector(kernel, self.schedule), turns(kernel, self.schedule)
        self.shuffles = request.target.generator in ("cuda", "cuda-source")
        self.warps = max(1, self.threads // WARP)
        self.names = set(self.tensors)
        self.carried = Carried(kernel)
        self.element_bytes = 8 if self.dtype == "float64" else 4

    def name(self, wanted: str) -> str:
        """A name that the kernel has not got."""
        name = fresh_name(wanted, self.names)
        self.names.add(name)
        return name

    # ---- elements

    def at(self, place: Expr) -> dict[str, Expr]:
        """The point of an element, by its place in the order of the line."""
        index = self.length - 1 - place if self.kernel.is_reversed else place
        return {**self.row, self.axis: index}

    def body(self, point: Point, loaded: Mapping[Load, Expr]) -> Expr:
        """The value of an element."""
        return evaluate(self.kernel.body, point, self._reader(point, loaded, self.dtype), self.dtype)

    def final(self, point: Point, loaded: Mapping[Load, Expr], result: Expr) -> Expr:
        """An element of the output."""
        final, output = self.kernel.final.value, self.kernel.output
        if final in self._results:
            return result.astype(output.dtype)
        dtype = self.final_dtype
        read = self._reader(point, loaded, dtype)
        value = evaluate(
            final, point, lambda load: result.astype(dtype) if load in self._results else read(load), dtype
        )
        return value.astype(output.dtype)

    @property
    def _results(self) -> tuple[Load, ...]:
        """Loads of what the line makes."""
        indices = tuple(AffineIndex.axis(axis) for axis in self.kernel.line.axes)
        return (Load(self.kernel.line.tensor, indices),)

    def _reader(self, point: Point, loaded: Mapping[Load, Expr], dtype: str) -> Callable[[Load], Expr]:
        return lambda load: self._element(load, point, loaded).astype(dtype)

    def _element(self, load: Load, point: Point, loaded: Mapping[Load, Expr]) -> Expr:
        """An element as memory holds it; of those in registers the one there."""
        if load in loaded:
            return loaded[load]
        source, tensor = self.sources[load.tensor], self.tensors[load.tensor]

        def element(*indices: Expr) -> Expr:
            return source[self.address(load.tensor, indices)]

        return guarded_read(load, tensor, element, point, self.sizes, lambda place: self._element(place, point, loaded))

    def address(self, tensor: str, indices: Sequence[Expr]) -> Expr:
        """Position of an element."""
        shape, total = self.tensors[tensor].shape, tirx.const(0, "int32")
        for position, index in enumerate(indices):
            total = total + index * math.prod(shape[position + 1 :])
        return total

    def output_address(self, point: Point) -> Expr:
        """Position of an element of the output."""
        return self.address(self.kernel.output.name, [point[axis] for axis in self.kernel.final.axes])

    def loaded_vectors(self, wanted: Sequence[Load], first: Expr) -> dict[Load, Any]:
        """Registers with the elements of loads from place ``first`` on, adjacent ones by one access each."""
        buffers: dict[Load, Any] = {}
        for load in wanted if self.vector > 1 else ():
            name = self.name(f"{identifier(load.tensor)}_line")
            buffer = local_buffer(name, self.vector, self.tensors[load.tensor].dtype)
            # The first of them in memory, in whole vectors, so that TVM sees that they are aligned.
            start = self.at(first + self.vector - 1 if self.kernel.is_reversed else first)
            indices = places(load, start, lambda place: self._element(place, start, {}))  # noqa: B023
            address = self.address(load.tensor, indices)
            address = tirx.floordiv(address, self.vector) * self.vector
            vector_write(buffer, 0, self.vector, vector_read(self.sources[load.tensor], address, self.vector))
            buffers[load] = buffer
        return buffers

    def elements(self, buffers: Mapping[Load, Any], number: Expr) -> dict[Load, Expr]:
        """Elements of vectors, the one of a ``number`` in the order of the line."""
        place = self.vector - 1 - number if self.kernel.is_reversed else number
        return {load: buffer[place] for load, buffer in buffers.items()}

    def if_all(self, conditions: Sequence[Expr], body: Callable[[], None]) -> None:
        """``body`` where all conditions are true."""
        if not conditions:
            body()
            return
        with T.If(tirx.all(*conditions)), T.Then():
            body()

    def first_place(self, turn: Expr) -> Expr:
        """The first place of a thread's vector of a turn."""
        return (turn * self.threads + self.lane) * self.vector

    def inside(self, first: Expr) -> list[Expr]:
        """Conditions of a vector being in the line."""
        return [first < self.length] if self.length % (self.threads * self.vector) else []

    def shuffled(self, shuffle: Callable[..., Expr], value: Expr, delta: int) -> Expr:
        """The value that another lane of the warp has."""
        return shuffle(T.tvm_warp_activemask(), value, delta, WARP, WARP)

    def each_ahead(self, body: Callable[[Expr], None]) -> None:
        """``body`` of the first place of every :data:`AHEAD` elements of a thread's own line."""
        with named(T.serial, -(-self.length // AHEAD), "turn") as turn:
            body(turn * AHEAD)

    def values_ahead(self, first: Expr) -> Any:
        """Registers with the values of :data:`AHEAD` elements, loaded before the first of them is used."""
        values = local_buffer(self.name("values"), AHEAD, self.dtype)
        with named(T.unroll, AHEAD, "lane") as lane:
            self.if_all(
                self.inside_ahead(first + lane),
                lambda: T.buffer_store(values, self.body(self.at(first + lane), {}), [lane]),
            )
        return values

    def inside_ahead(self, place: Expr) -> list[Expr]:
        """Conditions of an element being in the line."""
        return [place < self.length] if self.length % AHEAD else []


class WalkedLines(Lines, ABC):
    """A kernel whose threads walk a line each, or share one."""

    def run(self) -> Lowered:
        """The module and its launch."""
        block = (self.lines, 1, 1) if self.threads == 1 else (self.threads, self.lines, 1)
        return Lowered(
            module=written(self.entry, self._function), entry=self.entry,
            grid=(self.schedule.blocks(self.kernel), 1, 1), block=block, shared_bytes=self.shared_bytes,
            dynamic_shared_bytes=0, has_barriers=True,
        )  # fmt: skip

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Shared memory of a block."""

    def _function(self) -> None:
        expr = self.kernel.expr
        self.sources = {tensor.name: parameter(tensor, (math.prod(tensor.shape),)) for tensor in expr.inputs}
        self.output = parameter(expr.output, (math.prod(expr.output.shape),))
        across, along = (self.lines, 1) if self.threads == 1 else (self.threads, self.lines)
        with (
            T.launch_thread("blockIdx.x", self.schedule.blocks(self.kernel)) as block,
            T.launch_thread("threadIdx.x", across) as x,
            T.launch_thread("threadIdx.y", along) as y,
            T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0),
        ):
            self.lane, self.line = (y, x) if self.threads == 1 else (x, y)
            self._block(block * self.lines + self.line)

    def _block(self, number: Expr) -> None:
        """All turns of a thread on line ``number``. A line beyond the last is that one: all threads come to every
        barrier, and it is not stored again."""
        self.exists: list[Expr] = []
        if self.kernel.lines % self.lines:
            self.exists = [number < self.kernel.lines]
            number = tirx.min(number, self.kernel.lines - 1)
        self.row = {}
        for position in reversed(range(len(self.kernel.row_axes))):
            axis = self.kernel.row_axes[position]
            self.row[axis] = tirx.floormod(number, self.sizes[axis]) if position else number
            number = tirx.floordiv(number, self.sizes[axis])
        if self.threads == 1:
            self._alone()
        else:
            self._together()

    @abstractmethod
    def _alone(self) -> None:
        """A line of a thread of its own."""

    @abstractmethod
    def _together(self) -> None:
        """A line that threads share."""


class _Scan(WalkedLines):
    """A scan."""

    @property
    def shared_bytes(self) -> int:
        if self.threads == 1 or (self.shuffles and self.warps == 1):
            return 0
        each = self.warps if self.shuffles else self.threads
        return 2 * self.lines * each * self.element_bytes

    def _alone(self) -> None:
        total = local_buffer(self.name("total"), 1, self.dtype)
        T.buffer_store(total, self.carried.first, [0])

        def several(first: Expr) -> None:
            values = self.values_ahead(first)
            with named(T.unroll, AHEAD, "lane") as lane:

                def one() -> None:
                    point = self.at(first + lane)
                    self._accumulate(total, values[lane], lambda result: self._store(point, {}, result, self.exists))

                self.if_all(self.inside_ahead(first + lane), one)

        self.each_ahead(several)

    def _accumulate(self, total: Any, value: Expr, use: Callable[[Expr], None]) -> None:
        """One more value in a total, which is used before it where that is its own result, and after it otherwise."""
        if self.kernel.is_exclusive:
            use(total[0])
        T.buffer_store(total, self.carried.combine(total[0], value), [0])
        if not self.kernel.is_exclusive:
            use(total[0])

    def _store(self, point: Point, loaded: Mapping[Load, Expr], result: Expr, conditions: Sequence[Expr]) -> None:
        value = self.final(point, loaded, result)
        self.if_all(conditions, lambda: T.buffer_store(self.output, value, [self.output_address(point)]))

    def _together(self) -> None:
        self.carry = local_buffer(self.name("carry"), 1, self.dtype)
        T.buffer_store(self.carry, self.carried.first, [0])
        if self.shared_bytes:
            self.shared = allocate(self.name("shared"), self.shared_bytes // self.element_bytes, self.dtype, "shared")
        with named(T.serial, self.turns, "turn") as turn:
            self._piece(turn)

    def _piece(self, turn: Expr) -> None:
        """A vector of each thread."""
        first = self.first_place(turn)
        values, total = (local_buffer(self.name(name), count, self.dtype)
                         for name, count in (("values", self.vector), ("total", 1)))  # fmt: skip
        T.buffer_store(total, self.carried.first, [0])
        adjacent = adjacent_loads(self.kernel)
        body_loads = [load for load in adjacent if load in loads(self.kernel.body)]
        buffers: dict[Load, Any] = {}

        def read() -> None:
            buffers.update(self.loaded_vectors(body_loads, first))
            with named(T.unroll, self.vector, "lane") as lane:
                T.buffer_store(values, self.body(self.at(first + lane), self.elements(buffers, lane)), [lane])
            with named(T.unroll, self.vector, "lane") as lane:
                T.buffer_store(total, self.carried.combine(total[0], values[lane]), [0])

        self.if_all(self.inside(first), read)
        self._before(total, turn)
        self.if_all([*self.inside(first), *self.exists], lambda: self._results_of(first, values, total))

    def _results_of(self, first: Expr, values: Any, total: Any) -> None:
        """The results of a thread's vector; ``total`` is what comes before it."""
        output, wide = self.kernel.output, self.vector > 1 and is_stored_along(self.kernel)
        finals = [load for load in adjacent_loads(self.kernel) if load in loads(self.kernel.final.value)]
        buffers = self.loaded_vectors(finals, first)
        results = local_buffer(self.name("results"), self.vector, output.dtype) if wide else None
        with named(T.unroll, self.vector, "lane") as lane:
            point = self.at(first + lane)

            def use(result: Expr) -> None:
                value = self.final(point, self.elements(buffers, lane), result)
                if results is None:
                    T.buffer_store(self.output, value, [self.output_address(point)])
                    return
                T.buffer_store(results, value, [self.vector - 1 - lane if self.kernel.is_reversed else lane])

            self._accumulate(total, values[lane], use)
        if results is not None:
            start = self.at(first + self.vector - 1 if self.kernel.is_reversed else first)
            address = tirx.floordiv(self.output_address(start), self.vector) * self.vector
            vector_write(self.output, address, self.vector, vector_read(results, 0, self.vector))

    def _before(self, total: Any, turn: Expr) -> None:
        """Exchange the total of a thread's vector for what comes before it, and carry on what all of the piece are."""
        (self._by_shuffles if self.shuffles else self._by_shared)(total, turn)

    def _by_shuffles(self, total: Any, turn: Expr) -> None:
        other = local_buffer(self.name("other"), 1, self.dtype)
        lane = tirx.floormod(self.lane, WARP)
        for delta in (1, 2, 4, 8, 16):
            T.buffer_store(other, self.shuffled(T.tvm_warp_shuffle_up, total[0], delta), [0])
            with T.If(lane >= delta), T.Then():
                T.buffer_store(total, self.carried.combine(other[0], total[0]), [0])
        T.buffer_store(other, self.shuffled(T.tvm_warp_shuffle_up, total[0], 1), [0])
        with T.If(lane == 0), T.Then():
            T.buffer_store(other, self.carried.first, [0])
        if self.warps == 1:
            last = local_buffer(self.name("last"), 1, self.dtype)
            T.buffer_store(last, self.shuffled(T.tvm_warp_shuffle, total[0], WARP - 1), [0])
            T.buffer_store(total, self.carried.combine(self.carry[0], other[0]), [0])
            T.buffer_store(self.carry, self.carried.combine(self.carry[0], last[0]), [0])
            return
        warp = tirx.floordiv(self.lane, WARP)
        half = (tirx.floormod(turn, 2) * self.lines + self.line) * self.warps
        with T.If(lane == WARP - 1), T.Then():
            T.buffer_store(self.shared, total[0], [half + warp])
        barrier()
        with named(T.unroll, self.warps, "before") as before:
            with T.If(tirx.EQ(warp, before)), T.Then():
                T.buffer_store(total, self.carried.combine(self.carry[0], other[0]), [0])
            T.buffer_store(self.carry, self.carried.combine(self.carry[0], self.shared[half + before]), [0])

    def _by_shared(self, total: Any, turn: Expr) -> None:
        """The same by doubling in shared memory."""
        start = [(half * self.lines + self.line) * self.threads for half in range(2)]
        T.buffer_store(self.shared, total[0], [start[0] + self.lane])
        barrier()
        half = 0
        for delta in (1 << bit for bit in range(self.threads.bit_length() - 1)):
            T.buffer_store(total, self.shared[start[half] + self.lane], [0])
            with T.If(self.lane >= delta), T.Then():
                T.buffer_store(total, self.carried.combine(self.shared[start[half] + self.lane - delta], total[0]), [0])
            half = 1 - half
            T.buffer_store(self.shared, total[0], [start[half] + self.lane])
            barrier()
        T.buffer_store(total, self.carry[0], [0])
        with T.If(self.lane > 0), T.Then():
            before = self.shared[start[half] + self.lane - 1]
            T.buffer_store(total, self.carried.combine(self.carry[0], before), [0])
        T.buffer_store(
            self.carry, self.carried.combine(self.carry[0], self.shared[start[half] + self.threads - 1]), [0]
        )
        barrier()


class _Place(WalkedLines):
    """The place of the largest or smallest value of a line."""

    @property
    def shared_bytes(self) -> int:
        return self.lines * self._exchanged * (self.element_bytes + 4)

    @property
    def _exchanged(self) -> int:
        """Threads or warps of a line that meet in shared memory."""
        if self.threads == 1 or (self.shuffles and self.warps == 1):
            return 0
        return self.warps if self.shuffles else self.threads

    def _begun(self) -> None:
        self.best = local_buffer(self.name("best"), 1, self.dtype)
        self.place = local_buffer(self.name("place"), 1, "int32")
        T.buffer_store(self.best, self.carried.first, [0])
        T.buffer_store(self.place, tirx.const(NOWHERE, "int32"), [0])

    def _take(self, value: Expr, place: Expr) -> None:
        """One more candidate."""
        with T.If(self.carried.is_better(value, place, self.best[0], self.place[0])), T.Then():
            T.buffer_store(self.best, value, [0])
            T.buffer_store(self.place, place, [0])

    def _store(self, conditions: Sequence[Expr]) -> None:
        def store() -> None:
            point = {axis: self.row[axis] for axis in self.kernel.final.axes}
            T.buffer_store(self.output, self.final(point, {}, self.place[0]), [self.output_address(point)])

        self.if_all(conditions, store)

    def _alone(self) -> None:
        self._begun()

        def several(first: Expr) -> None:
            values = self.values_ahead(first)
            with named(T.unroll, AHEAD, "lane") as lane:
                self.if_all(self.inside_ahead(first + lane), lambda: self._take(values[lane], first + lane))

        self.each_ahead(several)
        self._store(self.exists)

    def _together(self) -> None:
        self._begun()
        if self._exchanged:
            count = self.lines * self._exchanged
            self.shared_best = allocate(self.name("shared_best"), count, self.dtype, "shared")
            self.shared_place = allocate(self.name("shared_place"), count, "int32", "shared")
        values = local_buffer(self.name("values"), self.vector, self.dtype)
        with named(T.serial, self.turns, "turn") as turn:
            first = self.first_place(turn)

            def read() -> None:
                buffers = self.loaded_vectors(adjacent_loads(self.kernel), first)
                with named(T.unroll, self.vector, "lane") as lane:
                    T.buffer_store(values, self.body(self.at(first + lane), self.elements(buffers, lane)), [lane])
                with named(T.unroll, self.vector, "lane") as lane:
                    self._take(values[lane], first + lane)

            self.if_all(self.inside(first), read)
        (self._by_shuffles if self.shuffles else self._by_shared)()
        self._store([self.lane == 0, *self.exists])

    def _shuffle(self, count: int) -> None:
        """The best of ``count`` lanes, in the first of them."""
        value, place = local_buffer(self.name("other"), 1, self.dtype), local_buffer(self.name("at"), 1, "int32")
        for delta in (1 << bit for bit in reversed(range(count.bit_length() - 1))):
            T.buffer_store(value, self.shuffled(T.tvm_warp_shuffle_down, self.best[0], delta), [0])
            T.buffer_store(place, self.shuffled(T.tvm_warp_shuffle_down, self.place[0], delta), [0])
            self._take(value[0], place[0])

    def _by_shuffles(self) -> None:
        self._shuffle(WARP)
        if self.warps == 1:
            return
        start = self.line * self.warps
        with T.If(tirx.floormod(self.lane, WARP) == 0), T.Then():
            T.buffer_store(self.shared_best, self.best[0], [start + tirx.floordiv(self.lane, WARP)])
            T.buffer_store(self.shared_place, self.place[0], [start + tirx.floordiv(self.lane, WARP)])
        barrier()
        with T.If(self.lane < self.warps), T.Then():
            T.buffer_store(self.best, self.shared_best[start + self.lane], [0])
            T.buffer_store(self.place, self.shared_place[start + self.lane], [0])
        self._shuffle(self.warps)

    def _by_shared(self) -> None:
        place = self.line * self.threads + self.lane
        T.buffer_store(self.shared_best, self.best[0], [place])
        T.buffer_store(self.shared_place, self.place[0], [place])
        half = self.threads // 2
        while half:
            barrier()
            with T.If(self.lane < half), T.Then():
                self._take(self.shared_best[place + half], self.shared_place[place + half])
                T.buffer_store(self.shared_best, self.best[0], [place])
                T.buffer_store(self.shared_place, self.place[0], [place])
            half //= 2
