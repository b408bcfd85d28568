"""`torch.compile` with Roller's backend in place of what was recorded, from a trace alone."""

from __future__ import annotations

import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.operators.pricing import device_of, heavy_rows, price
from daydream.passes import Outcome, what_if
from daydream.passes.kernels.pointwise_fusion import pointwise_fusion
from daydream.passes.kernels.replace_kernel import Change, applied, summary
from hal.support.errors import InputError


@what_if("backend")
def backend(graph: TaskGraph, *, name: str = "roller", device: str = "auto", fuse: bool = True) -> Outcome:
    """Kernels of Roller where they are expected to be faster than the library's, and element-wise kernels fused.

    Every convolution, matrix product and fused attention of the trace is priced twice by its recorded sizes: as the
    library's kernel and as the best that Roller builds. Where Roller's takes less time, the call takes the recorded
    time by the ratio of both prices, so that what the models have in common in error does not count. Runs of
    element-wise kernels become one kernel each, as by the pass ``pointwise-fusion``.

    Assumptions: what follows a product point by point is a kernel of its own, though the backend makes it a part of
    the product's; weights and layouts change nothing else; the call's CPU work stays.

    Args:
        graph: the baseline, built from a trace of a GPU with recorded input sizes.
        name: of the backend, ``roller``.
        device: the board to price for; ``auto`` is the one recorded on.
        fuse: whether element-wise kernels are fused.

    Raises:
        InputError: there is no such backend or board, or the trace has nothing that the backend takes.
    """
    if name != "roller":
        raise InputError("name", f"there is no backend {name!r}", "give roller")
    spec, stands_in = device_of(graph, device)
    rows = heavy_rows(graph)
    if not len(rows):
        problem = "has no convolution or matrix product of recorded sizes on a GPU"
        raise InputError("trace", problem, "predict a processor from code: daydream predict --compile=roller")
    ours, theirs = (price(graph, rows, spec, implementation).calls for implementation in ("best", "library"))
    changes = []
    for call, other in zip(ours, theirs, strict=True):
        if np.isfinite(call.price_us) and np.isfinite(other.price_us) and call.price_us < other.price_us:
            recorded = float(graph.duration_us[call.rows].sum())
            changes.append(Change(call.main, call.rows, recorded * call.price_us / other.price_us, "estimates"))
    notes = [f"{len(changes)} of {len(ours)} convolutions, products and attentions by kernels of Roller"]
    if changes:
        notes.append(summary(graph, changes))
    notes += [stands_in] if stands_in else []
    result = applied(graph, changes)
    if fuse:
        try:
            fused = pointwise_fusion(result)
        except InputError as error:
            notes.append(f"nothing is fused: {error.problem}")
        else:
            result, notes = fused.graph, [*notes, *fused.notes]
    return Outcome(result, tuple(notes))
