"""Tasks of a step at a smaller batch: by the library's models where they know an operator, else by bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daydream.graph.graph import Mark, TaskGraph, TaskKind
from daydream.operators.part_prices import part_key, part_prices
from daydream.operators.pricing import describe_calls, device_of
from daydream.operators.rules import VIEWS
from daydream.operators.work import Moved, Work, WorkPart
from daydream.passes.basis.gradients import find_gradients
from daydream.trace.trace import Floats, Ints
from hal.support.errors import InputError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class SmallerTasks:
    """Durations and gaps of tasks at a part of the batch, and how many of them a model gave."""

    duration_us: Floats
    gap_us: Floats
    priced: int


def smaller(graph: TaskGraph, rows: Ints, parts: int) -> SmallerTasks:
    """Durations of these tasks at a batch `parts` times as small.

    A GPU task whose call the library's models price at both sizes takes recorded time x price there / price here. Of
    any other, and of CPU tasks that compute, what goes beyond a task without work shrinks with the batch: beyond the
    shortest kernel, or the median operator of the host that makes a view. Host tasks of a graph whose work is on a GPU
    keep their time.
    """
    durations, gaps = graph.duration_us[rows].copy(), graph.gap_us[rows].copy()
    on_gpu = graph.on_gpu[rows]
    if on_gpu.any():
        kernels = durations[on_gpu & (durations > 0)]
        least = float(kernels.min()) if len(kernels) else 0.0
        durations[on_gpu] = _beyond(durations[on_gpu], least, parts)
        priced, ratio = _priced(graph, rows[on_gpu], parts)
        places = np.flatnonzero(on_gpu)[priced]
        durations[places] = graph.duration_us[rows[places]] * ratio
        return SmallerTasks(durations, gaps, len(places))
    # What an operator computes behind the last one that it calls stands in the gap.
    total_us = durations + gaps
    views = np.array([text.rpartition("::")[2] in VIEWS for text in graph.names], np.bool_)[graph.name[rows]]
    least = float(np.median(total_us[views])) if views.any() else 0.0
    factor = np.divide(_beyond(total_us, least, parts), total_us, out=np.ones(len(total_us)), where=total_us > 0)
    return SmallerTasks(durations * factor, gaps * factor, 0)


def _beyond(duration_us: Floats, least_us: float, parts: int) -> Floats:
    """Durations of which what goes beyond `least_us` is divided.

    >>> _beyond(np.array([1.0, 2.0, 10.0]), 2.0, 4).tolist()
    [1.0, 2.0, 4.0]
    """
    fixed = np.minimum(duration_us, least_us)
    return np.asarray(fixed + (duration_us - fixed) / parts, np.float64)


def _priced(graph: TaskGraph, rows: Ints, parts: int) -> tuple[Ints, Floats]:
    """Positions among the rows of tasks that the models price at both sizes, and the ratio of both prices."""
    nothing = np.empty(0, np.int64), np.empty(0)
    if graph.trace is None or not len(rows):
        return nothing
    try:
        board, _ = device_of(graph)
        calls = describe_calls(graph, rows, board)
        weights = _weight_elements(graph)
        works = {id(call.work): call.work for call in calls.calls if call.work is not None}
        less = {key: with_batch(work, parts, weights) for key, work in works.items()}
        prices = part_prices([*works.values(), *less.values()], board, "library")
    except InputError:
        return nothing
    ratios = {key: _price(less[key], prices) / _price(work, prices) for key, work in works.items()}
    ratio = np.array([ratios.get(id(call.work), np.nan) for call in calls.calls] or [np.nan])[calls.call]
    # A model that gives a smaller batch more time knows another algorithm there, and no more.
    places = np.flatnonzero(np.isfinite(ratio) & (graph.kind[rows] != TaskKind.COMMUNICATION))
    places = places[graph.mark[rows[places]] == Mark.NONE]
    return places, np.minimum(ratio[places], 1.0)


def _price(work: Work, prices: Any) -> float:
    priced = [prices[part_key(part)] for part in work.parts]
    return sum(each.microseconds * part.times for each, part in zip(priced, work.parts, strict=True)) or float("nan")


def _weight_elements(graph: TaskGraph) -> frozenset[int]:
    """Elements of the weights that have gradients."""
    try:
        gradients = find_gradients(graph)
    except InputError:
        return frozenset()
    sizes = [gradient.bytes for gradient in gradients.steps[gradients.largest_step]]
    return frozenset(int(size) // width for size in sizes for width in (2, 4))


def with_batch(work: Work, parts: int, weights: frozenset[int] = frozenset()) -> Work:
    """An operator's work at a batch `parts` times as small.

    Args:
        work: at the whole batch.
        parts: by what the batch is divided.
        weights: sizes of weights, in elements, which tell the batch of a matrix product from its other sides.
    """
    return replace(
        work,
        parts=tuple(_smaller_part(part, parts, weights) for part in work.parts),
        flops=work.flops / parts,
        bytes=work.bytes / parts,
    )


def _smaller_part(part: WorkPart, parts: int, weights: frozenset[int]) -> WorkPart:
    data, moved = part.data, part.moved
    if data:
        side = _batch_side(data, weights)
        value = data.get(side)
        if isinstance(value, int):
            data = {**data, side: max(value // parts, 1)}
        elif isinstance(value, list) and value:
            data = {**data, side: [max(value[0] // parts, 1), *value[1:]]}
    return replace(part, data=data, moved=_smaller_stream(moved, parts) if moved is not None else None)


def _smaller_stream(moved: Moved, parts: int) -> Moved:
    return replace(
        moved,
        bytes=moved.bytes / parts,
        outputs=max(moved.outputs / parts, 1.0),
        again=moved.again / parts,
        between=moved.between / parts,
        flops=moved.flops / parts,
    )


def _batch_side(data: dict[str, Any], weights: frozenset[int]) -> str:
    """The field of an operator that grows with the batch.

    >>> _batch_side({"op": "matmul", "m": 256, "n": 10, "k": 64}, frozenset({640}))
    'm'
    >>> _batch_side({"op": "matmul", "m": 10, "n": 64, "k": 256}, frozenset({640}))
    'k'
    """
    if data.get("op") == "matmul":
        sides = {"m": data["k"] * data["n"], "n": data["m"] * data["k"], "k": data["m"] * data["n"]}
        return next((side for side, others in sides.items() if others in weights), "m")
    return next((side for side in ("b", "n", "shape") if side in data), "")
