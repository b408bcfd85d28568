"""Schedules of patch transforms, and what a schedule of any kernel is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sokoban.kernel.patches import PatchTransform
from sokoban.schedule.attention import AttentionSchedule, SliceSumSchedule
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.lines import LineSchedule
from sokoban.schedule.pair import PairSchedule
from sokoban.schedule.schedule import KernelSchedule
from sokoban.schedule.tile import TileSchedule


@dataclass(frozen=True)
class PatchSchedule(KernelSchedule):
    """Schedule of a patch transform: blocks of ``threads`` threads, each with a patch of its own."""

    threads: int

    @property
    def cells(self) -> tuple[str, str, str]:
        """Patches of a block and of a thread, for tables."""
        return f"{self.threads} patches", "a patch", ""

    def blocks(self, transform: PatchTransform) -> int:
        """Blocks of the launch: the transform's patches divided by ``threads``, rounded up."""
        return -(-transform.points // self.threads)

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the schedule."""
        return {"threads": self.threads}


#: How one kernel of a program runs, whatever kind of problem it solves.
Schedule = (
    TileSchedule | PatchSchedule | AttentionSchedule | SliceSumSchedule | GradientSchedule | PairSchedule | LineSchedule
)
