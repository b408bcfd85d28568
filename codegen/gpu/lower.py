"""Tile schedule -> TVM: which lowering a schedule takes, and what all of them share."""

from __future__ import annotations

from codegen.gpu.patches import lower_patches
from codegen.tir.lowered import Lowered, LoweringError, reason_of
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.patches import PatchTransform
from sokoban.kernel.problem import Problem
from sokoban.schedule.patches import PatchSchedule, Schedule
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.windows import reads_patches


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
    if not schedule.uses_matrix and form.needs_matrix:
        raise LoweringError(f"{entry}: eight-bit floats are multiplied by matrix instructions alone")
    for axis, block in schedule.block:
        if not schedule.uses_matrix and block % schedule.register_tile[axis]:
            held = f"{schedule.register_tile[axis]} elements of {axis} per thread"
            raise LoweringError(f"{entry}: {held} do not divide a block of {block}")
    try:
        if form.kind == "rows" or schedule.reduce_threads:
            from codegen.gpu.rows import lower_rows

            return lower_rows(form, schedule, entry=entry)
        if schedule.instruction == Instruction.WMMA:
            from codegen.gpu.matrix.wmma import lower_wmma

            return lower_wmma(form, schedule, entry=entry, dynamic_shared=dynamic_shared)
        if schedule.instruction == Instruction.WGMMA:
            from codegen.gpu.matrix.wgmma import lower_wgmma

            return lower_wgmma(form, schedule, entry=entry)
        from codegen.gpu.staged.kernel import StagedLowering, is_staged

        if is_staged(form, schedule):
            return StagedLowering(form, schedule, entry, dynamic_shared).run()
        if not schedule.uses_matrix and (schedule.stages > 1 or schedule.turned or schedule.raster):
            needed = "several stages, turned tiles and bands need every operand of a reduction staged"
            raise LoweringError(f"{entry}: {needed}")
        if reads_patches(form, schedule):
            from codegen.gpu.windows import lower_windows

            return lower_windows(form, schedule, entry=entry)
        if form.reduction is None and not schedule.cached:
            from codegen.gpu.direct import lower_pointwise

            return lower_pointwise(form, schedule, entry=entry)
        if schedule.instruction.is_mma:
            from codegen.gpu.matrix.mma import lower_mma

            return lower_mma(form, schedule, entry=entry, dynamic_shared=dynamic_shared)
        from codegen.gpu.tiles import TileLowering

        return TileLowering(form, schedule, entry, dynamic_shared).run()
    except RuntimeError as error:  # what all of TVM's errors are
        if isinstance(error, LoweringError):
            raise
        raise LoweringError(f"{entry}: {reason_of(error)}") from error


def lower_problem(problem: Problem, schedule: Schedule, *, entry: str, dynamic_shared: bool = True) -> Lowered:
    """Lower one kernel; arguments and errors as of :func:`codegen.gpu.lower.lower`."""
    if isinstance(problem, PatchTransform):
        assert isinstance(schedule, PatchSchedule)
        return lower_patches(problem, schedule, entry=entry)
    assert isinstance(schedule, TileSchedule)
    return lower(problem, schedule, entry=entry, dynamic_shared=dynamic_shared)
