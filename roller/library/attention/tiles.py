"""Which attention kernel a library launches: its family, its tiles of queries and keys, and how blocks divide the work.

A block holds a tile of query rows and walks the keys tile by tile. The tiles are those in the sources of FlashAttention
2 and 3 (``flash_fwd_launch_template.h``, ``tile_size.h``), and of their successors on Blackwell what their papers say.
All arrays have one entry per call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hal.spec.device import DeviceSpec
from roller.library.arrays import Bools, Floats

Family = Literal[
    "FlashAttention 2", "FlashAttention 3", "FlashAttention 4", "TensorRT-LLM", "Triton", "cuDNN", "cuDNN, unit pairs"
]  # fmt: skip

#: First boards whose special function units take exponentials at twice the rate, and the first without (Blackwell).
ULTRA_CAPABILITIES = ((10, 3), (11, 0))

#: Row blocks of a causal call that are looked at one by one; more are sampled evenly.
SAMPLED_BLOCKS = 16
#: Splits of the keys that FlashAttention tries at most.
SPLITS_MOST = 128
#: Sequences up to which FlashAttention 3 plans its splits per call, on the device.
PLANNED_SEQUENCES = 992
#: Keys that a block of TensorRT-LLM's decoding kernel gets at least.
KEYS_LEAST = 256
#: Elements of the longest keys whose values of 128 elements leave tensor memory for two tiles of rows.
LATENT_KEYS = 192
#: Shared memory of a unit from which on FlashAttention 2 takes blocks of 64 rows for 256 elements
#: (``flash_fwd_launch_template.h``: four times 256 elements of 64 + 2 * 64 rows).
TWO_BLOCKS_BYTES = 4 * 256 * 192
#: Shared memory of a block from which on FlashAttention 2 takes its wide tiles backward.
WIDE_SHARED_BYTES = 144 * 1024
#: Warps of a block of FlashAttention 2's backward pass.
BACKWARD_WARPS = 8
#: Splits of FlashAttention 4 on Hopper, whatever the length of the cache.
HOPPER_FIXED_SPLITS = 32


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of attention calls, one entry per call each, or one number for all.

    Attributes:
        b: sequences.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        queries: queries of a sequence.
        keys: keys of a sequence.
        head_dim: elements of a query and of a key.
        value_dim: elements of a value.
        causal: 1 where query i sees the keys up to ``i + keys - queries`` alone, else 0.
        window: how many of these it sees, 0 for all.
        page: tokens of a page of keys and values, 0 where they are contiguous.
    """

    b: ArrayLike
    heads: ArrayLike
    kv_heads: ArrayLike
    queries: ArrayLike
    keys: ArrayLike
    head_dim: ArrayLike
    value_dim: ArrayLike
    causal: ArrayLike
    window: ArrayLike
    page: ArrayLike


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The sizes as arrays of equal length; ``AttentionSizes`` explains them."""

    b: Floats
    heads: Floats
    kv_heads: Floats
    queries: Floats
    keys: Floats
    head_dim: Floats
    value_dim: Floats
    causal: Floats
    window: Floats
    page: Floats

    @classmethod
    def of(cls, sizes: AttentionSizes) -> Calls:
        """The sizes broadcast against each other, in one dimension."""
        given = [np.asarray(getattr(sizes, field.name), dtype=np.float64) for field in fields(sizes)]
        columns = [np.ravel(column) for column in np.broadcast_arrays(*given)]
        return cls(**{field.name: column for field, column in zip(fields(sizes), columns, strict=True)})

    def take(self, chosen: NDArray[np.bool_]) -> Calls:
        """Some of the calls."""
        return Calls(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @property
    def turned(self) -> Calls:
        """The calls with queries for keys, as blocks of a backward pass have them: their rows are keys, which walk the
        queries that see them. Counted from the last one back, these are the keys of a causal or windowed call."""
        return replace(self, queries=self.keys, keys=self.queries)

    @property
    def group(self) -> Floats:
        """Query heads per key head."""
        return self.heads / self.kv_heads

    @property
    def decoding(self) -> Bools:
        """True if a sequence has one query for keys that were there before."""
        return (self.queries == 1) & (self.paged | (self.keys > 1))

    @property
    def paged(self) -> Bools:
        """True if keys and values lie in pages."""
        return self.page > 0

    @property
    def local(self) -> Bools:
        """True if a query sees the last keys alone."""
        return self.window > 0


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tile of a block, and how many blocks a unit holds at a time.

    Attributes:
        rows: query rows of a block.
        keys: keys of a step.
        depth: elements of a query row, padded to what the kernel is compiled for.
        value_depth: likewise of a value.
        stored: rows that loading queries and storing results takes the time of.
        whole: whether a tile of keys is loaded whole, even where fewer are left.
        lone_warps: whether a unit's schedulers have one warp each that computes.
        packed: whether the query heads of a key head are rows of one block.
        resident: blocks on a unit at a time.
        port_bytes: of shared memory's port in a step, where products wait for it; 0 where they do not, or nothing is
            known of it.
    """

    rows: Floats
    keys: Floats
    depth: Floats
    value_depth: Floats
    stored: Floats
    whole: bool
    lone_warps: Bools
    packed: Bools
    resident: Floats
    port_bytes: Floats | float = 0.0


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Division of the keys among blocks.

    Attributes:
        blocks: blocks in all, splits included.
        steps: key tiles that a block visits, the mean over the blocks.
        longest: key tiles of the longest block.
        edges: key tiles of a block, in the mean, that are masked element by element.
        splits: blocks that share the keys of the same rows.
        combined: whether results of splits are added by a second kernel, or by the last of the blocks.
    """

    blocks: Floats
    steps: Floats
    longest: Floats
    edges: Floats
    splits: Floats
    combined: Bools


@dataclass(frozen=True, kw_only=True)
class AttentionLaunch:
    """The kernel of calls that are all of one family: its tiles, and how its blocks walk the keys."""

    kind: Family
    tile: Tiles
    walk: Walk


def attention_launch(calls: Calls, kind: Family, device: DeviceSpec, *, backward: bool = False) -> AttentionLaunch:
    """The kernel of calls that are all of one family; of a backward pass that which makes the gradients.

    Blocks of FlashAttention 2 and 3 hold keys backward and walk queries, to whose gradients they add. Of the others no
    source says how they divide a backward pass: their forward pass's tiles stand in for it.
    """
    if backward and kind in ("FlashAttention 2", "FlashAttention 3"):
        tile = _backward_tiles(calls, kind, device)
        return AttentionLaunch(kind=kind, tile=tile, walk=_walk_of_tiles(calls.turned, tile))
    tile = tiles(calls, kind, device)
    return AttentionLaunch(kind=kind, tile=tile, walk=walk(calls, tile, kind, device))


def family(calls: Calls, device: DeviceSpec, *, backward: bool = False) -> NDArray[np.str_]:
    """The family of kernels of each call.

    The defaults of vLLM and FlashAttention: FlashAttention 3 on Hopper; on data-centre Blackwell TensorRT-LLM's
    kernels (through FlashInfer) for paged and decoding calls, FlashAttention 4 for others and for backward passes;
    FlashAttention 2 on every other board.
    """
    major = (device.compute_capability or (0, 0))[0]
    if major == 10:
        serving = (calls.paged | calls.decoding) & (not backward)
        return np.where(serving, "TensorRT-LLM", "FlashAttention 4")
    return np.full(calls.b.shape, "FlashAttention 3" if major == 9 else "FlashAttention 2")


def tiles(calls: Calls, kind: Family, device: DeviceSpec) -> Tiles:
    """The tiles of calls that are all of one family."""
    depth = np.maximum(calls.head_dim, calls.value_dim)
    if kind == "FlashAttention 2":
        return _tiles_of_two(calls, depth, device)
    if kind in ("FlashAttention 3", "cuDNN"):
        return _tiles_of_three(calls, depth)
    if kind == "Triton":
        return _tiles_of_triton(depth)
    return _tiles_of_blackwell(calls, depth, kind)


def _select(*cases: tuple[ArrayLike, ArrayLike]) -> Floats:
    """The value of the first case that holds; the last one is for all others."""
    conditions = np.broadcast_arrays(*(condition for condition, _ in cases))
    values = [np.broadcast_to(np.asarray(value, dtype=np.float64), conditions[0].shape) for _, value in cases]
    return np.select(list(conditions[:-1]), values[:-1], values[-1])


def _tiles_of_two(calls: Calls, needed: Floats, device: DeviceSpec) -> Tiles:
    """FlashAttention 2: paged and decoding calls run its split kernel, which has tiles of 64 rows and four warps."""
    depth = _select((needed <= 64, 64), (needed <= 96, 96), (needed <= 128, 128), (needed <= 192, 192), (True, 256))
    causal = calls.causal > 0
    major, minor = device.compute_capability or (8, 0)
    if major == 8 and minor > 0:  # the boards with about 100 kB of shared memory per unit
        rows = _select((depth <= 64, 128), ((depth <= 128) & causal, 64), (depth <= 192, 128), (True, 64))
        keys = _select((depth <= 64, 128), (depth <= 96, 64), (causal, 64), (depth <= 128, 32), (True, 64))
        warps = _select((depth == 192, 8), (True, 4))
    else:
        # Two blocks of 64 rows share a unit that has room for them, in place of one of 128, which some have none for.
        limits, wide_bytes = device.limits, 2 * 256 * (128 + 2 * 64)
        is_narrow = (limits.shared_bytes_per_block_opt_in or 0) < wide_bytes
        narrow = (depth > 192) & (is_narrow or limits.shared_bytes_per_unit >= TWO_BLOCKS_BYTES)
        rows, keys = np.where(narrow, 64.0, 128.0), _select((depth <= 64, 128), (True, 64))
        warps = _select(((depth > 128) & ~narrow, 8), (True, 4))
    split_kernel = calls.paged | calls.decoding
    rows = np.where(split_kernel, 64.0, rows)
    keys = np.where(split_kernel, _select((depth <= 64, 256), (depth <= 128, 128), (True, 64)), keys)
    warps = np.where(split_kernel, 4.0, warps)
    shared_bytes = (rows + 2 * keys) * depth * 2 + device.limits.shared_bytes_reserved_per_block
    # Each thread has nearly all the registers that it can name: eight warps fill a unit.
    resident = np.clip(np.floor(device.limits.shared_bytes_per_unit / shared_bytes), 1, 8 / warps)
    # Every warp reads all keys and values of a step, and its own queries; copies write.
    port_bytes = 2 * depth * (2 * (warps + 1) * keys + rows)
    # One query of a group of heads becomes a sequence of so many queries of the one key head.
    packed = calls.decoding & (calls.group > 1) & ~calls.local
    return Tiles(
        rows=rows,
        keys=keys,
        depth=depth,
        value_depth=depth,
        stored=rows,
        whole=False,
        lone_warps=np.zeros(depth.shape, dtype=bool),
        packed=packed,
        resident=resident,
        port_bytes=port_bytes,
    )


def _tiles_of_three(calls: Calls, needed: Floats) -> Tiles:
    """FlashAttention 3: two or three consumer warp groups of 64 rows, one where a sequence has no more rows."""
    depth = _select(
        (needed <= 64, 64), (needed <= 96, 96), (needed <= 128, 128), (needed <= 192, 192), (needed <= 256, 256),
        (True, 512),
    )  # fmt: skip
    packed = (calls.paged | calls.decoding) & (calls.group > 1)
    masked = (calls.causal > 0) | calls.local | calls.paged
    loose = calls.local | calls.paged  # keys come by single copies instead of TMA, or the window takes registers
    few = (depth != 96) & (calls.queries * np.where(packed, calls.group, 1) <= 64)
    rows = _select((few, 64), (depth <= 96, 192), (depth <= 256, 128), (True, 64))
    keys = _select(
        ((depth <= 64) & few, 192), ((depth <= 64) & calls.local, 160), ((depth <= 64) & masked, 128),
        (depth <= 64, 192), (depth <= 96, np.where(loose, 128, 144)), ((depth <= 128) & masked, 128),
        (depth <= 128, 176), (depth <= 192, np.where(loose, 96, 112)), (depth <= 256, np.where(calls.local, 64, 80)),
        (True, 64),
    )  # fmt: skip
    value_depth = np.minimum(depth, np.maximum(64, np.ceil(calls.value_dim / 16) * 16))
    ones = np.ones(depth.shape)
    return Tiles(
        rows=rows,
        keys=keys,
        depth=depth,
        value_depth=value_depth,
        stored=rows,
        whole=False,
        lone_warps=rows == 64,
        packed=packed,
        resident=ones,
    )


def _backward_tiles(calls: Calls, kind: Family, device: DeviceSpec) -> Tiles:
    """Tiles of the backward pass of FlashAttention 2 and 3: keys of a block, and queries of a step
    (``flash_bwd_launch_template.h`` of either). Eight warps, or two warp groups, have all registers of a unit."""
    needed = np.maximum(calls.head_dim, calls.value_dim)
    depth = _select((needed <= 64, 64), (needed <= 96, 96), (needed <= 128, 128), (needed <= 192, 192), (True, 256))
    if kind == "FlashAttention 3":
        masked = (calls.causal > 0) | calls.local
        rows = _select((depth <= 128, 128), (depth <= 192, 96), (True, 80))
        keys = _select((depth <= 64, 128), (depth <= 96, 64), (depth <= 128, np.where(masked, 64, 80)), (True, 64))
    elif (device.limits.shared_bytes_per_block_opt_in or 0) >= WIDE_SHARED_BYTES:
        rows, keys = _select((depth <= 128, 128), (True, 64)), _select((depth <= 64, 128), (True, 64))
    else:
        rows, keys = _select((depth <= 96, 128), (depth <= 192, 64), (True, 32)), np.full(depth.shape, 64.0)
    port_bytes = _port_bytes_of_two(rows, keys, depth) if kind == "FlashAttention 2" else 0.0
    nothing = np.zeros(depth.shape, dtype=bool)
    return Tiles(
        rows=rows,
        keys=keys,
        depth=depth,
        value_depth=depth,
        stored=2 * rows,  # keys and values come, gradients of both go
        whole=False,
        lone_warps=nothing,
        packed=nothing,
        resident=np.ones(depth.shape),
        port_bytes=port_bytes,
    )


def _port_bytes_of_two(keys: Floats, queries: Floats, depth: Floats) -> Floats:
    """Bytes of shared memory's port that a step of FlashAttention 2's backward pass takes, by how its warps divide the
    tiles of its products (``AtomLayoutMSdP``, ``NdKV``, ``MdQ`` of ``flash_bwd_launch_template.h``): each reads its
    rows of one factor and its columns of the other. Probabilities and gradients of scores pass through shared memory.
    """
    warps = BACKWARD_WARPS
    # Warps along the queries in products of scores and in that of dQ, and along the keys in those of dK and dV.
    by_scores = _select((keys <= 64, 4), (queries >= 128, 4), (True, 2))
    by_keys = _select((keys >= 128, 4), (keys >= 64, 2), (True, 1))
    by_queries = _select((depth <= 96, 4), (True, 2))
    scores = depth * (queries * warps / by_scores + keys * by_scores)
    gradients = keys * queries * warps / by_keys + queries * depth * by_keys
    of_queries = queries * keys * warps / by_queries + keys * depth * by_queries
    written = 2 * queries * keys + 2 * queries * depth
    return 2 * (2 * scores + 2 * gradients + of_queries + written)


def _tiles_of_triton(needed: Floats) -> Tiles:
    """FlashAttention 1 in Triton (``flash_attn_triton.py``, 2022): 128 x 128, elements padded to a power of two."""
    depth = np.maximum(2 ** np.ceil(np.log2(needed)), 16)
    rows = np.full(depth.shape, 128.0)
    return Tiles(
        rows=rows,
        keys=rows,
        depth=depth,
        value_depth=depth,
        stored=rows,
        whole=True,
        lone_warps=np.zeros(depth.shape, dtype=bool),
        packed=np.zeros(depth.shape, dtype=bool),
        # Four warps up to 64 elements, else eight, that name all registers.
        resident=np.where(depth <= 64, 2.0, 1.0),
    )


def _tiles_of_blackwell(calls: Calls, needed: Floats, kind: Family) -> Tiles:
    """FlashAttention 4, cuDNN, TensorRT-LLM: two tiles of 128 rows, one for few queries or full tensor memory."""
    # Shared memory feeds the instruction in rows of 128 bytes: lengths between 64 and 128 elements cost what 128 do.
    depth = _select((needed <= 64, 64), (needed <= 128, 128), (needed <= 256, 256), (True, 512))
    packed = np.zeros(depth.shape, dtype=bool)
    # Latent attention's keys are longer than its values: its results leave tensor memory for both tiles of rows.
    value_depth = np.where((needed <= LATENT_KEYS) & (calls.value_dim <= 128), np.minimum(depth, 128), depth)
    depth = np.where(value_depth < depth, LATENT_KEYS, depth)
    rows = np.where(value_depth <= 128, 256.0, 128.0)
    if kind in ("FlashAttention 4", "cuDNN, unit pairs"):
        rows = np.where(calls.queries > 128, rows, 128.0)
    else:
        # A decoding kernel multiplies keys by queries: the heads of a group are the short side of the instruction.
        packed = calls.decoding
        rows = np.where(packed, np.maximum(16, 2 ** np.ceil(np.log2(calls.group))), rows)
    keys, ones = np.full(depth.shape, 128.0), np.ones(depth.shape)
    # Tensor memory accelerators move the rows that there are, not those of the tile.
    stored = np.minimum(rows, calls.queries * np.where(packed, calls.group, 1))
    return Tiles(
        rows=rows,
        keys=keys,
        depth=depth,
        value_depth=value_depth,
        stored=stored,
        whole=True,
        lone_warps=np.zeros(depth.shape, dtype=bool),
        packed=packed,
        resident=ones,
    )


def walk(calls: Calls, tile: Tiles, kind: Family, device: DeviceSpec) -> Walk:
    """Walk of blocks over the keys, of calls that are all of one family."""
    walked = _walk_of_tiles(calls, tile)
    splits, combined = _splits(calls, tile, kind, device, walked.blocks, walked.steps)
    return Walk(
        blocks=walked.blocks * splits,
        steps=walked.steps / splits,
        longest=np.where(splits > 1, np.ceil(walked.steps / splits), walked.longest),
        edges=walked.edges / splits,
        splits=splits,
        combined=combined,
    )


def _walk_of_tiles(calls: Calls, tile: Tiles) -> Walk:
    """Walk of blocks that each see all their keys."""
    heads_per_block = np.where(tile.packed, calls.group, 1.0)
    row_blocks = np.ceil(calls.queries * heads_per_block / tile.rows)
    steps, longest = _steps(calls, tile, heads_per_block, row_blocks)
    blocks = calls.b * calls.heads / heads_per_block * row_blocks
    queries = tile.rows / heads_per_block
    edges = np.minimum(
        np.where(calls.causal > 0, np.ceil(queries / tile.keys), 0.0)
        + np.where(calls.local, np.ceil((queries + 1) / tile.keys), 0.0),
        steps,
    )
    # A lone query sees whole tiles but for those that a window cuts.
    edges = np.where(calls.decoding, np.where(calls.local & (calls.keys > calls.window), steps, 0.0), edges)
    ones = np.ones(steps.shape)
    return Walk(blocks=blocks, steps=steps, longest=longest, edges=edges, splits=ones, combined=ones < 1)


def _steps(calls: Calls, tile: Tiles, heads_per_block: Floats, row_blocks: Floats) -> tuple[Floats, Floats]:
    """Key tiles that a block visits, in the mean and at most, over an even sample of the row blocks of a sequence."""
    sampled = np.minimum(row_blocks, SAMPLED_BLOCKS)[:, None]
    places = np.minimum(np.arange(SAMPLED_BLOCKS) + 0.5, sampled - 0.5)
    block = np.floor(places * row_blocks[:, None] / sampled)
    rows, group = tile.rows[:, None], heads_per_block[:, None]
    keys, queries = calls.keys[:, None], calls.queries[:, None]
    first_query = np.floor(block * rows / group)
    end_query = np.minimum(np.ceil((block + 1) * rows / group), queries)
    before = keys - queries
    last = np.where(calls.causal[:, None] > 0, np.minimum(before + end_query, keys), keys)
    window = calls.window[:, None]
    first = np.where(window > 0, np.maximum(before + first_query - window + 1, 0), 0)
    width = tile.keys[:, None]
    visited = np.maximum(np.ceil(last / width) - np.floor(first / width), 1)  # blocks that see nothing still run
    counted = np.arange(SAMPLED_BLOCKS) < sampled
    return (visited * counted).sum(axis=1) / sampled[:, 0], np.where(counted, visited, 0).max(axis=1)


def _splits(
    calls: Calls, tile: Tiles, kind: Family, device: DeviceSpec, blocks: Floats, steps: Floats
) -> tuple[Floats, Bools]:
    """Blocks that share the keys of the same rows, and whether their results are combined afterwards."""
    units = device.unit_count
    if kind == "FlashAttention 2":
        splits = np.ones(steps.shape)
        few = tile.packed & (blocks < 0.8 * 2 * units)
        splits[few] = _efficient_splits(blocks[few], np.ceil(calls.keys[few] / tile.keys[few]), 2 * units)
        return splits, splits > 1
    if kind in ("FlashAttention 4", "Triton", "cuDNN, unit pairs"):
        return np.ones(steps.shape), np.zeros(steps.shape, dtype=bool)
    if kind == "TensorRT-LLM":
        # As many blocks as one round has room for.
        splits = np.minimum(np.floor(units / blocks), np.ceil(steps * tile.keys / KEYS_LEAST))
        splits = np.where(calls.decoding, np.maximum(splits, 1), 1.0)
        return splits, splits > 1
    # FlashAttention 3 compiles for splits when the rows of one sequence leave units idle and the keys are many; the
    # plan then splits by what all sequences need.
    seen = np.where(calls.local, np.minimum(calls.keys, calls.window + tile.rows), calls.keys)
    tiles_seen = np.ceil(seen / tile.keys)
    rows_of_one = blocks / calls.b
    split_kernel = (rows_of_one < 0.8 * units) & (tiles_seen > 4) & ~((tiles_seen <= 8) & (rows_of_one >= 32))
    # Enough steps per block that one round of blocks, and a tenth more, has room for all.
    per_block = np.ceil(1.1 * blocks * tiles_seen / units)
    splits = np.maximum(np.ceil(tiles_seen / per_block), 1)
    fixed = calls.decoding & (tile.depth > 256)
    splits = np.where(fixed, HOPPER_FIXED_SPLITS, splits)
    # The split kernel and its second kernel run even if the plan comes to one split.
    used = split_kernel | fixed
    return np.where(used & (calls.b <= PLANNED_SEQUENCES), splits, 1.0), used


def _efficient_splits(blocks: Floats, steps: Floats, slots: int) -> Floats:
    """FlashAttention 2's rule: the fewest splits whose last round is filled to 85 % of the best that any reaches."""
    splits = np.arange(1, SPLITS_MOST + 1)
    rounds = blocks[:, None] * splits / slots
    filled = rounds / np.ceil(rounds)
    share = np.ceil(steps[:, None] / splits)
    differs = np.ones(share.shape, dtype=bool)
    differs[:, 1:] = share[:, 1:] != share[:, :-1]
    eligible = differs & (splits <= np.minimum(slots, steps)[:, None])
    filled = np.where(eligible, filled, 0.0)
    good = eligible & (filled >= 0.85 * filled.max(axis=1, keepdims=True))
    return splits[good.argmax(axis=1)].astype(np.float64)
