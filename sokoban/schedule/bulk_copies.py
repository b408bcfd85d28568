"""Products of warp groups whose tiles are copied in bulk: by the Tensor Memory Accelerator of sm_90, as cuBLAS's are.

One thread starts the copy of a whole tile, which counts its bytes at a barrier in shared memory when they are there; so
a block has a warp group that copies besides those that multiply, every buffer of the pipeline but the one or two that
are multiplied is under way, and copies take neither issue slots nor registers of those who multiply. Blocks of a
*cluster* run side by side; what they have in common is read from L2 once, half of it by each of two, and lands in
the shared memory of all. Blocks are *persistent*: each computes one tile of the output after another, and the copies
for the next begin while the results of one leave, straight from registers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import WGMMA_OTHER_REGISTERS, MatrixRoles
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import AffineIndex, GatheredIndex, Load, walk
from sokoban.schedule.table import Floats, Ints, ScheduleTable
from sokoban.schedule.tile import COPYING_THREADS, TileSchedule
from sokoban.schedule.warp_groups import ELEMENT_BYTES, GROUP_ROWS, PANEL_BYTES, group_schedule

#: Buffers of a pipeline; of more than eight nothing more is hidden.
LEAST_STAGES, MOST_STAGES = 2, 8

#: Blocks of a cluster that kernels are written for.
CLUSTERS = (1, 2, 4)

#: Bytes of the barriers of a buffer: one says that it is full, one that it is empty.
BARRIER_BYTES = 16

#: Most pairs of units of a GPC (NVIDIA H100 Tensor Core GPU Architecture, 2022: nine TPCs of two SMs).
GPC_PAIRS = 9

#: Largest cluster whose number that runs at once is the same on every chip of a board: larger ones leave the order of
#: tiles to the hardware, as a persistent cluster that had to wait for another to end would compute its tiles after it.
MOST_PERSISTENT = 2

#: Columns of a tile by warp groups that multiply: with the group that copies they share a unit's registers. (The
#: compiler takes no instruction for more registers than all threads have at the start, 128 with three groups.)
MOST_WIDTH = {1: 256, 2: 256, 3: 192}

#: The same where threads have the sums of a step besides those of all steps: with the registers of addresses both sets
#: are what a thread that multiplies gets from the one that copies (NVRTC 12.9 spills none).
MOST_SCALED_WIDTH = {1: 192, 2: 192, 3: 128}

#: Threads of the largest block whose groups have registers enough without those that the copying group gives up.
GIVING_THREADS = 2 * COPYING_THREADS

#: Columns of a tile. A panel has 64 of them where B is turned, which takes elements of 16 bits, and then only whole
#: panels are copied.
BULK_WIDTHS = (64, 96, 128, 160, 192, 224, 256)
PANEL = PANEL_BYTES // ELEMENT_BYTES

#: Dimensions of a tensor map (CUDA driver API, ``cuTensorMapEncodeTiled``); one is no matrix.
LEAST_RANK, MOST_RANK = 2, 5

#: Rows of a tensor are multiples of so many bytes.
ROW_BYTES = 16

#: Element types of results, and of what else the final statement reads.
_DTYPES = ("float16", "bfloat16", "float32", "int32")


def cluster_shape(cluster: int, rows: int, columns: int) -> tuple[int, int]:
    """Blocks of a cluster along m and along n, for tiles of ``rows`` by ``columns``. Those along m have B's tile in
    common, those along n A's: of two blocks the larger of both, of four both.

    >>> cluster_shape(2, rows=128, columns=256), cluster_shape(2, rows=192, columns=128), cluster_shape(4, 128, 256)
    ((2, 1), (1, 2), (2, 2))
    """
    if cluster == 2:
        return (2, 1) if columns >= rows else (1, 2)
    return (2, 2) if cluster == 4 else (1, 1)


def _cluster_shapes(table: ScheduleTable, roles: MatrixRoles) -> tuple[Ints, Ints]:
    """:func:`cluster_shape` of every schedule."""
    along_m = table.block[roles.n] >= table.block[roles.m]
    two, four = table.cluster == 2, table.cluster == 4
    return 1 + ((two & along_m) | four), 1 + ((two & ~along_m) | four)


def units_of_clusters(units: int, cluster: int) -> int:
    """Units on which clusters can run at the same time. All of a cluster is within one GPC; what a GPC has beyond whole
    clusters gets none. GPCs have :data:`GPC_PAIRS` pairs of units at most, and here as many as each other, but for one
    pair: which of them a chip lacks is not published.

    >>> [units_of_clusters(132, cluster) for cluster in (1, 2, 4)]
    [132, 132, 128]
    """
    if cluster <= 2:
        return units
    pairs = units // 2
    count = -(-pairs // GPC_PAIRS)
    sizes = [pairs // count + (number < pairs % count) for number in range(count)]
    return sum(2 * size // cluster * cluster for size in sizes)


def read_share(table: ScheduleTable, load: Load) -> Floats | float:
    """The part of an operand's tile that a block reads from L2 itself: the rest of what the blocks of a cluster have in
    common is read by the others and arrives in its shared memory all the same."""
    roles = table.form.roles
    if roles is None or not table.bulk.any() or load not in (roles.a, roles.b):
        return 1.0
    down, across = _cluster_shapes(table, roles)
    return 1.0 / (across if load == roles.a else down)


def clustered_blocks(table: ScheduleTable) -> Ints:
    """Blocks of the launch, or tiles that they compute; those that complete a cluster at an edge are counted."""
    roles = table.form.roles
    if roles is None or not table.bulk.any():
        return table.block_count
    blocks = table.block_count
    for axis, along in zip((roles.m, roles.across), _cluster_shapes(table, roles), strict=True):
        blocks = blocks // table.grid[axis] * (-(-table.grid[axis] // along) * along)
    return blocks


def form_problem(form: KernelForm, roles: MatrixRoles) -> str | None:
    """Why the tiles of an operator cannot be copied in bulk, whatever they are; None where they can.

    A tensor map is of a tensor as it lies in memory: every dimension is an axis, and the depth ends where the axis
    does, since what the hardware fills with zeros is what lies outside of the tensor. Rows need no zeros behind them:
    no result is made of those. A depth that starts elsewhere in every step
    (:func:`sokoban.kernel.matrix.product_roles`) needs none either: the other operand has them.
    """
    for load in (roles.a, roles.b):
        tensor = form.expr.tensor_by_name[load.tensor]
        if tensor.element_bytes != ELEMENT_BYTES and roles.is_turned(load):
            bits = 8 * tensor.element_bytes
            return f"{tensor.name} has its depth down the rows: elements of {bits} bits are multiplied along them"
        if any(index.coefficient(axis) for index in _gathered(load) for axis in (roles.m, roles.n, roles.k)):
            return f"rows of {tensor.name} lie at places that are read"
        axes = [dimension_axis(index, roles) for index in load.indices]
        if None in axes or len(set(axes)) < len(axes):
            return f"a dimension of {tensor.name} is no axis of its own"
        for index, axis, extent in zip(load.indices, axes, tensor.shape, strict=True):
            if index.is_plain_axis and axis == roles.k and extent != form.sizes[axis]:
                return f"{tensor.name} extends beyond what is read of it"
        if not LEAST_RANK <= len(axes) <= MOST_RANK:
            return f"{tensor.name} has {len(axes)} dimensions, a tensor map {LEAST_RANK} to {MOST_RANK}"
        if tensor.shape[-1] * tensor.element_bytes % ROW_BYTES:
            return "rows of an operand are no multiples of 16 bytes"
    if form.expr.final_dtype not in ("float32", "int32"):
        return f"results of {form.expr.final_dtype}"
    return _final_problem(form, roles)


def _gathered(load: Load) -> list[GatheredIndex]:
    return [index for index in load.indices if isinstance(index, GatheredIndex)]


def dimension_axis(index: AffineIndex, roles: MatrixRoles) -> str | None:
    """The axis along which tiles lie in a dimension of an operand; None where there is none, or several."""
    if index.is_plain_axis or (isinstance(index, GatheredIndex) and len(index.axes) == 1):
        return index.axes[0]
    return next((axis for axis in (roles.m, roles.n, roles.k) if index.coefficient(axis)), None)


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
    if form.expr.final_dtype == "int32" and not isinstance(form.final.value, Load):
        return "the final statement computes with integers"
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
        return f"clusters of {schedule.cluster} blocks: kernels have {', '.join(map(str, CLUSTERS))}"
    if not LEAST_STAGES <= schedule.stages <= MOST_STAGES:
        return f"{schedule.stages} pipeline stages: bulk copies take {LEAST_STAGES} to {MOST_STAGES}"
    if schedule.launched % schedule.cluster:
        return f"{schedule.launched} blocks are no clusters of {schedule.cluster}"
    groups, width = schedule.block_of[roles.m] // GROUP_ROWS, schedule.block_of[roles.n]
    if roles.is_turned(roles.b) and width % PANEL:
        return f"block {width} of axis {roles.n}: rows of B are copied by {PANEL} columns"
    if width > most_widths(roles).get(groups, 0):
        return f"{groups} warp groups of {width} columns have too few registers"
    return None


def bulk_schedules(placed: PlacedForm) -> Iterator[TileSchedule]:
    """Every tile for the operator whose operands can be copied in bulk, but for larger ones than the smallest of which
    more than half would be padding: alone and in clusters, with as deep a pipeline as fits, for one block of a unit and
    for two where these have the registers."""
    form, roles = placed.form, placed.bulk_roles
    if roles is None or form_problem(form, roles) is not None:
        return
    for groups, most_width in most_widths(roles).items():
        rows = groups * GROUP_ROWS
        for width in BULK_WIDTHS:
            most_rows, most_columns = (max(GROUP_ROWS, 2 * form.sizes[axis]) for axis in (roles.m, roles.n))
            if width > most_width or (roles.is_turned(roles.b) and width % PANEL):
                continue
            if rows > most_rows or width > most_columns:
                continue
            for cluster in CLUSTERS:
                down, across = cluster_shape(cluster, rows, width)
                columns = width if roles.across == roles.n else 1
                if form.sizes[roles.m] <= rows * (down - 1) or form.sizes[roles.across] <= columns * (across - 1):
                    continue
                for resident in (1, 2):
                    stages = _deepest(placed, rows, width, resident)
                    if stages < LEAST_STAGES:
                        continue
                    schedule = group_schedule(form, roles, rows, width, stages)
                    together = units_of_clusters(placed.device.unit_count, cluster) * resident // cluster * cluster
                    tiles = schedule.grid_blocks(form.sizes)
                    yield schedule.with_(
                        cluster=cluster,
                        launched=together if tiles > together and cluster <= MOST_PERSISTENT else 0,
                        raster=_band(min(together, tiles), rows, width),
                    )


def most_widths(roles: MatrixRoles) -> Mapping[int, int]:
    """Most columns of a tile by warp groups that multiply."""
    return MOST_SCALED_WIDTH if roles.scales else MOST_WIDTH


def _deepest(placed: PlacedForm, rows: int, width: int, resident: int) -> int:
    """Buffers of the deepest pipeline with which so many blocks share a unit; 0 where they have too few registers."""
    limits, sums = placed.device.limits, width // 2 * placed.form.sum_sets
    threads = rows // GROUP_ROWS * 128 + COPYING_THREADS
    if resident > 1 and (
        threads > GIVING_THREADS or resident * threads * (sums + WGMMA_OTHER_REGISTERS) > limits.registers_per_unit
    ):
        return 0
    most = limits.shared_bytes_per_unit // resident - limits.shared_bytes_reserved_per_block
    stage = (rows + width) * PANEL_BYTES + BARRIER_BYTES
    return min(MOST_STAGES, min(most, limits.shared_bytes_per_block_opt_in) // stage)


def _band(blocks: int, rows: int, columns: int) -> int:
    """Adjacent tiles of a band, so that the blocks at work cover about as many rows as columns
    (:func:`sokoban.search.bands.bands`); a power of two."""
    return 2 ** round(math.log2(max(1.0, math.sqrt(blocks * rows / columns))))
