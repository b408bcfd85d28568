"""The work of row kernels on vectors: softmax, layer norm, sums along what is contiguous (see
`sokoban.model.cpu.work`).

A row is walked once for every reduction and once for the results. Where its elements are neighbours, the lanes share
it, several vectors of partial results wide, which are folded into one number at the end; where rows are neighbours,
every lane has one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hal.spec.parts import MemoryLayer
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import value_instructions
from sokoban.language.expression import Load, Statement, Value, loads
from sokoban.model.cpu.traffic import USABLE, WRITES
from sokoban.model.cpu.work import (
    FUNCTION_INSTRUCTIONS,
    GATHERED_INSTRUCTIONS,
    GUARD_INSTRUCTIONS,
    TURN_INSTRUCTIONS,
    Work,
)
from sokoban.schedule.cpu_tiles import PARTIAL_SUMS, lane_axis
from sokoban.schedule.table import Floats

#: Turns that folding them waits for, one after the other: pairs of vectors, then pairs of lanes.
FOLD_TURNS = 10.0


def row_work(form: KernelForm, lanes: int, count: int) -> Work:
    """The work of a kernel by rows, which is the same for all its ``count`` schedules."""
    along = lane_axis(form)
    rows = math.prod(form.sizes[axis] for axis in form.spatial)
    if along:
        size = form.sizes[along]
        rows = rows // size * -(-size // lanes)
    arithmetic = accesses = others = turns = 0.0
    walks: list[tuple[Value, Sequence[str], bool]] = [
        (statement.value, _reduced(statement), True) for statement in form.reductions
    ]
    walks.append((form.final.value, form.columns, False))
    for value, axes, reduces in walks:
        elements = math.prod(form.sizes[axis] for axis in axes)
        last = form.sizes[axes[-1]] if axes else 1
        vectors = float(elements) if along or not axes else elements // last * math.ceil(last / lanes)
        # What is the same along a row is computed once.
        cost = value_instructions(value, axes or None, FUNCTION_INSTRUCTIONS)
        requests, more = _reads(form, value, along or (axes[-1] if axes else ""), lanes)
        arithmetic += vectors * max(1.0, cost)
        accesses += vectors * (requests + (0.0 if reduces else 1.0))
        others += vectors * (more + TURN_INSTRUCTIONS / (1 if along else PARTIAL_SUMS))
        turns += vectors if along and reduces else vectors / PARTIAL_SUMS
        if reduces and not along:
            turns += FOLD_TURNS
            others += 2.0 * lanes

    def of_kernel(per_row: float) -> Floats:
        return np.full(count, rows * per_row)

    return Work(
        arithmetic=of_kernel(arithmetic),
        accesses=of_kernel(accesses),
        instructions=of_kernel(arithmetic + accesses + others),
        chain_turns=of_kernel(turns),
    )


def _reduced(statement: Statement) -> tuple[str, ...]:
    """The axes of a reduction statement."""
    assert statement.reduction is not None
    return statement.reduction.axes


def _reads(form: KernelForm, value: Value, along: str, lanes: int) -> tuple[float, float]:
    """Requests per vector of elements along an axis, and instructions besides."""
    produced = {statement.tensor for statement in form.reductions}
    requests = others = 0.0
    for load in loads(value):
        used = {axis for index in load.indices for axis in index.axes}
        if load.tensor in produced or along not in used:
            continue
        is_contiguous = load.indices[-1].coefficient(along) in (1, -1) and not any(
            index.coefficient(along) for index in load.indices[:-1]
        )
        if is_contiguous and load.pad is None:
            requests += 1.0
            continue
        requests += lanes
        if lanes > 1:
            others += lanes * (GATHERED_INSTRUCTIONS - 1.0 + (GUARD_INSTRUCTIONS if load.pad else 0.0))
    return requests, others


def row_bytes(form: KernelForm, layer: MemoryLayer, writes: float = WRITES) -> float:
    """Bytes that come into a cache, and go out of it, during the whole kernel: rows once, and once more for every
    further walk where a row does not stay in the cache. What is written counts ``writes`` times."""
    produced = {statement.tensor for statement in form.reductions}
    tensors = form.expr.tensor_by_name
    rows = math.prod(form.sizes[axis] for axis in form.spatial)
    walks: dict[Load, int] = {}
    for value in (*(statement.value for statement in form.reductions), form.final.value):
        for load in loads(value):
            if load.tensor not in produced and load.indices:
                walks[load] = walks.get(load, 0) + 1
    output_bytes = form.expr.output.size_bytes
    bytes_of_row = sum(tensors[load.tensor].size_bytes for load in walks) / max(1, rows) + output_bytes / max(1, rows)
    stays = bytes_of_row <= USABLE * layer.capacity_bytes
    read_bytes = sum(tensors[load.tensor].size_bytes * (1 if stays else count) for load, count in walks.items())
    return read_bytes + writes * output_bytes
