"""Products of warp groups whose tiles are copied in bulk: by the Tensor Memory Accelerator of sm_90, as cuBLAS's are.

One thread starts the copy of a whole tile, which counts its bytes at a barrier in shared memory when they are there; so
a block has a warp group that copies besides those that multiply, every buffer of the pipeline but the one or two that
are multiplied is under way, and copies take neither issue slots nor registers of those who multiply. Blocks of a
*cluster* run beside each other; what they have in common is read from L2 once, half of it by each of two, and lands in
the shared memory of all. Blocks are *persistent*: each computes one tile of the output after another, and the copies
for the next begin while the results of one leave, straight from registers.
"""

from __future__ import annotations

from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import MatrixRoles
from sokoban.language.expression import Load, walk
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import GROUP_ROWS

#: Buffers of a pipeline; of more than eight nothing more is hidden.
LEAST_STAGES, MOST_STAGES = 2, 8

#: Blocks of a cluster that kernels are written for.
CLUSTERS = (1, 2)

#: Bytes of the barriers of a buffer: one says that it is full, one that it is empty.
BARRIER_BYTES = 16

#: Columns of a tile by warp groups that multiply: with the group that copies they share a unit's registers. (The
#: compiler takes no instruction for more registers than all threads have at the start, 128 with three groups.)
MOST_WIDTH = {1: 256, 2: 256, 3: 192}

#: Dimensions of a tensor map (CUDA driver API, ``cuTensorMapEncodeTiled``); one is no matrix.
LEAST_RANK, MOST_RANK = 2, 5

#: Rows of a tensor are multiples of so many bytes.
ROW_BYTES = 16

#: Element types of results, and of what else the final statement reads.
_DTYPES = ("float16", "bfloat16", "float32")


def clustered_axis(roles: MatrixRoles, rows: int, columns: int) -> str:
    """The axis along which the blocks of a cluster lie, for tiles of ``rows`` by ``columns``: they have the larger
    operand's tile in common, B's where both are as large."""
    return roles.m if columns >= rows else roles.n


def shared_operand(roles: MatrixRoles, schedule: TileSchedule) -> Load | None:
    """The operand whose tile the blocks of a cluster have in common; None where blocks run alone."""
    if schedule.cluster < 2:
        return None
    axis = clustered_axis(roles, schedule.block_of[roles.m], schedule.block_of[roles.n])
    return roles.b if axis == roles.m else roles.a


def form_problem(form: KernelForm, roles: MatrixRoles) -> str | None:
    """Why the tiles of an operator cannot be copied in bulk, whatever they are; None where they can.

    A tensor map is of a tensor as it lies in memory: every dimension is an axis, and ends where the axis does, since
    what the hardware fills with zeros is what lies outside of the tensor.
    """
    for load in (roles.a, roles.b):
        tensor = form.expr.tensor_by_name[load.tensor]
        axes = [index.axes[0] if index.is_plain_axis else "" for index in load.indices]
        if "" in axes or len(set(axes)) < len(axes):
            return f"a dimension of {tensor.name} is no axis of its own"
        if tensor.shape != tuple(form.sizes[axis] for axis in axes):
            return f"{tensor.name} extends beyond what is read of it"
        if not LEAST_RANK <= len(axes) <= MOST_RANK:
            return f"{tensor.name} has {len(axes)} dimensions, a tensor map {LEAST_RANK} to {MOST_RANK}"
        if tensor.shape[-1] * tensor.element_bytes % ROW_BYTES:
            return "rows of an operand are no multiples of 16 bytes"
    if form.expr.final_dtype != "float32":
        return f"results of {form.expr.final_dtype}"
    return _final_problem(form, roles)


def _final_problem(form: KernelForm, roles: MatrixRoles) -> str | None:
    """Why results cannot leave straight from registers; None where they can."""
    for load in form.final_loads:
        if load.tensor in (roles.a.tensor, roles.b.tensor):
            return f"{load.tensor} is read again by the final statement"
        if load.pad is not None:
            return f"{load.tensor} is padded"
    tensors = [form.expr.output, *(form.expr.tensor_by_name[load.tensor] for load in form.final_loads)]
    other = next((tensor for tensor in tensors if tensor.dtype not in _DTYPES), None)
    if other is not None:
        return f"{other.name} is of {other.dtype}"
    again = [
        load for load in walk(form.final.value) if isinstance(load, Load) and load.tensor == form.reductions[0].tensor
    ]
    return None if len(set(again)) == 1 else "the final statement has several results of the product"


def schedule_problem(form: KernelForm, roles: MatrixRoles, schedule: TileSchedule) -> str | None:
    """Why the tiles of a schedule by warp groups cannot be copied in bulk; None where they can."""
    problem = form_problem(form, roles)
    if problem is not None:
        return problem
    if schedule.cluster not in CLUSTERS:
        return f"clusters of {schedule.cluster} blocks: kernels have {' or '.join(map(str, CLUSTERS))}"
    if not LEAST_STAGES <= schedule.stages <= MOST_STAGES:
        return f"{schedule.stages} pipeline stages: bulk copies take {LEAST_STAGES} to {MOST_STAGES}"
    if schedule.launched % schedule.cluster:
        return f"{schedule.launched} blocks are no clusters of {schedule.cluster}"
    groups, width = schedule.block_of[roles.m] // GROUP_ROWS, schedule.block_of[roles.n]
    if width > MOST_WIDTH.get(groups, 0):
        return f"{groups} warp groups of {width} columns have too few registers"
    return None
