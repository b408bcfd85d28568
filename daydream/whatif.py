"""What-if passes as the command line writes them: ``amp``, ``ddp:workers=8,overlap=no``, ``my.py:halve:factor=2``."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hal.support.errors import InputError, listed

if TYPE_CHECKING:
    from daydream.graph.graph import TaskGraph
    from daydream.passes import Outcome, Parameter, WhatIf

_OPTION = "--pass"

_KINDS = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """A pass that the user asked for.

    Attributes:
        text: as the user wrote it.
        name: the pass.
        function: what it does to a graph.
        parameters: what the user set, by the function's keyword.
        defaults: defaults of all parameters, in the function's order.
        source: file of a pass of the user's own, None for a registered one.
    """

    text: str
    name: str
    function: Callable[..., Any]
    parameters: dict[str, Any]
    defaults: dict[str, Any]
    source: Path | None = None


@dataclass(frozen=True)
class AppliedPass:
    """A pass that was applied: its name, every parameter with its value, and what it says it did.

    `memory_bytes` is what the peak of a step gains by kind, None where the pass leaves memory as it is.
    """

    name: str
    parameters: dict[str, Any]
    notes: tuple[str, ...]
    memory_bytes: Mapping[str, float] | None = None

    @property
    def settings(self) -> str:
        """`` (workers=8, bandwidth=12.5)``; empty without parameters."""
        inside = ", ".join(f"{name.replace('_', '-')}={written(value)}" for name, value in self.parameters.items())
        return f" ({inside})" if inside else ""


def written(value: Any) -> str:
    """A value as the command line takes it.

    >>> written(True), written(0.5), written("sum")
    ('yes', '0.5', 'sum')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_pass(text: str) -> PassRequest:
    """Reads one ``--pass``.

    ``NAME[:KEY=VALUE,...]`` names a registered pass, ``FILE.py[:FUNCTION][:KEY=VALUE,...]`` a function
    ``f(graph, *, key: type = default, ...)`` of the user's. A part without ``=`` continues the value before it, so
    values may hold commas. Keys may be written with ``-`` or ``_``.

    Raises:
        InputError: an unknown pass, function or key, a value of another type, a parameter missing, or a file that
            cannot be read or run.
    """
    file = re.match(r"(.+?\.py)(?=:|$)", text)
    if file:
        behind_file = file.string[file.end() + 1 :]
        head, _, tail = behind_file.partition(":")
        function, options = ("", behind_file) if "=" in head else (head, tail)
        return _pass_of_file(text, Path(file[1]), function, options)
    name, _, options = text.partition(":")
    what_if = find_pass(_OPTION, name)
    parameters, defaults = _values(f"{_OPTION} {name}", options, what_if.parameters)
    return PassRequest(text=text, name=name, function=what_if.function, parameters=parameters, defaults=defaults)


def find_pass(field: str, name: str) -> WhatIf:
    """The registered pass of this name.

    Raises:
        InputError: there is none; names similar ones.
    """
    from daydream.passes import registered

    passes = registered()
    if name not in passes:
        close = difflib.get_close_matches(name, passes, n=3, cutoff=0.5)
        near = f"did you mean {listed(close)}? " if close else ""
        raise InputError(field, f"no pass is called {name!r}", f"{near}`daydream passes` lists all")
    return passes[name]


def describe(what_if: WhatIf) -> dict[str, Any]:
    """A registered pass as JSON."""
    parameters = [
        {"name": p.name, "type": p.type.__name__, "default": p.default, "required": p.required}
        for p in what_if.parameters
    ]
    return {"name": what_if.name, "summary": what_if.summary, "parameters": parameters}


def parameter_text(parameter: Parameter) -> str:
    """``workers=8``; without default what kind of value it takes."""
    return f"{parameter.name}={_KINDS[parameter.type].upper() if parameter.required else written(parameter.default)}"


