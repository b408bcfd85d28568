"""Two products in a row in one kernel, where a sequence of two would pass what lies between them through memory.

A block holds rows of the first factor and of the result, and walks the columns of what lies between: every element of
that is computed once, changed in registers and multiplied on. What it costs is reuse: a block reads all of both other
factors for its rows, and has to hold whole rows of the first factor and of the result, so that it pays for narrow
layers of many rows. Tiles grow under the rules of every rTile (thesis 6.3.1), as those of
:mod:`roller.algorithms.flash` do, and RATIONAL prices all that fit, and the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from codegen.tolerance import HALF_UNITS
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.algorithms.chain import ChainProgram, Considered, needed_sizes
from roller.algorithms.row_tiles import (
    ROUNDINGS,
    fitting,
    has_matrix_instructions,
    matrix_tiles,
    multiply_add_tiles,
    within,
)
from roller.construct.program import ProgramPart
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pair import ProductPair, product_pair
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.problem import Problem
from sokoban.kernel.stages import sequence_form
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.pair import estimate_pair
from sokoban.schedule.cutting import cut, resize
from sokoban.schedule.pair import PairSchedule

#: The name of the algorithm.
NAME = "fused pair"


@dataclass(frozen=True)
class WholePair:
    """Two products in a row as one kernel; see :class:`roller.algorithms.chain.Split`."""

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernel."""
        return (product_pair(form.source),)

    def cut_down(self, form: KernelForm, schedules: Sequence[PairSchedule]) -> tuple[KernelForm, WholePair]:
        """A pair of a few problems, over which rows still make several tiles and H's columns several steps; the other
        axes stay whole, as they are in every block."""
        schedule = schedules[0]
        pair = product_pair(form.source)
        cut_axes = {
            pair.row: cut(pair.rows, schedule.rows),
            pair.middle: cut(pair.middle_size, schedule.step, schedule.stages + 1),
        }
        parts = {part for axis in (*pair.batch, *cut_axes) for part in dict(pair.fused).get(axis, (axis,))}
        uncut = {axis: size for axis, size in form.sizes.items() if axis not in parts}
        sizes = needed_sizes(form.sizes, [(pair, cut_axes | uncut)])
        try:
            small = sequence_form(resize(form, sizes).expr)
            _check(product_pair(small.source), schedule.instruction)
        except InputError:
            return form, self  # its axes have other roles elsewhere
        return small, self

    def tolerance(self, form: KernelForm) -> float | None:
        """More than the rounding of results in 16 bits, since what lies between is rounded, too."""
        halves = HALF_UNITS.get(form.expr.output.dtype)
        return None if halves is None else ROUNDINGS * halves


def consider(placed: PlacedForm, top_k: int) -> Considered:
    """The ``top_k`` best programs of one kernel for an operator of several, or why there are none."""
    device = placed.device
    try:
        kernel = checked_pair(placed.form, device)
    except InputError as error:
        return Considered(NAME, declined=error.problem)
    best, count = fitting(_schedules(kernel, device), lambda schedule: estimate_pair(kernel, schedule, device))
    if not best:
        rows = f"rows of {kernel.depth_size} and of {kernel.width_size} elements"
        return Considered(NAME, declined=f"no tile with whole {rows} fits the memory of {device.name}")
    programs = tuple(_program(placed.form, schedule, estimate) for estimate, schedule in best[:top_k])
    return Considered(NAME, programs, scored=count)


def checked_pair(form: KernelForm, device: DeviceSpec) -> ProductPair:
    """The pair of products that an operator is.

    Raises:
        InputError: it is none, or the device or the kernels have nothing for it.
    """
    if device.teu.lane != "thread":
        problem = f"its kernels are for lanes that are threads; those of {device.name} are elements of vectors"
        raise InputError(form.expr.name, problem, "name a GPU")
    kernel = product_pair(form.source)
    _check(kernel, _instruction(kernel, device))
    return kernel


def _instruction(kernel: ProductPair, device: DeviceSpec) -> Instruction:
    """Instruction that multiplies."""
    return Instruction.MMA_16X8X16 if has_matrix_instructions(kernel.dtype, device) else Instruction.FMA


def _check(kernel: ProductPair, instruction: Instruction) -> None:
    """Raise where rows are no multiple of what is copied or stored at once."""
    by_matrices = instruction is not Instruction.FMA
    grain, tensors = 8 if by_matrices else 4, kernel.expr.tensor_by_name
    lengths = {
        f"columns of {kernel.own.tensor}": kernel.depth_size,
        f"columns of {kernel.output.name}": kernel.width_size,
        f"rows of {kernel.own.tensor} in memory": tensors[kernel.own.tensor].shape[-1],
    }
    for load, is_turned in ((kernel.first, kernel.is_first_turned), (kernel.second, kernel.is_second_turned)):
        # Threads that multiply and add fetch what is turned element by element.
        if by_matrices or not is_turned:
            lengths[f"rows of {load.tensor} in memory"] = tensors[load.tensor].shape[-1]
        if by_matrices and is_turned:
            lengths[f"columns of {load.tensor}"] = kernel.middle_size
    for what, length in lengths.items():
        if length % grain:
            raise InputError(
                kernel.name, f"{what}, {length} elements, are no multiple of {grain}", f"use a multiple of {grain}"
            )


def program_of(form: KernelForm, schedule: PairSchedule, device: DeviceSpec) -> ChainProgram:
    """The program of a schedule that somebody else made; its estimate is infinite where no block of it fits.

    Raises:
        InputError: the operator is no pair of products that the device or the kernels have something for.
    """
    return _program(form, schedule, estimate_pair(checked_pair(form, device), schedule, device))


def _program(form: KernelForm, schedule: PairSchedule, estimate: Estimate) -> ChainProgram:
    part = ProgramPart("", product_pair(form.source), schedule, estimate, NAME)
    return ChainProgram(NAME, schedule.text, form, WholePair(), (part,))


def _schedules(kernel: ProductPair, device: DeviceSpec) -> Iterator[PairSchedule]:
    """Tiles that are not mostly beyond the rows or the columns that there are."""
    by_matrices = _instruction(kernel, device) is not Instruction.FMA
    candidates = matrix_tiles(PairSchedule, (False, True)) if by_matrices else multiply_add_tiles(PairSchedule)
    return within(candidates, kernel.rows, kernel.middle_size)
