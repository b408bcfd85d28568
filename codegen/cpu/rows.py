"""Reductions whose vectors lie along the sum, for CPUs: softmax, layer norm, and sums with few outputs.

A thread takes whole rows. Where a row's elements are neighbours in memory the lanes of a register share it: partial
results of several registers, so that one addition need not wait for the one before, which are folded at its end. Where
the rows themselves are neighbours, as under a softmax over channels, every lane has a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import Cut, position, vectors
from codegen.cpu.function import CpuBuffers, LoweredCpu, lanes_of, lowered_blocks, read_flat, reads_inside
from codegen.cpu.functions import CHOSEN, VectorValue
from codegen.cpu.lines import ask_for_line, runs_through
from codegen.tir.lowered import LoweringError, identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.statements import local_buffer, named
from codegen.tir.values import Expr, combine, identity
from hal.spec.parts import CPU_LINE_BYTES
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Call, Constant, Load, Reduction, Statement, Value, loads, rewrite, walk
from sokoban.schedule.cpu_tiles import PARTIAL_SUMS, lane_axis

#: Stands in the final statement for a value that is kept in scratch memory.
_REPEATED = Load("|kept", ())

Point = Mapping[str, Expr]


def takes(request: TileRequest) -> bool:
    """``rows`` kernels, and ``tile`` kernels whose reduction is shared among lanes."""
    return request.problem.is_rows or bool(request.schedule.reduce_threads)


def lower(request: TileRequest) -> LoweredCpu:
    """The kernel of a schedule whose threads take whole rows."""
    plan = _RowsPlan.of(request)
    return lowered_blocks(
        request,
        blocks=math.prod(cut.blocks for cut in plan.cuts),
        scratch_elements=plan.scratch_elements,
        body=lambda buffers, number: _BlockLoops(plan, buffers).write(number),
    )


@dataclass(frozen=True, kw_only=True)
class _RowsPlan:
    """Decisions made before the kernel is written.

    Attributes:
        form: the operator.
        lanes: elements of a vector.
        lane_axis: the row axis that lanes lie along; None where they lie along the columns.
        cuts: blocks of rows, by axis in order; where lanes lie along one, vectors of it are register tiles.
        kept: what the last reduction adds up, where the final statement needs it again; else None.
        final: the final statement's value.
    """

    form: KernelForm
    lanes: int
    lane_axis: str | None
    cuts: tuple[Cut, ...]
    kept: Value | None
    final: Value

    @staticmethod
    def of(request: TileRequest) -> _RowsPlan:
        """The plan of a schedule.

        Raises:
            LoweringError: vectors of rows do not divide a block.
        """
        form, lanes, axis = request.problem, lanes_of(request), lane_axis(request.problem)
        block_of = request.schedule.block_of
        cuts = []
        for row_axis in form.spatial:
            size, block = form.sizes[row_axis], block_of[row_axis]
            tile = min(size, lanes) if row_axis == axis else 1
            if block < size and block % tile:
                raise LoweringError(f"{request.entry}: vectors of {tile} rows do not divide a block of {block}")
            cuts.append(Cut(row_axis, size, min(block, size), tile))
        repeated = _repeated_value(form, axis)
        return _RowsPlan(
            form=form, lanes=lanes, lane_axis=axis, cuts=tuple(cuts), kept=repeated, final=_final_value(form, repeated)
        )

    @property
    def dtype(self) -> str:
        """The type that the kernel computes in."""
        return self.form.expr.accumulate

    @property
    def scratch_elements(self) -> int:
        """Elements of scratch memory that a thread needs: a row of what is kept, in whole vectors."""
        elements = math.prod(self.form.sizes[axis] for axis in self.form.columns) if self.kept else 0
        return -(-elements // self.lanes) * self.lanes


def _repeated_value(form: KernelForm, lane_axis: str | None) -> Value | None:
    """Value that the last reduction adds up and the final statement needs again: softmax's exponentials.

    A row of it stays in scratch memory, and need not be computed twice.
    """
    reduction = _reduction(form.reductions[-1])
    alike = not lane_axis and tuple(reduction.axes) == form.columns
    again = isinstance(reduction.body, Call) and reduction.body in walk(form.final.value)
    return reduction.body if alike and again and form.expr.final_dtype == form.expr.accumulate else None


def _final_value(form: KernelForm, repeated: Value | None) -> Value:
    """The final statement's value: with what is kept, and by one division a row where every element is divided by the
    row's own number."""
    value = form.final.value if repeated is None else rewrite(form.final.value, {repeated: _REPEATED})
    produced = {statement.tensor for statement in form.reductions}
    inverted: dict[Value, Value] = {}
    for node in walk(value):
        if isinstance(node, Call) and node.function == "div":
            above, below = node.arguments
            if loads(below) and {load.tensor for load in loads(below)} <= produced:
                inverted[node] = Call("mul", (above, Call("div", (Constant(1.0), below))))
    return rewrite(value, inverted)


