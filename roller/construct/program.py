"""What construction proposes: a schedule, the tiles it came from, and the reasons.

Programs of one kernel and of several answer the same questions, those of :class:`Program`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from codegen.verify.chain import ChainCheck
from hal.spec.device import DeviceSpec
from roller.construct.rtile import RTile
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.problem import Problem
from sokoban.language.expression import Tensor
from sokoban.model.estimates import Estimate
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule

#: The algorithm of programs of one kernel.
DIRECT = "direct"


@dataclass(frozen=True)
class ProgramPart:
    """One kernel of a program.

    Attributes:
        label: what it computes, in words: ``adds the slices``; empty where it is the whole operator.
        problem: the operator that it computes.
        schedule: how.
        estimate: what it is expected to take, its launch included.
        policy: how its schedule was found.
    """

    label: str
    problem: Problem
    schedule: Schedule
    estimate: Estimate
    policy: str

    @property
    def schedule_json(self) -> dict[str, Any]:
        """The schedule as files have it, with the numbers of its problem that belong to it."""
        return {**self.schedule.to_json(), **self.problem.schedule_numbers}

    @property
    def tiles(self) -> TileSchedule:
        """The schedule of a part that is no patch transform."""
        assert isinstance(self.schedule, TileSchedule)
        return self.schedule

    @property
    def program(self) -> RProgram:
        """A part that is no patch transform as a program of its own."""
        assert isinstance(self.problem, KernelForm)
        return RProgram(
            form=self.problem,
            schedule=self.tiles,
            estimate=self.estimate,
            register_tile=None,
            shared_tile=None,
            policy=self.policy,
            epsilon=0.0,
            reasons=(),
        )


class Program(Protocol):
    """What every program of an operator says of itself, whether it is one kernel or several."""

    @property
    def form(self) -> KernelForm:
        """The operator as a whole."""

    @property
    def parts(self) -> tuple[ProgramPart, ...]:
        """The kernels in the order of their launches; at least one."""

    @property
    def main(self) -> ProgramPart:
        """The kernel that takes longest."""

    @property
    def estimate(self) -> Estimate:
        """Times of all kernels added up; resources of the longest."""

    @property
    def algorithm(self) -> str:
        """:data:`DIRECT`, or the algorithm that composed the kernels."""

    @property
    def composition(self) -> str:
        """The algorithm with its parameters: ``split-k, 16 slices of k``."""

    @property
    def policy(self) -> str:
        """How it was found: by which walk of construction, by the search, or by which composition."""

    @property
    def instruction(self) -> Instruction | None:
        """The instruction that computes it; None where several kernels do."""

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        """The tensors between the kernels, in the order in which they are written."""

    @property
    def tolerance(self) -> float | None:
        """Relative error of the results that counts as right; None where that of the dtype holds."""

    def check(self) -> ChainCheck | None:
        """Several kernels on a small problem, to be run together; None for one kernel, which is checked by itself."""


@dataclass(frozen=True, kw_only=True)
class RProgram:
    """One program of one kernel: a schedule, the tiles it came from, what it is expected to take, and why it is so.

    Attributes:
        form: the operator.
        schedule: how the kernel computes it.
        estimate: what it is expected to take, its launch included.
        register_tile, shared_tile: the tiles that it was grown from; None where it was not.
        policy: how it was found: by which walk of construction, or by ``"search"``.
        epsilon: the tensor padding that it was allowed, as a share of every axis.
        reasons: the steps of its construction.
    """

    form: KernelForm
    schedule: TileSchedule
    estimate: Estimate
    register_tile: RTile | None
    shared_tile: RTile | None
    policy: str
    epsilon: float
    reasons: tuple[Reason, ...]

    @cached_property
    def parts(self) -> tuple[ProgramPart]:
        """The kernel, as the only one; see :class:`Program`."""
        return (ProgramPart("", self.form, self.schedule, self.estimate, self.policy),)

    @property
    def main(self) -> ProgramPart:
        """The kernel; see :class:`Program`."""
        return self.parts[0]

    @property
    def algorithm(self) -> str:
        """:data:`DIRECT`; see :class:`Program`."""
        return DIRECT

    @property
    def composition(self) -> str:
        """:data:`DIRECT`, which has no parameters; see :class:`Program`."""
        return DIRECT

    @property
    def instruction(self) -> Instruction:
        """The schedule's; see :class:`Program`."""
        return self.schedule.instruction

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        """None is needed; see :class:`Program`."""
        return ()

    @property
    def tolerance(self) -> float | None:
        """The dtype's; see :class:`Program`."""
        return None

    def check(self) -> ChainCheck | None:
        """None; see :class:`Program`."""
        return None


@dataclass(frozen=True, kw_only=True)
class Construction:
    """What was constructed for one operator on one device.

    Attributes:
        placed: the operator on the device.
        programs: best first by predicted time, all different.
        considered: how many candidates were scored.
        epsilon: the largest tensor padding that had to be allowed.
        seconds: time the construction took.
    """

    placed: PlacedForm
    programs: tuple[RProgram, ...]
    considered: int
    epsilon: float
    seconds: float

    @property
    def form(self) -> KernelForm:
        """The operator."""
        return self.placed.form

    @property
    def device(self) -> DeviceSpec:
        """Where it runs."""
        return self.placed.device


class Reason(NamedTuple):
    """One step of the construction: what was done at which layer, to which tile, and the ``numbers`` behind it.

    ``tile`` is a shape over the axes of the operator's :class:`TileSpace`, or text where there is no such tile.
    """

    layer: str
    action: str
    tile: str | tuple[int, ...]
    numbers: tuple[tuple[str, float], ...] = ()


class Candidate(NamedTuple):
    """A program that may be ranked.

    Attributes:
        schedule: how a kernel computes the operator; tensor padding and pipelines are still to be chosen.
        policy: the walk that proposed it.
        epsilon: the tensor padding that it was allowed, as a share of every axis.
        reasons: the steps of its construction.
        tiles: the register tile and the block's tile that it was grown from, shapes over the axes of the operator's
            :class:`TileSpace`; None where it was not grown from tiles.
    """

    schedule: TileSchedule
    policy: str
    epsilon: float
    reasons: tuple[Reason, ...]
    tiles: tuple[tuple[int, ...], tuple[int, ...]] | None = None
