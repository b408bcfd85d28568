"""What a harvest says of kernels: our times beside the vendor's, predictions beside measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from bench.gpu.results import Candidate, OperatorResult, ProfileResult, Results

#: How much longer than the library a kernel may take to count as within so many per cent of it.
WITHIN = (0.05, 0.10, 0.50)

#: Who else computes operators; attention has two kinds of the library's kernels beside its choice.
RIVALS = ("library", "flash", "cudnn", "compile", "triton")

#: A prediction further off than this is to be explained or mended.
FAR_OFF = 0.15


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
    """How our kernels stand against one rival. Shares are of `count` operators.

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


# Predictions


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How right the predictions for a kind of operator are, over all its kernels that ran.

    Attributes:
        mean_error: mean of |predicted - measured| / measured.
        median_bias: median of predicted / measured.
        first_is_best: share of bundles whose rank 1 comes within 5% of its fastest kernel.
    """

    op: str
    bundles: int
    kernels: int
    mean_error: float
    median_bias: float
    first_is_best: float


def prediction(op: str, profiles: Sequence[ProfileResult]) -> Prediction | None:
    """Over the kernels of some bundles; None where none was timed."""
    pairs = [
        (kernel.predicted_seconds, kernel.cold.median)
        for profile in profiles
        for kernel in profile.kernels
        if kernel.cold
    ]
    if not pairs:
        return None
    first_choices = [is_best for profile in profiles if (is_best := _leads(profile)) is not None]
    return Prediction(
        op=op,
        bundles=len(profiles),
        kernels=len(pairs),
        mean_error=sum(abs(predicted - measured) / measured for predicted, measured in pairs) / len(pairs),
        median_bias=median(predicted / measured for predicted, measured in pairs),
        first_is_best=sum(first_choices) / len(first_choices) if first_choices else 0.0,
    )


def _leads(profile: ProfileResult) -> bool | None:
    times = {kernel.rank: kernel.cold.median for kernel in profile.kernels if kernel.cold is not None}
    return times[1] <= 1.05 * min(times.values()) if 1 in times else None


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A kernel whose prediction is further off than :data:`FAR_OFF`.

    Attributes:
        kind: what it multiplies by.
        ratio: predicted by measured.
    """

    key: str
    rank: int
    kind: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def misses(results: Results) -> list[Miss]:
    """Every first kernel of a bundle whose prediction is far off, the worst first."""
    found = [
        Miss(
            key=profile.key, rank=kernel.rank, kind=kernel.kind, predicted=kernel.predicted_seconds,
            measured=kernel.cold.median,
        )
        for profile in results.profile
        for kernel in profile.kernels
        if kernel.cold and kernel.rank == 1
    ]  # fmt: skip
    far = [miss for miss in found if abs(miss.ratio - 1) > FAR_OFF]
    return sorted(far, key=lambda miss: abs(math.log(miss.ratio)), reverse=True)


def predictions_by_kind(results: Results) -> list[tuple[str, int, float, float]]:
    """By kind of kernel: how many were timed, their mean error, and the median of predicted by measured."""
    pairs: dict[str, list[float]] = {}
    for profile in results.profile:
        for kernel in profile.kernels:
            if kernel.cold:
                pairs.setdefault(kernel.kind, []).append(kernel.predicted_seconds / kernel.cold.median)
    return [
        (kind, len(ratios), sum(abs(ratio - 1) for ratio in ratios) / len(ratios), median(ratios))
        for kind, ratios in sorted(pairs.items())
    ]


def predictions(results: Results) -> list[Prediction]:
    """By kind of operator, then all together."""
    kinds: Iterable[str] = dict.fromkeys(profile.op for profile in results.profile)
    rows = [prediction(op, [profile for profile in results.profile if profile.op == op]) for op in kinds]
    return [row for row in (*rows, prediction("all", results.profile)) if row is not None]
