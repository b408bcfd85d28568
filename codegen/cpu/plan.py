"""A ``tile`` kernel for processors before it is written: its cuts, its loops, its copies; and where a statement stands
in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tvm import tirx

from codegen.cpu.copies import Staged
from codegen.cpu.cuts import Cut, cut, position, vectors
from codegen.cpu.function import CpuBuffers, lanes_of
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import TileRequest
from codegen.tir.values import Expr
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Load, Reduction
from sokoban.schedule.cpu_tiles import in_panels, phases_of, place_of_copy, sum_loops, vector_axis
from sokoban.schedule.tile import TileSchedule


@dataclass(frozen=True)
class PlacedCopy:
    """A staged operand, and how many tile loops lie around its copy."""

    depth: int
    staged: Staged


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Decisions made before the kernel is written.

    Attributes:
        form, schedule: the operator and its tiles.
        entry: name of the kernel.
        lanes: elements of a vector.
        cuts: blocks and register tiles, by axis of the output.
        steps: points of the sum that are walked before the next tile, by reduction axis.
        vector_axis: the output axis along which registers hold vectors; "" of a single number.
    """

    form: KernelForm
    schedule: TileSchedule
    entry: str
    lanes: int
    cuts: Mapping[str, Cut]
    steps: Mapping[str, int]
    vector_axis: str

    @staticmethod
    def of(request: TileRequest) -> TilePlan:
        """The plan of a schedule.

        Raises:
            LoweringError: the schedule does not fit the operator.
        """
        form, schedule, axes = request.problem, request.schedule, request.problem.final.axes
        lanes = lanes_of(request)
        cuts = {
            axis: cut(axis, form.sizes[axis], schedule.block_of[axis], schedule.register_tile[axis]) for axis in axes
        }
        steps = {axis: min(schedule.step_of.get(axis, form.sizes[axis]), form.sizes[axis]) for axis in form.reduced}
        plan = TilePlan(
            form=form,
            schedule=schedule,
            entry=request.entry,
            lanes=lanes,
            cuts=cuts,
            steps=steps,
            vector_axis=vector_axis(axes, {axis: cuts[axis].tile for axis in axes}, lanes) if axes else "",
        )
        if plan.stepped and form.expr.output.dtype != form.expr.accumulate:
            needed = f"partial sums of several steps need an output of {form.expr.accumulate}"
            raise LoweringError(f"{request.entry}: {needed}")
        return plan

    @property
    def dtype(self) -> str:
        """The type that the kernel computes in."""
        return self.form.expr.accumulate

    @property
    def reduction(self) -> Reduction:
        """The sum."""
        assert self.form.reduction is not None
        return self.form.reduction

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of the output."""
        return math.prod(extent.blocks for extent in self.cuts.values())

    @cached_property
    def stepped(self) -> tuple[str, ...]:
        """Reduction axes that are walked in several steps."""
        return tuple(axis for axis, step in self.steps.items() if step < self.form.sizes[axis])

    @cached_property
    def tile_loops(self) -> tuple[str, ...]:
        """Loops over the register tiles of a block, outermost first: the axis of the vectors is innermost."""
        return (*(axis for axis in self.form.final.axes if axis != self.vector_axis), self.vector_axis)

    @cached_property
    def sum_loops(self) -> tuple[str, ...]:
        """Loops over a step of the sum, outermost first."""
        return tuple(sum_loops(self.form, self.vector_axis))

    @cached_property
    def sums(self) -> int:
        """Vectors of sums in a register tile."""
        rows = math.prod(extent.tile for axis, extent in self.cuts.items() if axis != self.vector_axis)
        return rows * len(vectors(self.cuts[self.vector_axis].tile if self.vector_axis else 1, self.lanes))

    # ---- operands in scratch memory

    @cached_property
    def copies(self) -> tuple[PlacedCopy, ...]:
        """The operands that are copied to scratch memory."""
        form, axis = self.form, self.vector_axis
        copies: list[PlacedCopy] = []
        start = 0
        for load in dict.fromkeys(form.body_loads if form.reduction else ()):
            if load.tensor not in self.schedule.cached or not _is_box(load):
                continue
            tensor = form.expr.tensor_by_name[load.tensor]
            depth, sizes = self._place(load)
            staged = Staged(load=load, tensor=tensor, start=start, sizes=sizes)
            if in_panels(load, axis):
                inner = tuple(other for other in (*form.final.axes, *self.sum_loops) if other != axis)
                used = tuple(other for other in inner if any(index.coefficient(other) for index in load.indices))
                staged = replace(staged, panel=axis, tile=self.cuts[axis].tile, inner=used)
            elif phases_of(load, axis) > 1:
                staged = replace(staged, along=axis, phases=phases_of(load, axis))
            start += staged.elements
            copies.append(PlacedCopy(depth, staged))
        return tuple(copies)

    @property
    def scratch_elements(self) -> int:
        """Elements of scratch memory that a thread needs."""
        return sum(copy.staged.elements for copy in self.copies)

    def _place(self, load: Load) -> tuple[int, dict[str, int]]:
        """Number of tile loops around the copy, and its size along every axis: it is made just outside the
        innermost loop that uses it again."""
        counts = {axis: extent.tiles_per_block for axis, extent in self.cuts.items()}
        depth = place_of_copy(load, self.tile_loops, counts)
        sizes = dict(self.steps)
        for number, axis in enumerate(self.tile_loops):
            extent = self.cuts[axis]
            sizes[axis] = extent.tile if number < depth else extent.tiles_per_block * extent.tile
        return depth, sizes


@dataclass(frozen=True, kw_only=True)
class Block:
    """The block that a kernel is at.

    Attributes:
        buffers: the kernel's tensors and scratch memory.
        origin: first element, by axis of the output.
        following: first element of the next block; of the last block its own.
        zero: 0, which LLVM does not know.
    """

    buffers: CpuBuffers
    origin: Mapping[str, Expr]
    following: Mapping[str, Expr]
    zero: Expr

    @staticmethod
    def of(plan: TilePlan, buffers: CpuBuffers, number: Expr) -> Block:
        """The block of a number; blocks count the output's last axis fastest."""
        following = tirx.min(number + 1, plan.blocks - 1)
        return Block(
            buffers=buffers,
            origin=_origin(plan.cuts, number),
            following=_origin(plan.cuts, following),
            zero=number >> 30,
        )


