"""Kernels lowered by themselves, for tests that look at what a lowering writes."""

from __future__ import annotations

from codegen.gpu import lower as gpu
from codegen.target import Target
from codegen.tir.lowered import Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.problem import Problem
from sokoban.schedule.patches import Schedule

CUDA = Target("cuda", "sm_80", 32)
OPENCL = Target("opencl-source", "", 1)


def lower(problem: Problem, schedule: Schedule, *, entry: str, target: Target = CUDA) -> Lowered:
    """The kernel of one schedule; its architecture is that of whoever compiles it."""
    return gpu.lower(LoweringRequest(problem, schedule, entry, target))
