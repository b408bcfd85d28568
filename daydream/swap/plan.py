"""Which compiled operators take the place of which recorded calls: one plan, for the simulation and for the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, TaskGraph
from daydream.swap.bundles import CompiledOperator, Identity, identity
from daydream.swap.calls import OperatorCall, operator_calls
from daydream.swap.chains import Chain, Chains
from hal.support.errors import InputError


@dataclass(frozen=True)
class Replacement:
    """A chain of recorded calls and the compiled operator that takes its place."""

    chain: Chain
    kernel: CompiledOperator


def replacements(
    graph: TaskGraph, kernels: Mapping[Identity, CompiledOperator], match: str = ""
) -> tuple[list[Replacement], list[OperatorCall]]:
    """What can be replaced, and the calls that stay; of several chains from a call the longest that is compiled.

    Args:
        graph: of a trace with recorded input sizes.
        kernels: what :func:`daydream.swap.bundles.read_bundles` found.
        match: regular expression over the bundles' names; empty is all.

    Raises:
        InputError: `match` is no regular expression.
    """
    chosen = {key: kernel for key, kernel in kernels.items() if _pattern(match).search(kernel.name)}
    calls = _on_cpu(graph)
    chains = Chains(graph, calls)
    found, kept, position = [], [], 0
    while position < len(calls):
        pairs = ((chain, chosen.get(identity(chain.expression))) for chain in chains.at(position))
        one = next((Replacement(chain, kernel) for chain, kernel in pairs if kernel is not None), None)
        if one is None:
            kept.append(calls[position])
        else:
            found.append(one)
        position += len(one.chain.calls) if one is not None else 1
    return found, kept


def replaceable(graph: TaskGraph, *, fuse: bool = True) -> list[dict[str, Any]]:
    """The distinct operators that would replace the most of a trace, as for op.json, in order of appearance.

    Without `fuse` every call is an operator of its own.
    """
    calls = _on_cpu(graph)
    chains = Chains(graph, calls)
    found: dict[Identity, dict[str, Any]] = {}
    position = 0
    while position < len(calls):
        at = chains.at(position)
        if at:
            chain = at[0] if fuse else at[-1]
            found.setdefault(identity(chain.expression), chain.data)
        position += len(at[0].calls) if at and fuse else 1
    return list(found.values())


def _on_cpu(graph: TaskGraph) -> list[OperatorCall]:
    """Calls that launch nothing: what they do, they do on the CPU."""
    launches = graph.edge_source[graph.edge_kind == Dependency.LAUNCH]
    return [call for call in operator_calls(graph) if not np.isin(call.rows, launches).any()]


def _pattern(match: str) -> re.Pattern[str]:
    try:
        return re.compile(match)
    except re.error as error:
        raise InputError("match", f"is no regular expression: {error}", "correct it") from None
