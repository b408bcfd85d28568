"""Reductions shared among the threads of a block: softmax, layer norm, and large reductions with few outputs.

Blocks own whole rows, ``threads`` of them side by side; the columns of a row are dealt to ``reduce_threads`` threads,
whose partial results TVM combines by warp shuffles (CUDA) or a tree in shared memory (OpenCL). A row that does not
exist is computed from neutral values and never stored, so that every thread reaches every barrier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tvm
from tvm import te

from codegen.lower import Lowered, fresh_name, guarded_read, identifier, padded_sizes, placeholders
from codegen.values import Expr, evaluate, reducer
from sokoban.expression import Load, Statement
from sokoban.kernel_form import KernelForm
from sokoban.schedule import TileSchedule
from sokoban.vectors import column_vector


def lower_rows(form: KernelForm, schedule: TileSchedule, *, entry: str) -> Lowered:
    """Lower a ``rows`` kernel, or a ``tile`` kernel whose reduction is shared among threads."""
    return _RowsLowering(form, schedule, entry).run()


class _RowsLowering:
    def __init__(self, form: KernelForm, schedule: TileSchedule, entry: str) -> None:
        self.form = form
        self.schedule = schedule
        self.entry = entry
        self.dtype = form.expr.accumulate
        self.tensors = form.expr.tensor_by_name
        self.padded = {axis: size for axis, size in padded_sizes(form, schedule).items() if axis in form.spatial}
        self.sources = placeholders(form)
        self.row_threads = math.prod(schedule.threads_of.values())
        self.column_threads = math.prod(schedule.reduce_threads_of.values())
        self.columns_on_x = form.reduces_contiguously
        self.blocks = [fresh_name(f"partial_{n}", form.expr.tensor_by_name) for n in range(len(form.reductions))]

    def run(self) -> Lowered:
        results: dict[str, Any] = {}
        for name, statement in zip(self.blocks, self.form.reductions, strict=True):
            results[statement.tensor] = self._reduction(statement, results, name)
        output = self._final(results)
        function = te.create_prim_func([*self.sources.values(), output]).with_attr("global_symbol", self.entry)
        self.sch = sch = tvm.s_tir.Schedule(tvm.IRModule({self.entry: function}))
        sch.work_on(self.entry)
        row_loop, column_loops = self._row_loops()
        for name, statement in reversed(list(zip(self.blocks, self.form.reductions, strict=True))):
            self._share(name, statement, row_loop)
        if column_loops:
            self._deal(column_loops)
        element_bytes = 4 if self.dtype == "float32" else 8
        shared_bytes = len(self.form.reductions) * self.row_threads * element_bytes
        block = (self.column_threads, self.row_threads, 1)
        return Lowered(
            sch.mod,
            self.entry,
            (self.schedule.grid_blocks(self.form.sizes), 1, 1),
            block if self.columns_on_x else (block[1], block[0], 1),
            shared_bytes,
            0,
        )

    # ---- expressions

    def _read(
        self, load: Load, axes: Mapping[str, Expr], results: Mapping[str, Any], ranges: Mapping[str, int]
    ) -> Expr:
        if load.tensor in results:
            return results[load.tensor](*(axes[index.axes[0]] for index in load.indices))
        tensor = self.tensors[load.tensor]
        return guarded_read(load, tensor, self.sources[load.tensor], axes, ranges).astype(self.dtype)

    def _reduction(self, statement: Statement, results: Mapping[str, Any], name: str) -> Any:
        reduction = statement.reduction
        assert reduction is not None
        reduce_axes = {
            axis: te.reduce_axis((0, self.form.sizes[axis]), name=identifier(axis)) for axis in reduction.axes
        }
        ranges = {**self.form.sizes, **self.padded}

        def partial(*variables: Expr) -> Expr:
            axes = {**dict(zip(statement.axes, variables, strict=True)), **reduce_axes}
            body = evaluate(reduction.body, axes, lambda load: self._read(load, axes, results, ranges), self.dtype)
            return reducer(reduction.function)(body, axis=list(reduce_axes.values()))

        return te.compute(tuple(self.padded[axis] for axis in statement.axes), partial, name=name)

    def _final(self, results: Mapping[str, Any]) -> Any:
        form = self.form

        def store(*variables: Expr) -> Expr:
            axes = dict(zip(form.final.axes, variables, strict=True))
            value = evaluate(
                form.final.value, axes, lambda load: self._read(load, axes, results, form.sizes), self.dtype
            )
            return value.astype(form.expr.output.dtype)

        return te.compute(form.expr.output.shape, store, name=identifier(form.expr.output.name))

    # ---- loops

    def _row_loops(self) -> tuple[Any, list[Any]]:
        """Rows over blocks and row threads; the rows of one thread innermost. Returns the loop under which a row's
        reductions are computed, and the loops over the output's columns."""
        sch = self.sch
        store = sch.get_sblock(identifier(self.form.expr.output.name))
        loops = dict(zip(self.form.final.axes, sch.get_loops(store), strict=True))
        cuts = [
            sch.split(loops[axis], [None, self.schedule.threads_of[axis], self.schedule.register_tile[axis]])
            for axis in self.form.spatial
        ]
        blocks, threads, inner = ([cut[level] for cut in cuts] for level in range(3))
        columns = [loops[axis] for axis in self.form.columns]
        sch.reorder(*blocks, *threads, *inner, *columns)
        block_loop = sch.fuse(*blocks)
        thread_loop = sch.fuse(*threads)
        inner_loop = sch.fuse(*inner)
        sch.bind(block_loop, "blockIdx.x")
        sch.bind(thread_loop, "threadIdx.y" if self.columns_on_x else "threadIdx.x")
        sch.annotate(block_loop, "pragma_auto_unroll_max_step", self.schedule.unroll)
        sch.annotate(block_loop, "pragma_unroll_explicit", 0)
        return inner_loop, columns

    @property
    def _column_thread(self) -> str:
        return "threadIdx.x" if self.columns_on_x else "threadIdx.y"

    def _share(self, name: str, statement: Statement, row_loop: Any) -> None:
        """One reduction under the row loop, its columns dealt to the column threads."""
        sch = self.sch
        block = sch.get_sblock(name)
        # Private to a thread: TVM leaves the combined value with every thread that took part.
        sch.set_scope(block, 0, "local")
        sch.compute_at(block, row_loop, preserve_unit_loops=True)
        assert statement.reduction is not None
        fused = sch.fuse(*sch.get_loops(block)[-len(statement.reduction.axes) :])
        _, threads = sch.split(fused, [None, self.column_threads])
        sch.bind(threads, self._column_thread)

    def _deal(self, column_loops: list[Any]) -> None:
        """The output's columns dealt to the column threads, in vectors where every access allows it."""
        sch = self.sch
        fused = sch.fuse(*column_loops)
        width = column_vector(self.form, self.column_threads)
        _, threads, vector = sch.split(fused, [None, self.column_threads, width])
        sch.bind(threads, self._column_thread)
        if width > 1:
            sch.vectorize(vector)
