"""Where a trace tells how large gradients are and when they are complete: its sources, one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind
from daydream.passes.basis.communication import tensor_bytes
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import NONE, Category, Floats, Ints, Trace, argument

#: Autograd's operator that receives one parameter's finished gradient.
ACCUMULATE = "torch::autograd::AccumulateGrad"

#: DDP's copy of a gradient into its bucket: one element-wise kernel a gradient.
_BUCKET_COPY = "torch::distributed::reducer::mul_out"

#: Elements that a thread of PyTorch's vectorised element-wise kernels takes: so their grid tells the tensor's size.
_ELEMENTS_PER_THREAD = 4

#: Operators with weights, and which of their inputs those are.
_WEIGHTS: dict[str, tuple[int, ...]] = {
    "aten::convolution": (1, 2),
    "aten::_convolution": (1, 2),
    "aten::cudnn_convolution": (1,),
    "aten::linear": (1, 2),
    "aten::addmm": (0, 2),
    "aten::batch_norm": (1, 2),
    "aten::layer_norm": (2, 3),
    "aten::group_norm": (2, 3),
    "aten::embedding": (0,),
}


@dataclass(frozen=True, kw_only=True)
class ParameterGradient:
    """A parameter's gradient in one step.

    `ready` is the row of the GPU task whose end completes it, `hook` that of the CPU task which then hands it over;
    -1 where there is none. `layer` is an index of the graph's layers, -1 without.
    """

    name: str
    bytes: float
    step: int
    ready: int
    hook: int
    layer: int = NONE


# Where trace rows stand in the graph


class Anchors:
    """For points of time on a thread of the trace: the last launched GPU task, its layer, and the last CPU task."""

    def __init__(self, graph: TaskGraph, trace: Trace) -> None:
        self.graph = graph
        self.trace = trace
        recorded = np.flatnonzero(graph.on_cpu & (graph.event != NONE) & (graph.mark == Mark.NONE))
        self._cpu = recorded
        self._thread = trace.thread[graph.event[recorded]]
        edges = graph.edge_kind == Dependency.LAUNCH
        calls, tasks = graph.edge_source[edges], graph.edge_target[edges]
        fit = (graph.event[calls] != NONE) & graph.on_gpu[tasks] & (graph.kind[tasks] != TaskKind.COMMUNICATION)
        order = np.argsort(trace.start_us[graph.event[calls[fit]]], kind="stable")
        self._calls, self._tasks = calls[fit][order], tasks[fit][order]

    def rows(self, *names: str) -> Ints:
        """Operators of these names, in order of start."""
        chosen = np.array([name in names for name in self.trace.names], np.bool_)
        return np.flatnonzero(chosen[self.trace.name] & (self.trace.category == Category.OPERATOR))

    def around(self, row: int, name: str) -> int:
        """The event of this name right around a row, else the row itself."""
        parent = int(self.graph.enclosing[row]) if len(self.graph.enclosing) else NONE
        return parent if parent != NONE and name in self.trace.text(parent) else row

    def gradients(self, rows: Ints, sizes: Floats, names: Sequence[str] | None = None) -> dict[int, Any]:
        """Gradients that are complete when these rows of the trace end, by step."""
        trace, graph = self.trace, self.graph
        ends = trace.start_us[rows] + trace.duration_us[rows]
        ready, hook = np.full(len(rows), NONE), np.full(len(rows), NONE)
        layer = np.full(len(rows), NONE)
        for thread in np.unique(trace.thread[rows]):
            of_thread = np.flatnonzero(trace.thread[rows] == thread)
            cpu = self._cpu[self._thread == thread]
            hook[of_thread] = _last_before(trace.start_us[graph.event[cpu]], cpu, ends[of_thread])
            launches = trace.thread[graph.event[self._calls]] == thread
            calls, tasks = self._calls[launches], self._tasks[launches]
            start = trace.start_us[graph.event[calls]]
            ready[of_thread] = _last_before(start, tasks, ends[of_thread])
            layered = graph.layer[tasks] != NONE
            behind = _last_before(start[layered], tasks[layered], ends[of_thread])
            layer[of_thread] = np.where(behind == NONE, NONE, graph.layer[behind])
        by_step: dict[int, list[ParameterGradient]] = defaultdict(list)
        for position in np.argsort(ends, kind="stable"):
            step = int(graph.step[hook[position]]) if hook[position] != NONE else NONE
            if step == NONE or sizes[position] <= 0:
                continue
            # What an earlier step launched says nothing about this one's gradients.
            source = int(ready[position]) if ready[position] != NONE and graph.step[ready[position]] == step else NONE
            of_layer = int(layer[position]) if source != NONE else NONE
            name = (
                names[position] if names else (graph.layers[of_layer] if of_layer != NONE else f"gradient {position}")
            )
            by_step[step].append(
                ParameterGradient(
                    name=name,
                    bytes=float(sizes[position]),
                    step=step,
                    ready=source,
                    hook=int(hook[position]),
                    layer=of_layer,
                )
            )
        return {step: tuple(by_step[step]) for step in sorted(by_step)}


def _last_before(times: Floats, rows: Ints, time: Floats) -> Ints:
    """For each time the last of `rows` (sorted by `times`) that starts before it, -1 without."""
    if not len(rows):
        return np.full(len(time), NONE)
    order = np.argsort(times, kind="stable")
    place = np.searchsorted(times[order], time, side="left") - 1
    return np.where(place < 0, NONE, rows[order][place])


# Sources


def _from_record(anchors: Anchors) -> dict[int, Any]:
    """Sizes from ``daydream record``, in the order in which its hooks saw them; readiness from AccumulateGrad."""
    listed = anchors.trace.metadata.get("gradients")
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
        return {}
    listed = [
        entry for _, entry in sorted(enumerate(listed), key=lambda pair: (pair[1].get("order", pair[0]), pair[0]))
    ]
    sizes = np.array([_listed_bytes(entry) for entry in listed])
    names = [str(entry.get("name", f"gradient {i}")) for i, entry in enumerate(listed)]
    rows = anchors.rows(ACCUMULATE)
    if not len(rows):
        return _of_layers(anchors.graph, listed, sizes, names)
    # Number the calls within each step, so that the n-th meets the n-th size.
    by_step = anchors.gradients(_hooks(anchors, rows), np.ones(len(rows)))
    first = min(by_step, default=0)
    gradients = {}
    for step, seen in by_step.items():
        # A step whose beginning was not recorded has its last gradients, one whose end was not its first ones.
        shift = max(len(sizes) - len(seen), 0) if step == first else 0
        pairs = zip(seen, sizes[shift:], names[shift:], strict=False)
        gradients[step] = tuple(
            ParameterGradient(
                name=name, bytes=float(size), step=step, ready=anchor.ready, hook=anchor.hook, layer=anchor.layer
            )
            for anchor, size, name in pairs
        )
    return gradients


def _listed_bytes(entry: dict[str, Any]) -> float:
    size = entry.get("bytes")
    if isinstance(size, (int, float)):
        return float(size)
    elements = entry.get("elements")
    return float(elements) * element_bytes(entry.get("dtype")) if isinstance(elements, (int, float)) else 0.0


def _of_layers(graph: TaskGraph, listed: list[dict[str, Any]], sizes: Floats, names: list[str]) -> dict[int, Any]:
    """Gradients of modules at the last backward GPU task of the layer of that name."""
    ends = _layer_ends(graph)
    index = {text: i for i, text in enumerate(graph.layers)}
    by_step: dict[int, list[ParameterGradient]] = defaultdict(list)
    for anchor, size, name in zip(listed, sizes, names, strict=True):
        layer = index.get(str(anchor.get("module", "")), NONE)
        for step in sorted({step for step, _ in ends}):
            if (step, layer) in ends:
                row = ends[step, layer]
                by_step[step].append(
                    ParameterGradient(
                        name=name, bytes=float(size), step=step, ready=row, hook=int(graph.launch[row]), layer=layer
                    )
                )
    return {step: tuple(sorted(by_step[step], key=lambda g: g.ready)) for step in sorted(by_step)}


def _from_accumulation(anchors: Anchors) -> dict[int, Any]:
    """Recorded shapes of what AccumulateGrad received; a call without shape received nothing."""
    rows = anchors.rows(ACCUMULATE)
    if not len(rows):
        return {}
    sizes = np.array([sum(tensor_bytes(anchors.trace.arguments[row])[:1]) for row in rows], np.float64)
    return anchors.gradients(_hooks(anchors, rows), sizes)


def _from_copies(anchors: Anchors) -> dict[int, Any]:
    """Sizes from the grids of DDP's copies into its buckets, a copy a gradient; 4 bytes an element.

    A copy's last block may be only partly used, so sizes come out up to 2 KiB too large each.
    """
    graph, trace = anchors.graph, anchors.trace
    rows = anchors.rows(_BUCKET_COPY)
    copies = graph.select(name="vectorized_elementwise_kernel", gpu=True)
    launches = graph.launch[copies]
    fit = (launches != NONE) & (graph.event[copies] != NONE)
    copies, launches = copies[fit], launches[fit]
    if not len(rows) or not len(copies):
        return {}
    order = np.argsort(launches, kind="stable")
    copies, launches = copies[order], launches[order]
    starts = trace.start_us[graph.event[launches]]
    sizes = np.zeros(len(rows))
    for position, row in enumerate(rows):
        place = int(np.searchsorted(starts, trace.start_us[row]))
        inside = place < len(copies) and starts[place] <= trace.start_us[row] + trace.duration_us[row]
        if inside:
            sizes[position] = _grid_threads(trace.arguments[graph.event[copies[place]]]) * _ELEMENTS_PER_THREAD * 4
    return anchors.gradients(rows, sizes)


def _grid_threads(arguments: dict[str, Any]) -> float:
    grid, block = argument(arguments, "grid"), argument(arguments, "block")
    if not isinstance(grid, list) or not isinstance(block, list):
        return 0.0
    return float(math.prod(grid) * math.prod(block))


def _from_forward(anchors: Anchors) -> dict[int, Any]:
    """Shapes of the weights of forward operators; ready when the operator's backward counterpart ends.

    A weight that several operators share counts once for each.
    """
    graph, trace = anchors.graph, anchors.trace
    owner: dict[int, int] = {}
    for forward, backward in trace.forward_backward:
        row, weight_operator = int(forward), NONE
        while row != NONE:
            # The outermost of nested ones, so that a convolution and its parts count once.
            weight_operator = row if trace.text(row) in _WEIGHTS else weight_operator
            row = int(graph.enclosing[row])
        if weight_operator != NONE:
            owner[weight_operator] = max(owner.get(weight_operator, NONE), int(backward))
    if not owner:
        return {}
    rows, sizes = [], []
    for forward, backward in owner.items():
        inputs = tensor_bytes(trace.arguments[forward])
        wanted = _WEIGHTS[trace.text(forward)]
        rows.append(anchors.around(backward, "evaluate_function"))
        sizes.append(float(sum(inputs[place] for place in wanted if place < len(inputs))))
    return anchors.gradients(np.array(rows, np.int64), np.array(sizes))


#: The sources in words, the best first, and what reads each: gradients by step, none where the trace has no such.
SOURCES = {
    "as daydream record saw them": _from_record,
    "from the shapes that AccumulateGrad recorded": _from_accumulation,
    "from the grids of DDP's copies into its buckets": _from_copies,
    "from the shapes of forward operators' weights": _from_forward,
}


def _hooks(anchors: Anchors, rows: Ints) -> Ints:
    """The events around AccumulateGrad in which DDP's hooks run, where the trace has them."""
    return np.array([anchors.around(int(row), "evaluate_function") for row in rows], np.int64)


