"""Reductions shared among the threads of a block: softmax, layer norm, and large reductions with few outputs.

Blocks own whole rows, ``threads`` of them side by side; the columns of a row are dealt to ``reduce_threads`` threads,
whose partial results are combined by warp shuffles or a tree in shared memory; by TVM where one warp has them all, and
in OpenCL.

Written directly as statements, like :mod:`codegen.gpu.staged.kernel`: TVM's schedules read what several statements
share once per statement, element by element, and every combined value from shared memory again for every column. Here a
thread loads its part of the row as vectors, once where it has registers for it or room in shared memory
(:func:`sokoban.schedule.rows.row_plan`). It alone reads these columns, so that no thread waits for them; and the lanes
of a warp stand side by side in every turn, in different banks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.tir.bounds import Bounds
from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered, LoweringError, identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.reads import guarded_read, padded_sizes, places
from codegen.tir.statements import allocate, barrier, local_buffer, named, vector_read, vector_write
from codegen.tir.values import Expr, combine, evaluate, identity, remainder
from sokoban.kernel.matrix import STATIC_SHARED_BYTES
from sokoban.language.expression import Load, Reduction
from sokoban.language.names import fresh_name
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.rows import (
    REMEMBERED,
    WARP,
    exchange_elements,
    loads_together,
    row_columns,
    row_plan,
)

#: The element of a load, as a value to compute with.
Read = Callable[[Load], Expr]


def takes(request: TileRequest) -> bool:
    """``rows`` kernels, and ``tile`` kernels whose reduction is shared among threads."""
    return request.problem.is_rows or bool(request.schedule.reduce_threads)


def lower(request: TileRequest) -> Lowered:
    """The kernel of a schedule whose threads share rows."""
    return _RowsLowering(request).run()


def _one_by_one(extent: int) -> Any:
    """A loop that the device compiler does not unroll: with a row in registers it has none for several turns."""
    return T.serial(extent, annotations={"disable_unroll": True})


class _RowsLowering:
    """One kernel, its statements in the order in which :meth:`_kernel` writes them."""

    def __init__(self, request: TileRequest) -> None:
        form, schedule = request.problem, request.schedule
        self.form, self.schedule, self.entry = form, schedule, request.entry
        self.dtype = form.expr.accumulate
        self.tensors = form.expr.tensor_by_name
        self.padded = padded_sizes(form, schedule)
        self.bounds = Bounds(form)
        self.row_threads = math.prod(schedule.threads_of.values())
        self.column_threads = math.prod(schedule.reduce_threads_of.values())
        self.columns_on_x = form.reduces_contiguously
        self.columns = row_columns(form)
        self.plan = row_plan(form, self.column_threads, schedule.kept_columns)
        self.names = set(self.tensors)
        rows = math.prod(schedule.register_tile[axis] for axis in form.spatial)
        #: Whether a thread has several rows, so that what it shares for one is written anew for the next.
        self.is_repeated = rows > 1
        count, threads = self.column_threads, self.column_threads * self.row_threads
        #: Whether threads are combined here rather than by TVM, which waits more often than is needed.
        is_cuda = request.target.generator in ("cuda", "cuda-source")
        self.combines = is_cuda and count & (count - 1) == 0 and threads % WARP == 0
        self.combines &= count > (WARP if self.columns_on_x else 1)
        exchanged = len(form.reductions) * self.row_threads
        if self.combines:
            exchanged = exchange_elements(form, self.row_threads, count)
        self.widens_bfloat16 = not request.target.has_bfloat16
        #: Columns that all threads of the block keep in shared memory, and the bytes of a block altogether.
        self.shared_columns = threads * self.plan.shared_turns * self.plan.vector
        self.kept_bytes = self.shared_columns * sum(self.tensors[load.tensor].element_bytes for load in self.plan.kept)
        self.shared_bytes = exchanged * (8 if self.dtype == "float64" else 4) + self.kept_bytes
        self.is_dynamic = request.target.row.has_dynamic_shared and self.shared_bytes > STATIC_SHARED_BYTES

    def run(self) -> Lowered:
        form, schedule = self.form, self.schedule
        if (
            self.kept_bytes
            and self.widens_bfloat16
            and "bfloat16" in {self.tensors[k.tensor].dtype for k in self.plan.kept}
        ):
            raise LoweringError(f"{self.entry}: shared memory keeps bfloat16 from compute capability 8.0 on")
        module = written(self.entry, self._function)
        block = (self.column_threads, self.row_threads, 1)
        return Lowered(
            module=module,
            entry=self.entry,
            grid=(schedule.grid_blocks(form.sizes), 1, 1),
            launch=self.bounds.shape(schedule),
            block=block if self.columns_on_x else (block[1], block[0], 1),
            shared_bytes=self.shared_bytes,
            dynamic_shared_bytes=self.kept_bytes if self.is_dynamic else 0,
        )

    def _function(self) -> None:
        # Tensors as one run of elements each.
        expr = self.form.expr
        self.sources = {tensor.name: parameter(tensor, (math.prod(tensor.shape),)) for tensor in expr.inputs}
        self.output = parameter(expr.output, (math.prod(expr.output.shape),))
        self.bounds.declare()
        self._kernel()

    def _name(self, wanted: str) -> str:
        name = fresh_name(wanted, self.names)
        self.names.add(name)
        return name

    # ---- the kernel

    def _kernel(self) -> None:
        across, along = ("y", "x") if self.columns_on_x else ("x", "y")
        extents = {across: self.row_threads, along: self.column_threads}
        with (
            T.launch_thread("blockIdx.x", self.schedule.grid_blocks(self.form.sizes)) as block,
            T.launch_thread("threadIdx.x", extents["x"]) as x,
            T.launch_thread("threadIdx.y", extents["y"]) as y,
            T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0),
        ):
            row_thread, self.lane = (y, x) if self.columns_on_x else (x, y)
            in_registers = self.plan.register_turns * self.plan.vector
            self.kept = {load: self._buffer(load.tensor, in_registers) for load in self.plan.kept if in_registers}
            self.shared_kept = {load: self._shared_buffer(load.tensor) for load in self.plan.kept if self.kept_bytes}
            produced = [statement.tensor for statement in self.form.reductions]
            self.results = {tensor: position for position, tensor in enumerate(produced)}
            # All in one buffer, of two elements at least: TVM would take one of a single element for another name of
            # what it combines the threads in, which is shared memory that is read anew for every column.
            if self.combines:
                each = self.column_threads // WARP if self.columns_on_x else self.column_threads
                shared = self.row_threads * each
                self.shared = allocate(self._name("shared"), shared, self.dtype, "shared")
                if self.columns_on_x:
                    self.shared_result = allocate(self._name("shared_result"), self.row_threads, self.dtype, "shared")
            self.row_thread = row_thread
            self.result = local_buffer(self._name("result"), max(2, len(produced)), self.dtype)
            if self.plan.remembered is not None:
                columns = self.plan.turns * self.plan.vector
                self.kept[REMEMBERED] = local_buffer(self._name("remembered"), columns, self.dtype)
            self._rows(self._first_row(block, row_thread), list(self.form.spatial), {})

    def _buffer(self, name: str, elements: int) -> Any:
        return local_buffer(self._name(f"{identifier(name)}_row"), elements, self.tensors[name].dtype)

    def _shared_buffer(self, name: str) -> Any:
        scope, dtype = "shared.dyn" if self.is_dynamic else "shared", self.tensors[name].dtype
        wanted = self._name(f"{identifier(name)}_kept")
        return allocate(wanted, self.shared_columns, dtype, scope, align_bytes=VECTOR_BYTES)

    def _first_row(self, block: Expr, thread: Expr) -> dict[str, Expr]:
        """First row of a thread along every spatial axis; blocks and threads count the last axis fastest."""
        first: dict[str, Expr] = {}
        axes = self.form.spatial
        for axis in reversed(axes):
            blocks = self.bounds.tiles(axis, self.schedule.block_of[axis])
            threads = self.schedule.threads_of[axis]
            outermost = axis == axes[0]
            outer, within = Bounds.split(block, blocks)
            block_number = block if outermost else within
            thread_number = thread if outermost else remainder(thread, threads)
            first[axis] = (block_number * threads + thread_number) * self.schedule.register_tile[axis]
            block, thread = outer, tirx.floordiv(thread, threads)
        return first

    def _rows(self, first: Mapping[str, Expr], axes: list[str], row: dict[str, Expr]) -> None:
        """A thread's rows, one after the other: all threads come to every barrier."""
        if not axes:
            self._row(row)
            return
        axis, rows = axes[0], self.schedule.register_tile[axes[0]]
        if rows == 1:
            self._rows(first, axes[1:], {**row, axis: first[axis]})
            return
        with named(T.serial, rows, identifier(axis)) as index:
            self._rows(first, axes[1:], {**row, axis: first[axis] + index})

    def _row(self, row: Mapping[str, Expr]) -> None:
        form = self.form
        padded = [axis for axis in form.spatial if self.padded[axis] > form.sizes[axis]]
        exists = [row[axis] < self.bounds.size(axis) for axis in padded]
        # A row that does not exist is computed as the last one that does, and never stored.
        self.row = {
            axis: tirx.min(place, self.bounds.size(axis) - 1) if axis in padded else place
            for axis, place in row.items()
        }
        self.unread = set(self.plan.kept)
        for position, statement in enumerate(form.reductions):
            self._reduce(position, statement.tensor)
        if not form.columns:
            exists = exists + ([self.lane == 0] if self.column_threads > 1 else [])
        if not exists:
            self._finish()
            return
        with T.If(tirx.all(*exists)), T.Then():
            self._finish()

    # ---- along a row

    def _reduce(self, position: int, tensor: str) -> None:
        """One reduction: a thread's columns into its partial result, those of all threads into the result."""
        reduction = self.plan.values[position]
        assert isinstance(reduction, Reduction)
        partial = local_buffer(self._name("partial"), 1, self.dtype)
        T.buffer_store(partial, identity(reduction.function, self.dtype), [0])
        remembers = reduction.body == self.plan.remembered

        def add(axes: Mapping[str, Expr], read: Read, vector: _Vector, lane: Expr) -> None:
            value = evaluate(reduction.body, axes, read, self.dtype)
            if remembers:
                T.buffer_store(self.kept[REMEMBERED], value, [vector.turn * self.plan.vector + lane])
                value = self.kept[REMEMBERED][vector.turn * self.plan.vector + lane]
            T.buffer_store(partial, combine(reduction.function, partial[0], value), [0])

        self._walk(position, lambda vector: vector.each(add, self.dtype))
        if self.combines:
            combined = self._combined_warps if self.columns_on_x else self._combined_tree
            total = combined(reduction, partial, position)
        else:
            total = partial[0] if self.column_threads == 1 else self._combined(reduction, partial)
        T.buffer_store(self.result, total, [self.results[tensor]])

    def _is_shared(self, position: int) -> bool:
        """True if all threads of a row want a reduction's result: later statements do, unless one value ends the
        row."""
        return bool(self.form.columns) or position + 1 < len(self.form.reductions)

    def _combined_warps(self, reduction: Reduction, partial: Any, position: int) -> Expr:
        """The partial results of several warps: by shuffles in each, then by shuffles of the first one."""
        warps, function = self.column_threads // WARP, reduction.function

        def shuffle(count: int) -> None:
            for delta in (1 << bit for bit in reversed(range(count.bit_length() - 1))):
                other = T.tvm_warp_shuffle_down(T.tvm_warp_activemask(), partial[0], delta, WARP, WARP)
                T.buffer_store(partial, combine(function, partial[0], other), [0])

        shuffle(WARP)
        first = self.row_thread * warps
        with T.If(tirx.floormod(self.lane, WARP) == 0), T.Then():
            T.buffer_store(self.shared, partial[0], [first + tirx.floordiv(self.lane, WARP)])
        barrier()
        with T.If(self.lane < warps), T.Then():
            T.buffer_store(partial, self.shared[first + self.lane], [0])
        shuffle(warps)
        if not self._is_shared(position):
            if self.is_repeated:
                barrier()
            return partial[0]
        with T.If(self.lane == 0), T.Then():
            T.buffer_store(self.shared_result, partial[0], [self.row_thread])
        barrier()
        return self.shared_result[self.row_thread]

    def _combined_tree(self, reduction: Reduction, partial: Any, position: int) -> Expr:
        """The partial results of threads that lie in different warps: by halves in shared memory."""
        function, first = reduction.function, self.row_thread * self.column_threads
        place = first + self.lane
        if position or self.is_repeated:
            barrier()
        T.buffer_store(self.shared, partial[0], [place])
        half = self.column_threads // 2
        while half:
            barrier()
            with T.If(self.lane < half), T.Then():
                both = combine(function, self.shared[place], self.shared[place + half])
                T.buffer_store(self.shared, both, [place])
            half //= 2
        if self._is_shared(position):
            barrier()
        return self.shared[first]

    def _combined(self, reduction: Reduction, partial: Any) -> Expr:
        """The partial results of the threads of a row, combined for all of them."""
        together = local_buffer(self._name("together"), 1, self.dtype)
        function = reduction.function
        reducer = T.comm_reducer(lambda a, b: combine(function, a, b), [identity(function, self.dtype)])
        with T.attr(reducer, "reduce_scope", T.reinterpret("handle", T.uint64(0))):
            T.evaluate(T.tvm_thread_allreduce(T.uint32(1), partial[0], True, together[0], self.lane))
        return together[0]

    def _finish(self) -> None:
        """The final statement: once per row, or for every column."""
        form = self.form
        if not form.columns:
            dtype = form.expr.final_dtype
            value = evaluate(self.plan.values[-1], self.row, self.reader({}, self.row, dtype), dtype)
            T.buffer_store(
                self.output, value.astype(form.expr.output.dtype), [self._address(form.final.axes, self.row)]
            )
            return
        self._walk(len(form.reductions), self._store)

    def _store(self, vector: _Vector) -> None:
        """The results of a vector of columns."""
        form, lanes, dtype = self.form, self.plan.vector, self.form.expr.final_dtype
        wide = self.plan.stores_wide
        results = local_buffer(self._name("results"), lanes, form.expr.output.dtype) if wide else None

        def put(axes: Mapping[str, Expr], read: Read, _: _Vector, lane: Expr) -> None:
            value = evaluate(self.plan.values[-1], axes, read, dtype).astype(form.expr.output.dtype)
            if results is not None:
                T.buffer_store(results, value, [lane])
            else:
                T.buffer_store(self.output, value, [self._address(form.final.axes, axes)])

        vector.each(put, dtype)
        if results is not None:
            first = self._address(form.final.axes, vector.axes(tirx.const(0, "int32")))
            vector_write(self.output, first, lanes, vector_read(results, 0, lanes))

    def _walk(self, statement: int, body: Callable[[_Vector], None]) -> None:
        """``body`` for every vector of columns of a thread: those that lie in registers, those in shared memory, the
        others.

        What the statement reads along the row lies in registers then: those that keep it for others, or those of a few
        vectors, loaded before the first of them is used.
        """
        plan, reads = self.plan, self.plan.reads[statement]
        unread = [load for load in reads if load in self.unread]
        self.unread -= set(unread)
        in_registers = plan.turns if self.kept.keys() == {REMEMBERED} else plan.register_turns
        shared_until = in_registers + plan.shared_turns
        if unread and in_registers:

            def keep(first: Expr, turns: int) -> None:
                with named(T.unroll, turns, "turn") as turn:
                    for load in unread:
                        self._load(load, self.kept[load], first + turn, first + turn)

            self._in_turns(range(in_registers), in_registers, keep)

        def walk(turns: range, buffers_by_load: Mapping[Load, Any], stored: Mapping[Load, Any]) -> None:
            operands = [load for load in reads if load not in buffers_by_load]
            together = loads_together(plan, self.column_threads, len(operands))
            buffers = {load: self._buffer(load.tensor, together * plan.vector) for load in operands}

            def some(first: Expr, count: int) -> None:
                for load, buffer in buffers.items():
                    with named(T.unroll, count, "turn") as turn:
                        if load in stored and load not in unread:
                            place = self._shared_place(first + turn - in_registers)
                            value = vector_read(stored[load], place, plan.vector)
                            vector_write(buffer, turn * plan.vector, plan.vector, value)
                        else:
                            self._load(load, buffer, turn, first + turn)
                for load in (load for load in unread if load in stored):
                    with named(T.unroll, count, "turn") as turn:
                        value = vector_read(buffers[load], turn * plan.vector, plan.vector)
                        place = self._shared_place(first + turn - in_registers)
                        vector_write(stored[load], place, plan.vector, value)
                with named(T.unroll, count, "turn") as turn:
                    body(_Vector(self, first + turn, turn, buffers, buffers_by_load))

            self._in_turns(turns, together, some, unrolled=bool(buffers_by_load))

        if in_registers:
            walk(range(in_registers), self.kept, {})
        if plan.shared_turns:
            walk(range(in_registers, shared_until), {}, self.shared_kept)
        if shared_until < plan.turns:
            walk(range(shared_until, plan.turns), {}, {})

    def _shared_place(self, turn: Expr) -> Expr:
        """Where a thread keeps the first column of a turn in shared memory."""
        if self.columns_on_x:
            row = self.row_thread * self.plan.shared_turns + turn
            return (row * self.column_threads + self.lane) * self.plan.vector
        return ((turn * self.column_threads + self.lane) * self.row_threads + self.row_thread) * self.plan.vector

    def _in_turns(
        self, turns: range, together: int, body: Callable[[Expr, int], None], *, unrolled: bool = False
    ) -> None:
        """``body(first, count)`` for some turns of a thread, ``together`` at a time; the last turn of all may leave the
        thread out."""
        plan, threads, start = self.plan, self.column_threads, turns.start
        full_turns = plan.vectors // threads
        groups, remaining = divmod(max(0, min(full_turns, turns.stop) - start), together)
        if groups == 1:
            body(tirx.const(start, "int32"), together)
        elif groups:
            serial = _one_by_one if plan.shared_turns else T.serial
            with named(T.unroll if unrolled else serial, groups, "group") as group:
                body(start + group * together, together)
        if remaining:
            body(tirx.const(start + groups * together, "int32"), remaining)
        if full_turns in turns:
            with T.If(full_turns * threads + self.lane < plan.vectors), T.Then():
                body(tirx.const(full_turns, "int32"), 1)

    def column(self, turn: Expr, lane: Expr) -> dict[str, Expr]:
        """A column of the thread, by axis."""
        *outer, last = self.columns
        sizes, number = self.form.sizes, turn * self.column_threads + self.lane
        if not outer:
            return {last: number * self.plan.vector + lane}
        count = sizes[last] // self.plan.vector
        column = {last: remainder(number, count) * self.plan.vector + lane}
        number = tirx.floordiv(number, count)
        for axis in reversed(outer):
            column[axis] = remainder(number, sizes[axis]) if axis != outer[0] else number
            number = tirx.floordiv(number, sizes[axis])
        return column

    def _load(self, load: Load, registers: Any, position: Expr, turn: Expr) -> None:
        """A vector of columns from memory to the registers ``to``, as they are stored."""
        lanes = self.plan.vector
        if load in self.plan.wide:
            axes = {**self.row, **self.column(turn, tirx.const(0, "int32"))}
            first = self._place(load.tensor, places(load, axes, lambda place: self._read(place, axes)))
            vector_write(registers, position * lanes, lanes, vector_read(self.sources[load.tensor], first, lanes))
            return
        with named(T.unroll, lanes, "lane") as lane:
            value = self._read(load, {**self.row, **self.column(turn, lane)})
            T.buffer_store(registers, value, [position * lanes + lane])

    def _read(self, load: Load, axes: Mapping[str, Expr]) -> Expr:
        """An element from memory."""
        source = self.sources[load.tensor]

        def at(*indices: Expr) -> Expr:
            return source[self._place(load.tensor, indices)]

        return guarded_read(
            load, self.tensors[load.tensor], at, axes, self.form.sizes, lambda place: self._read(place, axes)
        )

    def reader(self, loaded: Mapping[Load, Expr], axes: Mapping[str, Expr], dtype: str) -> Read:
        """Reads of a statement, as values of ``dtype``: results of reductions, what is ``loaded``, else memory."""

        def read(load: Load) -> Expr:
            if load.tensor in self.results:
                return self.result[self.results[load.tensor]].astype(dtype)
            value = loaded[load] if load in loaded else self._read(load, axes)
            return value.astype(dtype)

        return read

    def _address(self, names: Sequence[str], axes: Mapping[str, Expr]) -> Expr:
        """Position of an element of the output."""
        return self._place(self.form.expr.output.name, [axes[name] for name in names])

    def _place(self, tensor: str, indices: Sequence[Expr]) -> Expr:
        shape = self.tensors[tensor].shape
        total: Expr = tirx.const(0, "int32")
        for position, index in enumerate(indices):
            total = total + index * math.prod(shape[position + 1 :])
        return total


