"""A run: kernels emitted, mutations drawn, mutants tried."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from bench.mutants.corpus import Specimen, cases_of, specimens_of
from bench.mutants.results import Results
from bench.mutants.verdicts import MutantOutcome, batches_of, drawn, judged
from bench.suites import suite_names, suite_path
from codegen.verify.emulator import EmulatorError
from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import load_operators


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Mutants to try.

    Attributes:
        devices: the boards, by name.
        suite: the operators, a suite's name or a file.
        names: the operators of it that are wanted; empty for all.
        top_k: programs of every operator on every board.
        kinds: mutations, by kind.
        sample: mutants of every kernel besides those of synchronizations; 0 = all.
        seed: what the sample is drawn by.
        jobs: mutants at a time.
    """

    devices: tuple[str, ...]
    suite: str
    names: tuple[str, ...]
    top_k: int
    kinds: tuple[str, ...]
    sample: int
    seed: int
    jobs: int

    def operators(self) -> list[TensorExpr]:
        """The operators.

        Raises:
            InputError: there is no such suite or operator.
        """
        path = suite_path(self.suite) if self.suite in suite_names() else self.suite
        operators = [expr for expr in load_operators(path) if not self.names or expr.name in self.names]
        if not operators:
            raise InputError("--name", f"none of {', '.join(self.names)} is in {self.suite}", "name its operators")
        return operators

    def specimens(self) -> tuple[list[Specimen], list[str]]:
        """The kernels of all programs, each text once, and why some have none."""
        specimens_by_source: dict[str, Specimen] = {}
        failed = []
        for device in self.devices:
            with _progress(f"kernels for {device}", None) as advance:
                for case in cases_of(self.operators(), device, self.top_k):
                    try:
                        for specimen in specimens_of(case):
                            specimens_by_source.setdefault(specimen.kernel.source, specimen)
                    except EmulatorError as error:
                        failed.append(f"{case.operator}, {device}, rank {case.rank}: {error}")
                    advance(1)
        return list(specimens_by_source.values()), failed


def run(plan: Plan) -> Results:
    """Try a sample of mutants.

    Raises:
        InputError: a device or an operator is not known.
    """
    specimens, failed = plan.specimens()
    draw = random.Random(plan.seed)
    batches = [
        batch
        for specimen in specimens
        for batch in batches_of(specimen, drawn(specimen, plan.kinds, plan.sample, draw))
    ]
    outcomes: list[MutantOutcome] = []
    total = sum(len(batch.mutations) for batch in batches)
    with ThreadPoolExecutor(plan.jobs) as pool, _progress("mutants", total) as advance:
        for judgement in judged(batches, pool, advance):
            if isinstance(judgement, str):
                failed.append(judgement)
            else:
                outcomes += judgement
    kinds = Counter(mutation.kind for specimen in specimens for mutation in specimen.mutations)
    return Results(
        devices=plan.devices,
        suite=plan.suite,
        top_k=plan.top_k,
        sample=plan.sample,
        seed=plan.seed,
        kernels=dict(Counter(specimen.kind for specimen in specimens)),
        mutations=dict(kinds),
        outcomes=tuple(outcomes),
        failed=tuple(dict.fromkeys(failed)),
    )


@contextmanager
def _progress(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal's stderr; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.update(task, advance=count)
