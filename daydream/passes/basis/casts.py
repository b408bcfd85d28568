"""Casts of autocast in a step: which operators stay in float32, and what turns tensors into halves and back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.operators.autocast import keeps_single
from daydream.operators.pricing import CallPrice, Prices
from daydream.passes.basis.gradients import Gradients
from daydream.passes.basis.idioms import named, preceding
from daydream.trace.trace import NONE, Ints

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Kernels of operators that autocast keeps in float32, by name.
SINGLE = re.compile(r"softmax|layer_?norm|group_?norm|RowwiseMoments|nll_?loss|cross_entropy", re.IGNORECASE)

#: Bytes moved per element that becomes half precision: 4 read and 2 written.
CAST_BYTES = 6


def stays_single(graph: TaskGraph, rows: Ints) -> NDArray[np.bool_]:
    """Which GPU tasks autocast leaves in float32: by their operator, without one by their name."""
    by_name = named(graph, lambda name: bool(SINGLE.search(name)))[rows]
    if graph.trace is None:
        return by_name
    keeps_by_name = np.array([keeps_single(name) for name in graph.trace.names] or [False], np.bool_)
    operator = graph.operator[rows]
    return np.where(operator == NONE, by_name, keeps_by_name[graph.trace.name[operator]])


def has_single(call: CallPrice) -> bool:
    """True if an operator has float32 tensors to make smaller; where nothing is known, it does."""
    return call.work.dtype == "float32" if call.work is not None else not call.reason.startswith("elements of type")


def add_casts(
    edit: Edit, calls: Prices | None, gradients: Gradients | None, spec: DeviceSpec, call_us: float
) -> list[str]:
    """Adds before every forward product its weights' cast, which autocast keeps for the backward pass, and behind
    every gradient that a product makes of such weights a cast back."""
    graph, added, total = edit.graph, 0, 0.0
    forward: set[int] = set()

    def seconds(elements: float) -> float:
        return CAST_BYTES * elements / spec.dram.bandwidth_bytes_per_second + spec.launch_overhead_seconds

    read_single = _read_single(graph)
    begun: set[int] = set()
    for call in calls.calls if calls is not None else ():
        elements = _weights(call) if graph.phase[call.main] != Phase.BACKWARD and has_single(call) else 0
        if not elements:
            continue
        first = int(call.rows[0])
        casts = [("cast weights to half", elements)]
        if bias := _bias(call):
            casts.append(("cast bias to half", bias))
        if read_single[first] or int(graph.step[first]) not in begun:
            casts.append(("cast input to half", _input(call)))
        begun.add(int(graph.step[first]))
        forward |= {elements, bias}
        shared = {"phase": int(graph.phase[first]), "layer": int(graph.layer[first])}
        for name, size in casts:
            task = edit.add(name, TaskKind.KERNEL, seconds(size) * 1e6, before=first, **shared)
            if graph.launch[first] != NONE:
                launch = edit.add("cudaLaunchKernel", TaskKind.CPU, call_us, before=int(graph.launch[first]), **shared)
                edit.depend(launch, task, Dependency.LAUNCH)
            added, total = added + 1, total + seconds(size)
    notes = []
    if added:
        notes.append(
            f"{added} casts of weights, biases and inputs added, {total * 1e3:.2f} ms on the GPU,"
            f" {call_us:.1f} µs per launch"
        )
    of_weights = [
        gradient
        for gradients_of_step in (gradients.steps.values() if gradients is not None else ())
        for gradient in gradients_of_step
        if gradient.ready != NONE and int(gradient.bytes) // 4 in forward
    ]
    for gradient in of_weights:
        edit.add_kernel(
            "cast gradient to float",
            seconds(gradient.bytes / 4) * 1e6,
            after=gradient.ready,
            launch_us=call_us,
            phase=Phase.BACKWARD,
            layer=gradient.layer,
        )
    if of_weights:
        total = sum(seconds(gradient.bytes / 4) for gradient in of_weights)
        notes.append(f"{len(of_weights)} casts of their gradients added, {total * 1e3:.2f} ms on the GPU")
    return notes


def _read_single(graph: TaskGraph) -> NDArray[np.bool_]:
    """For each task whether the one before it on its stream computes in float32 under autocast."""
    before = preceding(graph)
    single = np.zeros(len(graph), np.bool_)
    rows = np.flatnonzero(graph.on_gpu & (before != NONE))
    if len(rows):
        single[rows] = stays_single(graph, before[rows]) & graph.on_gpu[before[rows]]
    return single


def _bias(call: CallPrice) -> int:
    """Elements of the bias of a forward matrix product, 0 without."""
    data = call.work.parts[0].data if call.work is not None else {}
    biased = any(each.get("function") == "bias_add" for each in data.get("epilogue") or ())
    return int(data["n"]) if data.get("op") == "matmul" and biased else 0


def _input(call: CallPrice) -> int:
    """Elements of the input of a forward convolution or plain matrix product."""
    data = call.work.parts[0].data if call.work is not None else {}
    if data.get("op") == "conv2d":
        return int(data["n"] * data["c"] * data["h"] * data["w"])
    return int(data["m"] * data["k"]) if data.get("op") == "matmul" else 0


def _weights(call: CallPrice) -> int:
    """Elements of the weights of a forward convolution or plain matrix product; 0 of anything else."""
    if call.work is None or call.work.direction != "forward":
        return 0
    data = call.work.parts[0].data
    if data.get("op") == "conv2d":
        return int(data["f"] * data["c"] // data["groups"] * data["kh"] * data["kw"])
    return int(data["k"] * data["n"]) if data.get("op") == "matmul" else 0
