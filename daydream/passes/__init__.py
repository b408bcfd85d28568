"""What-if passes: functions from one graph to the next, found by name, their assumptions as parameters.

A pass is registered with :func:`what_if`, a function of a graph or a frozen dataclass that is called with one. Its
keyword parameters or fields, with their annotations and defaults, are what a user can set (``--pass
ddp:workers=8,bandwidth=12.5``). It returns an :class:`Outcome`. Every module of this package is imported the first
time a pass is looked up.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from keyword import iskeyword
from typing import Any, TypeVar

from daydream.graph.graph import TaskGraph


@dataclass(frozen=True)
class Outcome:
    """Result of a pass.

    Attributes:
        graph: the changed one.
        notes: in one sentence each what it changed and assumed, with numbers.
        memory_bytes: by kind what is held at the peak of a step after the pass, less what is held at the peak before;
            None for a pass that leaves memory as it is.
    """

    graph: TaskGraph
    notes: tuple[str, ...] = ()
    memory_bytes: Mapping[str, float] | None = None


PassFunction = Callable[..., Outcome]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a pass: how it is written, its type (bool, int, float or str) and its default."""

    name: str
    type: type
    default: Any
    required: bool

    @property
    def keyword(self) -> str:
        """The function's argument: that of ``from``, a word of Python, is ``from_``."""
        name = self.name.replace("-", "_")
        return f"{name}_" if iskeyword(name) else name


@dataclass(frozen=True)
class WhatIf:
    """A registered pass. `function` takes the graph and the parameters by keyword."""

    name: str
    function: PassFunction
    parameters: tuple[Parameter, ...]

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def __call__(self, graph: TaskGraph, **parameters: Any) -> Outcome:
        return self.function(graph, **parameters)


_REGISTERED: dict[str, WhatIf] = {}


_P = TypeVar("_P", bound=Callable[..., Any])


def what_if(name: str) -> Callable[[_P], _P]:
    """Registers a pass under this name.

    It is a function ``f(graph, *, parameter: type = default, ...) -> Outcome``, or a frozen dataclass whose fields are
    the parameters and whose instances are called with the graph: for passes whose parts share many of them.
    """

    def register(definition: _P) -> _P:
        function = _of_class(definition) if inspect.isclass(definition) else definition
        _REGISTERED[name] = WhatIf(name, function, parameters_of(definition))
        return definition

    return register


def _of_class(definition: Callable[..., Any]) -> PassFunction:
    def function(graph: TaskGraph, **parameters: Any) -> Outcome:
        outcome: Outcome = definition(**parameters)(graph)
        return outcome

    function.__doc__ = definition.__doc__
    return function


def parameters_of(definition: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The keyword parameters of a pass: of a function those after the graph, of a dataclass its fields.

    Raises:
        TypeError: a parameter is annotated with something else than bool, int, float or str.
    """
    types = {"bool": bool, "int": int, "float": float, "str": str}
    parameters = []
    for parameter in list(inspect.signature(definition).parameters.values())[not inspect.isclass(definition) :]:
        annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
        if annotation not in types:
            raise TypeError(f"{definition.__name__}: {parameter.name} must be annotated as bool, int, float or str")
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        parameters.append(Parameter(parameter.name.rstrip("_").replace("_", "-"), types[annotation], default, required))
    return tuple(parameters)


@cache
def registered() -> dict[str, WhatIf]:
    """Every pass of this package by name, in alphabetical order."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(_REGISTERED.items()))
