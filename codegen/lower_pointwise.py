"""Element-wise functions: operands come as vectors where they lie along the output, results leave as such."""

from __future__ import annotations

from codegen.direct_kernel import DirectKernel
from codegen.lower import Lowered
from sokoban.kernel_form import KernelForm
from sokoban.schedule import TileSchedule


def lower_pointwise(form: KernelForm, schedule: TileSchedule, *, entry: str) -> Lowered:
    """Lower a ``tile`` without a reduction and with nothing staged."""
    return _PointwiseLowering(form, schedule, entry).run()


class _PointwiseLowering(DirectKernel):
    def elements(self) -> None:
        self.store()
