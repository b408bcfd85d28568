"""One program of a device whose lanes are elements, taken apart: the quantities from which RATIONAL made its time.

The counterpart of :mod:`sokoban.model.gpu.anatomy`. Everything comes from the functions of
:mod:`sokoban.model.cpu.stages` and those that it calls; nothing is estimated again in another way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import MemoryLayer
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.model.cpu.rows import row_bytes, row_work
from sokoban.model.cpu.stages import CONTENTION, COPYING, DRAIN, STAGES, Stages, kernel_seconds
from sokoban.model.cpu.traffic import Traffic
from sokoban.model.cpu.work import Work, copies_of, tile_work
from sokoban.schedule.cpu_tiles import CpuTiles, by_vector_axis
from sokoban.schedule.table import ScheduleTable, one, shares_rows
from sokoban.schedule.tile import TileSchedule

#: What a predicted time may consist of besides the stage that sets the pace, starting the blocks and the launch.
REMAINDERS = ("uneven blocks", "core", "layers")

#: Name of all tensors that a row kernel reads.
ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way from one layer into the cache above it, whole kernel and all units.

    Attributes:
        read_bytes: bytes that come in, by tensor; a packed operand's copy has the tensor's name with a ``'``.
        moved_bytes: bytes that come in and go out, as the model counts them; 0 where all tensors stay in the cache
            above from call to call.
        unprefetched_bytes: bytes that come in without a prefetch while a core computes.
        copied_bytes: bytes that come in while a core copies and computes nothing.
        copied_unprefetched_bytes: the part of ``copied_bytes`` that was not prefetched.
    """

    above: MemoryLayer
    below: MemoryLayer
    read_bytes: Mapping[str, float]
    moved_bytes: float
    unprefetched_bytes: float = 0.0
    copied_bytes: float = 0.0
    copied_unprefetched_bytes: float = 0.0

    @property
    def traffic_bytes(self) -> float:
        """Bytes that would move if nothing stayed in the cache above from call to call."""
        return max(self.moved_bytes, sum(self.read_bytes.values()))


