"""Convolutions as one product of matrices each: of an image whose lines follow each other in memory, padding included.

A convolution adds a product for every tap of its filters, of the image moved by that tap. In a copy ``P`` with the
padding written out, channels last, and ``V`` places a line, the place below is ``V`` further and the next one 1: all
places are the rows of one matrix, and a tap moves where they start::

    P[n, y*V + x, c] = X[n, c, y - 1, x - 1], zero outside
    U[kh, kw, c, f]  = W[f, c, kh, kw]                                     where filters lie otherwise than that
    Z[n, p, f]       = sum([kh, kw, c], P[n, p + V*kh + kw, c] * U[kh, kw, c, f])
    Y[n, f, oh, ow]  = Z[n, oh*V + ow, f]                                  and the epilogue

Where windows are ``s`` apart, tap ``s*u + a`` of a window is place ``u`` of the lines that are ``a`` further than
multiples of ``s``. These are channels of their own in ``P``, ``s`` times as many for lines and for columns, and filters
have zeros where a tap is none: 7 of 16 for 3x3 by strides of two, none where windows do not overlap (patches of
vision transformers). So they have where channels fill no 16 bytes, as the three of a picture. Taps that are ``d`` apart
move by ``d`` places.

This is the implicit GEMM of libraries with the gather of every tile replaced by one copy of the image: matrix
instructions multiply tiles of places, whatever lines of the image these are from, and bulk copies bring them. The last
places of every line, two for filters of three columns, are computed and dropped.
"""

from __future__ import annotations

import math
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
from sokoban.schedule.tile import TileSchedule

#: The name of the algorithm.
NAME = "flat-image"

#: What matrix kernels copy at a time.
PIECE_BYTES = 16


