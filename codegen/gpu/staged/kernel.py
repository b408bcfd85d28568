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
from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from codegen.gpu.raster import block_places
from codegen.gpu.staged.copies import Room, TileCopy
from codegen.gpu.staged.threads import Operand, ThreadTile, step_loops
from codegen.gpu.staged.tiles import StagedTile
from codegen.gpu.tiles import padding_is_neutral
from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered, LoweringError, identifier
from codegen.tir.reads import VECTOR_ANY, guarded_read, padded_sizes
from codegen.tir.statements import allocate, local_buffer, named
from codegen.tir.values import Expr, combine, evaluate, identity
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import STATIC_SHARED_BYTES
from sokoban.kernel.regions import data_dimension, storage_order
from sokoban.language.expression import Load
from sokoban.language.names import fresh_name
from sokoban.schedule.accesses import fetch_vector, store_vector
from sokoban.schedule.pipelines import asynchronous_problem
from sokoban.schedule.tile import TileSchedule


def is_staged(form: KernelForm, schedule: TileSchedule) -> bool:
    """Whether a schedule stages every operand of a reduction, walked in steps by threads that reduce alone."""
    return (
        form.kind == "tile"
        and form.reduction is not None
        and not schedule.uses_matrix
        and not schedule.reduce_threads
        and bool(form.body_loads)
        and all(load.tensor in schedule.cached and load.indices for load in form.body_loads)
        and set(schedule.step_of) == set(form.reduced)
    )


