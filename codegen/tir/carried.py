"""Numbers that kernels of lines carry from element to element, with one meaning for every target."""

from __future__ import annotations

from tvm import tirx

from codegen.tir.values import CHOICES, Choices, Expr, combine, constant
from sokoban.kernel.line import LineKernel
from sokoban.language.expression import RANKED_REDUCTIONS, REDUCTION_IDENTITY

#: A place that no element has.
NOWHERE = 2**31 - 1


class Carried:
    """Numbers that a line carries, of a scan, a place or ranks, and how one more element changes them."""

    def __init__(self, kernel: LineKernel, choices: Choices = CHOICES) -> None:
        self.kernel, self.dtype, self._choices = kernel, kernel.expr.accumulate, choices

    @property
    def first(self) -> Expr:
        """The number that changes nothing."""
        function = {"argmax": "max", "argmin": "min"}.get(self.kernel.walk.function, self.kernel.walk.function)
        return constant(REDUCTION_IDENTITY[function], self.dtype)

    def combine(self, total: Expr, value: Expr) -> Expr:
        """Total of a scan with one more value."""
        return combine(self.kernel.walk.function, total, value, self._choices)

    def is_better(self, value: Expr, place: Expr, best: Expr, best_place: Expr) -> Expr:
        """Truth of an element being the one that is looked for, rather than the best so far: NaN is the largest and
        the smallest of all, and of equals the first is taken."""
        is_larger = value > best if RANKED_REDUCTIONS[self.kernel.walk.function] else value < best
        is_equal, is_before = tirx.EQ(value, best), place < best_place
        if not self.dtype.startswith("float"):
            return tirx.any(is_larger, tirx.all(is_equal, is_before))
        undefined, best_undefined = tirx.isnan(value), tirx.isnan(best)
        return tirx.any(
            tirx.all(tirx.any(is_larger, undefined), tirx.Not(best_undefined)),
            tirx.all(tirx.any(is_equal, tirx.all(undefined, best_undefined)), is_before),
        )

    def may_be_better(self, value: Expr, best: Expr) -> Expr:
        """Falsehood of an element certainly not being better than one before it; NaN may be."""
        is_larger = value > best if RANKED_REDUCTIONS[self.kernel.walk.function] else value < best
        # TVM takes the negation of one comparison for another, which is false of NaN.
        return tirx.any(is_larger, tirx.isnan(value)) if self.dtype.startswith("float") else is_larger
