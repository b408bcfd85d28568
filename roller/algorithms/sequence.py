"""Operators of several kernels one after the other: each is constructed as if it stood alone.

Two products in a row, or a softmax between them that is not attention, have no kernel that computes them whole; their
statements make several (:mod:`sokoban.kernel.stages`). What passes between them lies in memory. The first program has
the best of every kernel; each of the others has one kernel by another of its schedules, so that whoever measures can
tell which of them matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from codegen.tolerance import HALF_UNITS
from hal.support.errors import InputError
from roller.algorithms.chain import ChainProgram, Considered, needed_sizes
from roller.algorithms.line import covering_sizes
from roller.algorithms.row_tiles import ROUNDINGS
from roller.construct.program import ProgramPart
from sokoban.kernel.form import KernelForm, attention_of
from sokoban.kernel.problem import Problem
from sokoban.kernel.stages import sequence_form
from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.named.expressions import program_as
from sokoban.schedule.cutting import resize

#: The name of the algorithm.
NAME = "sequence"

#: Elements of a tensor between kernels up to which a sequence is run to prove it.
MOST_ELEMENTS = 2**19


@dataclass(frozen=True)
class Stages:
    """An operator as its stages; see :class:`roller.algorithms.chain.Split`."""

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernels, in order."""
        return tuple(stage.line_kernel if stage.is_line else stage for stage in form.stages)

    def cut_down(self, form: KernelForm, schedules: Sequence[Any]) -> tuple[KernelForm, Stages]:
        """A small operator of the same statements, over which every schedule covers several tiles."""
        pairs = zip(form.stages, schedules, strict=True)
        wanted = [(stage, covering_sizes(stage, schedule)) for stage, schedule in pairs]
        sizes = _limited(form, needed_sizes(form.sizes, wanted))
        small = _resized(form, sizes)
        if [stage.kind for stage in small.stages] != [stage.kind for stage in form.stages]:
            # A kernel walks axes of one length together, which have to stay so.
            longest: dict[int, int] = {}
            for axis, full in form.sizes.items():
                longest[full] = max(longest.get(full, 0), sizes[axis])
            small = _resized(form, {axis: longest[full] for axis, full in form.sizes.items()})
        return small, self

    def tolerance(self, form: KernelForm) -> float | None:
        """More than the rounding of results in 16 bits, since what passes between kernels is rounded, too."""
        halves = HALF_UNITS.get(form.expr.output.dtype)
        return None if halves is None else ROUNDINGS * halves


def _limited(form: KernelForm, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes over which no kernel writes more than :data:`MOST_ELEMENTS`, if axes longer than pairs can do that: kernels
    are right over many tiles each, and a few tell whether they fit together. An axis of one would be no axis."""
    small = dict(sizes)
    written = [statement.axes for statement in form.expr.statements]
    while max(math.prod(small[axis] for axis in axes) for axes in written) > MOST_ELEMENTS:
        largest = max(written, key=lambda axes: math.prod(small[axis] for axis in axes))
        axis = max(largest, key=lambda axis: small[axis])
        if small[axis] <= 2:
            break
        small[axis] = -(-small[axis] // 2)
    return small


def _resized(form: KernelForm, sizes: Mapping[str, int]) -> KernelForm:
    """An operator of several stages on axes of other ``sizes``."""
    expr = form.source
    origin, attention = expr.origin, attention_of(expr)
    if origin is None or attention is None:
        return sequence_form(resize(form, sizes).expr, [len(stage.source.statements) for stage in form.stages])
    b, heads, i, d = (sizes[origin.name(axis)] for axis in ("b", attention.axes[1], *"id"))
    e = sizes.get(origin.name("e"), attention.value_size)  # a product of slopes reads no values
    keys = _keys(attention, [sizes[origin.name(axis)] for axis in attention.key_axes.split(",")])
    program = program_as(attention.smaller(b=b, key_heads=heads, queries=i, head_dim=d, value_dim=e, **keys), expr)
    if attention.epilogue or not expr.epilogue:
        return sequence_form(program)
    # The mask follows from sizes, so that the program is written anew; what stands behind it stays as it is.
    small = resize(form, {**sizes, **program.sizes}).expr
    statements = (*program.statements, *expr.epilogue)
    return sequence_form(replace(small, statements=statements, origin=program.origin))


def _keys(attention: Attention | AttentionGradient, sizes: Sequence[int]) -> dict[str, int]:
    """Keys of smaller attention by the sizes of their axes: in pages, as many tokens behind the last of them as before,
    or all of a page but one."""
    pages = attention.pages
    if pages is None:
        return {"keys": sizes[0]}
    count, page = sizes
    behind = pages.per_sequence * pages.tokens - pages.keys
    return {"keys": count * page - min(behind, page - 1), "page": page}


def combined(form: KernelForm, ranked: Sequence[Sequence[ProgramPart]], top_k: int) -> Considered:
    """The ``top_k`` best programs of an operator, given the kernels of its stages, best first.

    Raises:
        InputError: a stage has no program.
    """
    for stage, programs in zip(form.stages, ranked, strict=True):
        if not programs:
            raise InputError(stage.expr.name, "no tile of it fits the memory of the device", "write it otherwise")
    chains = sorted(_combined(form, ranked), key=lambda program: program.estimate.seconds)
    return Considered(NAME, tuple(chains[:top_k]), scored=len(chains))


def _combined(form: KernelForm, programs: Sequence[Sequence[ProgramPart]]) -> Iterator[ChainProgram]:
    """The best program of every stage together, then one of them exchanged for another one at a time."""
    best = [ranked[0] for ranked in programs]
    yield _chain(form, best, "the best of each")
    for place, ranked in enumerate(programs):
        for rank, program in enumerate(ranked[1:], start=2):
            chosen = [*best[:place], program, *best[place + 1 :]]
            yield _chain(form, chosen, f"number {rank} of kernel {place + 1}")


def _chain(form: KernelForm, kernels: Sequence[ProgramPart], which: str) -> ChainProgram:
    parts = tuple(replace(kernel, label=f"makes {kernel.problem.output.name}") for kernel in kernels)
    return ChainProgram(NAME, f"{len(parts)} kernels, {which}", form, Stages(), parts)
