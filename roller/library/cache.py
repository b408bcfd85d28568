"""The state of L2 before a call: what the previous identical call left there, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_FLUSHED: ContextVar[bool] = ContextVar("_IS_FLUSHED", default=False)


@contextmanager
def flushed_cache() -> Iterator[None]:
    """L2 with nothing of a call inside the block: benchmarks that write over it, and data that one layer of many uses.

    >>> with flushed_cache():
    ...     is_flushed()
    True
    """
    token = _IS_FLUSHED.set(True)
    try:
        yield
    finally:
        _IS_FLUSHED.reset(token)


def is_flushed() -> bool:
    """True inside :func:`flushed_cache`."""
    return _IS_FLUSHED.get()
