"""A comparison as tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from bench.cpu.machine import Machine
from bench.cpu.results import ONEDNN, Entry, OperatorResult, Results
from bench.timed.statistics import Spread, geometric_mean
from roller.text.quantities import si_text, time_text

if TYPE_CHECKING:
    from rich.table import Table

#: Column -> the rivals whose fastest it shows.
COLUMNS = {
    "oneDNN": ONEDNN,
    "OpenBLAS": ("openblas",),
    "MetaSchedule 64": ("metaschedule-64",),
    "MetaSchedule 512": ("metaschedule-512",),
    "bandwidth limit": ("limit",),
}


def machine_lines(machine: Machine) -> Iterator[str]:
    """Machine that the times were taken on."""
    clock = "" if machine.clock_mhz is None else f", {machine.clock_mhz:.0f} MHz at the start"
    yield f"{machine.title} ({machine.llvm}), {machine.core_count} cores{clock}"
    vectors = ", ".join(machine.avx512) or "no AVX-512"
    yield f"{machine.simd_bits}-bit vectors: {vectors}"
    cpus = ", ".join(map(str, machine.cpus))
    yield f"{machine.threads} threads on processors {cpus}; load before the first run {machine.load:.2f}"
    yield ", ".join(f"{name} {version}" for name, version in machine.packages.items())


def ratio_table(results: Results) -> Table:
    """A row per operator: our time, the others' as multiples of it, the predicted time and its error, the error of what
    a spec of the same minute predicts, and the first choice's time over that of the best."""
    from hal.support.tables import new_table

    table = new_table(("operator",), ("ours", "rate", *COLUMNS, "predicted", "error", "then", "first"))
    for one in results.operators:
        table.add_row(one.name, *_ours(one), *(_against(one, who) for who in COLUMNS.values()), *_predicted(one))
    means = [geometric_mean(_medians(results, who)) for who in COLUMNS.values()]
    errors = [
        [abs(error) for one in results.operators if (error := getattr(one, name)) is not None]
        for name in ("prediction_error", "error_then")
    ]
    firsts = [first for one in results.operators if (first := _first(one)) is not None]
    table.add_row(
        "geometric mean, median error", "", "", *(_mean_text(mean) for mean in means), "",
        *(f"{median(each):.0%}" if each else "-" for each in errors), _mean_text(geometric_mean(firsts)),
    )  # fmt: skip
    return table


def _mean_text(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}"


def _first(one: OperatorResult) -> float | None:
    ours = one.entry("ours")
    return None if ours is None else ours.facts.first_choice


def _medians(results: Results, who: Sequence[str]) -> list[float]:
    return [ratio.median for one in results.operators if (ratio := one.ratio(*who)) is not None]


def _ours(one: OperatorResult) -> tuple[str, str]:
    ours = one.entry("ours")
    if ours is None or ours.time is None:
        return "-", "-"
    seconds = ours.time.median
    # Fewer than ten operations a byte: what counts is how fast data moves.
    rate = si_text(one.flop / seconds, "FLOP/s") if one.flop >= 10 * one.bytes else si_text(one.bytes / seconds, "B/s")
    return f"{time_text(seconds)} ±{ours.time.width / 2:.0%}", rate


def _against(one: OperatorResult, who: Sequence[str]) -> str:
    ratio = one.ratio(*who)
    if ratio is not None:
        return ratio_text(ratio)
    times = [entry.time.median for name in who if (entry := one.entry(name)) is not None and entry.time is not None]
    return f"({time_text(min(times))})" if times else "-"


def ratio_text(ratio: Spread) -> str:
    """``1.04 (1.01-1.08)``: the median and the quartiles."""
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _predicted(one: OperatorResult) -> tuple[str, str, str, str]:
    ours, error, then = one.entry("ours"), one.prediction_error, one.error_then
    if ours is None or ours.facts.predicted_seconds is None or error is None:
        return "-", "-", "-", "-"
    predicted = time_text(ours.facts.predicted_seconds)
    return predicted, f"{error:+.0%}", "-" if then is None else f"{then:+.0%}", _mean_text(_first(one))


def struck_out_lines(results: Results) -> Iterator[str]:
    """Who has no time, grouped by reason."""
    operators: dict[tuple[str, str], list[str]] = {}
    for one in results.operators:
        for entry in one.entries:
            if entry.reason:
                operators.setdefault((entry.who, _facts_text(entry)), []).append(one.name)
    for (who, reason), names in operators.items():
        which = f"all {len(names)}" if len(names) == len(results.operators) else ", ".join(names)
        yield f"{who} struck out: {reason} ({which})"


def _facts_text(entry: Entry) -> str:
    if entry.check is None or entry.check.passed:
        return entry.reason
    return f"{entry.reason} by {entry.check.relative_error:.1e}, allowed {entry.check.tolerance:.0e}"


def widest(results: Results) -> tuple[str, float] | None:
    """The time with the widest spread and its name; None where nothing was timed."""
    spreads = [
        (f"{one.name} by {entry.who}", entry.time.width)
        for one in results.operators
        for entry in one.entries
        if entry.time is not None
    ]
    return max(spreads, key=lambda pair: pair[1], default=None)
