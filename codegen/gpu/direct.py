"""Kernels whose threads read tensors in place and share nothing: what element-wise functions and windows share.

Written directly as statements, like :mod:`codegen.gpu.staged.kernel`. Results leave as vectors
(:mod:`codegen.gpu.adjacent`).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.adjacent import AdjacentResults
from codegen.gpu.staged.threads import ThreadTile
from codegen.tir.bounds import Bounds
from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered, identifier
from codegen.tir.reads import VECTOR_ANY, padded_sizes, read_in_place
from codegen.tir.statements import named
from codegen.tir.values import Expr, evaluate
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Load
from sokoban.language.names import fresh_name
from sokoban.schedule.accesses import VECTOR_BYTES, store_vector
from sokoban.schedule.tile import TileSchedule

ZERO = tirx.const(0, "int32")

#: A place among a thread's elements, by axis or dimension.
Place = Mapping[str, Expr]


class DirectKernel(ABC):
    """One kernel; :meth:`elements` is what a thread does for its elements of one virtual copy.

    Attributes:
        own: adjacent elements of a thread, by axis.
        ranges: sizes of all axes in whole threads' elements.
        first: first element of the thread in the current copy, by axis; of a thread beyond the output its last one.
    """

    def __init__(self, form: KernelForm, schedule: TileSchedule, entry: str) -> None:
        self.form, self.schedule, self.entry = form, schedule, entry
        self.tensors = form.expr.tensor_by_name
        self.padded = padded_sizes(form, schedule)
        self.bounds = Bounds(form)
        self.own = dict(schedule.thread_of)
        self.ranges = {
            axis: -(-size // self.own.get(axis, 1)) * self.own.get(axis, 1) for axis, size in form.sizes.items()
        }
        self.first: Place = {}
        self._names = set(self.tensors)

    def run(self) -> Lowered:
        """The kernel."""
        form, schedule = self.form, self.schedule
        module = written(self.entry, self._function)
        grid, block = (schedule.grid_blocks(form.sizes), 1, 1), (schedule.threads_per_block, 1, 1)
        return Lowered(
            module=module, entry=self.entry, grid=grid, block=block, shared_bytes=0, dynamic_shared_bytes=0,
            launch=self.bounds.shape(schedule),
        )  # fmt: skip

    def _function(self) -> None:
        expr = self.form.expr
        self.sources = {tensor.name: parameter(tensor) for tensor in expr.inputs}
        self.output = parameter(expr.output)
        self.bounds.declare()
        self._kernel()

    @abstractmethod
    def elements(self) -> None:
        """Statements for a thread's elements from :attr:`first` on."""

    def name(self, wanted: str) -> str:
        """``wanted``, numbered where the kernel has it already."""
        name = fresh_name(wanted, self._names)
        self._names.add(name)
        return name

    def _kernel(self) -> None:
        """Threads beyond the output compute its last elements again and store nothing: a branch around all of it makes
        compilers guard every load by a branch of its own."""
        schedule, axes = self.schedule, self.form.final.axes
        last = {axis: (self.bounds.tiles(axis, self.own[axis]) - 1) * self.own[axis] for axis in axes}
        beyond = {axis for axis in axes if self.padded[axis] > self.ranges[axis]}
        with (
            T.launch_thread("blockIdx.x", schedule.grid_blocks(self.form.sizes)) as block,
            T.launch_thread("threadIdx.x", schedule.threads_per_block) as thread,
            T.attr(ZERO, "pragma_unroll_explicit", 0),
        ):
            places, origin = ThreadTile(axes, schedule).places(thread), self._block_origin(block)
            for copy in itertools.product(*(range(schedule.vthreads_of[axis]) for axis in axes)):
                moved = {
                    axis: number * schedule.threads_of[axis] * self.own[axis]
                    for axis, number in zip(axes, copy, strict=True)
                }
                place = {axis: origin[axis] + places[axis] + moved[axis] for axis in axes}
                self.first = {
                    axis: tirx.min(place[axis], last[axis]) if axis in beyond else place[axis] for axis in axes
                }
                self._exists = [place[axis] <= last[axis] for axis in axes if axis in beyond]
                self.elements()

    def _block_origin(self, block: Expr) -> dict[str, Expr]:
        """First element of the block along every spatial axis: blocks count the output's last axis fastest."""
        origin: dict[str, Expr] = {}
        axes = self.form.final.axes
        for axis in reversed(axes):
            size = self.schedule.block_of[axis]
            count = self.bounds.tiles(axis, size)
            outer, within = Bounds.split(block, count)
            origin[axis], block = (within if axis != axes[0] else block) * size, outer
        return origin

    # ---- results

    def store(self, result: Callable[[Expr], Expr] | None = None) -> None:
        """The final statement at every element that exists, as vectors along the last axis.

        ``result`` gives the reduction's result for an element of the thread by its number.
        """
        form, last = self.form, self.form.final.axes[-1]
        allowed = store_vector(form, self.schedule, VECTOR_BYTES)
        width = math.gcd(self.schedule.vector_of.get(form.expr.output.name, VECTOR_ANY), allowed)
        results = AdjacentResults(form, width, self.sources, self.name)

        def leave(place: Place) -> None:
            axes = {axis: self.first[axis] + offset for axis, offset in place.items()}

            def value(element_axes: Place, taken: Mapping[Load, Expr], lane: Expr) -> Expr:
                return self._final(
                    element_axes, taken, None if result is None else result(number(self.own, place) + lane)
                )

            results.store(self.output, axes, value)

        def guarded(place: Place) -> None:
            place = {**place, last: place[last] * width}
            partial = [axis for axis in form.final.axes if self.ranges[axis] > form.sizes[axis]]
            when([self.first[axis] + place[axis] < self.bounds.size(axis) for axis in partial], lambda: leave(place))

        extents = {**self.own, last: self.own[last] // width}
        when(self._exists, lambda: nest(form.final.axes, extents, {}, guarded))

    def _final(self, axes: Place, taken: Mapping[Load, Expr], result: Expr | None) -> Expr:
        form, dtype = self.form, self.form.expr.final_dtype

        def read(load: Load) -> Expr:
            if result is not None and load.tensor == form.reductions[0].tensor:
                return result.astype(dtype)
            return read_in_place(load, self.tensors, self.sources, axes, form.sizes, taken).astype(dtype)

        return evaluate(form.final.value, axes, read, dtype).astype(form.expr.output.dtype)


def when(conditions: Sequence[Expr], body: Callable[[], None]) -> None:
    """``body`` where all conditions hold, without a branch where there are none."""
    if not conditions:
        body()
        return
    with T.If(tirx.all(*conditions)), T.Then():
        body()


def nest(axes: Sequence[str], extents: Mapping[str, int], place: Place, body: Callable[[Place], None]) -> None:
    """``body`` at every point of unrolled loops over ``axes``, besides ``place`` along other axes."""
    if not axes:
        body(place)
    elif extents[axes[0]] == 1:
        nest(axes[1:], extents, {**place, axes[0]: ZERO}, body)
    else:
        with named(T.unroll, extents[axes[0]], identifier(axes[0])) as index:
            nest(axes[1:], extents, {**place, axes[0]: index}, body)


def number(extents: Mapping[str, int], place: Place) -> Expr:
    """Row-major number of a place in a box."""
    total: Expr = ZERO
    for name, extent in extents.items():
        total = total * extent + place[name]
    return total
