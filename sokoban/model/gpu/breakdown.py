"""RATIONAL on devices whose lanes are threads: stages put together to a time (thesis 5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.support.records import quick
from sokoban.kernel.placed import PlacedForm
from sokoban.model.estimates import EstimateTable
from sokoban.model.gpu.compiled import compiled_stages
from sokoban.model.gpu.issue import issue_seconds
from sokoban.model.gpu.occupancy import CompilerReport, granted_registers, operand_registers
from sokoban.model.gpu.stages import (
    between_tiles_seconds,
    compute_seconds,
    dram_seconds,
    filling_seconds,
    final_seconds_per_block,
    l2_seconds,
    pipelined_waiting,
    power_seconds,
    shared_seconds,
    stored_seconds_per_block,
    waiting_seconds,
)
from sokoban.model.gpu.step import BlockStep, working_warps
from sokoban.schedule.table import Floats, Ints, ScheduleTable, shares_rows

#: Pipeline stages in the order in which they are shown.
STAGES = ("compute", "issue", "shared", "l2", "dram", "latency", "block_launch")

#: Those that the blocks of a unit share during a step.
BUSY = ("compute", "issue", "shared", "l2")

#: Exponent with which the stages of a step by multiply-adds add up: 1 would be no overlap, infinity a perfect one.
#: Random halves of Ansor's operators (V100) choose 2.5 to 3.5, half of the configurations of a product on RTX 3090
#: speaks for 3.
STAGE_OVERLAP = 3.0

#: Share of the other stages' time that the slowest one does not hide with one warp per scheduler where a warp loads
#: fragments and multiplies them by turns (``wmma``), and how fast more warps hide it: what programs on a V100 show.
UNHIDDEN = 0.2
HIDING = 0.15

#: The same share for kernels that copy asynchronously and load the next fragments while they multiply: their warps do
#: not alternate between stages. cuBLAS's products of bfloat16 on an A100 by tiles of 128 by 256, in whole rounds, take
#: 1.040 times what their tiles' products do at the peak, and 5.5 us a tile (regression over depths of 1,024 to
#: 65,536 on half of the weights, bench.accuracy.kernels.own_products). Barriers are 0.02 of that.
UNHIDDEN_ASYNCHRONOUS = 0.013

#: The same share where bulk copies bring what warp groups multiply: their warps do not alternate. A copying warp only
#: product reads shared memory by itself, and warps wait only for what is late. The board's rate of L2 was found on
#: kernels of this kind under the same assumption (its device file).
UNHIDDEN_BULK = 0.0

#: Share of a step's waiting that other resident blocks do not fill.
UNHIDDEN_WAIT = 1.0

#: Exponent with which time on the units and time of DRAM add up: 1 would be no overlap, infinity a perfect one.
DRAM_OVERLAP = 4.0

#: Exponent with which the power limit takes over: a board throttles before the average says so, and of two programs at
#: the limit the one with less other work still is the faster.
POWER_SOFTNESS = 12.0

#: Operand words of an unrolled body per free register from which on the compiler may hoist more reads than it has room
#: for, from which on that is likely, and what it then costs on average over the programs it hits or spares; beyond, the
#: cost grows on, to three times as much at most.
HOISTED_WORDS = (5.0, 8.0)
HOISTING_RISK = 0.15
MOST_RISK = 3.0

#: Free registers below which a compiler knows that it is short of them and hoists with care, as large blocks make it:
#: their bodies are no more at risk than those with so much room.
HOISTING_ROOM = 70.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Breakdown:
    """Parts of a predicted time; one entry per schedule, seconds of one step of all blocks that a unit runs
    where nothing else is said.

    Attributes:
        step: the quantities from which the seconds follow.
        busy: by stage that the blocks of a unit share.
        together: the step without waiting.
        waiting: time in which a single block can do nothing.
        alone: the step of one block by itself.
        unfilled: what other blocks leave of the waiting.
        stores: writing the outputs of the blocks that a unit runs at once.
        finishing: what their final statements take besides, see :func:`finishing_seconds`, and what comes between two
            tiles of matrix instructions, see :func:`sokoban.model.gpu.stages.between_tiles_seconds`.
        units: the whole kernel on the units.
        dram, power: the whole kernel by DRAM alone, and by arithmetic under the power limit alone.
        hoisting: factor, see :func:`hoisting_factor`.
        filling: the first copies of a pipeline, which nothing of the same block hides; once per round of blocks.
        whole: the whole kernel by stage.
        wave_count: rounds of blocks, the last one counted in full.
    """

    step: BlockStep
    busy: Mapping[str, Floats]
    together: Floats
    waiting: Floats
    alone: Floats
    unfilled: Floats
    stores: Floats
    finishing: Floats
    units: Floats
    dram: Floats
    power: Floats
    hoisting: Floats | float
    filling: Floats
    whole: Mapping[str, Floats]
    wave_count: Ints


def breakdown(table: ScheduleTable, placed: PlacedForm, report: CompilerReport | None = None) -> Breakdown:
    """Every quantity from which :func:`estimate` makes its times."""
    compiled = compiled_stages(table, placed, 1.0 / STAGE_OVERLAP) if report is None else None
    if compiled is None:
        return _breakdown_by_columns(BlockStep(table, placed, report))
    return quick(
        Breakdown,
        step=BlockStep(table, placed, given_occupancy=compiled.occupancy),
        busy={name: compiled.seconds[name] for name in BUSY},
        dram=compiled.seconds["dram"],
        power=compiled.seconds["power"],
        hoisting=compiled.seconds["hoisting"],
        whole=dict(zip(STAGES, compiled.whole, strict=True)),
        wave_count=compiled.waves,
        **compiled.parts,
    )


def _breakdown_by_columns(step: BlockStep) -> Breakdown:
    """:func:`breakdown` by NumPy."""
    table, occupancy, device = step.table, step.occupancy, step.device
    seconds = stages_by_columns(step)
    busy = {name: seconds[name] for name in BUSY}
    stores = occupancy.running * seconds["stored"]
    together = step_seconds(step, busy)
    by_itself = occupancy.running * independent_warps(step)
    block_work = together / by_itself
    waiting = pipelined_waiting(step, seconds["waiting"], block_work, busy["l2"] / occupancy.running)
    alone = waiting + block_work
    # What a step waits for is filled by other blocks, but not entirely: they tend to wait at the same time.
    unfilled = UNHIDDEN_WAIT * np.minimum(waiting, block_work) / by_itself
    if table.has_stages:
        # In a pipeline the copies themselves run on while a block waits.
        unfilled = np.where(table.stages > 1, 0.0, unfilled)
    filling, steps = filling_seconds(step), table.step_count
    step_time, finals = np.maximum(together, alone) + unfilled, occupancy.running * seconds["final"]
    finishing = finishing_seconds(step, finals - stores, step_time, seconds["issue"], seconds["compute"])
    if table.has_warp_tiles:
        finishing = finishing + between_tiles_seconds(step)
    units = occupancy.rounds * (steps * step_time + stores + finishing + filling)
    kernel_seconds: dict[str, Floats] = {name: occupancy.rounds * steps * each for name, each in busy.items()}
    kernel_seconds["compute"] = np.maximum(kernel_seconds["compute"] + occupancy.rounds * finals, seconds["power"])
    kernel_seconds["l2"] = kernel_seconds["l2"] + occupancy.rounds * stores
    kernel_seconds["dram"] = seconds["dram"]
    kernel_seconds["latency"] = occupancy.rounds * (steps * alone + filling)
    launched = np.where(table.launched > 0, np.minimum(table.launched, table.block_count), table.block_count)
    kernel_seconds["block_launch"] = launched * device.block_launch_seconds
    return Breakdown(
        step=step,
        busy=busy,
        together=together,
        waiting=waiting,
        alone=alone,
        unfilled=unfilled,
        stores=stores,
        finishing=finishing,
        units=units,
        dram=seconds["dram"],
        power=seconds["power"],
        hoisting=seconds["hoisting"],
        filling=filling,
        whole=kernel_seconds,
        wave_count=-(-table.block_count // (np.maximum(1, occupancy.resident) * device.unit_count)),
    )


def stages_by_columns(step: BlockStep) -> Mapping[str, Any]:
    """Stages as in :class:`sokoban.model.gpu.compiled.CompiledStages`, by NumPy."""
    return {
        "compute": compute_seconds(step),
        "issue": issue_seconds(step),
        "shared": shared_seconds(step),
        "l2": l2_seconds(step),
        "stored": stored_seconds_per_block(step),
        "final": final_seconds_per_block(step),
        "waiting": waiting_seconds(step),
        "dram": dram_seconds(step),
        "power": power_seconds(step),
        "hoisting": hoisting_factor(step),
    }


def estimate(table: ScheduleTable, placed: PlacedForm, report: CompilerReport | None = None) -> EstimateTable:
    """Predict every row of a table of ``placed.form``, on a device whose lanes are threads.

    ``report`` is what the compiler made of the rows, where they have been compiled.
    """
    parts, device = breakdown(table, placed, report), placed.device
    occupancy = parts.step.occupancy
    seconds = soft_maximum(parts.units, parts.dram, DRAM_OVERLAP) * parts.hoisting
    seconds = soft_maximum(seconds, parts.power, POWER_SOFTNESS)
    seconds = np.maximum(seconds, parts.whole["block_launch"]) + device.launch_overhead_seconds
    return EstimateTable(
        seconds=np.where(occupancy.resident > 0, seconds, np.inf),
        stage_seconds=parts.whole,
        registers=occupancy.registers,
        shared_bytes=occupancy.shared,
        blocks_per_unit=occupancy.resident,
        wave_count=parts.wave_count,
    )


def independent_warps(step: BlockStep) -> Floats | float:
    """Warps of a scheduler that wait apart from each other: all of a block that stages nothing, whose threads never
    meet; 1 where they do."""
    table = step.table
    meets = shares_rows(table)
    for staged in table.cached.values():
        meets = meets | staged
    return (
        1.0 if meets.all() else np.where(meets, 1.0, np.maximum(1.0, step.occupancy.warps / step.device.teu.group_size))
    )


def step_seconds(step: BlockStep, busy: Mapping[str, Floats]) -> Floats:
    """A step of all running blocks: ``max(T_i)`` (5.4.3) where stages overlap perfectly, and softer than that, since a
    block fetches and computes by turns. Issue slots are no work of their own: they bound arithmetic, they do not add.
    """
    table = step.table
    core = np.maximum(busy["compute"], busy["issue"])
    slowest = np.maximum(np.maximum(core, busy["shared"]), busy["l2"])
    parts = [each / slowest for each in (core, busy["shared"], busy["l2"])]
    # Cubes and not powers, so that compiled code has the same bits.
    cubes = sum([part * part * part for part in parts[1:]], parts[0] * parts[0] * parts[0])
    seconds: Floats = slowest * cubes ** (1.0 / STAGE_OVERLAP)
    return (
        np.where(table.warp_tile, _warp_tile_seconds(step, busy, slowest), seconds) if table.has_warp_tiles else seconds
    )


def _warp_tile_seconds(step: BlockStep, busy: Mapping[str, Floats], slowest: Floats) -> Floats:
    """:func:`step_seconds` by matrix instructions: the slowest stage and what it does not hide of the others, less the
    more warps a scheduler has."""
    table = step.table
    work = [busy["compute"], busy["shared"], busy["l2"]]
    others = work[0] + work[1] + work[2] - np.maximum.reduce(work)
    warps = np.maximum(1.0, working_warps(step) * step.occupancy.running / step.device.teu.group_size)
    unhidden = np.where(table.mma, np.where(table.bulk, UNHIDDEN_BULK, UNHIDDEN_ASYNCHRONOUS), UNHIDDEN)
    seconds: Floats = slowest + unhidden * np.maximum(others, 0.0) / warps**HIDING
    return seconds


def finishing_seconds(step: BlockStep, beyond: Floats, step_time: Floats, issue: Floats, compute: Floats) -> Floats:
    """Time of the final statements of all running blocks ``beyond`` their stores, less what other blocks' steps leave
    of the lanes meanwhile: multiply-adds or, with matrix instructions, little but issue slots."""
    table, running = step.table, step.occupancy.running
    busy = np.where(table.warp_tile, issue, compute) if table.has_warp_tiles else compute
    unused_seconds = (1.0 - 1.0 / running) * (table.step_count * np.maximum(0.0, step_time - busy))
    return np.maximum(0.0, beyond - unused_seconds)


def hoisting_factor(step: BlockStep) -> Floats | float:
    """Expected cost of operand reads that the compiler hoists without having registers for them.

    A large unrolled body over a full register file is where compilers spill without need, at times by a factor of ten.
    Once compiled, a program either has or has not.
    """
    table = step.table
    if not step.reads or step.report is not None:
        return 1.0
    most = granted_registers(table, step.device, np.full(table.count, 1 << 16))
    room = np.maximum(HOISTING_ROOM, most - table.accumulators - operand_registers(table))
    words = sum(part.words for part in step.reads.values())
    risky = (step.occupancy.spilled == 0) & ~table.warp_tile
    least, likely = HOISTED_WORDS
    risk = HOISTING_RISK * np.clip((words / room - least) / (likely - least), 0.0, MOST_RISK)
    return 1.0 + np.where(risky, risk, 0.0)


def soft_maximum(a: Floats, b: Floats, exponent: float) -> Floats:
    """``(a**p + b**p) ** (1/p)``: the larger one, and more where they are close."""
    larger = np.maximum(a, b)
    return larger * (1.0 + (np.minimum(a, b) / larger) ** exponent) ** (1.0 / exponent)
