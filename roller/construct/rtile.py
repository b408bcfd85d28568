"""rTile: a tile of an operator's axes, with the data tiles it implies (thesis 6.3.1, figure 6.3).

Sizes are plain Python integers here: construction asks about one tile at a time, a few hundred times per operator, and
a handful of multiplications is faster than any array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

from sokoban.kernel.form import KernelForm
from sokoban.kernel.regions import data_dimension

#: A dimension of several axes: its extent is a number plus ``sum(coefficient * size)``.
Window = tuple[int, tuple[tuple[int, int], ...]]


@dataclass
class AccessMap:
    """Indices of one operand, over axis positions.

    Attributes:
        element_bytes: bytes of one element.
        dimensions: per dimension of the data tile its (axis position, coefficient) pairs.
        plain: axes that are a dimension by themselves; their product needs no arithmetic on the way.
        pick_plain: the sizes of the plain axes of a tile shape.
        windows: the other dimensions, sliding windows and strides that do not vanish, each with its extent
            less ``sum(c * size)``.
    """

    element_bytes: int
    dimensions: tuple[tuple[tuple[int, int], ...], ...]
    plain: tuple[int, ...] = field(init=False, compare=False)
    pick_plain: Callable[[tuple[int, ...]], tuple[int, ...]] = field(init=False, compare=False)
    windows: tuple[Window, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        windows = [terms for terms in self.dimensions if len(terms) != 1 or terms[0][1] != 1]
        self.windows = tuple([(1 - sum([c for _, c in terms]), terms) for terms in windows])
        axes = tuple([terms[0][0] for terms in self.dimensions if len(terms) == 1 and terms[0][1] == 1])
        self.plain = axes
        self.pick_plain = itemgetter(*axes) if len(axes) > 1 else lambda shape: tuple([shape[axis] for axis in axes])


@dataclass(frozen=True, kw_only=True)
class TileSpace:
    """The axes of an operator in one order, and its operands' access maps over them, ready for integer arithmetic.

    Attributes:
        axes: spatial axes in output order, then reduction axes.
        sizes: their extents.
        spatial_count: how many of them are spatial.
        inputs: access maps of the body's loads.
        input_names: their tensors.
        output_bytes: bytes of one output element.
    """

    form: KernelForm
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    spatial_count: int
    inputs: tuple[AccessMap, ...]
    input_names: tuple[str, ...]
    output_bytes: int

    @staticmethod
    def of(form: KernelForm) -> TileSpace:
        axes = (*form.spatial, *form.reduced)
        position = {axis: i for i, axis in enumerate(axes)}
        inputs = []
        for load in form.body_loads:
            dimensions = tuple(
                [tuple([(position[axis], abs(c)) for axis, c in data_dimension(i).terms]) for i in load.indices]
            )
            inputs.append(AccessMap(form.expr.tensor_by_name[load.tensor].element_bytes, dimensions))
        return TileSpace(
            form=form,
            axes=axes,
            sizes=tuple([form.sizes[axis] for axis in axes]),
            spatial_count=len(form.spatial),
            inputs=tuple(inputs),
            input_names=tuple([load.tensor for load in form.body_loads]),
            output_bytes=form.expr.output.element_bytes,
        )

    @cached_property
    def innermost(self) -> dict[int, tuple[int, ...]]:
        """Element sizes of the inputs whose leading dimension an axis is by itself, by axis."""
        bytes_by_axis: dict[int, tuple[int, ...]] = {}
        for access in self.inputs:
            axes = access.dimensions[-1] if access.dimensions else ()
            if len(axes) == 1 and axes[0][1] == 1:
                bytes_by_axis[axes[0][0]] = (*bytes_by_axis.get(axes[0][0], ()), access.element_bytes)
        return bytes_by_axis

    @cached_property
    def points(self) -> int:
        """Evaluations of the body in the whole operator."""
        total = 1
        for size in self.sizes:
            total *= size
        return total


@dataclass(frozen=True)
class RTile:
    """A tile ``shape`` over the axes of ``space``, with ``storage_padding`` elements per staged input's row."""

    space: TileSpace
    shape: tuple[int, ...]
    storage_padding: tuple[int, ...] = ()

    def replace(self, axis: int, size: int) -> RTile:
        """The tile with one axis changed."""
        return RTile(self.space, (*self.shape[:axis], size, *self.shape[axis + 1 :]), self.storage_padding)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return dict(zip(self.space.axes, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}={s}" for a, s in zip(self.space.axes, self.shape, strict=True)) + "]"


def data_tile_elements(access: AccessMap, shape: tuple[int, ...]) -> int:
    """Elements of the data tile an operand needs: the product of ``1 + sum(c * (size - 1))`` over its dimensions.

    >>> rows_of_windows = AccessMap(4, (((0, 2), (1, 1)), ((2, 1),)))  # X[2*oh + kh, c]
    >>> data_tile_elements(rows_of_windows, (7, 3, 16))  # 15 * 16
    240
    """
    total = math.prod(access.pick_plain(shape))
    for extent, terms in access.windows:
        for axis, coefficient in terms:
            extent += coefficient * shape[axis]
        total *= extent
    return total
