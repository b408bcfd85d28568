"""Operators of several kernels one after the other: each is constructed as if it stood alone.

Two products in a row, or a softmax between them that is not attention, have no kernel that computes them whole; their
statements make several (:mod:`sokoban.kernel.stages`). What passes between them lies in memory. The first program has
the best of every kernel; each of the others has one kernel by another of its schedules, so that whoever measures can
tell which of them matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from codegen.generators import has_chains
from codegen.verify.result import HALF_UNITS, tolerance_of
from hal.support.errors import InputError
from roller.algorithms.chain import ChainProgram, Considered, needed_sizes
from roller.algorithms.flash import ROUNDINGS
from roller.construct.program import ProgramPart, RProgram
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.problem import Problem
from sokoban.kernel.stages import operator_form
from sokoban.schedule.cutting import cut_sizes, resize
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule

#: The name of the algorithm.
NAME = "sequence"


@dataclass(frozen=True)
class Stages:
    """An operator as its stages; see :class:`roller.algorithms.chain.Split`."""

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernels, in order."""
        return form.stages

    def cut_down(self, form: KernelForm, schedules: Sequence[Schedule]) -> tuple[KernelForm, Stages]:
        """A small operator of the same statements, over which every schedule covers several tiles."""
        tiles = [schedule for schedule in schedules if isinstance(schedule, TileSchedule)]
        wanted = [(stage, cut_sizes(stage, schedule)) for stage, schedule in zip(form.stages, tiles, strict=True)]
        return operator_form(resize(form, needed_sizes(form.sizes, wanted)).expr), self

    def tolerance(self, form: KernelForm) -> float | None:
        """More than the rounding of results in 16 bits, since what passes between kernels is rounded, too."""
        halves = HALF_UNITS.get(form.expr.output.dtype)
        return None if halves is None else min(tolerance_of(form.expr), ROUNDINGS * halves)


def check_sequence(placed: PlacedForm) -> None:
    """Raise that kernels of the device are not launched one after the other.

    Raises:
        InputError: they are not.
    """
    form, device = placed.form, placed.device
    if device.code_generator is not None and not has_chains(device.code_generator):
        problem = f"takes {len(form.stages)} kernels, and those of {device.name} are not launched one after the other"
        raise InputError(form.expr.name, problem, "write each as an operator of its own, or name a GPU")


def combined(form: KernelForm, ranked: Sequence[Sequence[RProgram]], top_k: int) -> Considered:
    """The ``top_k`` best programs of an operator, given those of its stages, best first.

    Raises:
        InputError: a stage has no program.
    """
    for stage, programs in zip(form.stages, ranked, strict=True):
        if not programs:
            raise InputError(stage.expr.name, "no tile of it fits the memory of the device", "write it otherwise")
    chains = sorted(_combined(form, ranked), key=lambda program: program.estimate.seconds)
    return Considered(NAME, tuple(chains[:top_k]), scored=len(chains))


def _combined(form: KernelForm, programs: Sequence[Sequence[RProgram]]) -> Iterator[ChainProgram]:
    """The best program of every stage together, then one of them exchanged for another one at a time."""
    best = [ranked[0] for ranked in programs]
    yield _chain(form, best, "the best of each")
    for place, ranked in enumerate(programs):
        for rank, program in enumerate(ranked[1:], start=2):
            chosen = [*best[:place], program, *best[place + 1 :]]
            yield _chain(form, chosen, f"number {rank} of kernel {place + 1}")


def _chain(form: KernelForm, programs: Sequence[RProgram], which: str) -> ChainProgram:
    parts = tuple(
        ProgramPart(f"makes {stage.expr.output.name}", stage, program.schedule, program.estimate, program.policy)
        for stage, program in zip(form.stages, programs, strict=True)
    )
    return ChainProgram(NAME, f"{len(parts)} kernels, {which}", form, Stages(), parts)