def _layer_ends(graph: TaskGraph) -> dict[tuple[int, int], int]:
    """The last backward GPU task of each layer in each step."""
    rows = graph.select(phase=Phase.BACKWARD, gpu=True)
    rows = rows[(graph.layer[rows] != NONE) & (graph.kind[rows] != TaskKind.COMMUNICATION)]
    return {(int(graph.step[row]), int(graph.layer[row])): int(row) for row in rows}


def spread(graph: TaskGraph, total: float) -> dict[int, Any]:
    """A total spread over each step's layers by their backward GPU time, or its GPU tasks where they have none.

    Without any phases all GPU tasks of a step count as its backward pass.
    """
    wanted = graph.on_gpu & (graph.mark == Mark.NONE) & (graph.kind != TaskKind.COMMUNICATION) & (graph.step != NONE)
    if (wanted & (graph.phase == Phase.BACKWARD)).any():
        wanted &= graph.phase == Phase.BACKWARD
    ends = _layer_ends(graph)
    by_step = {}
    for step in np.unique(graph.step[wanted]):
        rows = np.flatnonzero(wanted & (graph.step == step))
        shares: dict[int, float] = defaultdict(float)
        for row in rows:
            end = ends.get((int(step), int(graph.layer[row])), int(row))
            shares[end] += float(graph.duration_us[row])
        time = sum(shares.values()) or 1.0
        parts = [(row, total * share / time) for row, share in sorted(shares.items()) if share]
        by_step[int(step)] = tuple(
            ParameterGradient(
                name=_layer_name(graph, row),
                bytes=size,
                step=int(step),
                ready=row,
                hook=int(graph.launch[row]),
                layer=int(graph.layer[row]),
            )
            for row, size in parts
        )
    return by_step


def _layer_name(graph: TaskGraph, row: int) -> str:
    return graph.layers[graph.layer[row]] if graph.layer[row] != NONE else graph.text(row)
