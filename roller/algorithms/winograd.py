"""Winograd's fast convolution: tiles of outputs from fewer multiplications, by transforms before and after products.

``F(m x m, 3 x 3)`` computes ``m x m`` outputs of a 3x3 convolution from a patch of ``m + 2`` rows and columns::

    U[x, c, f] = G W[f, c] Gᵀ            (m+2)² numbers x per filter
    V[x, c, p] = Bᵀ D[c, p] B            and per patch p of every channel
    M[x, f, p] = sum(c, U[x, c, f] * V[x, c, p])
    Y[f, p]    = Aᵀ M[f, p] A            m x m outputs, epilogue included

with ``(m+2)² / m²`` multiplications per output and channel in place of 9: 4 for ``m = 2``, 2.25 for ``m = 4``
(A. Lavin, S. Gray, "Fast algorithms for convolutional neural networks", 2016). The products in the middle are an
ordinary batched matrix product; V and M pass through memory, which is what it costs.

Results are not those of a direct convolution to the last bit: transforms add and subtract numbers larger than their
result, so that rounding errors of the products grow (:func:`amplification`): hardly for ``m = 2``, about thirtyfold
at the worst output of a tile for ``m = 4``. In float32 that is a largest relative error of some 2e-5 with 16
channels and 6e-5 with 512, in place of 1e-6 and 6e-6 of a direct sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hal.spec.device import DeviceSpec
from roller.algorithms.chain import ChainProgram, Considered
from roller.algorithms.convolution import Convolution, convolution_of
from roller.construct.construct import construct
from roller.construct.program import ProgramPart, RProgram
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.normalize import substitute_axes
from sokoban.kernel.patches import COLUMN, OUT_COLUMN, OUT_ROW, RESULT, ROW, PatchTransform
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
from sokoban.model.gpu.kinds.patches import estimate_patches
from sokoban.schedule.cutting import cut, cut_sizes, resize
from sokoban.schedule.patches import PatchSchedule

#: The name of the algorithm.
NAME = "winograd"

Matrix = tuple[tuple[float, ...], ...]

#: Rows and columns of the filters.
TAPS = 3

#: Outputs per tile -> the matrices Aᵀ, Bᵀ and G, with the points 0, 1, -1 (and 2, -2) that Lavin and Gray use.
MATRICES: dict[int, tuple[Matrix, Matrix, Matrix]] = {
    2: (
        ((1, 1, 1, 0), (0, 1, -1, -1)),
        ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
        ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    ),
    4: (
        ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
        (
            (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1),
        ),
        (
            (1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1),
        ),
    ),
}  # fmt: skip

#: Half a unit in the last place of float32, and standard deviations of rounding errors that count as right: about one
#: of a billion outputs errs more.
ROUNDING = 2.0**-24
DEVIATIONS = 6.0

#: Channels, and filters, from which on products are worth transforming for.
LEAST_CHANNELS = 8

#: Threads of a block that transforms are priced with.
PATCH_THREADS = (64, 128, 256)

#: Elements of a workspace tensor that 32-bit indices reach.
MOST_ELEMENTS = 2**31 - 1


def amplification(size: int) -> float:
    """Rounding error of ``F(size x size, 3x3)`` over that of a direct sum, at the worst output of a
    tile, as standard deviations of independent data: 1.7 for 2, 31 for 4.

    An output is a sum of products, ``A`` times; the error of each is in proportion to its own size, which grows with
    the rows of ``B`` and ``G``. Rows and columns contribute alike, so that the square root of both is one of them.

    >>> round(amplification(2), 2), round(amplification(4), 1)
    (1.67, 31.4)
    """
    output, data, filters = MATRICES[size]
    sizes = [_square(b) * _square(g) for b, g in zip(data, filters, strict=True)]
    return max(sum(a * a * each for a, each in zip(row, sizes, strict=True)) for row in output) / TAPS


def _square(row: Sequence[float]) -> float:
    return sum(number * number for number in row)


# The chain


@dataclass(frozen=True)
class Tiles:
    """``F(size x size, 3 x 3)``."""

    size: int

    @property
    def text(self) -> str:
        """``F(4x4, 3x3)``."""
        return f"F({self.size}x{self.size}, {TAPS}x{TAPS})"

    def tolerance(self, form: KernelForm) -> float | None:
        """Rounding errors of the products, each a sum over the channels, as they reach the output."""
        convolution = convolution_of(form)
        assert convolution is not None
        return DEVIATIONS * amplification(self.size) * ROUNDING * math.sqrt(form.sizes[convolution.channels])

    def problems(self, form: KernelForm) -> tuple[PatchTransform, PatchTransform, KernelForm, PatchTransform]:
        """Filters, input, products, output; see :class:`roller.algorithms.chain.Split`."""
        convolution = convolution_of(form)
        assert convolution is not None
        layout = _Layout.of(form, convolution, self.size)
        return layout.filters(), layout.input(), layout.products(), layout.output()

    def cut_down(self, form: KernelForm, schedules: Sequence[Any]) -> tuple[KernelForm, Tiles]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        convolution = convolution_of(form)
        products, schedule = self.problems(form)[2], schedules[2]
        assert convolution is not None
        wanted = cut_sizes(products, schedule)
        layout = _Layout.of(form, convolution, self.size)
        # Columns of tiles with the image's own last one, then as many rows and images as the products want patches.
        columns, across = self._fewer(form.sizes[convolution.columns], 3)
        patches = -(-wanted[layout.places] // across)
        rows, down = self._fewer(form.sizes[convolution.rows], 3)
        images = form.sizes[convolution.images] if convolution.images else 1
        if images * down < patches:
            rows, down = self._fewer(form.sizes[convolution.rows], -(-patches // images))
        sizes = {
            convolution.rows: rows,
            convolution.columns: columns,
            convolution.channels: wanted[convolution.channels],
        }
        sizes[convolution.filters] = wanted[convolution.filters]
        if convolution.images:
            sizes[convolution.images] = cut(images, -(-patches // (2 * down)))
        return resize(form, {**form.sizes, **sizes}), self

    def _fewer(self, size: int, tiles: int) -> tuple[int, int]:
        """Rows or columns of at most so many tiles, the last one as partial as it is; and how many tiles these are."""
        count = -(-size // self.size)
        tile_count = min(count, tiles)
        return size - (count - tile_count) * self.size, tile_count


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The tensors of one chain, and the axes that its kernels walk."""

    form: KernelForm
    convolution: Convolution
    size: int
    down: str
    across: str
    places: str
    element: str

    @staticmethod
    def of(form: KernelForm, convolution: Convolution, size: int) -> _Layout:
        taken = {*form.sizes, *form.expr.tensor_by_name}
        return _Layout(
            form=form,
            convolution=convolution,
            size=size,
            down=fresh_name("tile_row", taken),
            across=fresh_name("tile_column", taken),
            places=fresh_name("tile", taken),
            element=fresh_name("element", taken),
        )

    @property
    def edge(self) -> int:
        """Rows, and columns, of a patch."""
        return self.size + TAPS - 1

    @property
    def grid(self) -> tuple[int, int, int]:
        """Images, and rows and columns of tiles."""
        sizes, roles = self.form.sizes, self.convolution
        images = sizes[roles.images] if roles.images else 1
        return images, -(-sizes[roles.rows] // self.size), -(-sizes[roles.columns] // self.size)

    def _axes(self, channel: str) -> tuple[Axis, ...]:
        """The axes of patches of one channel each, neighbours in memory last."""
        roles, sizes = self.convolution, self.form.sizes
        images, down, across = self.grid
        tiles = [Axis(self.down, down), Axis(self.across, across)]
        if roles.images:
            tiles.insert(0, Axis(roles.images, images))
        channels = Axis(channel, sizes[channel])
        return (*tiles, channels) if roles.channels_last else (channels, *tiles)

    @property
    def _place(self) -> AffineIndex:
        """The number of a patch among those of a channel."""
        _, down, across = self.grid
        terms = {self.down: across, self.across: 1}
        if self.convolution.images:
            terms[self.convolution.images] = down * across
        return AffineIndex.of(terms)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        taken = self.form.expr.tensor_by_name
        return Tensor(fresh_name(name, taken), (self.edge**2, *shape), self.form.expr.accumulate)

    def _in_patches(self, name: str, channel: str) -> Tensor:
        channels, patches = self.form.sizes[channel], math.prod(self.grid)
        shape = (patches, channels) if self.convolution.channels_last else (channels, patches)
        return self._tensor(name, shape)

    def _patch_indices(self, channel: str, row: str, column: str) -> tuple[AffineIndex, ...]:
        """Where an element of a transformed patch lies."""
        element = AffineIndex.of({row: self.edge, column: 1})
        channel_index = AffineIndex.axis(channel)
        place_indices = (self._place, channel_index) if self.convolution.channels_last else (channel_index, self._place)
        return (element, *place_indices)

    @property
    def _names(self) -> tuple[str, str, str]:
        output = self.form.expr.output.name
        return f"{output}_filters", f"{output}_patches", f"{output}_products"

    def filters(self) -> PatchTransform:
        """``U = G W Gᵀ``."""
        roles, form = self.convolution, self.form
        # A filter that is read backwards by the data's index is turned here.
        places = dict(zip(roles.taps, ((ROW, roles.flipped[0]), (COLUMN, roles.flipped[1])), strict=True))
        turned = {
            tap: AffineIndex.of({axis: -1 if back else 1}, TAPS - 1 if back else 0)
            for tap, (axis, back) in places.items()
        }
        source = Load(roles.weights.tensor, tuple(index.substitute(turned) for index in roles.weights.indices))
        sizes = form.sizes
        output = self._tensor(self._names[0], (sizes[roles.channels], sizes[roles.filters]))
        element = AffineIndex.of({OUT_ROW: self.edge, OUT_COLUMN: 1})
        target = (element, AffineIndex.axis(roles.channels), AffineIndex.axis(roles.filters))
        axes = tuple(Axis(axis, sizes[axis]) for axis in (roles.channels, roles.filters))
        return self._transform(axes, MATRICES[self.size][2], source, target, output)

    def input(self) -> PatchTransform:
        """``V = Bᵀ D B``."""
        roles = self.convolution
        starts = {roles.rows: self._first(self.down, ROW), roles.columns: self._first(self.across, COLUMN)}
        # Backwards, a window starts with its last tap.
        taps = {
            tap: AffineIndex.of({}, TAPS - 1 if back else 0)
            for tap, back in zip(roles.taps, roles.flipped, strict=True)
        }
        indices = tuple(index.substitute({**starts, **taps}) for index in roles.data.indices)
        target = self._patch_indices(roles.channels, OUT_ROW, OUT_COLUMN)
        output = self._in_patches(self._names[1], roles.channels)
        source = Load(roles.data.tensor, indices, 0.0)
        return self._transform(self._axes(roles.channels), MATRICES[self.size][1], source, target, output)

    def _first(self, tile: str, inside: str) -> AffineIndex:
        """Row or column ``inside`` of the patch of a tile."""
        return AffineIndex.of({tile: self.size, inside: 1})

    def _transform(
        self, axes: tuple[Axis, ...], matrix: Matrix, source: Load, target: tuple[AffineIndex, ...], output: Tensor
    ) -> PatchTransform:
        expr = self.form.expr
        inputs = (expr.tensor_by_name[source.tensor],)
        stored = Load(RESULT, ())
        return PatchTransform(
            name=expr.name,
            axes=axes,
            matrix=matrix,
            source=source,
            target=target,
            value=stored,
            inputs=inputs,
            output=output,
            accumulate=expr.accumulate,
        )

    def products(self) -> KernelForm:
        """``M = sum(c, U V)``, a product of matrices per element of a patch."""
        roles, form = self.convolution, self.form
        weights = self._tensor(self._names[0], (form.sizes[roles.channels], form.sizes[roles.filters]))
        patches = self._in_patches(self._names[1], roles.channels)
        output = self._in_patches(self._names[2], roles.filters)
        element, places = AffineIndex.axis(self.element), AffineIndex.axis(self.places)
        channel, number = AffineIndex.axis(roles.channels), AffineIndex.axis(roles.filters)
        last = roles.channels_last
        data = Load(patches.name, (element, places, channel) if last else (element, channel, places))
        filters = Load(weights.name, (element, channel, number))
        factors = (data, filters) if last else (filters, data)
        axes = (self.element, self.places, roles.filters) if last else (self.element, roles.filters, self.places)
        value = Reduction("sum", (roles.channels,), Call("mul", factors))
        sizes = {
            self.element: self.edge**2, self.places: math.prod(self.grid),
            roles.filters: form.sizes[roles.filters], roles.channels: form.sizes[roles.channels],
        }  # fmt: skip
        tensors = {tensor.name: tensor for tensor in (weights, patches)}
        expr = replace(
            form.expr,
            axes=tuple(Axis(axis, sizes[axis]) for axis in (*axes, roles.channels)),
            tensors=(*(tensors[load.tensor] for load in factors), output),
            statements=(Statement(output.name, axes, value),),
        )
        return kernel_form(expr)

    def output(self) -> PatchTransform:
        """``Y = Aᵀ M A`` with the epilogue."""
        roles, form = self.convolution, self.form
        statement = form.reductions[0]
        products = self._in_patches(self._names[2], roles.filters)
        source = Load(products.name, self._patch_indices(roles.filters, ROW, COLUMN))
        places = {
            roles.rows: self._first(self.down, OUT_ROW),
            roles.columns: self._first(self.across, OUT_COLUMN),
        }
        sums = [load for load in loads(form.final.value) if load.tensor == statement.tensor]
        results: dict[Value, Value] = {load: Load(RESULT, ()) for load in sums}
        value = substitute_axes(rewrite(form.final.value, results), places)
        target = tuple(AffineIndex.axis(axis).substitute(places) for axis in form.final.axes)
        expr = form.expr
        others = dict.fromkeys(load.tensor for load in form.final_loads)
        inputs = (products, *(expr.tensor_by_name[name] for name in others))
        axes, matrix = self._axes(roles.filters), MATRICES[self.size][0]
        return PatchTransform(
            name=expr.name,
            axes=axes,
            matrix=matrix,
            source=source,
            target=target,
            value=value,
            inputs=inputs,
            output=expr.output,
            accumulate=expr.accumulate,
        )


# What it takes


def consider(placed: PlacedForm, direct: RProgram) -> Considered:
    """The convolution by tiles of 2x2 and of 4x4 outputs, or why that cannot gain anything over ``direct``."""
    form = placed.form
    convolution = convolution_of(form)
    if (
        convolution is None
        or convolution.counts != (TAPS, TAPS)
        or convolution.strides != (1, 1)
        or convolution.dilations != (1, 1)
    ):
        return Considered(NAME, declined="it is no 3x3 convolution of stride 1")
    declined = _declined(form, convolution)
    if declined:
        return Considered(NAME, declined=declined)
    programs, reasons = [], []
    for size in MATRICES:
        tiles = Tiles(size)
        reason = _too_slow(placed, convolution, direct, tiles)
        if reason:
            reasons.append(reason)
        else:
            programs.append(_program(form, placed.device, tiles))
    programs.sort(key=lambda program: program.estimate.seconds)
    return Considered(NAME, tuple(programs), "" if programs else "; ".join(reasons))


def _declined(form: KernelForm, convolution: Convolution) -> str:
    dtypes = {tensor.dtype for tensor in (*form.expr.inputs, form.expr.output)}
    if dtypes != {"float32"} or form.expr.accumulate != "float32":
        return "transforms are done in float32, and so are the tensors that they are for"
    if form.expr.allow_tf32:
        return "transforms would amplify the rounding of TensorFloat-32"
    if min(form.sizes[convolution.channels], form.sizes[convolution.filters]) < LEAST_CHANNELS:
        return f"there are fewer than {LEAST_CHANNELS} channels or filters"
    return ""


def _too_slow(placed: PlacedForm, convolution: Convolution, direct: RProgram, tiles: Tiles) -> str:
    """Why these tiles cannot be faster, from their traffic and arithmetic alone."""
    form, device = placed.form, placed.device
    layout = _Layout.of(form, convolution, tiles.size)
    sizes, patches = form.sizes, math.prod(layout.grid)
    channels, filters = sizes[convolution.channels], sizes[convolution.filters]
    most = layout.edge**2 * max(channels, filters) * patches
    if most > MOST_ELEMENTS:
        return f"{tiles.text} needs a tensor of {most} elements, more than 32-bit indices reach"
    passed = 2 * 4 * layout.edge**2 * (patches * (channels + filters) + channels * filters)
    once_bytes = sum(tensor.size_bytes for tensor in (*form.expr.inputs, form.expr.output))
    flops = 2.0 * layout.edge**2 * patches * channels * filters
    least = max(flops / placed.rate.flops, passed / device.dram.bandwidth_bytes_per_second / 2)
    least += (passed / 2 + once_bytes) / device.dram.bandwidth_bytes_per_second
    least += 4 * device.launch_overhead_seconds
    if least < direct.estimate.seconds:
        return ""
    return f"{tiles.text} takes at least {1e6 * least:.0f} µs for its traffic and products"


def _program(form: KernelForm, device: DeviceSpec, tiles: Tiles) -> ChainProgram:
    filters, data, products, output = tiles.problems(form)
    product = construct(products, device, 1).programs[0]
    parts = (
        _transformed(f"transforms the filters for {tiles.text}", filters, device),
        _transformed("transforms the input", data, device),
        ProgramPart("multiplies", products, product.schedule, product.estimate, product.policy),
        _transformed("transforms the products into the output", output, device),
    )
    return ChainProgram(NAME, tiles.text, form, tiles, parts)


def _transformed(label: str, transform: PatchTransform, device: DeviceSpec) -> ProgramPart:
    schedules = [PatchSchedule(threads) for threads in PATCH_THREADS]
    estimates = [estimate_patches(transform, schedule, device) for schedule in schedules]
    best = min(range(len(schedules)), key=lambda number: estimates[number].seconds)
    return ProgramPart(label, transform, schedules[best], estimates[best], "a thread per patch")
