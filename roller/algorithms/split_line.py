"""Long lines in parts: a scan, or a place along an axis, that different blocks share.

A kernel of lines has a block for every line, or several lines to a block: few lines leave units idle, however long they
are. A cumulative sum of ``P`` parts of ``C`` elements is the chain::

    T[l,p]   = sum(c, X[l, p*C + c])
    U[l,p]   = cumsum(p, T[l,p])
    Y[l,p,c] = U[l, p-1 | pad=0] + cumsum(c, X[l, p*C + c])

and the place of the largest value::

    T[l,p] = max(c, X[l, p*C + c])
    U[l]   = argmax(p, T[l,p])
    Y[l]   = U[l] * C + argmax(c, X[l, U[l]*C + c])

Totals come in the order of the line, whichever block is first, so that results are the same in every run. One pass with
decoupled look-back (D. Merrill and M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016) would
read a scan's elements once instead of twice, and add up in an order that changes from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hal.spec.device import DeviceSpec
from roller.algorithms.chain import ChainProgram, Considered, needed_sizes
from roller.algorithms.line import NAME as WHOLE
from roller.algorithms.line import WholeLine, line_parts, line_sizes
from roller.algorithms.slices import Slices
from roller.algorithms.split_k import NEAR_BOUND, nearest_divisor
from roller.construct.construct import construct
from roller.construct.program import ProgramPart
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.problem import Problem
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
from sokoban.schedule.cutting import cut_sizes, resize
from sokoban.schedule.patches import LineSchedule
from sokoban.schedule.tile import TileSchedule

#: The name of the algorithm.
NAME = "split-line"

#: Parts that every unit gets of all lines together.
PARTS_PER_UNIT = (1, 2, 4, 8, 16)
#: How many times fewer or more there may be: only whole ones are cut.
SNAP = 2.0
#: Fewest elements of a part: with fewer a block does little more than wait for them.
LEAST_ELEMENTS = 256

#: What accumulates -> the function of two values that does the same.
_COMBINED = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}
_LARGEST = {"argmax": "max", "argmin": "min"}


@dataclass(frozen=True)
class SlicedLine:
    """A scan or place by parts of its line; see :class:`roller.algorithms.chain.Split`."""

    slices: Slices

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernels: what every part comes to, what all parts up to each come to, and the results."""
        totals, before, results = self.forms(form)
        return totals, before.line_kernel, results.line_kernel

    def forms(self, form: KernelForm) -> tuple[KernelForm, KernelForm, KernelForm]:
        """Operators of the kernels."""
        parts = _Parts(form, self.slices)
        return parts.totals(), parts.before(), parts.results()

    def cut_down(
        self, form: KernelForm, schedules: Sequence[TileSchedule | LineSchedule]
    ) -> tuple[KernelForm, SlicedLine]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        totals, before, results = self.forms(form)
        first, second, third = schedules
        assert isinstance(first, TileSchedule) and isinstance(second, LineSchedule) and isinstance(third, LineSchedule)
        axis, part = self.slices.axis, _Parts(form, self.slices).part
        small = needed_sizes(
            {**form.sizes, axis: self.slices.length, part: self.slices.count},
            [
                (totals, cut_sizes(totals, first)),
                (before, line_sizes(before.line_kernel, second)),
                (results, line_sizes(results.line_kernel, third)),
            ],
        )
        count, length = small.pop(part), small[axis]
        return resize(form, {**small, axis: count * length}), SlicedLine(Slices(axis, count, length))

    def tolerance(self, form: KernelForm) -> float | None:
        """The dtype's: sums of sums err less than one long sum."""
        return None


