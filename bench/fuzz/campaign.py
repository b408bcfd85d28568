"""A run over many operators: worker processes that may crash or hang, failures shrunk, progress shown."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from bench.fuzz.log import Log, Record, code_digest
from bench.fuzz.operators import operator
from hal.support.threads import ONE_THREAD

#: Seconds that an operator may take, on a machine that others use too; operators after which a worker makes room for a
#: fresh one.
_TIMEOUT, _RECYCLED = 600.0, 400

#: Failures of one kind that are shrunk, and seconds that this may take.
_SHRUNK, _SHRINK_SECONDS = 3, 60.0


@dataclass
class Totals:
    """Totals of a run.

    Attributes:
        operators: examined by this code.
        core_seconds: that this took on a core.
        kernels: run, by outcome.
        failures: numbers of operators with a kernel that is wrong, with a traceback, or that took too long.
    """

    operators: int = 0
    core_seconds: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """One more operator."""
        self.operators += 1
        self.core_seconds += record["core_seconds"]
        self.kernels.update(run["outcome"] for run in record["runs"])
        problem = problem_of(record)
        if problem:
            self.failures[record["number"]] = problem


def problem_of(record: Record) -> str:
    """Problem of an operator; empty where there is none."""
    if "traceback" in record:
        return str(record["traceback"]).strip().splitlines()[-1]
    if record.get("built"):
        return str(record["built"])
    wrong = [run for run in record["runs"] if run["outcome"] == "wrong"]
    if wrong:
        return f"{wrong[0]['device']} {wrong[0]['kind']}: {wrong[0]['reason']}"
    if record["runs"] and all(run["outcome"] == "refused" for run in record["runs"]):
        return f"no kernel: {record['runs'][0]['reason']}"
    return ""


class Worker:
    """A process of its own that examines operators, replaced where it dies or hangs."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._calls = 0

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = _TIMEOUT) -> Any:
        """The function's result.

        Raises:
            TimeoutError: it took too long.
            BrokenProcessPool: the process died.
        """
        if self._pool is None or self._calls >= _RECYCLED:
            self.close()
            os.environ.update(ONE_THREAD)  # Workers of several runs share the cores.
            context = multiprocessing.get_context("spawn")
            self._pool, self._calls = ProcessPoolExecutor(1, mp_context=context), 0
        self._calls += 1
        future: Future[Any] = self._pool.submit(function, *arguments)
        try:
            return future.result(timeout)
        except (FutureTimeout, BrokenProcessPool):
            self.close(kill=True)
            raise

    def close(self, kill: bool = False) -> None:
        """End the process."""
        if self._pool is None:
            return
        if kill:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown(wait=not kill, cancel_futures=True)
        self._pool = None


def campaign(
    log: Log, seed: int, minutes: float, most: int | None, show: Callable[[str], None], worker: Worker | None = None
) -> Totals:
    """Examine operators until the time is over or there are ``most``; those of the log are not examined again.

    Operators that failed under other code come first.
    """
    totals, digest = Totals(), code_digest()
    done, failed = set(), set()
    for record in log.records():
        if record["seed"] != seed:
            continue
        if record["code"] == digest:
            done.add(record["number"])
            totals.add(record)
        elif problem_of(record):
            failed.add(record["number"])
    used = {record["number"] for record in log.records() if record["seed"] == seed}
    worker, shrinkings = worker or Worker(), Counter[str]()
    end, start, before = time.monotonic() + 60 * minutes, time.monotonic(), totals.operators
    shown = start
    try:
        for number in _numbers(sorted(failed - done), used):
            if time.monotonic() > end or (most is not None and totals.operators - before >= most):
                break
            record = _examined(worker, number, seed) | {"seed": seed, "code": digest}
            log.append(record)
            totals.add(record)
            if number in totals.failures:
                show(f"operator {number}: {totals.failures[number]}")
                _shrink(worker, log, record, seed, shrinkings, show)
            if time.monotonic() > shown + 60:
                shown = time.monotonic()
                show(_progress(totals, before, shown - start))
    except KeyboardInterrupt:
        show("interrupted; the same command goes on from here")
    finally:
        worker.close(kill=True)
    show(_progress(totals, before, time.monotonic() - start))
    return totals


def _numbers(again: list[int], used: set[int]) -> Iterator[int]:
    yield from again
    yield from (number for number in itertools.count() if number not in used)


def _examined(worker: Worker, number: int, seed: int) -> Record:
    from bench.fuzz.run import examined

    try:
        return dict(worker.call(examined, number, seed))
    except FutureTimeout:
        problem = f"Timeout: longer than {_TIMEOUT:g} s"
    except BrokenProcessPool:
        problem = "Crash: the process died"
    return {"number": number, "took": {}, "refused": {}, "runs": [], "traceback": problem, "seconds": _TIMEOUT,
            "core_seconds": _TIMEOUT}  # fmt: skip


def _progress(totals: Totals, before: int, seconds: float) -> str:
    each = totals.core_seconds / max(totals.operators, 1)
    kernels = ", ".join(f"{count} {outcome}" for outcome, count in sorted(totals.kernels.items()))
    done = totals.operators - before
    return (
        f"{totals.operators} operators in {totals.core_seconds / 60:.1f} minutes of a core, {each:.2f} s each"
        f" ({done} in {seconds / 60:.1f} minutes now); kernels: {kernels}; {len(totals.failures)} operators failed"
    )


def _shrink(
    worker: Worker, log: Log, record: Record, seed: int, shrinkings: Counter[str], show: Callable[[str], None]
) -> None:
    """The failing operator made small and written down, once or a few times for every kind of failure."""
    from bench.fuzz.run import shrunk_operator

    run = next((run for run in record["runs"] if run["outcome"] == "wrong"), None)
    run = run or next((run for run in record["runs"] if run["outcome"] == "refused"), None)
    data = operator(record["number"], seed)
    kind = f"{run['kind']} {run['outcome']}" if run else problem_of(record)
    shrinkings[kind] += 1
    if run is not None and "traceback" not in record and shrinkings[kind] <= _SHRUNK:
        with contextlib.suppress(FutureTimeout, BrokenProcessPool):
            data = worker.call(shrunk_operator, data, run, _SHRINK_SECONDS, timeout=_SHRINK_SECONDS + 120)
    path = log.write_finding(record, data, run or {"traceback": record.get("traceback", "")})
    show(f"written to {path}: {data.get('expr', data)}")
