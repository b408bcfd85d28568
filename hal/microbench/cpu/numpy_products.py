"""NumPy's matrix product with one thread on every core at once.

How many threads a BLAS starts is settled when it is loaded, so every core gets a process of its own, pinned to it and
with one thread. It multiplies whenever it reads a line and answers with the processor time that took.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from hal.microbench.launcher import MicrobenchError

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS")
_WORKER = """
import os, sys, time
import numpy as np
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(sys.argv[1])})
size = int(sys.argv[2])
a, b = (np.random.default_rng(seed).random((size, size), np.float32) for seed in (1, 2))
c = np.empty_like(a)
for line in sys.stdin:
    start = time.thread_time()
    np.matmul(a, b, out=c)
    print(time.thread_time() - start, flush=True)
"""


class NumpyProducts:
    """Products of two square float32 matrices, one per core; use as a context."""

    def __init__(self, cpus: Sequence[int], size: int) -> None:
        environment = {**os.environ, **dict.fromkeys(_THREADS, "1")}
        self.size = size
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(cpu), str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for cpu in cpus
        ]

    def __enter__(self) -> NumpyProducts:
        try:
            self.seconds()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    @property
    def operations(self) -> float:
        """Floating-point operations of all cores together; a multiply-add counts as two."""
        return 2.0 * self.size**3 * len(self._workers)

    def seconds(self) -> float:
        """Processor time of the slowest of one product per core."""
        for worker in self._workers:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):  # the missing answer says it
                worker.stdin.write("go\n")
                worker.stdin.flush()
        answers = [worker.stdout.readline() for worker in self._workers if worker.stdout is not None]
        if not all(answers):
            raise MicrobenchError("a process that multiplies with NumPy ended early; its own message is above")
        return max(map(float, answers))
