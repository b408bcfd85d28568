"""Common part of kernels of matrix instructions: blocks, the way into shared memory, the way of results out.

Both operands are staged in shared memory as matrices, rows m or k by columns k or n, whatever the tensors' other
dimensions are: those are one element wide. A warp owns a sub-matrix of the block's output and keeps it in accumulators
whose elements lie scattered over its lanes. Results pass through a strip of shared memory therefore: warps store
sixteen rows each at a time, and then all threads of the block together apply the final statement to that strip and
write it, element by element where it exists.

The kernels are written directly as statements rather than scheduled from a tensor expression: TVM's matching of matrix
intrinsics would need every operand in the shape of its pattern, and loading its intrinsics takes seconds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.adjacent import SCALAR_FUNCTIONS, AdjacentResults, is_scalar
from codegen.gpu.raster import block_places
from codegen.tir.bounds import Bounds
from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import TileRequest
from codegen.tir.reads import VECTOR_ANY, padded_sizes, read_in_place
from codegen.tir.statements import local_buffer, named, vector_read, vector_write
from codegen.tir.values import Expr, evaluate
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import makes_16_bits
from sokoban.kernel.matrix import FRAGMENT, STATIC_SHARED_BYTES, MatrixRoles
from sokoban.language.expression import FLOAT8_DTYPES, Load, Tensor
from sokoban.schedule.accesses import fetch_vector, store_vector
from sokoban.schedule.tile import TileSchedule

WARP = 32
#: Results per thread and turn on their way out: vectors of more than four floats do not compile.
RESULT_VECTOR = 4


def _near(name: str) -> Callable[[Expr], Expr]:
    """A device function by its name (:mod:`codegen.gpu.walks.functions`)."""
    return lambda value: tirx.call_pure_extern("float32", f"near_{name}", value)


#: Functions that are near enough where results are rounded to 16 bits: half of the instructions, or fewer.
_NEAR: Mapping[str, Callable[[Expr], Expr]] = {
    "erf": _near("erf"),
    "sigmoid": _near("sigmoid"),
    "silu": lambda value: value * _near("sigmoid")(value),
    "tanh": lambda value: 2.0 * _near("sigmoid")(2.0 * value) - 1.0,
}


def warp_tile_problem(schedule: TileSchedule, roles: MatrixRoles) -> str | None:
    """Why a schedule's tiles are none of a matrix product by warps, whatever the instruction; None where they are."""
    for axis, block in schedule.block:
        warp = schedule.thread_of[axis]
        if axis in (roles.m, roles.n):
            if warp % FRAGMENT or block % warp or warp <= 0:
                return f"block {block} and warp {warp} of axis {axis} are no multiples of {FRAGMENT} and each other"
        elif block != 1 or warp != 1:
            return f"axis {axis} runs alongside the product and takes a tile of one"
        if schedule.vthreads_of[axis] != 1:
            return "warps have no virtual copies"
    for axis, step in schedule.step:
        if (step % roles.depth or step <= 0) if axis == roles.k else step != 1:
            return f"step {step} of axis {axis}: the product's depth takes multiples of {roles.depth}, others one"
    if roles.k not in schedule.step_of:
        return f"axis {roles.k} has no step"
    if schedule.reduce_threads:
        return "warps do not share a reduction"
    if {roles.a.tensor, roles.b.tensor} != set(schedule.cached):
        return "both operands, and nothing else, are staged in shared memory"
    if schedule.threads_per_block > 1024:
        return f"{schedule.threads_per_block} threads are more than a block has"
    return None


def outer_inner(roles: MatrixRoles, load: Load) -> tuple[str, str]:
    """The axes of an operand's rows and columns in shared memory: columns are the tensor's innermost dimension."""
    if load == roles.a:
        return (roles.m, roles.k) if roles.a_layout == "row" else (roles.k, roles.m)
    return (roles.k, roles.n) if roles.b_layout == "row" else (roles.n, roles.k)


