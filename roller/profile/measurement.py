"""Results of measuring: a board, and for every kernel a time or the reason why there is none.

It needs Python alone, like all code of a machine with a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Self


@dataclass(frozen=True)
class Board:
    """The GPU or processor and its software, as far as times depend on them.

    Attributes:
        name: of the hardware.
        capability: compute capability of a GPU, ``9.0``; of a processor its threads, ``8 threads``.
        versions: of the software that takes part, by name.
    """

    name: str
    capability: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result for one kernel; fields as in :class:`codegen.bundle.records.ProfileRecord`.

    ``seconds`` is the median time of one launch, None where ``struck_out`` says why there is none. ``lost`` says that
    the GPU takes no further work from this process, as after an access outside all memory.
    """

    seconds: float | None
    spread_seconds: float | None
    repeats: int
    launches: int
    relative_error: float | None
    tolerance: float
    struck_out: str
    loaded: str
    lost: bool = False

    @classmethod
    def timed(
        cls, times: Sequence[float], *, launches: int, relative_error: float | None, tolerance: float, loaded: str
    ) -> Self:
        """The measurement of a kernel that is right.

        Args:
            times: seconds of one launch, a figure for every repeat.
            launches: launches of a repeat.
            relative_error, tolerance: how far its results are off, and the bound that they were held to.
            loaded: what was run.

        >>> result = Measurement.timed(
        ...     [1.0, 2.0, 3.0], launches=5, relative_error=0.0, tolerance=1e-4, loaded="cubin"
        ... )
        >>> result.seconds, result.spread_seconds, result.repeats
        (2.0, 2.0, 3)
        """
        low, _, high = quantiles(times, n=4) if len(times) > 1 else (0.0, 0.0, 0.0)
        return cls(
            seconds=median(times),
            spread_seconds=high - low,
            repeats=len(times),
            launches=launches,
            relative_error=relative_error,
            tolerance=tolerance,
            struck_out="",
            loaded=loaded,
        )

    @classmethod
    def refused(
        cls, reason: str, *, tolerance: float, loaded: str, relative_error: float | None = None, lost: bool = False
    ) -> Self:
        """The measurement of a kernel whose time does not count; ``reason`` becomes one line.

        >>> Measurement.refused("too\\nlate", tolerance=1e-4, loaded="", relative_error=float("inf")).struck_out
        'too late'
        """
        is_finite = relative_error is not None and math.isfinite(relative_error)
        return cls(
            seconds=None,
            spread_seconds=None,
            repeats=0,
            launches=0,
            relative_error=relative_error if is_finite else None,
            tolerance=tolerance,
            struck_out=" ".join(reason.split()),
            loaded=loaded,
            lost=lost,
        )
