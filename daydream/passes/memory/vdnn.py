"""vDNN: feature maps of convolutions kept in host memory between forward and backward (thesis 4.5.2, algorithm 10)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind, Thread, ThreadKind
from daydream.graph.memory import HeldMemory
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of
from daydream.passes.basis.checks import above_zero, at_least
from daydream.passes.basis.idioms import (
    LayerRun,
    Role,
    backward_of,
    is_elementwise,
    is_relu,
    launch_latency_us,
    launch_us,
    layer_runs,
    operands,
    operators_named,
    outermost_operator,
    preceding,
    roles,
    tensors,
)
from daydream.passes.basis.maps import Absence, absence, elsewhere
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError

#: Bytes a microsecond at 1 GB/s.
BYTES_PER_US = 1e3


@dataclass(frozen=True)
class _Offload:
    """A convolution whose input leaves the GPU after its forward call and is back before its backward one."""

    forward: LayerRun
    backward: LayerRun
    bytes: float


@what_if("vdnn")
def vdnn(
    graph: TaskGraph,
    *,
    pcie_gbps: float = 12.0,
    prefetch_distance: int = 1,
    wait_for_offload: bool = False,
    memory_gbps: float = 700.0,
) -> Outcome:
    """The vDNN_conv policy: inputs of convolutions are offloaded after forward and prefetched before backward.

    After a convolution's last forward kernel its input is copied to the host, on a stream of its own, at `pcie_gbps`
    GB/s (12: a PCIe 3.0 x16 with pinned memory). It comes back on another stream, PCIe being full duplex: the copy
    starts when the backward call of the convolution `prefetch_distance` later in the network does (that is
    findPrefetchLayer; for the last ones when the backward pass does), and its own backward call waits for it.
    With `wait_for_offload` the next layer waits until an offload is done, as vDNN does to free memory at once;
    else memory is freed behind the computation. Each copy brings a launch call of the trace's usual duration;
    cudaMalloc and cudaFree (algorithm 10) are left out, for PyTorch's allocator reuses what it has.

    The size of an input is the recorded `bytes` of its tasks, else that of the operator's first recorded tensor,
    else what an element-wise kernel right before it can have written at `memory_gbps` GB/s. An input that two
    convolutions share is copied for both: a trace does not tell.

    Raises:
        InputError: a number out of range, or no convolution's size can be told.
    """
    above_zero("pcie-gbps", pcie_gbps)
    above_zero("memory-gbps", memory_gbps)
    at_least("prefetch-distance", prefetch_distance, 1)
    role = roles(graph)
    forward = layer_runs(graph, role, Role.CONVOLUTION, Phase.FORWARD)
    answers = backward_of(forward, layer_runs(graph, role, Role.CONVOLUTION, Phase.BACKWARD))
    pairs = [(run, answer) for run, answer in zip(forward, answers, strict=True) if answer is not None]
    if not pairs:
        return Outcome(graph, ("no convolution has a forward and a backward call: nothing is offloaded",))
    before = preceding(graph)
    sizes = _sizes(graph, [run for run, _ in pairs], before, memory_gbps)
    layers = [_Offload(*pair, size) for pair, size in zip(pairs, sizes, strict=True) if size > 0]
    if not layers:
        raise InputError(
            "vdnn", "the sizes of the convolutions' inputs are not recorded", "record the trace with record_shapes=True"
        )
    edit = Edit(graph)
    copies = _Copies(edit, before, pcie_gbps)
    for step in sorted({layer.forward.step for layer in layers}):
        of_step = [layer for layer in layers if layer.forward.step == step]
        copies.of_step(of_step, prefetch_distance, wait_for_offload)
    memory = memory_of(graph)
    after = None if memory is None else elsewhere(memory, _away(graph, memory, layers, prefetch_distance))
    changed, told, gain = changed_memory(edit.apply(), memory, after)
    return Outcome(changed, (*_notes(graph, layers, len(pairs), pcie_gbps), *told), gain)


def _away(graph: TaskGraph, memory: HeldMemory, layers: list[_Offload], distance: int) -> Iterator[Absence]:
    """When the maps of the step whose memory is known are on the host."""
    of_step = [layer for layer in layers if layer.forward.step == memory.step]
    first = min((layer.backward for layer in of_step), key=lambda run: run.first, default=None)
    for place, layer in enumerate(of_step):
        trigger = of_step[place + distance].backward if place + distance < len(of_step) else first
        assert trigger is not None
        away = absence(graph, memory, layer.bytes, layer.forward, trigger)
        if away is not None:
            yield away


class _Copies:
    def __init__(self, edit: Edit, before: Ints, gbps: float) -> None:
        self.edit, self.before, self.rate = edit, before, gbps * BYTES_PER_US
        graph = edit.graph
        self.call_us, self.latency_us = launch_us(graph), launch_latency_us(graph)
        last = max((thread.number for thread in graph.threads if thread.kind is ThreadKind.STREAM), default=0)
        device = max((thread.device for thread in graph.threads), default=0)
        self.out = edit.thread(Thread(kind=ThreadKind.STREAM, label="vDNN offload", number=last + 1, device=device))
        self.back = edit.thread(Thread(kind=ThreadKind.STREAM, label="vDNN prefetch", number=last + 2, device=device))

    def of_step(self, layers: list[_Offload], distance: int, wait: bool) -> None:
        start = min(layer.backward.first for layer in layers)
        offloads = [self.offload(layer, wait) for layer in layers]
        # The backward pass begins at the network's end, and so do the prefetches.
        for place in reversed(range(len(layers))):
            trigger = layers[place + distance].backward.first if place + distance < len(layers) else start
            self.prefetch(layers[place], offloads[place], trigger)

    def offload(self, layer: _Offload, wait: bool) -> int:
        graph, run = self.edit.graph, layer.forward
        copy = self.edit.add(
            "vDNN offload (Memcpy DtoH)",
            TaskKind.MEMCPY,
            layer.bytes / self.rate,
            after=run.last,
            thread=self.out,
            phase=Phase.FORWARD,
            layer=run.layer,
            bytes=layer.bytes,
        )
        self.edit.depend(run.last, copy, Dependency.SYNC)
        call = int(graph.launch[run.last])
        if call != NONE:
            self.launch(self.edit.add("cudaMemcpyAsync", TaskKind.CPU, self.call_us, after=call, **_of(run)), copy)
        following = int(graph.following[run.last])
        if wait and following != NONE:
            self.edit.depend(copy, following, Dependency.SYNC)
        return copy

    def prefetch(self, layer: _Offload, offload: int, trigger: int) -> None:
        graph, run = self.edit.graph, layer.backward
        copy = self.edit.add(
            "vDNN prefetch (Memcpy HtoD)",
            TaskKind.MEMCPY,
            layer.bytes / self.rate,
            before=trigger,
            thread=self.back,
            phase=Phase.BACKWARD,
            layer=run.layer,
            bytes=layer.bytes,
        )
        if self.before[trigger] != NONE:
            self.edit.depend(int(self.before[trigger]), copy, Dependency.SYNC)
        self.edit.depend(offload, copy, Dependency.SYNC)
        self.edit.depend(copy, run.first, Dependency.SYNC)
        call = int(graph.launch[trigger])
        if call != NONE:
            self.launch(self.edit.add("cudaMemcpyAsync", TaskKind.CPU, self.call_us, before=call, **_of(run)), copy)

    def launch(self, call: int, copy: int) -> None:
        self.edit.depend(call, copy, Dependency.LAUNCH, self.latency_us)


def _of(run: LayerRun) -> dict[str, int]:
    return {"layer": run.layer, "step": run.step}


def _sizes(graph: TaskGraph, runs: list[LayerRun], before: Ints, memory_gbps: float) -> list[float]:
    """Bytes of each convolution's input; 0 where unknown."""
    firsts = np.array([run.first for run in runs], np.int64)
    owners = outermost_operator(graph, firsts, operators_named(graph, r"conv(?!ert)"))
    sizes = []
    for run, owner in zip(runs, owners.tolist(), strict=True):
        recorded = graph.bytes[run.rows]
        inputs = tensors(graph, owner)
        if np.isfinite(recorded).any():
            sizes.append(float(np.nanmax(recorded)))
        elif inputs:
            sizes.append(float(inputs[0].bytes))
        else:
            sizes.append(_written(graph, int(before[run.first]), memory_gbps))
    return sizes


def _written(graph: TaskGraph, row: int, memory_gbps: float) -> float:
    """What an element-wise kernel can have written in its time; 0 for any other task."""
    if row == NONE or not (is_elementwise(graph.text(row)) or is_relu(graph.text(row))):
        return 0.0
    return float(graph.duration_us[row]) * memory_gbps * BYTES_PER_US / operands(graph.text(row))


def _notes(graph: TaskGraph, layers: list[_Offload], pairs: int, gbps: float) -> tuple[str, ...]:
    steps = len({layer.forward.step for layer in layers})
    total = sum(layer.bytes for layer in layers) / steps
    notes = [
        f"{len(layers) / steps:g} feature maps of {total / 1e6:.1f} MB a step are offloaded and prefetched: "
        f"{total / gbps / 1e6:.3f} ms each way at {gbps:g} GB/s"
    ]
    if len(layers) < pairs:
        notes.append(f"{pairs - len(layers)} convolutions of unknown input size stay as they are")
    return tuple(notes)
