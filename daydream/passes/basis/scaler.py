"""What `torch.amp.GradScaler` adds to a step: gradients unscaled and looked through, and a wait for the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind
from daydream.passes.basis.gradients import Gradients

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Names of kernels that a step with a scaler has already.
SCALER = "non_finite_check|amp_update_scale|_amp_foreach"

#: Bytes of a gradient read and written for each of its own.
_TRAFFIC = 2.0

#: Kernels of single numbers: the loss scaled and the gradient of that (two), the scale inverted in float64 (three), the
#: flag set to zero (one), scale and flag copied to every board (two).
_SCALARS = 8

#: Share of a graph's kernels that are no longer than the floor taken for kernels of single numbers.
_SHORTEST = 0.05

#: A copy of four bytes to the host, microseconds.
_COPY_US = 2.0


def add_scaler(edit: Edit, gradients: Gradients, spec: DeviceSpec, call_us: float) -> str:
    """Adds the scaler's kernels between backward pass and update, and says in a sentence what they take.

    `GradScaler.step` reads and writes every gradient once, and asks the board whether all were finite: the CPU waits
    there for all that it has launched (``aten::_local_scalar_dense``).

    Args:
        edit: of the step's graph.
        gradients: of all steps.
        spec: the board.
        call_us: of a launch on the CPU, microseconds.
    """
    from roller.library.streaming.elementwise import kernel_seconds_floor

    graph = edit.graph
    recorded = graph.duration_us[graph.on_gpu & (graph.kind == TaskKind.KERNEL)]
    shortest_us = float(np.quantile(recorded, _SHORTEST)) if len(recorded) else 0.0
    floor_us = max(kernel_seconds_floor(spec) * 1e6, shortest_us)
    total, steps = 0.0, 0
    for step in gradients.steps:
        place = _places(graph, step)
        if place is None:
            continue
        last, call = place
        unscale_us = _TRAFFIC * gradients.bytes_of(step) / spec.dram.bandwidth_bytes_per_second * 1e6 + floor_us
        for name, duration_us in (("unscale: scalars", _SCALARS * floor_us), ("unscale gradients", unscale_us)):
            last, call = _kernel(edit, name, duration_us, call_us, last, call, step)
        copy, call = _kernel(edit, "Memcpy DtoH (found inf)", _COPY_US, call_us, last, call, step, TaskKind.MEMCPY)
        waiting = edit.add("aten::_local_scalar_dense", TaskKind.CPU, 0.0, after=call, phase=Phase.UPDATE, step=step)
        edit.depend(copy, waiting, Dependency.SYNC)
        behind = np.flatnonzero(graph.on_gpu & (graph.step == step) & (graph.phase == Phase.UPDATE))
        edit.add("update scale", TaskKind.KERNEL, floor_us, after=int(behind[-1]), phase=Phase.UPDATE, step=step)
        total, steps = total + unscale_us + (_SCALARS + 1) * floor_us + _COPY_US, steps + 1
    if not steps:
        return "no step has an update that a scaler could stand before: none is added"
    return (
        f"GradScaler adds {total / steps / 1e3:.2f} ms of kernels a step and a wait before the update (scaler=no: none)"
    )


def _places(graph: TaskGraph, step: int) -> tuple[int, int] | None:
    """The last GPU task before a step's update, and the CPU task that launched it or came last before the update's."""
    of_step = graph.on_gpu & (graph.step == step) & (graph.kind != TaskKind.COMMUNICATION)
    update = np.flatnonzero(of_step & (graph.phase == Phase.UPDATE))
    if not len(update):
        return None
    before = np.flatnonzero(of_step & (graph.thread == graph.thread[update[0]]))
    before = before[before < update[0]]
    launch = int(graph.launch[update[0]])
    if not len(before) or launch < 0:
        return None
    on_thread = np.flatnonzero((graph.thread == graph.thread[launch]) & (np.arange(len(graph)) < launch))
    update_hosts = on_thread[(graph.phase[on_thread] == Phase.UPDATE) & (graph.step[on_thread] == step)]
    first = int(update_hosts[0]) if len(update_hosts) else launch
    earlier = on_thread[on_thread < first]
    return (int(before[-1]), int(earlier[-1])) if len(earlier) else None


def _kernel(
    edit: Edit,
    name: str,
    duration_us: float,
    call_us: float,
    after: int,
    call: int,
    step: int,
    kind: TaskKind = TaskKind.KERNEL,
) -> tuple[int, int]:
    """A GPU task behind another one, launched behind a CPU task; both of them."""
    task = edit.add(name, kind, duration_us, after=after, phase=Phase.UPDATE, step=step)
    launch = edit.add("cudaLaunchKernel", TaskKind.CPU, call_us, after=call, phase=Phase.UPDATE, step=step)
    edit.depend(launch, task, Dependency.LAUNCH)
    return task, launch
