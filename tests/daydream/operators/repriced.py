"""Recorded against predicted durations, layer by layer: how far Roller's models are from a trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.graph.graph import TaskGraph
from daydream.operators.families import algorithm_of
from daydream.operators.part_prices import Implementation
from daydream.operators.pricing import CallPrice, heavy_rows, price
from daydream.trace.trace import NONE, Ints

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class RepricedRow:
    """One layer's operator in one direction, mean over its calls of all full steps.

    Attributes:
        layer: the layer's name; the operator's where the graph knows no layers.
        operator: as Roller names it, or the trace's name where it has no price.
        direction: ``forward``, ``backward``, ``backward data`` or ``backward weights``.
        calls: per step.
        recorded_us, priced_us: of one call; the price is NaN where there is none.
        algorithm: one of :data:`daydream.operators.families.FAMILIES`, by the recorded kernels.
        kernel: the recorded main kernel, shortened.
        assumed: what the prediction supposes to run.
        reason: why there is no price.
    """

    layer: str
    operator: str
    direction: str
    calls: float
    recorded_us: float
    priced_us: float
    algorithm: str
    kernel: str
    assumed: str
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over recorded."""
        return self.priced_us / self.recorded_us if self.recorded_us > 0 else np.nan


def repriced_table(
    graph: TaskGraph,
    device: DeviceSpec,
    implementation: Implementation = "library",
    *,
    search: str = "roller",
    rows: Ints | None = None,
) -> list[RepricedRow]:
    """Recorded and predicted duration of every convolution and matrix product, in order of first execution.

    Tasks outside full steps do not count, unless the graph has none. `rows` asks for other GPU tasks.

    Raises:
        InputError: as :func:`daydream.operators.pricing.price`.
    """
    asked = heavy_rows(graph) if rows is None else rows
    full = np.array([step.full for step in graph.steps] + [False], np.bool_)
    steps = max(int(full.sum()), 1)
    if full.any():
        asked = asked[full[graph.step[asked]]]
    grouped: dict[tuple[str, str, str], list[CallPrice]] = {}
    for call in sorted(price(graph, asked, device, implementation, search=search).calls, key=lambda c: int(c.main)):
        grouped.setdefault(_key(graph, call), []).append(call)
    return [_row(graph, key, calls, steps) for key, calls in grouped.items()]


def _key(graph: TaskGraph, call: CallPrice) -> tuple[str, str, str]:
    layer = int(graph.layer[call.main])
    name = graph.trace.text(call.operator) if graph.trace is not None and call.operator != NONE else ""
    direction = call.work.direction if call.work is not None else ""
    return graph.layers[layer] if layer != NONE else name, call.text or name, direction


def _row(graph: TaskGraph, key: tuple[str, str, str], calls: Sequence[CallPrice], steps: int) -> RepricedRow:
    algorithms = Counter(algorithm_of([graph.text(row) for row in call.rows.tolist()]) for call in calls)
    kernels = Counter(short_name(graph.text(call.main)) for call in calls)
    layer, operator, direction = key
    return RepricedRow(
        layer=layer,
        operator=operator,
        direction=direction,
        calls=len(calls) / steps,
        recorded_us=float(np.mean([call.recorded_us for call in calls])),
        priced_us=float(np.mean([call.price_us for call in calls])),
        algorithm=algorithms.most_common(1)[0][0],
        kernel=kernels.most_common(1)[0][0],
        assumed=calls[0].kernel,
        reason=calls[0].reason,
    )


def short_name(kernel: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    # CUTLASS has one kernel, whose template argument says which.
    plain = re.sub(r".*cutlass::Kernel<", "", kernel.replace("(anonymous namespace)::", ""))
    words = re.sub(r"[<(>].*", "", plain).split()
    return words[-1].rpartition("::")[2] if words else kernel


class Total(NamedTuple):
    """Recorded and predicted milliseconds of a step, and the geometric mean of predicted over recorded."""

    recorded_ms: float
    predicted_ms: float
    ratio: float


def totals(rows: Sequence[RepricedRow]) -> dict[str, Total]:
    """The rows of each direction put together.

    Matrix products count as ``matrix product``; rows without price are left out.
    """
    by_direction: dict[str, Total] = {}
    for direction in dict.fromkeys(_kind(row) for row in rows):
        priced = [row for row in rows if _kind(row) == direction and np.isfinite(row.priced_us) and row.recorded_us > 0]
        if priced:
            weights = np.array([row.calls for row in priced])
            logs = np.log([row.ratio for row in priced])
            recorded = sum(row.calls * row.recorded_us for row in priced) / 1e3
            predicted = sum(row.calls * row.priced_us for row in priced) / 1e3
            mean = float(np.exp(np.average(logs, weights=weights)))
            by_direction[direction] = Total(recorded, predicted, mean)
    return by_direction


def _kind(row: RepricedRow) -> str:
    return "matrix product" if row.operator.startswith(("matmul", "batch_matmul")) else row.direction