def _values(where: str, options: str, allowed: Sequence[Parameter]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters set, and the defaults of all."""
    by_name = {parameter.name: parameter for parameter in allowed}
    values: dict[str, Any] = {}
    for key, value in _pairs(where, options):
        parameter = by_name.get(key.strip().replace("_", "-"))
        if parameter is None:
            keys = f"its keys are {listed(list(by_name))}" if by_name else "it takes none"
            raise InputError(where, f"there is no key {key!r}", keys)
        values[parameter.keyword] = _value(where, parameter, value)
    for parameter in allowed:
        if parameter.required and parameter.keyword not in values:
            raise InputError(
                where, f"needs {parameter.name}", f"write {where.removeprefix(_OPTION).strip()}:{parameter.name}=..."
            )
    return values, {parameter.keyword: parameter.default for parameter in allowed}


def _pairs(where: str, options: str) -> list[tuple[str, str]]:
    """Keys and values as written; a part without ``=`` continues the value before it."""
    pairs: list[tuple[str, str]] = []
    for part in options.split(",") if options else []:
        key, equals, value = part.partition("=")
        if equals and (not pairs or re.fullmatch(r"\s*[A-Za-z][\w-]*\s*", key)):
            pairs.append((key, value))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part}")
        else:
            raise InputError(where, f"{part!r} sets nothing", "write key=value,key=value")
    return pairs


def _value(where: str, parameter: Parameter, text: str) -> Any:
    text = text.strip() if parameter.type is not str else text
    try:
        if parameter.type is bool:
            if text.lower() not in _YES + _NO:
                raise ValueError
            return text.lower() in _YES
        value = parameter.type(text)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError
    except ValueError:
        raise InputError(
            f"{where}: {parameter.name}", f"{text!r} is not {_KINDS[parameter.type]}", _example(parameter)
        ) from None
    return value


def _example(parameter: Parameter) -> str:
    if parameter.type is bool:
        return f"write {parameter.name}=yes or {parameter.name}=no"
    usual = {int: 4, float: 1.5, str: "x"}[parameter.type] if parameter.required else parameter.default
    return f"write {parameter.name}={written(usual)}"


# Passes of the user's own


def _pass_of_file(text: str, path: Path, wanted: str, options: str) -> PassRequest:
    """The pass that a user's file defines: the function called `wanted`, or its only one where that is empty."""
    from daydream.passes import parameters_of

    candidates = _functions(path)
    if not candidates:
        raise InputError(str(path), "has no function whose first parameter is called graph", "write def f(graph): ...")
    if not wanted and len(candidates) > 1:
        raise InputError(str(path), f"has several passes: {listed(list(candidates))}", f"write {path}:NAME")
    name = wanted or next(iter(candidates))
    if name not in candidates:
        raise InputError(str(path), f"has no pass {name!r}", f"it has {listed(list(candidates))}")
    try:
        parameters = parameters_of(candidates[name])
    except TypeError as error:
        raise InputError(f"{path}:{candidates[name].__code__.co_firstlineno}", str(error)) from None
    values, defaults = _values(f"{_OPTION} {path}:{name}", options, parameters)
    return PassRequest(
        text=text, name=name, function=candidates[name], parameters=values, defaults=defaults, source=path
    )


def _functions(path: Path) -> dict[str, Any]:
    """Functions defined in a file whose first parameter is the graph."""
    module = module_of_file(path, "daydream_pass")
    functions = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__code__.co_filename == str(path) and not name.startswith("_"):
            first = next(iter(inspect.signature(value).parameters), "")
            if first == "graph":
                functions[name] = value
    return functions


def module_of_file(path: Path, prefix: str) -> ModuleType:
    """A user's Python file, run; the module is known as ``PREFIX_STEM``.

    Raises:
        InputError: it cannot be read, or its code fails; names the line.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read", "give a Python file") from None
    # Dataclasses look their module up by name.
    module = sys.modules[f"{prefix}_{path.stem}"] = ModuleType(f"{prefix}_{path.stem}")
    module.__file__ = str(path)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise failure_in_file(error, path) from None
    finally:
        sys.path.pop(0)
    return module


def failure_in_file(error: BaseException, path: Path) -> InputError:
    """Their exception as one line with the place in their file."""
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            line = frame.lineno
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return InputError(f"{path}:{line or 1}", f"{type(error).__name__}" + (f": {message}" if message else ""))


# Applying them


def apply_passes(graph: TaskGraph, requests: Sequence[PassRequest]) -> tuple[TaskGraph, list[AppliedPass]]:
    """Applies passes one after another, each to what the one before it made.

    Raises:
        InputError: a pass refuses its parameters or this graph, or fails; what it returns is no usable graph.
    """
    applied = []
    for request in requests:
        outcome = _apply_by_rank(graph, request) if graph.ranks else _apply(graph, request)
        graph, notes = outcome.graph, tuple(str(note) for note in outcome.notes)
        values = {key.rstrip("_"): value for key, value in {**request.defaults, **request.parameters}.items()}
        applied.append(AppliedPass(request.name, values, notes, outcome.memory_bytes))
    return graph, applied


def _apply_by_rank(graph: TaskGraph, request: PassRequest) -> Outcome:
    """A pass knows one process: every rank's part is changed by itself, and the ranks meet again."""
    from daydream.graph.ranks import joined, parted

    outcomes = [_apply(part, request) for part in parted(graph)]
    notes = (*outcomes[0].notes, f"on each of {len(outcomes)} ranks; the notes above are of rank {graph.ranks[0]}")
    return replace(outcomes[0], graph=joined([each.graph for each in outcomes], graph.ranks), notes=notes)


def _apply(graph: TaskGraph, request: PassRequest) -> Outcome:
    from daydream.graph.graph import TaskGraph
    from daydream.passes import Outcome

    where = f"{_OPTION} {request.name}" if request.source is None else f"{request.source}: {request.name}"
    try:
        # Standard output is for our JSON.
        with redirect_stdout(sys.stderr):
            result = request.function(graph, **request.parameters)
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.problem, error.remedy) from None
    except (Exception, SystemExit) as error:
        if request.source is None:
            raise
        raise failure_in_file(error, request.source) from None
    outcome = Outcome(result) if isinstance(result, TaskGraph) else result
    if not isinstance(outcome, Outcome) or not isinstance(outcome.graph, TaskGraph):
        raise InputError(
            where, f"returned {type(result).__name__}", "return the changed graph, or an Outcome with notes"
        )
    _check(where, outcome.graph)
    if len(outcome.graph.steps) != len(graph.steps):
        count = len(outcome.graph.steps)
        raise InputError(where, f"made {count} steps of {len(graph.steps)}", "keep the steps as they are")
    return outcome


def _check(where: str, graph: TaskGraph) -> None:
    """Check of options that would otherwise end in a wrong answer, or deep inside the simulation."""
    import numpy as np

    for name in ("duration_us", "gap_us"):
        column = getattr(graph, name)
        if column.shape != (len(graph),):
            raise InputError(where, f"{name} has shape {column.shape}, the graph {len(graph)} tasks", "use Edit")
        wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
        if len(wrong):
            task = graph.text(int(wrong[0]))
            raise InputError(
                where, f"{name} of {task!r} became {column[wrong[0]]:g}", "give finite microseconds, 0 or more"
            )
    ends = (graph.edge_source, graph.edge_target)
    if any(len(rows) and not (rows.min() >= 0 and rows.max() < len(graph)) for rows in ends):
        raise InputError(where, "an edge leads to a task that does not exist", "change edges with Edit")