def shared_shape(roles: MatrixRoles, schedule: TileSchedule, load: Load) -> tuple[int, int]:
    """Rows and columns (with padding) of an operand's tile in shared memory, in elements."""
    tile = {**schedule.block_of, **schedule.step_of}
    outer, inner = outer_inner(roles, load)
    return tile[outer], tile[inner] + schedule.padding_of.get(load.tensor, 0)


def strip_shape(roles: MatrixRoles, schedule: TileSchedule) -> tuple[int, int]:
    """Rows and columns (with padding) of the strip in which results leave the warps, in sums of 32 bits."""
    return schedule.threads_of[roles.m] * FRAGMENT, schedule.block_of[roles.n] + roles.strip_padding


def strip_bytes(roles: MatrixRoles, schedule: TileSchedule) -> int:
    """Shared memory in which results leave the warps: sixteen rows of every warp at a time."""
    return 4 * math.prod(strip_shape(roles, schedule))


@dataclass(frozen=True, kw_only=True)
class ProductPlan:
    """Decisions made before the kernel of a matrix product is written.

    Attributes:
        form, schedule: the operator and its tiles.
        roles: of the operator's axes and operands.
        shared_bytes: shared memory of a block.
        is_dynamic: whether shared memory is sized at launch.
    """

    form: KernelForm
    schedule: TileSchedule
    roles: MatrixRoles
    shared_bytes: int
    is_dynamic: bool

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name, as kernels see them."""
        return {name: _stored(tensor) for name, tensor in self.form.expr.tensor_by_name.items()}

    @cached_property
    def bounds(self) -> Bounds:
        """Ends of axes and tensors."""
        return Bounds(self.form)

    @cached_property
    def padded(self) -> Mapping[str, int]:
        """Sizes of all axes in whole tiles."""
        return padded_sizes(self.form, self.schedule)

    @cached_property
    def tile(self) -> Mapping[str, int]:
        """Sizes of a block along the output's axes, and of a step along the others."""
        return {**self.schedule.block_of, **self.schedule.step_of}

    @property
    def warps_n(self) -> int:
        """Number of warps along n."""
        return self.schedule.threads_of[self.roles.n]

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.schedule.threads_of[self.roles.m] * self.warps_n

    @property
    def fragments_m(self) -> int:
        """Fragments of a warp along m."""
        return self.schedule.thread_of[self.roles.m] // FRAGMENT

    @property
    def fragments_n(self) -> int:
        """Fragments of a warp along n."""
        return self.schedule.thread_of[self.roles.n] // FRAGMENT


@dataclass(frozen=True, kw_only=True)
class ProductBlock:
    """The thread that a kernel describes, and what it reads and writes.

    Attributes:
        buffers: the inputs by name.
        output: the output.
        origin: first element of the thread's block, by axis of the output.
        warp, lane: the thread's warp in the block, and its place in the warp.
    """

    buffers: Mapping[str, Any]
    output: Any
    origin: Mapping[str, Expr]
    warp: Expr
    lane: Expr


