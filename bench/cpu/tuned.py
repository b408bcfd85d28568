"""What MetaSchedule found, kept in the repository: one file per processor, threads and TVM version.

A file is rewritten as a whole after every operator, so that a search that is interrupted loses one operator at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bench.timed.files import read_file, write_file

FORMAT = 1
FOLDER = Path(__file__).parent / "tuned"


class Tuning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best schedule of a search over ``trials`` candidates.

    Attributes:
        trials: how many candidates were asked for; ``failed`` of those tried did not build or run.
        seconds: how long the search took, imports left out.
        best_seconds: the time it measured of the best one.
        day: when, ``2026-11-21``.
        trace: TVM's trace of the schedule as JSON text; None where no candidate ran.
    """

    trials: int
    tried: int
    failed: int
    seconds: float
    best_seconds: float | None
    day: str
    trace: str | None


class TunedOperator(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator as the suite has it, and its searches by number of trials."""

    operator: dict[str, Any]
    searches: dict[str, Tuning]


class TunedFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that was found on one processor with a number of threads and a version of TVM."""

    format: int
    cpu: str
    llvm: str
    threads: int
    tvm: str
    operators: dict[str, TunedOperator]


class Store:
    """The searches of one processor, threads and TVM version, in a file of `folder`."""

    def __init__(self, folder: Path, cpu: str, llvm: str, threads: int, tvm: str) -> None:
        self.path = folder / f"{slug(f'{cpu} {llvm}')}-{threads}threads-tvm{tvm}.json"
        self._empty = TunedFile(format=FORMAT, cpu=cpu, llvm=llvm, threads=threads, tvm=tvm, operators={})

    def read(self) -> TunedFile:
        """What there is; empty where there is no file yet.

        Raises:
            InputError: the file is damaged, or of another format.
        """
        return read_tuned(self.path) if self.path.exists() else self._empty

    def find(self, operator: Mapping[str, Any], trials: int) -> Tuning | None:
        """The search over that many trials, None if there was none for just this operator."""
        return found_in(self.read(), operator, trials)

    def add(self, operator: Mapping[str, Any], tuning: Tuning) -> None:
        """Keep a search; those of an operator that was something else under the same name go."""
        file = self.read()
        name = str(operator["name"])
        known = file.operators.get(name)
        searches = dict(known.searches) if known is not None and known.operator == operator else {}
        searches[str(tuning.trials)] = tuning
        operators = {**file.operators, name: TunedOperator(operator=dict(operator), searches=searches)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = msgspec.structs.replace(file, operators=dict(sorted(operators.items())))
        write_file(self.path, new)


def read_tuned(path: Path) -> TunedFile:
    """A file of searches.

    Raises:
        InputError: it cannot be read, is damaged, or of another format.
    """
    remedy = "remove it and tune again with python -m bench.cpu.tune"
    return read_file(path, TunedFile, FORMAT, "a file of bench/cpu/tuned", remedy)


def found_in(file: TunedFile, operator: Mapping[str, Any], trials: int) -> Tuning | None:
    """The search over that many trials in a file, None if there was none for just this operator."""
    known = file.operators.get(str(operator["name"]))
    return known.searches.get(str(trials)) if known is not None and known.operator == operator else None


def slug(text: str) -> str:
    """A file's name of a processor's: ``AMD EPYC 9B45 znver5`` -> ``amd-epyc-9b45-znver5``."""
    plain = re.sub(r"\((r|tm)\)", "", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
