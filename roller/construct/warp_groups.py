"""Proposals of construction for warp groups: every tile there is for them, as there are few."""

from __future__ import annotations

from collections.abc import Iterator

from roller.construct.program import Candidate, Reason
from roller.construct.rtile import TileSpace
from sokoban.kernel.placed import PlacedForm
from sokoban.schedule.bulk_copies import bulk_schedules
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import GROUP_ROWS

WARP_GROUPS_POLICY = "warp groups"


def warp_group_candidates(space: TileSpace, placed: PlacedForm, epsilon: float) -> Iterator[Candidate]:
    """A candidate for every tile of the operator that warp groups of the device can multiply; none where they cannot.
    Padding is not held to ``epsilon``: the next smaller tile of a group is the same instruction at less."""
    roles = placed.bulk_roles
    for schedule in bulk_schedules(placed):
        assert roles is not None
        rows, width = schedule.block_of[roles.m], schedule.block_of[roles.n]
        warp = {**schedule.thread_of, roles.k: roles.depth}
        shared = {**schedule.block_of, **schedule.step_of}
        shape = tuple(shared[axis] for axis in space.axes)
        multiplied = Reason("registers", "one tile of sums a warp group", f"{GROUP_ROWS} rows by {width} columns")
        groups, depth = rows // GROUP_ROWS, schedule.step_of[roles.k]
        staged = Reason(
            "shared", f"warp groups of the block: {groups}", f"{schedule.stages} buffers of {depth} {roles.k}"
        )
        yield Candidate(
            schedule,
            WARP_GROUPS_POLICY,
            epsilon,
            (multiplied, staged, _copied(schedule)),
            (tuple(warp.get(axis, 1) for axis in space.axes), shape),
        )


def _copied(schedule: TileSchedule) -> Reason:
    common = f", one operand's by halves to {schedule.cluster} blocks" if schedule.cluster > 1 else ""
    blocks = f"{schedule.launched} blocks, one tile after another" if schedule.launched else "a block a tile"
    return Reason("shared", f"tiles copied in bulk by a warp group of its own{common}", blocks)
