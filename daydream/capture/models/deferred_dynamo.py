"""TorchDynamo imported when something is compiled, not by the libraries of models that decorate functions for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import isroutine
from types import ModuleType
from typing import Any

_PACKAGE = "torch._dynamo"
_UTILS = f"{_PACKAGE}.utils"

#: Modules of the package that import nothing else of it.
_ALONE = (f"{_PACKAGE}.config", f"{_PACKAGE}._trace_wrapped_higher_order_op")


def defer_dynamo() -> None:
    """``torch._dynamo``, where it is not imported yet, is imported when something of it is needed.

    A step in eager mode needs nothing of it, yet PyTorch's optimizers and checkpoints, transformers and torchvision
    import it, which takes nearly as long as PyTorch itself. Until then a stand-in has the decorators and marks that
    mean something to compiled code alone. Whatever else is taken of it, by ``torch.compile`` first of all, imports
    the package, which then learns of the functions that were marked.
    """
    if _PACKAGE not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _StandIn(ModuleType):
    """A module of the package with a few functions of its own; all others are the package's, imported when asked."""

    def __init__(self, name: str, finder: _Finder, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name)
        self.__finder = finder
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        # The import system asks whether it is a package.
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        return import_module(whole) if whole in _ALONE else getattr(self.__finder.imported(self.__name__), name)


class _Finder(MetaPathFinder, Loader):
    """Finder of the stand-ins, and of what is behind them once a module is asked for that has none."""

    def __init__(self) -> None:
        self._marked: list[Callable[[Any], object]] = []
        self._stand_ins: list[_StandIn] = []
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _PACKAGE:
            spec = PathFinder.find_spec(fullname, path)
            if spec is None:
                return None
            stand_in = ModuleSpec(fullname, self, origin=spec.origin, is_package=True)
            stand_in.submodule_search_locations = spec.submodule_search_locations
            return stand_in
        if not fullname.startswith(f"{_PACKAGE}.") or fullname in _ALONE:
            return None
        if fullname != _UTILS:
            self._specs[fullname] = getattr(self.imported(fullname), "__spec__", None)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in self._specs:
            return sys.modules[spec.name]
        functions: dict[str, Callable[..., Any]]
        if spec.name == _UTILS:
            functions = {"is_compile_supported": lambda device: self.imported(_UTILS).is_compile_supported(device)}
        else:
            marks = ("assume_constant_result", "allow_in_graph")
            functions = {name: partial(self._mark, name) for name in marks}
            functions |= {"disable": self._disable, "graph_break": lambda msg="": None}
        self._stand_ins.append(_StandIn(spec.name, self, functions))
        return self._stand_ins[-1]

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self._specs:
            module.__spec__ = self._specs[module.__name__]

    def imported(self, name: str) -> ModuleType:
        """A module of the package, after the package has taken the stand-ins' place."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for stand_in in self._stand_ins:
                sys.modules.pop(stand_in.__name__, None)
                for function in [key for key in vars(stand_in) if not key.startswith("_")]:
                    delattr(stand_in, function)
            package = import_module(_PACKAGE)
            for each in _ALONE:
                if each in sys.modules:
                    setattr(package, each.rpartition(".")[2], sys.modules[each])
            for mark in self._marked:
                mark(package)
        return import_module(name)

    def _mark(self, name: str, function: Any) -> Any:
        self._marked.append(lambda package: getattr(package, name)(function))
        return function

    def _disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return partial(self._disable, recursive=recursive, **options)
        if not isroutine(function):
            return self.imported(_PACKAGE).disable(function, recursive, **options)
        chosen = function

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return chosen(*arguments, **keywords)

        def disable(package: Any) -> None:
            nonlocal chosen
            chosen = package.disable(function, recursive, **options)

        self._marked.append(disable)
        return call
