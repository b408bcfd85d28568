"""Reductions whose vectors lie along the sum, for CPUs: softmax, layer norm, and sums with few outputs.

A thread takes whole rows. Where a row's elements are neighbours in memory the lanes of a register share it: partial
results of several registers, so that one addition need not wait for the one before, which are folded at its end. Where
the rows themselves are neighbours, as under a softmax over channels, every lane has a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import Cut, position, vectors
from codegen.cpu.function import CpuFunction, LoweredCpu, read_flat
from codegen.cpu.functions import evaluate
from codegen.cpu.vectors import ask_for_line, runs_through
from codegen.tir.lowered import LoweringError, identifier
from codegen.tir.statements import local_buffer, named
from codegen.tir.values import Expr, combine, identity
from hal.microbench.cpu.vector_ir import LINE_BYTES
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import DTYPE_BYTES, Call, Constant, Load, Statement, Value, loads, rewrite, walk
from sokoban.schedule.cpu_tiles import PARTIAL_SUMS, lane_axis
from sokoban.schedule.tile import TileSchedule

#: Stands in the final statement for a value that is kept in scratch memory.
_KEPT = Load("|kept", ())

Point = Mapping[str, Expr]


class RowsLowering:
    """One ``rows`` kernel, or a ``tile`` kernel whose reduction is shared among lanes."""

    def __init__(self, form: KernelForm, schedule: TileSchedule, entry: str, lanes: int) -> None:
        self.form, self.entry, self.lanes = form, entry, lanes
        self.dtype = form.expr.accumulate
        self.tensors = form.expr.tensor_by_name
        #: The row axis that lanes lie along; "" where they lie along the columns.
        self.lane_axis = lane_axis(form)
        self.cuts = [self._cut(axis, schedule.block_of[axis]) for axis in form.spatial]
        #: Results of the reductions for the rows at hand, by tensor.
        self.results: dict[str, Any] = {}
        self.kept = self._kept()
        self.final = self._final()

    def run(self) -> LoweredCpu:
        elements = math.prod(self.form.sizes[axis] for axis in self.form.columns) if self.kept else 0
        elements = -(-elements // self.lanes) * self.lanes
        module = CpuFunction(self.form, self.entry).build(elements, self._block)
        blocks = math.prod(cut.blocks for cut in self.cuts)
        element_bytes = DTYPE_BYTES[self.dtype]
        return LoweredCpu(module, self.entry, blocks, elements * element_bytes, self.lanes * element_bytes)

    def _kept(self) -> Value | None:
        """What the last reduction adds up, where the final statement needs it again: softmax's exponentials.

        A row of it stays in scratch memory, and need not be computed twice.
        """
        reduction = _reduction(self.form.reductions[-1])
        alike = not self.lane_axis and tuple(reduction.axes) == self.form.columns
        costly = isinstance(reduction.body, Call)
        again = costly and reduction.body in walk(self.form.final.value)
        return reduction.body if alike and again and self.form.expr.final_dtype == self.dtype else None

    def _cut(self, axis: str, block: int) -> Cut:
        size = self.form.sizes[axis]
        tile = min(size, self.lanes) if axis == self.lane_axis else 1
        if block < size and block % tile:
            raise LoweringError(f"{self.entry}: vectors of {tile} rows do not divide a block of {block}")
        return Cut(axis, size, min(block, size), tile)

    def _block(self, sources: Mapping[str, Any], output: Any, scratch: Any, number: Expr) -> None:
        self.sources, self.output, self.scratch = sources, output, scratch
        origin: dict[str, Expr] = {}
        rest = number
        for cut in reversed(self.cuts):
            origin[cut.axis] = tirx.floormod(rest, cut.blocks) * cut.block
            rest = tirx.floordiv(rest, cut.blocks)
        self._rows(self.cuts, origin, {})

    def _rows(self, cuts: Sequence[Cut], origin: Point, at: dict[str, Expr]) -> None:
        """Loops over the rows of a block, vectors of rows along the lane axis."""
        if not cuts:
            self._row(at, 1)
            return
        cut, *others = cuts
        if cut.axis != self.lane_axis:
            with named(T.serial, tirx.min(cut.block, cut.size - origin[cut.axis]), identifier(cut.axis)) as index:
                self._rows(others, origin, {**at, cut.axis: origin[cut.axis] + index})
            return
        # The last axis of the output, so that nothing follows.
        with named(T.serial, cut.tiles_per_block, identifier(cut.axis)) as index:
            first = origin[cut.axis] + index * cut.tile
            with T.If(first + cut.tile <= cut.size), T.Then():
                self._row({**at, cut.axis: first}, cut.tile)
            if cut.rest:
                with T.If(tirx.all(first < cut.size, first + cut.tile > cut.size)), T.Then():
                    for start, width in vectors(cut.rest, self.lanes):
                        self._row({**at, cut.axis: first + start}, width)

    def _row(self, at: Point, width: int) -> None:
        """All statements for one row, or for ``width`` neighbouring ones."""
        self.results = {}
        for number, statement in enumerate(self.form.reductions):
            held = local_buffer(f"result_{number}", width, self.dtype)
            if self.lane_axis:
                self._reduce_rows(statement, at, width, held)
            else:
                self._reduce_columns(statement, at, number, held)
            self.results[statement.tensor] = held
        self._finish(list(self.form.columns), at, width)

    # ---- lanes along the rows

    def _reduce_rows(self, statement: Statement, at: Point, width: int, held: Any) -> None:
        reduction = _reduction(statement)

        def clear(lane: Expr) -> None:
            T.buffer_store(held, identity(reduction.function, self.dtype), [lane])

        def add(here: Point) -> None:
            with T.vectorized(width) as lane:
                value = self._value(reduction.body, self._lane(here, lane), lane, self.dtype)
                T.buffer_store(held, combine(reduction.function, held[lane], value), [lane])

        with T.vectorized(width) as lane:
            clear(lane)
        self._loops(list(reduction.axes), at, add)

    def _lane(self, here: Point, lane: Expr) -> Point:
        return {**here, self.lane_axis: here[self.lane_axis] + lane} if self.lane_axis else here

    def _loops(self, axes: Sequence[str], at: Point, body: Callable[[Point], None]) -> None:
        if not axes:
            body(at)
            return
        with named(T.serial, self.form.sizes[axes[0]], identifier(axes[0])) as index:
            self._loops(axes[1:], {**at, axes[0]: index}, body)

    # ---- lanes along the columns

    def _reduce_columns(self, statement: Statement, at: Point, number: int, held: Any) -> None:
        """Partial results in registers, over runs of the last axis; then all of them folded into one."""
        reduction = _reduction(statement)
        *outer, last = reduction.axes
        size = self.form.sizes[last]
        whole = min(PARTIAL_SUMS, size // self.lanes)
        pieces = [(piece * self.lanes, self.lanes) for piece in range(whole)]
        run = whole * self.lanes
        rest = vectors(size - size // run * run if run else size, self.lanes)
        partial = [
            local_buffer(f"partial_{number}_{place}", width, self.dtype) for place, (_, width) in enumerate(pieces)
        ]
        ends = [local_buffer(f"end_{number}_{place}", width, self.dtype) for place, (_, width) in enumerate(rest)]
        every = [*zip(partial, pieces, strict=True), *zip(ends, rest, strict=True)]
        for buffer, (_, width) in every:
            with T.vectorized(width) as lane:
                T.buffer_store(buffer, identity(reduction.function, self.dtype), [lane])

        def add(buffer: Any, width: int, here: Point, start: Expr) -> None:
            with T.vectorized(width) as lane:
                axes = {**here, last: start + lane}
                value = self._value(reduction.body, axes, lane, self.dtype)
                if reduction.body == self.kept and statement is self.form.reductions[-1]:
                    T.buffer_store(self.scratch, value, [self._column(axes)])
                    value = self.scratch[self._column(axes)]
                T.buffer_store(buffer, combine(reduction.function, buffer[lane], value), [lane])

        def runs(here: Point) -> None:
            if run:
                with named(T.serial, size // run, identifier(last)) as index:
                    if not number:
                        self._ask_for_reads(reduction, {**here, last: index * run}, run)
                    for buffer, (start, width) in zip(partial, pieces, strict=True):
                        add(buffer, width, here, index * run + start)
            for buffer, (start, width) in zip(ends, rest, strict=True):
                add(buffer, width, here, tirx.const((size // run * run if run else 0) + start, "int32"))

        self._loops(outer, at, runs)
        values = [self._folded(reduction.function, f"fold_{number}", partial)] if partial else []
        values += [buffer[lane] for buffer, (_, width) in zip(ends, rest, strict=True) for lane in range(width)]
        T.buffer_store(held, _tree(reduction.function, values), [0])

    def _folded(self, function: str, name: str, partial: Sequence[Any]) -> Expr:
        """Registers of partial results into one number."""
        together = local_buffer(name, self.lanes, self.dtype)
        with T.vectorized(self.lanes) as lane:
            T.buffer_store(together, _tree(function, [buffer[lane] for buffer in partial]), [lane])
        return _tree(function, [together[lane] for lane in range(self.lanes)])

    # ---- results

    def _finish(self, columns: Sequence[str], at: Point, width: int) -> None:
        """The final statement for every column of the rows at hand."""
        if self.lane_axis or not columns:
            self._loops(columns, at, lambda here: self._store(here, "", tirx.const(0, "int32"), width))
            return
        *outer, last = columns
        whole, rest = divmod(self.form.sizes[last], self.lanes)

        def row(here: Point) -> None:
            if whole:
                with named(T.serial, whole, identifier(last)) as index:
                    self._ask_for_write({**here, last: index * self.lanes}, last)
                    self._store(here, last, index * self.lanes, self.lanes)
            for start, count in vectors(rest, self.lanes):
                self._store(here, last, tirx.const(whole * self.lanes + start, "int32"), count)

        self._loops(outer, at, row)

    def _store(self, here: Point, column: str, start: Expr, width: int) -> None:
        form = self.form
        with T.vectorized(width) as lane:
            axes = {**here, column: start + lane} if column else self._lane(here, lane)
            value = self._value(self.final, axes, lane, form.expr.final_dtype).astype(form.expr.output.dtype)
            place = position([axes[axis] for axis in form.final.axes], form.expr.output.shape or (1,))
            T.buffer_store(self.output, value, [place])

    # ---- requests ahead

    def _ask_for_reads(self, reduction: Any, here: Point, run: int) -> None:
        """Ask for what the first reduction of a row reads some runs later, in this row or the next one."""
        axes = (*self.form.spatial, *reduction.axes)
        elements = math.prod(self.form.sizes[axis] for axis in axes)
        for load in loads(reduction.body):
            tensor = self.tensors.get(load.tensor)
            if tensor is None or not runs_through(load, tensor, axes, elements):
                continue
            for start in range(0, run, LINE_BYTES // tensor.element_bytes):
                at = {**here, axes[-1]: here[axes[-1]] + start}
                ask_for_line(self.sources[load.tensor], tensor, at, axes, written=False)

    def _ask_for_write(self, here: Point, column: str) -> None:
        """Ask for where the row's results, or those of the next one, go some vectors later."""
        axes, output = self.form.final.axes, self.form.expr.output
        if axes[-1] == column:
            for start in range(0, self.lanes, LINE_BYTES // output.element_bytes):
                at = {**here, column: here[column] + start}
                ask_for_line(self.output, output, at, axes, written=True)

    def _final(self) -> Value:
        """The final statement's value: with what is kept, and by one division a row where every element is divided by
        the row's own number."""
        value = self.form.final.value if self.kept is None else rewrite(self.form.final.value, {self.kept: _KEPT})
        produced = {statement.tensor for statement in self.form.reductions}
        inverted: dict[Value, Value] = {}
        for node in walk(value):
            if isinstance(node, Call) and node.function == "div":
                above, below = node.arguments
                if loads(below) and {load.tensor for load in loads(below)} <= produced:
                    inverted[node] = Call("mul", (above, Call("div", (Constant(1.0), below))))
        return rewrite(value, inverted)

    def _column(self, axes: Point) -> Expr:
        """Position of an element within its row."""
        columns = self.form.columns
        return position([axes[axis] for axis in columns], [self.form.sizes[axis] for axis in columns])

    def _value(self, value: Value, axes: Point, lane: Expr, dtype: str) -> Expr:
        def read(load: Load) -> Expr:
            if load is _KEPT:
                return self.scratch[self._column(axes)]
            if load.tensor in self.results:
                return self.results[load.tensor][lane if self.lane_axis else 0].astype(dtype)
            source = self.sources[load.tensor]
            return read_flat(load, self.tensors[load.tensor], source, axes, self.form.sizes, dtype)

        return evaluate(value, axes, read, dtype)


def _reduction(statement: Statement) -> Any:
    assert statement.reduction is not None
    return statement.reduction


def _tree(function: str, values: Sequence[Expr]) -> Expr:
    """All values in one, by pairs."""
    while len(values) > 1:
        values = [
            combine(function, values[at], values[at + 1]) if at + 1 < len(values) else values[at]
            for at in range(0, len(values), 2)
        ]
    return values[0]
