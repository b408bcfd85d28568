"""Kernels of lines: what goes along one axis in order, a line of elements for every point of the other axes.

A scan (a cumulative sum, product, largest or smallest) leaves an element for each of the line's; the place of the
largest or smallest value leaves one for the line, and so many values or places by rank leave as many. All carry what
they have seen from element to element. Of scattered rows the line is one of places (:mod:`sokoban.language.scatter`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hal.support.errors import InputError
from sokoban.kernel.kernel import ExpressionKernel
from sokoban.kernel.statements import (
    axes_of,
    distinct_reduced_axes,
    reads_elementwise,
    renamed_to,
    too_much,
)
from sokoban.language.expression import (
    AffineIndex,
    Load,
    Reduction,
    Scan,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
)
from sokoban.language.scatter import Scatter, scatter_of

#: Most values or places by rank: each is looked for by itself, in the order of the ranks.
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class LineKernel(ExpressionKernel):
    """A scan or a place along an axis, and one point-wise statement of what it makes.

    Attributes:
        expr: two statements over fused axes: the scan or place, and what defines the output.
    """

    expr: TensorExpr

    #: A compiler writes its text, which has no narrow floats in OpenCL C.
    KEEPS_NARROW_FLOATS = False

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.expr.name

    @property
    def sizes(self) -> Mapping[str, int]:
        """Elements of every axis."""
        return self.expr.sizes

    @property
    def line(self) -> Statement:
        """The statement of the scan or place."""
        return self.expr.statements[0]

    @property
    def final(self) -> Statement:
        """The point-wise statement that defines the output."""
        return self.expr.statements[1]

    @cached_property
    def walk(self) -> Scan | Reduction:
        """The scan or place."""
        value = self.line.value
        assert isinstance(value, Scan | Reduction)
        return value

    @property
    def is_scan(self) -> bool:
        """True if it leaves an element for each of a line's."""
        return self.line.scan is not None

    @property
    def is_reversed(self) -> bool:
        """True if lines are gone along from their ends."""
        return isinstance(self.walk, Scan) and self.walk.is_reversed

    @property
    def is_exclusive(self) -> bool:
        """True if an element is left out of its own result."""
        return isinstance(self.walk, Scan) and self.walk.is_exclusive

    @cached_property
    def axis(self) -> str:
        """The axis that lines lie along."""
        return self.walk.axis if isinstance(self.walk, Scan) else self.walk.axes[0]

    @property
    def rank_axis(self) -> str | None:
        """The axis of the output that counts a line's values or places by rank; None where it has none."""
        return self.walk.rank if isinstance(self.walk, Reduction) else None

    @property
    def ranks(self) -> int:
        """Values or places of a line that are in the output, where they are not as many as its elements."""
        return 1 if self.rank_axis is None else self.sizes[self.rank_axis]

    @cached_property
    def scatter(self) -> Scatter | None:
        """The rows that are added where places say; None for any other kernel of lines."""
        return scatter_of(self.line, self.expr.tensor_by_name)

    @cached_property
    def row_axes(self) -> tuple[str, ...]:
        """The other axes, as the output has them: a line for each of their points."""
        if self.scatter is not None:
            return (self.scatter.row,)
        return tuple(axis for axis in self.final.axes if axis not in (self.axis, self.rank_axis))

    @property
    def columns(self) -> int:
        """Elements of the output for each line of scattered rows; 1 elsewhere."""
        return 1 if self.scatter is None else math.prod(self.sizes[axis] for axis in self.scatter.columns)

    @property
    def length(self) -> int:
        """Elements of a line."""
        return self.sizes[self.axis]

    @cached_property
    def lines(self) -> int:
        """Number of lines."""
        return math.prod(self.sizes[axis] for axis in self.row_axes)

    @property
    def body(self) -> Value:
        """The value that lines are of."""
        return self.walk.body

    @cached_property
    def reads(self) -> tuple[Load, ...]:
        """Distinct loads of inputs, by either statement."""
        every = (*loads(self.body), *loads(self.final.value))
        return tuple(dict.fromkeys(load for load in every if load.tensor != self.line.tensor))


def line_expression(expr: TensorExpr) -> TensorExpr | None:
    """The two statements of a :class:`LineKernel` that an operator of fused axes is; None where no statement of it is
    of lines.

    Raises:
        InputError: it has more than one such statement, or a reduction besides.
    """
    lines = [statement for statement in expr.statements if statement.is_of_lines]
    if not lines:
        return _scatter_expression(expr)
    others = [each for each in expr.statements if not each.is_pointwise and each is not lines[0]]
    if others:
        raise too_much(expr, f"{lines[0].tensor} goes along an axis in order, and {others[0].tensor} is no value of it")
    if expr.statements[-1] is lines[0]:
        expr = _with_copy(expr)
    line, final = expr.statements
    if not reads_elementwise(final, line):
        raise too_much(expr, f"{final.tensor} reads more than its own element of {line.tensor}")
    _check_ranks(expr, line)
    if line.reduction is not None:
        expr, (line,) = distinct_reduced_axes(expr, (line,), final.axes)
    renamed = renamed_to(final, line)
    return replace(expr, axes=axes_of(expr, (renamed, final)), statements=(renamed, final))


def _scatter_expression(expr: TensorExpr) -> TensorExpr | None:
    """The two statements of a kernel that adds scattered rows; None where an operator is anything else."""
    reductions = [statement for statement in expr.statements if not statement.is_pointwise]
    if len(reductions) != 1 or scatter_of(reductions[0], expr.tensor_by_name) is None:
        return None
    if expr.statements[-1] is reductions[0]:
        expr = _with_copy(expr)
    sums, final = expr.statements
    if not reads_elementwise(final, sums):
        return None
    expr, (sums,) = distinct_reduced_axes(expr, (sums,), final.axes)
    renamed = renamed_to(final, sums)
    return replace(expr, axes=axes_of(expr, (renamed, final)), statements=(renamed, final))


def _check_ranks(expr: TensorExpr, line: Statement) -> None:
    """Refuse more ranks than kernels look for one after the other."""
    rank = None if line.reduction is None else line.reduction.rank
    if rank is not None and expr.sizes[rank] > MOST_RANKS:
        problem = f"{expr.sizes[rank]} values by rank; kernels have at most {MOST_RANKS}"
        raise InputError(expr.name, problem, f"use a size of {rank} up to {MOST_RANKS}")


def _with_copy(expr: TensorExpr) -> TensorExpr:
    """``C = cumsum(...)`` -> ``C_acc = cumsum(...); C = C_acc``: what accumulates has a dtype of its own."""
    last, tensor = expr.statements[-1], expr.output
    is_place = last.reduction is not None and last.reduction.is_place
    dtype = "int32" if is_place else expr.accumulate
    accumulator = Tensor(f"{tensor.name}_acc", tensor.shape, dtype)
    load = Load(accumulator.name, tuple(AffineIndex.axis(axis) for axis in last.axes))
    statements = (Statement(accumulator.name, last.axes, last.value), Statement(tensor.name, last.axes, load))
    return replace(expr, tensors=(*expr.tensors[:-1], accumulator, tensor), statements=statements)