@dataclass(frozen=True, eq=False, kw_only=True)
class CpuAnatomy:
    """One program; arrays inside have one entry.

    Attributes:
        tiles: how it is cut up; None where it works by rows.
        placed: the operator on the device.
        table: the schedule of the program, as a table of one row.
        lanes: elements of a vector of sums.
        work: what cores execute, all of them together.
        stages: seconds of every stage, and what they follow from.
        ways: into every cache from the layer below, the first cache first.
        contested_lines: that units fetch from each other.
        parts: seconds that the predicted time consists of: the slowest stage by its name, some of
            :data:`REMAINDERS`, ``copying``, ``contention``, ``block_launch`` and ``launch``; the sum is the predicted
            time.
    """

    placed: PlacedForm
    table: ScheduleTable
    tiles: CpuTiles | None
    lanes: int
    work: Work
    stages: Stages
    ways: tuple[Way, ...]
    contested_lines: float
    parts: Mapping[str, float]

    @property
    def form(self) -> KernelForm:
        """The operator."""
        return self.placed.form

    @property
    def device(self) -> DeviceSpec:
        """The device that it runs on."""
        return self.placed.device

    @property
    def blocks(self) -> int:
        """Blocks of the kernel."""
        return int(one(self.stages.blocks))

    @property
    def busiest(self) -> int:
        """Blocks of the busiest unit."""
        return -(-self.blocks // self.device.unit_count)

    @property
    def dram_traffic(self) -> float:
        """Bytes that would move between the bottom layer and the last cache if nothing stayed there."""
        return self.ways[-1].traffic_bytes


def cpu_anatomy(placed: PlacedForm, schedule: TileSchedule) -> CpuAnatomy:
    """Take a program apart, of a device whose lanes are elements of vectors."""
    form, device, lanes = placed.form, placed.device, placed.vector_lanes
    table = ScheduleTable.of(form, [schedule])
    stages = Stages(table, placed)
    pairs = list(itertools.pairwise(device.layers[1:]))
    if shares_rows(table).all():
        tiles, work, contested_lines = None, row_work(form, lanes, 1), 0.0
        ways = [_row_way(form, above, below, stages) for above, below in pairs]
    else:
        ((_, tiles),) = by_vector_axis(table, placed)
        copies = copies_of(tiles)
        work = tile_work(tiles, copies)
        traffic = Traffic(tiles, device, copies)
        ways = [_tile_way(traffic, above, below, stages) for above, below in pairs]
        contested_lines = one(traffic.contested_lines)
    return CpuAnatomy(
        placed=placed,
        table=table,
        tiles=tiles,
        lanes=lanes,
        work=work,
        stages=stages,
        ways=tuple(ways),
        contested_lines=contested_lines,
        parts=_parts(stages, device),
    )


def _tile_way(traffic: Traffic, above: MemoryLayer, below: MemoryLayer, stages: Stages) -> Way:
    read: dict[str, float] = {}
    for stream, stream_bytes in zip(traffic.streams, traffic.streams_into(above), strict=True):
        if not stream.written:
            read[stream.name] = read.get(stream.name, 0.0) + one(stream_bytes)
    copied, copied_unprefetched = (one(part) for part in traffic.copied_into(above))
    moved = _moved(stages, below) + stages.resident(above) * copied
    return Way(
        above=above,
        below=below,
        read_bytes=read,
        moved_bytes=moved,
        unprefetched_bytes=one(traffic.unprefetched_into(above)),
        copied_bytes=copied,
        copied_unprefetched_bytes=copied_unprefetched,
    )


def _row_way(form: KernelForm, above: MemoryLayer, below: MemoryLayer, stages: Stages) -> Way:
    return Way(
        above=above,
        below=below,
        read_bytes={ROWS: row_bytes(form, above, writes=0.0)},
        moved_bytes=_moved(stages, below),
    )


def _moved(stages: Stages, below: MemoryLayer) -> float:
    """Bytes that pass a layer in the seconds that its stage takes."""
    return one(stages.seconds[below.name]) * below.bandwidth_bytes_per_second


def _parts(stages: Stages, device: DeviceSpec) -> dict[str, float]:
    """The parts whose sum is the predicted time: what each adds to the time of those before it."""
    slowest = max(stages.seconds, key=lambda name: one(stages.seconds[name]))
    slowest_seconds = one(stages.seconds[slowest])
    ends = {
        "block_launch": one(stages.blocks) * device.block_launch_seconds,
        "launch": device.launch_overhead_seconds,
    }
    fixed = sum(ends.values())
    by_itself = _seconds_of(stages, device, {slowest}) - fixed
    together = _seconds_of(stages, device, {slowest, *STAGES, DRAIN}) - fixed
    total = _seconds_of(stages, device, stages.seconds) - fixed
    overlapping = _seconds_of(stages, device, stages.seconds.keys() - {COPYING, CONTENTION} | {slowest}) - fixed
    added = (by_itself - slowest_seconds, together - by_itself, overlapping - together)
    uncontested = _seconds_of(stages, device, stages.seconds.keys() - {CONTENTION} | {slowest}) - fixed
    alone = {COPYING: uncontested - overlapping, CONTENTION: total - uncontested}
    alone.pop(slowest, None)
    return {slowest: slowest_seconds, **dict(zip(REMAINDERS, added, strict=True)), **alone, **ends}


def _seconds_of(stages: Stages, device: DeviceSpec, names: Collection[str]) -> float:
    """The whole kernel's seconds if the other stages took none."""
    some = copy.copy(stages)
    some.seconds = {name: seconds if name in names else 0.0 * seconds for name, seconds in stages.seconds.items()}
    return one(kernel_seconds(some, device))


def lane_counts(extent: int, lanes: int) -> list[int]:
    """Lanes of the vectors that hold so many elements, as :func:`sokoban.schedule.cpu_tiles.pieces` counts them.

    >>> lane_counts(21, 8)
    [8, 8, 4, 1]
    """
    remainder = extent % lanes
    bits = [1 << bit for bit in reversed(range(lanes.bit_length())) if remainder >> bit & 1]
    return [lanes] * (extent // lanes) + bits


def is_resident(anatomy: CpuAnatomy) -> bool:
    """True if all tensors of the operator stay in a cache of the whole device from one call to the next."""
    return bool(np.isclose(anatomy.ways[-1].moved_bytes, 0.0))
