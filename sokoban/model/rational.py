"""RATIONAL: a kernel as a pipeline whose slowest stage sets the pace (thesis 5.3.3, 5.4.3).

A block walks its reduction in steps; in each it fetches data tiles and computes on them. Stages that all resident
blocks of a unit share are the arithmetic pipelines, the issue slots of the schedulers, shared memory with the
load/store unit, and the way from L2. The slowest of them takes the time of a step, unless a single block is slower all
by itself, because it waits for memory and at barriers; then nothing but more resident blocks helps. Rounds of blocks
(waves), DRAM, the rate at which blocks start, the power limit and the launch come on top.

Every stage is a function of its own in :mod:`sokoban.model.gpu.stages`; all work on a :class:`ScheduleTable`, one entry
per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.model.cpu import stages as cpu
from sokoban.model.estimates import Estimate, EstimateTable
from sokoban.model.gpu import breakdown as gpu
from sokoban.model.gpu.occupancy import CompilerReport
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule

#: Rows that are worked on at a time: what belongs to a lane of a warp then stays in the cache of the CPU.
_CHUNK = 4096


def estimate_schedules(form: KernelForm, device: DeviceSpec, schedules: Sequence[TileSchedule]) -> EstimateTable:
    """Predict every schedule of ``schedules``."""
    return estimate(ScheduleTable.of(form, schedules), PlacedForm(form, device))


def estimate(table: ScheduleTable, placed: PlacedForm) -> EstimateTable:
    """Predict every row of a table of ``placed.form``; large tables in pieces."""
    model = _MODELS[placed.device.teu.lane]
    if table.count <= _CHUNK:
        return model(table, placed)
    return EstimateTable.join(
        [model(table.candidates(slice(i, i + _CHUNK)), placed) for i in range(0, table.count, _CHUNK)]
    )


def estimate_compiled(
    form: KernelForm, device: DeviceSpec, schedule: TileSchedule, *, registers: int, spill_bytes: int
) -> Estimate:
    """Predict a schedule again, now that the device compiler has said what it takes.

    Args:
        form: the operator.
        device: one whose lanes are threads.
        schedule: how the kernel computes it.
        registers: per thread.
        spill_bytes: of spill stores and loads per thread; a value is stored and loaded once at least.
    """
    report = CompilerReport(np.array([registers]), np.array([-(-spill_bytes // 8)]))
    return gpu.estimate(ScheduleTable.of(form, [schedule]), PlacedForm(form, device), report).row(0)


#: Resident blocks of a unit that are looked at.
MOST_BLOCKS = 16


def faster_blocks(form: KernelForm, device: DeviceSpec, schedule: TileSchedule) -> tuple[int, ...]:
    """Numbers of resident blocks that make a kernel of multiply-adds faster than one block fewer would, were registers
    all that decides how many there are. Whether a compiler finds fewer registers costs a compilation.

    >>> from hal.catalog import load_device
    >>> from sokoban.kernel.form import kernel_form
    >>> from sokoban.language.operators import operator_from_data
    >>> product = kernel_form(operator_from_data({"op": "matmul", "m": 1024, "n": 1024, "k": 1024}))
    >>> tile = TileSchedule(
    ...     block=(("m", 64), ("n", 64)), thread=(("m", 4), ("n", 4)), step=(("k", 16),), cached=("A", "B"))
    >>> faster_blocks(product, load_device("v100"), tile)  # 256 blocks on 80 units: four at a time are all
    (2, 3, 4)
    """
    limits, warps = device.limits, -(-schedule.threads_per_block // device.warp_lanes)
    grain = limits.register_allocation_granularity // device.warp_lanes
    most = [limits.registers_per_unit // (blocks * warps * device.warp_lanes) for blocks in range(1, MOST_BLOCKS + 1)]
    registers = np.array([min(limits.registers_per_thread, each // grain * grain) for each in most if each >= grain])
    report = CompilerReport(registers, np.zeros_like(registers))
    seconds = gpu.estimate(
        ScheduleTable.of(form, [schedule] * len(registers)), PlacedForm(form, device), report
    ).seconds
    return tuple((np.flatnonzero(seconds[1:] < seconds[:-1]) + 2).tolist())


#: Who estimates, by what the lanes of a device are: threads, many to a unit, or elements of the vectors of one.
_MODELS: Mapping[str, Callable[[ScheduleTable, PlacedForm], EstimateTable]] = {
    "thread": gpu.estimate,
    "element": cpu.estimate,
}
