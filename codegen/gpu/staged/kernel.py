"""Tiles with everything staged in shared memory, as FMA kernels: products of matrices, convolutions.

Written directly as statements rather than scheduled from a tensor expression, since three things that such a kernel
lives on cannot be said to TVM's schedules: a staged tile in another order of dimensions than its tensor's under a
vectorised copy; addresses and bounds of the copy worked out once for all steps (TVM derives them anew in every guarded
branch, about 36 instructions per element); and fetched values that stay in registers while another step computes
(``software_pipeline_stage`` double-buffers shared memory, but keeps load and store of one copy together).

With one buffer (``stages = 1``) a step is fetched, then computed on. With more, loads run two steps ahead: values for
the step after next wait in registers while one buffer is computed on and the other holds the next step, so that there
is one barrier per step and no load is waited for. Asynchronous copies pass by the registers, and ``stages - 1`` steps
of them are under way: by the device functions of Tensor Core kernels (:mod:`codegen.gpu.matrix.mma_functions`), in
OpenCL by plain copies of the same names (:mod:`codegen.gpu.source.opencl_functions`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from codegen.gpu.adjacent import AdjacentResults, is_scalar
from codegen.gpu.raster import block_places
from codegen.gpu.staged.copies import Room, TileCopy
from codegen.gpu.staged.plan import StagedPlan
from codegen.gpu.staged.threads import Operand, OperandNames, StepLoop
from codegen.gpu.staged.tiles import TILE_ALIGNMENT, StagedTile
from codegen.gpu.tiles import padding_is_neutral
from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered, identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.reads import VECTOR_ANY, read_in_place
from codegen.tir.statements import allocate, barrier, local_buffer, named
from codegen.tir.values import Expr, as_number, combine, evaluate, identity, remainder
from sokoban.language.expression import Load
from sokoban.language.names import fresh_name
from sokoban.schedule.accesses import store_vector


def takes(request: TileRequest) -> bool:
    """Schedules that stage every operand of a reduction, walked in steps by threads that reduce alone."""
    form, schedule = request.problem, request.schedule
    return (
        form.is_tile
        and form.reduction is not None
        and not schedule.uses_matrix
        and not schedule.reduce_threads
        and bool(form.body_loads)
        and all(load.tensor in schedule.cached and load.indices for load in form.body_loads)
        and set(schedule.step_of) == set(form.reduced)
    )


def lower(request: TileRequest) -> Lowered:
    """The kernel of a schedule that stages everything."""
    plan = StagedPlan.of(request)
    form, schedule = plan.form, plan.schedule
    return Lowered(
        module=written(request.entry, lambda: _write_function(plan)),
        entry=request.entry,
        grid=(schedule.grid_blocks(form.sizes), 1, 1),
        launch=plan.bounds.shape(schedule),
        block=(schedule.threads_per_block, 1, 1),
        shared_bytes=plan.shared_bytes,
        dynamic_shared_bytes=plan.shared_bytes if plan.is_dynamic else 0,
        has_barriers=True,
    )


def _write_function(plan: StagedPlan) -> None:
    expr, schedule = plan.form.expr, plan.schedule
    sources = {tensor.name: parameter(tensor) for tensor in expr.inputs}
    output = parameter(expr.output)
    plan.bounds.declare()
    with (
        T.launch_thread("blockIdx.x", schedule.grid_blocks(plan.form.sizes)) as block,
        T.launch_thread("threadIdx.x", schedule.threads_per_block) as thread,
    ):
        places = block_places(block, plan.form, schedule, plan.bounds)
        origin = {axis: place * schedule.block_of[axis] for axis, place in places.items()}
        buffers = _Buffers(plan, sources, output)
        with T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0):
            _ThreadWriter(plan, buffers, origin, thread).write()


class _Buffers:
    """The tensors and the buffers of a block and of a thread, each by a name of its own.

    Attributes:
        sources, output: the tensors, the inputs by name.
        shared: all stages of all tiles, by dtype.
        flat: every staged tensor as one run of elements, by load.
        copy_names: names for the registers of a tile's copy, by load.
        accumulators: results of a thread.
    """

    def __init__(self, plan: StagedPlan, sources: Mapping[str, Any], output: Any) -> None:
        # Views, as the staged tensors are read by below: TVM gives a kernel a second parameter for a tensor of which
        # there are accesses both by a view and without one.
        self.sources, self.output = {name: _view(source) for name, source in sources.items()}, output
        self._names = set(plan.tensors)
        scope = "shared.dyn" if plan.is_dynamic else "shared"
        # Of several buffers in memory sized at launch each begins where the one before ends, as they are counted; TVM
        # would begin them at multiples of 64 bytes.
        alignment = TILE_ALIGNMENT if plan.is_dynamic and len(plan.stage_elements) > 1 else -1
        self.shared = {
            dtype: allocate(self.name("staged"), elements * plan.stages, dtype, scope, align_bytes=alignment)
            for dtype, elements in plan.stage_elements.items()
        }
        self.flat: dict[Load, Any] = {}
        self.copy_names: dict[Load, str] = {}
        for load, tile in plan.tiles.items():
            tensor = tile.tensor
            flat = T.decl_buffer((math.prod(tensor.shape),), tensor.dtype, data=sources[tensor.name].data)
            IRBuilder.name(f"{identifier(tensor.name)}_flat", flat)
            self.flat[load] = flat
            self.copy_names[load] = self.name(f"{identifier(tensor.name)}_fetch")
        elements = math.prod(plan.schedule.register_tile.values())
        self.accumulators = local_buffer(self.name("accumulators"), elements, plan.dtype)

    def name(self, wanted: str) -> str:
        """``wanted``, numbered where the kernel has it already."""
        name = fresh_name(wanted, self._names)
        self._names.add(name)
        return name


def _view(source: Any) -> Any:
    """A buffer of the same elements and shape."""
    view = T.decl_buffer(source.shape, source.dtype, data=source.data)
    IRBuilder.name(f"{source.name}_view", view)
    return view


class _ThreadWriter:
    """The statements of a thread, those of :meth:`write` in their order."""

    def __init__(self, plan: StagedPlan, buffers: _Buffers, origin: Mapping[str, Expr], thread: Expr) -> None:
        self.plan, self.form, self.schedule, self.buffers = plan, plan.form, plan.schedule, buffers
        self.thread_tile, self.origin = plan.thread_tile, origin
        self.accumulators, self.reduction = buffers.accumulators, plan.reduction
        self.threads = plan.thread_tile.places(thread)
        self.copies = [self._copy(tile, thread) for tile in plan.tiles.values()]
        with named(T.unroll, math.prod(plan.schedule.register_tile.values()), "i") as i:
            T.buffer_store(self.accumulators, identity(self.reduction.function, plan.dtype), [i])
        self.operands = {load: self._operand(tile) for load, tile in plan.tiles.items()}

    def write(self) -> None:
        """All steps, then the results."""
        if self.plan.asynchronous:
            self._asynchronous_steps()
        elif self.plan.stages > 1:
            self._pipelined_steps()
        else:
            self._unpipelined_steps()
        self._store()

    def _copy(self, tile: StagedTile, thread: Expr) -> TileCopy:
        plan, dtype = self.plan, tile.tensor.dtype
        room = Room(self.buffers.shared[dtype], plan.stages, plan.stage_elements[dtype], plan.unread(tile))
        return TileCopy(
            tile,
            self.buffers.flat[tile.load],
            room,
            threads=self.schedule.threads_per_block,
            thread=thread,
            name=self.buffers.copy_names[tile.load],
            origin=self.origin,
            holds=not plan.asynchronous,
        )

    def _operand(self, tile: StagedTile) -> Operand:
        plan, tensor = self.plan, tile.tensor
        base, operands, position = (
            self.buffers.name(f"{identifier(tensor.name)}_{part}") for part in ("base", "operands", "here")
        )
        return Operand(
            tile,
            self.buffers.shared[tensor.dtype],
            self.thread_tile,
            self.threads,
            stage_elements=plan.stage_elements[tensor.dtype] if plan.stages > 1 else 0,
            turns=[(loop.axis, loop.elements) for loop in plan.loops if loop.trips > 1 and not loop.unrolled],
            names=OperandNames(base, operands, position),
        )

    # ---- steps

    def _origins(self, step: Expr) -> dict[str, Expr]:
        """First element along every reduction axis of the ``step``-th step; the last axis is walked fastest."""
        origins: dict[str, Expr] = {}
        outermost = next((axis for axis, count in self.plan.step_counts.items() if count > 1), None)
        for axis in reversed(self.form.reduced):
            count = self.plan.step_counts[axis]
            if count > 1:
                number = step if axis == outermost else remainder(step, count)
                origins[axis] = number * self.schedule.step_of[axis]
                step = tirx.floordiv(step, count)
        return origins

    def _unpipelined_steps(self) -> None:
        with named(T.serial, self.plan.steps, "step") as step:
            origins = self._origins(step)
            self._load(step)
            if self.plan.steps > 1:
                barrier()
            self._put(tirx.const(0, "int32"))
            barrier()
            self._compute(tirx.const(0, "int32"), origins)

    def _pipelined_steps(self) -> None:
        self._load(tirx.const(0, "int32"))
        self._put(tirx.const(0, "int32"))
        if self.plan.steps > 1:
            self._load(tirx.const(1, "int32"))
        with named(T.serial, self.plan.steps, "step") as step:
            barrier()
            # After the last step nothing new is stored, only what is not read any more.
            self._put(tirx.floormod(step + 1, 2))
            with T.If(step + 2 < self.plan.steps), T.Then():
                self._load(step + 2)
            self._compute(tirx.floormod(step, 2), self._origins(step))

    def _asynchronous_steps(self) -> None:
        """The first copies; then per step: wait for its own, copy the step that comes ``stages - 1`` later, compute."""
        ahead = self.plan.stages - 1
        for step in range(ahead):
            if step < self.plan.steps:
                self._copy_ahead(tirx.const(step, "int32"), tirx.const(step, "int32"))
            device_call("copy_async_commit")
        # A counter of its own: the remainder of a division by three is a dozen instructions.
        stage = local_buffer(self.buffers.name("stage"), 1, "int32")
        T.buffer_store(stage, tirx.const(0, "int32"), [0])
        with named(T.serial, self.plan.steps, "step") as step:
            device_call(f"copy_async_wait_{ahead - 1}")
            barrier()
            with T.If(step + ahead < self.plan.steps), T.Then():
                self._copy_ahead(step + ahead, tirx.if_then_else(stage[0] == 0, ahead, stage[0] - 1))
            device_call("copy_async_commit")
            self._compute(stage[0], self._origins(step))
            T.buffer_store(stage, tirx.if_then_else(stage[0] == ahead, 0, stage[0] + 1), [0])

    def _copy_ahead(self, step: Expr, stage: Expr) -> None:
        for copy in self.copies:
            copy.copy(stage, self._origins(step), self._origins(step + 1))

    def _load(self, step: Expr) -> None:
        for copy in self.copies:
            copy.load(self._origins(step), self._origins(step + 1))

    def _put(self, stage: Expr) -> None:
        for copy in self.copies:
            copy.store(stage)

    # ---- computing

    def _compute(self, buffer: Expr, origins: Mapping[str, Expr]) -> None:
        """Multiply-adds of one step: an unrolled body within loops over what is left of the step."""
        for operand in self.operands.values():
            operand.start(buffer * self.plan.stage_elements[operand.tile.tensor.dtype])
        self._reduce(self.plan.loops, {}, {}, origins)

    def _reduce(
        self,
        loops: Sequence[StepLoop],
        body: Mapping[str, Expr],
        advanced: Mapping[str, Expr],
        origins: Mapping[str, Expr],
    ) -> None:
        """The loops over a step's points: ``body`` is where unrolled ones stand, ``advanced`` how far the others have
        brought operands, by axis."""
        if not loops:
            self._multiply_add(body, {axis: advanced.get(axis, 0) + place for axis, place in body.items()}, origins)
            return
        loop, *inner = loops
        if loop.trips == 1:
            self._reduce(inner, {loop.axis: tirx.const(0, "int32"), **body}, advanced, origins)
            return
        with named(T.unroll if loop.unrolled else T.serial, loop.trips, identifier(loop.axis)) as index:
            if loop.unrolled:
                self._reduce(inner, {**body, loop.axis: index * loop.elements}, advanced, origins)
                return
            self._reduce(inner, body, {**advanced, loop.axis: index * loop.elements}, origins)
            self._advance(loop.axis, loop.elements)
        if advanced:
            # The loop around it starts it anew.
            self._advance(loop.axis, -loop.trips * loop.elements)

    def _advance(self, axis: str, elements: int) -> None:
        for operand in self.operands.values():
            operand.advance(axis, elements)

    def _multiply_add(self, body: Mapping[str, Expr], point: Mapping[str, Expr], origins: Mapping[str, Expr]) -> None:
        """All multiply-adds of a thread at one point of the reduction: ``body`` within the unrolled loops, ``point``
        within the step."""
        fragments = {load: operand.fragment(body) for load, operand in self.operands.items() if operand.is_fragment}
        guarded = [axis for axis in self.form.reduced if self.plan.padded[axis] > self.form.sizes[axis]]
        guarded = [axis for axis in guarded if not padding_is_neutral(self.form, axis, self.reduction)]

        def at_element(copies: Mapping[str, Expr], places: Mapping[str, Expr]) -> None:
            local = self.thread_tile.local(copies, places)

            def read(load: Load) -> Expr:
                operand = self.operands[load]
                if load in fragments:
                    element = fragments[load][operand.position(copies, places)]
                else:
                    element = operand.element({**local, **body})
                return as_number(element, operand.tile.tensor.dtype, self.plan.dtype)

            spatial = {axis: self.origin[axis] + self.threads[axis] + place for axis, place in local.items()}
            reduced = {axis: origins.get(axis, 0) + place for axis, place in point.items()}
            value = evaluate(self.reduction.body, {**spatial, **reduced}, read, self.plan.dtype)
            if guarded:
                inside = [reduced[axis] < self.form.sizes[axis] for axis in guarded]
                value = tirx.if_then_else(tirx.all(*inside), value, identity(self.reduction.function, self.plan.dtype))
            to = self.thread_tile.element(copies, places)
            T.buffer_store(self.accumulators, combine(self.reduction.function, self.accumulators[to], value), [to])

        self.thread_tile.walk(at_element)

    # ---- results

    def _store(self) -> None:
        """The final statement at every element of the thread that exists, as vectors along the last axis."""
        form, schedule = self.form, self.schedule
        allowed = store_vector(form, schedule)
        width = math.gcd(schedule.vector_of.get(form.expr.output.name, VECTOR_ANY), allowed)
        padded = [axis for axis in form.final.axes if self.plan.padded[axis] > form.sizes[axis]]

        def leave(copies: Mapping[str, Expr], places: Mapping[str, Expr]) -> None:
            local = self.thread_tile.local(copies, places)
            axes = {axis: self.origin[axis] + self.threads[axis] + local[axis] for axis in form.final.axes}
            inside = [axes[axis] < self.plan.bounds.size(axis) for axis in padded]
            if not inside:
                self._write(axes, self.thread_tile.element(copies, places), width)
                return
            with T.If(tirx.all(*inside)), T.Then():
                self._write(axes, self.thread_tile.element(copies, places), width)

        self.thread_tile.walk(leave, width)

    def _write(self, axes: dict[str, Expr], element: Expr, width: int) -> None:
        form, dtype = self.form, self.form.expr.final_dtype
        last = form.final.axes[-1]

        def final(element_axes: dict[str, Expr], taken: Mapping[Load, Expr], lane: Expr) -> Expr:
            def read(load: Load) -> Expr:
                if load.tensor == form.reductions[0].tensor:
                    return self.accumulators[element + lane].astype(dtype)
                tensors, sources = form.expr.tensor_by_name, self.buffers.sources
                return read_in_place(load, tensors, sources, element_axes, form.sizes, taken).astype(dtype)

            return evaluate(form.final.value, element_axes, read, dtype).astype(form.expr.output.dtype)

        def write_element(lane: Expr) -> None:
            element_axes = {**axes, last: axes[last] + lane}
            value = final(element_axes, {}, lane)
            T.buffer_store(self.buffers.output, value, [element_axes[axis] for axis in form.final.axes])

        if width == 1:
            write_element(tirx.const(0, "int32"))
        elif is_scalar(form.final.value):
            AdjacentResults(form, width, self.buffers.sources).store(self.buffers.output, axes, final)
        else:
            with named(T.vectorized, width, "lane") as lane:
                write_element(lane)


def device_call(name: str) -> None:
    """One of the functions of :mod:`codegen.gpu.matrix.mma_functions` that take no arguments."""
    T.evaluate(tirx.call_extern("void", name))
