"""Time of a cuBLAS GEMM kernel with a known tile: arithmetic in waves of blocks, memory, power.

All arrays have one entry per GEMM. The kernel is a chain of stages (thesis 5.5.3 treats our own kernels the same way):
every unit works through its blocks, resident ones side by side; DRAM delivers what the caches do not keep; a board at
its power limit lowers the clock. The slower of arithmetic and memory covers most of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Bools, Floats
from roller.library.products.gemm_tiles import Generation, generation

#: Bytes of an open DRAM row: half of the short reads of rows as long as this one activate another.
_PAGE_BYTES = 1024

#: Sectors that a row of a tile moves beyond its result where it begins and ends within sectors: the one that it shares
#: with the next tile is written twice, and read before either time, as error correction asks for whole ones.
_PARTIAL_SECTORS = 3


@dataclass(frozen=True, kw_only=True)
class GemmConstants:
    """The numbers of the model that belong to the library's kernels rather than to a board; see the comments.

    Fitted once to 36 000 calls on V100, P100, P4, T4 and A100 together (NeuSight data set); none belongs to a shape.
    """

    # What the best call ever seen reaches of a loop without latency, prologue, edges and last wave.
    best_share: float = 0.867
    # A tile's operand traffic per multiply-add is 1/m + 1/n. Loading and storing it takes issue slots and shared-memory
    # cycles from the arithmetic: the share per unit of traffic, where a scheduler issues it in the gaps between
    # multiply-adds, and where there are no gaps or shared memory is slow (``_dear_staging``).
    staging_gaps: float = 3.31
    staging_full: float = 11.6
    # Ampere's kernels copy to shared memory without passing through registers: load and store are one instruction. No
    # data: none of the boards fitted has such kernels and whole-warp schedulers.
    staging_async: float = 0.3
    # What an operand that is contiguous along k adds to the traffic of its elements, per sector that a row of a step
    # touches: such rows are a few elements long, and their words are scattered over shared memory.
    short_rows: float = 0.186
    # Sums over the slices of a sliced kernel and a second barrier per step.
    sliced: float = 1.15
    # Share of the L2 latency that each step leaves exposed, per wave of resident blocks.
    exposed: dict[Generation, float] = field(default_factory=lambda: {"maxwell": 0.0729, "volta": 1.99, "ampere": 1.02})
    # First loads and the store of a tile, in elements of k.
    prologue: float = 14.0
    # FLOP/s of a unit that these elements are for: those of the boards fitted. Loads and stores have latencies and
    # bandwidths, which units of 128 lanes and faster clocks do not shorten: there they take as long, and are more
    # elements. No data: of Ampere's kernels A100 alone was fitted.
    prologue_flops: float = 1.8e11
    # Exponent of the sum of arithmetic and memory; infinity is a perfect overlap.
    overlap: float = 7.2
    # Bytes that L2 fetches when such a read misses: 32 on Pascal, two and four sectors later (less for batched calls).
    fetch: dict[Generation, float] = field(default_factory=lambda: {"maxwell": 32.0, "volta": 46.8, "ampere": 131.0})
    # Distance along k between blocks that share reads, for blocks of two warps, as a share of k: in the first wave of
    # that in late ones, and waves until it has grown by 1 - 1/e. Half of the shared reads are lost once L2 holds less
    # than 1 / hold of that distance, of the rows that neighbours share and of the columns that others share.
    drift_first: float = 0.0336
    drift_waves: float = 17.0
    hold_m: float = 376.0
    hold_n: float = 24.8
    # Translation of addresses, on boards whose spec tells its reach: how sharply reads begin to miss with the span of
    # a unit's rows, waves until its blocks have drifted onto different rows (by 1 - 1/e), and the exponent of the sum
    # with the DRAM time (the misses of some units wait while others read).
    reach_power: float = 1.38
    page_waves: float = 15.9
    page_overlap: float = 2.83
    # Launching the splitkreduce kernel.
    reduce_seconds: float = 5.61e-06
    # Slices of k that are added in place take turns: between two turns at the same tile. 4 to 7 on all five boards.
    turn_seconds: float = 4.8e-06
    # Energy beyond the limit, in seconds at the limit, after which a board has lost half its boost: the limit holds for
    # a mean, so that a board that draws little too much keeps its boost for longer. Energy of operand traffic per
    # 1/m + 1/n, the arithmetic of a 128 x 128 tile being 1; share of the limit that DRAM takes at its full rate.
    # Limits in boards' files are stated with these two.
    power_seconds: float = 0.001
    power_traffic: float = 9.94
    power_dram: float = 0.266
    # Power that a FLOP took in those calls over what it takes within a step of a model, which is measured for seconds,
    # not for hours: why is not known, a hotter board leaks more. Chosen on whole models on T4; those on A100 and P4
    # would be one to two points better without. Clock over the boost clock below which the voltage is at its least (an
    # estimate): power goes with the clock there, and with its cube above.
    power_heat: float = 1.3
    power_knee: float = 0.7
    # Share of a call's host time that passes before the kernel starts, without and with a bias.
    floor_share: float = 0.59
    floor_share_bias: float = 0.668


CONSTANTS = GemmConstants()


@dataclass(frozen=True, kw_only=True)
class TiledGemms:
    """GEMMs and the tiles that compute them, one entry per GEMM.

    Attributes:
        b: products of a batch.
        m: rows of the result.
        n: columns of the result.
        k: elements that each result sums.
        tile_m: rows of the result per block.
        tile_n: columns of the result per block.
        depth: elements of k per step.
        threads: per block.
        registers: per thread.
        shared_bytes: per block.
        splits: slices of k.
        reduce: whether a second kernel adds the slices.
        transposed: whether the second operand is stored as [n, k].
    """

    b: Floats
    m: Floats
    n: Floats
    k: Floats
    tile_m: Floats
    tile_n: Floats
    depth: Floats
    threads: Floats
    registers: Floats
    shared_bytes: Floats
    splits: Floats
    reduce: Bools
    transposed: Bools


def kernel_stages(
    launch: TiledGemms, device: DeviceSpec, flops: float, bytes_per_element: float, constants: GemmConstants = CONSTANTS
) -> dict[str, Floats]:
    """Seconds of ``compute``, ``dram``, ``power`` and ``reduce``, each as if it were alone.

    ``reduce`` is what adding the slices of k takes beyond the arithmetic, ``kernel`` what all come to together,
    ``step`` the same within a step of a model, ``rank`` what the library picks by.
    """
    steps = np.ceil(launch.k / launch.splits / 8) * 8
    compute = _compute_seconds(launch, device, flops, steps, bytes_per_element, constants)
    dram = _dram_seconds(launch, device, steps, bytes_per_element, constants)
    translation = _translation_seconds(launch, device, steps, bytes_per_element, constants)
    q = constants.page_overlap
    dram = (dram**q + translation**q) ** (1 / q)
    p = constants.overlap
    busy = (compute**p + dram**p) ** (1 / p)
    power = _power_seconds(launch, device, steps, flops, dram, constants)
    kernel = _limited_seconds(busy, power, constants)
    # There is no measurement of models on matrix units at a board's limit, and most boards have none for float32.
    is_measured = device.power_limited_flops("float32") is not None and flops == device.best_flops("float32")
    step = _limited_seconds(busy, _cooler_seconds(busy, power, constants), constants) if is_measured else kernel
    result_bytes = launch.m * launch.n * bytes_per_element
    reduce = np.where(
        launch.reduce,
        constants.reduce_seconds + result_bytes * (launch.splits + 1) / device.dram.bandwidth_bytes_per_second,
        _turn_seconds(launch, device, kernel, constants),
    )
    return {
        "rank": _ranking(launch, device, kernel + reduce),
        "compute": compute,
        "dram": dram,
        "power": power,
        "reduce": reduce,
        "kernel": kernel + reduce,
        "step": step + reduce,
    }


def _limited_seconds(busy: Floats, power: Floats, c: GemmConstants) -> Floats:
    """A kernel of ``busy`` seconds at boost clock, ``power`` at the clock that the limit leaves for good."""
    excess = np.maximum(power - busy, 0)
    # The more a load has drawn beyond the limit, the less is left of the boost the board started with.
    boost = 1 / (1 + (excess / c.power_seconds) ** 2)
    return np.asarray(busy + excess * (1 - boost))


def _cooler_seconds(busy: Floats, power: Floats, c: GemmConstants) -> Floats:
    """``power`` within a step of a model, where a FLOP takes less power and the limit leaves a higher clock."""
    clock = busy / np.maximum(power, busy)
    drawn = np.where(clock < c.power_knee, clock, clock**3 / c.power_knee**2) * c.power_heat
    higher = np.where(drawn < c.power_knee, drawn, np.cbrt(drawn * c.power_knee**2))
    return np.asarray(np.where(power > busy, busy / np.minimum(higher, 1.0), power))


def blocks_of(launch: TiledGemms) -> tuple[Floats, Floats, Floats]:
    """Blocks along the columns and along the rows of one result, and results (batch times slices of k)."""
    return np.ceil(launch.n / launch.tile_n), np.ceil(launch.m / launch.tile_m), launch.b * launch.splits


def resident_blocks(launch: TiledGemms, device: DeviceSpec) -> Floats:
    """Blocks of each kernel that one unit holds at a time."""
    limits = device.limits
    registers = np.ceil(launch.registers / 8) * 8 * launch.threads
    shared = launch.shared_bytes + limits.shared_bytes_reserved_per_block
    per_unit = np.minimum(limits.registers_per_unit // registers, limits.shared_bytes_per_unit // shared)
    per_unit = np.minimum(per_unit, np.minimum(limits.threads_per_unit // launch.threads, limits.blocks_per_unit))
    return np.maximum(per_unit, 1.0)


def _turn_seconds(launch: TiledGemms, device: DeviceSpec, busy: Floats, c: GemmConstants) -> Floats:
    """Slices of k added in place, one after the other: what the last turns add to a kernel that is ``busy`` so long.

    The slices of a tile that run together end together and then wait for each other. Turns of earlier ones are hidden
    behind the blocks of later waves.
    """
    columns, rows, _ = blocks_of(launch)
    tiles = columns * rows
    together = np.minimum(tiles * launch.splits, device.unit_count * resident_blocks(launch, device))
    hidden = busy * (1 - together / (tiles * launch.splits))
    last = np.clip(together / tiles, 1, launch.splits) - 1
    return np.maximum(last * c.turn_seconds, (launch.splits - 1) * c.turn_seconds - hidden)


def _traffic(launch: TiledGemms) -> Floats:
    """Operand elements per multiply-add of a tile, above those of the largest (128 x 128)."""
    return 1 / launch.tile_m + 1 / launch.tile_n - 1 / 64


def _row_traffic(launch: TiledGemms, device: DeviceSpec, size: float) -> Floats:
    """Like ``_traffic``, for the requests of k-contiguous operands: sectors touched per multiply-add, times 8.

    A row that does not start with a sector straddles two, and rows of k elements start at multiples of that.
    """
    operands = 1 / launch.tile_n + np.where(launch.transposed, 1 / launch.tile_m, 0.0)
    return np.asarray(operands * (1 + _straddling(launch.k * size, device)) * 8 / launch.depth)


def _straddling(row_bytes: Floats, device: DeviceSpec) -> Floats:
    """Share of places in rows of that many bytes, one after the other, at which no sector begins."""
    sector = device.dram.transaction_bytes
    return np.asarray(1 - np.gcd(np.asarray(row_bytes, dtype=np.int64), sector) / sector)


def _dear_staging(device: DeviceSpec) -> bool:
    """True if moving operands costs a tile arithmetic.

    It does where a scheduler has 32 float32 lanes, so that every other instruction takes the place of a multiply-add,
    and where shared memory delivers less than a word for every 3 multiply-adds (otherwise 2 words for 4 or 5).
    """
    multiply_adds = device.peak_flops("float32") / 2
    lanes = multiply_adds / device.unit_count / device.clocks.boost_hz
    return lanes / _schedulers(device) > 24 or device.shared.bandwidth_bytes_per_second / multiply_adds < 4 / 3


def _schedulers(device: DeviceSpec) -> int:
    return device.teu.group_size


def _compute_seconds(
    launch: TiledGemms, device: DeviceSpec, flops: float, steps: Floats, size: float, c: GemmConstants
) -> Floats:
    columns, rows, results = blocks_of(launch)
    per_unit = np.ceil(columns * rows * results / device.unit_count)  # blocks on the busiest unit
    staging = c.staging_full if _dear_staging(device) else c.staging_gaps
    if _dear_staging(device) and generation(device) == "ampere":
        staging *= c.staging_async
    traffic = _traffic(launch) + c.short_rows * _row_traffic(launch, device, size)
    slowdown = (1 + staging * traffic) * np.where(launch.depth > 8, c.sliced, 1.0)
    prologue = c.prologue
    if generation(device) == "ampere":
        prologue *= max(flops / device.unit_count / c.prologue_flops, 1.0)
    block = 2 * launch.tile_m * launch.tile_n * (steps + prologue) * slowdown * device.unit_count
    block *= c.best_share / flops
    kind = generation(device)
    latency = (device.l2 or device.dram).latency_seconds or 220e-9
    exposed = c.exposed[kind] * latency * steps / launch.depth
    # Blocks of two warps occupy two of four schedulers, and the same two for every first and second of four blocks.
    narrow = launch.threads / device.teu.lanes < _schedulers(device)
    uneven = np.where(narrow, np.array([0.0, 1.0, 2.0, 1.0])[np.mod(per_unit, 4).astype(np.int64)], 0.0)
    waves = np.ceil(per_unit / np.minimum(resident_blocks(launch, device), per_unit))
    # Nothing can beat the datasheet.
    limit = flops * device.peak_flops("float32") / device.best_flops("float32")
    work = 2 * columns * rows * results * launch.tile_m * launch.tile_n * steps
    return np.asarray(np.maximum((per_unit + uneven) * block + waves * exposed, work / limit))


def _ranking(launch: TiledGemms, device: DeviceSpec, kernel: Floats) -> Floats:
    """Figure that the library picks by, the smaller the better; to be compared between candidates for one GEMM.

    Volta's kernels: our time. Ampere's: likewise, but k is split only where even the smallest tiles leave units idle
    (98 of 100 NeuSight calls on A100). The older heuristic for Maxwell's knows nothing of memory. Where tiles of
    64 x 64 fill the board, or k is short, it does not split k and takes the least area of whole tiles, with a little
    regard to whole waves; it rates the 64 x 64 tile lower where units have two schedulers. Elsewhere it splits k so
    that the slices just fill the board. (Of the NeuSight calls on P100 and P4, 99 of 100 split by this rule, 7 to 8
    of 10 have the tile.)
    """
    kind = generation(device)
    if kind == "volta":
        return kernel
    if kind == "ampere":
        smallest = np.ceil(launch.m / 32) * np.ceil(launch.n / 32) / device.unit_count
        return np.where((launch.splits > 1) & (smallest > 4 / 3), np.inf, kernel)
    columns, rows, results = blocks_of(launch)
    at_once = device.unit_count * resident_blocks(launch, device)
    filled = columns * rows / at_once
    area = columns * rows * launch.tile_m * launch.tile_n * (np.ceil(filled) / filled) ** 0.1
    area *= np.where((launch.tile_m == 64) & (_schedulers(device) < 4), 1.075, 1.0)
    # Only the order counts: no time is meant. The power keeps the runner-up, be its area larger by a hundredth, out of
    # the mean that the caller takes.
    squares = np.ceil(launch.m / 64) * np.ceil(launch.n / 64)
    unsplit = np.where((launch.splits > 1) | (launch.tile_m < 64), np.inf, (area / (squares * 64**2)) ** 100)
    split = np.where(launch.splits > 1, kernel * (1 + np.log(filled * results) ** 2), np.inf)
    choice = np.where((squares >= 8 * device.unit_count) | (launch.k <= 256), unsplit, split)
    return np.where(launch.transposed, choice, kernel)  # batched calls have one tile and never split


def _power_seconds(
    launch: TiledGemms, device: DeviceSpec, steps: Floats, flops: float, dram: Floats, c: GemmConstants
) -> Floats:
    limit = device.power_limited_flops("float32")
    if limit is None:
        return np.zeros_like(launch.m)
    limit *= flops / device.best_flops("float32")
    columns, rows, results = blocks_of(launch)
    work = 2 * columns * rows * results * launch.tile_m * launch.tile_n * steps
    return np.asarray(work * (1 + c.power_traffic * _traffic(launch)) / limit + c.power_dram * dram)


def _dram_seconds(launch: TiledGemms, device: DeviceSpec, steps: Floats, size: float, c: GemmConstants) -> Floats:
    """Reads of both operands, as far as L2 does not keep them, and the writes."""
    kind = generation(device)
    reads = _reads(launch, device, steps, size, c)
    inputs = (reads.once_m + reads.once_n) / launch.b
    l2 = float((device.l2 or device.dram).capacity_bytes)
    cached_share = 1 / (1 + (inputs / l2) ** 4)
    read_m = reads.once_m + np.maximum(reads.again_m - reads.once_m, 0) * (1 - cached_share)
    read_n = reads.once_n + np.maximum(reads.again_n - reads.once_n, 0) * (1 - cached_share)
    stream = device.dram.bandwidth_bytes_per_second
    # Operands that are contiguous along k are read in rows of ``depth`` elements. Once such rows are far apart, each
    # activates a DRAM row, and the activations per second bound the rate.
    scattered = device.dram.scattered_bytes_per_second or 0.25 * stream
    fetch = np.where(launch.transposed, c.fetch[kind], max(c.fetch[kind] / 2, 32.0))
    fetch = np.maximum(fetch, np.where(launch.depth > 8, launch.depth * size, 0.0))
    rate = np.minimum(scattered * fetch / 32, stream)
    far = steps * size / (steps * size + _PAGE_BYTES)
    short = (1 - far) / stream + far / rate
    writes = launch.b * launch.m * launch.n * size * np.where(launch.splits > 1, 2 * launch.splits, 1)
    # Rows of a tile are written with the sectors that they share with the next tile's.
    sectors = _PARTIAL_SECTORS * _straddling(launch.n * size, device)
    writes *= 1 + sectors * device.dram.transaction_bytes / (np.minimum(launch.tile_n, launch.n) * size)
    return np.asarray(read_m * short + read_n * np.where(launch.transposed, short, 1 / stream) + writes / stream)


def _translation_seconds(
    launch: TiledGemms, device: DeviceSpec, steps: Floats, size: float, c: GemmConstants
) -> Floats:
    """Misses of the addresses that a unit keeps, where the board's spec tells its reach; otherwise none.

    A k-contiguous operand is read in short rows, each of them one access to the pages of its row. A unit misses once
    the rows of its blocks span more than the reach. Neighbouring blocks lie in the same rows of the result; later on
    the blocks of a unit are far apart.
    """
    reach, miss = device.dram.translation_reach_bytes, device.dram.translation_miss_seconds
    if reach is None or miss is None:
        return np.zeros_like(steps)
    columns, rows, results = blocks_of(launch)
    blocks = columns * rows * results
    used_m = np.minimum(1, launch.m / (rows * launch.tile_m)) * launch.tile_m
    used_n = np.minimum(1, launch.n / (columns * launch.tile_n)) * launch.tile_n
    resident = np.minimum(resident_blocks(launch, device), np.ceil(blocks / device.unit_count))
    waves = np.maximum(blocks / (device.unit_count * resident), 1)
    # A unit gets every unit_count-th block, and blocks start along the columns.
    most = np.minimum(resident, rows)
    down = np.clip(1 + device.unit_count * (resident - 1) / columns, 1, most)
    down += (most - down) * (1 - np.exp((1 - waves) / c.page_waves))
    row = launch.k * size
    missed_m = 1 / (1 + (reach / (used_m * down * row)) ** c.reach_power)
    missed_n = 1 / (1 + (reach / (used_n * np.minimum(resident, columns) * row)) ** c.reach_power)
    misses = used_m * missed_m + np.where(launch.transposed, used_n * missed_n, 0.0)
    return np.asarray(blocks * misses * steps / launch.depth * miss / device.unit_count)


class _Reads(NamedTuple):
    """Bytes of the m and the n operand: needed once each, and read when L2 keeps nothing from wave to wave."""

    once_m: Floats
    once_n: Floats
    again_m: Floats
    again_n: Floats


def _reads(launch: TiledGemms, device: DeviceSpec, steps: Floats, size: float, c: GemmConstants) -> _Reads:
    """Bytes of both operands that the running blocks read, as far as those that run together do not share them."""
    columns, rows, results = blocks_of(launch)
    blocks = columns * rows * results
    resident = resident_blocks(launch, device)
    together = np.minimum(blocks, device.unit_count * resident)
    # Blocks start along the columns first; those that run together read the tiles they share once.
    across = np.minimum(columns, together)
    down = np.clip(together / across, 1, rows)
    parts = np.maximum(together / (columns * rows), 1)
    used_m = np.minimum(1, launch.m / (rows * launch.tile_m)) * launch.tile_m
    used_n = np.minimum(1, launch.n / (columns * launch.tile_n)) * launch.tile_n
    strip = steps * size
    waves = blocks / together
    shared_m, shared_n = waves * parts * down * used_m * strip, waves * parts * across * used_n * strip
    alone_m, alone_n = blocks * used_m * strip, blocks * used_n * strip
    # The blocks of the first wave start together; from wave to wave they drift apart, the more so the fewer warps a
    # block has to even out its luck. What one block reads is still in L2 for another that shares it if they are closer
    # than the stretch of k that L2 holds of what all running blocks read.
    l2 = float((device.l2 or device.dram).capacity_bytes)
    depth = l2 / (together * (used_m + used_n) * size)
    settled = 1 - (1 - c.drift_first) * np.exp(-(waves - 1) / c.drift_waves)
    distance = steps * settled * 64 / launch.threads
    lost_m = distance / (distance + c.hold_m * depth)
    lost_n = distance / (distance + c.hold_n * depth)
    once_m, once_n = launch.b * launch.m * launch.k * size, launch.b * launch.n * launch.k * size
    return _Reads(once_m, once_n, shared_m + (alone_m - shared_m) * lost_m, shared_n + (alone_n - shared_n) * lost_n)
