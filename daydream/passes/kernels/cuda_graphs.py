"""CUDA graphs: the launches of a region collapse into one."""

from __future__ import annotations

import re

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, TaskGraph, TaskKind
from daydream.passes import Outcome, what_if
from daydream.passes.basis.checks import at_least, phase_named
from daydream.passes.basis.idioms import Mask, launch_latency_us, named, renamed
from daydream.trace.trace import NONE, Ints

_HOST_COPY = re.compile(r"HtoD|DtoH|HtoH|Pageable|Pinned", re.IGNORECASE)
_WAITS = re.compile(r"synchronize|\(return\)$", re.IGNORECASE)


@what_if("cuda-graphs")
def cuda_graphs(
    graph: TaskGraph, *, launch_us: float = 10.0, per_kernel_us: float = 0.6, phase: str = "all", replays_ahead: int = 1
) -> Outcome:
    """The kernels of a step's region replayed as a CUDA graph: one call launches them all.

    In each step the region runs from the first captured launch to the last; `phase` restricts it to launches of
    the forward, backward or update phase. Everything the CPU threads do inside it disappears, since a replay runs
    no operators; what comes before the first launch stays, as do data loading, copies to and from the host,
    and calls that wait. These can't be captured, so each one inside ends a graph and the next launch begins another.
    A replay costs `launch_us` on the CPU. On their stream the kernels then run back to back, `per_kernel_us`
    apart, with the durations they have; dependencies between streams stay. A replay is launched when the one
    `replays_ahead` steps before it has ended: the CPU could queue many more, and a recording of few steps would then
    show the time to queue them instead of the time they take. That shapes and addresses never
    change, as a replay demands, is taken for granted, and the capture itself is not part of any step.

    Raises:
        InputError: a negative time or an unknown phase.
    """
    at_least("launch-us", launch_us, 0.0)
    at_least("per-kernel-us", per_kernel_us, 0.0)
    at_least("replays-ahead", replays_ahead, 1)
    wanted = phase_named("phase", phase)
    copies = (graph.kind == TaskKind.MEMCPY) & named(graph, lambda text: _HOST_COPY.search(text) is not None)
    captured = graph.on_gpu & ~copies & (graph.launch != NONE) & (graph.step != NONE)
    if wanted is not None:
        captured &= graph.phase == wanted
    tasks = np.flatnonzero(captured)
    if not len(tasks):
        return Outcome(graph, ("no launch belongs to the region: nothing is captured",))
    stays = _stays(graph, captured)
    calls = graph.launch[tasks]
    hosts = np.unique(graph.thread[calls])
    borders = np.flatnonzero(stays & np.isin(graph.thread, hosts))
    # One graph per step and stretch between two calls that stay; rows stand in the order of time.
    key = np.stack([graph.step[tasks], np.searchsorted(borders, calls)])
    _, piece = np.unique(key, axis=1, return_inverse=True)
    piece = piece.reshape(-1)
    first, last = _bounds(calls, piece)
    edit = Edit(renamed(graph, first, "cudaGraphLaunch"))
    edit.set("duration_us", first, launch_us)
    edit.set("gap_us", first, 0.0)
    edit.set("gap_us", tasks, per_kernel_us)
    replayed = _inside(graph, hosts, first, last) & ~stays
    replayed[first] = False
    edit.remove(np.flatnonzero(replayed))
    launches = np.isin(graph.edge_target, tasks) & (graph.edge_kind == Dependency.LAUNCH)
    edit.drop_edges(np.flatnonzero(launches))
    latency = launch_latency_us(graph)
    for task, call in zip(tasks.tolist(), first[piece].tolist(), strict=True):
        edit.depend(call, task, Dependency.LAUNCH, latency)
    caller = graph.launch.copy()
    caller[tasks] = first[piece]
    _hold_back(edit, tasks, first, caller, replays_ahead)
    spared = (graph.duration_us + graph.gap_us)[replayed].sum() / 1000
    steps = len(np.unique(graph.step[tasks]))
    notes = [
        f"{len(tasks)} GPU tasks of {steps} steps are launched by {len(first)} graph launches of {launch_us:g} µs",
        f"{int(replayed.sum())} CPU tasks with {spared:.3f} ms of host time are gone; kernels follow each other "
        f"after {per_kernel_us:g} µs",
    ]
    if len(first) > steps:
        notes.append(f"waits, host copies or data loading inside split the region into {len(first) / steps:.1f} a step")
    return Outcome(edit.apply(), tuple(notes))


def _stays(graph: TaskGraph, captured: Mask) -> Mask:
    """CPU tasks that no replay can take over: data loading, waiting, and launches of what is not captured."""
    stays = (graph.kind != TaskKind.CPU) | named(graph, lambda text: _WAITS.search(text) is not None)
    stays[graph.edge_target[graph.edge_kind == Dependency.SYNC]] = True
    launches = graph.edge_kind == Dependency.LAUNCH
    stays[graph.edge_source[launches & ~captured[graph.edge_target]]] = True
    return stays & graph.on_cpu


def _hold_back(edit: Edit, tasks: Ints, first: Ints, caller: Ints, ahead: int) -> None:
    """Lets each step's first replay wait for the captured tasks that end the streams of an earlier step.

    ``caller`` is what launches each task from now on. In a damaged trace a stream may run a task of the earlier step
    behind what the replay or a call after it launches; such a task ends nothing.
    """
    graph = edit.graph
    steps = np.unique(graph.step[tasks])
    for earlier, step in zip(steps[:-ahead], steps[ahead:], strict=True):
        call = int(first[graph.step[first] == step].min())
        behind = np.flatnonzero((caller >= call) & (graph.thread[caller] == graph.thread[call]))
        begins = np.full(len(graph.threads), len(graph))
        np.minimum.at(begins, graph.thread[behind], behind)
        of_step = tasks[(graph.step[tasks] == earlier) & (tasks < begins[graph.thread[tasks]])]
        _, place = np.unique(graph.thread[of_step][::-1], return_index=True)
        for last in of_step[::-1][place].tolist():
            edit.depend(last, call, Dependency.SYNC)


def _bounds(calls: Ints, piece: Ints) -> tuple[Ints, Ints]:
    """First and last call of each piece."""
    count = int(piece.max()) + 1
    first, last = np.full(count, np.iinfo(np.int64).max), np.full(count, NONE)
    np.minimum.at(first, piece, calls)
    np.maximum.at(last, piece, calls)
    return first, last


def _inside(graph: TaskGraph, hosts: Ints, first: Ints, last: Ints) -> Mask:
    """CPU tasks of these threads from the first to the last call of a piece. Pieces don't overlap."""
    rows = np.arange(len(graph))
    position = np.searchsorted(np.sort(first), rows, side="right") - 1
    inside = (position >= 0) & (rows <= np.sort(last)[position])
    return inside & np.isin(graph.thread, hosts) & graph.on_cpu & (graph.mark == Mark.NONE)
