"""RATIONAL for units that compute with vectors: the same pipeline of layers, whose stages are those of a core.

The stages are arithmetic, instruction issue, requests of the first cache, sums that wait for themselves, and the way
into every cache from the one below and from memory. As in :mod:`sokoban.model.rational` the slowest sets the pace
(5.4.3) and others add what it does not hide; copies into scratch memory that were not prefetched, and lines that cores
take from each other, hide nothing and are hidden by nothing. The caches are not filled by copies, so that what passes
through each follows from reuse distances (:mod:`sokoban.model.cpu.traffic`); a unit has one block at a time, and no
other to hide its waiting with.

What a device must say for this: ``teu.lane = "element"``, and of every layer who shares it.
"""

from __future__ import annotations

import itertools

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import MemoryLayer
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import read_bytes
from sokoban.language.expression import DTYPE_BYTES
from sokoban.model.cpu.rows import row_bytes, row_work
from sokoban.model.cpu.traffic import USABLE, WRITES, Traffic
from sokoban.model.cpu.work import Work, copies_of, tile_work
from sokoban.model.estimates import EstimateTable
from sokoban.schedule.cpu_tiles import CpuTiles, by_vector_axis
from sokoban.schedule.table import Floats, Ints, ScheduleTable, product, shares_rows

#: Exponents with which stages inside a core, ways between caches of its own, lines that it waits for, and layers that
#: all cores share add up: 1 would be no overlap, infinity a perfect one. Lines that come into the first cache take the
#: places of requests that it would serve; what comes from further down is on its way long before.
CORE_OVERLAP = 6.0
CACHE_OVERLAP = 1.4
WAITING_OVERLAP = 2.0
SHARED_OVERLAP = 3.0

#: Cycles until a sum can be added to again where a spec does not say: that of most processors.
CHAIN_CYCLES = 4.0

#: Cycles that a register tile takes besides its turns: its last sums come out of the pipelines and are stored, the
#: first of the next wait for what they add up. By loops in C of 4 x 96 sums on an Intel Xeon with AVX-512, in steps of
#: 16 and of 384.
TILE_CYCLES = 35.0

#: Copies of an operator's tensors that are in use by turns before one is used again, where results count as memory's:
#: a network comes back to a layer's tensors after all others.
TENSOR_SETS = 2.0

#: Lines that a core waits for at a time, of those that were not prefetched: as many as instructions within so many
#: ask for, and no more than it keeps track of.
WINDOW_INSTRUCTIONS = 200.0
LINES_IN_FLIGHT = 10.0

#: Share of the peak, which is of registers alone, that the inner loops of a product reach on cores with their caches to
#: themselves. Where a device sustains less, others that use them slow all tiles down.
SUSTAINED = 0.75

STAGES = ("compute", "issue", "l1", "chain")
WAITING = "latency"
DRAIN = "drain"
COPYING = "copying"
CONTENTION = "contention"


