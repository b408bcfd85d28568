"""Which compiled operators take the place of which recorded calls: one plan, for the simulation and for the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, TaskGraph
from daydream.swap.bundles import BundledOperator, Identity, identity
from daydream.swap.calls import OperatorCall, operator_calls
from daydream.swap.runs import CallRun, CallRuns
from hal.support.errors import InputError


@dataclass(frozen=True)
class Replacement:
    """A run of recorded calls and the compiled operator that takes its place."""

    run: CallRun
    kernel: BundledOperator


def replacements(
    graph: TaskGraph, kernels: Mapping[Identity, BundledOperator], match: str = ""
) -> tuple[list[Replacement], list[OperatorCall]]:
    """Replaceable calls, and the calls that stay; of several runs from a call the longest that is compiled.

    Args:
        graph: of a trace with recorded input sizes.
        kernels: what :func:`daydream.swap.bundles.read_bundles` found.
        match: regular expression over the bundles' names; empty is all.

    Raises:
        InputError: `match` is no regular expression.
    """
    chosen = {key: kernel for key, kernel in kernels.items() if _pattern(match).search(kernel.name)}
    calls = _on_cpu(graph)
    runs = CallRuns(graph, calls)
    replaced: list[Replacement] = []
    unreplaced: list[OperatorCall] = []
    position = 0
    while position < len(calls):
        pairs = ((run, chosen.get(identity(run.expression))) for run in runs.at(position))
        replacement = next((Replacement(run, kernel) for run, kernel in pairs if kernel is not None), None)
        if replacement is None:
            unreplaced.append(calls[position])
            position += 1
        else:
            replaced.append(replacement)
            position += len(replacement.run.calls)
    return replaced, unreplaced


def replaceable(graph: TaskGraph, *, fuse: bool = True) -> list[dict[str, Any]]:
    """The distinct operators that would replace the most of a trace, as for op.json, in order of appearance.

    Without `fuse` every call is an operator of its own.
    """
    calls = _on_cpu(graph)
    runs = CallRuns(graph, calls)
    operators: dict[Identity, dict[str, Any]] = {}
    position = 0
    while position < len(calls):
        candidates = runs.at(position)
        if candidates:
            run = candidates[0] if fuse else candidates[-1]
            operators.setdefault(identity(run.expression), run.data)
        position += len(candidates[0].calls) if candidates and fuse else 1
    return list(operators.values())


def _on_cpu(graph: TaskGraph) -> list[OperatorCall]:
    """Calls that launch nothing: what they do, they do on the CPU."""
    launches = graph.edge_source[graph.edge_kind == Dependency.LAUNCH]
    return [call for call in operator_calls(graph) if not np.isin(call.rows, launches).any()]


def _pattern(match: str) -> re.Pattern[str]:
    try:
        return re.compile(match)
    except re.error as error:
        raise InputError("match", f"is no regular expression: {error}", "correct it") from None
