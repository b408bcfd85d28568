"""Attention kernels by hand-picked schedules, for tests of their texts."""

from __future__ import annotations

from typing import Any

from codegen.target import Target
from codegen.verify.chain import ChainCheck, Step
from codegen.verify.gpu import EMULATED, verify_chain
from codegen.verify.result import Verification
from roller.algorithms.flash import SUM_THREADS, KeySlices
from sokoban.kernel.attention import AttentionKernel
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.schedule.attention import AttentionSchedule, SliceSumSchedule

#: Attention of one short head; tests change what they look at.
SMALL = {"op": "attention", "b": 1, "heads": 1, "queries": 40, "head_dim": 16, "dtype": "float16"}

V100 = Target("cuda", "sm_70", 32)


def form_of(**changes: Any) -> KernelForm:
    return kernel_form(operator_from_data(SMALL | changes))


def kernel_of(slices: int = 1, **changes: Any) -> AttentionKernel:
    kernel = KeySlices(slices).problems(form_of(**changes))[0]
    assert isinstance(kernel, AttentionKernel)
    return kernel


def by_matrices(
    rows: int = 32, keys: int = 16, warps: int = 2, stages: int = 1, held: bool = False
) -> AttentionSchedule:
    return AttentionSchedule(
        rows=rows, keys=keys, warps=warps, stages=stages, held=held, instruction=Instruction.MMA_16X8X16
    )


def by_multiply_adds(rows: int = 16, keys: int = 16, warps: int = 2, lanes: int = 8) -> AttentionSchedule:
    return AttentionSchedule(
        rows=rows, keys=keys, warps=warps, stages=1, held=False, lanes=lanes, instruction=Instruction.FMA
    )


def checked(
    schedule: AttentionSchedule, slices: int = 1, engine: str = "emulator", target: Target = EMULATED, **changes: Any
) -> Verification:
    """What became of the kernels of an attention, run whole."""
    form, split = form_of(**changes), KeySlices(slices)
    schedules = [schedule, SliceSumSchedule(SUM_THREADS)]
    steps = tuple(Step(*pair) for pair in zip(split.problems(form), schedules, strict=False))
    return verify_chain(ChainCheck(form, steps, split.tolerance(form)), engine=engine, target=target)
