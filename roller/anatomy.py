"""One program taken apart: the quantities from which RATIONAL made its time, and what the time consists of.

Everything comes from the functions of :mod:`sokoban.rational`; nothing is estimated again in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal import DeviceSpec
from sokoban import KernelForm, ScheduleTable, TileSchedule, rational, stages
from sokoban.expression import Load
from sokoban.fetch import Fetch
from sokoban.loops import LoopNest
from sokoban.matrix import matrix_roles
from sokoban.occupancy import registers_per_thread
from sokoban.operands import OperandReads
from sokoban.transactions import dram_bytes as dram_bytes_of
from sokoban.transactions import super_tile

#: What a predicted time may consist of besides the stage that sets the pace and the launch.
REMAINDERS = ("unhidden", "waiting", "stores", "dram overlap", "hoisting", "power limit")


@dataclass(frozen=True, eq=False)
class Anatomy:
    """One program; seconds are of the whole kernel, where nothing else is said. Arrays inside have one entry.

    Attributes:
        table: the program alone.
        needed_registers: per thread, without what is being fetched; more than ``launch.registers`` spills.
        step_busy: seconds of one step of all blocks that a unit runs, by stage that they share.
        step_waiting: seconds of one step during which a single block can do nothing.
        step_alone: seconds of one step of a single block, its work and its waiting.
        arithmetic, overhead: instructions of a thread per step: arithmetic; steps and bodies of loops.
        dram_bytes: read from DRAM, by load.
        power_seconds: arithmetic at the rate that the power limit leaves.
        parts: what the predicted time consists of: the slowest stage by its name, some of :data:`REMAINDERS`, and
            ``launch``; the sum is the predicted time.
    """

    form: KernelForm
    device: DeviceSpec
    table: ScheduleTable
    nest: LoopNest
    fetches: Mapping[Load, Fetch]
    reads: Mapping[Load, OperandReads]
    launch: stages.Launch
    needed_registers: int
    step_busy: Mapping[str, float]
    step_waiting: float
    step_alone: float
    arithmetic: float
    overhead: float
    dram_bytes: Mapping[Load, float]
    power_seconds: float
    parts: Mapping[str, float]

    @property
    def running(self) -> int:
        """Blocks that a unit runs at once."""
        return int(one(self.launch.running))

    @property
    def dram_traffic(self) -> float:
        """Bytes that DRAM reads and writes."""
        tensors = self.form.expr.tensor_by_name
        once = self.form.expr.output.size_bytes + sum(tensors[load.tensor].size_bytes for load in self.form.final_loads)
        return sum(self.dram_bytes.values()) + once

    @property
    def points(self) -> float:
        """Points of the reduction that a thread handles per step."""
        return one(stages.thread_points(self.table))


def one(values: object) -> float:
    """The entry of an array that has one."""
    return float(np.ravel(np.asarray(values))[0])


def anatomy(form: KernelForm, device: DeviceSpec, schedule: TileSchedule) -> Anatomy:
    """Take a program apart that can run."""
    table = ScheduleTable.of(form, [schedule])
    nest = rational.loop_nest(table)
    fetches = {load: rational.fetch(table, load, device) for load in form.body_loads}
    reduces = form.reduction is not None
    reads = {load: rational.operand_reads(table, load, device, nest) for load in form.body_loads if reduces}
    launch = rational.launch_of(table, device, nest, fetches)
    shared = rational.shared_seconds(table, device, nest, launch, fetches, reads)
    busy = {
        "compute": rational.compute_seconds(table, device, launch),
        "issue": rational.issue_seconds(table, device, nest, launch, fetches, reads),
        "shared": shared,
        "l2": rational.l2_seconds(table, device, launch, fetches),
    }
    together = rational.step_seconds(busy, launch, device)
    waiting = rational.waiting_seconds(table, device, fetches)
    steps = launch.rounds * table.step_count
    work = together / launch.running
    unfilled = rational.UNHIDDEN_WAIT * np.minimum(waiting, work) / launch.running
    slowest = max(busy, key=lambda name: one(busy[name]))
    on_units = {
        slowest: one(steps * busy[slowest]),
        "unhidden": one(steps * (together - busy[slowest])),
        "waiting": one(steps * (np.maximum(together, waiting + work) - together + unfilled)),
        "stores": one(launch.rounds * launch.running * rational.stored_seconds_per_block(table, device)),
    }
    dram = one(rational.dram_seconds(table, device, launch, fetches))
    power = one(rational.power_seconds(table, device))
    starting = one(table.block_count) * device.block_launch_seconds
    factor = one(rational.hoisting_factor(table, device, launch, nest, reads))
    parts = _parts(on_units, dram, factor, power, starting)
    covered = super_tile(table, np.maximum(1, launch.resident) * device.unit_count)
    read_bytes = {
        load: min(
            one(dram_bytes_of(table, load, device, covered)),
            max(1.0, one(part.bytes * table.step_count * table.block_count)),
        )
        for load, part in fetches.items()
    }
    return Anatomy(
        form, device, table, nest, fetches, reads, launch,
        int(one(registers_per_thread(table, nest.local))),
        {name: one(seconds) for name, seconds in busy.items()},
        one(waiting), one(waiting + work), one(stages.arithmetic_instructions(table)),
        stages.STEP_INSTRUCTIONS
        + one(stages.BODY_INSTRUCTIONS * stages.thread_points(table) / nest.unrolled_points),
        read_bytes, power, {**parts, "launch": device.launch_overhead_seconds},
    )  # fmt: skip


def _parts(
    on_units: Mapping[str, float], dram: float, factor: float, power: float, starting: float
) -> dict[str, float]:
    """The parts whose sum is the time without the launch, the slowest stage first.

    ``on_units`` are the parts of the time on the units, the slowest stage first; ``power`` is the time of arithmetic
    under the power limit, ``starting`` that of the start of all blocks, in seconds.
    """
    units = sum(on_units.values())
    total = _soft_maximum(units, dram, rational.DRAM_OVERLAP)
    parts = {"dram": dram, "unhidden": total - dram} if dram > units else {**on_units, "dram overlap": total - units}
    parts["hoisting"] = total * (factor - 1.0)
    total *= factor
    limited = _soft_maximum(total, power, rational.POWER_SOFTNESS)
    parts["power limit"] = limited - total
    return {"block_launch": starting} if starting > limited else parts


def _soft_maximum(a: float, b: float, exponent: float) -> float:
    return one(rational._soft_maximum(np.array([a]), np.array([b]), exponent))


# What the operator asks for


def compulsory_bytes(form: KernelForm) -> int:
    """Bytes of all inputs and the output, each once."""
    return sum(tensor.size_bytes for tensor in (*form.expr.inputs, form.expr.output))


def arithmetic_rate(form: KernelForm, device: DeviceSpec, *, matrix: bool | None = None) -> tuple[float, str]:
    """The sustained FLOP/s that an operator can hope for, and its name; ``matrix`` says whether it uses matrix
    instructions, None that it does where it can."""
    if form.body_loads and matrix is not False:
        dtype = form.expr.tensor_by_name[form.body_loads[0].tensor].dtype
        instruction = device.matrix_instruction(dtype)
        if instruction is not None and (matrix or matrix_roles(form) is not None):
            return instruction.sustained_flops, f"{dtype} by matrix instructions"
    dtype = form.expr.accumulate if form.expr.accumulate in device.dtypes else "float32"
    return device.sustained_flops(dtype), dtype
