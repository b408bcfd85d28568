"""Results as tables: by kind of kernel, by kind of mutation, and every mutant that was missed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.table import Table

from bench.accuracy.page import markdown
from bench.mutants.mutations import KINDS, OTHER_KINDS, SYNC_KINDS
from bench.mutants.results import Results
from bench.mutants.verdicts import MutantOutcome, counted
from hal.support.atomic import write_atomic
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.text.quantities import count_text

#: What a page has between its marks is written anew.
_PLACE = re.compile(r"(<!-- mutants -->\n).*?(<!-- end of mutants -->)", re.DOTALL)


def tables(results: Results) -> Iterator[Table]:
    """By kernel, by mutation, and what was missed."""
    yield _by_kernel(results)
    yield _by_mutation(results)
    if any(outcome.verdict == "missed" for outcome in results.outcomes):
        yield _missed(results)


def summary(results: Results) -> Iterator[str]:
    """Number of mutants tried, and how many of them were noticed."""
    total, tried = sum(results.mutations.values()), len(results.outcomes)
    kernels = count_text(sum(results.kernels.values()), "kernel")
    ranks = "rank 1" if results.top_k == 1 else f"ranks 1 to {results.top_k}"
    drawn = f"{results.sample} others of each, seed {results.seed}" if results.sample else "all others"
    yield (
        f"{kernels} of {results.suite}, {ranks}, on {', '.join(results.devices)}: {tried} of {total} mutants, "
        f"all of synchronizations and {drawn}."
    )
    for name, kinds in (("synchronizations", SYNC_KINDS), ("others", OTHER_KINDS)):
        mine = [outcome for outcome in results.outcomes if outcome.kind in kinds]
        counts = counted(mine)
        share = _share(counts["noticed"], counts["noticed"] + counts["missed"])
        yield (
            f"Of {len(mine)} {name} {counts['noticed']} were noticed ({share} of those neither harmless nor needless), "
            f"{counts['harmless']} are harmless, {counts['needless']} needless, {counts['missed']} were missed."
        )
    for reason in results.failed:
        yield f"Does not pass as it is: {reason}"


def write_tables(results: Results, page: Path) -> None:
    """Put summary and tables between the marks of a page.

    Raises:
        InputError: the page cannot be read or has no such place.
    """
    try:
        text = page.read_text("utf-8")
    except OSError as error:
        raise InputError(str(page), f"cannot be read: {error.strerror}", "name the page with --page") from None
    if _PLACE.search(text) is None:
        raise InputError(str(page), "has no place for the tables", "write <!-- mutants --> and <!-- end of mutants -->")
    parts = ["\n".join(summary(results)), *map(markdown, tables(results))]
    body = "\n" + "".join(f"{part}\n\n" for part in parts)
    write_atomic(page, _PLACE.sub(lambda match: f"{match[1]}{body}{match[2]}", text).encode())


def _share(part: int, total: int) -> str:
    return "-" if total == 0 else f"{100 * part / total:.1f} %"


_VERDICT_COLUMNS = ("mutants", "noticed", "harmless", "needless", "missed", "share")


def _verdicts(outcomes: Sequence[MutantOutcome]) -> list[str]:
    """The cells of :data:`_VERDICT_COLUMNS`: the share is that of those not shown to be harmless."""
    if not outcomes:
        return [""] * len(_VERDICT_COLUMNS)
    counts = counted(outcomes)
    share = _share(counts["noticed"], counts["noticed"] + counts["missed"])
    return [str(len(outcomes)), *(str(counts[name]) for name in _VERDICT_COLUMNS[1:-1]), share]


def _by_kernel(results: Results) -> Table:
    table = new_table(("kernel",), ("texts",), title="By kind of kernel")
    sync = ("synchronizations", "noticed", "harmless", "needless", "missed")
    for column in (*sync, "others", *_VERDICT_COLUMNS[1:]):
        table.add_column(column, justify="right")
    for kernel in (*sorted(results.kernels), None):
        mine = [outcome for outcome in results.outcomes if kernel in (None, outcome.kernel)]
        table.add_row(
            kernel or "all",
            str(sum(results.kernels.values()) if kernel is None else results.kernels[kernel]),
            *_verdicts([outcome for outcome in mine if outcome.is_sync])[:-1],
            *_verdicts([outcome for outcome in mine if not outcome.is_sync]),
            style="bold" if kernel is None else None,
        )
    return table


def _by_mutation(results: Results) -> Table:
    table = new_table(("mutation",), ("sites", *_VERDICT_COLUMNS), ("noticed by",), title="By kind of mutation")
    for kind in KINDS:
        mine = [outcome for outcome in results.outcomes if outcome.kind == kind]
        if mine:
            by = Counter(outcome.by for outcome in mine if outcome.verdict == "noticed")
            named = ", ".join(f"{check} {count}" for check, count in by.most_common())
            table.add_row(kind, str(results.mutations[kind]), *_verdicts(mine), named)
    return table


def _missed(results: Results) -> Table:
    table = new_table(("operator", "device", "kernel", "mutation", "change", "text"), title="Missed")
    key: Callable[[MutantOutcome], tuple[str, ...]] = lambda each: (each.kernel, each.kind, each.operator, each.device)  # noqa: E731
    for outcome in sorted((each for each in results.outcomes if each.verdict == "missed"), key=key):
        part = f".{outcome.part + 1}" if outcome.part else ""
        table.add_row(
            outcome.operator,
            f"{outcome.device} {outcome.rank}{part}",
            outcome.kernel,
            outcome.kind,
            f"{outcome.change}, line {outcome.line}",
            outcome.before if len(outcome.before) <= 60 else f"{outcome.before[:57]}...",
            style="bold",
        )
    return table
