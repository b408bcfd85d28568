"""What construction proposes for warp groups: every tile there is for them, as there are few."""

from __future__ import annotations

from collections.abc import Iterator

from hal.spec.device import DeviceSpec
from roller.construct.program import Candidate, Reason
from roller.construct.rtile import TileSpace
from sokoban.kernel.matrix import matrix_roles
from sokoban.schedule.warp_groups import GROUP_ROWS, warp_group_schedules

WARP_GROUPS_POLICY = "warp groups"


def warp_group_candidates(space: TileSpace, device: DeviceSpec, epsilon: float) -> Iterator[Candidate]:
    """A candidate for every tile of the operator that warp groups of ``device`` can multiply; none where they cannot.
    Padding is not held to ``epsilon``: the next smaller tile of a group is the same instruction at less."""
    roles = matrix_roles(space.form)
    for schedule in warp_group_schedules(space.form, device):
        assert roles is not None
        rows, width = schedule.block_of[roles.m], schedule.block_of[roles.n]
        warp = {**schedule.thread_of, roles.k: roles.depth}
        shared = {**schedule.block_of, **schedule.step_of}
        shape = tuple(shared[axis] for axis in space.axes)
        multiplied = Reason("registers", f"{GROUP_ROWS} rows by {width} columns of sums a warp group", shape)
        staged = Reason("shared", f"warp groups of the block: {rows // GROUP_ROWS}, buffers: {schedule.stages}", shape)
        yield Candidate(
            schedule,
            WARP_GROUPS_POLICY,
            epsilon,
            (multiplied, staged),
            (tuple(warp.get(axis, 1) for axis in space.axes), shape),
        )