class Stages:
    """Seconds of the stages of every schedule of a table, for the whole kernel."""

    def __init__(self, table: ScheduleTable, placed: PlacedForm) -> None:
        self.table, self.placed, self.device, self.form = table, placed, placed.device, placed.form
        names = (*STAGES, DRAIN, WAITING, COPYING, CONTENTION, *self._ways())
        self.seconds: dict[str, Floats] = {name: np.zeros(table.count) for name in names}
        self.scratch_bytes: Ints = np.zeros(table.count, dtype=np.int64)
        self.blocks: Ints = np.ones(table.count, dtype=np.int64)
        self.registers: Ints = np.zeros(table.count, dtype=np.int64)
        self.spilled: Ints = np.zeros(table.count, dtype=np.int64)
        by_rows = shares_rows(table)
        for where, part in _split(by_rows):
            rows = table if part.all() and len(where) == table.count else table.candidates(where)
            if by_rows[where[0]]:
                self._row_kernels(where, rows)
            else:
                for positions, tiles in by_vector_axis(rows, placed):
                    self._tile_kernels(where[positions], tiles)

    def _ways(self) -> list[str]:
        """Layers from which the one above is filled: all but registers and the first cache."""
        return [layer.name for layer in self.device.layers[2:]]

    # ---- kinds of kernels

    def _tile_kernels(self, where: Ints, tiles: CpuTiles) -> None:
        """Seconds of schedules whose vectors lie along one output axis; ``where``: their rows."""
        copies = copies_of(tiles)
        work = tile_work(tiles, copies)
        self._core(where, work)
        traffic = Traffic(tiles, self.device, copies)
        passing: Floats = np.zeros(len(where))
        for above, below in self._pairs():
            copied, copied_unprefetched = traffic.copied_into(above)
            moved = traffic.into(above, self._writes(below)) - copied
            self.seconds[below.name][where] = self._seconds(above, below, moved) + self._beginning(
                traffic, above, below
            )
            longer = max(0.0, (below.latency_seconds or 0.0) - (above.latency_seconds or 0.0)) / self.device.unit_count
            lines = self.resident(above) * traffic.unprefetched_into(above) / below.transaction_bytes
            ahead = np.clip(WINDOW_INSTRUCTIONS * lines / work.instructions, 1.0, LINES_IN_FLIGHT)
            self.seconds[WAITING][where] += lines * longer / ahead
            # Copies are loads and stores alone, so that a core always waits for as many lines as it can.
            lines = self.resident(above) * copied_unprefetched / below.transaction_bytes
            self.seconds[COPYING][where] += lines * longer / LINES_IN_FLIGHT
            passing = np.maximum(passing, self._seconds(above, below, copied - copied_unprefetched))
        # Instructions of copies are started while lines are on their way, but while nothing is computed all the same.
        self.seconds[COPYING][where] += np.maximum(passing, work.copying / self._starts())
        self.seconds[CONTENTION][where] = traffic.contested_lines * self.from_other_unit() / LINES_IN_FLIGHT
        self.blocks[where] = product(tiles.blocks.values(), len(where))
        self.scratch_bytes[where] = traffic.scratch_bytes
        sums = tiles.rows * tiles.tile_pieces
        operands = tiles.tile_pieces + 1 if self.form.reduction is not None else 1
        self.registers[where] = (sums + operands) * tiles.lanes
        self.spilled[where] = np.maximum(0, sums + operands - self._vector_registers())

    def _row_kernels(self, where: Ints, table: ScheduleTable) -> None:
        """Seconds of schedules that work by rows; ``where``: their rows."""
        lanes = self.placed.vector_lanes
        self._core(where, row_work(self.form, lanes, table.count))
        for above, below in self._pairs():
            moved = row_bytes(self.form, above, self._writes(below))
            self.seconds[below.name][where] = self._seconds(above, below, moved)
        self.blocks[where] = table.block_count
        self.registers[where] = 16 * lanes

    def _pairs(self) -> list[tuple[MemoryLayer, MemoryLayer]]:
        """Every cache with the layer below it, the first cache first."""
        layers = self.device.layers[1:]
        return list(itertools.pairwise(layers))

    def _seconds(self, above: MemoryLayer, below: MemoryLayer, moved: Floats | float) -> Floats | float:
        """Time in which ``moved`` bytes pass from one layer into the cache above it."""
        return self.resident(above) * moved / below.bandwidth_bytes_per_second

    def _beginning(self, traffic: Traffic, above: MemoryLayer, below: MemoryLayer) -> Floats | float:
        """Time in which prefetchers find the beginnings of pages. Memory's own rate is that of sums of two arrays,
        whose pages begin, too."""
        if below.page_start_seconds is None or below is self.device.dram:
            return 0.0
        waits = traffic.pages_begun_into(above) * (below.page_start_seconds / self.device.unit_count)
        return self.resident(above) * waits

    def _writes(self, below: MemoryLayer) -> float:
        """Transfers of what is written. The rate of memory is that of kernels that write, which counts them once."""
        return 1.0 if below is self.device.dram else WRITES

    def resident(self, cache: MemoryLayer) -> float:
        """0 where all tensors of the operator stay in a cache of the whole device between two calls, else 1."""
        if cache.shared_by != "device":
            return 1.0
        tensors = (*self.form.expr.inputs, self.form.expr.output)
        tensor_bytes = TENSOR_SETS * sum(read_bytes(self.form.expr, tensor) for tensor in tensors)
        return float(tensor_bytes > USABLE * cache.capacity_bytes)

    def from_other_unit(self) -> float:
        """Seconds until a line that another unit has written arrives, over the units that wait for one: those of the
        layer that all share, through which it comes."""
        layers = self.device.layers[1:]
        shared = next((layer for layer in layers if layer.shared_by == "device"), self.device.dram)
        return (shared.latency_seconds or 0.0) / self.device.unit_count

    def _vector_registers(self) -> int:
        """Registers of a core that hold a vector."""
        return self.device.limits.registers_per_thread_usable // self.device.teu.lanes

    def _starts(self) -> float:
        """Instructions that all cores together start in a second."""
        teu, units = self.device.teu, self.device.unit_count
        return (teu.issue_per_cycle or teu.group_size) * self.device.clocks.boost_hz * units

    def _core(self, where: Ints, work: Work) -> None:
        """Seconds of what cores execute, all of them at work."""
        device, form = self.device, self.form
        lanes = self.placed.vector_lanes
        cycles = device.clocks.boost_hz * device.unit_count
        first = device.layers[1]
        self.seconds["compute"][where] = work.arithmetic * 2.0 * lanes / arithmetic_flops(self.placed)
        self.seconds["issue"][where] = work.instructions / self._starts()
        request = min(first.transaction_bytes, lanes * DTYPE_BYTES[form.expr.accumulate])
        self.seconds["l1"][where] = work.accesses * request / first.bandwidth_bytes_per_second
        self.seconds[DRAIN][where] = work.tiles * TILE_CYCLES / cycles
        self.seconds["chain"][where] = work.chain_turns * (device.teu.chain_cycles or CHAIN_CYCLES) / cycles


