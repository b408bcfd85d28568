"""Guarded reads of tensors: padding, partial tiles, widths of vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx

from codegen.tir.bounds import Bounds
from codegen.tir.statements import wide
from codegen.tir.values import Expr, affine, stored_constant
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Load, Tensor
from sokoban.schedule.tile import TileSchedule

#: Elements of an access where the schedule names none: a multiple of every legal width.
VECTOR_ANY = 64

LARGEST_INT32 = 2**31 - 1


def padded_sizes(form: KernelForm, schedule: TileSchedule) -> dict[str, int]:
    """Axis sizes rounded up to whole blocks (spatial) and whole steps (reduction)."""
    tiles = {**schedule.block_of, **schedule.step_of}
    return {axis: -(-size // tiles.get(axis, 1)) * tiles.get(axis, 1) for axis, size in form.sizes.items()}


def read_conditions(
    load: Load, tensor: Tensor, axes: Mapping[str, Expr], ranges: Mapping[str, int], bounds: Bounds | None = None
) -> list[Expr]:
    """Conditions under which the indices of ``load`` are inside its tensor; ``ranges`` are axis sizes. Without
    ``bounds`` it ends where its shape says.

    Conditions that interval algebra can prove are left out.
    """
    conditions = []
    for position, (index, extent) in enumerate(zip(load.indices, tensor.shape, strict=True)):
        low, high = index.bounds(ranges)
        if low < 0:
            conditions.append(affine(index, axes) >= 0)
        if high >= extent:
            end = extent if bounds is None else bounds.extent(tensor.name, position, extent)
            conditions.append(affine(index, axes) < end)
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
    bounds: Bounds | None = None,
) -> Expr:
    """``source[indices]`` where the indices are inside the tensor, the pad value elsewhere; ``ranges`` are axis sizes.

    Only the bounds that interval algebra cannot prove become conditions.
    """
    indices = [affine(index, axes) for index in load.indices]
    if _reach(load, tensor, ranges) > LARGEST_INT32:
        # Far outside of the tensor, where nothing is read, places would not fit 32 bits.
        indices = [wide(index) for index in indices]
    conditions = read_conditions(load, tensor, axes, ranges, bounds)
    value = source(*(indices or [tirx.const(0, "int32")]))
    if not conditions:
        return value
    return tirx.if_then_else(tirx.all(*conditions), value, stored_constant(load.pad or 0.0, tensor.dtype))
