"""Replace operators that run on the CPU by compiled ones (thesis 4.4.4, "replace", for the host's own work)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, TaskGraph, TaskKind
from daydream.passes import Outcome, what_if
from daydream.passes.kernels.bundled_operators import BundledOperator, Identity, identity, read_bundles
from daydream.passes.kernels.call_runs import CallRun, CallRuns
from daydream.passes.kernels.operator_calls import OperatorCall, operator_calls
from hal.support.errors import InputError


@what_if("replace-operator")
def replace_operator(graph: TaskGraph, *, bundle: str, match: str = "", call_us: float = -1.0) -> Outcome:
    """Compiled kernels in place of operators that PyTorch runs on the CPU, one kernel for each run of calls.

    A call counts as a whole: the outermost operator and all that it called, allocations and changes of layout too.
    Bundles are matched by what they compute, so that a convolution with its batch norm, residual and activation
    counts where a bundle has that convolution with these as its epilogue. The longest run that is compiled is
    taken; the time between its calls goes with it, the time behind it stays.

    Assumptions: calls that follow each other with fitting sizes use each other's results; a kernel takes as long as
    alone; every kernel costs one call of a custom operator on top.

    Args:
        graph: the baseline, built from a trace with recorded input sizes.
        bundle: a compiled operator's folder, or one of several. Measured times count where a manifest has them,
            predicted ones otherwise.
        match: regular expression over the bundles' names; empty is all.
        call_us: what calling a custom operator costs in microseconds; below 0 what the recording measured of it.

    Raises:
        InputError: there is no bundle, or none of them computes what was recorded, or nothing says what a call costs.
    """
    kernels = read_bundles(Path(bundle))
    plan, unreplaced = replacements(graph, kernels, match)
    if not plan:
        raise InputError("bundle", _nothing(graph), "`daydream operators TRACE` writes those to compile")
    cost = call_us if call_us >= 0 else recorded_call_us(graph)
    notes = [_summary(plan, cost)]
    by_name = Counter(replacement.kernel.name for replacement in plan)
    for name, count in by_name.items():
        named = [replacement for replacement in plan if replacement.kernel.name == name]
        before = sum(replacement.run.duration_us for replacement in named) / count
        kernel = named[0].kernel
        source = "profiled" if kernel.profiled else "predicted"
        notes.append(f"{name}: {count} x {before:.0f} µs take {kernel.seconds * 1e6:.0f} µs, {source}")
    unreplaced_us = sum(call.duration_us for call in unreplaced)
    notes.append(f"{len(unreplaced)} calls of {unreplaced_us / 1e3:.2f} ms stay as they are")
    return Outcome(replaced(graph, plan, cost), tuple(notes))


def replaced(graph: TaskGraph, plan: Sequence[Replacement], call_us: float) -> TaskGraph:
    """The graph with one task in place of every run of calls; each takes its kernel's time and `call_us` more."""
    edit = Edit(graph)
    for replacement in plan:
        first, last = replacement.run.calls[0], replacement.run.calls[-1]
        row = int(first.rows[0])
        for call in replacement.run.calls:
            edit.remove(call.rows)
        edit.add(
            replacement.kernel.name,
            TaskKind.CPU,
            replacement.kernel.seconds * 1e6 + call_us,
            after=int(last.rows[-1]),
            gap_us=last.tail_us,
            phase=int(graph.phase[row]),
            layer=int(graph.layer[row]),
            step=int(graph.step[row]),
            operator=first.event,
        )
    return edit.apply()


def recorded_call_us(graph: TaskGraph) -> float:
    """Recorded time of a custom operator's call, microseconds.

    Raises:
        InputError: it measured nothing.
    """
    value = graph.trace.metadata.get("custom_call_us") if graph.trace is not None else None
    if not isinstance(value, int | float) or not value >= 0:
        problem = "is unknown: the trace does not say what calling a custom operator costs"
        raise InputError("call-us", problem, "give it, or record with `daydream record --timed 10`")
    return float(value)


def _nothing(graph: TaskGraph) -> str:
    if graph.trace is None or not any("Input Dims" in arguments for arguments in graph.trace.arguments):
        return "cannot be matched: the trace has no input sizes"
    return "computes nothing that the trace's CPU operators compute"


def _summary(plan: Sequence[Replacement], call_us: float) -> str:
    before = sum(replacement.run.duration_us for replacement in plan)
    after = sum(replacement.kernel.seconds for replacement in plan) * 1e6
    calls = sum(len(replacement.run.calls) for replacement in plan)
    return (
        f"{calls} calls of {before / 1e3:.2f} ms become {len(plan)} kernels of {after / 1e3:.2f} ms, "
        f"and {len(plan) * call_us / 1e3:.2f} ms of calling them, {call_us:.1f} µs each"
    )


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
        kernels: what :func:`daydream.passes.kernels.bundled_operators.read_bundles` found.
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
