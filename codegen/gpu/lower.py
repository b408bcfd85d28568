"""Schedules to GPU kernels: which lowering takes a schedule, and what no lowering does."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.gpu import lines, patches, pointwise, ranks, rows, scatters, tiles, windows
from codegen.gpu.gradients import groups as gradient_groups
from codegen.gpu.gradients import multiply_adds as gradient_multiply_adds
from codegen.gpu.gradients import slope_groups
from codegen.gpu.gradients import slopes as slope_warps
from codegen.gpu.gradients import warps as gradient_warps
from codegen.gpu.matrix import bulk, mma, wmma
from codegen.gpu.staged import kernel as staged
from codegen.gpu.walks import (
    attention_groups,
    attention_multiply_adds,
    attention_warps,
    pair_multiply_adds,
    pair_warps,
    slices,
)
from codegen.tir.lowered import Lowered, LoweringError
from codegen.tir.lowering import AnyRequest, KernelLowerings, chosen, lowered_by
from sokoban.kernel.attention import AttentionKernel, SliceSum
from sokoban.kernel.attention_gradient import AttentionGradientKernel, SlopeProduct
from sokoban.kernel.form import KernelForm
from sokoban.kernel.line import LineKernel
from sokoban.kernel.pair import ProductPair
from sokoban.kernel.patches import PatchTransform
from sokoban.schedule.attention import AttentionSchedule, SliceSumSchedule
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.pair import PairSchedule
from sokoban.schedule.patches import LineSchedule, PatchSchedule
from sokoban.schedule.tile import TileSchedule

#: Kind of kernel -> its schedules, and what lowers them.
KINDS: Mapping[type, KernelLowerings[Lowered]] = {
    KernelForm: KernelLowerings(
        schedule=TileSchedule,
        lowerings=(rows, wmma, bulk, staged, windows, pointwise, mma),
        otherwise=tiles,
    ),
    PatchTransform: KernelLowerings(schedule=PatchSchedule, lowerings=(patches,)),
    AttentionKernel: KernelLowerings(
        schedule=AttentionSchedule, lowerings=(attention_warps, attention_groups, attention_multiply_adds)
    ),
    SliceSum: KernelLowerings(schedule=SliceSumSchedule, lowerings=(slices,)),
    AttentionGradientKernel: KernelLowerings(
        schedule=GradientSchedule, lowerings=(gradient_warps, gradient_groups, gradient_multiply_adds)
    ),
    SlopeProduct: KernelLowerings(schedule=GradientSchedule, lowerings=(slope_warps, slope_groups)),
    ProductPair: KernelLowerings(schedule=PairSchedule, lowerings=(pair_warps, pair_multiply_adds)),
    LineKernel: KernelLowerings(schedule=LineSchedule, lowerings=(lines, ranks, scatters)),
}

#: Lowerings that keep tiles in the tensors' order and fetch a step, then compute on it, whatever the schedule says.
_ONE_STAGE = (windows, pointwise, tiles)


def lower(request: AnyRequest) -> Lowered:
    """Lower one schedule.

    Raises:
        LoweringError: the schedule does not fit the operator, several lowerings claim it, or TVM refused it.
        ValueError: a schedule of matrix instructions does not fit the operator or the instruction.
    """
    lowering = chosen(KINDS, request)
    problem = request.schedule.misfit(request.problem)
    if problem is None and lowering in _ONE_STAGE and _needs_staging(request.schedule):
        problem = "several stages, turned tiles and bands need every operand of a reduction staged"
    if getattr(request.problem, "launch_axis", None) is not None and request.target.generator == "opencl-source":
        problem = "sizes that are known at launch are for CUDA"
    if problem is not None:
        raise LoweringError(f"{request.entry}: {problem}")
    return lowered_by(lowering, request)


def _needs_staging(schedule: TileSchedule) -> bool:
    """True if a schedule of multiply-adds asks for what only kernels that stage all operands can do."""
    return not schedule.uses_matrix and (schedule.stages > 1 or bool(schedule.turned) or bool(schedule.raster))
