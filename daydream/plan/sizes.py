"""Bytes of parameters or gradients by who exchanges them: all copies of the model, or those with the same experts."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Bytes of what every copy of the model has, and of experts, which fewer ranks have in common.

    >>> Sizes(4.0, 2.0).plus(Sizes(1.0)).times(2.0)
    Sizes(shared=10.0, experts=4.0)
    """

    shared: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        """Of both."""
        return self.shared + self.experts

    def plus(self, other: Sizes) -> Sizes:
        """The sum of both kinds."""
        return Sizes(self.shared + other.shared, self.experts + other.experts)

    def times(self, factor: float) -> Sizes:
        """Both kinds times a factor."""
        return Sizes(self.shared * factor, self.experts * factor)
