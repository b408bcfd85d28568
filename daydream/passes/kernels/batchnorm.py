"""Restructured batch normalisation (Jung et al.; thesis 4.5.1 and algorithm 5)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Phase, TaskGraph
from daydream.graph.memory import Held, HeldMemory
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of
from daydream.passes.basis.checks import above_zero, one_of
from daydream.passes.basis.idioms import LayerRun, Role, backward_of, host_of, layer_runs, preceding, roles
from daydream.passes.basis.maps import absence, input_bytes, map_of, without
from daydream.trace.trace import NONE, Ints


@what_if("restructure-batchnorm")
def restructure_batchnorm(
    graph: TaskGraph,
    *,
    batchnorm_factor: float = 2.0,
    remove_relu: bool = True,
    only_adjacent: bool = True,
    host: str = "launch",
) -> Outcome:
    """Batch normalisation split and fused into the convolutions around it (4.5.1): half its time, no ReLU kernels.

    Batch-norm kernels run `batchnorm_factor` times as fast, since they load half as much, forward and backward.
    With `remove_relu` the kernels of affected ReLUs go, forward and backward, with their launches, and with
    ``host=operator`` also with the CPU time of their operators. Affected are the ReLUs whose input a batch norm
    wrote just before them (4.5.1); algorithm 5 as printed removes every ReLU, as does ``only_adjacent=no``: one
    behind a residual sum still has that sum to read. The backward kernel of a ReLU is found by its layer, or
    by its place in the reversed order. Kernels are told by name, operator or layer.

    What the affected ReLUs write is not held for the backward pass, whose convolutions make it anew from the input of
    the batch norm.

    Neither new copies nor the slower convolutions that absorb the work are modelled: in 4.6.4 the prediction of
    12.7 % met a measured 7 %.

    Raises:
        InputError: a factor not above 0, or `host` is neither launch nor operator.
    """
    above_zero("batchnorm-factor", batchnorm_factor)
    one_of("host", host, ("launch", "operator"))
    role = roles(graph)
    before = memory_of(graph)
    norms = np.flatnonzero(role == Role.BATCHNORM)
    gone = _affected(graph, role, only_adjacent) if remove_relu else np.empty(0, np.int64)
    if not len(norms):
        return Outcome(graph, ("no kernel of a batch normalisation: nothing changes",))
    edit = Edit(graph.scaled(norms, 1 / batchnorm_factor))
    edit.remove(gone, launches=True)
    if host == "operator":
        edit.remove(host_of(graph, gone))
    saved = graph.duration_us[norms].sum() * (1 - 1 / batchnorm_factor) / 1000
    total = int((role == Role.RELU).sum())
    notes = (
        f"{len(norms)} batch-norm kernels run {batchnorm_factor:g} times as fast: {saved:.3f} ms less",
        f"{len(gone)} of {total} ReLU kernels removed: {graph.duration_us[gone].sum() / 1000:.3f} ms less",
    )
    after = None if before is None else without(before, _fused_maps(graph, role, gone, before))
    changed, told, gain = changed_memory(edit.apply(), before, after)
    return Outcome(changed, (*notes, *told), gain)


def _fused_maps(graph: TaskGraph, role: Ints, gone: Ints, memory: HeldMemory) -> Iterator[Held]:
    """The maps that ReLUs make which are fused away: what reads their results makes them again."""
    removed = set(gone.tolist())
    forward = layer_runs(graph, role, Role.RELU, Phase.FORWARD)
    answers = backward_of(forward, layer_runs(graph, role, Role.RELU, Phase.BACKWARD))
    sizes = input_bytes(graph, forward, r"relu|threshold|clamp_min")
    for run, back, size in zip(forward, answers, sizes, strict=True):
        away = absence(graph, memory, size, run, back) if back is not None and run.first in removed else None
        made = map_of(memory, away, made=True) if away is not None else None
        if made is not None:
            yield made


def _affected(graph: TaskGraph, role: Ints, only_adjacent: bool) -> Ints:
    """Rows of the ReLU kernels that are fused away."""
    every = np.flatnonzero(role == Role.RELU)
    if not only_adjacent:
        return every
    before = preceding(graph)
    forward = layer_runs(graph, role, Role.RELU, Phase.FORWARD)
    backward = layer_runs(graph, role, Role.RELU, Phase.BACKWARD)
    answers = backward_of(forward, backward)
    rows: list[Ints] = []
    for run, answer in zip(forward, answers, strict=True):
        if _follows_norm(role, before, run):
            rows.append(run.rows)
            if answer is not None:
                rows.append(answer.rows)
    return np.sort(np.concatenate(rows)) if rows else np.empty(0, np.int64)


def _follows_norm(role: Ints, before: Ints, run: LayerRun) -> bool:
    return before[run.first] != NONE and role[before[run.first]] == Role.BATCHNORM
