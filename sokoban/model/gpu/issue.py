"""Issue slots: how many instructions the threads of a program issue, by what they are for.

The FMA density of the thesis (5.5.2) is what arithmetic gets of them among operand reads, the fetch, and loop control.
"""

from __future__ import annotations

import numpy as np

from sokoban.kernel.matrix import FRAGMENT, WIDENED_FRAGMENT_INSTRUCTIONS, WIDENED_PRODUCT_INSTRUCTIONS
from sokoban.kernel.placed import PlacedForm
from sokoban.model.gpu.scales import scale_instructions
from sokoban.model.gpu.step import BlockStep, busiest_scheduler
from sokoban.model.gpu.work import START_INSTRUCTIONS, flat_instructions, is_flat
from sokoban.schedule.table import Floats, ScheduleTable, shares_rows

#: Instructions per unrolled body (counter, branch, addresses) and per step.
BODY_INSTRUCTIONS = 3.0
STEP_INSTRUCTIONS = 10.0

#: Further instructions of a step whose copies pass by the registers: three for the wait and the group of copies, three
#: that ptxas puts behind a wait, and the number of the buffer (read off the SASS of products for sm_80 and sm_90).
ASYNCHRONOUS_STEP_INSTRUCTIONS = 10.0

#: Instructions per asynchronous copy of matrix kernels: itself, its address, its guard (read off the SASS of products
#: for sm_80).
MMA_COPY_INSTRUCTIONS = 4.0

#: Instructions of a warp per product of its group: itself and two descriptors (read off the SASS for sm_90a).
WGMMA_INSTRUCTIONS = 16.0

#: Instructions that guard a read in place at the edge of a padded tensor.
DIRECT_GUARD_INSTRUCTIONS = 1.5

#: What instructions are for, as :func:`issued_instructions` names it.
ARITHMETIC, READS, FETCH, LOOPS = "arithmetic", "operand reads", "of the fetch", "of the loops"


def issued_instructions(step: BlockStep) -> dict[str, Floats]:
    """Instructions of a thread during one step of a schedule without matrix instructions, by what they are for."""
    table = step.table
    flat = is_flat(table)
    loops = np.where(flat, flat_instructions(table), STEP_INSTRUCTIONS)
    if table.has_asynchronous:
        loops = loops + np.where(table.asynchronous, ASYNCHRONOUS_STEP_INSTRUCTIONS, 0.0)
    loops = loops + BODY_INSTRUCTIONS * table.thread_points / step.nest.unrolled_points
    operands: Floats = np.zeros(table.count)
    copies: Floats = np.zeros(table.count)
    for load, part in step.fetches.items():
        staged = table.cached[load.tensor]
        direct = step.reads[load].instructions if load in step.reads else part.loads
        if load.pad is not None:
            direct = np.where(staged, direct, direct * (1.0 + DIRECT_GUARD_INSTRUCTIONS))
        operands = operands + direct
        copies = copies + np.where(staged, part.instructions, 0.0)
    operands = operands + step.addresses
    rows = step.rows
    if rows is not None:
        shares = shares_rows(table)
        along = sum(rows.loads.values(), np.zeros(table.count))
        operands = np.where(shares, table.accumulators * along, operands)
        others = table.accumulators * (rows.instructions - rows.arithmetic - along) + START_INSTRUCTIONS
        loops, copies = np.where(shares, others, loops), np.where(shares, 0.0, copies)
    return {ARITHMETIC: step.arithmetic, READS: operands, FETCH: copies, LOOPS: loops}


def issue_seconds(step: BlockStep) -> Floats:
    """Seconds of one step of all blocks that a unit runs: an instruction per cycle and scheduler, whatever it is."""
    table = step.table
    instructions = sum(issued_instructions(step).values(), np.zeros(table.count))
    if table.has_warp_tiles:
        # A matrix instruction stands for many multiply-adds; loads of wmma are counted in passes.
        instructions = np.where(table.warp_tile, np.where(table.mma, warp_instructions(step), 0.0), instructions)
    return instructions / step.device.clocks.boost_hz * busiest_scheduler(step)


def warp_instructions(step: BlockStep) -> Floats:
    """Instructions of a warp during one step by ``mma.sync`` or ``wgmma``."""
    table = step.table
    # One thread of a group of its own starts what is copied in bulk.
    copies = np.where(table.bulk, 0.0, sum(part.loads for part in step.fetches.values()))
    multiplied = STEP_INSTRUCTIONS + MMA_COPY_INSTRUCTIONS * copies + _fragment_instructions(table, step.placed)
    return multiplied + scale_instructions(table) if table.form.scale_loads else multiplied


def _fragment_instructions(table: ScheduleTable, placed: PlacedForm) -> Floats:
    """Instructions by which a warp multiplies during one step with ``mma.sync``: 16x8 products, and what brings every
    fragment into registers."""
    roles = placed.form.roles
    if roles is None:
        return np.zeros(table.count)
    each, more = (WIDENED_PRODUCT_INSTRUCTIONS, WIDENED_FRAGMENT_INSTRUCTIONS) if placed.is_widened else (1, 0)
    loads = sum(
        ((roles.fragment_instructions(load) + more) * elements for load, elements in table.operand_elements.items()),
        table.zeros,
    )
    products = each * table.accumulators / (FRAGMENT * FRAGMENT // 2) + loads / FRAGMENT
    return table.step_points / roles.depth * np.where(table.wgmma, WGMMA_INSTRUCTIONS, products)
