"""Chains of kernels as code generation sees them: operators with schedules, run one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from sokoban.kernel.form import KernelForm
from sokoban.kernel.problem import Problem
from sokoban.schedule.patches import Schedule


@dataclass(frozen=True)
class Step:
    """One kernel of a chain."""

    problem: Problem
    schedule: Schedule


@dataclass(frozen=True)
class ChainCheck:
    """A chain to be run against the reference of the operator that it computes.

    Attributes:
        form: the operator as a whole, cut down.
        steps: its kernels in order. Inputs are the operator's or outputs of earlier steps, by name; the last output is
            the operator's.
        tolerance: largest accepted relative error; None for that of the operator's dtype.
    """

    form: KernelForm
    steps: tuple[Step, ...]
    tolerance: float | None = None