class ProductKernel(ABC):
    """The statements of one kernel, those of :meth:`write` in their order.

    Attributes:
        has_barriers: its statements have all barriers that they need; TVM adds none.
        has_interleaved_rows: the upper half of a fragment's rows in the strip are its even rows, the lower half the odd
            ones.
        instead: functions of the final statement that are computed nearly.
    """

    has_barriers = False
    has_interleaved_rows = False

    def __init__(self, plan: ProductPlan, block: ProductBlock) -> None:
        self.plan, self.block = plan, block
        self.form, self.schedule, self.roles, self.tile = plan.form, plan.schedule, plan.roles, plan.tile
        self.origin, self.warp, self.lane = block.origin, block.warp, block.lane
        self.thread = block.warp * WARP + block.lane
        self.instead = _NEAR if makes_16_bits(plan.form.expr) else {}

    @staticmethod
    @abstractmethod
    def instruction_problem(form: KernelForm, schedule: TileSchedule, roles: MatrixRoles) -> str | None:
        """Why the instruction does not take a schedule whose tiles are those of a product by warps; None where it
        does."""

    @staticmethod
    @abstractmethod
    def shared_bytes(schedule: TileSchedule, roles: MatrixRoles) -> int:
        """Shared memory of a block, static and dynamic together."""

    @staticmethod
    def dynamic_bytes(plan: ProductPlan) -> int:
        """Shared memory that is sized at launch: all of it, or none."""
        return plan.shared_bytes if plan.is_dynamic else 0

    @abstractmethod
    def write(self) -> None:
        """All statements of a block."""

    def fetch_width(self, load: Load) -> int:
        """Elements that a thread copies at once to the shared tile of ``load``."""
        padding = self.schedule.padding_of.get(load.tensor, 0)
        given = self.schedule.vector_of.get(load.tensor, VECTOR_ANY)
        return math.gcd(given, fetch_vector(self.form, self.schedule, load, padding))

    def share_out(self, rows: int, columns: int, vector: int, body: Callable[[Expr, Expr], None]) -> None:
        """``body(row, column)`` for every element of a matrix, dealt to all threads in vectors along the rows."""

        def vectors(row: Expr, column: Expr) -> None:
            if vector == 1:
                body(row, column)
                return
            with named(T.vectorized, vector, "lane") as lane:
                body(row, column + lane)

        self.share_out_vectors(rows, columns, vector, vectors)

    def share_out_vectors(
        self, rows: int, columns: int, vector: int, body: Callable[[Expr, Expr], None], unroll: bool = False
    ) -> None:
        """``body(row, column)`` for every vector of a matrix, by its first element."""
        threads = self.plan.warps * WARP
        count = rows * columns // vector
        per_row = columns // vector
        with named(T.unroll if unroll else T.serial, -(-count // threads), "turn") as turn:
            index = turn * threads + self.thread
            if count % threads:
                with T.If(index < count), T.Then():
                    body(index // per_row, index % per_row * vector)
            else:
                body(index // per_row, index % per_row * vector)

    def store_strip(self, strip: Any, row: Expr) -> None:
        """Fragment row ``row`` of every warp, which ``strip`` holds, through the final statement to the output."""
        roles, schedule = self.roles, self.schedule
        width = strip_shape(roles, schedule)[1]
        vector = math.gcd(
            schedule.vector_of.get(self.form.expr.output.name, RESULT_VECTOR), store_vector(self.form, schedule)
        )
        vector = math.gcd(vector, RESULT_VECTOR)

        def store(strip_row: Expr, column: Expr) -> None:
            within = strip_row % FRAGMENT
            if self.has_interleaved_rows:
                within = within % 8 * 2 + within // 8
            m = strip_row // FRAGMENT * schedule.thread_of[roles.m] + row * FRAGMENT + within
            axes = {**self.origin, roles.m: self.origin[roles.m] + m, roles.n: self.origin[roles.n] + column}
            ends = self.plan.bounds
            inside = [axes[axis] < ends.size(axis) for axis in (roles.m, roles.n) if self._is_padded(axis)]
            if not inside:
                write(axes, strip_row * width + column)
                return
            with T.If(tirx.all(*inside)), T.Then():
                write(axes, strip_row * width + column)

        def write(axes: dict[str, Expr], at: Expr) -> None:
            if not by_lanes:
                value = self._final(axes, {}, strip[at])
                T.buffer_store(self.block.output, value, [axes[axis] for axis in self.form.final.axes])
                return
            sums = local_buffer("sums_of_strip", vector, strip.dtype)
            vector_write(sums, tirx.const(0, "int32"), vector, vector_read(strip, at, vector))
            AdjacentResults(self.form, vector, self.block.buffers).store(
                self.block.output, axes, lambda places, taken, lane: self._final(places, taken, sums[lane])
            )

        by_lanes = vector > 1 and is_scalar(self.form.final.value, SCALAR_FUNCTIONS | self.instead.keys())
        share_out = self.share_out_vectors if by_lanes else self.share_out
        share_out(schedule.threads_of[roles.m] * FRAGMENT, schedule.block_of[roles.n], vector, store)

    def _is_padded(self, axis: str) -> bool:
        return self.plan.padded[axis] > self.form.sizes[axis]

    def _final(self, axes: Mapping[str, Expr], taken: Mapping[Load, Expr], result: Expr) -> Expr:
        """The final statement at one element of the output, its guarded loads read only where they exist; ``taken`` are
        elements in registers."""
        form, dtype = self.form, self.form.expr.final_dtype

        def read(load: Load) -> Expr:
            if load.tensor == form.reductions[0].tensor:
                return result.astype(dtype)
            return read_in_place(load, self.plan.tensors, self.block.buffers, axes, form.sizes, taken).astype(dtype)

        return evaluate(form.final.value, axes, read, dtype, self.instead).astype(form.expr.output.dtype)

    def source(self, load: Load) -> Callable[..., Expr]:
        """The tensor of ``load`` as a function of its indices."""
        buffer = self.block.buffers[load.tensor]
        return lambda *indices: buffer[indices]


def _stored(tensor: Tensor) -> Tensor:
    """A tensor as kernels see it: eight-bit floats are their bits, numbers to nothing but matrix instructions."""
    return replace(tensor, dtype="uint8") if tensor.dtype in FLOAT8_DTYPES else tensor


def product_problem(kernel: type[ProductKernel], form: KernelForm, schedule: TileSchedule) -> str | None:
    """Why a schedule cannot be lowered to a kernel's matrix instruction; None where it can."""
    roles = form.roles
    if roles is None:
        return "is no product of matrices that an instruction multiplies"
    return warp_tile_problem(schedule, roles) or kernel.instruction_problem(form, schedule, roles)


def lower_product(kernel: type[ProductKernel], request: TileRequest) -> Lowered:
    """The kernel of a matrix product.

    Raises:
        ValueError: the operator or the schedule does not fit the instruction.
    """
    form, schedule = request.problem, request.schedule
    problem = product_problem(kernel, form, schedule)
    if problem is not None:
        raise ValueError(f"{form.expr.name}: {problem}")
    roles = _roles_of(form)
    shared_bytes = kernel.shared_bytes(schedule, roles)
    is_dynamic = request.target.row.has_dynamic_shared and shared_bytes > STATIC_SHARED_BYTES
    plan = ProductPlan(
        form=form,
        schedule=schedule,
        roles=roles,
        shared_bytes=shared_bytes,
        is_dynamic=is_dynamic,
    )
    return Lowered(
        module=written(request.entry, lambda: _write_function(kernel, plan)),
        entry=request.entry,
        grid=(schedule.grid_blocks(form.sizes), 1, 1),
        launch=plan.bounds.shape(schedule),
        block=(WARP, plan.warps, 1),
        shared_bytes=shared_bytes,
        dynamic_shared_bytes=kernel.dynamic_bytes(plan),
        has_barriers=kernel.has_barriers,
    )


def _write_function(kernel: type[ProductKernel], plan: ProductPlan) -> None:
    # Eight-bit floats are bytes to TVM: the tensors as they are stored, not as the operator has them.
    buffers = {tensor.name: parameter(plan.tensors[tensor.name]) for tensor in plan.form.expr.inputs}
    output = parameter(plan.form.expr.output)
    plan.bounds.declare()
    with (
        T.launch_thread("blockIdx.x", plan.schedule.grid_blocks(plan.form.sizes)) as number,
        T.launch_thread("threadIdx.y", plan.warps) as warp,
        T.launch_thread("threadIdx.x", WARP) as lane,
    ):
        places = block_places(number, plan.form, plan.schedule, plan.bounds)
        origin = {axis: place * plan.schedule.block_of[axis] for axis, place in places.items()}
        kernel(plan, ProductBlock(buffers=buffers, output=output, origin=origin, warp=warp, lane=lane)).write()


def _roles_of(form: KernelForm) -> MatrixRoles:
    """The roles of the axes of an operator that is a matrix product."""
    roles = form.roles
    assert roles is not None
    return roles
