"""Task-to-layer mapping without synchronisation (thesis 4.4.3), and the phases of an iteration (4.2).

The thesis instruments frameworks for time stamps of layers. PyTorch's traces hold as much: module annotations where
they were recorded, elsewhere the operators themselves, and autograd's sequence numbers and arrows, which name the
forward operator of every backward one. Launches tie kernels to all that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from daydream.graph.graph import Phase
from daydream.trace.nesting import CPU_CATEGORIES, innermost_of
from daydream.trace.trace import NONE, Category, Flags, Ints, Trace, argument

_MODULE = re.compile(r"^nn\.Module: (.+)$")
_UPDATE = re.compile(r"^Optimizer\.step#|^## optimizer|^(torch\.)?optim.*\bstep$|^Optimizer\.step$", re.IGNORECASE)
_ZERO_GRAD = re.compile(r"^Optimizer\.zero_grad#|zero_grad$")
_LOADING = re.compile(r"enumerate\(DataLoader\)")
_BACKWARD = re.compile(
    r"^autograd::engine::evaluate_function|Backward\d*$|^torch::autograd::(AccumulateGrad|CopyBackwards)"
)
_OPERATOR = re.compile(r"^(?!autograd::|torch::autograd)\w[\w.]*::(\w+)$")


@dataclass(frozen=True)
class LayerMap:
    """For each row of the trace its layer (index into `names`, -1 without) and phase; for CPU rows only."""

    names: tuple[str, ...]
    layer: Ints
    phase: Ints


def assign_layers(trace: Trace, enclosing: Ints) -> LayerMap:
    """Layers and phases of all CPU events.

    A layer is the innermost module around an event ("layer1.0.conv1", or what the profiler calls it). Without
    modules it is the outermost operator ("conv2d_12": kind, and number among its kind in the step). What runs in
    backward belongs to the layer of the forward operator with its sequence number; a gradient's accumulation, which
    has none, to that of the backward operator before it.
    """
    phase = _phases(trace, enclosing)
    names, layer = _forward_layers(trace, enclosing, phase)
    _backward_layers(trace, enclosing, phase, layer)
    return LayerMap(names, layer, phase)


def _named(trace: Trace, pattern: re.Pattern[str]) -> Flags:
    return np.array([pattern.search(name) is not None for name in trace.names], np.bool_)[trace.name]


def _phases(trace: Trace, enclosing: Ints) -> Ints:
    """UPDATE inside an optimizer's step; BACKWARD inside autograd's functions and all over a thread that runs only
    for them; FORWARD from the first to the last other operator with a sequence number in a step."""
    host = np.isin(trace.category, (Category.OPERATOR, Category.ANNOTATION))
    operator = trace.category == Category.OPERATOR
    update = innermost_of(enclosing, host & _named(trace, _UPDATE)) != NONE
    outside = innermost_of(enclosing, host & (_named(trace, _ZERO_GRAD) | _named(trace, _LOADING))) != NONE
    backward_rows = operator & _named(trace, _BACKWARD)
    backward = innermost_of(enclosing, backward_rows) != NONE
    steps = _steps(trace)
    threads = len(trace.threads)
    autograd = np.bincount(trace.thread[backward_rows], minlength=threads) > 0
    autograd[trace.thread[np.flatnonzero(steps)]] = False
    # A thread on which a forward operator started is no autograd worker: on the CPU both run on one thread.
    first = operator & (enclosing == NONE) & ~backward & (trace.sequence >= 0) & (trace.forward_thread <= 0)
    autograd &= np.bincount(trace.thread[first & ~backward_rows], minlength=threads) <= np.bincount(
        trace.thread[backward_rows], minlength=threads
    )
    backward |= autograd[trace.thread]
    phase = np.full(len(trace), Phase.NONE)
    differentiable = operator & (trace.sequence >= 0) & ~backward & ~update & ~outside
    for begin, end, thread in _spans(trace, steps):
        inside = (trace.start_us >= begin) & (trace.start_us < end)
        if thread != NONE:
            inside &= trace.thread == thread
        marked = np.flatnonzero(inside & differentiable)
        if len(marked):
            last = (trace.start_us + trace.duration_us)[marked].max()
            span = inside & (trace.start_us >= trace.start_us[marked[0]]) & (trace.start_us < last)
            phase[span] = Phase.FORWARD
    phase[outside] = Phase.NONE
    phase[backward] = Phase.BACKWARD
    phase[update] = Phase.UPDATE
    phase[~np.isin(trace.category, CPU_CATEGORIES)] = Phase.NONE
    return phase


def _steps(trace: Trace) -> Flags:
    return np.array([name.startswith("ProfilerStep#") for name in trace.names], np.bool_)[trace.name] & (
        trace.category == Category.ANNOTATION
    )


def _spans(trace: Trace, steps: Flags) -> list[tuple[float, float, int]]:
    """Begin, end and thread of every step; everything on all threads where the trace has none."""
    if not steps.any():
        return [(-np.inf, np.inf, NONE)]
    rows = np.flatnonzero(steps)
    return [(trace.start_us[r], trace.start_us[r] + trace.duration_us[r], int(trace.thread[r])) for r in rows]


def _forward_layers(trace: Trace, enclosing: Ints, phase: Ints) -> tuple[tuple[str, ...], Ints]:
    names: dict[str, int] = {}
    named = np.full(len(trace), NONE)
    _name_modules(trace, named, names)
    modules = named != NONE
    of_module = innermost_of(enclosing, modules)
    operator = trace.category == Category.OPERATOR
    is_forward = operator & _named(trace, _OPERATOR) & (phase == Phase.FORWARD)
    above = innermost_of(enclosing, is_forward)
    outer = is_forward & (np.where(enclosing == NONE, NONE, above[enclosing]) == NONE)
    _number_operators(trace, np.flatnonzero(outer & (of_module == NONE)), named, names)
    chosen = np.where(of_module != NONE, of_module, innermost_of(enclosing, outer))
    return tuple(names), np.where(chosen == NONE, NONE, named[chosen])


def _name_modules(trace: Trace, named: Ints, names: dict[str, int]) -> None:
    """Gives module events, and operators with a module hierarchy, their layer."""
    texts = [_MODULE.match(name) for name in trace.names]
    is_module = np.array([match is not None for match in texts], np.bool_)
    for row in np.flatnonzero(is_module[trace.name]):
        match = texts[trace.name[row]]
        assert match is not None
        named[row] = names.setdefault(match[1], len(names))
    for row in np.flatnonzero(trace.category == Category.OPERATOR):
        hierarchy = argument(trace.arguments[row], "Module Hierarchy")
        if isinstance(hierarchy, str) and hierarchy:
            path = [re.sub(r"\(.*?\)|::.*", "", part) for part in re.split(r"\.(?![^(]*\))", hierarchy)]
            path = [part for part in path if part and part != "TOP"]
            if path:
                named[row] = names.setdefault(".".join(path), len(names))


def _number_operators(trace: Trace, rows: Ints, named: Ints, names: dict[str, int]) -> None:
    """Names outermost operators by kind and number among their kind; numbers restart with every step."""
    steps = np.flatnonzero(_steps(trace))
    step = np.searchsorted(trace.start_us[steps], trace.start_us[rows], side="right")
    kinds = [_OPERATOR.match(name) for name in trace.names]
    seen: dict[tuple[int, str], int] = {}
    for row, number in zip(rows.tolist(), step.tolist(), strict=True):
        match = kinds[trace.name[row]]
        assert match is not None
        kind = match[1].strip("_")
        count = seen.get((number, kind), 0)
        seen[number, kind] = count + 1
        named[row] = names.setdefault(f"{kind}_{count}", len(names))


def _backward_layers(trace: Trace, enclosing: Ints, phase: Ints, layer: Ints) -> None:
    """Fills in the layers of backward events from the forward operators they belong to."""
    operator = trace.category == Category.OPERATOR
    forward = np.flatnonzero(operator & (phase != Phase.BACKWARD) & (trace.sequence >= 0) & (layer != NONE))
    forward = forward[np.lexsort((trace.start_us[forward], trace.sequence[forward]))]
    backward = np.flatnonzero((phase == Phase.BACKWARD) & operator)
    named = np.full(len(trace), NONE)
    if len(forward):
        # Operators that make no node carry the next number too; the last to start with a number made it.
        width = float(trace.start_us.max() + 1.0)
        keys = trace.sequence[forward] * width + trace.start_us[forward]
        wanted = trace.sequence[backward]
        position = np.searchsorted(keys, wanted * width + trace.start_us[backward], side="right") - 1
        fits = (position >= 0) & (wanted >= 0) & (trace.sequence[forward[np.maximum(position, 0)]] == wanted)
        named[backward[fits]] = layer[forward[position[fits]]]
    arrows = trace.forward_backward
    linked = arrows[(layer[arrows[:, 0]] != NONE) & (phase[arrows[:, 1]] == Phase.BACKWARD)]
    named[linked[:, 1]] = layer[linked[:, 0]]
    chosen = innermost_of(enclosing, named != NONE)
    inside = np.flatnonzero(phase == Phase.BACKWARD)
    layer[inside] = np.where(chosen[inside] == NONE, NONE, named[chosen[inside]])
    _carry_on(trace, inside, layer)


def _carry_on(trace: Trace, rows: Ints, layer: Ints) -> None:
    """Gives backward events without a layer that of the one before them on their thread."""
    rows = rows[np.lexsort((rows, trace.thread[rows]))]
    position = np.where(layer[rows] != NONE, np.arange(len(rows)), -1)
    last = np.maximum.accumulate(position)
    same = (last >= 0) & (trace.thread[rows[np.maximum(last, 0)]] == trace.thread[rows])
    layer[rows[same]] = layer[rows[last[same]]]
