"""Windows read in place: depthwise convolutions and pools whose threads compute patches of outputs from registers.

A thread walks its patch of the input row by row: it loads a row's elements once, checked against the tensor's edges,
and adds what they contribute to every output whose window they lie in (:mod:`sokoban.schedule.windows`). TVM's
schedules loop over windows outside of outputs, so that compilers find equal loads only where they unroll everything
themselves, which they do not for large patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.direct import ZERO, DirectKernel, Place, nest, number
from codegen.tir.lowered import Lowered, identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.statements import local_buffer, named
from codegen.tir.values import Expr, affine, combine, constant, evaluate, identity
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Load
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.windows import reads_patches, slide_of, slides


def takes(request: TileRequest) -> bool:
    """Windows that threads read in place, :func:`sokoban.schedule.windows.reads_patches`."""
    return reads_patches(request.problem, request.schedule)


def lower(request: TileRequest) -> Lowered:
    """The kernel of a depthwise convolution or pool."""
    return WindowLowering(request.problem, request.schedule, request.entry).run()


class WindowLowering(DirectKernel):
    """One kernel, the statements of a patch in the order in which :meth:`elements` writes them."""

    def __init__(self, form: KernelForm, schedule: TileSchedule, entry: str) -> None:
        super().__init__(form, schedule, entry)
        assert form.reduction is not None
        self.reduction, self.dtype = form.reduction, form.expr.accumulate
        self.slide = slide_of(form, self.own)
        #: Points of the reduction and a thread's elements, by axis.
        self.extents = {axis: form.sizes[axis] for axis in form.reduced} | self.own

    def elements(self) -> None:
        outputs = math.prod(self.own.values())
        self.accumulators = local_buffer(self.name("accumulators"), outputs, self.dtype)
        with named(T.unroll, outputs, "i") as i:
            T.buffer_store(self.accumulators, identity(self.reduction.function, self.dtype), [i])
        self.patches = {load: _Patch(self, load) for load in self.form.body_loads if load.indices}
        for patch in self.patches.values():
            if patch.walked is None:
                patch.load(ZERO)
        if self.slide is None:
            self._add({})
        else:
            self._walk(self.slide.axis, self.slide.window)
        self.store(lambda element: self.accumulators[element])

    def _walk(self, axis: str, window: str) -> None:
        """Row by row of what the windows cover: those outputs that a row belongs to.

        Rows are written out one by one: compilers that unroll them turn guarded loads into branches.
        """
        slide, size = self.slide, self.form.sizes[window]
        assert slide is not None
        for row in range(slide.stride * (self.own[axis] - 1) + slide.dilation * (size - 1) + 1):
            outputs = [divmod(row - point * slide.dilation, slide.stride) for point in range(size)]
            belongs = {
                point: output
                for point, (output, remainder) in enumerate(outputs)
                if not remainder and 0 <= output < self.own[axis]
            }
            for patch in self.patches.values() if belongs else ():
                if patch.walked is not None:
                    patch.load(tirx.const(row, "int32"))
            for point, output in belongs.items():
                self._add({axis: tirx.const(output, "int32"), window: tirx.const(point, "int32")})

    def _add(self, fixed: Place) -> None:
        """Add the loaded elements to a thread's outputs, at all points that agree with the ``fixed`` places."""

        def body(point: Place) -> None:
            axes = {axis: point[axis] + self.first.get(axis, ZERO) for axis in self.extents}

            def read(load: Load) -> Expr:
                patch = self.patches.get(load)
                value = self.sources[load.tensor][0] if patch is None else patch.element(point)
                return value.astype(self.dtype)

            value = evaluate(self.reduction.body, axes, read, self.dtype)
            accumulator = number(self.own, point)
            total = combine(self.reduction.function, self.accumulators[accumulator], value)
            T.buffer_store(self.accumulators, total, [accumulator])

        nest([axis for axis in self.extents if axis not in fixed], self.extents, fixed, body)


class _Patch:
    """A thread's elements of one tensor in registers: a box, or one row of it at a time."""

    def __init__(self, lowering: WindowLowering, load: Load) -> None:
        self.lowering, self._load = lowering, load
        self.tensor = lowering.tensors[load.tensor]
        slide, extents = lowering.slide, lowering.extents
        #: The dimension that is walked row by row.
        self.walked = slide.position if slide is not None and slides(load, slide) else None
        self.terms: list[list[tuple[str, int]]] = []
        self.extents: dict[str, int] = {}
        self.strides: list[int] = []
        for position, index in enumerate(load.indices):
            terms = [(axis, c) for axis, c in index.terms if extents.get(axis, 1) > 1 and position != self.walked]
            stride = math.gcd(*(c for _, c in terms)) if terms else 1
            self.terms.append([(axis, c // stride) for axis, c in terms])
            self.extents[f"at{position}"] = 1 + sum(c // stride * (extents[axis] - 1) for axis, c in terms)
            self.strides.append(stride)
        name = lowering.name(f"{identifier(load.tensor)}_patch")
        self.values = local_buffer(name, math.prod(self.extents.values()), self.tensor.dtype)

    def load(self, row: Expr) -> None:
        """All elements, or those of one row; the pad value outside the tensor."""
        axes = {**dict.fromkeys(self.lowering.form.reduced, ZERO), **self.lowering.first}
        base = [affine(index, axes) for index in self._load.indices]

        def load_element(place: Place) -> None:
            steps = zip(base, place.values(), self.strides, strict=True)
            indices = [start + step * stride for start, step, stride in steps]
            if self.walked is not None:
                indices[self.walked] = base[self.walked] + row
            value = self.lowering.sources[self.tensor.name][tuple(indices)]
            conditions = self._conditions(indices)
            if conditions:
                outside = constant(self._load.pad or 0.0, self.tensor.dtype)
                value = tirx.if_then_else(tirx.all(*conditions), value, outside)
            T.buffer_store(self.values, value, [number(self.extents, place)])

        nest(list(self.extents), self.extents, {}, load_element)

    def _conditions(self, indices: Sequence[Expr]) -> list[Expr]:
        """Conditions under which indices are inside the tensor, where a thread's patch may reach beyond it."""
        conditions = []
        bounds = self.lowering.bounds
        for position, (index, place) in enumerate(zip(self._load.indices, indices, strict=True)):
            size = self.tensor.shape[position]
            low, high = index.bounds(self.lowering.ranges)
            if low < 0:
                conditions.append(place >= 0)
            if high >= size:
                conditions.append(place < bounds.extent(self.tensor.name, position, size))
        return conditions

    def element(self, point: Place) -> Expr:
        """The element that an output of the thread reads at a point of its window."""
        pairs = zip(self.extents, self.terms, strict=True)
        places = {name: sum((point[axis] * c for axis, c in terms), ZERO) for name, terms in pairs}
        return self.values[number(self.extents, places)]
