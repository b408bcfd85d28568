"""Schedules to kernels for processors: which lowering takes a schedule, and what no lowering does.

A schedule reads on a CPU as it does everywhere, one layer further up: a block belongs to a core, ``thread`` is the
register tile, whose elements along one axis fill vector registers; ``step`` is how much of the sum is walked before
the next tile, so that its operands stay in the caches; ``cached`` operands are copied ("packed") in the order in which
the innermost loop reads them, as deep in the loops as they are still used again. ``reduce_threads`` are lanes that
share a reduction; stages, padding and unrolling have no meaning here.

The kernel is a function of a range of blocks. Which thread runs which is up to the caller (``runtime/pool.c``).
"""

from __future__ import annotations

from collections.abc import Mapping

from codegen.cpu import rows, scatters, tiles, walks
from codegen.cpu.function import LoweredCpu
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import AnyRequest, KernelLowerings, chosen, lowered_by
from hal.support.errors import listed
from sokoban.kernel.form import KernelForm
from sokoban.kernel.line import LineKernel
from sokoban.schedule.patches import LineSchedule
from sokoban.schedule.tile import TileSchedule

#: Kind of kernel -> its schedules, and what lowers them.
KINDS: Mapping[type, KernelLowerings[LoweredCpu]] = {
    KernelForm: KernelLowerings(schedule=TileSchedule, lowerings=(rows,), otherwise=tiles),
    LineKernel: KernelLowerings(schedule=LineSchedule, lowerings=(walks, scatters)),
}

#: Elements of a tensor that 32-bit indices reach.
_MOST_ELEMENTS = 2**31 - 1
_DTYPES = ("float16", "float32", "float64")


def lower(request: AnyRequest) -> LoweredCpu:
    """Lower one schedule of an operator.

    Raises:
        LoweringError: the schedule does not fit the operator, or TVM refused it.
    """
    lowering, entry = chosen(KINDS, request), request.entry
    if request.schedule.uses_matrix:
        raise LoweringError(f"{entry}: {request.schedule.instruction} is no instruction of a CPU")
    for tensor in request.problem.expr.tensors:
        if tensor.dtype == "int32":
            continue  # places, or numbers that are converted where they are read
        if tensor.dtype not in _DTYPES:
            raise LoweringError(f"{entry}: {tensor.name} is {tensor.dtype}; CPU kernels take {listed(_DTYPES)}")
        if tensor.dtype == "float16" and request.problem.expr.accumulate != "float32":
            raise LoweringError(f"{entry}: {tensor.name} is float16; CPU kernels compute those in float32")
        if tensor.element_count > _MOST_ELEMENTS:
            raise LoweringError(f"{entry}: {tensor.name} has more than {_MOST_ELEMENTS} elements")
    return lowered_by(lowering, request)
