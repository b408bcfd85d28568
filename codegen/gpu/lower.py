"""Schedules to GPU kernels: which lowering takes a schedule, and what no lowering does."""

from __future__ import annotations

from codegen.gpu import patches, pointwise, rows, tiles, windows
from codegen.gpu.attention import gradient_multiply_adds, gradient_warps, groups, multiply_adds, slices, warps
from codegen.gpu.matrix import bulk, mma, wgmma, wmma
from codegen.gpu.pairs import multiply_adds as pair_multiply_adds
from codegen.gpu.pairs import warps as pair_warps
from codegen.gpu.staged import kernel as staged
from codegen.tir.lowered import Lowered, LoweringError
from codegen.tir.lowering import Lowering, LoweringRequest, chosen, lowered_by
from sokoban.kernel.form import KernelForm
from sokoban.schedule.tile import TileSchedule

#: The lowerings, asked in this order; the first that takes a schedule lowers it.
LOWERINGS: tuple[Lowering[Lowered], ...] = (
    patches, warps, groups, multiply_adds, slices, gradient_warps,
    gradient_multiply_adds, pair_warps, pair_multiply_adds, rows, wmma, bulk, wgmma, staged, windows, pointwise, mma,
    tiles,
)  # fmt: skip

#: Lowerings that keep tiles in the tensors' order and fetch a step, then compute on it, whatever the schedule says.
_ONE_STAGE = (windows, pointwise, tiles)


def lower(request: LoweringRequest) -> Lowered:
    """Lower one schedule.

    Raises:
        LoweringError: the schedule does not fit the operator, or TVM refused it.
        ValueError: a schedule of matrix instructions does not fit the operator or the instruction.
    """
    if isinstance(request.problem, KernelForm):
        problem = _problem(request.form, request.tiles)
        if problem is not None:
            raise LoweringError(f"{request.entry}: {problem}")
    lowering = chosen(LOWERINGS, request)
    if lowering in _ONE_STAGE and _needs_staging(request.tiles):
        problem = "several stages, turned tiles and bands need every operand of a reduction staged"
        raise LoweringError(f"{request.entry}: {problem}")
    return lowered_by(lowering, request)


def _problem(form: KernelForm, schedule: TileSchedule) -> str | None:
    """Why no lowering can make a kernel of a schedule of multiply-adds; None where one may."""
    if schedule.uses_matrix:
        return None
    if form.needs_matrix:
        return "eight-bit floats are multiplied by matrix instructions alone"
    for axis, block in schedule.block:
        if block % schedule.register_tile[axis]:
            return f"{schedule.register_tile[axis]} elements of {axis} per thread do not divide a block of {block}"
    return None


def _needs_staging(schedule: TileSchedule) -> bool:
    """Whether a schedule of multiply-adds asks for what only kernels that stage all operands can do."""
    return not schedule.uses_matrix and (schedule.stages > 1 or bool(schedule.turned) or bool(schedule.raster))