def arithmetic_flops(placed: PlacedForm) -> float:
    """FLOP/s of the arithmetic units of all cores: their peak, or less where the device does not sustain it."""
    device, dtype = placed.device, placed.arithmetic_dtype
    return min(device.peak_flops(dtype), device.sustained_flops(dtype) / SUSTAINED)


def _split(by_rows: np.ndarray) -> list[tuple[Ints, np.ndarray]]:
    """The positions of tile kernels and those of row kernels, as far as there are any, with a truth value each."""
    groups = []
    for kind in (False, True):
        where = np.flatnonzero(by_rows == kind)
        if len(where):
            groups.append((where, by_rows[where] == kind))
    return groups


def estimate(table: ScheduleTable, placed: PlacedForm) -> EstimateTable:
    """Predict every row of a table of ``placed.form``, on a device whose lanes are elements of vectors."""
    device = placed.device
    stages = Stages(table, placed)
    ones = np.ones(table.count, dtype=np.int64)
    waves = -(-stages.blocks // device.unit_count)
    seconds = dict(stages.seconds)
    seconds["block_launch"] = stages.blocks * device.block_launch_seconds
    return EstimateTable(
        seconds=kernel_seconds(stages, device),
        stage_seconds=seconds,
        registers=stages.registers,
        shared_bytes=stages.scratch_bytes,
        blocks_per_unit=ones,
        wave_count=waves,
    )


def kernel_seconds(stages: Stages, device: DeviceSpec) -> Floats:
    """Seconds of the kernel: its stages added up inside a core, then with a core's own caches, with lines that it waits
    for, and with shared layers, on the units that have blocks."""
    blocks = stages.blocks
    units = device.unit_count
    # The busiest unit's share of the blocks, over what it would have if they could be divided. Layers that all share
    # are slower too where not all ask of them.
    uneven = -(-blocks // units) * units / blocks
    core = _together([stages.seconds[name] for name in STAGES], CORE_OVERLAP)
    core = core * _spill_factor(stages) + stages.seconds[DRAIN]
    private = [layer.name for layer in device.layers[2:] if layer.shared_by != "device"]
    seconds = _together([core, *(stages.seconds[name] for name in private)], CACHE_OVERLAP)
    seconds = _together([seconds, stages.seconds[WAITING]], WAITING_OVERLAP)
    shared = [layer.name for layer in device.layers[2:] if layer.shared_by == "device"]
    seconds = _together([seconds, *(stages.seconds[name] for name in shared)], SHARED_OVERLAP)
    seconds = seconds + stages.seconds[COPYING] + stages.seconds[CONTENTION]
    return seconds * uneven + blocks * device.block_launch_seconds + device.launch_overhead_seconds


def _spill_factor(stages: Stages) -> Floats:
    """Factor of the time of a core: accumulators without a register are read and written at every turn."""
    registers = np.maximum(1, stages.registers // max(1, stages.placed.vector_lanes))
    factor: Floats = 1.0 + 4.0 * stages.spilled / registers
    return factor


def _together(parts: list[Floats], exponent: float) -> Floats:
    """``(sum of part ** exponent) ** (1 / exponent)``: the largest part, and more where others are close to it."""
    largest = np.maximum.reduce(parts)
    largest = np.where(largest > 0, largest, 1e-30)
    total = sum(((part / largest) ** exponent for part in parts), np.zeros(len(largest)))
    return largest * total ** (1.0 / exponent)
