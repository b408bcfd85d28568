"""The sections of a harvest: what each has to measure, in which order, one item at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.calls.operators import Problem, by_turns, read_suite
from bench.gpu.adapters import manifest_of
from bench.gpu.correctness import random_inputs
from bench.gpu.journal import Item, Journal
from bench.gpu.machine import CudaMachine, bundle_of
from bench.gpu.rivals import check_of, compare, described, is_generated, launched
from bench.gpu.timing import Contender, contender, interleaved
from bench.gpu.training import configurations, measure
from roller.profile.harvested import kernel_kind

#: Kinds that no board has run yet come first.
SUITES = ("gradients", "groups", "along", "roller119", "modern", "attention")
#: Kernels of a bundle that are timed, best predicted first.
MOST_RANKS = 10
PROFILE_SECONDS = 0.15

#: torch.compile may take this share of the operators' time; of what it leaves to the library, a few per kind do.
COMPILE_SHARE = 0.35
COMPILED_PER_KIND = 2


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """Common state of all sections.

    Attributes:
        small: cut everything down, for tests.
        most_operators: only the first ones of the suites.
        own_models: the transformers defined here even where the library of that name is there.
    """

    machine: CudaMachine
    journal: Journal
    bundles: Path | None
    small: bool = False
    most_operators: int | None = None
    own_models: bool = False

    def problems(self) -> list[Problem]:
        """All operators of the suites, kinds taking turns."""
        return first_problems(small=self.small, most=self.most_operators)


def first_problems(*, small: bool, most: int | None) -> list[Problem]:
    """The operators of all suites, kinds taking turns; only the first `most` if given."""
    return by_turns([one for suite in SUITES for one in read_suite(suite, small=small)])[:most]


@dataclass(frozen=True)
class Task:
    """An item to measure. `expected_seconds` is a guess, corrected by how the section's items before it went."""

    key: str
    run: Callable[[], Item]
    expected_seconds: float


@dataclass(frozen=True)
class Section:
    """A part of the harvest with its share of the time; what it leaves goes to those after it."""

    name: str
    share: float
    tasks: Callable[[Harvest, Callable[[], float]], Iterator[Task]]
    """Of the harvest and of a function that tells the seconds which the section has left."""


def microbench_tasks(harvest: Harvest, remaining: Callable[[], float]) -> Iterator[Task]:
    """Everything that hal.microbench measures, as one item."""

    def run() -> Item:
        started = time.perf_counter()
        # the supervisor sees by the journal that something goes on
        figures = harvest.machine.microbench(lambda name: harvest.journal.note("microbench_at", name))
        return {"figures": figures, "took_seconds": round(time.perf_counter() - started, 3)}

    yield Task("board", run, 5.0)


def profile_tasks(harvest: Harvest, remaining: Callable[[], float]) -> Iterator[Task]:
    """Each carried bundle: its kernels checked, timed in turns, ranked by what they took."""
    for problem in harvest.problems():
        bundle = bundle_of(harvest.bundles, harvest.machine.architecture, problem.suite, problem.name)
        if bundle is not None:
            yield Task(f"{problem.suite}/{problem.name}", _profile(harvest, problem, bundle), 0.5)


def _profile(harvest: Harvest, problem: Problem, bundle: Path) -> Callable[[], Item]:
    return lambda: profile(harvest.machine, problem, bundle)


