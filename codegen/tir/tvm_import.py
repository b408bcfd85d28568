"""TVM without PyTorch: importing TVM imports PyTorch wherever it is installed, two seconds for an unused module.

TVM does so to take PyTorch's tensors, which it is never given here, and has no switch for it. Importing :mod:`codegen`
is enough for TVM to see no PyTorch, whoever imports it and whenever. Every other import of PyTorch is
left alone, afterwards and at the same time in another thread alike, and where PyTorch is loaded already TVM gets it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

#: What imports PyTorch while it is imported: ``tvm.relax`` does too, on top of TVM's foreign-function interface.
_IMPORTERS = ("tvm", "tvm_ffi")
_HIDDEN = "torch"

#: What TVM imports and building kernels needs nothing of.
_UNUSED = ("tvm.relax", "tvm.runtime.disco", "tvm.s_tir.dlight", "tvm.s_tir.meta_schedule")


#: TVM's own switch: "0" leaves out the scripts, boards' names and detectors that backends add to it.
_AUTOLOAD = "TVM_DEVICE_BACKEND_AUTOLOAD"


class HidingFinder(MetaPathFinder):
    """First of Python's finders until TVM is imported: PyTorch is nowhere for the thread that imports TVM."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._looking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for what the next finder has to look for, which is everything but TVM."""
        if fullname == _HIDDEN and threading.get_ident() in self._threads:
            raise ModuleNotFoundError(f"No module named {_HIDDEN!r} while TVM is imported", name=_HIDDEN)
        if fullname not in _IMPORTERS or getattr(self._looking, "name", None) == fullname:
            return None
        self._looking.name = fullname
        try:
            spec = find_spec(fullname)
        finally:
            self._looking.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = HidingLoader(spec.loader, self)
        return spec

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """PyTorch hidden from this thread."""
        self._threads.append(threading.get_ident())
        try:
            yield
        finally:
            self._threads.remove(threading.get_ident())


class HidingLoader(Loader):
    """The loader of a package of TVM's, with PyTorch hidden while it runs."""

    def __init__(self, loader: Loader, finder: HidingFinder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module as the loader itself makes it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module; from here on it is its own loader's alone."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        with self._finder.hiding():
            self._loader.exec_module(module)


def hide_torch_from_tvm() -> None:
    """Have the first import of TVM in this process, if there is one, do without PyTorch."""
    if not any(isinstance(finder, HidingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HidingFinder())


def leave_out_the_unused() -> None:
    """Have the first import of TVM in this process do without its graphs of operators, its tuners and what its
    backends add for other uses than printing kernels, half of it.

    For processes that build kernels and do nothing else: their TVM has nothing of these packages but what its driver
    asks functions for, whether they are of a graph. Whoever prints CUDA imports ``tvm.backend.cuda.cpp`` besides.
    """
    if "tvm" in sys.modules:
        return
    os.environ[_AUTOLOAD] = "0"
    # Absent: its foreign-function interface then does without the driver's bindings, as where they are not installed.
    sys.modules.setdefault("cuda.bindings", None)  # type: ignore[arg-type]
    for name in _UNUSED:
        sys.modules[name] = ModuleType(name, "Left out of this process.")
    sys.modules["tvm.relax"].Function = type("Function", (), {})  # type: ignore[attr-defined]
