"""Relative errors of predictions, as the tables show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sokoban.schedule.table import Floats


@dataclass(frozen=True, eq=False)
class Errors:
    """Signed relative errors, shares: (predicted - measured) / measured."""

    values: Floats

    @staticmethod
    def of(predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> Errors:
        """The errors of predictions, one for one, in the unit of the measurements."""
        return Errors(np.asarray(predicted, np.float64) / np.asarray(measured, np.float64) - 1.0)

    @property
    def count(self) -> str:
        """Number of errors."""
        return str(len(self.values))

    @property
    def bias(self) -> str:
        """Their mean."""
        return f"{100 * self.values.mean():+.1f} %"

    @property
    def mean(self) -> str:
        """The mean without their signs, in bold."""
        return f"**{100 * np.abs(self.values).mean():.1f} %**"

    @property
    def median(self) -> str:
        """Their median."""
        return f"{100 * np.median(self.values):+.1f} %"

    @property
    def worst(self) -> str:
        """The largest, with its sign."""
        return f"{100 * self.values[np.abs(self.values).argmax()]:+.0f} %"


def asked(bar: float) -> str:
    """A bar as a column shows it.

    >>> asked(0.08)
    '8 %'
    """
    return f"{100 * bar:.0f} %"
