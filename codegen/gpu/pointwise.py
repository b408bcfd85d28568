"""Kernels without a reduction: every thread computes its elements from operands that it reads in place."""

from __future__ import annotations

from codegen.gpu.direct import DirectKernel
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import TileRequest


def takes(request: TileRequest) -> bool:
    """Operators without a reduction, where nothing is staged or shared among threads."""
    schedule = request.schedule
    works_alone = not (schedule.cached or schedule.reduce_threads or schedule.uses_matrix)
    return request.problem.reduction is None and works_alone


def lower(request: TileRequest) -> Lowered:
    """The kernel of an element-wise operator, a transposition or a copy."""
    return _PointwiseLowering(request.problem, request.schedule, request.entry).run()


class _PointwiseLowering(DirectKernel):
    """One kernel: the final statement alone."""

    def elements(self) -> None:
        self.store()
