"""Width of a memory access: the largest vector that is contiguous, aligned and inside the tensor as a whole.

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

#: Widest access of any accelerator we generate code for.
VECTOR_BYTES = 16

#: Most elements that arithmetic is vectorised over: TVM's CUDA code for eight half-precision lanes does not compile.
MAX_LANES = 4


def widest_vector(form: KernelForm, tensor: str) -> int:
    """Elements of a 16-byte access; code generation narrows it to what alignment allows."""
    return max(1, VECTOR_BYTES // form.expr.tensor_by_name[tensor].element_bytes)


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
    row = dimension.extent({**form.sizes, **tile})
    must_divide = [row, dimension.offset, tensor.shape[-1], row + padding]
    must_divide += [coefficient * tile[axis] for axis, coefficient in dimension.terms if axis in tile]
    if not schedule.uses_matrix and tensor.element_bytes == 1:
        # TVM has no constants of more than four lanes of bytes; asynchronous copies need none.
        must_divide.append(MAX_LANES)
    return _widest(tensor.element_bytes, must_divide)


def widest_fetch(form: KernelForm, load: Load, tile: Mapping[str, Ints], padding: Ints) -> Ints:
    """Elements per access of the copies of many schedules, as :func:`fetch_vector` has them for one.

    ``tile`` has the elements of block and step by axis, ``padding`` the storage padding in elements; both have an entry
    per schedule.
    """
    if not load.indices:
        return np.ones_like(padding)
    tensor = form.expr.tensor_by_name[load.tensor]
    dimension = data_dimension(load.indices[-1])
    if dimension.stride != 1 or any(coefficient < 0 for _, coefficient in dimension.terms):
        return np.ones_like(padding)
    sizes: dict[str, Any] = {**form.sizes, **tile}
    row = dimension.extent(sizes)
    # Widths are powers of two: the greatest common divisor is the widest that divides all.
    width = np.gcd(max(1, VECTOR_BYTES // tensor.element_bytes), np.gcd(dimension.offset, tensor.shape[-1]))
    for axis, coefficient in dimension.terms:
        if axis in tile:
            width = np.gcd(width, coefficient * tile[axis])
    return np.gcd(np.gcd(width, row), row + padding)


def store_vector(form: KernelForm, schedule: TileSchedule, lanes: int = MAX_LANES) -> int:
    """Elements per access when a thread writes its adjacent outputs and reads what the final statement needs.

    At most ``lanes``; 1 where the outputs are not adjacent, or some operand of the final statement is not.
    """
    axis = form.final.axes[-1]
    output = form.expr.output
    if axis not in schedule.thread_of:
        return 1
    must_divide = [schedule.thread_of[axis], output.shape[-1]]
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
        must_divide += [tensor.shape[-1], innermost.offset]
        must_divide += [coefficient for other, coefficient in innermost.terms if other != axis]
    return min(lanes, _widest(width_bytes, must_divide))


def _widest(element_bytes: int, must_divide: list[int]) -> int:
    """Elements of the widest access whose width divides all of some numbers of elements."""
    width = max(1, VECTOR_BYTES // element_bytes)
    while width > 1 and any(number % width for number in must_divide):
        width //= 2
    return width
