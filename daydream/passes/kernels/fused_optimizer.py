"""A fused optimizer such as FusedAdam (thesis 4.5.1 and algorithm 4)."""

from __future__ import annotations

import re

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.graph.memory import HeldMemory, MemoryKind
from daydream.operators.pricing import describe_calls, device_of
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of, states_per_weight
from daydream.passes.basis.checks import at_least, one_of
from daydream.passes.basis.gradients import find_gradients
from daydream.passes.basis.idioms import idle_hosts, is_elementwise, is_fused_optimizer, named, renamed
from daydream.passes.basis.maps import without
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError

#: Tensors of a parameter's size that the fused kernel moves, over those that separate kernels do.
#:
#: Adam: reads w, g, m, v and writes w, m, v (7). Separately: g += wd*w 3, m *= b1 2, m += g 3, v *= b2 2, v += g*g 3,
#: sqrt 2, divide 2, + eps 2, w += m/d 4 (23); AdamW decays w in place, 2 instead of 3. SGD with momentum and weight
#: decay: 5 instead of g += wd*w 3, m *= mu 2, m += g 3, w += lr*m 3 (11).
_TRAFFIC = {"adam": 7 / 23, "adamw": 7 / 22, "sgd": 5 / 11}


@what_if("fused-optimizer")
def fused_optimizer(
    graph: TaskGraph,
    *,
    kernels: int = 1,
    duration: str = "sum",
    traffic_ratio: float = 0.0,
    host_us: float = 200.0,
) -> Outcome:
    """All kernels of a step's weight update become one (4.5.1), their launches and operators gone.

    With ``duration=sum`` the fused kernel takes as long as those it replaces together (algorithm 4): right about
    launches, pessimistic about the kernel, since separate kernels move the same tensors again and again. With
    ``duration=traffic`` element-wise kernels shrink to `traffic_ratio` of their time, the share of the bytes that
    remains when weights, gradients and state are read and written once. 0 takes the ratio from the recorded sizes of
    the update's operators, without them from the optimizer named in the trace (Adam 7/23, AdamW 7/22, SGD with momentum
    and weight decay 5/11; 5/11 otherwise). Kernels that are fused already keep their time. The work is split evenly
    over `kernels` kernels a step.

    Temporary tensors of the update, which separate kernels hand to each other, are not held any more.

    `host_us` of host time a step stays: collecting parameters, gradients and state, about 1 µs for each of some
    200 tensors. Copies and collectives of the phase stay, as do CPU tasks that launch or wait for them.

    Raises:
        InputError: a number out of range, or an unknown `duration`.
    """
    at_least("kernels", kernels, 1)
    one_of("duration", duration, ("sum", "traffic"))
    at_least("traffic-ratio", traffic_ratio, 0.0)
    at_least("host-us", host_us, 0.0)
    rows = graph.select(kind=(TaskKind.KERNEL, TaskKind.MEMSET), gpu=True, phase=Phase.UPDATE)
    if not len(rows):
        return Outcome(graph, ("no kernel belongs to a weight update: nothing is fused",))
    ratio = traffic_ratio or _recorded_ratio(graph, rows) or _ratio_of(graph)
    work = graph.duration_us.copy()
    if duration == "traffic":
        moves = named(graph, is_elementwise) & ~named(graph, is_fused_optimizer)
        work[moves] *= ratio
    kept = [np.sort(rows[graph.step[rows] == step])[:kernels] for step in np.unique(graph.step[rows])]
    remain = np.concatenate(kept)
    edit = Edit(renamed(graph, remain, "fused optimizer"))
    for of_group in kept:
        total = work[rows[graph.step[rows] == graph.step[of_group[0]]]].sum()
        edit.set("duration_us", of_group, total / len(of_group))
    edit.set("kind", remain, TaskKind.KERNEL)
    edit.remove(np.setdiff1d(rows, remain))
    idle = idle_hosts(graph, np.setdiff1d(rows, remain))
    edit.remove(idle)
    _drop_launches(edit, np.setdiff1d(rows, remain))
    for first in (step_rows[0] for step_rows in kept):
        _leave_host_time(edit, int(first), host_us)
    before, after = graph.duration_us[rows].sum(), work[rows].sum()
    steps = len(kept)
    notes = [
        f"{len(rows)} kernels of the weight update in {steps} steps became {len(remain)}; "
        f"their GPU time went from {before / steps / 1000:.3f} to {after / steps / 1000:.3f} ms a step",
        f"{len(idle)} CPU tasks of the update are gone; {host_us:g} µs of host time a step stay",
    ]
    already = int(named(graph, is_fused_optimizer)[rows].sum())
    if already:
        notes.append(f"{already} of the kernels belong to a fused optimizer already and keep their time")
    if duration == "traffic" and already < len(rows):
        notes.append(f"element-wise kernels move {ratio:.2f} of their bytes")
    before_bytes = memory_of(graph)
    after_bytes = None if before_bytes is None else _without_temporaries(before_bytes)
    changed, told, gain = changed_memory(edit.apply(), before_bytes, after_bytes)
    return Outcome(changed, (*notes, *told), gain)


def _without_temporaries(memory: HeldMemory) -> HeldMemory:
    """The step's memory without what separate kernels of the update hand to each other."""
    update = set(memory.moments(Phase.UPDATE).tolist())
    return without(memory, [each for each in memory.held if each.kind is MemoryKind.TEMPORARY and each.born in update])


def _drop_launches(edit: Edit, gone: Ints) -> None:
    graph = edit.graph
    edit.drop_edges(np.flatnonzero((graph.edge_kind == Dependency.LAUNCH) & np.isin(graph.edge_target, gone)))


def _leave_host_time(edit: Edit, first: int, host_us: float) -> None:
    call = int(edit.graph.launch[first])
    if host_us and call != NONE:
        edit.add("fused optimizer (host)", TaskKind.CPU, host_us, before=call, phase=Phase.UPDATE)


def _recorded_ratio(graph: TaskGraph, rows: Ints) -> float:
    """Bytes that a fused kernel moves over those that the operators of these tasks do; 0 where sizes are unknown.

    It reads and writes weights and states, and reads gradients.
    """
    moves = rows[(named(graph, is_elementwise) & ~named(graph, is_fused_optimizer))[rows]]
    try:
        gradients, (device, _) = find_gradients(graph), device_of(graph)
    except InputError:
        return 0.0
    calls = describe_calls(graph, moves[graph.step[moves] == gradients.largest_step], device).calls
    works = [call.work for call in calls]
    moved = sum(work.bytes for work in works if work is not None)
    if not moved or None in works:
        return 0.0
    least = (3 + 2 * states_per_weight(graph)) * gradients.bytes_of(gradients.largest_step)
    return min(least / moved, 1.0)


def _ratio_of(graph: TaskGraph) -> float:
    texts = graph.trace.names if graph.trace is not None else graph.names
    match = next((hit for hit in (re.match(r"Optimizer\.step#(\w+)\.step", text) for text in texts) if hit), None)
    return _TRAFFIC.get(match[1].lower(), _TRAFFIC["sgd"]) if match else _TRAFFIC["sgd"]
