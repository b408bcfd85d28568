"""MetaFlow: layers substituted by a policy (thesis 4.5.2 and algorithm 9)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import TaskGraph
from daydream.passes import Outcome, what_if
from daydream.passes.basis.checks import at_least, one_of, pattern
from daydream.passes.basis.idioms import host_of
from daydream.trace.trace import Ints
from hal.support.errors import InputError


class Rule(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One entry of a policy: either `remove`, or `scale` with `factor`; both are regular expressions for layers."""

    remove: str | None = None
    scale: str | None = None
    factor: float | None = None


@what_if("metaflow")
def metaflow(graph: TaskGraph, *, policy: str, host: str = "operator") -> Outcome:
    """Layers removed and scaled as a substitution policy says (algorithm 9), forward and backward.

    `policy` is a JSON file: a list of ``{"remove": "layer"}`` and ``{"scale": "layer", "factor": 0.5}``, the layers
    as regular expressions searched for regardless of case. Entries apply in order; a factor multiplies GPU time
    (an enlarged convolution has one above 1). Removing a layer takes its kernels, their launches and, with
    ``host=operator``, the CPU time of its operators; ``host=launch`` leaves that. Weight updates have no layer
    and stay as they are.

    Raises:
        InputError: the file can't be read, an entry is malformed, or its expression fits no layer with GPU tasks.
    """
    one_of("host", host, ("operator", "launch"))
    rules = read_policy(policy)
    factor = np.ones(len(graph))
    gone = np.zeros(len(graph), np.bool_)
    notes = []
    for number, rule in enumerate(rules):
        rows = _tasks_of(graph, rule.remove or rule.scale or "", f"{policy}: [{number}]")
        if rule.factor is None:
            gone[rows] = True
            notes.append(f"removed layers like {rule.remove!r}: {_amount(graph, rows)}")
        else:
            factor[rows] *= rule.factor
            notes.append(f"scaled layers like {rule.scale!r} by {rule.factor:g}: {_amount(graph, rows)}")
    edit = Edit(graph.with_durations(np.arange(len(graph)), graph.duration_us * factor))
    rows = np.flatnonzero(gone)
    edit.remove(rows, launches=True)
    if host == "operator":
        edit.remove(host_of(graph, rows))
    return Outcome(edit.apply(), tuple(notes))


def read_policy(path: str) -> list[Rule]:
    """The entries of a policy file.

    Raises:
        InputError: the file can't be read, is no JSON list of entries, or an entry says too little or too much.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError("policy", f"{path}: {error.strerror}", "give a JSON file") from None
    try:
        entries = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(path, f"is not JSON: {error}", "correct the file") from None
    if not isinstance(entries, list) or not entries:
        raise InputError(path, "is no list of entries", 'write [{"remove": "layer"}, ...]')
    return [_rule(entry, f"{path}: [{number}]") for number, entry in enumerate(entries)]


def _rule(entry: object, field: str) -> Rule:
    try:
        rule = msgspec.convert(entry, Rule)
    except msgspec.ValidationError as error:
        raise InputError(field, str(error), 'write {"remove": "layer"} or {"scale": "layer", "factor": 0.5}') from None
    if (rule.remove is None) == (rule.scale is None):
        raise InputError(field, "needs either remove or scale", 'write one of them, such as {"remove": "layer"}')
    if (rule.scale is None) != (rule.factor is None):
        raise InputError(f"{field}.factor", "goes with scale, and scale with it", "give both or neither")
    if rule.factor is not None:
        at_least(f"{field}.factor", rule.factor, 0.0)
    return rule


def _tasks_of(graph: TaskGraph, text: str, field: str) -> Ints:
    rows = graph.select(layer=pattern(field, text) or ".*", gpu=True)
    if not len(rows):
        examples = ", ".join([graph.layers[i] for i in np.unique(graph.layer[graph.on_gpu]) if i >= 0][:5])
        raise InputError(
            field, f"{text!r} fits no layer", f"choose among layers such as {examples or '(there are none)'}"
        )
    return rows


def _amount(graph: TaskGraph, rows: Ints) -> str:
    return f"{len(rows)} GPU tasks of {graph.duration_us[rows].sum() / 1000:.3f} ms"