class _Parts:
    """The operators of a chain."""

    def __init__(self, form: KernelForm, slices: Slices) -> None:
        self.kernel, self.slices = form.line_kernel, slices
        self.expr, self.axis = self.kernel.expr, slices.axis
        self.part = fresh_name(f"{self.axis}_part", form.sizes)
        self.tensors = self.expr.tensor_by_name
        self.line, self.final = self.kernel.line, self.kernel.final
        self.names = set(self.tensors)
        self.total = self._tensor("totals", self._cut(self.line.axes, (self.part,)), self.expr.accumulate)
        walk = self.kernel.walk
        self.function = _LARGEST.get(walk.function, walk.function)
        self.own = self._cut(self.line.axes, (self.part,)) if self.kernel.is_scan else self.line.axes
        dtype = self.expr.accumulate if self.kernel.is_scan else "int32"
        self.until = self._tensor("until", self.own, dtype)

    def totals(self) -> KernelForm:
        """The total of every part, or its largest value."""
        value = Reduction(self.function, (self.axis,), self._viewed(self.kernel.body))
        axes = self._cut(self.line.axes, (self.part,))
        return self._form([Statement(self.total.name, axes, value)], [self.total], (*axes, self.axis))

    def before(self) -> KernelForm:
        """The total of all parts up to each, or the part that has the largest value."""
        axes = self._cut(self.line.axes, (self.part,))
        total = Load(self.total.name, tuple(map(AffineIndex.axis, axes)))
        walk = self.kernel.walk
        value: Value
        if isinstance(walk, Scan):
            value = Scan(walk.function, self.part, total, walk.is_reversed)
        else:
            value = Reduction(walk.function, (self.part,), total)
        return self._form([Statement(self.until.name, self.own, value)], [self.total, self.until], axes)

    def results(self) -> KernelForm:
        """The output, from the parts by themselves and what comes before them."""
        return self._scanned() if self.kernel.is_scan else self._placed()

    def _scanned(self) -> KernelForm:
        walk = self.kernel.walk
        assert isinstance(walk, Scan)
        both = (self.part, self.axis)
        axes = self._cut(self.line.axes, both)
        own = replace(self.tensors[self.line.tensor], shape=self._shape(axes))
        step = 1 if walk.is_reversed else -1
        until = Load(
            self.until.name,
            tuple(AffineIndex.of({axis: 1}, step if axis == self.part else 0) for axis in self.own),
            pad=REDUCTION_IDENTITY[walk.function],
        )
        alone = Load(own.name, tuple(map(AffineIndex.axis, axes)))
        result = self._viewed(self.final.value, {self._own: Call(_COMBINED[walk.function], (until, alone))})
        output = self._view(self.expr.output)
        line = Statement(own.name, axes, replace(walk, body=self._viewed(walk.body)))
        final = Statement(output.name, self._cut(self.final.axes, both), result)
        return self._form([line, final], [self.until, own, output], final.axes)

    def _placed(self) -> KernelForm:
        place = Load(self.until.name, tuple(map(AffineIndex.axis, self.line.axes)))
        chosen = GatheredIndex(terms=(), place=place, low=0, high=self.slices.count - 1)
        body = self._viewed(self.kernel.body, part=chosen)
        own = self.tensors[self.line.tensor]
        inside = Call("add", (Call("mul", (place, Constant(float(self.slices.length)))), self._own))
        line = replace(self.line, value=Reduction(self.kernel.walk.function, (self.axis,), body))
        final = replace(self.final, value=rewrite(self.final.value, {self._own: inside}))
        return self._form([line, final], [self.until, own, self.expr.output], (*self.final.axes, self.axis))

    @property
    def _own(self) -> Load:
        return Load(self.line.tensor, tuple(map(AffineIndex.axis, self.line.axes)))

    def _form(self, statements: list[Statement], made: list[Tensor], axes: Sequence[str]) -> KernelForm:
        """An operator of some statements, with the tensors that they read."""
        names = {tensor.name for tensor in made}
        read = dict.fromkeys(load.tensor for each in statements for load in loads(each.value))
        inputs = [self._view(self.tensors[name]) for name in read if name not in names]
        # What a kernel before made is read, and comes first.
        made = sorted(made, key=lambda tensor: tensor.name in {each.tensor for each in statements})
        sizes = self._sizes
        return kernel_form(
            replace(
                self.expr,
                axes=tuple(Axis(axis, sizes[axis]) for axis in axes),
                tensors=(*inputs, *made),
                statements=tuple(statements),
            )
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return {**self.kernel.sizes, self.part: self.slices.count, self.axis: self.slices.length}

    def _shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(self._sizes[axis] for axis in axes)

    def _tensor(self, word: str, axes: Sequence[str], dtype: str) -> Tensor:
        name = fresh_name(f"{self.expr.output.name}_{word}", self.names)
        self.names.add(name)
        return Tensor(name, self._shape(axes), dtype)

    def _cut(self, axes: Sequence[str], by: tuple[str, ...]) -> tuple[str, ...]:
        """Axes with others in place of the line's; the line's at their end where they have none."""
        if self.axis not in axes:
            return (*axes, *by)
        place = axes.index(self.axis)
        return (*axes[:place], *by, *axes[place + 1 :])

    def _view(self, tensor: Tensor) -> Tensor:
        """A tensor with its dimension of the line, if any, cut in two."""
        place = _dimension(self.expr, tensor.name, self.axis)
        if place is None:
            return tensor
        shape = (*tensor.shape[:place], self.slices.count, self.slices.length, *tensor.shape[place + 1 :])
        return replace(tensor, shape=shape, external_shape=tensor.caller_shape)

    def _viewed(self, value: Value, more: dict[Value, Value] | None = None, part: AffineIndex | None = None) -> Value:
        """A value over a part and the axis within it."""
        changes: dict[Value, Value] = dict(more or {})
        for node in walk(value):
            if isinstance(node, Load) and node not in changes:
                place = next((at for at, index in enumerate(node.indices) if index.coefficient(self.axis)), None)
                if place is not None:
                    cut = (part or AffineIndex.axis(self.part), AffineIndex.axis(self.axis))
                    indices = (*node.indices[:place], *cut, *node.indices[place + 1 :])
                    changes[node] = replace(node, indices=indices)
            elif isinstance(node, AxisValue):
                index = AffineIndex.of({self.part: self.slices.length, self.axis: 1})
                changes[node] = AxisValue(node.index.substitute({self.axis: index}))
        return rewrite(value, changes)


def _dimension(expr: TensorExpr, tensor: str, axis: str) -> int | None:
    """The dimension of a tensor of the caller's that the axis walks; None where it walks none."""
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
    if kernel.scatter is not None or kernel.rank_axis is not None:
        return False
    axis, tensors = kernel.axis, kernel.expr.tensor_by_name
    if not kernel.is_scan and any(
        isinstance(node, AxisValue) and axis in node.index.axes for node in walk(kernel.body)
    ):
        return False  # The number of an element would be read from a tensor.
    for load in kernel.reads:
        places = [place for place, index in enumerate(load.indices) if axis in index.axes]
        if not places:
            if _dimension(kernel.expr, load.tensor, axis) is not None:
                return False  # A tensor that is read along the axis and also across it has no single view.
            continue
        (place, *others) = places
        index = load.indices[place]
        whole = tensors[load.tensor].shape[place] == kernel.length
        if others or not index.is_plain_axis or not whole or place != _dimension(kernel.expr, load.tensor, axis):
            return False
    return any(axis in index.axes for load in loads(kernel.body) for index in load.indices)


def consider_lines(placed: PlacedForm, top_k: int, *, in_parts: bool) -> Considered:
    """The ``top_k`` best programs of a scan or place, lines whole or ``in_parts``.

    Raises:
        InputError: the device has no kernels.
    """
    parts = line_parts(placed.form, placed.device)
    chains = [ChainProgram(WHOLE, part.label, placed.form, WholeLine(), (part,)) for part in parts[:top_k]]
    split = list(_split_lines(placed, parts[0])) if in_parts else []
    ranked = sorted((*chains, *split), key=lambda program: program.estimate.seconds)
    return Considered(WHOLE, tuple(ranked[:top_k]), scored=len(parts) + len(split))


def _split_lines(placed: PlacedForm, whole: ProgramPart) -> Iterator[ChainProgram]:
    """Lines in parts, priced, where the best kernel of whole lines leaves units idle."""
    form, device = placed.form, placed.device
    if device.teu.lane != "thread" or not can_cut(form):
        return
    least = NEAR_BOUND * placed.least_seconds + 3 * device.launch_overhead_seconds
    if form.line_kernel.lines >= device.unit_count * PARTS_PER_UNIT[-1] or whole.estimate.seconds <= least:
        return
    for slices in _counts(form, device):
        yield _program(form, slices, device)


def _counts(form: KernelForm, device: DeviceSpec) -> list[Slices]:
    """Parts that give every unit one or a few."""
    kernel = form.line_kernel
    counts = set()
    for parts in PARTS_PER_UNIT:
        wanted = min(parts * device.unit_count / kernel.lines, kernel.length / LEAST_ELEMENTS)
        count = nearest_divisor(kernel.length, wanted, SNAP)
        if count is not None and count >= 2:
            counts.add(count)
    return [Slices(kernel.axis, count, kernel.length // count) for count in sorted(counts)]


def _program(form: KernelForm, slices: Slices, device: DeviceSpec) -> ChainProgram:
    split = SlicedLine(slices)
    totals, before, results = split.forms(form)
    first = construct(totals, device, 1).programs[0]
    scan = form.line_kernel.is_scan
    labels = (
        ("adds up what parts come to", "scans parts behind what comes before them")
        if scan
        else ("finds the part", "finds the place in the part")
    )
    text = slices.text.replace("slice", "part")
    parts = [ProgramPart(f"reduces each of {text}", totals, first.schedule, first.estimate, first.policy)]
    for label, each in zip(labels, (before, results), strict=True):
        best = line_parts(each, device)[0]
        parts.append(replace(best, label=label))
    return ChainProgram(NAME, text, form, split, tuple(parts))
