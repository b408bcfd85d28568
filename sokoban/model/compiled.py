"""Kernels of any kind priced again, now that the device compiler has said what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hal.spec.device import DeviceSpec
from sokoban.kernel.attention import AttentionKernel
from sokoban.kernel.attention_gradient import AttentionGradientKernel
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pair import ProductPair
from sokoban.kernel.problem import Problem
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.attention import estimate_attention
from sokoban.model.gpu.attention_gradient import estimate_gradient
from sokoban.model.gpu.pair import estimate_pair
from sokoban.model.rational import estimate_compiled
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule


def _tiles(
    form: KernelForm, schedule: TileSchedule, device: DeviceSpec, registers: int, spilled: int
) -> Estimate | None:
    if schedule.instruction is not Instruction.FMA:
        return None
    return estimate_compiled(form, device, schedule, registers=registers, spill_bytes=spilled)


def _by_registers(estimate: Callable[[Any, Any, DeviceSpec, int], Estimate]) -> Callable[..., Estimate]:
    return lambda problem, schedule, device, registers, spilled: estimate(problem, schedule, device, registers)


#: Kind of kernel -> its price by registers and spilled bytes of a thread; kinds that are missing depend on neither.
_ESTIMATES: Mapping[type, Callable[..., Estimate | None]] = {
    KernelForm: _tiles,
    AttentionKernel: _by_registers(estimate_attention),
    AttentionGradientKernel: _by_registers(estimate_gradient),
    ProductPair: _by_registers(estimate_pair),
}


def compiled_estimate(
    problem: Problem, schedule: Schedule, device: DeviceSpec, *, registers: int | None, spill_bytes: int
) -> Estimate | None:
    """The price of a kernel with the registers that it got; None where that changes nothing.

    Args:
        registers: of a thread; None where the compiler reported none.
        spill_bytes: of a thread, stores and loads.
    """
    estimate = _ESTIMATES.get(type(problem))
    return (
        None if estimate is None or registers is None else estimate(problem, schedule, device, registers, spill_bytes)
    )
