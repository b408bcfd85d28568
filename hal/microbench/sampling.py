"""Repeated timings, and loops made long enough that starting them does not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hal.microbench.launcher import Launcher, MicrobenchError, Work


@dataclass(frozen=True)
class Settings:
    """Extent of measuring.

    Attributes:
        repeats: readings of every number.
        target_seconds: how long one reading of a loop should take; a thousand times a launch's own time.
        long_seconds: how long the board is kept under load to see what its power limit leaves.
    """

    repeats: int = 15
    target_seconds: float = 5e-3
    long_seconds: float = 8.0


def timed(launcher: Launcher, work: Sequence[Work], repeats: int, *, ahead: bool = False) -> tuple[float, ...]:
    """Device seconds of the whole of ``work``, ``repeats`` readings after one that is thrown away."""
    launcher.seconds(work, ahead=ahead)
    return tuple(launcher.seconds(work, ahead=ahead) for _ in range(repeats))


def long_enough(
    launcher: Launcher, work_of: Callable[[int], Work], settings: Settings, start: int = 64, limit: int = 1 << 28
) -> int:
    """The number of iterations with which ``work_of(iterations)`` takes about ``settings.target_seconds``."""
    count = start
    while count < limit:
        seconds = launcher.seconds([work_of(count)])
        if seconds <= 0:
            raise MicrobenchError("the events of the driver report no time")
        if seconds >= settings.target_seconds / 2:
            return count
        # Short readings are mostly the launch itself, so the next guess is never more than sixteen times larger.
        count = min(limit, count * max(2, min(16, int(settings.target_seconds / seconds))))
    return limit


def power_of_two(value: float, tolerance: float = 0.03) -> int:
    """The least power of two that is at least ``value``, a reading of it up to ``tolerance`` too high included."""
    power = 1
    while power * (1 + tolerance) < value:
        power *= 2
    return power
