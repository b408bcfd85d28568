"""Tasks again: copies of a stretch of a step, with their launches and what ties them to each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from daydream.graph.edit import Edit
from daydream.trace.trace import NONE, Ints


def copied(
    edit: Edit, rows: Ints, before: Mapping[int, int], host: int = NONE, phase: int | None = None
) -> dict[int, int]:
    """Adds copies of tasks in the order in which they stand, and of the dependencies among them.

    Args:
        edit: gets the tasks.
        rows: of its graph, in row order.
        before: for each thread of these tasks the row that their copies stand before.
        host: the thread that copies of CPU tasks run on; -1 is each one's own.
        phase: of the copies; None keeps each one's.

    Returns:
        For every row the id of its copy.
    """
    graph = edit.graph
    made: dict[int, int] = {}
    for row in rows.tolist():
        thread = int(graph.thread[row])
        made[row] = edit.add(
            graph.text(row),
            graph.kind[row],
            float(graph.duration_us[row]),
            before=before[thread],
            thread=host if host != NONE and graph.on_cpu[row] else thread,
            gap_us=float(graph.gap_us[row]),
            phase=int(graph.phase[row]) if phase is None else phase,
            layer=int(graph.layer[row]),
            step=int(graph.step[row]),
            operator=int(graph.operator[row]),
            bytes=float(graph.bytes[row]),
            priority=int(graph.priority[row]),
        )
    chosen = np.zeros(len(graph), np.bool_)
    chosen[rows] = True
    for edge in np.flatnonzero(chosen[graph.edge_source] & chosen[graph.edge_target]).tolist():
        source, target = int(graph.edge_source[edge]), int(graph.edge_target[edge])
        edit.depend(made[source], made[target], graph.edge_kind[edge], float(graph.edge_lag_us[edge]))
    return made
