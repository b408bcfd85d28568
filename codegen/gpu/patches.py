"""Patch transforms as kernels: a thread per patch, which stays in registers between both products.

All loops are written out, and the numbers of the matrix are part of the statements: zeros are left out, ones cost no
multiplication. Patches that reach beyond their tensor are read at the nearest element inside and replaced after that,
so that no load depends on a branch and all of a thread's loads are under way together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.tir.function import parameter, written
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest
from codegen.tir.reads import guarded_read
from codegen.tir.statements import local_buffer, vector_write
from codegen.tir.values import Expr, affine, constant, evaluate
from sokoban.kernel.patches import COLUMN, OUT_COLUMN, OUT_ROW, RESULT, ROW, PatchTransform
from sokoban.language.expression import AffineIndex, Load
from sokoban.schedule.patches import PatchSchedule


def takes(request: LoweringRequest[PatchTransform, PatchSchedule]) -> bool:
    """Patch transforms."""
    return True


def lower(request: LoweringRequest[PatchTransform, PatchSchedule]) -> Lowered:
    """The kernel of a patch transform."""
    transform, schedule = request.problem, request.schedule
    return _PatchLowering(transform, schedule, request.entry).run()


class _PatchLowering:
    """One kernel, its statements in the order in which :meth:`_kernel` writes them."""

    def __init__(self, transform: PatchTransform, schedule: PatchSchedule, entry: str) -> None:
        self.transform, self.schedule, self.entry = transform, schedule, entry
        self.dtype = transform.accumulate
        self.sizes = transform.sizes
        self.tensors = transform.tensor_by_name

    def run(self) -> Lowered:
        blocks = self.schedule.blocks(self.transform)
        threads = self.schedule.threads
        module = written(self.entry, lambda: self._function(blocks))
        return Lowered(
            module=module,
            entry=self.entry,
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=0,
            dynamic_shared_bytes=0,
            has_barriers=True,  # no thread waits for another
        )

    def _function(self, blocks: int) -> None:
        self.sources = {tensor.name: parameter(tensor) for tensor in self.transform.inputs}
        output = self.transform.output
        self.output = parameter(output, (math.prod(output.shape),))
        with (
            T.launch_thread("blockIdx.x", blocks) as block,
            T.launch_thread("threadIdx.x", self.schedule.threads) as thread,
        ):
            self._kernel(block * self.schedule.threads + thread)

    def _kernel(self, number: Expr) -> None:
        """The thread of patch ``number``; threads beyond the last patch have nothing to do."""
        if self.transform.points % self.schedule.threads:
            with T.If(number < self.transform.points), T.Then():
                self._patch(self._places(number))
        else:
            self._patch(self._places(number))

    def _places(self, number: Expr) -> dict[str, Expr]:
        """Position of a patch along every axis, in registers; the last axis counts fastest."""
        axes = self.transform.axes
        places = local_buffer("places", len(axes), "int32")
        for position in reversed(range(len(axes))):
            size = axes[position].size
            T.buffer_store(places, tirx.floormod(number, size) if position else number, [position])
            number = tirx.floordiv(number, size)
        return {axis.name: places[position] for position, axis in enumerate(axes)}

    def _patch(self, places: Mapping[str, Expr]) -> None:
        patch, transformed = self.transform.patch, self.transform.transformed
        elements = local_buffer("patch", patch * patch, self.dtype)
        nearest = self._nearest(places)
        for i in range(patch):
            for j in range(patch):
                T.buffer_store(elements, self._element(places, nearest, {ROW: i, COLUMN: j}), [i * patch + j])
        halfway = local_buffer("halfway", transformed * patch, self.dtype)
        for a, row in enumerate(self.transform.matrix):
            for j in range(patch):
                column = [elements[i * patch + j] for i in range(patch)]
                T.buffer_store(halfway, self._sum(row, column), [a * patch + j])
        width = self.transform.store_width
        results = local_buffer("results", width, self.dtype)
        for a in range(transformed):
            row_elements = [halfway[a * patch + j] for j in range(patch)]
            for first in range(0, transformed, width):
                for b in range(first, first + width):
                    T.buffer_store(results, self._sum(self.transform.matrix[b], row_elements), [b - first])
                self._store({**places, **_at(OUT_ROW, a)}, first, results)

    def _sum(self, row: Sequence[float], elements: Sequence[Expr]) -> Expr:
        """A row of the matrix times some elements, those that are added as they are first: every other one is then a
        multiply-add."""
        total: Expr | None = None
        terms = [(element, number) for element, number in zip(elements, row, strict=True) if number]
        for element, number in sorted(terms, key=lambda term: (abs(term[1]) != 1.0, term[1] < 0)):
            term = element if abs(number) == 1.0 else element * constant(abs(number), self.dtype)
            if total is None:
                total = term if number > 0 else constant(0.0, self.dtype) - term
            else:
                total = total + term if number > 0 else total - term
        return constant(0.0, self.dtype) if total is None else total

    def _nearest(self, places: Mapping[str, Expr]) -> dict[tuple[int, AffineIndex], Expr]:
        """The nearest index inside the source, in registers, by dimension and index, of all that may lie outside."""
        nearest: dict[tuple[int, AffineIndex], Expr] = {}
        patch, source = range(self.transform.patch), self.transform.source
        for position, extent in enumerate(self.tensors[source.tensor].shape):
            for index in dict.fromkeys(_within(source.indices[position], {ROW: i, COLUMN: i}) for i in patch):
                place, (low, high) = affine(index, places), index.bounds(self.sizes)
                place = tirx.max(place, 0) if low < 0 else place
                place = tirx.min(place, extent - 1) if high >= extent else place
                if low < 0 or high >= extent:
                    nearest[position, index] = place
        registers = local_buffer("nearest", max(1, len(nearest)), "int32")
        for number, place in enumerate(nearest.values()):
            T.buffer_store(registers, place, [number])
        return {key: registers[number] for number, key in enumerate(nearest)}

    def _element(
        self, places: Mapping[str, Expr], nearest: Mapping[tuple[int, AffineIndex], Expr], at: Mapping[str, int]
    ) -> Expr:
        """An element of a patch, its pad value where it lies outside the source."""
        source = self.transform.source
        indices, inside = [], []
        for position, whole in enumerate(source.indices):
            index = _within(whole, at)
            place = affine(index, places)
            indices.append(nearest.get((position, index), place))
            if (position, index) in nearest:
                inside.append(tirx.EQ(indices[-1], place))
        value = self.sources[source.tensor][tuple(indices)].astype(self.dtype)
        if not inside:
            return value
        return tirx.Select(tirx.all(*inside), value, constant(source.pad or 0.0, self.dtype))

    def _store(self, places: Mapping[str, Expr], first: int, results: Any) -> None:
        """Some elements of a row of the transform, from column ``first`` on, as far as the output reaches."""
        transform, width = self.transform, self.transform.store_width
        axes = {**places, **_at(OUT_COLUMN, first)}
        indices = [affine(index, axes) for index in transform.target]
        address: Expr = tirx.const(0, "int32")
        beyond = []
        for place, index, extent in zip(indices, transform.target, transform.output.shape, strict=True):
            address = address * extent + place
            if index.bounds(self.sizes)[1] >= extent:
                beyond.append(place < extent)
        values = [
            self._value({**places, **_at(OUT_COLUMN, first + lane)}, results[lane]).astype(transform.output.dtype)
            for lane in range(width)
        ]

        def store() -> None:
            if width == 1:
                T.buffer_store(self.output, values[0], [address])
                return
            vector = local_buffer("row", width, transform.output.dtype)
            for lane, value in enumerate(values):
                T.buffer_store(vector, value, [lane])
            # In units of a vector, so that TVM sees that vectors are aligned.
            start = tirx.floordiv(address, width) * width
            vector_write(self.output, start, width, tirx.BufferLoad(vector, [tirx.Ramp(0, 1, width)]))

        if not beyond:
            store()
            return
        with T.If(tirx.all(*beyond)), T.Then():
            store()

    def _value(self, axes: Mapping[str, Expr], result: Expr) -> Expr:
        """The value that is stored for an element of the transform."""

        def read(load: Load) -> Expr:
            if load.tensor == RESULT:
                return result
            source, tensor = self.sources[load.tensor], self.tensors[load.tensor]
            return guarded_read(load, tensor, lambda *indices: source[indices], axes, self.sizes).astype(self.dtype)

        return evaluate(self.transform.value, axes, read, self.dtype)


def _at(axis: str, position: int) -> dict[str, Expr]:
    return {axis: tirx.const(position, "int32")}


def _within(index: AffineIndex, at: Mapping[str, int]) -> AffineIndex:
    """An index at a place within a patch: over the axes of patches alone."""
    terms = tuple(term for term in index.terms if term[0] not in at)
    return AffineIndex(terms, index.offset + sum(index.coefficient(axis) * place for axis, place in at.items()))
