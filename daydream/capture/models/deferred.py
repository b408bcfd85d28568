"""Imports made quicker: functions of slow modules imported when they are called, and caches that hold all."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch


@contextmanager
def deferred(module: str, function: str) -> Iterator[None]:
    """Within, importing one function of a module does not import the module: calling the function does.

    Whatever else is taken of the module meanwhile imports it at once.

    >>> with deferred("colorsys", "rgb_to_hsv"):
    ...     from colorsys import rgb_to_hsv
    >>> rgb_to_hsv(0.5, 0.5, 0.5)
    (0.0, 0.0, 0.5)
    """
    if module in sys.modules:
        yield
        return
    stand_in = ModuleType(module)

    def real() -> ModuleType:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]
        return import_module(module)

    def call(*arguments: Any, **keywords: Any) -> Any:
        implementation: Callable[..., Any] = getattr(real(), function)
        return implementation(*arguments, **keywords)

    def attribute(name: str) -> Any:
        # The import system asks whether it is a package.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(real(), name)

    stand_in.__getattr__ = attribute  # type: ignore[method-assign]
    setattr(stand_in, function, call)
    sys.modules[module] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]


@contextmanager
def unbounded_caches() -> Iterator[None]:
    """Within, functions decorated by a plain ``functools.lru_cache`` keep all results, not the last 128.

    transformers looks for classes in all of its files twice while it is imported, and keeps 128 of 560 folders.

    >>> with unbounded_caches():
    ...     square = functools.lru_cache(lambda number: number**2)
    >>> square.cache_info().maxsize is None
    True
    """
    bounded = functools.lru_cache

    def unbounded(maxsize: Any = 128, typed: bool = False) -> Any:
        return bounded(maxsize=None)(maxsize) if callable(maxsize) else bounded(maxsize, typed)

    with patch.object(functools, "lru_cache", unbounded):
        yield
