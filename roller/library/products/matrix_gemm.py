"""Times of cuBLAS's matrix products on Tensor Cores, and its choice among kernels.

``out[b,m,n] = x[b,m,k] w[b,n,k]``: m tokens by a layer's weights. The library is a menu of tiles, each with k whole or
cut into slices; a product takes the tile that is fastest by this model. A kernel is three flows that overlap in part:

- *compute*: the busiest unit's tiles one after the other, each a ramp, its steps along k and the store of its result.
  A step feeds the matrix units through shared memory, which slows tiles with short sides, and one block alone cannot
  do a step faster than its copies, barriers and products follow each other.
- *dram*: operands and results as far as L2 does not keep them, at the rate that the bytes under way allow.
- *l2*: what the busiest unit draws through its port.

Reads that tiles far apart in time make again overlap least, a second kernel adds the slices of k, and a board at its
power limit lowers its clock within a millisecond of products. Times are those of kernels that follow one another
without the host, the gap before each included. All arrays have one entry per call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from roller.library.arrays import Bools, Floats, Ints
from roller.library.products.matrix_tiles import LONG_SLICE, MEASURED_SPLITS, SPLITS, Feed, Kernels, aligned, kernels_of

#: Weights that calls of one shape take in turn, as the layers of a model do: they stay in L2 only where all of them do.
WEIGHTS_IN_TURN = 6

#: What a unit's port to L2 passes in a clock cycle.
PORT_BYTES = 64

#: Bytes of a row per step of the shallowest kernels for warps, which a remainder of k takes.
SHALLOW_BYTES = 64

#: Most columns and summands of products whose weights fit into a thread's registers.
NARROW = 8

#: Bytes of a result while slices of k are added: float32.
_PARTIAL_BYTES = 4

#: Calls that are worked on together: their candidates' arrays stay in a processor's cache.
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class FeedConstants:
    """The numbers of the kernels that are fed one way.

    Attributes:
        step_seconds: a step of 128 bytes along k of a block alone on its unit: copy, barrier, products, one after the
            other.
        staging: ``1/m + 1/n`` of a tile, times this, is what feeding takes of the time that multiplying takes.
        ramp_steps: steps before the first product and after the last.
        store_cycles: cycles of a unit's port per :data:`PORT_BYTES` of a tile's result.
        whole_waves: 1 where every unit takes whole tiles of one size; 0 where tiles of many sizes, clusters and
            dynamic schedules leave no tail.
        port_reuse: bytes that arrive for one that passes a unit's port: blocks of a cluster share what they read.
        dram_share: of the board's DRAM rate.
        stages: buffers of one step that a block has in shared memory; all but one are under way.
        latency_seconds: until a byte that was asked for under load arrives.
        reduce_seconds: of the kernel that adds slices of k, after the gap before it and without its traffic.
    """

    step_seconds: float
    staging: float
    ramp_steps: float
    store_cycles: float
    whole_waves: float
    port_reuse: float
    dram_share: float
    stages: float
    latency_seconds: float
    reduce_seconds: float


@dataclass(frozen=True, kw_only=True)
class MatrixConstants:
    """The numbers of the model that belong to the library's kernels rather than to a board.

    Chosen on 1,600 products each of A100, H100, L40S and B200 (bfloat16, AIConfigurator's data); docs/accuracy.md tells
    what they come to on halves of the shapes and on boards that they were not chosen on.
    """

    feeds: Mapping[Feed, FeedConstants] = field(
        default_factory=lambda: {
            "warps": FeedConstants(
                step_seconds=2.697e-07, staging=35.18, ramp_steps=1.227, store_cycles=5.104, whole_waves=0.9235,
                port_reuse=0.9334, dram_share=0.9344, stages=2.777, latency_seconds=1.03e-06, reduce_seconds=3.193e-07,
            ),
            "bulk": FeedConstants(
                step_seconds=6.25e-08, staging=9.359, ramp_steps=3.842, store_cycles=0.7488, whole_waves=0.5175,
                port_reuse=2.006, dram_share=1.003, stages=3.982, latency_seconds=3.283e-07, reduce_seconds=8.472e-07,
            ),
        }
    )  # fmt: skip
    # First operands and last results of a kernel, and what is added where the first operands come from DRAM.
    start_seconds: float = 4.657e-07
    cold_seconds: float = 3.307e-07
    # Matrix rate before the power limit binds and after, over the board's own figures: what its best and its long calls
    # reach includes ramps, stores and tails, which the model counts by themselves.
    best_share: float = 1.116
    limited_share: float = 1.237
    # Length of a call at which the clock has fallen half of the way.
    limit_seconds: float = 0.0004533
    # Share of all units' ports of the kernel that adds slices of k.
    reduce_share: float = 0.427
    # Share of L2 that keeps weights from call to call (sharp: past it every line is gone before its turn), and what
    # a kernel uses again (soft).
    kept_share: float = 0.8646
    again_share: float = 0.7369
    # Tiles side by side along n that run before the next along m: x is read again for every such band.
    band_tiles: float = 4.68
    # Exponent of the sum of the flows and what is read again, which comes when the pipeline does not expect it.
    again_overlap: float = 1.421
    # Share of a result past L2 that is written to DRAM before the kernel ends.
    written: float = 0.7145
    # One token by kernels for warps: a kernel of its own that reads rows, with this share of the ports, after this.
    vector_seconds: float = 2.647e-07
    vector_share: float = 0.08194
    # Steps over those of rows in multiples of 16 bytes: others are loaded in pieces. From every second network of those
    # that pytorch-image-models measured (attention of 197 tokens and the like). Rows of 196 and 198 tokens, which
    # copies of 8 and 4 bytes could take, are as slow on these networks as on the others.
    unaligned: float = 1.8
    # Exponent of the sum of the flows; infinity is a perfect overlap.
    overlap: float = 3.0
    # The library's heuristic does not know our times: candidates count by their time to minus this.
    choice_power: float = 17.0


#: The constants in use.
CONSTANTS = MatrixConstants()

#: The flows of a kernel, and what comes with them.
STAGES = ("compute", "dram", "l2", "reduce", "launch")


@dataclass(frozen=True, kw_only=True)
class MatrixTimes:
    """Predicted times and kernels.

    Attributes:
        seconds: device time of every call.
        stages: seconds per stage of :data:`STAGES` of the fastest candidate, each as if it were alone.
        instruction: name of the matrix instruction.
        tile_m: rows of the result per block.
        tile_n: columns of the result per block.
        splits: slices of k.
        is_vector: whether the kernel is that of one token.
    """

    seconds: Floats
    stages: Mapping[str, Floats]
    instruction: npt.NDArray[np.str_]
    tile_m: Floats
    tile_n: Floats
    splits: Floats
    is_vector: Bools


def has_matrix_gemm(device: DeviceSpec, dtype: str) -> bool:
    """True if products of a type run on Tensor Cores of a board."""
    return kernels_of(device, dtype, is_aligned=True) is not None


def matrix_gemm(
    b: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    device: DeviceSpec,
    *,
    dtype: str,
    constants: MatrixConstants = CONSTANTS,
    operand_bytes: tuple[Floats, Floats] | None = None,
    by_warps: bool = False,
) -> MatrixTimes:
    """Times of products on Tensor Cores.

    Args:
        b: products of a call.
        m: rows of the result, such as tokens.
        n: columns of the result.
        k: elements that each result sums.
        device: a board with a matrix instruction for the type (:func:`has_matrix_gemm`).
        dtype: element type of the operands.
        constants: the library's numbers.
        operand_bytes: memory of x and of the weights of every call where the kernel gathers them from less than
            ``m * k`` and ``n * k`` elements, as convolutions do.
        by_warps: whether the library has no kernels but those for single warps.
    """
    size = DTYPE_BYTES[dtype]
    is_aligned = aligned(n, k, size)
    x_bytes, w_bytes = (b * m * k * size, b * n * k * size) if operand_bytes is None else operand_bytes
    seconds, tile_m, tile_n, splits = (np.zeros(len(m)) for _ in range(4))
    stages = {name: np.zeros(len(m)) for name in STAGES}
    is_vector = np.zeros(len(m), dtype=bool)
    names = np.full(len(m), "", dtype="<U12")
    for way in (True, False):
        kernels = kernels_of(device, dtype, is_aligned=way and not by_warps)
        members = np.flatnonzero(is_aligned == way)
        assert kernels is not None
        for start in range(0, len(members), _CHUNK):
            chosen = members[start : start + _CHUNK]
            calls = _Calls(
                b[chosen], m[chosen], n[chosen], k[chosen], x_bytes[chosen], w_bytes[chosen], device, kernels, size,
                constants, 1.0 if way or operand_bytes is not None else constants.unaligned,
            )  # fmt: skip
            times = calls.times()
            seconds[chosen], is_vector[chosen], names[chosen] = times.seconds, times.is_vector, kernels.name
            tile_m[chosen], tile_n[chosen], splits[chosen] = times.tile_m, times.tile_n, times.splits
            for name in STAGES:
                stages[name][chosen] = times.stages[name]
    return MatrixTimes(
        seconds=seconds, stages=stages, instruction=names, tile_m=tile_m, tile_n=tile_n, splits=splits,
        is_vector=is_vector,
    )  # fmt: skip


@dataclass(frozen=True)
class _Candidates:
    """Seconds of one kernel for every call, or of several: arrays broadcast against columns of calls."""

    busy: Floats
    reduce: Floats
    compute: Floats
    dram: Floats
    l2: Floats

    @property
    def seconds(self) -> Floats:
        return np.asarray(self.busy + self.reduce)


@dataclass(frozen=True, eq=False)
class _Calls:
    """Calls by one set of kernels: an entry per call in every array of sizes; memory of both operands in bytes."""

    b: Floats
    m: Floats
    n: Floats
    k: Floats
    x_bytes: Floats
    weights: Floats
    device: DeviceSpec
    kernels: Kernels
    element_bytes: int
    constants: MatrixConstants
    slower: float

    def times(self) -> MatrixTimes:
        """The expected time of every call, and the kernel that is fastest."""
        c, menu = self.constants, self.kernels.menu
        runs = np.stack([self._split(splits) for splits in SPLITS], axis=1).reshape(len(self.m), -1)
        vector = self._vector_seconds()
        vector = np.minimum(vector, self._narrow_seconds())
        runs = np.concatenate([runs, vector[:, None]], axis=1) + self._launch_seconds()[:, None]
        best = np.argmin(runs, axis=1)
        fastest = runs[np.arange(len(best)), best]
        weight = (fastest[:, None] / runs) ** c.choice_power
        seconds = np.where(np.isinf(runs), 0.0, weight * np.where(np.isinf(runs), 0.0, runs)).sum(axis=1)
        seconds /= weight.sum(axis=1)
        is_vector = best == runs.shape[1] - 1
        split, tile = np.divmod(np.where(is_vector, 0, best), len(menu.m))
        splits = np.array(SPLITS, dtype=np.float64)[split]
        kernel = self._candidates(np.arange(len(self.m)), tile[:, None], splits[:, None])
        stages = {
            "compute": kernel.compute[:, 0], "dram": np.where(is_vector, vector, kernel.dram[:, 0]),
            "l2": kernel.l2[:, 0], "reduce": np.where(is_vector, 0.0, kernel.reduce[:, 0]),
            "launch": self._launch_seconds(),
        }  # fmt: skip
        stages["compute"] = np.where(is_vector, 0.0, stages["compute"])
        stages["l2"] = np.where(is_vector, 0.0, stages["l2"])
        return MatrixTimes(
            seconds=seconds, stages=stages, instruction=np.full(len(self.m), self.kernels.name),
            tile_m=menu.m[tile], tile_n=menu.n[tile], splits=splits, is_vector=is_vector,
        )  # fmt: skip

    def _split(self, splits: int) -> Floats:
        """Seconds by every tile with k cut into ``splits`` slices; infinite where the library would not."""
        menu, units = self.kernels.menu, self.device.unit_count
        seconds = np.full((len(self.m), len(menu.m)), np.inf)
        tile = np.arange(len(menu.m))[None, :]
        if splits == 1:
            return self._candidates(np.arange(len(self.m)), tile, np.ones((1, 1))).seconds
        # Slices are made to fill units: where the fewest tiles are too many, so are all.
        fewest = self.b * np.ceil(self.m / menu.m.max()) * np.ceil(self.n / menu.n.max())
        shortest = 2 * splits if splits <= MEASURED_SPLITS else LONG_SLICE * splits
        rows = np.flatnonzero((fewest * splits <= 4 * units) & (self._steps(tile).max(axis=1) >= shortest))
        if not rows.size:
            return seconds
        steps = self._steps(tile)[rows]
        tiles = self._tiles(rows, tile)
        is_even = np.ceil(steps / np.ceil(steps / splits)) == splits
        allowed = is_even & (steps >= shortest) & (tiles * splits <= 4 * units)
        costs = self._candidates(rows, tile, np.full((1, 1), float(splits))).seconds
        seconds[rows] = np.where(allowed, costs, np.inf)
        return seconds

    def _steps(self, tile: Ints) -> Floats:
        """Steps along k of every call by every tile."""
        return np.asarray(np.ceil(self.k[:, None] * self.element_bytes / self.kernels.menu.depth_bytes[tile]))

    def _tiles(self, rows: Ints, tile: Ints) -> Floats:
        menu = self.kernels.menu
        along_m, along_n = np.ceil(self.m[rows, None] / menu.m[tile]), np.ceil(self.n[rows, None] / menu.n[tile])
        return np.asarray(self.b[rows, None] * along_m * along_n)

    def _candidates(self, rows: Ints, tile: Ints, splits: Floats) -> _Candidates:
        """The calls ``rows`` by tiles, indices that broadcast against a column of calls, ``splits`` likewise."""
        c, feed, menu, device = self.constants, self._feed, self.kernels.menu, self.device
        tile_m, tile_n, depth = menu.m[tile], menu.n[tile], menu.depth_bytes[tile]
        shallow = np.minimum(depth, SHALLOW_BYTES) if self.kernels.feed == "warps" else depth
        steps = np.ceil(np.ceil(self.k[rows, None] * self.element_bytes / shallow) / splits) * shallow / depth
        tiles = self._tiles(rows, tile)
        blocks = tiles * splits
        raw = blocks / device.unit_count
        waves = np.where(raw > 1, feed.whole_waves * np.ceil(raw) + (1 - feed.whole_waves) * raw, 1.0)
        resident = self._resident(tile_m, tile_n, depth)
        compute = self._compute_seconds(rows, tile, steps, waves, resident)
        read = (np.minimum(tile_m, self.m[rows, None]) + tile_n) * depth * steps
        l2 = waves * read / (feed.port_reuse * self._port)
        again = self._again_bytes(rows, tile, splits, resident)
        rate = self._dram_rate
        under_way = np.minimum(blocks, device.unit_count * resident) * (tile_m + tile_n) * depth * (feed.stages - 1)
        dram = np.maximum(
            self._once_bytes[rows, None] / rate, self._cold_bytes[rows, None] * feed.latency_seconds / under_way
        )
        together = compute**c.overlap + dram**c.overlap + l2**c.overlap
        # A cube root is twice as fast as a power.
        busy = np.cbrt(together) if c.overlap == 3 else together ** (1 / c.overlap)
        busy = (busy**c.again_overlap + (again / rate) ** c.again_overlap) ** (1 / c.again_overlap)
        instruction = self.kernels.instruction
        limited = instruction.power_limited_flops or np.inf
        slower = max(0.0, self._best_flops / (limited * c.limited_share) - 1)
        busy = busy * (1 + slower * busy / (busy + c.limit_seconds) * (compute / busy) ** 2)
        outputs = self.b[rows, None] * self.m[rows, None] * self.n[rows, None]
        moved = outputs * (splits * _PARTIAL_BYTES + _PARTIAL_BYTES + self._output_bytes)
        added = moved / (c.reduce_share * device.unit_count * self._port)
        added += device.launch_overhead_seconds + feed.reduce_seconds
        return _Candidates(busy, np.where(splits > 1, added, 0.0), compute, dram, l2)

    def _compute_seconds(self, rows: Ints, tile: Ints, steps: Floats, waves: Floats, resident: Floats) -> Floats:
        """Seconds of the busiest unit's tiles, of ``steps`` along k each; results past the edge are not stored."""
        feed, menu = self._feed, self.kernels.menu
        tile_m, tile_n, depth = menu.m[tile], menu.n[tile], menu.depth_bytes[tile]
        slowed = np.hypot(1.0, feed.staging * (1 / tile_m + 1 / tile_n))
        rate = self._best_flops / self.device.unit_count / slowed
        step = self.slower * 2 * tile_m * tile_n * depth / self.element_bytes / rate
        stored = np.minimum(tile_m, self.m[rows, None]) * np.minimum(tile_n, self.n[rows, None])
        store = feed.store_cycles * stored * self._output_bytes / self._port
        alone = np.maximum(1.0, waves / resident) * feed.step_seconds * depth / 128
        return np.asarray(np.maximum(waves * step, alone) * (steps + feed.ramp_steps) + waves * store)

    def _again_bytes(self, rows: Ints, tile: Ints, splits: Floats, resident: Floats) -> Floats:
        """Bytes of x that bands of tiles read again from DRAM: tiles run band after band of columns."""
        c, menu = self.constants, self.kernels.menu
        along_m = np.ceil(self.m[rows, None] / menu.m[tile])
        along_n = np.ceil(self.n[rows, None] / menu.n[tile])
        together = np.clip(self.device.unit_count * np.minimum(resident, 2) / splits, 1, along_m * along_n)
        band = np.minimum(along_n, c.band_tiles)
        bands = np.where(together > band * along_m, np.maximum(1.0, along_m * along_n / together), along_n / band)
        x = self.x_bytes[rows, None]
        return np.asarray(x * (bands - 1) * self._lost(x))

    def _resident(self, tile_m: Floats, tile_n: Floats, depth: Floats) -> Floats:
        """Blocks of a unit at a time: by its shared memory, and by its registers, which hold 128 x 256 results."""
        buffers = self._feed.stages * (tile_m + tile_n) * depth
        by_memory = np.floor(self.device.limits.shared_bytes_per_unit / buffers)
        by_registers = np.floor(128 * 256 / (tile_m * tile_n))
        return np.asarray(np.clip(np.minimum(by_memory, by_registers), 1, 8))

    def _vector_seconds(self) -> Floats:
        """One token by the kernel that reads rows of the weights; infinite where there is none."""
        c = self.constants
        if self.kernels.feed != "warps":
            return np.full(len(self.m), np.inf)
        ports = c.vector_share * self.device.unit_count * self._port
        seconds = c.vector_seconds + np.maximum(self._cold_bytes / self._dram_rate, self.weights / ports)
        return np.where(self.m == 1, seconds, np.inf)

    def _narrow_seconds(self) -> Floats:
        """Many tokens by few columns and few summands (``gemmSN``): threads that hold all weights; else infinite."""
        lanes = self.device.peak_flops("float32") / 2
        seconds = np.maximum(self._once_bytes / self._dram_rate, self.b * self.m * self.n * self.k / lanes)
        return np.where((self.n <= NARROW) & (self.k <= NARROW) & (self.m > NARROW), seconds, np.inf)

    def _launch_seconds(self) -> Floats:
        """The gap before a kernel, and its first operands and last results."""
        c = self.constants
        cold = c.cold_seconds * self._cold_share
        return np.asarray(self.device.launch_overhead_seconds + c.start_seconds + cold)

    def _lost(self, data_bytes: Floats) -> Floats:
        """Share of data of that many bytes that L2 no longer has when a kernel comes back to it."""
        filled = (data_bytes / (self.constants.again_share * self._l2_bytes)) ** 2
        return np.asarray(filled / (1 + filled))

    @cached_property
    def _feed(self) -> FeedConstants:
        return self.constants.feeds[self.kernels.feed]

    @cached_property
    def _port(self) -> float:
        """Bytes per second that pass a unit's port to L2."""
        return PORT_BYTES * self.device.clocks.boost_hz

    @cached_property
    def _best_flops(self) -> float:
        instruction = self.kernels.instruction
        return self.constants.best_share * (instruction.best_flops or instruction.sustained_flops)

    @cached_property
    def _dram_rate(self) -> float:
        return self._feed.dram_share * self.device.dram.bandwidth_bytes_per_second

    @cached_property
    def _l2_bytes(self) -> float:
        """Bytes of data that all units read and L2 can hold: each partition keeps a copy."""
        l2 = self.device.l2
        return 1.0 if l2 is None else l2.capacity_bytes / (l2.partitions or 1)

    @cached_property
    def _output_bytes(self) -> int:
        """Bytes of an element of the result: eight-bit products give 16-bit floats, or 32-bit sums of integers."""
        wide = DTYPE_BYTES[self.kernels.instruction.accumulate_dtype]
        integers = self.kernels.instruction.accumulate_dtype == "int32"
        return wide if integers else max(self.element_bytes, 2)

    @cached_property
    def _cold_share(self) -> Floats:
        """Share of the weights that come from DRAM: all or nothing but where they just about fit."""
        filled = (WEIGHTS_IN_TURN * self.weights / (self.constants.kept_share * self._l2_bytes)) ** 8
        return np.where(np.isinf(filled), 1.0, filled / (1 + filled))

    @cached_property
    def _cold_bytes(self) -> Floats:
        return np.asarray(self.weights * self._cold_share)

    @cached_property
    def _once_bytes(self) -> Floats:
        """Bytes between DRAM and L2 when nothing is read again."""
        x = self.x_bytes
        results = self.b * self.m * self.n * self._output_bytes
        return np.asarray(self._cold_bytes + x * self._lost(x) + self.constants.written * results * self._lost(results))