class _BlockLoops:
    """The loops over the rows of a block."""

    def __init__(self, plan: _RowsPlan, buffers: CpuBuffers) -> None:
        self.plan, self.buffers = plan, buffers

    def write(self, number: Expr) -> None:
        """All statements of the block of a number; blocks count the last axis fastest."""
        origin: dict[str, Expr] = {}
        for cut in reversed(self.plan.cuts):
            origin[cut.axis] = tirx.floormod(number, cut.blocks) * cut.block
            number = tirx.floordiv(number, cut.blocks)
        self._rows(self.plan.cuts, origin, {})

    def _rows(self, cuts: Sequence[Cut], origin: Point, row: Point) -> None:
        """Loops over the rows of a block, vectors of rows along the lane axis."""
        if not cuts:
            self._row(row, 1)
            return
        cut, *others = cuts
        if cut.axis != self.plan.lane_axis:
            with named(T.serial, tirx.min(cut.block, cut.size - origin[cut.axis]), identifier(cut.axis)) as index:
                self._rows(others, origin, {**row, cut.axis: origin[cut.axis] + index})
            return
        # The last axis of the output, so that nothing follows.
        with named(T.serial, cut.tiles_per_block, identifier(cut.axis)) as index:
            first = origin[cut.axis] + index * cut.tile
            with T.If(first + cut.tile <= cut.size), T.Then():
                self._row({**row, cut.axis: first}, cut.tile)
            if cut.rest:
                with T.If(tirx.all(first < cut.size, first + cut.tile > cut.size)), T.Then():
                    for start, width in vectors(cut.rest, self.plan.lanes):
                        self._row({**row, cut.axis: first + start}, width)

    def _row(self, row: Point, width: int) -> None:
        _RowWriter(self.plan, self.buffers, width).write(row)


