"""Products of warp groups whose tiles are copied in bulk: by the Tensor Memory Accelerator of sm_90, as cuBLAS's are.

One thread starts the copy of a whole tile, which counts its bytes at a barrier in shared memory when they are there; so
a block has a warp group that copies besides those that multiply, every buffer of the pipeline but the one or two that
are multiplied is under way, and copies take neither issue slots nor registers of those who multiply. Blocks of a
*cluster* run beside each other; what they have in common is read from L2 once, half of it by each of two, and lands in
the shared memory of all. Blocks are *persistent*: each computes one tile of the output after another, and the copies
for the next begin while the results of one leave, straight from registers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import WGMMA_OTHER_REGISTERS, MatrixRoles
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import Load, walk
from sokoban.schedule.table import Floats, Ints, ScheduleTable
from sokoban.schedule.tile import COPYING_THREADS, TileSchedule
from sokoban.schedule.warp_groups import ELEMENT_BYTES, GROUP_ROWS, STEP, WIDTHS, group_schedule

#: Buffers of a pipeline; of more than eight nothing more is hidden.
LEAST_STAGES, MOST_STAGES = 2, 8

#: Blocks of a cluster that kernels are written for.
CLUSTERS = (1, 2)

#: Bytes of the barriers of a buffer: one says that it is full, one that it is empty.
BARRIER_BYTES = 16

#: Columns of a tile by warp groups that multiply: with the group that copies they share a unit's registers. (The
#: compiler takes no instruction for more registers than all threads have at the start, 128 with three groups.)
MOST_WIDTH = {1: 256, 2: 256, 3: 192}

#: Threads of the largest block whose groups have registers enough without those that the copying group gives up.
GIVING_THREADS = 2 * COPYING_THREADS

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


def read_share(table: ScheduleTable, load: Load) -> Floats | float:
    """The part of an operand's tile that a block reads from L2 itself: the rest of what the blocks of a cluster have in
    common is read by the others and arrives in its shared memory all the same."""
    roles = table.form.roles
    if roles is None or not table.bulk.any() or load not in (roles.a, roles.b):
        return 1.0
    along_m = table.block[roles.n] >= table.block[roles.m]
    is_common = along_m if load == roles.b else ~along_m
    return 1.0 / np.where(is_common, np.maximum(1, table.cluster), 1)


def clustered_blocks(table: ScheduleTable) -> Ints:
    """Blocks of the launch, or tiles that they compute; those that complete a cluster at an edge are counted."""
    roles = table.form.roles
    if roles is None or not table.bulk.any():
        return table.block_count
    along_m, cluster = table.block[roles.n] >= table.block[roles.m], np.maximum(1, table.cluster)
    clustered = np.where(along_m, table.grid[roles.m], table.grid[roles.n])
    return table.block_count // clustered * (-(-clustered // cluster) * cluster)


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


def bulk_schedules(placed: PlacedForm) -> Iterator[TileSchedule]:
    """Every tile for the operator whose operands can be copied in bulk, but for larger ones than the smallest of which
    more than half would be padding: alone and in clusters, with as deep a pipeline as fits, for one block of a unit and
    for two where these have the registers."""
    form, roles, device = placed.form, placed.warp_group_roles, placed.device
    if roles is None or form_problem(form, roles) is not None:
        return
    for groups, most_width in MOST_WIDTH.items():
        rows = groups * GROUP_ROWS
        for width in WIDTHS:
            fits = rows <= max(GROUP_ROWS, 2 * form.sizes[roles.m]) and width <= max(WIDTHS[0], 2 * form.sizes[roles.n])
            if width > most_width or not fits:
                continue
            for cluster in CLUSTERS:
                clustered = clustered_axis(roles, rows, width)
                if cluster > 1 and form.sizes[clustered] <= (rows if clustered == roles.m else width):
                    continue
                for resident in (1, 2):
                    stages = _deepest(placed, rows, width, resident)
                    if stages < LEAST_STAGES:
                        continue
                    schedule = group_schedule(form, roles, rows, width, stages)
                    yield schedule.with_(cluster=cluster, launched=_launched(schedule, placed, cluster, resident))


def _deepest(placed: PlacedForm, rows: int, width: int, resident: int) -> int:
    """Buffers of the deepest pipeline with which so many blocks share a unit; 0 where they have too few registers."""
    limits = placed.device.limits
    threads = rows // GROUP_ROWS * 128 + COPYING_THREADS
    if resident > 1 and (
        threads > GIVING_THREADS
        or resident * threads * (width // 2 + WGMMA_OTHER_REGISTERS) > limits.registers_per_unit
    ):
        return 0
    most = limits.shared_bytes_per_unit // resident - limits.shared_bytes_reserved_per_block
    stage = (rows + width) * STEP * ELEMENT_BYTES + BARRIER_BYTES
    return min(MOST_STAGES, min(most, limits.shared_bytes_per_block_opt_in) // stage)


def _launched(schedule: TileSchedule, placed: PlacedForm, cluster: int, resident: int) -> int:
    """Blocks of a launch that keep all units busy one tile after another; 0 where there are no more tiles than those."""
    blocks = placed.device.unit_count * resident // cluster * cluster
    return blocks if schedule.grid_blocks(placed.form.sizes) > blocks else 0
