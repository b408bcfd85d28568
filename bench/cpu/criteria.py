"""What the comparison has to show, line by line: the bar, what was found, met or not.

A line about several operators is met only when all of them were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cpu.results import ONEDNN, Entry, OperatorResult, Results
from bench.timed.statistics import geometric_mean

GEMMS = ("gemm_512", "gemm_1024")
#: The operators that MetaSchedule tries 512 candidates of.
LONG_SEARCH = (*GEMMS, "conv3x3_64x56_nchw", "conv3x3_64x56_nhwc")

GEMM_BAR, CONVOLUTION_BAR, REST_BAR, LIMIT_SLACK = 0.95, 0.95, 1.2, 1.10
MEAN_BAR_64, MEAN_BAR_512 = 1.0, 0.97
CONSTRUCTION_BAR, PROFILING_BAR = 1 / 1000, 1 / 50
FIRST_CHOICE_BAR, ERROR_BAR = 1.15, 0.25

_64, _512 = "metaschedule-64", "metaschedule-512"


@dataclass(frozen=True)
class Criterion:
    """One line; ``met`` is None where there is nothing to judge by, which counts as not met."""

    text: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return {True: "met", False: "not met", None: "not measured"}[self.met]


def criteria(results: Results, suite: Sequence[Mapping[str, Any]]) -> list[Criterion]:
    """All lines over the operators of the whole suite, whichever of them were measured."""
    by_name = {operator.name: operator for operator in results.operators}
    names = [str(spec["name"]) for spec in suite]
    convolutions = [str(spec["name"]) for spec in suite if spec.get("op") == "conv2d"]
    rest = [name for name in names if name not in GEMMS and name not in convolutions]
    measured = [by_name[name] for name in names if name in by_name]
    long = [name for name in LONG_SEARCH if name in names]
    everybody = (*ONEDNN, "openblas", _64, _512)
    return [
        *(_gemm(by_name.get(name), name, everybody) for name in GEMMS if name in names),
        _mean(measured, len(names), _64, MEAN_BAR_64),
        _mean([operator for operator in measured if operator.name in long], len(long), _512, MEAN_BAR_512),
        _cost("construction", measured, len(names), CONSTRUCTION_BAR, _construction),
        _cost("construction and profiling", measured, len(names), PROFILING_BAR, _search),
        _each(
            f"convolutions: at least {CONVOLUTION_BAR} of oneDNN each",
            [by_name.get(name) for name in convolutions],
            lambda operator: (operator.ratio(*ONEDNN) is not None, _at_least(operator, CONVOLUTION_BAR)),
        ),
        _each(
            f"all others: at least {REST_BAR} times PyTorch, or within {LIMIT_SLACK - 1:.0%} of the bandwidth limit",
            [by_name.get(name) for name in rest],
            lambda operator: (
                operator.ratio(*ONEDNN, "limit") is not None,
                _at_least(operator, REST_BAR) or near_limit(operator),
            ),
        ),
        _first_choice(measured, len(names)),
        _error(measured, len(names), f"median error of predicted times: at most {ERROR_BAR:.0%}", prediction_error),
        _error(
            measured,
            len(names),
            f"the same, predicted from a spec of the same minute: at most {ERROR_BAR:.0%}",
            error_then,
        ),
    ]


def near_limit(operator: OperatorResult) -> bool:
    """Whether ours takes at most a tenth longer than moving the operator's bytes."""
    ratio = operator.ratio("limit")
    return ratio is not None and ratio.median * LIMIT_SLACK >= 1.0


def prediction_error(operator: OperatorResult) -> float | None:
    """(predicted - measured) / measured of our kernel, predicted when it was compiled."""
    ours = operator.entry("ours")
    return None if ours is None else _error_of(ours, ours.facts.predicted_seconds)


def error_then(operator: OperatorResult) -> float | None:
    """(predicted - measured) / measured of our kernel, predicted from a spec measured right before and after."""
    ours = operator.entry("ours")
    return None if ours is None else _error_of(ours, ours.facts.predicted_then_seconds)


def _error_of(ours: Entry, predicted: float | None) -> float | None:
    return None if ours.time is None or predicted is None else predicted / ours.time.median - 1.0


def _at_least(operator: OperatorResult, bar: float) -> bool:
    ratio = operator.ratio(*ONEDNN)
    return ratio is not None and ratio.median >= bar


