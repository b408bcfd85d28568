"""Kernels of gradients of attention by hand-picked schedules, for tests of their texts."""

from __future__ import annotations

from typing import Any

from codegen.target import Target
from codegen.verify.chain import ChainCheck, Step
from codegen.verify.gpu import EMULATED, verify_chain
from codegen.verify.result import Verification
from roller.algorithms.flash_gradient import WholeGradient, gradient_kernel
from sokoban.kernel.attention_gradient import AttentionGradientKernel
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.schedule.attention_gradient import GradientSchedule

#: The gradient of one short head; tests change what they look at.
SMALL = {
    "op": "attention_gradient", "of": "queries", "b": 1, "heads": 1, "queries": 40, "head_dim": 16, "dtype": "float16",
}  # fmt: skip


def form_of(**changes: Any) -> KernelForm:
    return kernel_form(operator_from_data(SMALL | changes))


def kernel_of(**changes: Any) -> AttentionGradientKernel:
    return gradient_kernel(form_of(**changes))


def by_matrices(rows: int = 32, step: int = 16, warps: int = 2, stages: int = 1, columns: int = 1) -> GradientSchedule:
    return GradientSchedule(
        rows=rows, step=step, warps=warps, stages=stages, columns=columns, instruction=Instruction.MMA_16X8X16
    )


def by_groups(count: int = 1, step: int = 16, stages: int = 2, shares: int = 1) -> GradientSchedule:
    return GradientSchedule(
        rows=64 * count, step=step, warps=4 * count, stages=stages, shares=shares, instruction=Instruction.WGMMA
    )


def by_multiply_adds(rows: int = 16, step: int = 16, warps: int = 2, lanes: int = 8) -> GradientSchedule:
    return GradientSchedule(rows=rows, step=step, warps=warps, stages=1, lanes=lanes, instruction=Instruction.FMA)


def checked(
    schedule: GradientSchedule, engine: str = "emulator", target: Target = EMULATED, **changes: Any
) -> Verification:
    """What became of the kernel of a gradient, run whole."""
    form, split = form_of(**changes), WholeGradient()
    steps = tuple(Step(problem, schedule) for problem in split.problems(form))
    return verify_chain(ChainCheck(form, steps, split.tolerance(form)), engine=engine, target=target)
