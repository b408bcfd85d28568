"""Result of a micro-benchmark: repeated readings of one number, with its unit, its method and what is plausible."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Readings of one number.

    Attributes:
        key: the name in tables, ``dram.add``.
        unit: ``B/s``, ``FLOP/s``, ``OP/s``, ``s``, ``Hz``, ``B`` or empty for a count.
        samples: the readings, at least one.
        method: how they were taken, in words; becomes the provenance of the number.
        path: key path of the device number that this one becomes; empty where a device file has no such number.
        low: the least that is plausible; None where nothing is known.
        high: the most that is plausible; likewise.
        best: whether the number is the fastest reading (shortest time, highest rate) and not the median: on a shared
            machine everything that disturbs makes readings slower.
    """

    key: str
    unit: str
    samples: tuple[float, ...]
    method: str
    path: str = ""
    low: float | None = None
    high: float | None = None
    best: bool = False

    @property
    def value(self) -> float:
        """The number: median of the readings, or the fastest of them."""
        if not self.best:
            return statistics.median(self.samples)
        return min(self.samples) if self.unit == "s" else max(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median: 0 where all readings agree."""
        if len(self.samples) < 2:
            return 0.0
        first, middle, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (third - first) / middle if middle else 0.0

    @property
    def plausible(self) -> bool:
        """True if the number lies in its sanity range."""
        return (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)

    @property
    def readings(self) -> str:
        """``median of 15, quartiles 0.4 % apart``, for the provenance."""
        if len(self.samples) == 1:
            return "one reading"
        kind = "best" if self.best else "median"
        return f"{kind} of {len(self.samples)}, quartiles {100 * self.spread:.1f} % apart"

    def within(self, low: float | None, high: float | None) -> Measurement:
        """These readings with another plausible range."""
        return replace(self, low=low, high=high)

    def record(self) -> dict[str, Any]:
        """All of it as JSON-ready values."""
        return {
            "key": self.key,
            "value": self.value,
            "unit": self.unit,
            "spread": round(self.spread, 4),
            "low": self.low,
            "high": self.high,
            "plausible": self.plausible,
            "path": self.path,
            "method": self.method,
            "samples": list(self.samples),
        }


#: Measurements by key: what the quantities before this one gave.
Measurements = Mapping[str, Measurement]
#: A quantity that takes turns with others: None after a reading, its measurements once all are taken. It is sent True
#: where it has readings enough.
Turns = Generator[Measurement | None, bool | None, None]


def rates(work: float, seconds: tuple[float, ...]) -> tuple[float, ...]:
    """Work per second of every reading.

    >>> rates(6.0, (2.0, 3.0))
    (3.0, 2.0)
    """
    return tuple(work / second for second in seconds)
