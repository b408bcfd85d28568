"""Chains: an operator as several kernels, one after the other, with tensors of partial results between them.

A chain's kernels are operators of their own, so that construction, RATIONAL, code generation and verification take
them as they take any other; what is new is their sum. Its predicted time is the sum of theirs, a launch each. Nothing
is taken off for what one kernel leaves in L2 for the next: every kernel is priced as if its inputs came from DRAM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from codegen.verify.chain import ChainCheck, Step
from roller.construct.program import ProgramPart
from sokoban.kernel.form import KernelForm
from sokoban.kernel.pair import ProductPair
from sokoban.kernel.problem import Problem
from sokoban.language.expression import Tensor
from sokoban.model.estimates import Estimate

#: The algorithm of :mod:`roller.algorithms.split_line`, which is imported where there is a line.
SPLIT_LINE = "split-line"

#: Schedules of a chain's kernels; of several kinds where its kernels are.
S_contra = TypeVar("S_contra", contravariant=True)


class Split(Protocol[S_contra]):
    """Way from an operator to a chain: what an algorithm and its parameters make of any operator of one structure."""

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The operators of the chain that computes ``form``, in order."""

    def cut_down(self, form: KernelForm, schedules: Sequence[S_contra]) -> tuple[KernelForm, Split[S_contra]]:
        """A small operator of the same structure, and its split, over which every schedule covers several tiles."""

    def tolerance(self, form: KernelForm) -> float | None:
        """Relative error of ``form``'s results that counts as right; None where that of the dtype holds."""


@dataclass(frozen=True)
class ChainProgram:
    """An operator as a chain of kernels.

    Attributes:
        algorithm: ``"split-k"``, ``"split-rows"``, ``"winograd"``, ``"flat-image"``, ``"flash"``, ``"line"``,
            ``"split-line"``, ``"sequence"`` or ``"fused pair"``.
        variant: its parameters in words: ``16 slices of k``.
        form: the operator as a whole.
        split: how it was taken apart.
        parts: its kernels in order.
    """

    algorithm: str
    variant: str
    form: KernelForm
    split: Split[Any]
    parts: tuple[ProgramPart, ...]

    @property
    def tolerance(self) -> float | None:
        """Relative error of its results that counts as right; None where that of the dtype holds."""
        return self.split.tolerance(self.form)

    @property
    def composition(self) -> str:
        """The algorithm with its parameters: ``split-k, 16 slices of k``."""
        return f"{self.algorithm}, {self.variant}"

    @property
    def policy(self) -> str:
        """Origin of the program: composition."""
        return self.composition

    @property
    def instruction(self) -> None:
        """None, as several kernels have no instruction in common."""

    @property
    def main(self) -> ProgramPart:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: part.estimate.seconds)

    @cached_property
    def estimate(self) -> Estimate:
        """Times of all parts added up; resources of the longest."""
        longest = self.main.estimate
        stages = {
            stage: sum(part.estimate.stage_seconds[stage] for part in self.parts) for stage in longest.stage_seconds
        }
        return Estimate(
            seconds=sum(part.estimate.seconds for part in self.parts),
            bound=longest.bound,
            stage_seconds=stages,
            registers=longest.registers,
            shared_bytes=longest.shared_bytes,
            blocks_per_unit=longest.blocks_per_unit,
            wave_count=longest.wave_count,
        )

    @cached_property
    def workspace(self) -> tuple[Tensor, ...]:
        """The tensors between the kernels, in the order in which they are written."""
        return tuple(part.problem.output for part in self.parts[:-1])

    def check(self) -> ChainCheck:
        """The chain on a small problem, to be run against the reference."""
        small, split = self.split.cut_down(self.form, [part.schedule for part in self.parts])
        problems = split.problems(small)
        steps = tuple(Step(problem, part.schedule) for problem, part in zip(problems, self.parts, strict=True))
        return ChainCheck(small, steps, split.tolerance(small))


@dataclass(frozen=True)
class Considered:
    """Outcome of an algorithm for one operator.

    Attributes:
        algorithm: its name.
        programs: those that were priced, best first.
        declined: why there are none; empty where there are.
        scored: how many were priced, where that is more than ``programs``.
    """

    algorithm: str
    programs: tuple[ChainProgram, ...] = ()
    declined: str = ""
    scored: int = 0


def needed_sizes(
    full: Mapping[str, int], wanted: Sequence[tuple[KernelForm | ProductPair, Mapping[str, int]]]
) -> dict[str, int]:
    """Sizes of axes, none larger than in ``full``, with which every form has at least the wanted sizes if it can.

    Args:
        full: sizes of the axes that the forms have, fused ones by their parts.
        wanted: forms, and the size that each wants of its own axes.

    >>> needed_sizes({"m": 64, "n": 1}, [])
    {'m': 2, 'n': 1}
    """
    smallest = {axis: min(2, size) for axis, size in full.items()}
    for form, sizes in wanted:
        fused = dict(form.fused)
        for axis, size in sizes.items():
            remaining = size
            # A fused axis grows from its innermost part.
            for part in reversed(fused.get(axis, (axis,))):
                if part in full:
                    smallest[part] = max(smallest[part], min(full[part], remaining))
                    remaining = -(-remaining // smallest[part])
    return smallest
