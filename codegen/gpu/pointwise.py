"""Kernels without a reduction: every thread computes its elements from operands that it reads in place."""

from __future__ import annotations

from codegen.gpu.direct import DirectKernel
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest


def takes(request: LoweringRequest) -> bool:
    """Operators without a reduction, where nothing is staged."""
    return request.form.reduction is None and not request.tiles.cached


def lower(request: LoweringRequest) -> Lowered:
    """The kernel of an element-wise operator, a transposition or a copy."""
    return _PointwiseLowering(request.form, request.tiles, request.entry).run()


class _PointwiseLowering(DirectKernel):
    """One kernel: the final statement alone."""

    def elements(self) -> None:
        self.store()
