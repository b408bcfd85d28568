"""Operators of long lines in parts; :mod:`roller.algorithms.split_line` says when that is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from roller.algorithms.slices import Slices
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import (
    REDUCTION_IDENTITY,
    AffineIndex,
    Axis,
    AxisValue,
    Call,
    Constant,
    GatheredIndex,
    Load,
    Reduction,
    Scan,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    rewrite,
    walk,
)
from sokoban.language.names import fresh_name

#: What accumulates -> the function of two values that does the same.
_COMBINED = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}
_VALUE = {"argmax": "max", "argmin": "min"}
#: Places up to here are numbers in float32.
EXACT_PLACES = 2**24


class LineParts:
    """The operators that make up one whose lines are in parts.

    Args:
        form: a scan, a place, or values or places by rank.
        slices: parts of its line; the last one may be shorter.
    """

    def __init__(self, form: KernelForm, slices: Slices) -> None:
        self.kernel, self.slices = form.line_kernel, slices
        self.expr, self.axis = self.kernel.expr, slices.axis
        self.line, self.final, self.walk = self.kernel.line, self.kernel.final, self.kernel.walk
        self.tensors, self.rank = self.expr.tensor_by_name, self.kernel.rank_axis
        self.is_whole = slices.count * slices.length == self.kernel.length
        self.names = {*self.tensors, *form.sizes}
        self.part, self.candidate = self._name(f"{self.axis}_part"), self._name(f"{self.axis}_candidate")
        self.candidates = slices.count * self.kernel.ranks
        self.function = _VALUE.get(self.walk.function, self.walk.function)

    @cached_property
    def forms(self) -> tuple[KernelForm, ...]:
        """The kernels' operators, in order."""
        if self.kernel.is_scan:
            return self._scan()
        assert isinstance(self.walk, Reduction)
        return self._places(self.walk) if self.walk.is_place else self._values(self.walk)

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of the axes of all of them, the line's in a part."""
        parts = {self.part: self.slices.count, self.axis: self.slices.length, self.candidate: self.candidates}
        return {**self.kernel.sizes, **parts}

    # ---- scans

    def _scan(self) -> tuple[KernelForm, ...]:
        walk = self.walk
        assert isinstance(walk, Scan)
        by_part, by_both = (self._cut(self.line.axes, by) for by in ((self.part,), (self.part, self.axis)))
        total, until = (self._tensor(word, by_part, self.expr.accumulate) for word in ("totals", "until"))
        body = self._body(REDUCTION_IDENTITY[walk.function])
        totals = Statement(total.name, by_part, Reduction(walk.function, (self.axis,), body))
        behind = Statement(
            until.name, by_part, Scan(walk.function, self.part, _element(total, by_part), walk.is_reversed)
        )
        # What comes before the first part changes nothing.
        step = 1 if walk.is_reversed else -1
        indices = [AffineIndex.of({axis: 1}, step if axis == self.part else 0) for axis in by_part]
        before = Load(until.name, tuple(indices), pad=REDUCTION_IDENTITY[walk.function])
        own = replace(self.tensors[self.line.tensor], shape=self._shape(by_both))
        line = Statement(own.name, by_both, replace(walk, body=body))
        result = Call(_COMBINED[walk.function], (before, _element(own, by_both)))
        first = [self._form([totals], [total], [*by_part, self.axis]), self._form([behind], [total, until], by_part)]
        if self.is_whole:
            output = self._view(self.expr.output)
            axes = self._cut(self.final.axes, (self.part, self.axis))
            final = Statement(output.name, axes, self._viewed(self.final.value, {self._own: result}))
            return (*first, self._form([line, final], [until, own, output], axes))
        # Behind the end of the last part lies nothing of the output's.
        longer = self._tensor("parts", by_both, self.expr.accumulate)
        third = self._form([line, Statement(longer.name, by_both, result)], [until, own, longer], by_both)
        extent = self.slices.count * self.slices.length
        flat_shape = tuple(extent if axis == self.axis else self.kernel.sizes[axis] for axis in self.line.axes)
        flat = replace(longer, shape=flat_shape, external_shape=longer.shape)
        value = rewrite(self.final.value, {self._own: _element(flat, self.line.axes)})
        last = self._form(
            [replace(self.final, value=value)], [flat, self.expr.output], self.final.axes, sizes=self.kernel.sizes
        )
        return (*first, third, last)

    # ---- places and ranks

    def _places(self, walk: Reduction) -> tuple[KernelForm, ...]:
        worst = REDUCTION_IDENTITY[self.function]
        given = (*self._rows, self.part, *self._ranks)
        place = self._tensor("places", given, "int32")
        own = replace(self.tensors[self.line.tensor], shape=self._shape(given))
        number = AxisValue(AffineIndex.of({self.part: self.slices.length}))
        line = Statement(own.name, given, replace(walk, axes=(self.axis,), body=self._body(worst)))
        whole = Statement(place.name, given, Call("add", (number, _element(own, given))))
        first = self._form([line, whole], [own, place], [*given, self.axis])
        several = (*self._rows, self.candidate)
        flat = replace(place, shape=self._shape(several), external_shape=place.shape)
        at = _element(flat, several)
        body = self._gathered(walk.body, at)
        if not self.is_whole:
            body = Call("select", (Call("lt", (at, Constant(float(self.kernel.length)))), body, Constant(worst)))
        best = self._tensor("candidates", self.line.axes, "int32")
        second = self._form(
            [Statement(best.name, self.line.axes, replace(walk, axes=(self.candidate,), body=body))],
            [flat, best],
            [*self.line.axes, self.candidate],
            whole=True,
        )
        chosen = _number(_element(best, self.line.axes), self.candidates)
        found = Load(flat.name, (*map(AffineIndex.axis, self._rows), chosen))
        final = replace(self.final, value=rewrite(self.final.value, {self._own: found}))
        third = self._form([final], [flat, best, self.expr.output], self.final.axes)
        return first, second, third

    def _values(self, walk: Reduction) -> tuple[KernelForm, ...]:
        given = (*self._rows, self.part, *self._ranks)
        best = self._tensor("best", given, self.expr.accumulate)
        body = self._body(REDUCTION_IDENTITY[self.function])
        first = self._form(
            [Statement(best.name, given, replace(walk, axes=(self.axis,), body=body))], [best], [*given, self.axis]
        )
        several = (*self._rows, self.candidate)
        flat = replace(best, shape=self._shape(several), external_shape=best.shape)
        line = replace(self.line, value=replace(walk, axes=(self.candidate,), body=_element(flat, several)))
        own = self.tensors[self.line.tensor]
        axes = [*self.final.axes, self.candidate]
        return first, self._form([line, self.final], [flat, own, self.expr.output], axes)

    @property
    def _rows(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.line.axes if axis != self.rank)

    @property
    def _ranks(self) -> tuple[str, ...]:
        return () if self.rank is None else (self.rank,)

    # ---- parts of expressions

    @property
    def _own(self) -> Load:
        return _element(self.tensors[self.line.tensor], self.line.axes)

    def _name(self, wanted: str) -> str:
        name = fresh_name(wanted, self.names)
        self.names.add(name)
        return name

    def _shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in axes)

    def _tensor(self, word: str, axes: Sequence[str], dtype: str) -> Tensor:
        return Tensor(self._name(f"{self.expr.output.name}_{word}"), self._shape(axes), dtype)

    def _cut(self, axes: Sequence[str], by: tuple[str, ...]) -> tuple[str, ...]:
        """Axes with others in place of the line's."""
        place = tuple(axes).index(self.axis)
        return (*axes[:place], *by, *axes[place + 1 :])

    def _form(
        self,
        statements: list[Statement],
        made: list[Tensor],
        axes: Sequence[str],
        *,
        sizes: Mapping[str, int] | None = None,
        whole: bool = False,
    ) -> KernelForm:
        """An operator of some statements: of the caller's tensors in parts, or ``whole``, and of others as they are."""
        written = [each.tensor for each in statements]
        others = {tensor.name: tensor for tensor in made}
        read = dict.fromkeys(load.tensor for each in statements for load in loads(each.value))
        viewed = self.tensors.__getitem__ if whole or not self.is_whole else lambda name: self._view(self.tensors[name])
        inputs = [others.get(name) or viewed(name) for name in read if name not in written]
        elements = self.sizes if sizes is None else sizes
        return kernel_form(
            replace(
                self.expr,
                axes=tuple(Axis(axis, elements[axis]) for axis in axes),
                tensors=(*inputs, *(others[name] for name in written)),
                statements=tuple(statements),
            )
        )

    def _view(self, tensor: Tensor) -> Tensor:
        """A tensor with its dimension of the line, if any, cut in two."""
        place = dimension_of(self.expr, tensor.name, self.axis)
        if place is None:
            return tensor
        shape = (*tensor.shape[:place], self.slices.count, self.slices.length, *tensor.shape[place + 1 :])
        return replace(tensor, shape=shape, external_shape=tensor.caller_shape)

    def _body(self, beyond: float) -> Value:
        """The value that lines are of, over parts; ``beyond`` behind the end of the last."""
        if self.is_whole:
            return self._viewed(self.kernel.body)
        index = self._index
        changes: dict[Value, Value] = {}
        for node in walk(self.kernel.body):
            if isinstance(node, Load) and any(each.coefficient(self.axis) for each in node.indices):
                indices = tuple(each.substitute({self.axis: index}) for each in node.indices)
                changes[node] = replace(node, indices=indices, pad=node.pad or 0.0)
        inside = Call("lt", (AxisValue(index), Constant(float(self.kernel.length))))
        return Call("select", (inside, self._counted(self.kernel.body, changes), Constant(beyond)))

    @property
    def _index(self) -> AffineIndex:
        return AffineIndex.of({self.part: self.slices.length, self.axis: 1})

    def _viewed(self, value: Value, more: dict[Value, Value] | None = None) -> Value:
        """A value of views, over a part and the axis within it."""
        changes: dict[Value, Value] = dict(more or {})
        for node in walk(value):
            if isinstance(node, Load) and node not in changes:
                place = next((at for at, each in enumerate(node.indices) if each.coefficient(self.axis)), None)
                if place is not None:
                    cut = (AffineIndex.axis(self.part), AffineIndex.axis(self.axis))
                    changes[node] = replace(node, indices=(*node.indices[:place], *cut, *node.indices[place + 1 :]))
        return self._counted(value, changes)

    def _counted(self, value: Value, changes: dict[Value, Value]) -> Value:
        """A value with changes, in which numbers of elements are those of the whole line."""
        for node in walk(value):
            if isinstance(node, AxisValue):
                changes[node] = AxisValue(node.index.substitute({self.axis: self._index}))
        return rewrite(value, changes)

    def _gathered(self, value: Value, at: Load) -> Value:
        """A value at the place of the line that a tensor holds."""
        index = _number(at, self.kernel.length)
        changes: dict[Value, Value] = {}
        for node in walk(value):
            if isinstance(node, Load):
                along = any(each.coefficient(self.axis) for each in node.indices)
                indices = tuple(index if each.coefficient(self.axis) else each for each in node.indices)
                changes[node] = replace(node, indices=indices) if along else node
        return rewrite(value, changes)


