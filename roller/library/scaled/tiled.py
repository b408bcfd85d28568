"""Time of a kernel whose blocks make tiles of known sides: one product, or many products of a group each.

Where cuBLAS chooses among kernels by a heuristic of its own (:mod:`roller.library.products.matrix_gemm`), CUTLASS,
DeepGEMM, Triton and TensorRT-LLM take the tile that a table in their callers names. The flows of a kernel are the same:

- *compute*: the busiest unit's tiles one after the other; each is a ramp, steps along k, and the store of its result;
- *dram*: weights, activations and results as far as L2 does not keep them;
- *l2*: what the busiest unit draws through its port.

They overlap in part; activations that bands of tiles read again overlap least, and a board at its power limit lowers
its clock within a millisecond. Where blocks end with their tile, those behind them copy their arguments before they
begin. All arrays have one entry per call and broadcast against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Bools, Floats
from roller.library.products.matrix_gemm import PORT_BYTES
from roller.library.streaming.elementwise import REUSE_FULL

#: Bytes of an element of every result: 16-bit floats.
RESULT_BYTES = 2

#: Bytes of a line of L1 and L2.
LINE_BYTES = 128

#: Share of L2 that keeps weights from call to call (sharp), and what a kernel uses again (soft).
KEPT_SHARE, AGAIN_SHARE = 0.95, 0.74

#: Columns of tiles that run before the next rows, and the exponent of the sum of the flows and what they read again.
BAND_TILES, AGAIN_OVERLAP = 4.7, 1.42

#: Bytes that a block has under way to DRAM, and how long one of them takes under load, seconds.
UNDER_WAY_BYTES, LATENCY_SECONDS = 65_536, 4e-7

#: Between two kernels of a CUDA graph without programmatic dependent launch, on any board: what the front end takes.
#: The smallest products of cuBLAS, which give :attr:`DeviceSpec.launch_overhead_seconds`, start before those ahead end.
GAP_SECONDS = 1.7e-6

#: More times than L2 that data fill than which nothing changes; a bound for powers.
_MANY = 1e6


@dataclass(frozen=True, kw_only=True)
class TiledConstants:
    """The numbers of a family of kernels.

    Attributes:
        step_seconds: a step of 128 bytes along k of a block alone on its unit: copy, barrier and product in turn.
        step_hz: boost clock of the board that it was chosen on, whose cycles it takes on others, too; None where
            several chose it.
        staging: ``1/m + 1/n`` of a tile, times this, is what feeding takes of the time that multiplying takes.
        ramp_steps: steps before the first product and after the last.
        store: times a unit's port for the bytes of a tile's result.
        port_reuse: bytes that arrive for one that passes a unit's port: blocks of a cluster share what they read.
        dram_share: of the board's DRAM rate.
        start_seconds: first operands and last results, after the gap before the kernel.
        cold_seconds: added where the first operands come from DRAM.
        best_share: of the matrix rate that the board's best product reaches.
        written: share of a result past L2 that is written to DRAM before the kernel ends.
        overlap: exponent of the sum of the flows; infinity is a perfect overlap.
        limited_share: of the matrix rate that the power limit leaves the board's long products.
        limit_seconds: length of a call at which the clock has fallen half of the way.
        end_seconds: of a tile whose few warps each walk part of k and add at the end (CUTLASS 2).
        l2_share: of the board's L2 rate that all units draw together; infinity where tiles are large enough not to ask.
        is_persistent: whether blocks stay on their units and store a tile's result while they multiply the next.
        line_share: of the rates of DRAM and ports that steps draw which take half a line of 128 bytes of each row.
        narrow_bytes: that a unit copies in a cycle where rows begin at any element, so that lanes copy one each.
        argument_bytes: of the kernel's arguments that each thread copies into memory of its own where blocks end with
            their tile (CUTLASS 2); 0 where others follow without a break.
    """

    step_seconds: float
    staging: float
    ramp_steps: float
    store: float
    port_reuse: float
    dram_share: float
    start_seconds: float
    cold_seconds: float
    best_share: float
    written: float
    overlap: float
    limited_share: float = 1.237
    limit_seconds: float = 4.5e-4
    end_seconds: float = 0.0
    step_hz: float | None = None
    l2_share: float = np.inf
    is_persistent: bool = False
    line_share: float = 1.0
    narrow_bytes: float = np.inf
    argument_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiling:
    """Calls of one family of kernels, each by tiles of its own sides.

    Attributes:
        m: rows of all results of a call, such as tokens.
        n: columns of the result.
        k: elements that each result sums.
        tile_m: rows of a block.
        tile_n: columns of a block.
        depth_bytes: of a row of either operand per step along k.
        blocks: tiles of a call, those that fill clusters included.
        rows: rows of a tile that hold something, on average.
        weight_bytes: of the weights that a call reads, scales included.
        activation_bytes: of the rows that a call reads, scales included.
        turn_bytes: of all weights that are read before these are read again.
        element_bytes: of an element as it is multiplied: 0.5 for four bits.
        resident: blocks of a unit at a time.
        ends: whether a tile ends as :attr:`TiledConstants.end_seconds` says.
        is_narrow: whether rows of either operand begin at any element.
        threads: of a block.
        in_stripes: whether units share all steps of all tiles evenly, as Marlin's kernels do, and not whole tiles.
    """

    m: Floats
    n: Floats
    k: Floats
    tile_m: Floats
    tile_n: Floats
    depth_bytes: Floats
    blocks: Floats
    rows: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    turn_bytes: Floats
    element_bytes: float
    resident: Floats | float = 1.0
    ends: Bools | bool = False
    is_narrow: Bools | bool = False
    threads: Floats | float = 128.0
    in_stripes: bool = False


@dataclass(frozen=True, kw_only=True)
class TiledTimes:
    """Seconds of every call, and of its flows, each as if it were alone."""

    seconds: Floats
    compute: Floats
    dram: Floats
    l2: Floats


@dataclass(frozen=True)
class MatrixRate:
    """FLOP/s of a board's matrix units: of its best product, and at its power limit (None where it does not bind)."""

    best: float
    limited: float | None

    @classmethod
    def of(cls, device: DeviceSpec, dtype: str) -> MatrixRate | None:
        """The rates for an element type; None where the board does not multiply it."""
        instruction = device.best_matrix_instruction(dtype)
        if instruction is None:
            return None
        return cls(instruction.best_flops or instruction.sustained_flops, instruction.power_limited_flops)


