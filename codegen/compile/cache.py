"""Finished kernels of earlier runs: who asks the pool for one that is known gets it without a compiler.

A kernel, or its check, is known by all that it follows from: the operator, its schedule, the target, this project's
own code and the versions of the compilers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import msgspec

from codegen.built import BuiltKernel
from codegen.compile.build import build_kernel, verify_chain, verify_schedule
from codegen.compile.toolchain import kernel_store, toolchain
from codegen.verify.result import Verification
from hal.support.store import Store, decoded, digest


class KnownFirst(Executor):
    """A pool of builders that is asked only for what no earlier run has built; what it builds is kept."""

    def __init__(self, pool: Executor, store: Store) -> None:
        self._pool, self._store = pool, store
        self._wrong: set[str] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result of ``fn(*args)`` where it is known, else of the pool."""
        kind = _KINDS.get(fn)
        if kind is None or kwargs:
            return self._pool.submit(fn, *args, **kwargs)
        key = _key(fn, args)
        stored = decoded(self._store.read(key), kind)
        if stored is not None:
            future: Future[Any] = Future()
            future.set_result(stored)
            return future
        future = self._pool.submit(fn, *args)
        future.add_done_callback(partial(self._keep, key))
        return future

    def forget(self, fn: Callable[..., Any], /, *args: Any) -> None:
        """Take the result of ``fn(*args)`` out of what is kept: it was found wrong."""
        key = _key(fn, args)
        self._wrong.add(key)
        self._store.remove(key)

    def _keep(self, key: str, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None and _is_lasting(future.result()):
            self._store.write(key, msgspec.msgpack.encode(future.result()))
            if key in self._wrong:  # forgotten while it was on its way here
                self._store.remove(key)


def _key(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    # Requests are dataclasses of numbers, texts and tuples: what they print is all that they are.
    return digest(toolchain(), fn.__name__, repr(args))


def stored_first(pool: Executor) -> KnownFirst:
    """``pool`` behind the kernels of earlier runs."""
    return KnownFirst(pool, kernel_store())


#: What the pool is asked for and is worth keeping: the function, and the type of what it returns.
_KINDS: dict[Callable[..., Any], type[Any]] = {
    build_kernel: BuiltKernel,
    verify_chain: Verification,
    verify_schedule: Verification,
}


def _is_lasting(result: BuiltKernel | Verification) -> bool:
    """True if a result is worth finding again: a kernel that was built, a proof."""
    return not result.error if isinstance(result, BuiltKernel) else result.passed
