"""Processes that build kernels. This module imports nothing slow, so that they can be started first of all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any


@contextmanager
def worker_pool(jobs: int) -> Iterator[Executor]:
    """Processes that build kernels, gone when the block ends, at once when it fails.

    They are forked from a server process that imports TVM once, while the caller still parses and constructs, and
    opens no device, thread or context. What the caller submits lies in modules, not in its main one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["codegen.compile.preload"])
    # Ctrl-C reaches a whole process group: the server and its workers inherit a mask that leaves it to the caller.
    # (Starting the tracker resets the mask, so that comes first.)
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker)
    try:
        with _without_main_module():
            yield pool
    except BaseException:
        _abandon(pool)
        raise
    if _processes(pool):
        pool.shutdown()
    else:
        # No kernel was asked for: the server may still be importing.
        _abandon(pool)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Processes that start meanwhile do not run the caller's main module, and all that it imports, once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _processes(pool: ProcessPoolExecutor) -> list[BaseProcess]:
    return list((getattr(pool, "_processes", None) or {}).values())


def _abandon(pool: ProcessPoolExecutor) -> None:
    """End the pool's processes, the server first: a worker that is just starting would find its caller gone."""
    server: Any = getattr(forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if isinstance(pid, int):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            # The next pool starts a server of its own.
            server._stop()
    for process in _processes(pool):
        process.kill()
    # Waits for the pool's own thread, which finds its processes dead; else it would race with the interpreter's exit.
    pool.shutdown(wait=True, cancel_futures=True)


def start_worker() -> None:
    """Prepare a worker process: it ends when its caller does, however that happens."""
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)
