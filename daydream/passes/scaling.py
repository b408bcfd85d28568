"""Scale and remove from the command line (thesis 4.4.4), a faster network (figure 4.2) and a faster GPU."""

from __future__ import annotations

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import TaskGraph, TaskKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.checks import above_zero, at_least, chosen, one_of, pattern
from daydream.passes.basis.idioms import host_of, is_compute_bound, is_within_device, named
from daydream.trace.collectives import is_collective_name
from daydream.trace.trace import Floats, Ints
from hal.support.errors import InputError


@what_if("bandwidth")
def bandwidth(graph: TaskGraph, *, factor: float = 2.0, kind: str = "communication", match: str = "") -> Outcome:
    """A network or bus of `factor` times the bandwidth (figure 4.2): transfers take 1/factor of their time.

    `kind` is "communication" (tasks of channels and NCCL kernels on streams), "memcpy" (copies to and from the
    host or another device) or "all"; `match` a regular expression for names. Latency is taken to shrink too, as in
    the figure. The duration of a recorded NCCL kernel includes waiting for slower ranks, which a faster network does
    not shorten: the gain is an upper bound.

    Raises:
        InputError: factor not above 0, an unknown kind, or `match` is no regular expression.
    """
    above_zero("factor", factor)
    one_of("kind", kind, ("communication", "memcpy", "all"))
    fits = np.zeros(len(graph), np.bool_)
    fits[graph.select(name=pattern("match", match))] = True
    sends = (graph.kind == TaskKind.COMMUNICATION) | (graph.on_gpu & named(graph, is_collective_name))
    copies = (graph.kind == TaskKind.MEMCPY) & ~named(graph, is_within_device)
    fits &= {"communication": sends, "memcpy": copies, "all": sends | copies}[kind]
    rows = np.flatnonzero(fits)
    return Outcome(graph.scaled(rows, 1 / factor), (_note(graph, rows, "transfers", 1 / factor),))


@what_if("gpu-scale")
def gpu_scale(
    graph: TaskGraph,
    *,
    factor: float = 1.0,
    compute_factor: float = 1.0,
    memory_factor: float = 1.0,
    match: str = "",
    layer: str = "",
    phase: str = "all",
) -> Outcome:
    """A faster GPU: kernels run `factor` times as fast, compute-bound and memory-bound ones by their own factors.

    GEMMs, convolutions and attention are compute-bound (by kernel name), every other kernel memory-bound, sets
    and copies within the device too. Copies to and from the host and collectives stay: they are not the GPU's own
    work. Fixed times within short kernels are scaled as well. `match`, `layer` (regular expressions) and
    `phase` restrict the choice.

    Raises:
        InputError: a factor not above 0, or a malformed choice.
    """
    for name, value in {"factor": factor, "compute-factor": compute_factor, "memory-factor": memory_factor}.items():
        above_zero(name, value)
    rows = chosen(graph, match, layer, phase, gpu=True)
    away = graph.kind == TaskKind.COMMUNICATION
    away |= (graph.kind == TaskKind.MEMCPY) & ~named(graph, is_within_device)
    rows = rows[~away[rows]]
    compute = (graph.kind == TaskKind.KERNEL) & named(graph, is_compute_bound)
    speed = factor * np.where(compute[rows], compute_factor, memory_factor)
    changed = graph.scaled(rows, 1 / speed)
    many = int(compute[rows].sum())
    notes = (
        f"{many} compute-bound kernels run {factor * compute_factor:g} times as fast, "
        f"{len(rows) - many} others {factor * memory_factor:g} times",
        f"GPU time of these tasks: {_ms(graph.duration_us[rows])} before, {_ms(changed.duration_us[rows])} after",
    )
    return Outcome(changed, notes)


@what_if("scale")
def scale(
    graph: TaskGraph, *, factor: float, match: str = "", layer: str = "", phase: str = "all", on: str = "gpu"
) -> Outcome:
    """The shrink/scale primitive: durations of the tasks chosen times `factor` (0.5 halves them).

    `match` and `layer` are regular expressions, `phase` is all, forward, backward or update, `on` is gpu, cpu
    or all. The unrecorded time behind a CPU task is host work too and scales with it.

    Raises:
        InputError: a negative factor or a malformed choice.
    """
    at_least("factor", factor, 0.0)
    rows = _tasks(graph, match, layer, phase, on)
    edit = Edit(graph)
    edit.set("duration_us", rows, graph.duration_us[rows] * factor)
    hosts = rows[graph.on_cpu[rows]]
    edit.set("gap_us", hosts, graph.gap_us[hosts] * factor)
    return Outcome(edit.apply(), (_note(graph, rows, "tasks", factor),))


@what_if("remove")
def remove(
    graph: TaskGraph,
    *,
    match: str = "",
    layer: str = "",
    phase: str = "all",
    on: str = "gpu",
    launches: bool = True,
    host: str = "launch",
) -> Outcome:
    """The remove primitive: the tasks chosen are gone, with `launches` also the CUDA calls that launch them.

    The choice is written as for `scale`; at least one of match, layer and phase must be given. The time that operators
    take on the host besides their launches stays, so that a step which the host holds back hardly gets shorter;
    ``host=operator`` takes off all of the operators that launch nothing else, which is the upper bound of what getting
    rid of them can bring.

    Raises:
        InputError: nothing chosen by name, layer or phase, or a malformed choice.
    """
    one_of("host", host, ("launch", "operator"))
    if not match and not layer and phase == "all":
        raise InputError("match", "would remove every task", "give match, layer or phase")
    rows = _tasks(graph, match, layer, phase, on)
    edit = Edit(graph)
    edit.remove(rows, launches=launches)
    hosts = host_of(graph, rows[graph.on_gpu[rows]]) if host == "operator" else np.empty(0, np.int64)
    edit.remove(hosts)
    after = edit.apply()
    calls = len(graph) - len(after) - len(rows)
    if host == "operator":
        gone = f"{calls} tasks of the host, {_ms((graph.duration_us + graph.gap_us)[hosts])} of their operators"
    else:
        gone = f"{calls} of their launches"
    return Outcome(after, (f"{len(rows)} tasks of {_ms(graph.duration_us[rows])} removed, {gone}",))


def _tasks(graph: TaskGraph, match: str, layer: str, phase: str, on: str) -> Ints:
    one_of("on", on, ("gpu", "cpu", "all"))
    rows = chosen(graph, match, layer, phase)
    if on == "all":
        return rows
    return rows[(graph.on_gpu if on == "gpu" else graph.on_cpu)[rows]]


def _note(graph: TaskGraph, rows: Ints, what: str, factor: float) -> str:
    return f"{len(rows)} {what} of {_ms(graph.duration_us[rows])} take {factor:g} times as long"


def _ms(durations_us: Floats) -> str:
    return f"{durations_us.sum() / 1000:.3f} ms"