@dataclass(frozen=True)
class FlatImage:
    """A convolution by a copy of its image."""

    def problems(self, form: KernelForm) -> tuple[KernelForm, ...]:
        """The image, the filters where they lie otherwise, the product, the output; see
        :class:`roller.algorithms.chain.Split`."""
        return tuple(_layout(form).problems().values())

    def cut_down(self, form: KernelForm, schedules: Sequence[TileSchedule]) -> tuple[KernelForm, FlatImage]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        layout = _layout(form)
        roles, walked = layout.convolution, layout.sizes
        *_, product, output = zip(self.problems(form), schedules, strict=True)
        small = needed_sizes(walked, [(problem, cut_sizes(problem, tile)) for problem, tile in (product, output)])
        # As many lines as the product wants places, and where these are too few, longer ones.
        others = [small[axis] + reach for axis, reach in zip(roles.outputs, layout.reaches, strict=True)]
        for side, axis in enumerate(roles.outputs):
            lines = -(-small[layout.place] // math.prod([*others[:side], *others[side + 1 :]]))
            small[axis] = min(walked[axis], max(small[axis], lines))
            others[side] = small[axis] + layout.reaches[side]
        tap_counts = dict(zip(roles.taps, roles.counts, strict=True))
        # As many channels short of whole pieces as there were, so that the filters lie as they did.
        channels = form.sizes[roles.channels]
        short = walked[roles.channels] - channels
        tap_counts[roles.channels] = min(channels, layout.padded(small[roles.channels]) - short)
        sizes = {axis: min(small[axis], size) for axis, size in form.sizes.items()}
        return resize(form, {**sizes, **tap_counts}), self

    def tolerance(self, form: KernelForm) -> float | None:
        """The dtype's: the same products are added up."""
        return None


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The tensors of one chain, and the axes that its kernels walk.

    Attributes:
        form, convolution: the operator.
        lines: axes of the copy, lines and places on a line.
        parities: axes of a window's places between multiples of the stride; empty by strides of one.
        taps: axes of the places that taps move by.
        place: axis of the places of an image.
    """

    form: KernelForm
    convolution: Convolution
    lines: tuple[str, ...]
    parities: tuple[str, ...]
    taps: tuple[str, ...]
    place: str

    # ---- sizes

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Places that taps move by."""
        roles = self.convolution
        return tuple(-(-count // stride) for count, stride in zip(roles.counts, roles.strides, strict=True))

    @cached_property
    def reaches(self) -> tuple[int, ...]:
        """Number of places between the first tap and the last."""
        return tuple(
            dilation * (length - 1) for dilation, length in zip(self.convolution.dilations, self.lengths, strict=True)
        )

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Lines of the copy, and places of a line."""
        outputs = (self.form.sizes[axis] for axis in self.convolution.outputs)
        return tuple(size + reach for size, reach in zip(outputs, self.reaches, strict=True))

    @cached_property
    def pitches(self) -> tuple[int, ...]:
        """Number of places from one element to the next along each dimension."""
        return tuple(math.prod(self.extents[side + 1 :]) for side in range(len(self.extents)))

    def _along(self, axes: Sequence[str]) -> dict[str, int]:
        """Coefficients that make a number of places of some places along every dimension."""
        return dict(zip(axes, self.pitches, strict=True))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of all axes of all kernels."""
        roles, sizes = self.convolution, self.form.sizes
        last = sum((sizes[axis] - 1) * pitch for axis, pitch in self._along(roles.outputs).items())
        return {
            **sizes,
            **dict(zip(self.lines, self.extents, strict=True)),
            **dict(zip(self.parities, roles.strides, strict=False)),
            **dict(zip(self.taps, self.lengths, strict=True)),
            roles.channels: self._channels,
            self.place: last + 1,
        }

    @property
    def _channels(self) -> int:
        """Channels, with as many zeros behind them as make each place whole pieces of memory."""
        return self.padded(self.form.sizes[self.convolution.channels])

    def padded(self, channels: int) -> int:
        """A number of channels, rounded up to whole pieces of memory."""
        return padded_channels(channels, self.data, math.prod(self.convolution.strides))

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
        return self._tensor("image", self._image_axes, self.data.dtype)

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
    def _image_axes(self) -> tuple[str, ...]:
        return (*self.images, *self.lines, *self.parities, self.convolution.channels)

    @property
    def _filter_axes(self) -> tuple[str, ...]:
        return (*self.taps, *self.parities, self.convolution.channels, self.convolution.filters)

    @property
    def keeps_filters(self) -> bool:
        """True if matrix instructions can read the filters as they lie."""
        roles = self.convolution
        innermost = roles.weights.indices[-1].axes[0]
        return self._is_as_it_was and innermost in (roles.channels, roles.filters)

    @property
    def _is_as_it_was(self) -> bool:
        """True if filters have neither other taps nor more channels."""
        return not self.parities and self._channels == self.form.sizes[self.convolution.channels]

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
        return kernel_of(self.form, self.sizes, inputs, output, axes, value)

    def _copied(self) -> KernelForm:
        """The image with its padding, in lines."""
        roles = self.convolution
        moved: dict[str, AffineIndex] = {}
        for side, (output, tap) in enumerate(zip(roles.outputs, roles.taps, strict=True)):
            # A window that is read backwards starts with its last tap.
            first = roles.counts[side] - 1 if roles.flipped[side] else 0
            moved[output] = AffineIndex.axis(self.lines[side])
            moved[tap] = AffineIndex.of({self.parities[side]: 1} if self.parities else {}, first)
        indices = tuple(index.substitute(moved) for index in roles.data.indices)
        return self._kernel([self.data], self.image, self._image_axes, Load(roles.data.tensor, indices, 0.0))

    def _weights(self) -> Load:
        """The filters at the taps by which places move."""
        roles = self.convolution
        at: dict[str, AffineIndex] = {}
        for side, (tap, place) in enumerate(zip(roles.taps, self.taps, strict=True)):
            terms = {place: -1 if roles.flipped[side] else roles.strides[side]}
            if self.parities:
                terms[self.parities[side]] = 1
            at[tap] = AffineIndex.of(terms, roles.counts[side] - 1 if roles.flipped[side] else 0)
        pad = None if self._is_as_it_was else 0.0
        return Load(roles.weights.tensor, tuple(index.substitute(at) for index in roles.weights.indices), pad)

    def _turned(self) -> KernelForm:
        source = self.form.expr.tensor_by_name[self.convolution.weights.tensor]
        return self._kernel([source], self.filters, self._filter_axes, self._weights())

    def _product(self) -> KernelForm:
        roles, image = self.convolution, self.image
        count = len(self.images)
        before, within = image.shape[:count], image.shape[count + len(self.extents) :]
        shape = (*before, math.prod(self.extents), *within)
        flat = replace(image, shape=shape, external_shape=image.caller_shape)
        taps = zip(self.taps, self.pitches, roles.dilations, strict=True)
        moved = AffineIndex.of({self.place: 1, **{tap: pitch * dilation for tap, pitch, dilation in taps}})
        outer, inside = self.images, (*self.parities, roles.channels)
        data = Load(flat.name, (*map(AffineIndex.axis, outer), moved, *map(AffineIndex.axis, inside)))
        if self.keeps_filters:
            factor, weights = self._weights(), self.form.expr.tensor_by_name[roles.weights.tensor]
        else:
            weights = self.filters
            factor = Load(weights.name, tuple(map(AffineIndex.axis, self._filter_axes)))
        reduced = (*self.taps, *self.parities, roles.channels)
        value = Reduction("sum", reduced, Call("mul", (data, factor)))
        return self._kernel([flat, weights], self.sums, (*self.images, self.place, roles.filters), value)

    def _output(self) -> KernelForm:
        roles, form, sums = self.convolution, self.form, self.sums
        place = AffineIndex.of(self._along(roles.outputs))
        at = (*map(AffineIndex.axis, self.images), place, AffineIndex.axis(roles.filters))
        result = form.reductions[0].tensor
        results: dict[Value, Value] = {
            load: Load(sums.name, at) for load in loads(form.final.value) if load.tensor == result
        }
        others = dict.fromkeys(load.tensor for load in form.final_loads)
        inputs = (sums, *(form.expr.tensor_by_name[name] for name in others))
        return self._kernel(inputs, form.expr.output, form.final.axes, rewrite(form.final.value, results))


def kernel_of(
    form: KernelForm,
    sizes: Mapping[str, int],
    inputs: Sequence[Tensor],
    output: Tensor,
    axes: Sequence[str],
    value: Value,
) -> KernelForm:
    """A kernel of a chain that computes ``form``: ``output[axes] = value``."""
    reduced = value.axes if isinstance(value, Reduction) else ()
    expr = replace(
        form.expr,
        axes=tuple(Axis(axis, sizes[axis]) for axis in (*axes, *reduced)),
        tensors=(*inputs, output),
        statements=(Statement(output.name, tuple(axes), value),),
    )
    return kernel_form(expr)


def padded_channels(channels: int, tensor: Tensor, parities: int) -> int:
    """``channels``, with as many zeros behind them as make ``parities`` times them whole pieces of memory."""
    piece = max(1, PIECE_BYTES // tensor.element_bytes)
    step = piece // math.gcd(piece, parities)
    return -(-channels // step) * step


def _layout(form: KernelForm) -> _Layout:
    convolution = convolution_of(form)
    assert convolution is not None
    taken = {*form.sizes, *form.expr.tensor_by_name}

    def axes(suffix: str) -> tuple[str, ...]:
        return tuple(fresh_name(f"{output}_{suffix}", taken) for output in convolution.outputs)

    return _Layout(
        form=form,
        convolution=convolution,
        lines=axes("line"),
        parities=axes("within") if max(convolution.strides) > 1 else (),
        taps=axes("tap"),
        place=fresh_name("place", taken),
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
