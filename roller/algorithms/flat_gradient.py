"""Gradients of a convolution's filters as one product of matrices: of its image and of the gradient of its output.

For every tap, the gradient adds products of the image moved by that tap and of the gradient of the output. With both
copied as :mod:`roller.algorithms.flat_image` copies an image, lines of the same ``V`` places and zeros where the output
has none, the places of all images are one sum, and a tap moves where it starts in the image::

    P[n, y*V + x, c]  = X[n, c, y - 1, x - 1], zero outside
    D[n, y*V + x, f]  = dY[n, f, y, x], zero outside
    G[s, kh, kw, c, f] = sum(q, P[s*R + q + V*kh + kw, c] * D[s*R + q, f])
    dW[f, c, kh, kw]   = sum(s, G[s, kh, kw, c, f])

``S`` slices of ``R`` places each give units enough to do (:mod:`roller.algorithms.split_k`). Of windows that are ``t``
apart the image has a grid of places by itself for each of ``t`` times ``t`` taps, as in the convolution; taps that are
``d`` apart move by ``d`` places. An infinite element of the image is multiplied by the zeros of ``D``, so that taps
which never meet it come to NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hal.spec.device import DeviceSpec
from roller.algorithms import split_k
from roller.algorithms.chain import ChainProgram, Considered, needed_sizes
from roller.algorithms.convolution import Convolution, convolution_of
from roller.algorithms.flat_image import NAME, kernel_of, padded_channels
from roller.algorithms.slices import sum_of_slices
from roller.construct.construct import construct
from roller.construct.program import ProgramPart, RProgram
from roller.text.quantities import count_text
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import AffineIndex, Axis, Call, Load, Reduction, Tensor
from sokoban.language.names import fresh_name
from sokoban.schedule.cutting import cut_sizes, resize
from sokoban.schedule.tile import TileSchedule

#: Slices, places that taps move by along a dimension, and lines of a small operator.
MOST_SLICES, MOST_TAPS, LEAST_LINES = 2, 2, 8


@dataclass(frozen=True)
class FlatGradient:
    """A gradient of filters by a copy of the image, in ``count`` slices of ``length`` places."""

    count: int
    length: int

    def problems(self, form: KernelForm) -> tuple[KernelForm, ...]:
        """The image, the gradient of the output, their product, the sum over slices; see
        :class:`roller.algorithms.chain.Split`."""
        return tuple(_Layout(form, self).problems().values())

    def cut_down(self, form: KernelForm, schedules: Sequence[TileSchedule]) -> tuple[KernelForm, FlatGradient]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        layout = _Layout(form, self)
        roles = layout.roles
        *_, product, output = zip(self.problems(form), schedules, strict=True)
        small = needed_sizes(layout.sizes, [(problem, cut_sizes(problem, tile)) for problem, tile in (product, output)])
        count, length = min(small[layout.slice], MOST_SLICES), small[layout.place]
        # As many taps short of whole ones of a grid as there were, so that the same dimensions are whole.
        spans = zip(layout.taps_along, roles.dilations, _of(form, roles.outputs), strict=True)
        taps_along = [min(along, MOST_TAPS) for along in layout.taps_along]
        taps = [size - dilation * (along - few) for (along, dilation, size), few in zip(spans, taps_along, strict=True)]
        moved = [stride * (few - 1) for stride, few in zip(roles.strides, taps_along, strict=True)]
        # Slices are whole images; lines and images are as many as give a slice its places.
        windows = [min(size, LEAST_LINES) for size in roles.counts]
        for side in reversed(range(len(windows))):
            extents = [size + more for size, more in zip(windows, moved, strict=True)]
            others = math.prod([*extents[:side], *extents[side + 1 :]])
            windows[side] = max(windows[side], min(roles.counts[side], -(-length // others) - moved[side]))
        places = math.prod(size + more for size, more in zip(windows, moved, strict=True))
        images = -(-length // places)
        sizes = {axis: min(small[axis], form.sizes[axis]) for axis in layout.matrix_axes}
        sizes |= dict(zip(roles.outputs, taps, strict=True)) | dict(zip(roles.taps, windows, strict=True))
        return resize(form, {**sizes, roles.channels: images * count}), FlatGradient(count, images * places)

    def tolerance(self, form: KernelForm) -> float | None:
        """The dtype's: the same products are added up, slice by slice."""
        return None


