"""Guarded reads of tensors: padding, partial tiles, widths of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tvm import tirx

from codegen.tir.bounds import Bounds
from codegen.tir.statements import wide
from codegen.tir.values import Expr, affine, stored_constant
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import GatheredIndex, Load, Tensor
from sokoban.schedule.tile import TileSchedule

#: Elements of an access where the schedule names none: a multiple of every legal width.
VECTOR_ANY = 64

#: The element of a read that says where to read, as memory holds it.
Gathered = Callable[[Load], Expr]

LARGEST_INT32 = 2**31 - 1


def _nothing_gathered(place: Load) -> Expr:
    raise TypeError(f"a kernel of this kind reads no places from {place.tensor}")


def padded_sizes(form: KernelForm, schedule: TileSchedule) -> dict[str, int]:
    """Axis sizes rounded up to whole blocks (spatial) and whole steps (reduction)."""
    tiles = {**schedule.block_of, **schedule.step_of}
    return {axis: -(-size // tiles.get(axis, 1)) * tiles.get(axis, 1) for axis, size in form.sizes.items()}


def places(load: Load, axes: Mapping[str, Expr], gathered: Gathered) -> list[Expr]:
    """The indices of a load as integer expressions, those that are read themselves within their dimensions."""
    return [
        tirx.max(tirx.min(gathered(index.place).astype("int32"), index.high), index.low)
        if isinstance(index, GatheredIndex)
        else affine(index, axes)
        for index in load.indices
    ]


def read_conditions(
    load: Load, tensor: Tensor, indices: Sequence[Expr], ranges: Mapping[str, int], bounds: Bounds | None = None
) -> list[Expr]:
    """Conditions under which ``indices`` of ``load`` are inside its tensor; ``ranges`` are axis sizes. Without
    ``bounds`` it ends where its shape says.

    Conditions that interval algebra can prove are left out.
    """
    conditions = []
    for position, (index, place, extent) in enumerate(zip(load.indices, indices, tensor.shape, strict=True)):
        low, high = index.bounds(ranges)
        if low < 0:
            conditions.append(place >= 0)
        if high >= extent:
            end = extent if bounds is None else bounds.extent(tensor.name, position, extent)
            conditions.append(place < end)
    return conditions


def _reach(load: Load, tensor: Tensor, ranges: Mapping[str, int]) -> int:
    """Largest place, in elements, that a load's indices come to, outside of the tensor included."""
    strides = [math.prod(tensor.shape[depth + 1 :]) for depth in range(len(tensor.shape))]
    bounds = [max(map(abs, index.bounds(ranges))) for index in load.indices]
    return sum(bound * stride for bound, stride in zip(bounds, strides, strict=True))


def guarded_read(
    load: Load,
    tensor: Tensor,
    source: Any,
    axes: Mapping[str, Expr],
    ranges: Mapping[str, int],
    gathered: Gathered = _nothing_gathered,
    bounds: Bounds | None = None,
) -> Expr:
    """``source[indices]`` where the indices are inside the tensor, the pad value elsewhere.

    Only the bounds that interval algebra cannot prove become conditions.

    Args:
        load: the read.
        tensor: what it reads.
        source: gives the element at indices.
        axes: variables or numbers by axis.
        ranges: sizes of axes.
        gathered: gives the element of a read that says where to read.
        bounds: ends of tensors where they are not those of their shapes.
    """
    indices = places(load, axes, gathered)
    conditions = read_conditions(load, tensor, indices, ranges, bounds)
    if _reach(load, tensor, ranges) > LARGEST_INT32:
        # Far outside of the tensor, where nothing is read, places would not fit 32 bits.
        indices = [wide(index) for index in indices]
    value = source(*(indices or [tirx.const(0, "int32")]))
    if not conditions:
        return value
    return tirx.if_then_else(tirx.all(*conditions), value, stored_constant(load.pad or 0.0, tensor.dtype))


def read_in_place(
    load: Load,
    tensors: Mapping[str, Tensor],
    sources: Mapping[str, Any],
    axes: Mapping[str, Expr],
    ranges: Mapping[str, int],
    taken: Mapping[Load, Expr] = MappingProxyType({}),
    bounds: Bounds | None = None,
) -> Expr:
    """The element of a load as memory holds it; of those in ``taken`` the one in registers.

    Args:
        load: the read.
        tensors: all that may be read, by name.
        sources: the same as buffers of their shapes.
        axes: variables or numbers by axis.
        ranges: sizes of axes.
        taken: elements in registers.
        bounds: ends of tensors where they are not those of their shapes.
    """
    if load in taken:
        return taken[load]
    source = sources[load.tensor]

    def gathered(place: Load) -> Expr:
        return read_in_place(place, tensors, sources, axes, ranges, taken, bounds)

    return guarded_read(load, tensors[load.tensor], lambda *indices: source[indices], axes, ranges, gathered, bounds)
