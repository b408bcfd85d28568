"""One call on all cores at once, timed by the processor time that each core spends on it.

Time is that of the processor, not of the clock on the wall: on a machine that others use too, a thread may have to
wait for its turn in the middle of a reading. On an idle one both are the same, as no call here sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

Call = Callable[[], object]


class Cores:
    """One thread per core, each kept on its own; use as a context."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self.count = len(cpus)
        self._free = list(cpus)
        self._start = threading.Barrier(self.count)
        # One pool per core: which thread of a common pool takes a call is left to chance.
        self._pools = [ThreadPoolExecutor(1, initializer=self._pin) for _ in cpus]

    def __enter__(self) -> Cores:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            pool.shutdown()

    def seconds(self, calls: Sequence[Call]) -> float:
        """Processor time of the slowest of one call per core, all started together; they release Python's lock."""
        futures = [pool.submit(self._timed, call) for pool, call in zip(self._pools, calls, strict=True)]
        return max(future.result() for future in futures) * 1e-9

    def _timed(self, call: Call) -> int:
        self._start.wait()
        start = time.thread_time_ns()
        call()
        return time.thread_time_ns() - start

    def _pin(self) -> None:
        cpu = self._free.pop()
        # A core that was taken away meanwhile: the thread runs on another one.
        with suppress(OSError):
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {cpu})
