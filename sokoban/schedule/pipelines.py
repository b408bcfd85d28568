"""Variants of schedules that stage every operand: tiles turned, bodies unrolled, steps fetched ahead.

A variant changes what code generation makes of a tile, not its sizes, and is faster nearly always; so variants are
proposed for the tiles that rank best rather than searched together with the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import storage_order
from sokoban.schedule.table import Bools, Ints, ScheduleTable

#: Multiply-adds of one unrolled body: a window of 3x3 for 64 sums, 10 KiB of code with all that a step needs besides,
#: which the first instruction cache holds (12 KiB since Volta).
BODY_STATEMENTS = 576

#: Oldest NVIDIA devices with asynchronous copies, as a compute capability, and the fewest bytes that one takes.
COPY_CAPABILITY = (8, 0)
LEAST_COPY_BYTES = 4

#: Buffers of pipelines that copy past the registers.
ASYNCHRONOUS_STAGES = (2, 3, 4)

#: Shortest steps worth a barrier, in points of the reduction.
SHORTEST_STEP = 4


def stages_operands(form: KernelForm) -> bool:
    """True if the operands of an operator are read so often that schedules may stage all of them."""
    has_tiles = all([load.indices for load in form.body_loads]) and not form.scattered_loads
    return form.is_tile and form.reduction is not None and has_tiles


def fully_staged(table: ScheduleTable) -> Bools:
    """Schedules by multiply-adds that stage all operands of a reduction whose threads work alone."""
    form = table.form
    if not stages_operands(form) or not form.body_loads:
        return np.zeros(table.count, dtype=bool)
    staged: Bools = table.reduce_threads == 1
    if table.has_warp_tiles:
        staged &= ~table.warp_tile
    for load in form.body_loads:
        staged &= table.cached[load.tensor]
    return staged


def copies_past_registers(device: DeviceSpec) -> bool:
    """True if a device has asynchronous copies from global to shared memory."""
    capability = device.compute_capability
    return capability is not None and tuple(capability) >= COPY_CAPABILITY


def asynchronous_problem(form: KernelForm) -> str | None:
    """Why the tiles of an operator cannot be copied past the registers; None where they can.

    A copy takes 4, 8 or 16 bytes, which a turned tile has one element by one; what is outside becomes zero; and its
    address is an offset into the one buffer that tiles of a type have.
    """
    types = dict.fromkeys(form.expr.tensor_by_name[load.tensor].dtype for load in form.body_loads)
    if len(types) > 1:
        return f"tensors of {' and '.join(types)} have no buffer in common"
    for load in form.body_loads:
        tensor = form.expr.tensor_by_name[load.tensor]
        if tensor.element_bytes < LEAST_COPY_BYTES:
            return f"elements of {tensor.name} are smaller than the {LEAST_COPY_BYTES} bytes of a copy"
        if load.pad:
            return f"{tensor.name} is padded with {load.pad:g}, a copy pads with zeros"
    return None


def turned_tensors(form: KernelForm) -> tuple[str, ...]:
    """Tensors whose staged tiles are better stored turned: the reduction walks their innermost dimension."""
    loads = [load for load in form.body_loads if load.indices]
    orders = [storage_order(load, form.walked, form.batch_axes) for load in loads]
    turned = [load.tensor for load, order in zip(loads, orders, strict=True) if order[-1] != len(order) - 1]
    return tuple(dict.fromkeys(turned))


def pipeline_variants(placed: PlacedForm, stages: Sequence[int] = ASYNCHRONOUS_STAGES) -> tuple[tuple[int, bool], ...]:
    """Ways of fetching steps of a fully staged schedule ahead: buffers, of ``stages`` where copies pass by the
    registers, and whether they do."""
    past = copies_past_registers(placed.device) and asynchronous_problem(placed.form) is None
    return ((2, False), *((count, True) for count in stages if past))


def with_layouts(
    table: ScheduleTable, staged: Bools, stages: Ints | None = None, asynchronous: Bools | None = None
) -> ScheduleTable:
    """The schedules with their tiles turned and their bodies unrolled where ``staged``.

    Elsewhere tiles are stored as their tensors are. ``stages`` and ``asynchronous`` replace the table's where given.
    """
    turned = turned_tensors(table.form)
    columns = {name: staged if name in turned else np.zeros(table.count, dtype=bool) for name in table.cached}
    unroll = np.where(staged, BODY_STATEMENTS, table.unroll)
    stages = table.stages if stages is None else stages
    return table.with_layout(columns, unroll, stages, table.asynchronous if asynchronous is None else asynchronous)


def fetched_ahead(table: ScheduleTable, placed: PlacedForm) -> list[ScheduleTable]:
    """The fully staged schedules of one stage, with more stages, in their own steps and in shorter ones.

    A thread that waits for no load needs no long step to hide one.
    """
    unpipelined = table.candidates(np.flatnonzero(fully_staged(table) & (table.stages == 1)))
    if not unpipelined.count:
        return []
    variants = []
    for stages, is_asynchronous in pipeline_variants(placed):
        ahead = replace(
            unpipelined,
            stages=np.full(unpipelined.count, stages),
            asynchronous=np.full(unpipelined.count, is_asynchronous),
        )
        variants.append(ahead.candidates(np.flatnonzero(ahead.step_count > 1)))
        for parts in (2, 4):
            step = _shortened(ahead, parts)
            changed = np.flatnonzero(np.any([step[axis] != ahead.step[axis] for axis in step], axis=0))
            variants.append(replace(ahead, step=step).candidates(changed))
    return [variant for variant in variants if variant.count]


def _shortened(table: ScheduleTable, parts: int) -> Mapping[str, Ints]:
    """Steps of a ``parts``-th, along the first reduction axis that can be cut so; as they are where none can."""
    step = dict(table.step)
    uncut = table.step_points >= parts * SHORTEST_STEP
    for axis in table.form.reduced:
        is_cut = uncut & (step[axis] % parts == 0)
        step[axis] = np.where(is_cut, step[axis] // parts, step[axis])
        uncut = uncut & ~is_cut
    return step
