"""Tile schedule -> TVM: which lowering a schedule takes, and what all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from codegen.values import Expr, affine, constant
from sokoban.expression import Load, Tensor
from sokoban.kernel_form import KernelForm
from sokoban.matrix import WGMMA, needs_matrix
from sokoban.schedule import TileSchedule
from sokoban.windows import reads_patches

#: Requested store width when the schedule names none: whatever is legal.
VECTOR_ANY = 64


class LoweringError(RuntimeError):
    """TVM could not lower a schedule; the message is one line."""


@dataclass(frozen=True)
class Lowered:
    """A scheduled TVM module and what a caller needs to launch it.

    Attributes:
        module: one PrimFunc named ``entry``; its parameters are the inputs in order, then the output.
        entry: the kernel's name.
        grid, block: launch extents (x, y, z).
        shared_bytes: shared memory of a block, static and dynamic together.
        dynamic_shared_bytes: the part to be given at launch.
        has_barriers: the module says itself where threads wait for each other; TVM adds no barriers of its own.
    """

    module: Any
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    has_barriers: bool = False


def lower(form: KernelForm, schedule: TileSchedule, *, entry: str, dynamic_shared: bool = True) -> Lowered:
    """Lower one schedule.

    Args:
        form: the operator in canonical form.
        schedule: sizes for every axis of ``form`` that it needs.
        entry: name of the kernel.
        dynamic_shared: put shared memory beyond 48 KiB into a dynamic allocation (CUDA); otherwise keep it static.

    Raises:
        LoweringError: the schedule does not fit the operator.
    """
    if schedule.instruction == "fma" and needs_matrix(form):
        raise LoweringError(f"{entry}: eight-bit floats are multiplied by matrix instructions alone")
    for axis, block in schedule.block:
        if schedule.instruction == "fma" and block % schedule.register_tile[axis]:
            held = f"{schedule.register_tile[axis]} elements of {axis} per thread"
            raise LoweringError(f"{entry}: {held} do not divide a block of {block}")
    try:
        if form.kind == "rows" or schedule.reduce_threads:
            from codegen.lower_rows import lower_rows

            return lower_rows(form, schedule, entry=entry)
        if schedule.instruction.startswith("wmma"):
            from codegen.lower_wmma import lower_wmma

            return lower_wmma(form, schedule, entry=entry, dynamic_shared=dynamic_shared)
        if schedule.instruction == WGMMA:
            from codegen.lower_wgmma import lower_wgmma

            return lower_wgmma(form, schedule, entry=entry)
        from codegen.lower_staged import StagedLowering, is_staged

        if is_staged(form, schedule):
            return StagedLowering(form, schedule, entry, dynamic_shared).run()
        if schedule.instruction == "fma" and (schedule.stages > 1 or schedule.turned or schedule.raster):
            needed = "several stages, turned tiles and bands need every operand of a reduction staged"
            raise LoweringError(f"{entry}: {needed}")
        if reads_patches(form, schedule):
            from codegen.lower_windows import lower_windows

            return lower_windows(form, schedule, entry=entry)
        if form.reduction is None and not schedule.cached:
            from codegen.lower_pointwise import lower_pointwise

            return lower_pointwise(form, schedule, entry=entry)
        if schedule.instruction.startswith("mma"):
            from codegen.lower_mma import lower_mma

            return lower_mma(form, schedule, entry=entry, dynamic_shared=dynamic_shared)
        from codegen.lower_tiles import TileLowering

        return TileLowering(form, schedule, entry, dynamic_shared).run()
    except RuntimeError as error:  # what all of TVM's errors are
        if isinstance(error, LoweringError):
            raise
        raise LoweringError(f"{entry}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """The line of a TVM error that says what is wrong: the last with the word, of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")[:300]


def padded_sizes(form: KernelForm, schedule: TileSchedule) -> dict[str, int]:
    """Axis sizes rounded up to whole blocks (spatial) and whole steps (reduction)."""
    tiles = {**schedule.block_of, **schedule.step_of}
    return {axis: -(-size // tiles.get(axis, 1)) * tiles.get(axis, 1) for axis, size in form.sizes.items()}


def read_conditions(load: Load, tensor: Tensor, axes: Mapping[str, Expr], ranges: Mapping[str, int]) -> list[Expr]:
    """What makes the indices of ``load`` lie inside its tensor, as far as interval algebra cannot prove it."""
    conditions = []
    for index, extent in zip(load.indices, tensor.shape, strict=True):
        low, high = index.bounds(ranges)
        if low < 0:
            conditions.append(affine(index, axes) >= 0)
        if high >= extent:
            conditions.append(affine(index, axes) < extent)
    return conditions


def guarded_read(load: Load, tensor: Tensor, source: Any, axes: Mapping[str, Expr], ranges: Mapping[str, int]) -> Expr:
    """``source[indices]`` where the indices are inside the tensor, the pad value elsewhere; ``ranges`` are axis sizes.

    Only the bounds that interval algebra cannot prove become conditions.
    """
    indices = [affine(index, axes) for index in load.indices]
    conditions = read_conditions(load, tensor, axes, ranges)
    value = source(*(indices or [tirx.const(0, "int32")]))
    if not conditions:
        return value
    return tirx.if_then_else(tirx.all(*conditions), value, constant(load.pad or 0.0, tensor.dtype))


def identifier(name: str) -> str:
    """A name with every character that C does not allow in an identifier replaced."""
    safe = "".join(character if character.isascii() and character.isalnum() else "_" for character in name)
    return safe if safe and not safe[0].isdigit() else f"op_{safe}"
