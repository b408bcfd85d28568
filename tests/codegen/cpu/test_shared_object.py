"""The threads of CPU kernels: every block is run once, whoever runs it."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from codegen.cpu.shared_object import POOL
from codegen.generators import linker

pytestmark = pytest.mark.usefixtures("c_compiler")

Portions = list[tuple[int, int, int]]
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Portions]:
    """Runs so many blocks; returns (worker, begin, end) of all portions, each begun by ``slow(worker, blocks)``."""
    library = tmp_path_factory.mktemp("pool") / "pool.so"
    subprocess.run([str(linker()), "-shared", "-fPIC", "-o", library, POOL, "-lpthread"], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.roller_parallel.argtypes = (TASK, ctypes.c_void_p, ctypes.c_int64)

    def run(count: int, slow: Callable[[int, int], object] = lambda worker, blocks: None) -> Portions:
        found: Portions = []

        def task(state: Any, worker: int, begin: int, end: int) -> None:
            slow(worker, end - begin)
            found.append((worker, begin, end))

        loaded.roller_parallel(TASK(task), None, count)
        return found

    run.threads = int(loaded.roller_threads())  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000])
def test_every_block_is_run_once(parallel: Callable[..., Portions], count: int) -> None:
    for _ in range(5):
        blocks = [block for _, begin, end in parallel(count) for block in range(begin, end)]
        assert sorted(blocks) == list(range(count))


def test_a_thread_goes_on_with_the_block_after_its_last(parallel: Callable[..., Portions]) -> None:
    threads = parallel.threads  # type: ignore[attr-defined]
    portions = parallel(32 * threads, lambda worker, blocks: time.sleep(0.002))
    first = [(begin, end) for worker, begin, end in portions if worker == 0][:4]
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(first))
    assert max(end - begin for _, begin, end in portions) <= 32


def test_threads_help_one_that_is_held_up(parallel: Callable[..., Portions]) -> None:
    if parallel.threads < 2:  # type: ignore[attr-defined]
        pytest.skip("there is one core")
    others: list[int] = []
    most_are_taken = threading.Event()

    def held_up(worker: int, blocks: int) -> None:
        if worker == 1:
            most_are_taken.wait(600)
            return
        others.append(blocks)
        if sum(others) > 40 // 2:
            most_are_taken.set()

    portions = parallel(40, held_up)
    assert sum(end - begin for worker, begin, end in portions if worker == 1) < 40 // 2
