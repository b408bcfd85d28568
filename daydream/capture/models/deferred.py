"""Imports made quicker: functions of slow modules imported when they are called, caches that hold all, PyTorch."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
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

    transformers looks for classes in all of its files twice while it is imported, and keeps 128 of 560 folders. What
    looks for them reads each file from its last ``__all__`` on, the one that it takes.

    >>> with unbounded_caches():
    ...     square = functools.lru_cache(lambda number: number**2)
    >>> square.cache_info().maxsize is None
    True
    """
    bounded = functools.lru_cache

    def unbounded(maxsize: Any = 128, typed: bool = False) -> Any:
        surroundings = getattr(maxsize, "__globals__", {})
        if getattr(maxsize, "__name__", "") == "create_import_structure_from_path":
            surroundings["fetch__all__"] = _from_last_names(surroundings["fetch__all__"])
        return bounded(maxsize=None)(maxsize) if callable(maxsize) else bounded(maxsize, typed)

    with patch.object(functools, "lru_cache", unbounded):
        yield


def _from_last_names(fetch: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    def fetched(content: str) -> list[str]:
        return fetch(content[content.rfind("\n__all__") + 1 :])

    return fetched


def load_torch_library() -> None:
    """Load PyTorch's library in a thread, whose symbols the linker resolves while Python imports other modules.

    Builds with CUDA are left to ``import torch``, which chooses among several versions of CUDA's own libraries.
    """
    spec = None if "torch" in sys.modules else find_spec("torch")
    for place in () if spec is None else spec.submodule_search_locations or ():
        library = Path(place) / "lib" / "libtorch_python.so"
        if library.exists() and not library.with_name("libtorch_cuda.so").exists():
            Thread(target=_load, args=(library,), daemon=True).start()


def _load(library: Path) -> None:
    with suppress(OSError):
        ctypes.CDLL(str(library.with_name("libtorch_global_deps.so")), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


@contextmanager
def frames_without_source() -> Iterator[None]:
    """Within, frames are described by file and line, and modules of frames found by name, without reading any source.

    PyTorch describes the frame that defines each of its operators in Python, and takes file, line and module alone.
    """
    search = inspect.getmodule

    def module_of(sought: Any, _filename: str | None = None) -> ModuleType | None:
        named = sys.modules.get(sought.f_globals.get("__name__", "")) if inspect.isframe(sought) else None
        return search(sought, _filename) if named is None else named

    described = functools.partial(inspect.getframeinfo, context=0)
    with patch.object(inspect, "getmodule", module_of), patch.object(inspect, "getframeinfo", described):
        yield
