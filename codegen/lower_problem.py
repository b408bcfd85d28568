"""Any kernel of a chain to a scheduled TVM module: whatever its problem is, the right lowering."""

from __future__ import annotations

from codegen.chain import Problem, Schedule
from codegen.lower import Lowered, lower
from codegen.lower_patches import lower_patches
from sokoban.patches import PatchSchedule, PatchTransform
from sokoban.schedule import TileSchedule


def lower_problem(problem: Problem, schedule: Schedule, *, entry: str, dynamic_shared: bool = True) -> Lowered:
    """Lower one kernel; arguments and errors as of :func:`codegen.lower.lower`."""
    if isinstance(problem, PatchTransform):
        assert isinstance(schedule, PatchSchedule)
        return lower_patches(problem, schedule, entry=entry)
    assert isinstance(schedule, TileSchedule)
    return lower(problem, schedule, entry=entry, dynamic_shared=dynamic_shared)
