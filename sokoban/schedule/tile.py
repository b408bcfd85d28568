"""Tile schedules: one candidate program of an operator, independent of any device or code generator.

A schedule is the thesis's rProgram written down as numbers: the tile at every memory layer, how threads share it, what
is staged in shared memory and how it is padded there (6.3.1, 6.3.2). Roller constructs schedules, RATIONAL scores
them, codegen lowers them; all three meet here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from hal.spec.device import DeviceSpec
from hal.support.records import quick
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.schedule import KernelSchedule

Sizes = tuple[tuple[str, int], ...]

#: Threads of a block that multiply nothing, where bulk copies bring the tiles: a warp group, one thread of which starts
#: the copies. Registers are given up by whole groups.
COPYING_THREADS = 128


def sizes(mapping: Mapping[str, int]) -> Sizes:
    """A mapping as the hashable pairs a schedule holds, in the mapping's own order.

    >>> sizes({"m": 128, "n": 64})
    (('m', 128), ('n', 64))
    """
    return tuple((name, int(size)) for name, size in mapping.items())


@dataclass(frozen=True, kw_only=True)
class TileSchedule(KernelSchedule):
    """One candidate program of an operator.

    >>> schedule = TileSchedule(block=sizes({"m": 128, "n": 64}), thread=sizes({"m": 8, "n": 4}), step=sizes({"k": 16}))
    >>> schedule.threads_per_block, schedule.grid_blocks({"m": 1000, "n": 64})
    (256, 8)

    Every spatial axis of size N is cut into ``ceil(N / block)`` blocks, and a block into
    ``vthreads x threads x thread`` elements, outermost first: a thread owns ``thread`` adjacent elements in each of
    ``vthreads`` strided places. Every reduction axis is walked in steps of ``step`` elements; at each step the data
    tiles of the ``cached`` tensors are fetched into shared memory by all threads together. With ``reduce_threads`` the
    reduction axes are shared among threads too, whose partial results are combined at the end.

    Attributes:
        block: elements per block, by spatial axis in output order.
        thread: adjacent elements per thread, by spatial axis.
        vthreads: strided copies per thread, by spatial axis.
        step: elements per step, by reduction axis.
        reduce_threads: threads along each reduction axis; empty when a thread reduces alone.
        cached: names of the tensors staged in shared memory.
        vector: elements per cooperative-fetch (or direct) access, by tensor; the widest legal one where absent.
        padding: elements added to the innermost dimension of a staged data tile, by tensor.
        unroll: largest number of inner-loop iterations the code generator unrolls.
        instruction: what computes the tiles; those of a matrix instruction belong to warps.
        stages: buffers of every staged tile in shared memory: with 1 a step is fetched, then computed on; with more
            the fetch of the next ``stages - 1`` steps is under way meanwhile.
        turned: staged tensors whose tile is stored with another dimension innermost: the last that outputs walk, where
            the tensor's own innermost one belongs to the reduction (:func:`sokoban.kernel.regions.storage_order`).
        asynchronous: a pipeline of multiply-adds copies past the registers (``cp.async``, sm_80 and later); without it
            loads run ahead into registers. Matrix instructions with ``stages`` copy so anyhow.
        raster: adjacent blocks of a band that launch order goes down before it comes to the next
            (:func:`sokoban.schedule.raster.raster_axes`); 0 = along the last axis first, then the one before it.
        cluster: blocks that have the tile of one operand copied to all of them by one read (multicast), where the
            Tensor Memory Accelerator copies (:mod:`sokoban.schedule.bulk_copies`); 1 = each block has its own tiles
            copied, 0 = threads copy.
        launched: blocks of the launch, each of which computes one tile after another; 0 = a block for every tile.
        kept_columns: columns of each row that its threads keep in shared memory, of every tensor that several
            statements read (:func:`sokoban.schedule.rows.row_plan`); 0 = only registers keep some.
    """

    block: Sizes
    thread: Sizes
    vthreads: Sizes = ()
    step: Sizes = ()
    reduce_threads: Sizes = ()
    cached: tuple[str, ...] = ()
    vector: Sizes = ()
    padding: Sizes = ()
    unroll: int = 64
    instruction: Instruction = Instruction.FMA
    stages: int = 1
    turned: tuple[str, ...] = ()
    asynchronous: bool = False
    raster: int = 0
    cluster: int = 0
    launched: int = 0
    kept_columns: int = 0

    @cached_property
    def block_of(self) -> Mapping[str, int]:
        """Elements per block, by spatial axis."""
        return dict(self.block)

    @cached_property
    def thread_of(self) -> Mapping[str, int]:
        """Adjacent elements per thread, by spatial axis."""
        return dict(self.thread)

    @cached_property
    def vthreads_of(self) -> Mapping[str, int]:
        """Strided copies per thread, by spatial axis; 1 where not given."""
        given = dict(self.vthreads)
        return {axis: given.get(axis, 1) for axis, _ in self.block}

    @cached_property
    def step_of(self) -> Mapping[str, int]:
        """Elements per step, by reduction axis; empty where the reduction is walked at once."""
        return dict(self.step)

    @cached_property
    def reduce_threads_of(self) -> Mapping[str, int]:
        """Threads along each reduction axis; empty where a thread reduces alone."""
        return dict(self.reduce_threads)

    @cached_property
    def vector_of(self) -> Mapping[str, int]:
        """Elements per access, by tensor; the widest legal access for tensors that are missing."""
        return dict(self.vector)

    @cached_property
    def padding_of(self) -> Mapping[str, int]:
        """Elements added to the innermost dimension of a staged tile, by tensor."""
        return dict(self.padding)

    @cached_property
    def threads_of(self) -> Mapping[str, int]:
        """Threads along each spatial axis."""
        return {axis: block // (self.thread_of[axis] * self.vthreads_of[axis]) for axis, block in self.block}

    @cached_property
    def register_tile(self) -> Mapping[str, int]:
        """Elements of the output one thread accumulates, by spatial axis."""
        return {axis: self.thread_of[axis] * self.vthreads_of[axis] for axis, _ in self.block}

    @property
    def uses_matrix(self) -> bool:
        """True if warps compute its tiles by matrix instructions."""
        return self.instruction.is_matrix

    @property
    def threads_per_block(self) -> int:
        """Threads of a block, 32 for every tile of a warp."""
        threads = math.prod(self.threads_of.values()) * math.prod(self.reduce_threads_of.values())
        # A tile of matrix instructions belongs to a warp: `thread` is what one warp computes.
        if not self.uses_matrix:
            return threads
        return threads * 32 + (COPYING_THREADS if self.cluster else 0)

    def grid_blocks(self, axis_sizes: Mapping[str, int]) -> int:
        """Blocks of the launch over axes of ``axis_sizes`` elements."""
        return math.prod(-(-axis_sizes[axis] // block) for axis, block in self.block)

    def tiles(self, device: DeviceSpec) -> dict[str, dict[str, int]]:
        """Tiles at each memory layer of a device, by axis."""
        return {
            device.registers.name: dict(self.register_tile),
            device.shared.name: {**self.block_of, **self.step_of},
        }

    @property
    def cells(self) -> tuple[str, str, str]:
        """Tile of a block, of a thread or warp, and of a step, for tables."""
        parts = (self.block, tuple(self.register_tile.items()), self.step)
        block, thread, step = (" ".join(f"{axis}={size}" for axis, size in part) for part in parts)
        return block, thread, step

    def misfit(self, problem: Any) -> str | None:
        """Why no lowering makes a kernel of multiply-adds of it; None where one may."""
        if self.uses_matrix:
            return None
        if problem.needs_matrix:
            return "eight-bit floats are multiplied by matrix instructions alone"
        for load in problem.scattered_loads:
            if load.tensor in self.cached:
                return f"{load.tensor} is read at places that are read: multiply-adds take it from no tile"
        for axis, block in self.block:
            if block % self.register_tile[axis]:
                return f"{self.register_tile[axis]} elements of {axis} per thread do not divide a block of {block}"
        return None

    def scalar_twin(self, problem: Any) -> TileSchedule:
        """The schedule with multiply-adds in place of matrix instructions: same block, steps, staging and padding.

        It has as many threads as there are in warps that multiply wherever a tile divides among them, else more.
        """
        if not self.uses_matrix:
            return self
        roles = problem.roles
        rows, columns = self.block_of[roles.m], self.block_of[roles.n]
        warps = math.prod(self.threads_of.values())
        most = max(1, rows * columns // (32 * warps))
        choices = next(
            threads
            for elements in range(most, 0, -1)
            if (threads := [
                (elements // width, width)
                for width in range(1, elements + 1)
                if elements % width == 0 and columns % width == 0 and rows % (elements // width) == 0
            ])
        )  # fmt: skip
        height, width = min(choices, key=lambda choice: (abs(choice[0] - choice[1]), choice[0]))
        thread = {axis: 1 for axis, _ in self.block} | {roles.m: height, roles.n: width}
        twin = replace(self, thread=sizes(thread), instruction=Instruction.FMA, cluster=0, launched=0)
        # Multiply-adds read scales in place, which kernels with several buffers do not.
        return replace(twin, stages=1, raster=0) if problem.scale_loads else twin

    def to_json(self) -> dict[str, Any]:
        """The JSON form of a schedule, every axis by name."""
        fields: dict[str, Any] = {
            "block": dict(self.block),
            "thread": dict(self.thread),
            "threads": dict(self.threads_of),
            "vthreads": dict(self.vthreads_of),
            "step": dict(self.step),
            "reduce_threads": dict(self.reduce_threads),
            "cached": list(self.cached),
            "vector": dict(self.vector),
            "padding": dict(self.padding),
            "unroll": self.unroll,
            "instruction": str(self.instruction),
        }
        if self.stages > 1:
            fields["stages"] = self.stages
        if self.turned:
            fields["turned"] = list(self.turned)
        if self.asynchronous:
            fields["asynchronous"] = True
        if self.raster:
            fields["raster"] = self.raster
        if self.cluster:
            fields["cluster"] = self.cluster
        if self.launched:
            fields["launched"] = self.launched
        if self.kept_columns:
            fields["kept_columns"] = self.kept_columns
        return fields

    @staticmethod
    def quickly(**given: Any) -> TileSchedule:
        """``TileSchedule(**given)``, for the loops of construction: see :func:`hal.support.records.quick`. Fields that
        are left out have the defaults of the class."""
        return quick(TileSchedule, **given)

    def laid_out(
        self,
        padding: Sizes,
        turned: tuple[str, ...],
        unroll: int,
        stages: int,
        asynchronous: bool = False,
        raster: int = 0,
    ) -> TileSchedule:
        """A copy in another layout; quicker than :meth:`with_`, for the loops of construction."""
        values = self.__dict__
        given = {name: values[name] for name in _FIELDS if name in values}
        given.update(padding=padding, turned=turned, unroll=unroll)
        given.update(stages=stages, asynchronous=asynchronous, raster=raster)
        return quick(TileSchedule, **given)

    def with_(self, **changes: Any) -> TileSchedule:
        """A copy with some fields changed."""
        return replace(self, **changes)


_FIELDS = tuple(each.name for each in fields(TileSchedule))
