"""The kernels that are mutated: programs of operators, cut down as verification cuts them, each text once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from bench.mutants.mutations import Mutation, mutations_of
from bench.mutants.text import KernelText
from codegen.gpu.lower import KINDS
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest, chosen
from codegen.tolerance import exact_tolerance
from codegen.verify.gpu import EmulatedKernel, cuda_trial, emulated_kernel
from codegen.verify.trial import Trial
from hal.catalog import load_device
from roller.algorithms import ALGORITHMS, sequence, split_k
from roller.programs import find_programs
from sokoban.kernel.form import KernelForm
from sokoban.kernel.problem import Problem
from sokoban.kernel.stages import operator_form
from sokoban.language.expression import TensorExpr
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.cutting import cut_down, resize
from sokoban.schedule.patches import Schedule
from sokoban.schedule.tile import TileSchedule

#: Programs found beyond those asked for, as the compiler has them.
SPARES = 4

#: Algorithms whose kernels are of one kind, whatever lowering writes them.
_OF_SEVERAL = (split_k.NAME, sequence.NAME)

_Values = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program cut down to a small problem.

    Attributes:
        operator, device, rank: whose it is.
        target: what its kernels are written for.
        form: the small operator as a whole.
        steps: its kernels, in the order of their launches.
        kinds: what kind of kernel each is.
        tolerance: largest accepted relative error.
    """

    operator: str
    device: str
    rank: int
    target: Target
    form: KernelForm
    steps: tuple[tuple[Problem, Schedule], ...]
    kinds: tuple[str, ...]
    tolerance: float

    @cached_property
    def inputs(self) -> _Values:
        """Values of the operator's inputs."""
        return random_inputs(self.form.expr, 0)

    @cached_property
    def trial(self) -> Trial:
        """Its kernels as a bundle."""
        return cuda_trial(self.form, self.steps, self.target)

    @cached_property
    def expected(self) -> np.ndarray:
        """The reference's output."""
        return evaluate(self.form.expr, self.inputs)


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A kernel of a case that is mutated.

    Attributes:
        case: the program.
        part: which of its kernels, from 0.
        kernel: its text and what a run of it takes.
        known: values of all tensors that are known before it runs, by name.
    """

    case: Case
    part: int
    kernel: EmulatedKernel
    known: _Values

    @property
    def kind(self) -> str:
        """Kind of the kernel."""
        return self.case.kinds[self.part]

    @property
    def label(self) -> str:
        """Whose kernel it is: ``softmax_float32, v100, rank 1``."""
        part = f", part {self.part + 1}" if len(self.case.steps) > 1 else ""
        return f"{self.case.operator}, {self.case.device}, rank {self.case.rank}{part}"

    @cached_property
    def text(self) -> KernelText:
        """The kernel's text as tokens."""
        return KernelText(self.kernel.source, self.kernel.entry)

    @cached_property
    def mutations(self) -> list[Mutation]:
        """All that can be changed in it."""
        return mutations_of(self.text)


def cases_of(expressions: Sequence[TensorExpr], board: str, top_k: int) -> Iterator[Case]:
    """The ``top_k`` best programs of every operator on a board, given by its name, as the compiler ranks them."""
    device = load_device(board)
    target = Target.of(device)
    for expr in expressions:
        form = operator_form(expr)
        programs = find_programs(form, device, top_k + SPARES).ranked(top_k, ALGORITHMS, SPARES)
        for rank, program in enumerate(programs[:top_k], start=1):
            check = program.check()
            if check is None:
                schedule = program.main.tiles
                small = cut_down(form, schedule)
                steps: tuple[tuple[Problem, Schedule], ...] = ((small, schedule),)
                tolerance = exact_tolerance(small.expr)
            else:
                small, steps = check.form, tuple((step.problem, step.schedule) for step in check.steps)
                tolerance = max(exact_tolerance(small.expr), check.tolerance or 0.0)
            is_sliced = program.algorithm in _OF_SEVERAL
            yield Case(
                operator=expr.name,
                device=board,
                rank=rank,
                target=target,
                form=small,
                steps=steps,
                kinds=tuple(program.algorithm if is_sliced else kind_of(*step, target) for step in steps),
                tolerance=tolerance,
            )


def kind_of(problem: Problem, schedule: Any, target: Target) -> str:
    """The kind of a kernel: the lowering that writes it, of staged ones whether they are pipelined and how."""
    lowering = chosen(KINDS, LoweringRequest(problem, schedule, "verify", target))
    words = lowering.__name__.split(".")
    if words[-2] == "staged":
        return "staged" if schedule.stages == 1 else "asynchronous" if schedule.asynchronous else "pipelined"
    if words[-2] == "walks":
        family, name = ("pairs", "pair_") if words[-1].startswith("pair_") else ("attention", "attention_")
        return f"{family}, {words[-1].removeprefix(name).replace('_', ' ')}"
    if words[-2] == "gradients":
        return f"attention, gradient {words[-1].replace('_', ' ')}"
    return {"mma": "mma.sync"}.get(words[-1], words[-1])


def specimens_of(case: Case) -> Iterator[Specimen]:
    """The kernels of a case; those behind the first one get what the ones before them computed."""
    values_by_name = dict(case.inputs)
    for part, launch in enumerate(case.trial.launches):
        kernel = emulated_kernel(case.trial, launch, values_by_name)
        yield Specimen(case=case, part=part, kernel=kernel, known=dict(values_by_name))
        if part + 1 < len(case.steps):
            output = kernel.output
            values_by_name[output.name] = kernel.run().flat[: output.element_count].reshape(output.shape)


def with_other_edges(specimen: Specimen) -> Specimen | None:
    """The same kernel on a problem of more tiles along every axis that was cut, and of other remainders.

    None where there is none whose text differs in numbers alone, so that mutations of both are the same ones.
    """
    problem, schedule = specimen.case.steps[specimen.part]
    if not isinstance(problem, KernelForm) or not isinstance(schedule, TileSchedule):
        return None
    for sizes in _other_sizes(problem, schedule):
        other = resize(problem, sizes)
        values_by_name = random_inputs(other.expr, 1)
        case = replace(specimen.case, form=other, steps=((other, schedule),), kinds=(specimen.kind,))
        kernel = emulated_kernel(case.trial, case.trial.launches[0], values_by_name)
        if KernelText(kernel.source, kernel.entry).shape == specimen.text.shape:
            return Specimen(case=case, part=0, kernel=kernel, known=values_by_name)
    return None


def _other_sizes(problem: KernelForm, schedule: TileSchedule) -> Iterator[dict[str, int]]:
    """Sizes to try: twice as many tiles, which are divided among blocks by like arithmetic, or one more; shorter
    remainders, which leave vectors whole, or the same ones."""
    tiles = {**schedule.block_of, **schedule.step_of}
    for doubled, less in product((True, False), (8, 4, 2, 1, 0)):
        sizes = {}
        for axis, size in problem.sizes.items():
            tile = tiles.get(axis, 1)
            more = -(-size // tile) * tile if doubled else tile
            sizes[axis] = size + more - (less if size % tile > less else 0) if size > tile > 1 else size
        if sizes != dict(problem.sizes):
            yield sizes