@dataclass(frozen=True)
class _Layout:
    """The tensors of one chain, and the axes that its kernels walk.

    :class:`~roller.algorithms.convolution.Convolution` sees a convolution whose filters are the gradient of the output:
    its taps are that one's places, and its output's are our taps.
    """

    form: KernelForm
    split: FlatGradient

    @cached_property
    def roles(self) -> Convolution:
        """The operator."""
        roles = gradient_of(self.form)
        assert roles is not None
        return roles

    @property
    def matrix_axes(self) -> tuple[str, str]:
        """Axes of the channels and of the filters."""
        assert self.roles.images is not None
        return self.roles.images, self.roles.filters

    # ---- axes

    def _fresh(self, name: str) -> str:
        return fresh_name(name, {*self.form.sizes, *self.form.expr.tensor_by_name})

    @cached_property
    def slice(self) -> str:
        """Axis of the slices."""
        return self._fresh("slice")

    @cached_property
    def place(self) -> str:
        """Axis of a slice's places."""
        return self._fresh("place")

    @cached_property
    def image(self) -> str:
        """Axis of the images of the copy."""
        return self._fresh(f"{self.roles.channels}_image")

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Axes of the copies: lines, and places on a line."""
        return tuple(self._fresh(f"{tap}_line") for tap in self.roles.taps)

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """Axes of the taps, by which places move."""
        return tuple(self._fresh(f"{output}_tap") for output in self.roles.outputs)

    @cached_property
    def parities(self) -> tuple[str, ...]:
        """Axes of the taps between those; empty by strides of one."""
        if max(self.roles.dilations) == 1:
            return ()
        return tuple(self._fresh(f"{output}_within") for output in self.roles.outputs)

    # ---- sizes

    @cached_property
    def taps_along(self) -> tuple[int, ...]:
        """Places that taps move by."""
        sizes = (self.form.sizes[axis] for axis in self.roles.outputs)
        return tuple(-(-size // stride) for size, stride in zip(sizes, self.roles.dilations, strict=True))

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Lines of the copies, and places of a line."""
        sides = zip(self.roles.counts, self.taps_along, self.roles.strides, strict=True)
        return tuple(count + dilation * (taps - 1) for count, taps, dilation in sides)

    @property
    def places(self) -> int:
        """Places of all images."""
        return self.form.sizes[self.roles.channels] * math.prod(self.extents)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of all axes of all kernels."""
        channels, filters = self.matrix_axes
        data, weights = self._tensor_of(self.roles.data), self._tensor_of(self.roles.weights)
        sizes = self.form.sizes
        return {
            **sizes,
            **dict(zip(self.lines, self.extents, strict=True)),
            **dict(zip(self.steps, self.taps_along, strict=True)),
            **dict(zip(self.parities, self.roles.dilations, strict=False)),
            channels: padded_channels(sizes[channels], data, 1),
            filters: padded_channels(sizes[filters], weights, 1),
            # Taps of the last places reach into one image more.
            self.image: sizes[self.roles.channels] + 1,
            self.slice: self.split.count,
            self.place: self.split.length,
        }

    # ---- tensors between kernels

    def _tensor_of(self, load: Load) -> Tensor:
        return self.form.expr.tensor_by_name[load.tensor]

    def _tensor(self, suffix: str, axes: Sequence[str], dtype: str) -> Tensor:
        name = fresh_name(f"{self.form.expr.output.name}_{suffix}", self.form.expr.tensor_by_name)
        return Tensor(name, tuple(self.sizes[axis] for axis in axes), dtype)

    @cached_property
    def _moved(self) -> Tensor:
        axes = (self.image, *self.lines, *self.parities, self.matrix_axes[0])
        return self._tensor("image", axes, self._tensor_of(self.roles.data).dtype)

    @cached_property
    def _outer(self) -> Tensor:
        axes = (self.roles.channels, *self.lines, self.matrix_axes[1])
        return self._tensor("outer", axes, self._tensor_of(self.roles.weights).dtype)

    @property
    def _sum_axes(self) -> tuple[str, ...]:
        between = zip(self.steps, self.parities, strict=True) if self.parities else ((step,) for step in self.steps)
        return (self.slice, *(axis for axes in between for axis in axes), *self.matrix_axes)

    @cached_property
    def _sums(self) -> Tensor:
        return self._tensor("slices", self._sum_axes, self.form.expr.accumulate)

    # ---- kernels

    def problems(self) -> Mapping[str, KernelForm]:
        """The kernels of the chain in order, by what they do."""
        return {
            "copies the image": self._image(),
            "copies the output's gradient": self._gradient(),
            f"multiplies each of {count_text(self.split.count, 'slice')} of places": self._product(),
            "puts the slices together": self._output(),
        }

    def _image(self) -> KernelForm:
        roles, (channels, _) = self.roles, self.matrix_axes
        moved = {roles.channels: AffineIndex.axis(self.image)}
        for side, (output, tap) in enumerate(zip(roles.outputs, roles.taps, strict=True)):
            moved[tap] = AffineIndex.axis(self.lines[side])
            moved[output] = AffineIndex.of({self.parities[side]: 1} if self.parities else {})
        indices = tuple(index.substitute(moved) for index in roles.data.indices)
        axes = (self.image, *self.lines, *self.parities, channels)
        value = Load(roles.data.tensor, indices, 0.0)
        return kernel_of(self.form, self.sizes, [self._tensor_of(roles.data)], self._moved, axes, value)

    def _gradient(self) -> KernelForm:
        roles = self.roles
        lines = {tap: AffineIndex.axis(line) for tap, line in zip(roles.taps, self.lines, strict=True)}
        value = Load(roles.weights.tensor, tuple(index.substitute(lines) for index in roles.weights.indices), 0.0)
        axes = (roles.channels, *self.lines, self.matrix_axes[1])
        return kernel_of(self.form, self.sizes, [self._tensor_of(roles.weights)], self._outer, axes, value)

    def _product(self) -> KernelForm:
        channels, filters = self.matrix_axes
        moved, outer, length = self._moved, self._outer, self.split.length
        inside = moved.shape[1 + len(self.extents) :]
        flat = replace(
            moved, shape=(moved.shape[0] * math.prod(self.extents), *inside), external_shape=moved.caller_shape
        )
        sliced = replace(
            outer, shape=(self.split.count, length, self.sizes[filters]), external_shape=outer.caller_shape
        )
        moves = {
            step: self.roles.strides[side] * math.prod(self.extents[side + 1 :]) for side, step in enumerate(self.steps)
        }
        start = AffineIndex.of({self.slice: length, self.place: 1, **moves})
        image = Load(flat.name, (start, *map(AffineIndex.axis, (*self.parities, channels))))
        gradient = Load(sliced.name, tuple(map(AffineIndex.axis, (self.slice, self.place, filters))))
        value = Reduction("sum", (self.place,), Call("mul", (image, gradient)))
        return kernel_of(self.form, self.sizes, [flat, sliced], self._sums, self._sum_axes, value)

    def _output(self) -> KernelForm:
        roles, sums = self.roles, self._sums
        taps = (size * stride for size, stride in zip(self.taps_along, roles.dilations, strict=True))
        viewed = replace(
            sums,
            shape=(self.split.count, *taps, *(self.sizes[axis] for axis in self.matrix_axes)),
            external_shape=sums.caller_shape,
        )
        value = Load(sums.name, tuple(map(AffineIndex.axis, (self.slice, *roles.outputs, *self.matrix_axes))))
        return sum_of_slices(self.form, viewed, value, Axis(self.slice, self.split.count))


def _of(form: KernelForm, axes: Sequence[str]) -> list[int]:
    return [form.sizes[axis] for axis in axes]


def gradient_of(form: KernelForm) -> Convolution | None:
    """The roles of a gradient of filters; None for any other operator, convolutions included."""
    roles = convolution_of(form)
    if roles is None or roles.images is None or any(roles.flipped):
        return None
    # Both are sums over windows; those of a gradient are as large as an output, of which there are as many as taps.
    window = math.prod(
        dilation * (count - 1) + 1 for dilation, count in zip(roles.dilations, roles.counts, strict=True)
    )
    outputs = zip(roles.strides, _of(form, roles.outputs), strict=True)
    return roles if window > math.prod(dilation * (size - 1) + 1 for dilation, size in outputs) else None


def consider(placed: PlacedForm, direct: RProgram) -> Considered:
    """A gradient of filters by a copy of the image, priced, or why that cannot gain anything over ``direct``."""
    form, device = placed.form, placed.device
    uncut = _Layout(form, FlatGradient(1, _Layout(form, FlatGradient(1, 1)).places))
    steps = [PlacedForm(problem, device) for problem in uncut.problems().values()]
    product = steps[2]
    if product.product is None and product.bulk_roles is None:
        kind = product.form.input_dtype
        return Considered(NAME, declined=f"{device.name} has no matrix instruction that multiplies {kind}")
    least = sum(step.least_seconds for step in steps) + len(steps) * device.launch_overhead_seconds
    if direct.estimate.seconds <= least:
        return Considered(NAME, declined=f"{len(steps)} kernels take {1e6 * least:.0f} µs at least")
    counts = [each for each in split_k.counts_of(product, uncut.place) if each.divides(product.form)]
    if not counts:
        return Considered(NAME, declined=f"{uncut.places} places cannot be cut into whole slices that are worth it")
    # The copies are the same whatever the slices.
    copies = _parts(list(uncut.problems().items())[:2], device)
    programs = [_program(form, FlatGradient(each.count, each.length), copies, device) for each in counts]
    return Considered(NAME, tuple(sorted(programs, key=lambda program: program.estimate.seconds)))


def _parts(problems: Sequence[tuple[str, KernelForm]], device: DeviceSpec) -> tuple[ProgramPart, ...]:
    best = [(label, problem, construct(problem, device, 1).programs[0]) for label, problem in problems]
    return tuple(ProgramPart(label, form, each.schedule, each.estimate, each.policy) for label, form, each in best)


def _program(
    form: KernelForm, split: FlatGradient, copies: tuple[ProgramPart, ...], device: DeviceSpec
) -> ChainProgram:
    later_steps = list(_Layout(form, split).problems().items())[len(copies) :]
    return ChainProgram(
        NAME, f"{count_text(split.count, 'slice')} of all places", form, split, (*copies, *_parts(later_steps, device))
    )
