"""Figures of a harvest on kernels: our times against the vendor's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from bench.gpu.results import Candidate, OperatorResult, Results

#: How much longer than the library a kernel may take to count as within so many per cent of it.
WITHIN = (0.05, 0.10, 0.50)

#: Who else computes operators; attention has two kinds of the library's kernels besides its choice.
RIVALS = ("library", "flash", "cudnn", "compile", "triton")


@dataclass(frozen=True)
class Duel:
    """Our kernel and somebody else's on one operator in one precision; seconds with L2 flushed."""

    operator: OperatorResult
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Their time as a multiple of ours: above 1 we are faster."""
        return self.theirs / self.ours


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Standing of our kernels against one rival. Shares are of `count` operators.

    Attributes:
        better: share that is at least as fast.
        within: share that takes at most 1 + x times as long, for each x of :data:`WITHIN`; the better ones included.
        mean_ratio: geometric mean of their time over ours.
    """

    rival: str
    precision: str
    count: int
    better: float
    within: tuple[float, ...]
    mean_ratio: float


def candidate(result: OperatorResult, who: str, precision: str) -> Candidate | None:
    """Who computed an operator in a precision, if it was right and timed."""
    for competitor in result.candidates:
        if (competitor.who, competitor.precision) == (who, precision) and competitor.cold is not None:
            return competitor
    return None


def duels(results: Results, rival: str, precision: str) -> list[Duel]:
    """Every operator of a type that both we and `rival` computed; ``best`` is the fastest of all others.

    Matrix products of float32 operators in TF32 or float16 are another computation, and no rival of ours.
    """
    fights = []
    for result in results.operators:
        ours = candidate(result, "roller", precision)
        names = RIVALS if rival == "best" else (rival,)
        rivals = [
            competitor
            for competitor in (candidate(result, name, precision) for name in names)
            if competitor is not None
        ]
        times = [competitor.cold.median for competitor in rivals if competitor.cold is not None]
        if ours is not None and ours.cold is not None and times and result.dtype == precision:
            fights.append(Duel(result, ours.cold.median, min(times)))
    return fights


def standing(rival: str, precision: str, fights: Sequence[Duel]) -> Standing:
    """The shares over some duels, of which there has to be one."""
    ratios = [fight.ratio for fight in fights]

    def share(slack: float) -> float:
        return sum(ratio * (1 + slack) >= 1 for ratio in ratios) / len(ratios)

    mean = geometric_mean(ratios)
    return Standing(
        rival=rival,
        precision=precision,
        count=len(ratios),
        better=share(0.0),
        within=tuple(map(share, WITHIN)),
        mean_ratio=mean,
    )


def standings(results: Results) -> list[Standing]:
    """Ours against everybody, by precision; rivals without a common operator are left out."""
    precisions = sorted({result.dtype for result in results.operators}, reverse=True)
    pairs = [(rival, precision) for precision in precisions for rival in (*RIVALS, "best")]
    return [
        standing(rival, precision, fights) for rival, precision in pairs if (fights := duels(results, rival, precision))
    ]
