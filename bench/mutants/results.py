"""Findings of runs as files: outcomes with how they were drawn, written and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.mutants.verdicts import MutantOutcome
from hal.support.atomic import write_atomic
from hal.support.errors import InputError


class Results(msgspec.Struct, kw_only=True, frozen=True):
    """Outcomes of a sample of mutants.

    Attributes:
        devices, suite, top_k: whose kernels they were.
        sample, seed: mutants of each kernel besides those of synchronizations (0 = all), and what drew them.
        kernels: how many different texts there were, by kind.
        mutations: how many mutations all of them have, by kind.
        outcomes: what became of each mutant.
        failed: kernels that do not pass as they are, with the reason.
    """

    devices: tuple[str, ...]
    suite: str
    top_k: int
    sample: int
    seed: int
    kernels: dict[str, int]
    mutations: dict[str, int]
    outcomes: tuple[MutantOutcome, ...]
    failed: tuple[str, ...] = ()


def write_results(results: Results, path: Path) -> None:
    """Write a file of results."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(results)) + b"\n")


def read_results(paths: Sequence[Path]) -> Results:
    """Several files of results as one.

    Raises:
        InputError: one cannot be read.
    """
    parts = []
    for path in paths:
        try:
            parts.append(msgspec.json.decode(path.read_bytes(), type=Results))
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(str(path), f"is no file of results: {error}", "write one with --json") from error
    first = parts[0]
    return Results(
        devices=tuple(dict.fromkeys(device for each in parts for device in each.devices)),
        suite=first.suite,
        top_k=first.top_k,
        sample=first.sample,
        seed=first.seed,
        kernels=_added([each.kernels for each in parts]),
        mutations=_added([each.mutations for each in parts]),
        outcomes=tuple(outcome for each in parts for outcome in each.outcomes),
        failed=tuple(reason for each in parts for reason in each.failed),
    )


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