def profile(machine: CudaMachine, problem: Problem, bundle: Path) -> Item:
    """One item of the section ``profile``: kernels by measured time, those that are wrong or fail struck out.

    It is quicker than roller.profile.profile, which would get through a fraction of the bundles in the same time:
    kernels run in this process, which the supervisor replaces if one breaks it, and the reference is PyTorch's in
    float64.
    """
    manifest = manifest_of(bundle)
    inputs = random_inputs(problem, problem.dtype, machine.device)
    records: dict[str, Item] = {}
    contenders: list[Contender] = []
    out = None
    for kernel in manifest["kernels"][:MOST_RANKS]:
        name = f"rank {kernel['rank']}"
        record = records[name] = {
            "entry": kernel["entry"],
            "rank": kernel["rank"],
            "predicted_seconds": kernel["seconds"],
            "kind": kernel_kind(bundle, kernel["schedule"], kernel["policy"] if kernel.get("launches") else ""),
            "bound": kernel["bound"],
            "check": None,
            "reason": "",
        }
        try:
            run = launched(machine, problem, bundle, manifest, kernel, inputs, out)
            out = run()
            machine.synchronize()
            record["check"] = check_of(machine, problem, inputs, out, problem.dtype)
            if record["check"]["passed"]:
                contenders.append(contender(machine, name, run))
            else:
                record["reason"] = "differs from the reference"
        except Exception as error:
            if machine.is_broken(error):
                raise
            record["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for name, times in interleaved(machine, contenders, PROFILE_SECONDS).items():
        records[name].update(times)
    ordered = sorted(records.values(), key=lambda one: one["cold"]["median"] if "cold" in one else float("inf"))
    return {**described(problem), "device": manifest["device"], "kernels": ordered}


def operator_tasks(harvest: Harvest, remaining: Callable[[], float]) -> Iterator[Task]:
    """Each operator by everything that computes it."""
    fastest = {one["key"]: one["kernels"][0]["rank"] for one in harvest.journal.items("profile") if one["kernels"]}
    compile_seconds = COMPILE_SHARE * remaining()
    compiled_of: dict[str, int] = {}
    for problem in harvest.problems():
        key = f"{problem.suite}/{problem.name}"
        compiled_of[problem.op] = compiled_of.get(problem.op, 0) + 1
        wanted = is_generated(problem) or compiled_of[problem.op] <= COMPILED_PER_KIND
        compiled = wanted and compile_seconds > 0
        started = time.perf_counter()
        yield Task(key, _compare(harvest, problem, fastest.get(key, 1), compiled), 1.0)
        if compiled:
            compile_seconds -= time.perf_counter() - started


def _compare(harvest: Harvest, problem: Problem, rank: int, compiled: bool) -> Callable[[], Item]:
    return lambda: compare(harvest.machine, problem, harvest.bundles, rank, compiled=compiled)


def training_tasks(harvest: Harvest, remaining: Callable[[], float]) -> Iterator[Task]:
    """Each model, batch size and variant."""
    for one in configurations(harvest.machine.supports, small=harvest.small):
        yield Task(one.key, _train(harvest, one), 45.0 if one.variant.compiled else 8.0)


def _train(harvest: Harvest, one: Any) -> Callable[[], Item]:
    def run() -> Item:
        return measure(
            harvest.machine, one, harvest.journal.directory, small=harvest.small, is_local=harvest.own_models
        )

    return run


#: Shares are of the whole time; starting PyTorch and writing takes the rest.
ALL = (
    Section("microbench", 0.12, microbench_tasks),
    Section("profile", 0.20, profile_tasks),
    Section("operators", 0.33, operator_tasks),
    Section("training", 0.35, training_tasks),
)


class Broken(Exception):
    """The GPU answers no more in this process; the item that did it is in the journal."""


def run_section(harvest: Harvest, section: Section, seconds: float, say: Callable[[str], None]) -> Item:
    """Measure what is not done yet until the time is up; each item goes into the journal at once.

    Returns:
        counts: ``done`` now or before, ``failed``, ``left_out``; ``seconds``.

    Raises:
        Broken: after an error that no further item would survive.
    """
    journal, machine = harvest.journal, harvest.machine
    started = time.perf_counter()
    counts = {"done": 0, "failed": 0, "left_out": 0}
    pace = _Pace()

    def remaining() -> float:
        return seconds - (time.perf_counter() - started)

    for task in section.tasks(harvest, remaining):
        if journal.done(section.name, task.key):
            counts["done"] += 1
        elif remaining() < pace.of(task.expected_seconds):
            counts["left_out"] += 1
        else:
            before = time.perf_counter()
            journal.begin(section.name, task.key)
            try:
                journal.add(section.name, task.key, task.run())
                counts["done"] += 1
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                journal.add(section.name, task.key, {"error": reason})
                counts["failed"] += 1
                say(f"{section.name} {task.key}: {reason}")
                if machine.is_broken(error):
                    raise Broken(str(error)) from error
            machine.release()
            pace.add(task.expected_seconds, time.perf_counter() - before)
    return {**counts, "seconds": round(time.perf_counter() - started, 3)}


class _Pace:
    """Times of items as a multiple of what was expected of them, once there are some."""

    def __init__(self) -> None:
        self._expected, self._took, self._count = 0.0, 0.0, 0

    def add(self, expected: float, took: float) -> None:
        self._expected, self._took, self._count = self._expected + expected, self._took + took, self._count + 1

    def of(self, expected: float) -> float:
        return expected * self._took / self._expected if self._count >= 3 else expected
