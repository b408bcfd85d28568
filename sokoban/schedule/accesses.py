"""How wide a memory access may be: the largest vector that is contiguous, aligned and inside the tensor as a whole.

A misaligned vector access is an error on a GPU, and a vector that straddles the edge of a tensor falls apart into
scalars; both are ruled out here, from the affine indices, before any code exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.kernel.regions import data_dimension
from sokoban.language.expression import Load
from sokoban.schedule.table import Ints
from sokoban.schedule.tile import TileSchedule


def widest_vector(form: KernelForm, tensor: str) -> int:
    """Elements of a 16-byte access; code generation narrows it to what alignment allows."""
    return max(1, VECTOR_BYTES // form.expr.tensor_by_name[tensor].element_bytes)


#: Widest access of any accelerator we generate code for.
VECTOR_BYTES = 16

#: Most elements that arithmetic is vectorised over: TVM's CUDA code for eight half-precision lanes does not compile.
MAX_LANES = 4


def fetch_vector(form: KernelForm, schedule: TileSchedule, load: Load, padding: int = 0) -> int:
    """Elements per access when a block copies the data tile of ``load`` from global to shared memory.

    ``padding`` is the storage padding of the shared tile in elements: the shared side has to stay aligned too.
    """
    if not load.indices:
        return 1
    tensor = form.expr.tensor_by_name[load.tensor]
    dimension = data_dimension(load.indices[-1])
    if dimension.stride != 1 or any(coefficient < 0 for _, coefficient in dimension.terms):
        return 1
    tile = {**schedule.block_of, **schedule.step_of}
    conditions = [dimension.extent({**form.sizes, **tile}), dimension.offset, tensor.shape[-1]]
    conditions += [coefficient * tile[axis] for axis, coefficient in dimension.terms if axis in tile]
    conditions.append(conditions[0] + padding)
    if not schedule.uses_matrix and tensor.element_bytes == 1:
        # TVM has no constants of more than four lanes of bytes; asynchronous copies need none.
        conditions.append(MAX_LANES)
    return _largest(tensor.element_bytes, conditions)


def widest_fetch(form: KernelForm, load: Load, tile: Mapping[str, Ints], padding: Ints) -> Ints:
    """:func:`fetch_vector` of many schedules: ``tile`` has block and step, by axis."""
    if not load.indices:
        return np.ones_like(padding)
    tensor = form.expr.tensor_by_name[load.tensor]
    dimension = data_dimension(load.indices[-1])
    if dimension.stride != 1 or any(coefficient < 0 for _, coefficient in dimension.terms):
        return np.ones_like(padding)
    everything: dict[str, Any] = {**form.sizes, **tile}
    extent = dimension.extent(everything)
    # Widths are powers of two, so that the greatest common divisor is the widest that divides all.
    width = np.gcd(max(1, VECTOR_BYTES // tensor.element_bytes), np.gcd(dimension.offset, tensor.shape[-1]))
    for axis, coefficient in dimension.terms:
        if axis in tile:
            width = np.gcd(width, coefficient * tile[axis])
    return np.gcd(np.gcd(width, extent), extent + padding)


def store_vector(form: KernelForm, schedule: TileSchedule, lanes: int = MAX_LANES) -> int:
    """Elements per access, at most ``lanes``, when a thread writes its adjacent outputs, and reads what the final
    statement needs."""
    axis = form.final.axes[-1]
    output = form.expr.output
    if axis not in schedule.thread_of:
        return 1
    conditions = [schedule.thread_of[axis], output.shape[-1]]
    width_bytes = output.element_bytes
    direct = list(form.final_loads)
    if form.reduction is None:
        direct += [load for load in form.body_loads if load.tensor not in schedule.cached]
    for load in direct:
        tensor = form.expr.tensor_by_name[load.tensor]
        if not load.indices or all(index.coefficient(axis) == 0 for index in load.indices):
            continue
        innermost = load.indices[-1]
        if innermost.coefficient(axis) != 1 or any(index.coefficient(axis) for index in load.indices[:-1]):
            return 1
        width_bytes = max(width_bytes, tensor.element_bytes)
        conditions += [tensor.shape[-1], innermost.offset]
        conditions += [c for other, c in innermost.terms if other != axis]
    return min(lanes, _largest(width_bytes, conditions))


def _largest(element_bytes: int, must_divide: list[int]) -> int:
    width = max(1, VECTOR_BYTES // element_bytes)
    while width > 1 and any(number % width for number in must_divide):
        width //= 2
    return width
