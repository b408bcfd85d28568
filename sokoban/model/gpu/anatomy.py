"""One program taken apart: the quantities from which RATIONAL made its time, and what the time consists of.

Everything comes from the functions of :mod:`sokoban.model.rational`; nothing is estimated again in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import read_bytes
from sokoban.language.expression import Load
from sokoban.model.gpu.breakdown import DRAM_OVERLAP, POWER_SOFTNESS, breakdown, soft_maximum
from sokoban.model.gpu.issue import issued_instructions
from sokoban.model.gpu.occupancy import registers_per_thread
from sokoban.model.gpu.step import BlockStep
from sokoban.model.gpu.transactions import dram_bytes as dram_bytes_of
from sokoban.model.gpu.transactions import super_tile
from sokoban.schedule.table import ScheduleTable, one
from sokoban.schedule.tile import TileSchedule

#: What a predicted time may consist of besides the stage that sets the pace and the launch.
REMAINDERS = ("unhidden", "waiting", "stores", "finishing", "dram overlap", "hoisting", "power limit")


@dataclass(frozen=True, eq=False, kw_only=True)
class GpuAnatomy:
    """One program; seconds are of the whole kernel, where nothing else is said. Arrays inside have one entry.

    Attributes:
        step: of the program alone.
        needed_registers: per thread, without what is being fetched; more than ``step.occupancy.registers`` spills.
        step_busy: seconds of one step of all blocks that a unit runs, by stage that they share.
        step_waiting: seconds of one step during which a single block can do nothing.
        step_alone: seconds of one step of a single block, its work and its waiting.
        instructions: of a thread per step, by what they are for; without meaning for matrix instructions.
        dram_bytes: read from DRAM, by load.
        power_seconds: arithmetic at the rate that the power limit leaves.
        parts: what the predicted time consists of: the slowest stage by its name, some of :data:`REMAINDERS`, and
            ``launch``; the sum is the predicted time.
    """

    step: BlockStep
    needed_registers: int
    step_busy: Mapping[str, float]
    step_waiting: float
    step_alone: float
    instructions: Mapping[str, float]
    dram_bytes: Mapping[Load, float]
    power_seconds: float
    parts: Mapping[str, float]

    @property
    def form(self) -> KernelForm:
        """The operator."""
        return self.step.form

    @property
    def device(self) -> DeviceSpec:
        """The device that it runs on."""
        return self.step.device

    @property
    def table(self) -> ScheduleTable:
        """The schedule of the program, as a table of one row."""
        return self.step.table

    @property
    def running(self) -> int:
        """Blocks that a unit runs at once."""
        return int(one(self.step.occupancy.running))

    @property
    def dram_traffic(self) -> float:
        """Bytes that DRAM reads and writes."""
        tensors = self.form.expr.tensor_by_name
        others = {load.tensor for load in self.form.later_loads} - {load.tensor for load in self.dram_bytes}
        once = self.form.expr.output.size_bytes + sum(read_bytes(self.form.expr, tensors[tensor]) for tensor in others)
        return sum(self.dram_bytes.values()) + once

    @property
    def points(self) -> float:
        """Points of the reduction that a thread handles per step."""
        return one(self.table.thread_points)


def gpu_anatomy(placed: PlacedForm, schedule: TileSchedule) -> GpuAnatomy:
    """Take a program apart that can run."""
    device = placed.device
    table = ScheduleTable.of(placed.form, [schedule])
    times = breakdown(table, placed)
    step, occupancy, busy = times.step, times.step.occupancy, times.busy
    steps = occupancy.rounds * table.step_count
    slowest = max(busy, key=lambda name: one(busy[name]))
    on_units = {
        slowest: one(steps * busy[slowest]),
        "unhidden": one(steps * (times.together - busy[slowest])),
        "waiting": one(steps * (np.maximum(times.together, times.alone) - times.together + times.unfilled))
        + one(occupancy.rounds * times.filling),
        "stores": one(occupancy.rounds * times.stores),
        "finishing": one(occupancy.rounds * times.finishing),
    }
    power = one(times.power)
    starting = one(table.block_count) * device.block_launch_seconds
    parts = _parts(on_units, one(times.dram), one(times.hoisting), power, starting)
    covered = super_tile(table, np.maximum(1, occupancy.resident) * device.unit_count)
    read_bytes = {
        load: min(
            one(dram_bytes_of(table, load, device, covered)),
            max(1.0, one(part.bytes * table.step_count * table.block_count)),
        )
        for load, part in step.fetches.items()
    }
    return GpuAnatomy(
        step=step,
        needed_registers=int(one(registers_per_thread(table, step.nest.local))),
        step_busy={name: one(seconds) for name, seconds in busy.items()},
        step_waiting=one(times.waiting),
        step_alone=one(times.alone),
        instructions={name: one(count) for name, count in issued_instructions(step).items()},
        dram_bytes=read_bytes,
        power_seconds=power,
        parts={**parts, "launch": device.launch_overhead_seconds},
    )


def _parts(
    on_units: Mapping[str, float], dram: float, factor: float, power: float, starting: float
) -> dict[str, float]:
    """The parts whose sum is the time without the launch, the slowest stage first.

    ``on_units`` are the parts of the time on the units, the slowest stage first; ``power`` is the time of arithmetic
    under the power limit, ``starting`` that of the start of all blocks, in seconds.
    """
    units = sum(on_units.values())
    total = _soft_maximum(units, dram, DRAM_OVERLAP)
    parts = {"dram": dram, "unhidden": total - dram} if dram > units else {**on_units, "dram overlap": total - units}
    parts["hoisting"] = total * (factor - 1.0)
    total *= factor
    limited = _soft_maximum(total, power, POWER_SOFTNESS)
    parts["power limit"] = limited - total
    return {"block_launch": starting} if starting > limited else parts


def _soft_maximum(a: float, b: float, exponent: float) -> float:
    return one(soft_maximum(np.array([a]), np.array([b]), exponent))
