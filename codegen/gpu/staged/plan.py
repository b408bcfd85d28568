"""A kernel with everything staged before it is written: its tiles, its steps, its shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from codegen.gpu.staged.threads import StepLoop, ThreadTile, step_loops
from codegen.gpu.staged.tiles import StagedTile
from codegen.tir.bounds import Bounds
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import TileRequest
from codegen.tir.reads import VECTOR_ANY, padded_sizes
from codegen.tir.values import BFLOAT16_BITS
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import STATIC_SHARED_BYTES
from sokoban.kernel.regions import data_dimension, storage_order
from sokoban.language.expression import Load, Reduction, Tensor
from sokoban.schedule.accesses import fetch_vector
from sokoban.schedule.pipelines import asynchronous_problem
from sokoban.schedule.tile import TileSchedule

#: Copies of a tile that a thread makes in a step: each is a few lines of text, with two addresses in registers.
MOST_COPIES = 1024


@dataclass(frozen=True)
class StagedPlan:
    """Decisions made before the kernel is written.

    Attributes:
        form, schedule: the operator and its tiles.
        has_dynamic_shared: whether shared memory beyond 48 KiB is sized at launch.
        has_bfloat16: whether the target has arithmetic of bfloat16.
    """

    form: KernelForm
    schedule: TileSchedule
    has_dynamic_shared: bool
    has_bfloat16: bool

    @staticmethod
    def of(request: TileRequest) -> StagedPlan:
        """The plan of a schedule.

        Raises:
            LoweringError: the schedule asks for asynchronous copies that cannot be, or a thread copies more in a step
                than is written out.
        """
        problem = asynchronous_problem(request.problem) if request.schedule.asynchronous else None
        if problem is not None:
            raise LoweringError(f"{request.entry}: {problem}")
        target = request.target
        plan = StagedPlan(request.problem, request.schedule, target.row.has_dynamic_shared, target.has_bfloat16)
        for tile in plan.tiles.values():
            copies = -(-tile.size // (tile.vector * request.schedule.threads_per_block))
            if copies > MOST_COPIES:
                what = f"a thread copies {copies} pieces of {tile.tensor.name} a step"
                raise LoweringError(f"{request.entry}: {what}, and {MOST_COPIES} are written out at most")
        return plan

    @cached_property
    def bounds(self) -> Bounds:
        """Ends of axes and tensors."""
        return Bounds(self.form)

    @property
    def dtype(self) -> str:
        """The type that the kernel computes in."""
        return self.form.expr.accumulate

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name as memory holds them: of bfloat16 the bits where there is no arithmetic of it, since TVM
        would stage every element as a float32."""
        tensors = self.form.expr.tensor_by_name
        if self.has_bfloat16:
            return tensors
        return {
            name: replace(tensor, dtype=BFLOAT16_BITS) if tensor.dtype == "bfloat16" else tensor
            for name, tensor in tensors.items()
        }

    @property
    def reduction(self) -> Reduction:
        """The reduction."""
        assert self.form.reduction is not None
        return self.form.reduction

    @cached_property
    def padded(self) -> Mapping[str, int]:
        """Sizes of all axes in whole tiles."""
        return padded_sizes(self.form, self.schedule)

    @cached_property
    def thread_tile(self) -> ThreadTile:
        """A thread's elements of the output."""
        return ThreadTile(self.form.final.axes, self.schedule)

    # ---- steps

    @cached_property
    def step_counts(self) -> Mapping[str, int]:
        """Steps along every reduction axis."""
        return {axis: self.padded[axis] // self.schedule.step_of[axis] for axis in self.form.reduced}

    @cached_property
    def steps(self) -> int:
        """Steps altogether."""
        return math.prod(self.step_counts.values())

    @cached_property
    def loops(self) -> tuple[StepLoop, ...]:
        """Loops over the points of a step, outermost first."""
        return tuple(step_loops(self.form.reduced, self.schedule))

    @property
    def asynchronous(self) -> bool:
        """True if copies pass by the registers."""
        return self.schedule.asynchronous and self.steps > 1

    @property
    def stages(self) -> int:
        """Buffers of every tile: two where values wait for theirs in registers."""
        if self.steps == 1:
            return 1
        return self.schedule.stages if self.asynchronous else min(2, self.schedule.stages)

    # ---- shared memory

    @cached_property
    def tiles(self) -> Mapping[Load, StagedTile]:
        """The staged tile of every load."""
        form, schedule = self.form, self.schedule
        outputs = [axis for axis in form.spatial if form.sizes[axis] > 1]
        ends: dict[str, int] = {}
        tiles: dict[Load, StagedTile] = {}
        for load in dict.fromkeys(form.body_loads):
            tensor = self.tensors[load.tensor]
            positions = tuple(range(len(load.indices)))
            order = storage_order(load, outputs, form.batch_axes) if load.tensor in schedule.turned else positions
            tiles[load] = self._tile(load, order, ends.get(tensor.dtype, 0))
            ends[tensor.dtype] = ends.get(tensor.dtype, 0) + tiles[load].size
        return tiles

    def _tile(self, load: Load, order: tuple[int, ...], start: int) -> StagedTile:
        """The tile of a load, whose dimensions are stored in ``order`` from element ``start`` of its buffer on."""
        form, schedule = self.form, self.schedule
        sizes = {**schedule.block_of, **schedule.step_of}
        dimensions = tuple(data_dimension(index) for index in load.indices)
        padding = schedule.padding_of.get(load.tensor, 0) if len(dimensions) > 1 else 0
        is_turned = order[-1] != len(order) - 1
        # An asynchronous copy stores what it reads as one piece.
        vector = 1
        if not (is_turned and self.asynchronous):
            allowed = fetch_vector(form, schedule, load, 0 if is_turned else padding)
            vector = math.gcd(schedule.vector_of.get(load.tensor, VECTOR_ANY), allowed)
        return StagedTile(
            load=load,
            tensor=self.tensors[load.tensor],
            dimensions=dimensions,
            extents=tuple(dimension.extent(sizes) for dimension in dimensions),
            order=order,
            padding=padding,
            vector=vector,
            start=start,
            padded=self.padded,
            steps=tuple(axis for axis, count in self.step_counts.items() if count > 1),
            tile=sizes,
            outputs=form.final.axes,
            ends=self.bounds,
        )

    @cached_property
    def stage_elements(self) -> Mapping[str, int]:
        """Elements of one stage, by dtype: tiles of a dtype lie in one buffer."""
        dtypes = sorted({tile.tensor.dtype for tile in self.tiles.values()})
        return {dtype: sum(tile.size for tile in self.tiles.values() if tile.tensor.dtype == dtype) for dtype in dtypes}

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block: all stages of all tiles."""
        return self.stages * sum(tile.size * tile.tensor.element_bytes for tile in self.tiles.values())

    @property
    def is_dynamic(self) -> bool:
        """True if shared memory is sized at launch."""
        return self.has_dynamic_shared and self.shared_bytes > STATIC_SHARED_BYTES

    def unread(self, tile: StagedTile) -> int | None:
        """An element of the stages that is never read, for accesses of ``tile``: its own padding or another tile's."""
        if tile.unread is not None:
            return tile.unread
        if tile.is_turned and tile.vector > 1:
            # Its elements are stored a row apart.
            return None
        others = [other for other in self.tiles.values() if other.tensor.dtype == tile.tensor.dtype]
        unread = [other.unread for other in others if other.unread is not None and other.padding >= tile.vector]
        return next((element for element in unread if element % tile.vector == 0), None)
