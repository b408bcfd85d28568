"""Independent parts of a long command: on all cores, on a cluster, and gone on with where one was interrupted.

A part and its answer are JSON values, and a part is done by a function of a module, so that other processes and
machines can do it; models and other files that a part names must be found there.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from hal.support.errors import InputError
from hal.support.threads import cores

#: Parts from which on processes are worth their start: each imports PyTorch once.
WORTH = 8

Part = dict[str, Any]

ENGINE_OPTIONS = (
    click.option(
        "--jobs", default=None, metavar="N|URL", help="Processes, else one a core; or a cluster: tcp://… (Dask), ray://…"
    ),
    click.option(
        "--resume", type=click.Path(dir_okay=False, path_type=Path), default=None,
        help="Keep answers in this file, and go on where it ends.",
    ),
)  # fmt: skip


def answers(
    function: Callable[[Part], Any],
    parts: Sequence[Part],
    *,
    jobs: str | None = None,
    resume: Path | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> list[Any]:
    """The answers to all parts, in their order.

    Args:
        function: does a part; of a module, not of another function.
        parts: what to do.
        jobs: how many processes, or a cluster's URL; None for one a core where there are enough parts.
        resume: file of answers that are known, to which others are added; None keeps nothing.
        progress: called with "3 of 8" behind every part.

    Raises:
        InputError: a part fails, the file is no such file, or there are no such jobs.
    """
    answer_by_key = _stored_answers(resume) if resume is not None else {}
    keys = [_key(function, part) for part in parts]
    missing = {key: part for key, part in zip(keys, parts, strict=True) if key not in answer_by_key}
    with open(resume, "a", encoding="utf-8") if resume is not None else nullcontext() as store:
        for key, answer in _done(function, missing, jobs):
            answer_by_key[key] = answer
            if store is not None:
                store.write(json.dumps({"part": key, "answer": answer}) + "\n")
                store.flush()
            progress(f"{sum(each in answer_by_key for each in keys)} of {len(keys)}")
    return [answer_by_key[key] for key in keys]


def _key(function: Callable[[Part], Any], part: Part) -> str:
    text = json.dumps([f"{function.__module__}.{function.__qualname__}", part], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _stored_answers(path: Path) -> dict[str, Any]:
    """Answers of a file; a last line that was cut off is not one."""
    if not path.parent.is_dir():
        raise InputError("--resume", f"there is no directory {path.parent}", "make it first")
    if not path.exists():
        return {}
    answer_by_key = {}
    text = path.read_text("utf-8")
    complete_lines = text[: text.rfind("\n") + 1]
    for number, line in enumerate(complete_lines.splitlines(), 1):
        try:
            record = json.loads(line)
            answer_by_key[str(record["part"])] = record["answer"]
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}: line {number}", "is no answer of a sweep", "name another file") from None
    if complete_lines != text:
        path.write_text(complete_lines, "utf-8")
    return answer_by_key


def _done(function: Callable[[Part], Any], parts: dict[str, Part], jobs: str | None) -> Iterator[tuple[str, Any]]:
    """Keys and answers as they come."""
    if not parts:
        return
    processes = _processes(jobs, len(parts))
    if processes == 1:
        yield from ((key, function(part)) for key, part in parts.items())
        return
    with _executor(jobs, processes) as executor:
        futures: dict[Future[Any], str] = {executor.submit(function, part): key for key, part in parts.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _processes(jobs: str | None, count: int) -> int:
    """Number of processes; 0 for a cluster."""
    if jobs is None:
        return cores() if count >= WORTH else 1
    if not jobs.isdigit():
        return 0
    if not 1 <= int(jobs) <= 1024:
        raise InputError("--jobs", f"got {jobs}", "write 1 to 1024, or a cluster's URL")
    return min(int(jobs), count)


@contextmanager
def _executor(jobs: str | None, processes: int) -> Iterator[Executor]:
    if not processes:
        from roller.profile.clusters import cluster_executor

        with cluster_executor(jobs or "", boards=False) as executor:
            yield executor
        return
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
