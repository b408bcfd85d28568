"""Processes that train jobs on gloo together: they run steps, record them, and time collectives on request."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import distributed

from bench.daydream.gloo_models import Job, Training
from daydream.record.record import record

#: Steps before those that are recorded or timed: the second one rebuilds DDP's buckets.
WARM_STEPS = 3

#: One thread for a rank's arithmetic, and transfers by the loopback. Memory that is freed stays with the process, all
#: in one place: on virtual machines a page that is used for the first time may cost more than what is done with it.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}

#: Blocks of 1 MiB that a rank touches before it begins: what the profiler holds cuts free memory up, so that every
#: recorded step takes other pages.
_TOUCHED_BLOCKS = 150


# What a rank does


def _rank(connection: Connection, rank: int, ranks: int, store: str) -> None:
    """Loop of a rank: it serves requests until there are no more."""
    torch.set_num_threads(1)
    touched = [torch.zeros(1 << 18) for _ in range(_TOUCHED_BLOCKS)]
    del touched
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    jobs: dict[Job, Callable[[], None]] = {}
    try:
        while (order := connection.recv()) is not None:
            task, *arguments = order
            connection.send(_TASKS[task](jobs, *arguments))
    finally:
        distributed.destroy_process_group()


def _step_of(jobs: dict[Job, Callable[[], None]], job: Job) -> Callable[[], None]:
    """The job's training step; the first time, the job is set up and warmed up."""
    if job not in jobs:
        jobs[job] = Training(job).step
        for _ in range(WARM_STEPS):
            jobs[job]()
    return jobs[job]


def _run(jobs: dict[Job, Callable[[], None]], job: Job, steps: int) -> list[float]:
    """Seconds of some steps; one before them lets the caches forget what ran before."""
    step = _step_of(jobs, job)
    step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _record(jobs: dict[Job, Callable[[], None]], job: Job, steps: int, folder: str) -> str:
    """Some steps recorded, in ``rank0.json.gz`` and so on; the job is set up anew, so that its gradients are seen."""
    training = Training(job)
    with record(Path(folder) / "step.json.gz", steps=steps, warmup=WARM_STEPS, model=training.model) as recorder:
        while recorder.written is None:
            training.step()
            recorder.step()
    path = Path(folder) / f"rank{distributed.get_rank()}.json.gz"
    return str(recorder.written.replace(path))


def _collective(_: Any, name: str, size: int, count: int, repeats: int) -> float:
    """Seconds of `count` collectives of `size` bytes that are asked for at once, the median of several times."""
    part = max(size // 4 // distributed.get_world_size(), 1)
    parts = [torch.zeros(part) for _ in range(count)]
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "all_reduce": lambda one, _: distributed.all_reduce(one, async_op=True),
        "all_gather": lambda one, part: distributed.all_gather_single(one, part, async_op=True),
        "reduce_scatter": lambda one, part: distributed.reduce_scatter_single(part, one, async_op=True),
    }
    seconds = []
    for _ in range(repeats + 1):
        tensors = [torch.zeros(part * distributed.get_world_size()) for _ in range(count)]
        if name == "all_gather":
            tensors = [torch.empty_like(tensor) for tensor in tensors]
        distributed.barrier()
        began = time.perf_counter()
        works = [calls[name](one, part) for one, part in zip(tensors, parts, strict=True)]
        for work in works:
            work.wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _copy(_: Any, size: int) -> float:
    """Seconds of a copy of `size` bytes into memory that is allocated for it, the median of several."""
    tensor = torch.zeros(size // 4)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        tensor.clone()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _forget(jobs: dict[Job, Callable[[], None]], job: Job) -> None:
    jobs.pop(job, None)


_TASKS: dict[str, Callable[..., Any]] = {
    "run": _run,
    "record": _record,
    "collective": _collective,
    "copy": _copy,
    "forget": _forget,
}


# Who tells them


class Ranks:
    """Processes that wait, without work for the processor, for a common request."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._cleanup = ExitStack()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Ranks:
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory())
        context = multiprocessing.get_context("spawn")
        before = {name: os.environ.get(name) for name in SETTINGS}
        os.environ.update(SETTINGS)
        try:
            for rank in range(self.ranks):
                parent_end, child_end = context.Pipe()
                process = context.Process(
                    target=_rank, args=(child_end, rank, self.ranks, f"{folder}/store"), daemon=True
                )
                process.start()
                child_end.close()
                self._connections.append(parent_end)
                self._processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for connection in self._connections:
            if kind is None:
                connection.send(None)
            connection.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._cleanup.close()

    def tell(self, task: str, *arguments: Any) -> list[Any]:
        """Answers of the ranks, in order of rank."""
        for connection in self._connections:
            connection.send((task, *arguments))
        return [connection.recv() for connection in self._connections]