class _Vector:
    """Adjacent columns of a thread whose elements lie in registers."""

    def __init__(
        self,
        lowering: _RowsLowering,
        turn: Expr,
        position: Expr,
        loaded: Mapping[Load, Any],
        kept: Mapping[Load, Any],
    ) -> None:
        """``turn`` counts the thread's vectors and those in the buffers ``kept``, ``position`` those in ``loaded``."""
        self.lowering, self.turn, self.position, self.loaded, self.kept = lowering, turn, position, loaded, kept

    def axes(self, lane: Expr) -> dict[str, Expr]:
        """Row and column of one of them."""
        return {**self.lowering.row, **self.lowering.column(self.turn, lane)}

    def each(self, body: Callable[[Mapping[str, Expr], Read, _Vector, Expr], None], dtype: str) -> None:
        """``body(axes, read, self, lane)`` for every column; reads give values of ``dtype``."""
        lanes = self.lowering.plan.vector
        with named(T.unroll, lanes, "lane") as lane:
            elements = {load: buffer[self.position * lanes + lane] for load, buffer in self.loaded.items()}
            elements |= {load: buffer[self.turn * lanes + lane] for load, buffer in self.kept.items()}
            axes = self.axes(lane)
            body(axes, self.lowering.reader(elements, axes, dtype), self, lane)
