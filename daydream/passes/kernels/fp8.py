"""Linear layers in eight or four bits: products of 16 bits become scaled ones, behind kernels that quantise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind
from daydream.operators.pricing import CallPrice, device_of
from daydream.operators.pricing import price as price_of
from daydream.operators.variants import narrowed
from daydream.passes import Outcome, what_if
from daydream.passes.basis.idioms import named
from daydream.passes.kernels.amp import COMPUTE
from daydream.trace.trace import NONE
from hal.support.errors import InputError, listed
from sokoban.language.layers import SCALED_PRECISIONS

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Which layers stay in 16 bits by their place in a step.
KEPT = ("none", "last", "ends")

#: Products of a layer in the backward pass: gradients of its input and of its weights.
_GRADIENTS = 2


@dataclass(frozen=True)
class _Scaled:
    """A product that becomes narrow: what it takes, and what quantises for it by what it reads, microseconds."""

    call: CallPrice
    product_us: float
    quantised: Mapping[str, float]


@what_if("fp8")
def fp8(graph: TaskGraph, *, precision: str = "fp8-rowwise", keep: str = "last", device: str = "auto") -> Outcome:
    """Linear layers in eight or four bits, as Transformer Engine and torchao train them.

    Every product of two matrices in 16 bits whose sides are multiples of 16 takes its recorded time by the ratio of
    Roller's library prices of the narrow and of the wide product. Before each of them a kernel quantises what comes in,
    along rows and, for the gradient of the weights, along columns; a forward product has another for its weights. Each
    is launched by the host.

    What stays in 16 bits: attention, batched products, convolutions, norms, element-wise kernels, the update, products
    of other sides, those without recorded sizes, and by ``keep`` the last layer of the step (the head) or the first and
    the last, with their gradients (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Memory stays as it was:
    masters of the weights are kept, and saved activations are not taken to be narrow.

    Args:
        graph: the baseline, built from a trace with recorded sizes, in mixed precision: see ``amp``.
        precision: numbers and scales: fp8-tensorwise (delayed scaling), fp8-rowwise, fp8-block, mxfp8, nvfp4 or
            int8-rowwise.
        keep: layers that stay in 16 bits: ``none``, ``last`` or ``ends``, the first and the last.
        device: the board, for prices; ``auto`` is the one recorded on.

    Raises:
        InputError: there is no such precision, the board has no matrix units for it, or no product can change.
    """
    if precision not in SCALED_PRECISIONS:
        raise InputError("precision", f"there is no {precision!r}", f"use one of {listed(SCALED_PRECISIONS)}")
    if keep not in KEPT:
        raise InputError("keep", f"there is no {keep!r}", f"use one of {listed(KEPT)}")
    spec, stands_in = device_of(graph, device)
    calls = _products(graph, spec)
    able = [call for call in calls if _sizes(call, precision) is not None]
    if not able:
        problem = "no product of two 16-bit matrices with recorded sizes in multiples of 16"
        raise InputError("fp8", problem, "use --pass amp first, or a trace with record_shapes=True")
    kept = _kept(graph, able, keep)
    changed = [_scaled(graph, call, precision, spec) for call in able if int(call.rows[0]) not in kept]
    return Outcome(
        _applied(graph, changed), (*_notes(calls, able, changed, precision, spec), *filter(None, [stands_in]))
    )


def _products(graph: TaskGraph, spec: DeviceSpec) -> list[CallPrice]:
    """Calls of matrix products with a price, in the order of their kernels."""
    wanted = graph.on_gpu & (graph.kind == TaskKind.KERNEL) & (graph.mark == Mark.NONE)
    wanted &= named(graph, lambda name: bool(COMPUTE.search(name)))
    calls = price_of(graph, np.flatnonzero(wanted), spec, "library").calls
    products = [call for call in calls if call.work is not None and call.work.kind == "matrix product"]
    return sorted((call for call in products if call.price_us > 0), key=lambda call: int(call.rows[0]))


def _sizes(call: CallPrice, precision: str) -> tuple[int, int, int] | None:
    """Rows, columns and summands of a product that runs narrow; None of others."""
    parts = narrowed(call.work, precision).parts if call.work is not None else ()
    if len(parts) != 1 or parts[0].data.get("op") != "scaled_matmul":
        return None
    return tuple(parts[0].data[name] for name in ("m", "n", "k"))


def _kept(graph: TaskGraph, able: list[CallPrice], keep: str) -> set[int]:
    """First kernels of the products of the layers that stay in 16 bits."""
    steps: dict[int, list[CallPrice]] = defaultdict(list)
    for call in able:
        steps[int(graph.step[call.main])].append(call)
    kept: set[int] = set()
    for calls in steps.values() if keep != "none" else ():
        backward = [call for call in calls if graph.phase[call.main] == Phase.BACKWARD]
        forward = [call for call in calls if graph.phase[call.main] != Phase.BACKWARD]
        for layer, is_last in [(forward[-1:], True), *([(forward[:1], False)] if keep == "ends" else [])]:
            sides = [_sides(call) for call in layer]
            gradients = [call for call in backward if _sides(call) in sides]
            nearest = gradients[:_GRADIENTS] if is_last else gradients[-_GRADIENTS:]
            kept |= {int(call.rows[0]) for call in (*layer, *nearest)}
    return kept


def _sides(call: CallPrice) -> tuple[int, ...]:
    """Sides of a product in the order of their lengths, which its gradients share."""
    data = call.work.parts[0].data if call.work is not None else {}
    return tuple(sorted(data[name] for name in ("m", "n", "k")))


def _scaled(graph: TaskGraph, call: CallPrice, precision: str, spec: DeviceSpec) -> _Scaled:
    from roller.library.scaled.products import trained_times

    m, n, k = (np.array([float(size)]) for size in _sizes(call, precision) or ())
    times = trained_times(precision, m, n, k, spec)
    quantise_us, narrow_us = float(times.quantise[0]) * 1e6, float(times.product.seconds[0]) * 1e6
    quantised = {"gradients": quantise_us}
    if graph.phase[call.main] != Phase.BACKWARD:
        weights_us = float(trained_times(precision, n, m, k, spec).quantise[0]) * 1e6
        quantised = {"activations": quantise_us, "weights": weights_us}
    return _Scaled(call=call, product_us=call.recorded_us * narrow_us / call.price_us, quantised=quantised)


def _applied(graph: TaskGraph, changed: list[_Scaled]) -> TaskGraph:
    """The graph with narrow products, each behind the kernels that quantise for it."""
    firsts = [int(each.call.rows[0]) for each in changed]
    launches = graph.launch[firsts]
    of_host = graph.duration_us[launches[launches != NONE]]
    launch_us = float(np.median(of_host)) if len(of_host) else 0.0
    for each in changed:
        graph = graph.scaled(each.call.rows, each.product_us / each.call.recorded_us)
    edit = Edit(graph)
    for each, first in zip(changed, firsts, strict=True):
        shared = {"phase": int(graph.phase[first]), "layer": int(graph.layer[first])}
        for name, kernel_us in each.quantised.items():
            task = edit.add(f"quantise {name}", TaskKind.KERNEL, kernel_us, before=first, **shared)
            if graph.launch[first] != NONE:
                before = int(graph.launch[first])
                launch = edit.add("cudaLaunchKernel", TaskKind.CPU, launch_us, before=before, **shared)
                edit.depend(launch, task, Dependency.LAUNCH)
    return edit.apply()


def _notes(
    calls: list[CallPrice], able: list[CallPrice], changed: list[_Scaled], precision: str, spec: DeviceSpec
) -> tuple[str, ...]:
    before = sum(each.call.recorded_us for each in changed) / 1e3
    after = sum(each.product_us for each in changed) / 1e3
    added = sum(sum(each.quantised.values()) for each in changed)
    unable_us = sum(call.recorded_us for call in calls) - sum(call.recorded_us for call in able)
    kept_us = sum(call.recorded_us for call in able) - before * 1e3
    return (
        f"{len(changed)} products of {before:.2f} ms run in {precision} on {spec.title}, in {after:.2f} ms",
        f"kernels that quantise for them added, {added / 1e3:.2f} ms on the GPU",
        f"{len(able) - len(changed)} products of {kept_us / 1e3:.2f} ms stay in 16 bits by their place, "
        f"{len(calls) - len(able)} of {unable_us / 1e3:.2f} ms by their types and sides",
    )
