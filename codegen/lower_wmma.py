"""Tensor Core kernels: matrix products by the 16x16x16 instructions of ``nvcuda::wmma``.

The data tiles of both operands are staged in shared memory as matrices, rows m or k by columns k or n, whatever the
tensors' other dimensions are: those are one element wide. A warp owns a sub-matrix of the block's output and keeps it
in accumulator fragments. A fragment's elements are scattered over the warp in an order that the hardware keeps to
itself, so results pass through shared memory: warps store one row of fragments at a time, and then all threads of the
block together apply the final statement to that strip and write it, element by element where it exists.

The kernel is written directly as statements rather than scheduled from a tensor expression: TVM's matching of matrix
intrinsics would need every operand in the shape of its pattern, and loading its intrinsics takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from codegen.lower import STATIC_SHARED_BYTES, VECTOR_ANY, Lowered, guarded_read, identifier, padded_sizes
from codegen.values import Expr, evaluate
from sokoban.expression import Load, Tensor
from sokoban.kernel_form import KernelForm
from sokoban.matrix import FRAGMENT, STRIP_PADDING, MatrixRoles, matrix_roles
from sokoban.schedule import TileSchedule, sizes
from sokoban.vectors import fetch_vector, store_vector

WARP = 32
#: Shared rows start at multiples of 16 bytes: what ``load_matrix_sync`` asks of a leading dimension.
OPERAND_PADDING_STEP = 8
#: Results per thread and turn on their way out: vectors of more than four floats do not compile.
RESULT_VECTOR = 4


def lower_wmma(form: KernelForm, schedule: TileSchedule, *, entry: str, dynamic_shared: bool = True) -> Lowered:
    """Lower a matrix product with instruction ``wmma_16x16x16``.

    Raises:
        ValueError: the operator or the schedule does not fit the instruction; :func:`wmma_problem` says why.
    """
    problem = wmma_problem(form, schedule)
    if problem is not None:
        raise ValueError(f"{form.expr.name}: {problem}")
    roles = matrix_roles(form)
    assert roles is not None
    return _WmmaLowering(form, schedule, roles, entry, dynamic_shared).run()


def wmma_problem(form: KernelForm, schedule: TileSchedule) -> str | None:
    """Why a schedule cannot be lowered to matrix instructions; None when it can."""
    roles = matrix_roles(form)
    if roles is None:
        return "is no product of matrices of 16-bit floats"
    for axis, block in schedule.block:
        warp = schedule.thread_of[axis]
        if axis in (roles.m, roles.n):
            if warp % FRAGMENT or block % warp or warp <= 0:
                return f"block {block} and warp {warp} of axis {axis} are no multiples of {FRAGMENT} and each other"
        elif block != 1 or warp != 1:
            return f"axis {axis} runs beside the product and takes a tile of one"
        if schedule.vthreads_of[axis] != 1:
            return "warps have no virtual copies"
    for axis, step in schedule.step:
        if (step % FRAGMENT or step <= 0) if axis == roles.k else step != 1:
            return f"step {step} of axis {axis}: the product's depth takes multiples of {FRAGMENT}, others one"
    if roles.k not in schedule.step_of:
        return f"axis {roles.k} has no step"
    if schedule.reduce_threads:
        return "warps do not share a reduction"
    if {roles.a.tensor, roles.b.tensor} != set(schedule.cached):
        return "both operands, and nothing else, are staged in shared memory"
    for load in (roles.a, roles.b):
        padding = schedule.padding_of.get(load.tensor, 0)
        if padding % OPERAND_PADDING_STEP or padding < 0:
            return f"padding {padding} of {load.tensor} is no multiple of {OPERAND_PADDING_STEP} elements"
    if schedule.threads_per_block > 1024:
        return f"{schedule.threads_per_block} threads are more than a block has"
    strip = strip_bytes(roles, schedule)
    if strip > STATIC_SHARED_BYTES:
        return f"results on their way out take {strip} bytes, static shared memory has {STATIC_SHARED_BYTES}"
    return None


def wmma_shared_bytes(form: KernelForm, schedule: TileSchedule) -> int:
    """Shared memory of a block: both staged tiles, and beside them the strip in which results leave the fragments.

    Beyond 48 KiB the staged tiles move to dynamic shared memory; the strip, of another type, stays static.
    """
    roles = matrix_roles(form)
    assert roles is not None
    staged = sum(2 * math.prod(_shared_shape(roles, schedule, load)) for load in (roles.a, roles.b))
    return staged + strip_bytes(roles, schedule)


def strip_bytes(roles: MatrixRoles, schedule: TileSchedule) -> int:
    """Shared memory in which results leave the fragments: sixteen rows of every warp at a time."""
    return 4 * math.prod(_strip_shape(roles, schedule))


def tile_twin(schedule: TileSchedule, form: KernelForm) -> TileSchedule:
    """The scalar twin of a matrix schedule: same block, steps, staging and padding, computed by multiply-adds.

    It has as many threads wherever a warp's tile divides among 32 of them, which it does for multiples of 16.
    """
    roles = matrix_roles(form)
    assert roles is not None
    rows, columns = schedule.block_of[roles.m], schedule.block_of[roles.n]
    elements = rows * columns // schedule.threads_per_block
    choices = [
        (elements // width, width)
        for width in range(1, elements + 1)
        if elements % width == 0 and columns % width == 0 and rows % (elements // width) == 0
    ]
    height, width = min(choices, key=lambda choice: (abs(choice[0] - choice[1]), choice[0]))
    thread = {axis: 1 for axis, _ in schedule.block} | {roles.m: height, roles.n: width}
    return replace(schedule, thread=sizes(thread), instruction="fma")


def _outer_inner(roles: MatrixRoles, load: Load) -> tuple[str, str]:
    """The axes of an operand's rows and columns in shared memory: columns are the tensor's innermost dimension."""
    if load == roles.a:
        return (roles.m, roles.k) if roles.a_layout == "row" else (roles.k, roles.m)
    return (roles.k, roles.n) if roles.b_layout == "row" else (roles.n, roles.k)


def _shared_shape(roles: MatrixRoles, schedule: TileSchedule, load: Load) -> tuple[int, int]:
    tile = {**schedule.block_of, **schedule.step_of}
    outer, inner = _outer_inner(roles, load)
    return tile[outer], tile[inner] + schedule.padding_of.get(load.tensor, 0)


def _strip_shape(roles: MatrixRoles, schedule: TileSchedule) -> tuple[int, int]:
    return schedule.threads_of[roles.m] * FRAGMENT, schedule.block_of[roles.n] + STRIP_PADDING


class _WmmaLowering:
    """One kernel, its statements in the order in which :meth:`_kernel` writes them."""

    def __init__(
        self, form: KernelForm, schedule: TileSchedule, roles: MatrixRoles, entry: str, dynamic_shared: bool
    ) -> None:
        self.form = form
        self.schedule = schedule
        self.roles = roles
        self.entry = entry
        self.dtype = form.expr.accumulate
        self.tensors = form.expr.tensor_by_name
        self.padded = padded_sizes(form, schedule)
        self.tile = {**schedule.block_of, **schedule.step_of}
        self.warps_n = schedule.threads_of[roles.n]
        self.warps = schedule.threads_of[roles.m] * self.warps_n
        self.fragments_m = schedule.thread_of[roles.m] // FRAGMENT
        self.fragments_n = schedule.thread_of[roles.n] // FRAGMENT
        self.shared_bytes = wmma_shared_bytes(form, schedule)
        self.is_dynamic = dynamic_shared and self.shared_bytes > STATIC_SHARED_BYTES

    def run(self) -> Lowered:
        with IRBuilder() as builder, T.prim_func(s_tir=True):
            T.func_name(self.entry)
            T.func_attr({"global_symbol": self.entry, "tirx.noalias": True})
            self.buffers = {tensor.name: self._parameter(tensor) for tensor in self.form.expr.inputs}
            self.output = self._parameter(self.form.expr.output)
            self._kernel()
        return Lowered(
            tvm.IRModule({self.entry: builder.get()}),
            self.entry,
            (self.schedule.grid_blocks(self.form.sizes), 1, 1),
            (WARP, self.warps, 1),
            self.shared_bytes,
            self.shared_bytes - strip_bytes(self.roles, self.schedule) if self.is_dynamic else 0,
        )

    def _parameter(self, tensor: Tensor) -> Any:
        name = identifier(tensor.name)
        handle = T.arg(f"{name}_handle", T.handle())
        buffer = T.match_buffer(handle, tensor.shape or (1,), tensor.dtype)
        IRBuilder.name(name, buffer)
        return buffer

    def _kernel(self) -> None:
        roles, schedule = self.roles, self.schedule
        a_shape, b_shape = (_shared_shape(roles, schedule, load) for load in (roles.a, roles.b))
        operand = self.tensors[roles.a.tensor].dtype
        scope = "shared.dyn" if self.is_dynamic else "shared"
        with (
            T.launch_thread("blockIdx.x", schedule.grid_blocks(self.form.sizes)) as block,
            T.launch_thread("threadIdx.y", self.warps) as warp,
            T.launch_thread("threadIdx.x", WARP) as lane,
        ):
            self.origin = self._block_origin(block)
            self.warp, self.thread = warp, warp * WARP + lane
            self.a_shared = _allocate("a_shared", math.prod(a_shape), operand, scope)
            self.b_shared = _allocate("b_shared", math.prod(b_shape), operand, scope)
            self.strip = _allocate("strip", strip_bytes(roles, schedule) // 4, "float32", "shared")
            area = FRAGMENT * FRAGMENT
            self.accumulators = _allocate(
                "accumulators", self.fragments_m * self.fragments_n * area, "float32", "wmma.accumulator"
            )
            self.a_fragments = _allocate("a_fragments", self.fragments_m * area, operand, "wmma.matrix_a")
            self.b_fragments = _allocate("b_fragments", self.fragments_n * area, operand, "wmma.matrix_b")
            # TVM lets buffers whose lives do not overlap share storage, and then fails over their types: one store at
            # the start makes the strip live throughout.
            with T.If(self.thread < 1), T.Then():
                T.buffer_store(self.strip, T.float32(0), [0])
            with T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0):
                with _named(T.unroll, self.fragments_m * self.fragments_n, "position") as position:
                    T.evaluate(T.tvm_fill_fragment(*_fragment(self.accumulators, position), T.float32(0)))
                self._steps(list(self.form.reduced), {})
                with _named(T.unroll, self.fragments_m, "row") as row:
                    self._leave(row)

    def _block_origin(self, block: Expr) -> dict[str, Expr]:
        """First element of the block along every spatial axis: blocks count the output's last axis fastest."""
        origin: dict[str, Expr] = {}
        rest = block
        for axis in reversed(self.form.final.axes):
            size = self.schedule.block_of[axis]
            count = self.padded[axis] // size
            origin[axis] = (rest % count if axis != self.form.final.axes[0] else rest) * size
            rest = rest // count
        return origin

    # ---- the product

    def _steps(self, remaining: list[str], at: dict[str, Expr]) -> None:
        """The loops over reduction steps, and inside them one step."""
        if not remaining:
            self._step(at)
            return
        axis = remaining[0]
        step = self.schedule.step_of[axis]
        with _named(T.serial, self.padded[axis] // step, f"{identifier(axis)}_step") as index:
            self._steps(remaining[1:], {**at, axis: index * step})

    def _step(self, at: Mapping[str, Expr]) -> None:
        roles = self.roles
        first = {**self.origin, **at}
        self._fetch(roles.a, self.a_shared, first)
        self._fetch(roles.b, self.b_shared, first)
        warp_m = self.warp // self.warps_n * self.schedule.thread_of[roles.m]
        warp_n = self.warp % self.warps_n * self.schedule.thread_of[roles.n]
        with _named(T.unroll, self.schedule.step_of[roles.k] // FRAGMENT, "depth") as depth:
            with _named(T.unroll, self.fragments_m, "i") as i:
                corner = {roles.m: warp_m + i * FRAGMENT, roles.k: depth * FRAGMENT}
                self._load(self.a_fragments, i, roles.a, self.a_shared, corner, roles.a_layout)
            with _named(T.unroll, self.fragments_n, "j") as j:
                corner = {roles.n: warp_n + j * FRAGMENT, roles.k: depth * FRAGMENT}
                self._load(self.b_fragments, j, roles.b, self.b_shared, corner, roles.b_layout)
            with (
                _named(T.unroll, self.fragments_m, "i") as i,
                _named(T.unroll, self.fragments_n, "j") as j,
            ):
                position = i * self.fragments_n + j
                T.evaluate(
                    T.tvm_mma_sync(
                        self.accumulators.data, position, self.a_fragments.data, i,
                        self.b_fragments.data, j, self.accumulators.data, position,
                    )
                )  # fmt: skip

    def _load(
        self, fragments: Any, index: Expr, load: Load, shared: Any, corner: Mapping[str, Expr], layout: str
    ) -> None:
        outer, inner = _outer_inner(self.roles, load)
        row = _shared_shape(self.roles, self.schedule, load)[1]
        pointer = shared.access_ptr("r", offset=corner[outer] * row + corner[inner])
        T.evaluate(T.tvm_load_matrix_sync(*_fragment(fragments, index), pointer, row, f"{layout}_major"))

    def _fetch(self, load: Load, shared: Any, first: Mapping[str, Expr]) -> None:
        """All threads copy the data tile of ``load``, zero where the tensor or the product ends."""
        outer, inner = _outer_inner(self.roles, load)
        width = self.tile[inner]
        padding = self.schedule.padding_of.get(load.tensor, 0)
        vector = math.gcd(
            self.schedule.vector_of.get(load.tensor, VECTOR_ANY), fetch_vector(self.form, self.schedule, load, padding)
        )
        tensor = self.tensors[load.tensor]

        def copy(row: Expr, column: Expr) -> None:
            axes = {**first, outer: first[outer] + row, inner: first[inner] + column}
            value = guarded_read(load, tensor, self._source(load), axes, {**self.form.sizes, **self.padded})
            T.buffer_store(shared, value, [row * (width + padding) + column])

        self._share_out(self.tile[outer], width, vector, copy)

    def _share_out(self, rows: int, columns: int, vector: int, body: Callable[[Expr, Expr], None]) -> None:
        """``body(row, column)`` for every element of a matrix, dealt to all threads in vectors along the rows."""
        threads = self.warps * WARP
        count = rows * columns // vector
        with _named(T.serial, -(-count // threads), "turn") as turn:
            index = turn * threads + self.thread

            def element() -> None:
                if vector == 1:
                    body(index // columns, index % columns)
                    return
                with _named(T.vectorized, vector, "lane") as lane:
                    body(index // (columns // vector), index % (columns // vector) * vector + lane)

            if count % threads:
                with T.If(index < count), T.Then():
                    element()
            else:
                element()

    # ---- the results

    def _leave(self, row: Expr) -> None:
        """One row of every warp's fragments: to shared memory, through the final statement, to the output."""
        roles, schedule = self.roles, self.schedule
        width = _strip_shape(roles, schedule)[1]
        warp_row = self.warp // self.warps_n * FRAGMENT
        warp_column = self.warp % self.warps_n * schedule.thread_of[roles.n]
        with _named(T.unroll, self.fragments_n, "j") as j:
            pointer = self.strip.access_ptr("w", offset=warp_row * width + warp_column + j * FRAGMENT)
            source = _fragment(self.accumulators, row * self.fragments_n + j)
            T.evaluate(T.tvm_store_matrix_sync(*source, pointer, width, "row_major"))
        vector = math.gcd(
            schedule.vector_of.get(self.form.expr.output.name, RESULT_VECTOR), store_vector(self.form, schedule)
        )
        vector = math.gcd(vector, RESULT_VECTOR)

        def store(strip_row: Expr, column: Expr) -> None:
            m = strip_row // FRAGMENT * schedule.thread_of[roles.m] + row * FRAGMENT + strip_row % FRAGMENT
            axes = {**self.origin, roles.m: self.origin[roles.m] + m, roles.n: self.origin[roles.n] + column}
            value = self._final(axes, self.strip[strip_row * width + column])
            inside = [axes[axis] < self.form.sizes[axis] for axis in (roles.m, roles.n) if self._is_padded(axis)]
            if not inside:
                T.buffer_store(self.output, value, [axes[axis] for axis in self.form.final.axes])
                return
            with T.If(tirx.all(*inside)), T.Then():
                T.buffer_store(self.output, value, [axes[axis] for axis in self.form.final.axes])

        self._share_out(schedule.threads_of[roles.m] * FRAGMENT, schedule.block_of[roles.n], vector, store)

    def _is_padded(self, axis: str) -> bool:
        return self.padded[axis] > self.form.sizes[axis]

    def _final(self, axes: Mapping[str, Expr], result: Expr) -> Expr:
        """The final statement at one element of the output, its guarded loads read only where they exist."""
        form = self.form

        def read(load: Load) -> Expr:
            if load.tensor == form.reductions[0].tensor:
                return result
            value = guarded_read(load, self.tensors[load.tensor], self._source(load), axes, form.sizes)
            return value.astype(self.dtype)

        return evaluate(form.final.value, axes, read, self.dtype).astype(form.expr.output.dtype)

    def _source(self, load: Load) -> Callable[..., Expr]:
        """The tensor of ``load`` as a function of its indices."""
        buffer = self.buffers[load.tensor]
        return lambda *indices: buffer[indices]


def _allocate(name: str, elements: int, dtype: str, scope: str) -> Any:
    buffer = T.alloc_buffer((elements,), dtype, scope=scope)
    IRBuilder.name(name, buffer)
    return buffer


@contextmanager
def _named(loop: Callable[[int], Any], extent: int, name: str) -> Iterator[Expr]:
    """A loop whose variable has a name of its own in the source."""
    with loop(extent) as variable:
        IRBuilder.name(name, variable)
        yield variable


def _fragment(fragments: Any, index: Expr) -> tuple[Any, int, int, int, Expr]:
    """The arguments by which every wmma intrinsic names a fragment."""
    return fragments.data, FRAGMENT, FRAGMENT, FRAGMENT, index
