"""What a lowering is asked, what every lowering can do, and how one of several is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from codegen.target import Target
from codegen.tir.lowered import LoweringError, reason_of
from sokoban.kernel.form import KernelForm
from sokoban.kernel.problem import Problem
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class LoweringRequest:
    """One kernel to lower.

    Attributes:
        problem: what the kernel computes: an operator in canonical form, or a patch transform.
        schedule: sizes for every axis of the problem that it needs.
        entry: name of the kernel.
        target: what the kernel is for.
    """

    problem: Problem
    schedule: Schedule
    entry: str
    target: Target

    @property
    def form(self) -> KernelForm:
        """The operator, where the problem is one."""
        assert isinstance(self.problem, KernelForm)
        return self.problem

    @property
    def tiles(self) -> TileSchedule:
        """The operator's schedule, where the problem is an operator."""
        assert isinstance(self.schedule, TileSchedule)
        return self.schedule


class Lowering(Protocol[Result_co]):
    """One way from a schedule to a TVM module; modules with these two functions are lowerings."""

    def takes(self, request: LoweringRequest) -> bool:
        """Whether the schedule is one of this lowering's kind; it may still have a problem."""

    def lower(self, request: LoweringRequest) -> Result_co:
        """The kernel as a TVM module.

        Raises:
            LoweringError: the schedule does not fit the operator.
            ValueError: a schedule of matrix instructions does not fit the operator or the instruction.
        """


def chosen(lowerings: Sequence[Lowering[Result]], request: LoweringRequest) -> Lowering[Result]:
    """The first of some lowerings that takes a request; the last one takes whatever the others leave."""
    return next(lowering for lowering in lowerings if lowering.takes(request))


def lowered_by(lowering: Lowering[Result], request: LoweringRequest) -> Result:
    """What a lowering makes of a request.

    Raises:
        LoweringError: the schedule does not fit the operator, or TVM refused it.
        ValueError: a schedule of matrix instructions does not fit the operator or the instruction.
    """
    try:
        return lowering.lower(request)
    except RuntimeError as error:  # what all of TVM's errors are
        if isinstance(error, LoweringError):
            raise
        raise LoweringError(f"{request.entry}: {reason_of(error)}") from error
