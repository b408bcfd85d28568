"""Tile schedule -> TVM: the operator as staged tensor expressions over padded tiles, then scheduled step by step.

Boundaries need no code in the inner loop. The operator is written over axes padded to whole tiles: a staged data tile
is a tensor expression of its own that reads its tensor where it exists and the neutral value elsewhere, so that global
traffic ends at the tensor's edge, the inner loops run without conditions and only real outputs are stored (thesis
6.4, "Tensor padding": padding lives in the upper layers only).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from codegen.tir.bounds import Bounds
from codegen.tir.lowered import Lowered, LoweringError, identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.reads import VECTOR_ANY, guarded_read, padded_sizes
from codegen.tir.values import Expr, affine, constant, evaluate, identity, reducer
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import STATIC_SHARED_BYTES
from sokoban.kernel.regions import DataDimension, data_dimension
from sokoban.language.expression import AffineIndex, Call, Constant, Load, Reduction, Value
from sokoban.language.names import fresh_name
from sokoban.schedule.accesses import fetch_vector, store_vector
from sokoban.schedule.tile import TileSchedule

#: What TVM begins every tile at a multiple of in memory that is sized at launch.
_TILE_ALIGNMENT_BYTES = 64


def takes(request: TileRequest) -> bool:
    """Whatever no other lowering takes: reductions of which some operands are staged, or none."""
    return True


def lower(request: TileRequest) -> Lowered:
    """The kernel of a schedule of tiles."""
    return _LoopWriter(request, _ExpressionWriter(request.problem, request.schedule).write()).write()


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """A data tile staged in shared memory: the load it serves and its coordinates over the padded axes.

    Attributes:
        load: the access.
        tensor: the tile as a tensor expression.
        name: of its block and buffer in the source.
        dimensions: of what is read, as coordinates in the tile.
        shifts: what makes coordinates along every dimension start at zero.
        vector: elements that a thread copies at a time.
        padding: elements behind every row.
    """

    load: Load
    tensor: Any
    name: str
    dimensions: tuple[DataDimension, ...]
    shifts: tuple[int, ...]
    vector: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class _Expressions:
    """The operator as tensor expressions.

    Attributes:
        arguments: placeholders of the inputs, then the output.
        bounds: ends of axes and tensors.
        stages: the data tiles in shared memory.
        store: name of the block that writes the output.
        accumulator: name of the block that reduces; None without a reduction.
    """

    arguments: tuple[Any, ...]
    bounds: Bounds
    stages: tuple[_Stage, ...]
    store: str
    accumulator: str | None


class _ExpressionWriter:
    """The operator over padded axes, its staged tiles as expressions of their own."""

    def __init__(self, form: KernelForm, schedule: TileSchedule) -> None:
        self.form, self.schedule = form, schedule
        self.dtype = form.expr.accumulate
        self.tensors = form.expr.tensor_by_name
        self.padded = padded_sizes(form, schedule)
        self.bounds = Bounds(form)
        self.sources = placeholders(form)
        # Block and buffer names appear in the source: the output by its own name, nothing twice.
        self.store_name = identifier(form.expr.output.name)
        self.names = {*self.tensors, self.store_name}
        self.accumulator_name = self._fresh("accumulator")
        self.stages: dict[Load, _Stage] = {}
        for load in form.body_loads:
            if load.tensor in schedule.cached:
                self.stages[load] = self._stage(load)

    def write(self) -> _Expressions:
        """The expressions."""
        form = self.form
        accumulator = None if form.reduction is None else self._accumulate(form.reduction)

        def store(*variables: Expr) -> Expr:
            axes = dict(zip(form.final.axes, variables, strict=True))

            def read(load: Load) -> Expr:
                if accumulator is not None and load.tensor == form.reductions[0].tensor:
                    return accumulator(*variables).astype(form.expr.final_dtype)
                return self._read(load, axes, form.sizes, form.expr.final_dtype)

            value = evaluate(form.final.value, axes, read, form.expr.final_dtype)
            return value.astype(form.expr.output.dtype)

        shape = [
            self.bounds.size(axis) if extent > 1 else extent
            for axis, extent in zip(form.final.axes, form.expr.output.shape, strict=True)
        ]
        output = te.compute(shape, store, name=self.store_name)
        return _Expressions(
            arguments=(*self.sources.values(), output),
            bounds=self.bounds,
            stages=tuple(self.stages.values()),
            store=self.store_name,
            accumulator=None if accumulator is None else self.accumulator_name,
        )

    def _fresh(self, name: str) -> str:
        """``name``, numbered where a tensor or another block has it."""
        name = fresh_name(name, self.names)
        self.names.add(name)
        return name

    def _read(self, load: Load, axes: Mapping[str, Expr], ranges: Mapping[str, int], dtype: str) -> Expr:
        """An element of an operand, from its staged tile where it has one."""
        stage = self.stages.get(load)
        if stage is None:
            return self._in_place(load, axes, ranges).astype(dtype)
        coordinates = [
            affine(AffineIndex(dimension.terms, shift), axes)
            for dimension, shift in zip(stage.dimensions, stage.shifts, strict=True)
        ]
        return stage.tensor(*coordinates).astype(dtype)

    def _in_place(self, load: Load, axes: Mapping[str, Expr], ranges: Mapping[str, int]) -> Expr:
        source = self.sources[load.tensor]
        gathered = lambda place: self._in_place(place, axes, ranges)  # noqa: E731
        return guarded_read(load, self.tensors[load.tensor], source, axes, ranges, gathered, self.bounds)

    def _accumulate(self, reduction: Reduction) -> Any:
        form = self.form
        final_axes = form.final.axes
        reduce_axes = {axis: te.reduce_axis((0, self.padded[axis]), name=identifier(axis)) for axis in reduction.axes}
        guarded = [axis for axis in reduction.axes if self.padded[axis] > form.sizes[axis]]
        guarded = [axis for axis in guarded if not padding_is_neutral(form, axis, reduction)]

        def accumulate(*variables: Expr) -> Expr:
            axes = {**dict(zip(final_axes, variables, strict=True)), **reduce_axes}
            body = evaluate(
                reduction.body, axes, lambda load: self._read(load, axes, self.padded, self.dtype), self.dtype
            )
            if guarded:
                inside = tirx.all(*(axes[axis] < form.sizes[axis] for axis in guarded))
                body = tirx.if_then_else(inside, body, identity(reduction.function, self.dtype))
            return reducer(reduction.function)(body, axis=list(reduce_axes.values()))

        return te.compute(tuple(self.padded[axis] for axis in final_axes), accumulate, name=self.accumulator_name)

    def _stage(self, load: Load) -> _Stage:
        tensor = self.tensors[load.tensor]
        dimensions = tuple(data_dimension(index) for index in load.indices)
        shifts = tuple(
            sum(-c * (self.padded[axis] - 1) for axis, c in dimension.terms if c < 0) for dimension in dimensions
        )
        extents = tuple(dimension.extent(self.padded) for dimension in dimensions)

        def fetch(*coordinates: Expr) -> Expr:
            conditions, indices = [], []
            ends = [self.bounds.extent(tensor.name, p, size) for p, size in enumerate(tensor.shape)]
            parts = zip(dimensions, shifts, extents, coordinates, tensor.shape, ends, strict=True)
            for dimension, shift, extent, coordinate, size, end in parts:
                low = dimension.offset - shift * dimension.stride
                index = coordinate * dimension.stride + low
                if low < 0:
                    conditions.append(index >= 0)
                if low + (extent - 1) * dimension.stride >= size:
                    conditions.append(index < end)
                indices.append(index)
            value = self.sources[load.tensor](*indices)
            if not conditions:
                return value
            return tirx.if_then_else(tirx.all(*conditions), value, constant(load.pad or 0.0, tensor.dtype))

        name = self._fresh(f"{identifier(load.tensor)}_shared")
        padding = self.schedule.padding_of.get(load.tensor, 0) if len(extents) > 1 else 0
        allowed = fetch_vector(self.form, self.schedule, load, padding)
        return _Stage(
            load=load,
            tensor=te.compute(extents, fetch, name=name),
            name=name,
            dimensions=dimensions,
            shifts=shifts,
            vector=math.gcd(self.schedule.vector_of.get(load.tensor, VECTOR_ANY), allowed),
            padding=padding,
        )


@dataclass(frozen=True, kw_only=True)
class _Loops:
    """The loops of a kernel: of blocks, of threads, over steps of the reduction, and those inside them, spatial ones
    last."""

    block: Any
    thread: Any
    steps: tuple[Any, ...]
    inner: tuple[Any, ...]


class _LoopWriter:
    """The loops of the expressions: cut, ordered, bound to blocks and threads."""

    def __init__(self, request: TileRequest, expressions: _Expressions) -> None:
        self.form, self.schedule, self.entry = request.problem, request.schedule, request.entry
        self.has_dynamic_shared = request.target.row.has_dynamic_shared
        self.expressions = expressions
        size = [expressions.bounds.parameter] if expressions.bounds.launch else []
        function = te.create_prim_func([*expressions.arguments, *size]).with_attr("global_symbol", request.entry)
        self.sch = tvm.s_tir.Schedule(tvm.IRModule({request.entry: function}))
        self.sch.work_on(request.entry)

    def write(self) -> Lowered:
        """The kernel, step by step."""
        names = self.expressions
        loops = self._tile_loops(self.sch.get_sblock(names.accumulator or names.store))
        shared_bytes = self._fetch(loops.steps[-1] if loops.steps else loops.thread)
        if names.accumulator is not None:
            self._store(loops.thread)
            first = loops.steps[0] if loops.steps else loops.inner[0]
            self.sch.decompose_reduction(self.sch.get_sblock(names.accumulator), first)
        self._unroll(loops.block)
        return Lowered(
            module=self.sch.mod,
            entry=self.entry,
            grid=(self.schedule.grid_blocks(self.form.sizes), 1, 1),
            launch=self.expressions.bounds.shape(self.schedule),
            block=(self.schedule.threads_per_block, 1, 1),
            shared_bytes=shared_bytes,
            dynamic_shared_bytes=shared_bytes if self._is_dynamic(shared_bytes) else 0,
        )

    def _tile_loops(self, block: Any) -> _Loops:
        """Cut all loops, order them, bind blocks, virtual threads and threads."""
        sch, schedule = self.sch, self.schedule
        loops = sch.get_loops(block)
        spatial = loops[: len(self.form.final.axes)]
        cuts = []
        for loop, axis in zip(spatial, self.form.final.axes, strict=True):
            factors = [None, schedule.vthreads_of[axis], schedule.threads_of[axis], schedule.thread_of[axis]]
            cuts.append(sch.split(loop, factors))
        step_loops, in_step = [], []
        for loop, axis in zip(loops[len(cuts) :], self.form.reduced, strict=True):
            outer, inner = sch.split(loop, [None, schedule.step_of[axis]])
            step_loops.append(outer)
            in_step.append(inner)
        blocks, virtual, threads, inner_spatial = ([cut[level] for cut in cuts] for level in range(4))
        sch.reorder(*blocks, *virtual, *threads, *step_loops, *in_step, *inner_spatial)
        block_loop = sch.fuse(*blocks)
        sch.bind(block_loop, "blockIdx.x")
        virtual_loop = sch.fuse(*virtual)
        if math.prod(schedule.vthreads_of.values()) > 1:
            sch.bind(virtual_loop, "vthread.x")
        thread_loop = sch.fuse(*threads)
        sch.bind(thread_loop, "threadIdx.x")
        if self.form.reduction is None:
            self._vectorize_last(inner_spatial[-1])
        else:
            sch.set_scope(block, 0, "local")
        return _Loops(block=block_loop, thread=thread_loop, steps=tuple(step_loops), inner=(*in_step, *inner_spatial))

    def _fetch(self, loop: Any) -> int:
        """Compute every staged tile inside ``loop``, fetched by all threads of the block together.

        Returns:
            Bytes of shared memory that the tiles take.
        """
        sch, stages = self.sch, self.expressions.stages
        tile = {**self.schedule.block_of, **self.schedule.step_of}
        tensors = self.form.expr.tensor_by_name
        sizes_bytes = []
        for stage in stages:
            shape = [dimension.extent(tile) for dimension in stage.dimensions]
            shape[-1] += stage.padding
            sizes_bytes.append(math.prod(shape) * tensors[stage.load.tensor].element_bytes)
        if len(sizes_bytes) > 1:
            sizes_bytes = [-(-size // _TILE_ALIGNMENT_BYTES) * _TILE_ALIGNMENT_BYTES for size in sizes_bytes]
        scope = "shared.dyn" if self._is_dynamic(sum(sizes_bytes)) else "shared"
        for stage in reversed(stages):
            block = sch.get_sblock(stage.name)
            sch.set_scope(block, 0, scope)
            sch.compute_at(block, loop, preserve_unit_loops=True)
            data_loops = sch.get_loops(block)[-len(stage.dimensions) :]
            if stage.padding:
                row = stage.dimensions[-1].extent(tile)
                sch.storage_align(block, 0, len(stage.dimensions) - 2, row + stage.padding, 0)
            fused = sch.fuse(*data_loops)
            _, threads, vector = sch.split(fused, [None, self.schedule.threads_per_block, stage.vector])
            sch.bind(threads, "threadIdx.x")
            if stage.vector > 1:
                sch.vectorize(vector)
        return sum(sizes_bytes)

    def _store(self, thread_loop: Any) -> None:
        """The final statement at the end of every thread."""
        block = self.sch.get_sblock(self.expressions.store)
        if self.form.reductions and not self.sch.get_producers(block):
            raise LoweringError(f"{self.form.expr.name}: the result depends on no sum: no block is its own")
        self.sch.reverse_compute_at(block, thread_loop)
        self._vectorize_last(self.sch.get_loops(block)[-1])

    def _vectorize_last(self, loop: Any) -> None:
        output = self.form.expr.output.name
        width = math.gcd(self.schedule.vector_of.get(output, VECTOR_ANY), store_vector(self.form, self.schedule))
        if width <= 1:
            return
        _, inner = self.sch.split(loop, [None, width])
        self.sch.vectorize(inner)

    def _unroll(self, block_loop: Any) -> None:
        if self.schedule.unroll > 0:
            self.sch.annotate(block_loop, "pragma_auto_unroll_max_step", self.schedule.unroll)
            # `#pragma unroll` in the source: the device compiler unrolls, the source stays short.
            self.sch.annotate(block_loop, "pragma_unroll_explicit", 0)

    def _is_dynamic(self, shared_bytes: int) -> bool:
        return self.has_dynamic_shared and shared_bytes > STATIC_SHARED_BYTES


def placeholders(form: KernelForm) -> dict[str, Any]:
    """TVM placeholders of the inputs, by name, in argument order."""
    return {t.name: te.placeholder(t.shape or (1,), t.dtype, name=t.name) for t in form.expr.inputs}


def padding_is_neutral(form: KernelForm, axis: str, reduction: Reduction) -> bool:
    """Beyond the end of ``axis`` the body is zero anyway: a sum of products with a factor that ends there.

    Loads and numbers alone count as factors: zero times ``1 / B[k]`` is not zero where ``B[k]`` is.
    """
    factors = _factors(reduction.body)
    if reduction.function != "sum" or factors is None:
        return False
    return any(
        not factor.pad
        and any(
            index == AffineIndex.axis(axis) and extent == form.sizes[axis]
            for index, extent in zip(factor.indices, form.expr.tensor_by_name[factor.tensor].shape, strict=True)
        )
        for factor in factors
    )


def _factors(value: Value) -> list[Load] | None:
    """The loads of a product of loads and finite numbers: ``A * (B * 2)`` gives A and B. None for anything else."""
    if isinstance(value, Load):
        return [value]
    if isinstance(value, Constant) and math.isfinite(value.value):
        return []
    if isinstance(value, Call) and value.function == "mul":
        first, second = (_factors(argument) for argument in value.arguments)
        return None if first is None or second is None else first + second
    return None
