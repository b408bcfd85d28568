"""Convolutions as one product of matrices each: of an image whose lines follow each other in memory, padding included.

A convolution adds a product for every tap of its filters, of the image moved by that tap. In a copy ``P`` with the
padding written out, channels last, and ``V`` places a line, the place below is ``V`` further and the next one 1: all
places are the rows of one matrix, and a tap moves where they start::

    P[n, y*V + x, c] = X[n, c, y - 1, x - 1], zero outside
    U[kh, kw, c, f]  = W[f, c, kh, kw]                                     where filters lie otherwise than that
    Z[n, p, f]       = sum([kh, kw, c], P[n, p + V*kh + kw, c] * U[kh, kw, c, f])
    Y[n, f, oh, ow]  = Z[n, oh*V + ow, f]                                  and the epilogue

Where windows are ``s`` apart, tap ``s*u + a`` of a window is place ``u`` of the lines that are ``a`` further than
multiples of ``s``: ``P`` has ``s`` images of such lines, and filters have zeros where a tap is none, 7 of 16 for 3x3 by
strides of two.

This is the implicit GEMM of libraries with the gather of every tile replaced by one copy of the image: matrix
instructions multiply tiles of places, whatever lines of the image these are from, and bulk copies bring them. The last
places of every line, two for filters of three columns, are computed and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hal.spec.device import DeviceSpec
from roller.algorithms.chain import ChainProgram, Considered, needed_sizes
from roller.algorithms.convolution import Convolution, convolution_of
from roller.construct.construct import construct
from roller.construct.program import ProgramPart, RProgram
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import (
    AffineIndex,
    Axis,
    Call,
    Load,
    Reduction,
    Statement,
    Tensor,
    Value,
    loads,
    rewrite,
)
from sokoban.language.names import fresh_name
from sokoban.schedule.cutting import cut_sizes, resize
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule

#: The name of the algorithm.
NAME = "flat-image"


@dataclass(frozen=True)
class FlatImage:
    """A convolution by a copy of its image."""

    def problems(self, form: KernelForm) -> tuple[KernelForm, ...]:
        """The image, the filters where they lie otherwise, the product, the output; see
        :class:`roller.algorithms.chain.Split`."""
        return tuple(_layout(form).problems().values())

    def cut_down(self, form: KernelForm, schedules: Sequence[Schedule]) -> tuple[KernelForm, FlatImage]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        layout = _layout(form)
        roles, walked = layout.convolution, layout.sizes
        *_, product, output = zip(self.problems(form), schedules, strict=True)
        tiles = [(problem, tile) for problem, tile in (product, output) if isinstance(tile, TileSchedule)]
        small = needed_sizes(walked, [(problem, cut_sizes(problem, tile)) for problem, tile in tiles])
        dropped = layout.lengths[1] - 1
        lines = -(-(small[layout.place] + dropped) // (small[roles.columns] + dropped))
        small[roles.rows] = min(walked[roles.rows], max(small[roles.rows], lines))
        kept = dict(zip(roles.taps, roles.counts, strict=True))
        return resize(form, {**{axis: small[axis] for axis in form.sizes}, **kept}), self

    def tolerance(self, form: KernelForm) -> float | None:
        """The dtype's: the same products are added up."""
        return None


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The tensors of one chain, and the axes that its kernels walk.

    Attributes:
        form, convolution: the operator.
        lines: axes of the copy's lines and of the places on one.
        parities: axes of the images of every other line, and column; empty by strides of one.
        taps: axes of the places that taps move by, down and across.
        place: axis of the places of an image.
    """

    form: KernelForm
    convolution: Convolution
    lines: tuple[str, str]
    parities: tuple[str, ...]
    taps: tuple[str, str]
    place: str

    # ---- sizes

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """Places that taps move by, down and across."""
        down, across = (-(-c // s) for c, s in zip(self.convolution.counts, self.convolution.strides, strict=True))
        return down, across

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of all axes of all kernels."""
        roles, sizes = self.convolution, self.form.sizes
        down, across = (
            sizes[axis] + length - 1 for axis, length in zip((roles.rows, roles.columns), self.lengths, strict=True)
        )
        return {
            **sizes,
            **dict(zip(self.lines, (down, across), strict=True)),
            **dict(zip(self.parities, roles.strides, strict=False)),
            **dict(zip(self.taps, self.lengths, strict=True)),
            self.place: sizes[roles.rows] * across - (self.lengths[1] - 1),
        }

    @property
    def across(self) -> int:
        """Places of a line."""
        return self.sizes[self.lines[1]]

    @property
    def images(self) -> tuple[str, ...]:
        """The axis of the images, where there are several."""
        return () if self.convolution.images is None else (self.convolution.images,)

    # ---- tensors between kernels

    def _tensor(self, suffix: str, axes: Sequence[str], dtype: str) -> Tensor:
        name = fresh_name(f"{self.form.expr.output.name}_{suffix}", self.form.expr.tensor_by_name)
        return Tensor(name, tuple(self.sizes[axis] for axis in axes), dtype)

    @cached_property
    def data(self) -> Tensor:
        return self.form.expr.tensor_by_name[self.convolution.data.tensor]

    @cached_property
    def image(self) -> Tensor:
        axes = (*self.images, *self.parities, *self.lines, self.convolution.channels)
        return self._tensor("image", axes, self.data.dtype)

    @cached_property
    def filters(self) -> Tensor:
        return self._tensor("filters", self._filter_axes, self.data.dtype)

    @cached_property
    def sums(self) -> Tensor:
        """Results by place: of the output's type where nothing more is computed of them."""
        expr, is_result = self.form.expr, isinstance(self.form.final.value, Load)
        dtype = expr.output.dtype if is_result else expr.accumulate
        return self._tensor("places", (*self.images, self.place, self.convolution.filters), dtype)

    @property
    def _filter_axes(self) -> tuple[str, ...]:
        return (*self.parities, *self.taps, self.convolution.channels, self.convolution.filters)

    @property
    def keeps_filters(self) -> bool:
        """Whether matrix instructions can read the filters as they lie."""
        roles = self.convolution
        return not self.parities and roles.weights.indices[-1].axes[0] in (roles.channels, roles.filters)

    # ---- kernels

    def problems(self) -> Mapping[str, KernelForm]:
        """The kernels of the chain in order, by what they do."""
        turned = {} if self.keeps_filters else {"turns the filters": self._turned()}
        return {
            "copies the image": self._copied(),
            **turned,
            "multiplies": self._product(),
            "puts results in their places": self._output(),
        }

    def _kernel(self, inputs: Sequence[Tensor], output: Tensor, axes: Sequence[str], value: Value) -> KernelForm:
        reduced = value.axes if isinstance(value, Reduction) else ()
        expr = replace(
            self.form.expr,
            axes=tuple(Axis(axis, self.sizes[axis]) for axis in (*axes, *reduced)),
            tensors=(*inputs, output),
            statements=(Statement(output.name, tuple(axes), value),),
        )
        return kernel_form(expr)

    def _copied(self) -> KernelForm:
        """The image with its padding, in lines."""
        roles = self.convolution
        moved: dict[str, AffineIndex] = {}
        for side, (output, tap) in enumerate(zip((roles.rows, roles.columns), roles.taps, strict=True)):
            # A window that is read backwards starts with its last tap.
            first = roles.counts[side] - 1 if roles.flipped[side] else 0
            moved[output] = AffineIndex.axis(self.lines[side])
            moved[tap] = AffineIndex.of({self.parities[side]: 1} if self.parities else {}, first)
        indices = tuple(index.substitute(moved) for index in roles.data.indices)
        axes = (*self.images, *self.parities, *self.lines, roles.channels)
        return self._kernel([self.data], self.image, axes, Load(roles.data.tensor, indices, 0.0))

    def _weights(self) -> Load:
        """The filters at the taps by which places move."""
        roles = self.convolution
        at: dict[str, AffineIndex] = {}
        for side, (tap, place) in enumerate(zip(roles.taps, self.taps, strict=True)):
            terms = {place: -1 if roles.flipped[side] else roles.strides[side]}
            if self.parities:
                terms[self.parities[side]] = 1
            at[tap] = AffineIndex.of(terms, roles.counts[side] - 1 if roles.flipped[side] else 0)
        pad = 0.0 if self.parities else None
        return Load(roles.weights.tensor, tuple(index.substitute(at) for index in roles.weights.indices), pad)

    def _turned(self) -> KernelForm:
        source = self.form.expr.tensor_by_name[self.convolution.weights.tensor]
        return self._kernel([source], self.filters, self._filter_axes, self._weights())

    def _product(self) -> KernelForm:
        roles, image = self.convolution, self.image
        *before, down, across, channels = image.shape
        flat = replace(image, shape=(*before, down * across, channels), external_shape=image.caller_shape)
        row, column = self.taps
        moved = AffineIndex.of({self.place: 1, row: self.across, column: 1})
        beside = [AffineIndex.axis(axis) for axis in (*self.images, *self.parities)]
        data = Load(flat.name, (*beside, moved, AffineIndex.axis(roles.channels)))
        if self.keeps_filters:
            factor, weights = self._weights(), self.form.expr.tensor_by_name[roles.weights.tensor]
        else:
            weights = self.filters
            factor = Load(weights.name, tuple(AffineIndex.axis(axis) for axis in self._filter_axes))
        reduced = (*self.parities, *self.taps, roles.channels)
        value = Reduction("sum", reduced, Call("mul", (data, factor)))
        return self._kernel([flat, weights], self.sums, (*self.images, self.place, roles.filters), value)

    def _output(self) -> KernelForm:
        roles, form, sums = self.convolution, self.form, self.sums
        place = AffineIndex.of({roles.rows: self.across, roles.columns: 1})
        at = (*(AffineIndex.axis(axis) for axis in self.images), place, AffineIndex.axis(roles.filters))
        result = form.reductions[0].tensor
        results: dict[Value, Value] = {
            load: Load(sums.name, at) for load in loads(form.final.value) if load.tensor == result
        }
        others = dict.fromkeys(load.tensor for load in form.final_loads)
        inputs = (sums, *(form.expr.tensor_by_name[name] for name in others))
        return self._kernel(inputs, form.expr.output, form.final.axes, rewrite(form.final.value, results))


