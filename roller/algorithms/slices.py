"""An operator with a reduction in slices: two operators, one that reduces each slice and one that puts them together.

See :mod:`roller.algorithms.split_k`, which says when that is worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roller.algorithms.chain import needed_sizes
from roller.text.quantities import count_text
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import (
    AffineIndex,
    Axis,
    AxisValue,
    Load,
    Reduction,
    Statement,
    Tensor,
    Value,
    loads,
    rewrite,
    walk,
)
from sokoban.language.names import fresh_name
from sokoban.schedule.cutting import cut_sizes, resize
from sokoban.schedule.tile import TileSchedule

#: What becomes of every read of a tensor.
_Change = Callable[[Load], Load]


def _extent(form: KernelForm, axis: str) -> int:
    """Elements that the longest operand has along a reduction axis, the axis' own at least."""
    tensors = form.expr.tensor_by_name
    places = {name: place_of(form, name, axis) for name in {load.tensor for load in factors_of(form)}}
    extents = [tensors[name].shape[place] for name, place in places.items() if place is not None]
    return max(extents, default=form.sizes[axis])


@dataclass(frozen=True)
class Slices:
    """Reduction axis ``axis`` as ``count`` slices of ``length`` elements, the last one shorter where need be."""

    axis: str
    count: int
    length: int

    @property
    def text(self) -> str:
        """``16 slices of k``."""
        return f"{count_text(self.count, 'slice')} of {self.axis}"

    def problems(self, form: KernelForm) -> tuple[KernelForm, KernelForm]:
        """The operator that sums slices, and the one that adds them up; see :class:`roller.algorithms.chain.Split`."""
        return self._sums(form), self._adds(form)

    def cut_down(self, form: KernelForm, schedules: Sequence[TileSchedule]) -> tuple[KernelForm, Slices]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        first, second = self.problems(form)
        full = {**form.sizes, self.axis: self.length, self._slice_axis(form): self.count}
        wanted = [(part, cut_sizes(part, schedule)) for part, schedule in zip((first, second), schedules, strict=True)]
        small = needed_sizes(full, wanted)
        count, length = small.pop(self._slice_axis(form)), small[self.axis]
        short = min(self.count * self.length - form.sizes[self.axis], length - 1)
        cut = resize(form, {**small, self.axis: count * length - short})
        if self._covers(form):
            # Another load may want more of an operand: slices then cover it, as they do.
            count = max(count, -(-_extent(cut, self.axis) // length))
            cut = resize(form, {**small, self.axis: count * length})
        return cut, Slices(self.axis, count, length)

    def tolerance(self, form: KernelForm) -> float | None:
        """The dtype's: sums of sums err less than one long sum."""
        return None

    def _slice_axis(self, form: KernelForm) -> str:
        return fresh_name(f"{self.axis}_slice", form.sizes)

    def _partial(self, form: KernelForm) -> Tensor:
        statement = form.reductions[0]
        name = fresh_name(f"{form.expr.output.name}_slices", form.expr.tensor_by_name)
        return Tensor(name, (self.count, *(form.sizes[axis] for axis in statement.axes)), form.expr.accumulate)

    def _sums(self, form: KernelForm) -> KernelForm:
        statement, reduction = form.reductions[0], form.reduction
        assert reduction is not None
        part, partial = self._slice_axis(form), self._partial(form)
        body = self._views(form, part) if self._covers(form) else self._guarded(form, part)
        sizes = {**{axis: form.sizes[axis] for axis in (*statement.axes, *reduction.axes)}, self.axis: self.length}
        tensors = form.expr.tensor_by_name
        read = dict.fromkeys(load.tensor for load in loads(reduction.body))
        inputs = [self._viewed(form, tensors[name]) if self._covers(form) else tensors[name] for name in read]
        value = Reduction(reduction.function, reduction.axes, body)
        expr = replace(
            form.expr,
            axes=(Axis(part, self.count), *(Axis(axis, size) for axis, size in sizes.items())),
            tensors=(*inputs, partial),
            statements=(Statement(partial.name, (part, *statement.axes), value),),
        )
        return kernel_form(expr)

    def _adds(self, form: KernelForm) -> KernelForm:
        part, partial = self._slice_axis(form), self._partial(form)
        indices = map(AffineIndex.axis, (part, *form.reductions[0].axes))
        return sum_of_slices(form, partial, Load(partial.name, tuple(indices)), Axis(part, self.count))

    def divides(self, form: KernelForm) -> bool:
        """True if all slices are whole."""
        return self.count * self.length == form.sizes[self.axis]

    def _covers(self, form: KernelForm) -> bool:
        """True if slices are whole and are all that the operands have along the axis."""
        return self.divides(form) and form.sizes[self.axis] == _extent(form, self.axis)

    def _index(self, part: str) -> AffineIndex:
        return AffineIndex.of({part: self.length, self.axis: 1})

    def _viewed(self, form: KernelForm, tensor: Tensor) -> Tensor:
        """The tensor with its dimension of the reduction axis cut in two."""
        place = place_of(form, tensor.name, self.axis)
        if place is None:
            return tensor
        shape = (*tensor.shape[:place], self.count, self.length, *tensor.shape[place + 1 :])
        return replace(tensor, shape=shape, external_shape=tensor.caller_shape)

    def _views(self, form: KernelForm, part: str) -> Value:
        def changed(load: Load) -> Load:
            place = place_of(form, load.tensor, self.axis)
            if place is None:
                return load
            cut = (AffineIndex.axis(part), AffineIndex.axis(self.axis))
            return replace(load, indices=(*load.indices[:place], *cut, *load.indices[place + 1 :]))

        return self._rewritten(form, part, changed)

    def _guarded(self, form: KernelForm, part: str) -> Value:
        indices = {self.axis: self._index(part)}

        def changed(load: Load) -> Load:
            if not any(index.coefficient(self.axis) for index in load.indices):
                return load
            return replace(load, indices=tuple(index.substitute(indices) for index in load.indices), pad=0.0)

        return self._rewritten(form, part, changed)

    def _rewritten(self, form: KernelForm, part: str, changed: _Change) -> Value:
        changes: dict[Value, Value] = {}
        for node in walk(form.body):
            if isinstance(node, Load):
                changes[node] = changed(node)
            elif isinstance(node, AxisValue):
                changes[node] = AxisValue(node.index.substitute({self.axis: self._index(part)}))
        return rewrite(form.body, changes)


def factors_of(form: KernelForm) -> tuple[Load, ...]:
    """Reads of the reduction that lie along its axes: operands, and the scales of a product of matrices."""
    return (*form.body_loads, *form.scale_loads)


def place_of(form: KernelForm, tensor: str, axis: str) -> int | None:
    """The dimension of a tensor that the axis walks in its first read."""
    for load in factors_of(form):
        if load.tensor == tensor:
            return next((place for place, index in enumerate(load.indices) if index.coefficient(axis)), None)
    return None


def sum_of_slices(form: KernelForm, partial: Tensor, value: Load, part: Axis) -> KernelForm:
    """The kernel that puts slices of an operator's reduction together, and finishes it.

    Args:
        form: the operator.
        partial: results of the slices.
        value: the element of a slice's results along the axes of the reduction's statement.
        part: the axis of the slices.
    """
    statement, reduction, tensors = form.reductions[0], form.reduction, form.expr.tensor_by_name
    assert reduction is not None
    read = dict.fromkeys(load.tensor for load in form.final_loads)
    added = Statement(statement.tensor, statement.axes, Reduction(reduction.function, (part.name,), value))
    expr = replace(
        form.expr,
        axes=(*(Axis(axis, form.sizes[axis]) for axis in form.final.axes), part),
        tensors=(partial, *(tensors[name] for name in read), tensors[statement.tensor], form.expr.output),
        statements=(added, form.final),
    )
    return kernel_form(expr)
