"""What a lowering is asked, what every lowering can do, and how one of several is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from codegen.target import Target
from codegen.tir.lowered import LoweringError, reason_of
from hal.support.errors import listed
from sokoban.kernel.form import KernelForm
from sokoban.kernel.problem import Problem
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule

P = TypeVar("P", bound=Problem)
S = TypeVar("S", bound=Schedule)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class LoweringRequest(Generic[P, S]):
    """One kernel to lower.

    Attributes:
        problem: what the kernel computes: an operator in canonical form, or one of the other kinds.
        schedule: sizes for every axis of the problem that it needs.
        entry: name of the kernel.
        target: what the kernel is for.
    """

    problem: P
    schedule: S
    entry: str
    target: Target


#: A kernel of any kind to lower, and one of tiles.
AnyRequest: TypeAlias = LoweringRequest[Any, Any]
TileRequest: TypeAlias = LoweringRequest[KernelForm, TileSchedule]


class Lowering(Protocol[Result_co]):
    """One way from a schedule to a TVM module; modules with these two functions are lowerings."""

    __name__: str

    def takes(self, request: Any) -> bool:
        """Whether the schedule is one of this lowering's kind; it may still have a problem."""

    def lower(self, request: Any) -> Result_co:
        """The kernel as a TVM module.

        Raises:
            LoweringError: the schedule does not fit the operator.
            ValueError: a schedule of matrix instructions does not fit the operator or the instruction.
        """


@dataclass(frozen=True, kw_only=True)
class KernelLowerings(Generic[Result]):
    """A kind of kernel, and what lowers it.

    Attributes:
        schedule: type of its schedules.
        lowerings: those that take some of its schedules, each a schedule that no other takes.
        otherwise: what lowers all other schedules; None where there are none.
    """

    schedule: type
    lowerings: tuple[Lowering[Result], ...]
    otherwise: Lowering[Result] | None = None


def chosen(kinds: Mapping[type, KernelLowerings[Result]], request: AnyRequest) -> Lowering[Result]:
    """The lowering that takes a request, by the type of its problem.

    Raises:
        LoweringError: none takes it, or several do.
    """
    kind = kinds.get(type(request.problem))
    if kind is None or type(request.schedule) is not kind.schedule:
        what = f"a {type(request.problem).__name__} by a {type(request.schedule).__name__}"
        raise LoweringError(f"{request.entry}: no lowering takes {what}")
    claiming = [lowering for lowering in kind.lowerings if lowering.takes(request)]
    if len(claiming) > 1:
        raise LoweringError(f"{request.entry}: {listed([each.__name__ for each in claiming])} claim one kernel")
    lowering = claiming[0] if claiming else kind.otherwise
    if lowering is None:
        raise LoweringError(f"{request.entry}: no lowering of {type(request.problem).__name__} takes its schedule")
    return lowering


def lowered_by(lowering: Lowering[Result], request: AnyRequest) -> Result:
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
