"""Kernels of any kind as a compiler made them: priced again by their registers, and which registers are worth more
work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hal.spec.device import DeviceSpec
from sokoban.kernel.attention import AttentionKernel, SliceSum
from sokoban.kernel.attention_gradient import AttentionGradientKernel, SlopeProduct
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.line import LineKernel
from sokoban.kernel.pair import ProductPair
from sokoban.kernel.patches import PatchTransform
from sokoban.kernel.problem import Problem
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.attention import estimate_attention
from sokoban.model.gpu.kinds.attention_gradient import estimate_gradient, estimate_slopes
from sokoban.model.gpu.kinds.pair import estimate_pair
from sokoban.model.rational import estimate_compiled, faster_blocks
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule


def _tiles(
    form: KernelForm, schedule: TileSchedule, device: DeviceSpec, registers: int, spilled: int
) -> Estimate | None:
    if schedule.instruction is not Instruction.FMA:
        return None
    return estimate_compiled(form, device, schedule, registers=registers, spill_bytes=spilled)


def _tile_blocks(form: KernelForm, schedule: TileSchedule, device: DeviceSpec) -> tuple[int, ...] | None:
    if schedule.instruction is not Instruction.FMA or device.teu.lane != "thread":
        return None
    return faster_blocks(form, device, schedule)


def _by_registers(estimate: Callable[[Any, Any, DeviceSpec, int], Estimate]) -> Callable[..., Estimate]:
    return lambda problem, schedule, device, registers, spilled: estimate(problem, schedule, device, registers)


def _unknown(problem: Problem, schedule: Schedule, device: DeviceSpec) -> None:
    return None


@dataclass(frozen=True)
class CompiledKind:
    """Meaning of registers for a kind of kernel.

    Attributes:
        estimate: its price by registers and spilled bytes of a thread; None where it depends on neither.
        blocks: numbers of resident blocks that make it faster, None for any.
    """

    estimate: Callable[..., Estimate | None] | None
    blocks: Callable[..., tuple[int, ...] | None] = _unknown


#: Kind of kernel -> what registers mean for it.
KINDS: Mapping[type, CompiledKind] = {
    KernelForm: CompiledKind(_tiles, _tile_blocks),
    # DRAM is all that it waits for.
    PatchTransform: CompiledKind(None, lambda problem, schedule, device: ()),
    AttentionKernel: CompiledKind(_by_registers(estimate_attention)),
    SliceSum: CompiledKind(None),
    AttentionGradientKernel: CompiledKind(_by_registers(estimate_gradient)),
    SlopeProduct: CompiledKind(_by_registers(estimate_slopes)),
    ProductPair: CompiledKind(_by_registers(estimate_pair)),
    LineKernel: CompiledKind(None),
}


def compiled_estimate(
    problem: Problem, schedule: Schedule, device: DeviceSpec, *, registers: int | None, spill_bytes: int
) -> Estimate | None:
    """The price of a kernel with the registers that it got; None where that changes nothing.

    Args:
        registers: of a thread; None where the compiler reported none.
        spill_bytes: of a thread, stores and loads.
    """
    estimate = KINDS[type(problem)].estimate
    return (
        None if estimate is None or registers is None else estimate(problem, schedule, device, registers, spill_bytes)
    )


def worthwhile_blocks(problem: Problem, schedule: Schedule, device: DeviceSpec) -> tuple[int, ...] | None:
    """Numbers of resident blocks that RATIONAL expects something of; None where it does not count on registers."""
    return KINDS[type(problem)].blocks(problem, schedule, device)