class StagedLowering:
    """One kernel, its statements in the order in which :meth:`_kernel` writes them."""

    def __init__(self, form: KernelForm, schedule: TileSchedule, entry: str, dynamic_shared: bool) -> None:
        self.form, self.schedule, self.entry = form, schedule, entry
        self.dtype = form.expr.accumulate
        self.tensors = form.expr.tensor_by_name
        self.padded = padded_sizes(form, schedule)
        self.thread_tile = ThreadTile(form.final.axes, schedule)
        self.step_counts = {axis: self.padded[axis] // schedule.step_of[axis] for axis in form.reduced}
        self.steps = math.prod(self.step_counts.values())
        problem = asynchronous_problem(form) if schedule.asynchronous else None
        if problem is not None:
            raise LoweringError(f"{entry}: {problem}")
        self.asynchronous = schedule.asynchronous and self.steps > 1
        self.stages = 1 if self.steps == 1 else schedule.stages if self.asynchronous else min(2, schedule.stages)
        self.loops = step_loops(form.reduced, schedule)
        self.names = set(self.tensors)
        self.tiles = self._tiles()
        dtypes = {tile.tensor.dtype for tile in self.tiles.values()}
        #: Elements of one stage, by dtype: tiles of a dtype lie in one buffer.
        self.stage_elements = {
            dtype: sum(tile.size for tile in self.tiles.values() if tile.tensor.dtype == dtype)
            for dtype in sorted(dtypes)
        }
        self.shared_bytes = self.stages * sum(tile.size * tile.tensor.element_bytes for tile in self.tiles.values())
        self.is_dynamic = dynamic_shared and self.shared_bytes > STATIC_SHARED_BYTES

    def run(self) -> Lowered:
        form, schedule = self.form, self.schedule
        return Lowered(
            module=written(self.entry, self._function),
            entry=self.entry,
            grid=(schedule.grid_blocks(form.sizes), 1, 1),
            block=(schedule.threads_per_block, 1, 1),
            shared_bytes=self.shared_bytes,
            dynamic_shared_bytes=self.shared_bytes if self.is_dynamic else 0,
            has_barriers=True,
        )

    def _function(self) -> None:
        expr = self.form.expr
        self.sources = {tensor.name: parameter(tensor) for tensor in expr.inputs}
        self.output = parameter(expr.output)
        self._kernel()

    def _tiles(self) -> dict[Load, StagedTile]:
        schedule, form = self.schedule, self.form
        sizes = {**schedule.block_of, **schedule.step_of}
        walked = tuple(axis for axis, count in self.step_counts.items() if count > 1)
        outputs = [axis for axis in form.spatial if form.sizes[axis] > 1]
        ends: dict[str, int] = {}
        tiles: dict[Load, StagedTile] = {}
        for load in dict.fromkeys(form.body_loads):
            tensor = self.tensors[load.tensor]
            dimensions = tuple(data_dimension(index) for index in load.indices)
            padding = schedule.padding_of.get(load.tensor, 0) if len(dimensions) > 1 else 0
            turned = load.tensor in schedule.turned
            order = storage_order(load, outputs, form.batch_axes) if turned else tuple(range(len(dimensions)))
            is_turned = order[-1] != len(order) - 1
            allowed = fetch_vector(form, schedule, load, 0 if is_turned else padding)
            tiles[load] = StagedTile(
                load=load,
                tensor=tensor,
                dimensions=dimensions,
                extents=tuple(dimension.extent(sizes) for dimension in dimensions),
                order=order,
                padding=padding,
                # An asynchronous copy stores what it reads as one piece.
                vector=1
                if is_turned and self.asynchronous
                else math.gcd(schedule.vector_of.get(load.tensor, VECTOR_ANY), allowed),
                start=ends.get(tensor.dtype, 0),
                padded=self.padded,
                steps=walked,
                tile=sizes,
                outputs=form.final.axes,
            )
            ends[tensor.dtype] = ends.get(tensor.dtype, 0) + tiles[load].size
        return tiles

    def _name(self, wanted: str) -> str:
        name = fresh_name(wanted, self.names)
        self.names.add(name)
        return name

    # ---- the kernel

    def _kernel(self) -> None:
        form, schedule = self.form, self.schedule
        scope = "shared.dyn" if self.is_dynamic else "shared"
        with (
            T.launch_thread("blockIdx.x", schedule.grid_blocks(form.sizes)) as block,
            T.launch_thread("threadIdx.x", schedule.threads_per_block) as thread,
        ):
            places = block_places(block, form, schedule)
            origin = {axis: place * schedule.block_of[axis] for axis, place in places.items()}
            self.threads = self.thread_tile.places(thread)
            self.shared = {
                dtype: allocate(self._name("staged"), elements * self.stages, dtype, scope)
                for dtype, elements in self.stage_elements.items()
            }
            self.copies = [self._copy(tile, thread) for tile in self.tiles.values()]
            tile = schedule.register_tile
            self.accumulators = local_buffer(self._name("accumulators"), math.prod(tile.values()), self.dtype)
            with T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0):
                for copy in self.copies:
                    copy.prepare(origin)
                    if not self.asynchronous:
                        copy.hold()
                with named(T.unroll, math.prod(tile.values()), "i") as i:
                    T.buffer_store(self.accumulators, identity(self._reduction.function, self.dtype), [i])
                self.operands = {load: self._operand(tile) for load, tile in self.tiles.items()}
                if self.asynchronous:
                    self._asynchronous_steps()
                elif self.stages > 1:
                    self._pipelined_steps()
                else:
                    self._plain_steps()
                self._store(origin)

    @property
    def _reduction(self) -> Any:
        reduction = self.form.reduction
        assert reduction is not None
        return reduction

    def _copy(self, tile: StagedTile, thread: Expr) -> TileCopy:
        source = self.sources[tile.tensor.name]
        flat = T.decl_buffer((math.prod(tile.tensor.shape),), tile.tensor.dtype, data=source.data)
        IRBuilder.name(f"{identifier(tile.tensor.name)}_flat", flat)
        name = self._name(f"{identifier(tile.tensor.name)}_fetch")
        dtype = tile.tensor.dtype
        room = Room(self.shared[dtype], self.stages, self.stage_elements[dtype], self._unread(tile))
        return TileCopy(tile, flat, room, self.schedule.threads_per_block, thread, name)

    def _unread(self, tile: StagedTile) -> int | None:
        """An element of the stages that nobody reads, for accesses of ``tile``: its own padding or another tile's."""
        if tile.unread is not None:
            return tile.unread
        if tile.is_turned and tile.vector > 1:
            # Its elements are stored a row apart.
            return None
        others = [other for other in self.tiles.values() if other.tensor.dtype == tile.tensor.dtype]
        found = [other.unread for other in others if other.unread is not None and other.padding >= tile.vector]
        return next((element for element in found if element % tile.vector == 0), None)

    def _operand(self, tile: StagedTile) -> Operand:
        elements = self.stage_elements[tile.tensor.dtype] if self.stages > 1 else 0
        turns = [(axis, own) for axis, trips, own, unrolled in self.loops if trips > 1 and not unrolled]
        names = [self._name(f"{identifier(tile.tensor.name)}_{part}") for part in ("base", "operands", "here")]
        return Operand(tile, self.shared[tile.tensor.dtype], self.thread_tile, self.threads, elements, turns, names)

    # ---- steps

    def _origins(self, step: Expr) -> dict[str, Expr]:
        """First element along every reduction axis of the ``step``-th step; the last axis is walked fastest."""
        origins: dict[str, Expr] = {}
        rest = step
        outermost = next((axis for axis, count in self.step_counts.items() if count > 1), "")
        for axis in reversed(self.form.reduced):
            count = self.step_counts[axis]
            if count > 1:
                origins[axis] = (rest if axis == outermost else tirx.floormod(rest, count)) * self.schedule.step_of[
                    axis
                ]
                rest = tirx.floordiv(rest, count)
        return origins

    def _plain_steps(self) -> None:
        with named(T.serial, self.steps, "step") as step:
            origins = self._origins(step)
            self._load(step)
            if self.steps > 1:
                barrier()
            self._put(tirx.const(0, "int32"))
            barrier()
            self._compute(tirx.const(0, "int32"), origins)

    def _pipelined_steps(self) -> None:
        self._load(tirx.const(0, "int32"))
        self._put(tirx.const(0, "int32"))
        if self.steps > 1:
            self._load(tirx.const(1, "int32"))
        with named(T.serial, self.steps, "step") as step:
            barrier()
            # After the last step nothing new is stored, only what nobody reads any more.
            self._put(tirx.floormod(step + 1, 2))
            with T.If(step + 2 < self.steps), T.Then():
                self._load(step + 2)
            self._compute(tirx.floormod(step, 2), self._origins(step))

    def _asynchronous_steps(self) -> None:
        """The first copies; then per step: wait for its own, copy the step that comes ``stages - 1`` later, compute."""
        ahead = self.stages - 1
        for step in range(ahead):
            if step < self.steps:
                self._copy_ahead(tirx.const(step, "int32"), tirx.const(step, "int32"))
            device_call("copy_async_commit")
        # A counter of its own: the remainder of a division by three is a dozen instructions.
        at = local_buffer(self._name("stage"), 1, "int32")
        T.buffer_store(at, tirx.const(0, "int32"), [0])
        with named(T.serial, self.steps, "step") as step:
            device_call(f"copy_async_wait_{ahead - 1}")
            barrier()
            with T.If(step + ahead < self.steps), T.Then():
                self._copy_ahead(step + ahead, tirx.if_then_else(at[0] == 0, ahead, at[0] - 1))
            device_call("copy_async_commit")
            self._compute(at[0], self._origins(step))
            T.buffer_store(at, tirx.if_then_else(at[0] == ahead, 0, at[0] + 1), [0])
        device_call("copy_async_wait_0")

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
            operand.start(buffer * self.stage_elements[operand.tile.tensor.dtype])
        self._reduce(list(self.loops), {}, {}, origins)

    def _reduce(
        self,
        loops: list[tuple[str, int, int, bool]],
        body: Mapping[str, Expr],
        gone: Mapping[str, Expr],
        origins: Mapping[str, Expr],
    ) -> None:
        """The loops; ``body`` is where the unrolled ones stand, ``gone`` how far the others have brought operands."""
        if not loops:
            self._multiply_add(body, {axis: gone.get(axis, 0) + place for axis, place in body.items()}, origins)
            return
        axis, trips, elements, unrolled = loops[0]
        if trips == 1:
            self._reduce(loops[1:], {axis: tirx.const(0, "int32"), **body}, gone, origins)
            return
        with named(T.unroll if unrolled else T.serial, trips, identifier(axis)) as index:
            if unrolled:
                self._reduce(loops[1:], {**body, axis: index * elements}, gone, origins)
                return
            self._reduce(loops[1:], body, {**gone, axis: index * elements}, origins)
            self._advance(axis, elements)
        if gone:
            # The loop around it starts it anew.
            self._advance(axis, -trips * elements)

    def _advance(self, axis: str, elements: int) -> None:
        for operand in self.operands.values():
            operand.advance(axis, elements)

    def _multiply_add(self, body: Mapping[str, Expr], point: Mapping[str, Expr], origins: Mapping[str, Expr]) -> None:
        """All multiply-adds of a thread at one point of the reduction: ``body`` within the unrolled loops, ``point``
        within the step."""
        fragments = {load: operand.fragment(body) for load, operand in self.operands.items() if operand.is_fragment}
        guarded = [axis for axis in self.form.reduced if self.padded[axis] > self.form.sizes[axis]]
        guarded = [axis for axis in guarded if not padding_is_neutral(self.form, axis, self._reduction)]

        def at_element(copies: Mapping[str, Expr], own: Mapping[str, Expr]) -> None:
            local = self.thread_tile.local(copies, own)

            def read(load: Load) -> Expr:
                operand = self.operands[load]
                if load in fragments:
                    return fragments[load][operand.position(copies, own)].astype(self.dtype)
                return operand.element({**local, **body}).astype(self.dtype)

            value = evaluate(self._reduction.body, {**local, **point}, read, self.dtype)
            if guarded:
                inside = [origins.get(a, 0) + point[a] < self.form.sizes[a] for a in guarded]
                value = tirx.if_then_else(tirx.all(*inside), value, identity(self._reduction.function, self.dtype))
            to = self.thread_tile.element(copies, own)
            T.buffer_store(self.accumulators, combine(self._reduction.function, self.accumulators[to], value), [to])

        self.thread_tile.walk(at_element)

    # ---- results

    def _store(self, origin: Mapping[str, Expr]) -> None:
        """The final statement at every element of the thread that exists, as vectors along the last axis."""
        form, schedule = self.form, self.schedule
        allowed = store_vector(form, schedule)
        width = math.gcd(schedule.vector_of.get(form.expr.output.name, VECTOR_ANY), allowed)
        padded = [axis for axis in form.final.axes if self.padded[axis] > form.sizes[axis]]

        def leave(copies: Mapping[str, Expr], own: Mapping[str, Expr]) -> None:
            local = self.thread_tile.local(copies, own)
            axes = {axis: origin[axis] + self.threads[axis] + local[axis] for axis in form.final.axes}
            inside = [axes[axis] < form.sizes[axis] for axis in padded]
            if not inside:
                self._write(axes, self.thread_tile.element(copies, own), width)
                return
            with T.If(tirx.all(*inside)), T.Then():
                self._write(axes, self.thread_tile.element(copies, own), width)

        self.thread_tile.walk(leave, width)

    def _write(self, axes: dict[str, Expr], element: Expr, width: int) -> None:
        form, dtype = self.form, self.form.expr.final_dtype
        last = form.final.axes[-1]

        def one(lane: Expr) -> None:
            here = {**axes, last: axes[last] + lane}

            def read(load: Load) -> Expr:
                if load.tensor == form.reductions[0].tensor:
                    return self.accumulators[element + lane].astype(dtype)
                source = self.sources[load.tensor]
                value = guarded_read(
                    load, self.tensors[load.tensor], lambda *indices: source[indices], here, form.sizes
                )
                return value.astype(dtype)

            value = evaluate(form.final.value, here, read, dtype).astype(form.expr.output.dtype)
            T.buffer_store(self.output, value, [here[axis] for axis in form.final.axes])

        if width == 1:
            one(tirx.const(0, "int32"))
            return
        with named(T.vectorized, width, "lane") as lane:
            one(lane)


def device_call(name: str) -> None:
    """One of the functions of :mod:`codegen.gpu.matrix.mma_functions` that take no arguments."""
    T.evaluate(tirx.call_extern("void", name))


def barrier() -> None:
    """All threads of the block have come here."""
    T.evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
