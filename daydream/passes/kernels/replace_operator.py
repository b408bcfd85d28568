"""Replace operators that run on the CPU by compiled ones (thesis 4.4.4, "replace", for the host's own work)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from daydream.graph.edit import Edit
from daydream.graph.graph import TaskGraph, TaskKind
from daydream.passes import Outcome, what_if
from daydream.swap.bundles import read_bundles
from daydream.swap.plan import Replacement, replacements
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
    plan, kept = replacements(graph, kernels, match)
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
    kept_us = sum(call.duration_us for call in kept)
    notes.append(f"{len(kept)} calls of {kept_us / 1e3:.2f} ms stay as they are")
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
    """What the recording measured of a custom operator's call, microseconds.

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