def tiled_seconds(tiling: Tiling, device: DeviceSpec, rate: MatrixRate, constants: TiledConstants) -> TiledTimes:
    """Device time of calls, the gap before each included."""
    return _Kernel(tiling, device, rate, constants).times()


def kept_share(data_bytes: Floats, device: DeviceSpec) -> Floats:
    """Share of so many bytes that L2 still has when a later kernel comes for them (soft)."""
    filled = np.minimum(data_bytes / (AGAIN_SHARE * l2_bytes(device)), _MANY) ** 2
    return np.asarray(1 / (1 + filled))


def l2_bytes(device: DeviceSpec) -> float:
    """Bytes of data that all units read and L2 can hold: each partition keeps a copy."""
    return 1.0 if device.l2 is None else device.l2.capacity_bytes / (device.l2.partitions or 1)


@dataclass(frozen=True, eq=False)
class _Kernel:
    tiling: Tiling
    device: DeviceSpec
    rate: MatrixRate
    constants: TiledConstants

    def times(self) -> TiledTimes:
        c, tiling = self.constants, self.tiling
        compute, dram, l2 = self._compute_seconds(), self._dram_seconds(), self._l2_seconds()
        busy = (compute**c.overlap + dram**c.overlap + l2**c.overlap) ** (1 / c.overlap)
        again = self._again_bytes() / self._dram_rate
        busy = (busy**AGAIN_OVERLAP + again**AGAIN_OVERLAP) ** (1 / AGAIN_OVERLAP)
        limited = self.rate.limited or np.inf
        slower = max(0.0, c.best_share * self.rate.best / (limited * c.limited_share) - 1)
        busy = busy * (1 + slower * busy / (busy + c.limit_seconds) * (compute / np.maximum(busy, 1e-12)) ** 2)
        started = GAP_SECONDS + c.start_seconds + c.cold_seconds * self._cold_share
        shape = np.broadcast_shapes(np.shape(busy), np.shape(tiling.m))
        return TiledTimes(
            seconds=np.broadcast_to(busy + started, shape), compute=np.broadcast_to(compute, shape),
            dram=np.broadcast_to(dram, shape), l2=np.broadcast_to(l2, shape),
        )  # fmt: skip

    def _compute_seconds(self) -> Floats:
        """Seconds of the busiest unit's tiles; results past the edge are not stored."""
        c, tiling = self.constants, self.tiling
        slowed = np.hypot(1.0, c.staging * (1 / tiling.tile_m + 1 / tiling.tile_n))
        flops = c.best_share * self.rate.best / self.device.unit_count / slowed
        step = 2 * tiling.tile_m * tiling.tile_n * tiling.depth_bytes / tiling.element_bytes / flops
        alone = self._step_seconds * tiling.depth_bytes / 128
        if tiling.in_stripes:
            each = np.maximum(step, alone)
            return np.asarray(each * (self._waves * self._steps + c.ramp_steps) + np.ceil(self._waves) * self._end)
        in_turn = np.maximum(1.0, self._waves / tiling.resident) * alone
        if c.is_persistent:
            ramp = c.ramp_steps * np.maximum(step, alone)
            walked = np.maximum(self._waves * step, in_turn) * self._steps
            return np.asarray(np.maximum(walked, self._waves * self._end) + ramp + self._end)
        walked = np.maximum(self._waves * step, in_turn) * (self._steps + c.ramp_steps)
        each = self._steps * self._narrow_seconds + self._end
        return np.asarray(walked + self._waves * each + self._between_seconds)

    @property
    def _step_seconds(self) -> float:
        c = self.constants
        return c.step_seconds if c.step_hz is None else c.step_seconds * c.step_hz / self.device.clocks.boost_hz

    @property
    def _narrow_seconds(self) -> Floats:
        """Seconds that a step waits for copies of single elements, which go through registers before it multiplies."""
        tiling = self.tiling
        copied = (tiling.tile_m + tiling.tile_n) * tiling.depth_bytes
        return np.where(tiling.is_narrow, copied / (self.constants.narrow_bytes * self.device.clocks.boost_hz), 0.0)

    @property
    def _between_seconds(self) -> Floats:
        """Seconds between blocks that end with their tile and those that begin after them, of a whole call.

        Every thread of the latter first copies the kernel's arguments. Those of all blocks that run together stay in
        L2, where the next ones write over them in the same order, or none do: up to the share that repeated calls find
        whole. DRAM takes the results of the former meanwhile.
        """
        c, tiling, device = self.constants, self.tiling, self.device
        if not c.argument_bytes or device.l2 is None:
            return np.asarray(0.0)
        together = device.unit_count * np.asarray(tiling.resident)
        copied = c.argument_bytes * np.asarray(tiling.threads)
        is_lost = copied * np.minimum(tiling.blocks, together) > REUSE_FULL * l2_bytes(device)
        copies = copied / np.where(is_lost, self._dram_rate, device.l2.bandwidth_bytes_per_second)
        return np.maximum(tiling.blocks - together, 0.0) * (copies + self._tile_bytes / self._dram_rate)

    @property
    def _tile_bytes(self) -> Floats:
        """Bytes of a tile's result."""
        tiling = self.tiling
        return np.asarray(np.minimum(tiling.tile_m, tiling.rows) * np.minimum(tiling.tile_n, tiling.n) * RESULT_BYTES)

    @property
    def _end(self) -> Floats:
        """Seconds of the store of a tile's result."""
        c, tiling = self.constants, self.tiling
        return np.asarray(c.store * self._tile_bytes / self._port + c.end_seconds * np.asarray(tiling.ends))

    def _dram_seconds(self) -> Floats:
        tiling, device = self.tiling, self.device
        cold = tiling.weight_bytes * self._cold_share
        results = tiling.m * tiling.n * RESULT_BYTES
        once = cold + tiling.activation_bytes * (1 - kept_share(tiling.activation_bytes, device))
        once = once + self.constants.written * results * (1 - kept_share(results, device))
        under_way = np.minimum(tiling.blocks, device.unit_count * tiling.resident) * UNDER_WAY_BYTES
        return np.maximum(
            once / (self._dram_rate * self._line_share), cold * LATENCY_SECONDS / np.maximum(under_way, 1.0)
        )

    def _l2_seconds(self) -> Floats:
        """Seconds of the busiest unit's port, or of L2 itself where all tiles ask it for more."""
        c, tiling, cache = self.constants, self.tiling, self.device.l2
        read = (np.minimum(tiling.tile_m, tiling.rows) + tiling.tile_n) * tiling.depth_bytes * self._steps
        together = 0.0 if cache is None else tiling.blocks * read / (c.l2_share * cache.bandwidth_bytes_per_second)
        return np.maximum(self._waves * read / (c.port_reuse * self._port * self._line_share), together)

    def _again_bytes(self) -> Floats:
        """Bytes of activations that bands of tiles read again from DRAM."""
        tiling = self.tiling
        along_m, along_n = np.ceil(tiling.m / tiling.tile_m), np.ceil(tiling.n / tiling.tile_n)
        together = np.clip(self.device.unit_count * np.minimum(tiling.resident, 2), 1, np.maximum(along_m * along_n, 1))
        band = np.minimum(along_n, BAND_TILES)
        bands = np.where(together > band * along_m, np.maximum(1.0, along_m * along_n / together), along_n / band)
        data = tiling.activation_bytes
        return np.asarray(data * np.maximum(bands - 1, 0) * (1 - kept_share(data, self.device)))

    @cached_property
    def _waves(self) -> Floats:
        """Tiles of the busiest unit."""
        raw = self.tiling.blocks / self.device.unit_count
        if self.tiling.in_stripes:
            return np.maximum(raw, 1 / np.maximum(self._steps, 1.0))
        return np.where(raw > 1, np.ceil(raw), 1.0)

    @cached_property
    def _steps(self) -> Floats:
        return np.asarray(np.ceil(self.tiling.k * self.tiling.element_bytes / self.tiling.depth_bytes))

    @cached_property
    def _cold_share(self) -> Floats:
        """Share of the weights that come from DRAM: all or nothing but where those of a turn just about fit."""
        filled = np.minimum(self.tiling.turn_bytes / (KEPT_SHARE * l2_bytes(self.device)), 100.0) ** 8
        return np.asarray(filled / (1 + filled))

    @cached_property
    def _port(self) -> float:
        return PORT_BYTES * self.device.clocks.boost_hz

    @cached_property
    def _dram_rate(self) -> float:
        return self.constants.dram_share * self.device.dram.bandwidth_bytes_per_second

    @cached_property
    def _line_share(self) -> Floats:
        return np.where(np.asarray(self.tiling.depth_bytes) < LINE_BYTES, self.constants.line_share, 1.0)
