"""Proposals for ``mma.sync`` besides the paths of construction: the largest tiles of a warp, in every block of a few.

A path takes the steps that save most traffic and ends at one block. But products are computed in rounds of blocks, and
what the last round leaves idle may cost more than that traffic: 2048 by 2048 is two rounds of 108 blocks of 128 by 256,
the second almost empty, and two of 128 by 192, each three quarters as long. Which block suits best RATIONAL says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from roller.construct.program import Candidate, Reason
from roller.construct.rtile import TileSpace
from sokoban.kernel.placed import PlacedForm
from sokoban.schedule.tile import TileSchedule

WARP_TILES_POLICY = "warp tiles"

#: Rows and columns of a warp's tile: as much as leaves registers for the fragments of both operands, and three quarters
#: of one side of it.
WARP_TILES = ((64, 64), (64, 48), (48, 64))
#: The same where a warp has two sets of sums.
HALVED_WARP_TILES = ((64, 32), (32, 64))
#: Warps of a block along the rows and along the columns: four schedulers want a warp each, and more than nine warps of
#: such tiles have no registers.
WARPS = ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3))
#: Bytes of a row of an operand's step, and buffers: about what shared memory holds of the largest blocks.
STEPS = ((128, 3), (128, 2), (256, 2))


def warp_tile_candidates(space: TileSpace, placed: PlacedForm, epsilon: float) -> Iterator[Candidate]:
    """Candidates for a product that ``mma.sync`` multiplies, in blocks no larger than it; none where warp groups can.
    Padding is not held to ``epsilon``: it is priced with the rounds."""
    product, form = placed.product, placed.form
    if product is None or not product.instruction.is_mma or placed.bulk_roles is not None:
        return
    roles = product.roles
    element_bytes = min(form.expr.tensor_by_name[load.tensor].element_bytes for load in (roles.a, roles.b))
    m, n = form.sizes[roles.m], form.sizes[roles.n]
    tiles = WARP_TILES if form.sum_sets == 1 else HALVED_WARP_TILES
    for (rows, columns), (down, across), (step_bytes, stages) in itertools.product(tiles, WARPS, STEPS):
        step = step_bytes // element_bytes
        if rows * down > m or columns * across > n or step > form.sizes[roles.k]:
            continue
        warp = {roles.m: rows, roles.n: columns, roles.k: roles.fragment(roles.k)}
        block = {roles.m: rows * down, roles.n: columns * across}
        schedule = TileSchedule(
            block=tuple((axis, block.get(axis, 1)) for axis in form.spatial),
            thread=tuple((axis, warp.get(axis, 1)) for axis in form.spatial),
            vthreads=tuple((axis, 1) for axis in form.spatial),
            step=tuple((axis, step if axis == roles.k else 1) for axis in form.reduced),
            cached=tuple(dict.fromkeys(space.input_names)),
            instruction=product.instruction,
            stages=stages,
        )
        shared = {**schedule.block_of, **schedule.step_of}
        shape = tuple(shared[axis] for axis in space.axes)
        registers = tuple(warp.get(axis, 1) for axis in space.axes)
        reasons = (
            Reason("registers", "the largest tiles that leave room for operands", f"{rows} by {columns} a warp"),
            Reason("shared", f"{down} by {across} warps of the block", f"{stages} buffers of a step of {step}"),
        )
        yield Candidate(schedule, WARP_TILES_POLICY, epsilon, reasons, (registers, shape))