def _layout(form: KernelForm) -> _Layout:
    convolution = convolution_of(form)
    assert convolution is not None
    taken = {*form.sizes, *form.expr.tensor_by_name}
    line, column, place, row, across, odd_line, odd_column = (
        fresh_name(wanted, taken)
        for wanted in ("line", "column", "place", "down", "across", "line_parity", "column_parity")
    )
    return _Layout(
        form=form,
        convolution=convolution,
        lines=(line, column),
        parities=() if convolution.strides == (1, 1) else (odd_line, odd_column),
        taps=(row, across),
        place=place,
    )


def consider(placed: PlacedForm, direct: RProgram) -> Considered:
    """The convolution by a flat image, priced, or why that cannot gain anything over ``direct``."""
    form, device = placed.form, placed.device
    if convolution_of(form) is None:
        return Considered(NAME, declined="it is no convolution")
    problems = _layout(form).problems()
    product = PlacedForm(problems["multiplies"], device)
    if product.product is None and product.bulk_roles is None:
        kind = product.form.input_dtype
        return Considered(NAME, declined=f"{device.name} has no matrix instruction that multiplies {kind}")
    least = sum(PlacedForm(problem, device).least_seconds for problem in problems.values())
    least += len(problems) * device.launch_overhead_seconds
    if direct.estimate.seconds <= least:
        return Considered(NAME, declined=f"{len(problems)} kernels take {1e6 * least:.0f} µs at least")
    return Considered(NAME, (_program(form, problems, device),))


def _program(form: KernelForm, problems: Mapping[str, KernelForm], device: DeviceSpec) -> ChainProgram:
    parts = []
    for label, problem in problems.items():
        best = construct(problem, device, 1).programs[0]
        parts.append(ProgramPart(label, problem, best.schedule, best.estimate, best.policy))
    return ChainProgram(NAME, f"{len(parts)} kernels", form, FlatImage(), tuple(parts))