class _RowWriter:
    """The statements for one row, or for ``width`` neighbouring ones in the lanes of vectors."""

    def __init__(self, plan: _RowsPlan, buffers: CpuBuffers, width: int) -> None:
        self.plan, self.form, self.lanes, self.width = plan, plan.form, plan.lanes, width
        self.dtype, self.lane_axis, self.kept = plan.dtype, plan.lane_axis, plan.kept
        self.sources, self.output, self.scratch = buffers.sources, buffers.output, buffers.scratch
        self.tensors = plan.form.expr.tensor_by_name
        #: Results of the reductions so far, by tensor.
        self.results: dict[str, Any] = {}

    def write(self, row: Point) -> None:
        """All statements; ``row``: its place, of several that of the first."""
        for number, statement in enumerate(self.form.reductions):
            results = local_buffer(f"result_{number}", self.width, self.dtype)
            if self.lane_axis:
                self._reduce_rows(statement, row, results)
            else:
                self._reduce_columns(statement, row, number, results)
            self.results[statement.tensor] = results
        self._finish(list(self.form.columns), row)

    # ---- lanes along the rows

    def _reduce_rows(self, statement: Statement, row: Point, results: Any) -> None:
        reduction, width = _reduction(statement), self.width

        def clear(lane: Expr) -> None:
            T.buffer_store(results, identity(reduction.function, self.dtype), [lane])

        def add(point: Point) -> None:
            body = self._value(reduction.body, width, self.dtype)
            with T.vectorized(width) as lane:
                value = self._at(body, self._lane(point, lane), lane)
                T.buffer_store(results, combine(reduction.function, results[lane], value, CHOSEN), [lane])

        with T.vectorized(width) as lane:
            clear(lane)
        self._loops(list(reduction.axes), row, add)

    def _lane(self, point: Point, lane: Expr) -> Point:
        """A point of the row that is in a lane."""
        return {**point, self.lane_axis: point[self.lane_axis] + lane} if self.lane_axis else point

    def _loops(self, axes: Sequence[str], point: Point, body: Callable[[Point], None]) -> None:
        """``body`` at every point of loops over ``axes``."""
        if not axes:
            body(point)
            return
        with named(T.serial, self.form.sizes[axes[0]], identifier(axes[0])) as index:
            self._loops(axes[1:], {**point, axes[0]: index}, body)

    # ---- lanes along the columns

    def _reduce_columns(self, statement: Statement, row: Point, number: int, results: Any) -> None:
        """Partial results in registers, over runs of the last axis; then all of them folded into one."""
        reduction = _reduction(statement)
        *outer, last = reduction.axes
        size = self.form.sizes[last]
        full_pieces = min(PARTIAL_SUMS, size // self.lanes)
        pieces = [(piece * self.lanes, self.lanes) for piece in range(full_pieces)]
        run = full_pieces * self.lanes
        end_pieces = vectors(size - size // run * run if run else size, self.lanes)
        partial = [
            local_buffer(f"partial_{number}_{place}", width, self.dtype) for place, (_, width) in enumerate(pieces)
        ]
        ends = [local_buffer(f"end_{number}_{place}", width, self.dtype) for place, (_, width) in enumerate(end_pieces)]
        all_partials = [*zip(partial, pieces, strict=True), *zip(ends, end_pieces, strict=True)]
        for buffer, (_, width) in all_partials:
            with T.vectorized(width) as lane:
                T.buffer_store(buffer, identity(reduction.function, self.dtype), [lane])

        def add(buffer: Any, width: int, point: Point, start: Expr) -> None:
            body = self._value(reduction.body, width, self.dtype)
            with T.vectorized(width) as lane:
                axes = {**point, last: start + lane}
                value = self._at(body, axes, lane)
                if reduction.body == self.kept and statement is self.form.reductions[-1]:
                    T.buffer_store(self.scratch, value, [self._column(axes)])
                    value = self.scratch[self._column(axes)]
                T.buffer_store(buffer, combine(reduction.function, buffer[lane], value, CHOSEN), [lane])

        def runs(point: Point) -> None:
            if run:
                with named(T.serial, size // run, identifier(last)) as index:
                    if not number:
                        self._ask_for_reads(reduction, {**point, last: index * run}, run)
                    for buffer, (start, width) in zip(partial, pieces, strict=True):
                        add(buffer, width, point, index * run + start)
            for buffer, (start, width) in zip(ends, end_pieces, strict=True):
                add(buffer, width, point, tirx.const((size // run * run if run else 0) + start, "int32"))

        self._loops(outer, row, runs)
        values = [self._folded(reduction.function, f"fold_{number}", partial)] if partial else []
        values += [buffer[lane] for buffer, (_, width) in zip(ends, end_pieces, strict=True) for lane in range(width)]
        T.buffer_store(results, _tree(reduction.function, values), [0])

    def _folded(self, function: str, name: str, partial: Sequence[Any]) -> Expr:
        """Registers of partial results into one number."""
        together = local_buffer(name, self.lanes, self.dtype)
        with T.vectorized(self.lanes) as lane:
            T.buffer_store(together, _tree(function, [buffer[lane] for buffer in partial]), [lane])
        return _tree(function, [together[lane] for lane in range(self.lanes)])

    # ---- results

    def _finish(self, columns: Sequence[str], row_point: Point) -> None:
        """The final statement for every column of the rows at hand."""
        if self.lane_axis or not columns:
            self._loops(columns, row_point, lambda point: self._store(point, None, tirx.const(0, "int32"), self.width))
            return
        *outer, last = columns
        full_vectors, remaining = divmod(self.form.sizes[last], self.lanes)

        def row(point: Point) -> None:
            if full_vectors:
                with named(T.serial, full_vectors, identifier(last)) as index:
                    self._ask_for_write({**point, last: index * self.lanes}, last)
                    self._store(point, last, index * self.lanes, self.lanes)
            for start, count in vectors(remaining, self.lanes):
                self._store(point, last, tirx.const(full_vectors * self.lanes + start, "int32"), count)

        self._loops(outer, row_point, row)

    def _store(self, point: Point, column: str | None, start: Expr, width: int) -> None:
        """Write ``width`` results: from ``start`` on along the axis ``column``, or of neighbouring rows where None."""
        form = self.form
        final = self._value(self.plan.final, width, form.expr.final_dtype)
        with T.vectorized(width) as lane:
            axes = {**point, column: start + lane} if column is not None else self._lane(point, lane)
            value = self._at(final, axes, lane).astype(form.expr.output.dtype)
            place = position([axes[axis] for axis in form.final.axes], form.expr.output.shape or (1,))
            T.buffer_store(self.output, value, [place])

    # ---- requests ahead

    def _ask_for_reads(self, reduction: Any, point: Point, run: int) -> None:
        """Ask for what the first reduction of a row reads some runs later, in this row or the next one."""
        axes = (*self.form.spatial, *reduction.axes)
        elements = math.prod(self.form.sizes[axis] for axis in axes)
        for load in loads(reduction.body):
            tensor = self.tensors.get(load.tensor)
            if tensor is None or not runs_through(load, tensor, axes, elements):
                continue
            for start in range(0, run, CPU_LINE_BYTES // tensor.element_bytes):
                first = {**point, axes[-1]: point[axes[-1]] + start}
                ask_for_line(self.sources[load.tensor], tensor, first, axes, written=False)

    def _ask_for_write(self, point: Point, column: str) -> None:
        """Ask for where the row's results, or those of the next one, go some vectors later."""
        axes, output = self.form.final.axes, self.form.expr.output
        if axes[-1] == column:
            for start in range(0, self.lanes, CPU_LINE_BYTES // output.element_bytes):
                first = {**point, column: point[column] + start}
                ask_for_line(self.output, output, first, axes, written=True)

    def _column(self, axes: Point) -> Expr:
        """Position of an element within its row."""
        columns = self.form.columns
        return position([axes[axis] for axis in columns], [self.form.sizes[axis] for axis in columns])

    def _value(self, value: Value, lanes: int, dtype: str) -> VectorValue:
        def is_inside(load: Load) -> bool:
            is_in_registers = load is _REPEATED or load.tensor in self.results
            return is_in_registers or reads_inside(load, self.tensors[load.tensor], self.form.sizes)

        return VectorValue(value, dtype, lanes, is_inside)

    def _at(self, value: VectorValue, axes: Point, lane: Expr) -> Expr:
        def read(load: Load) -> Expr:
            if load is _REPEATED:
                return self.scratch[self._column(axes)]
            if load.tensor in self.results:
                return self.results[load.tensor][lane if self.lane_axis else 0].astype(value.dtype)
            return read_flat(load, self.tensors, self.sources, axes, self.form.sizes, value.dtype)

        return value.at(axes, read, lane)


def _reduction(statement: Statement) -> Reduction:
    assert statement.reduction is not None
    return statement.reduction


def _tree(function: str, values: Sequence[Expr]) -> Expr:
    """All values in one, by pairs."""
    while len(values) > 1:
        values = [
            combine(function, values[pair], values[pair + 1], CHOSEN) if pair + 1 < len(values) else values[pair]
            for pair in range(0, len(values), 2)
        ]
    return values[0]