def _element(tensor: Tensor, axes: Sequence[str]) -> Load:
    return Load(tensor.name, tuple(map(AffineIndex.axis, axes)))


def _number(place: Load, extent: int) -> GatheredIndex:
    return GatheredIndex(terms=(), place=place, low=0, high=extent - 1)


def dimension_of(expr: TensorExpr, tensor: str, axis: str) -> int | None:
    """The dimension of a tensor of the caller's that an axis walks; None where it walks none."""
    if tensor == expr.output.name:
        axes = expr.statements[-1].axes
        return axes.index(axis) if axis in axes else None
    for statement in expr.statements:
        for load in loads(statement.value):
            if load.tensor == tensor:
                place = next((at for at, index in enumerate(load.indices) if index.coefficient(axis)), None)
                if place is not None:
                    return place
    return None


def can_cut(form: KernelForm) -> bool:
    """True if the axis of the line is one whole dimension of all that is read along it."""
    kernel = form.line_kernel
    if kernel.scatter is not None:
        return False
    axis, tensors = kernel.axis, kernel.expr.tensor_by_name
    if isinstance(kernel.walk, Reduction) and kernel.walk.is_place:
        if kernel.length > EXACT_PLACES and kernel.expr.accumulate != "float64":
            return False
        if any(isinstance(node, AxisValue) and axis in node.index.axes for node in walk(kernel.body)):
            return False  # The number of an element would be read from a tensor.
    for load in kernel.reads:
        places = [place for place, index in enumerate(load.indices) if axis in index.axes]
        if not places:
            if dimension_of(kernel.expr, load.tensor, axis) is not None:
                return False  # A tensor that is read along the axis and also across it has no single view.
            continue
        (place, *others) = places
        whole = tensors[load.tensor].shape[place] == kernel.length
        is_one = place == dimension_of(kernel.expr, load.tensor, axis)
        if others or not load.indices[place].is_plain_axis or not whole or not is_one:
            return False
    return any(axis in index.axes for load in loads(kernel.body) for index in load.indices)
