"""Medians with quartiles, ratios round by round, geometric means, turns: by the standard library alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

#: Quartiles further apart than this share of the median tell of a machine that did something else meanwhile.
WIDE = 0.10


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of ``count`` values and the quartiles; of a single value all three are the same."""

    median: float
    low: float
    high: float
    count: int

    @property
    def width(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.high - self.low) / self.median


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        low = high = values[0]
    else:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=statistics.median(values), low=low, high=high, count=len(values))


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> Spread:
    """Their seconds as a multiple of ours, round by round: above 1 ours is faster.

    What slowed the machine down for a whole round falls out of each ratio.
    """
    return spread([their / our for their, our in zip(theirs, ours, strict=True)])


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.geometric_mean(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Check:
    """The comparison with the float64 reference, largest |out - reference| / (|reference| + rms of the reference).

    Attributes:
        relative_error: None where it is not finite.
        share: the part of the output that was compared.
    """

    relative_error: float | None
    tolerance: float
    passed: bool
    share: float = 1.0


def turn(contenders: Sequence[_T], number: int) -> tuple[_T, ...]:
    """The order of a round: every round begins with another one, so that clocks and heat are the same for all."""
    first = number % len(contenders) if contenders else 0
    return (*contenders[first:], *contenders[:first])