def _gemm(operator: OperatorResult | None, name: str, rivals: Sequence[str]) -> Criterion:
    text = f"{name}: at least {GEMM_BAR} of the best of oneDNN, OpenBLAS and MetaSchedule"
    ratio = None if operator is None else operator.ratio(*rivals)
    if operator is None or ratio is None:
        return Criterion(text, "-", None)
    missing = [who for who in ("torch", "openblas", _64) if operator.entry(who) is None]
    lacking = f", without {', '.join(missing)}" if missing else ""
    met = None if missing else ratio.median >= GEMM_BAR
    return Criterion(text, f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}){lacking}", met)


def _of(count: int, total: int) -> str:
    return f", {count} of {total} operators" if count < total else ""


def _whole(met: bool, count: int, total: int) -> bool | None:
    return met if count == total else None


def _mean(measured: Sequence[OperatorResult], total: int, who: str, bar: float) -> Criterion:
    found = [ratio.median for operator in measured if (ratio := operator.ratio(who)) is not None]
    text = f"geometric mean over {total} operators against {who}: at least {bar}"
    mean = geometric_mean(found)
    if mean is None:
        return Criterion(text, "-", None)
    return Criterion(text, f"{mean:.3f}{_of(len(found), total)}", _whole(mean >= bar, len(found), total))


def _construction(operator: OperatorResult) -> float | None:
    ours = operator.entry("ours")
    return None if ours is None else ours.facts.construction_seconds


def _search(operator: OperatorResult) -> float | None:
    ours, construction = operator.entry("ours"), _construction(operator)
    if ours is None or construction is None or ours.facts.profiling_seconds is None:
        return None
    return construction + ours.facts.profiling_seconds


def _cost(
    what: str,
    measured: Sequence[OperatorResult],
    total: int,
    bar: float,
    seconds: Callable[[OperatorResult], float | None],
) -> Criterion:
    """Seconds of ours, all operators together, as a share of MetaSchedule's search over 64 trials."""
    pairs = []
    for operator in measured:
        tuned, ours = operator.entry(_64), seconds(operator)
        if ours is not None and tuned is not None and tuned.facts.tuning_seconds:
            pairs.append((ours, tuned.facts.tuning_seconds))
    text = f"{what}: at most 1/{1 / bar:.0f} of MetaSchedule's tuning over 64 trials"
    if not pairs:
        return Criterion(text, "-", None)
    share = sum(ours for ours, _ in pairs) / sum(theirs for _, theirs in pairs)
    return Criterion(text, f"1/{1 / share:.0f}{_of(len(pairs), total)}", _whole(share <= bar, len(pairs), total))


def _each(
    text: str,
    operators: Sequence[OperatorResult | None],
    judge: Callable[[OperatorResult], tuple[bool, bool]],
) -> Criterion:
    """A bar for each of some operators; ``judge`` says whether one was measured, and whether it keeps the bar."""
    judged = {operator.name: judge(operator) for operator in operators if operator is not None}
    known = [name for name, (measured, _) in judged.items() if measured]
    if not known:
        return Criterion(text, "-", None)
    short = [name for name in known if not judged[name][1]]
    found = f"{len(known) - len(short)} of {len(operators)}"
    if len(known) < len(operators):
        found += f", {len(known)} measured"
    if short:
        found += f"; not {', '.join(short)}"
    return Criterion(text, found, False if short else _whole(True, len(known), len(operators)))


def _first_choice(measured: Sequence[OperatorResult], total: int) -> Criterion:
    text = f"RATIONAL's first choice over the best of its top 50, mean: at most {FIRST_CHOICE_BAR}"
    found = [ours.facts.first_choice for operator in measured if (ours := operator.entry("ours")) is not None]
    known = [value for value in found if value is not None]
    if not known:
        return Criterion(text, "-", None)
    mean = statistics.mean(known)
    met = _whole(mean <= FIRST_CHOICE_BAR, len(known), total)
    return Criterion(text, f"{mean:.3f}{_of(len(known), total)}", met)


def _error(
    measured: Sequence[OperatorResult], total: int, text: str, error_of: Callable[[OperatorResult], float | None]
) -> Criterion:
    errors = [abs(error) for operator in measured if (error := error_of(operator)) is not None]
    if not errors:
        return Criterion(text, "-", None)
    median = statistics.median(errors)
    return Criterion(text, f"{median:.1%}{_of(len(errors), total)}", _whole(median <= ERROR_BAR, len(errors), total))