def _origin(cuts: Mapping[str, Cut], number: Expr) -> dict[str, Expr]:
    """The first element of a block, by axis."""
    origin: dict[str, Expr] = {}
    for axis, extent in reversed([*cuts.items()]):
        place = tirx.floormod(number, extent.blocks) if extent.blocks > 1 else tirx.const(0, "int32")
        origin[axis] = place * extent.block
        number = tirx.floordiv(number, extent.blocks)
    return origin


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The register tile that a kernel is at, in a step of the sum.

    Attributes:
        plan: the kernel's.
        block: what it is a tile of.
        step: first point of the step, by reduction axis.
        number: counts the tiles of the block.
        first: first element, by axis of the output.
        extents: elements along every axis.
    """

    plan: TilePlan
    block: Block
    step: Mapping[str, Expr]
    number: Expr
    first: Mapping[str, Expr]
    extents: Mapping[str, int]

    def axes(self, row: Mapping[str, int | Expr], start: int, lane: Expr) -> dict[str, Expr]:
        """An element of the output: place ``row`` along all axes of the tile but that of the vectors, and lane ``lane``
        of the vector that begins at ``start`` along that."""
        return {axis: self.first[axis] + row.get(axis, start + lane) for axis in self.plan.form.final.axes}

    def place(self, row: Mapping[str, int | Expr], start: int, lane: Expr) -> Expr:
        """Position of an element in the output."""
        axes = self.axes(row, start, lane)
        return position([axes[axis] for axis in self.plan.form.final.axes], self.plan.form.expr.output.shape)

    def bases(self, copy: PlacedCopy) -> list[tuple[str, Expr]]:
        """First element of the tile within a copy, by axis in the order of the tile loops."""
        return [
            (axis, tirx.const(0, "int32") if number < copy.depth else self.first[axis] - self.block.origin[axis])
            for number, axis in enumerate(self.plan.tile_loops)
        ]


def _is_box(load: Load) -> bool:
    """True if what a load reads is a box that is walked forwards, which can be copied. The box around a diagonal would
    hold far more than is read."""
    if load.places:
        return False
    terms = [term for index in load.indices for term in index.terms]
    axes = {axis for axis, _ in terms}
    return bool(terms) and len(axes) == len(terms) and all(coefficient > 0 for _, coefficient in terms)
