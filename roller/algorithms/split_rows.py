"""Rows in slices: a softmax or a layer norm of few long rows, whose reductions different blocks share.

A kernel of ``rows`` has a block for every row, or several rows to a block: few rows leave units idle, however long they
are. Written out, each of its reductions is an operator that :mod:`roller.algorithms.slices` cuts, and what is left is
point-wise. A softmax of ``S`` slices of ``R`` columns is the chain::

    Peak_slices[s,r]  = max(c, X[r, s*R + c])
    Peak[r]           = max(s, Peak_slices[s,r])
    Total_slices[s,r] = sum(c, exp(X[r, s*R + c] - Peak[r]))
    Total[r]          = sum(s, Total_slices[s,r])
    Y[r,c]            = exp(X[r,c] - Peak[r]) / Total[r]

Every kernel is a launch and each reduction reads the rows again, which one block per row would read once where it can
keep them: RATIONAL prices both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roller.algorithms import split_k
from roller.algorithms.chain import ChainProgram, Considered, needed_sizes
from roller.algorithms.slices import Slices
from roller.construct.construct import construct
from roller.construct.program import ProgramPart, RProgram
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.stages import part_of
from sokoban.schedule.cutting import cut_sizes, resize
from sokoban.schedule.tile import TileSchedule

#: The name of the algorithm.
NAME = "split-rows"

#: How many times fewer or more slices there may be than units ask for: only whole ones are cut, since what lies beyond
#: the end of a row would have to be left out of every reduction.
SNAP = 8.0


@dataclass(frozen=True)
class SlicedRows:
    """Every reduction of a ``rows`` operator by the same ``slices`` of its columns."""

    slices: Slices

    def problems(self, form: KernelForm) -> tuple[KernelForm, ...]:
        """The kernels of the chain, in order: two of every reduction, then what is computed of each element."""
        reduced = [problem for stage in _reductions(form) for problem in self.slices.problems(stage)]
        return (*reduced, _pointwise(form))

    def cut_down(self, form: KernelForm, schedules: Sequence[TileSchedule]) -> tuple[KernelForm, SlicedRows]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        *pairs, last = schedules
        axis, pointwise = self.slices.axis, _pointwise(form)
        sizes = needed_sizes(form.sizes, [(pointwise, cut_sizes(pointwise, last))])
        count = length = 1
        for number, stage in enumerate(_reductions(form)):
            small, cut = self.slices.cut_down(stage, pairs[2 * number : 2 * number + 2])
            count, length = max(count, cut.count), max(length, cut.length)
            for name, size in needed_sizes(form.sizes, [(stage, small.sizes)]).items():
                sizes[name] = max(sizes[name], size)
        count = min(self.slices.count, max(count, -(-sizes[axis] // length)))
        return resize(form, {**sizes, axis: count * length}), SlicedRows(Slices(axis, count, length))

    def tolerance(self, form: KernelForm) -> float | None:
        """The dtype's: sums of sums err less than one long sum."""
        return None


def _reductions(form: KernelForm) -> Iterator[KernelForm]:
    """Every reduction of a ``rows`` operator as an operator of its own."""
    for statement in form.reductions:
        yield kernel_form(part_of(form.expr, (statement,)))


def _pointwise(form: KernelForm) -> KernelForm:
    return kernel_form(part_of(form.expr, (form.final,)))


def consider(placed: PlacedForm, direct: RProgram) -> Considered:
    """Rows in slices, priced, or why that cannot gain anything over the operator's best program of one kernel."""
    form, device = placed.form, placed.device
    declined = _declined(placed, direct)
    if declined:
        return Considered(NAME, declined=declined)
    axis, reductions = form.columns[0], list(_reductions(form))
    if not all(split_k.can_cut(stage, axis) for stage in reductions):
        return Considered(NAME, declined=f"{axis} is not one dimension of all that it indexes")
    counts = [each for each in split_k.counts_of(PlacedForm(reductions[0], device), axis, SNAP) if each.divides(form)]
    if not counts:
        return Considered(NAME, declined=f"{axis} cannot be cut into whole slices that are worth it")
    priced = [{program.split: program for program in split_k.priced(stage, device, counts)} for stage in reductions]
    last = construct(_pointwise(form), device, 1).programs[0]
    programs = [_program(form, slices, [by_split[slices] for by_split in priced], last) for slices in counts]
    return Considered(NAME, tuple(sorted(programs, key=lambda program: program.estimate.seconds)))


def _declined(placed: PlacedForm, direct: RProgram) -> str:
    form, device = placed.form, placed.device
    if not form.is_rows:
        return "no row is reduced more than once"
    if any(statement.reduction is None or statement.reduction.axes != form.columns for statement in form.reductions):
        return "its reductions do not run over one and the same axis"
    if len(form.columns) != 1:
        return "a row has several axes"
    blocks = direct.schedule.grid_blocks(form.sizes)
    if blocks >= device.unit_count:
        return f"its {blocks} blocks give each of the {device.unit_count} {device.unit_name}s one"
    launches = 2 * len(form.reductions) + 1
    if direct.estimate.seconds <= split_k.NEAR_BOUND * placed.least_seconds + launches * device.launch_overhead_seconds:
        return f"one kernel is as near to its bound as {launches} launches could come"
    return ""


def _program(form: KernelForm, slices: Slices, reduced: Sequence[ChainProgram], last: RProgram) -> ChainProgram:
    parts = [part for program in reduced for part in program.parts]
    parts.append(ProgramPart("computes every element", last.form, last.schedule, last.estimate, last.policy))
    return ChainProgram(NAME, slices.text, form, SlicedRows(slices), tuple(parts))
