"""Time of a module of multi-head latent attention (DeepSeek-AI, *DeepSeek-V2*, 2024, section 2.1).

Keys and values of all heads come out of one latent vector a token, which is all that the cache keeps, next to one
rotated key. With many new tokens the module makes keys and values of every head (*prefill*) and runs an attention
kernel; with few it takes the matrix that would make the keys into the queries, and that of the values into the results
(*absorbed*): the kernel reads the cache once for all heads. Products are those of cuBLAS or of scaled layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Bools, Floats
from roller.library.attention.times import AttentionSizes, attention_seconds
from roller.library.latent.families import AbsorbedConstants, AroundConstants, PrefillConstants
from roller.library.products.matrix_gemm import matrix_gemm
from roller.library.scaled.products import generation_of, scaled_times
from roller.library.scaled.tiled import KEPT_SHARE, MatrixRate, l2_bytes

#: Keys of the shortest slice of a sequence that a block takes.
SLICE_KEYS = 64

#: Most new tokens of a sequence that absorbed kernels serve, and most rows (tokens times heads) with a cache of eight
#: bits; Hopper's backends of vLLM take several, others one.
ABSORBED_TOKENS, ABSORBED_ROWS, ABSORBED_NARROW_TOKENS = 512, 8192, 128

#: Rows of the smallest product.
_LEAST_ROWS = 16

#: Exponents of the sum of units and DRAM, and of how sharply L2 loses the cache when it is more than it holds.
_OVERLAP, _SHARPNESS = 3.0, 6


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentCalls:
    """Calls of the module, an entry each.

    Attributes:
        batch: sequences.
        tokens: new ones of each.
        context: cached ones of each.
        heads: of queries.
        hidden: elements of a token.
        query_rank: of the latent vector of queries; 0 where queries are made at once.
        latent: elements of the cached vector.
        rope: elements of the rotated key.
        key_dim: of a head, without the rotated ones.
        value_dim: of a head.
    """

    batch: Floats
    tokens: Floats
    context: Floats
    heads: Floats
    hidden: Floats
    query_rank: Floats
    latent: Floats
    rope: Floats
    key_dim: Floats
    value_dim: Floats

    def some(self, chosen: Bools) -> LatentCalls:
        """The calls that are chosen."""
        return LatentCalls(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})

    @property
    def rows(self) -> Floats:
        """New tokens of all sequences."""
        return np.asarray(self.batch * self.tokens)

    @property
    def cached(self) -> Floats:
        """Elements that the cache keeps of a token."""
        return np.asarray(self.latent + self.rope)


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentTimes:
    """Seconds of modules by their parts, an entry a call."""

    products: Floats
    attention: Floats
    around: Floats
    is_absorbed: Bools

    @property
    def seconds(self) -> Floats:
        """Device time."""
        return np.asarray(self.products + self.attention + self.around)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Common facts of calls.

    Attributes:
        precision: of the products of weights.
        has_narrow_cache: whether the cache has eight bits.
        is_narrow: whether attention itself runs in eight bits.
    """

    precision: str
    has_narrow_cache: bool
    is_narrow: bool


def latent_times(
    calls: LatentCalls,
    setting: Setting,
    device: DeviceSpec,
    prefill: Mapping[str, PrefillConstants],
    absorbed: Mapping[str, AbsorbedConstants],
) -> LatentTimes:
    """Times of modules.

    Raises:
        InputError: the board has no matrix units for the precision.
    """
    is_absorbed = _Module(calls, setting, device).is_absorbed
    parts = np.zeros((3, *is_absorbed.shape))
    for way in (True, False):
        rows = is_absorbed == way
        if rows.any():
            module = _Module(calls.some(rows), setting, device)
            parts[:, rows] = (
                module.absorbed_parts(absorbed[module.absorbed_backend])
                if way
                else module.prefill_parts(prefill[module.prefill_backend])
            )
    products, attention, around = parts
    return LatentTimes(products=products, attention=attention, around=around, is_absorbed=is_absorbed)


@dataclass(frozen=True, eq=False)
class _Module:
    calls: LatentCalls
    setting: Setting
    device: DeviceSpec

    @property
    def prefill_backend(self) -> str:
        """vLLM's backend for keys and values of every head."""
        if self.setting.is_narrow and self._generation == "unit pairs":
            return "trtllm ragged"
        return f"flash attention, {self._generation}"

    @property
    def absorbed_backend(self) -> str:
        """vLLM's backend for latent vectors."""
        if self._generation == "warps":
            return "triton"
        if self._generation == "unit pairs":
            return "flashinfer"
        return "flashmla" if self.setting.has_narrow_cache else "flash attention"

    def prefill_parts(self, constants: PrefillConstants) -> tuple[Floats, Floats, Floats]:
        """Products, attention and what is around them, with keys and values of every head."""
        around = self._around_seconds(constants.around)
        return self._products(absorbed=False), self._headed_seconds(constants), around

    def absorbed_parts(self, constants: AbsorbedConstants) -> tuple[Floats, Floats, Floats]:
        """Likewise with latent vectors alone."""
        around = self._around_seconds(constants.around)
        return self._products(absorbed=True), self._latent_seconds(constants), around

    @cached_property
    def _generation(self) -> str:
        return generation_of(self.device, "bfloat16")

    @property
    def is_absorbed(self) -> Bools:
        """Calls of so few tokens that the backend takes latent vectors."""
        calls = self.calls
        if self._generation != "warp groups":
            return calls.tokens <= 1
        if not self.setting.has_narrow_cache:
            return calls.tokens <= ABSORBED_TOKENS
        return (calls.tokens <= ABSORBED_NARROW_TOKENS) & (calls.tokens * calls.heads <= ABSORBED_ROWS)

    def _products(self, *, absorbed: bool) -> Floats:
        """Products of the weights; those that are taken into queries and results stay in 16 bits."""
        calls = self.calls
        queries = calls.heads * (calls.key_dim + calls.rope)
        ranked = calls.query_rank > 0
        down = calls.cached + np.where(ranked, calls.query_rank, queries)
        seconds = self._product(calls.rows, down, calls.hidden)
        seconds = seconds + ranked * self._product(calls.rows, queries, np.maximum(calls.query_rank, 1))
        seconds = seconds + self._product(calls.rows, calls.hidden, calls.heads * calls.value_dim)
        if absorbed:
            into_queries = self._batched(calls.latent, calls.key_dim)
            return np.asarray(seconds + into_queries + self._batched(calls.value_dim, calls.latent))
        keys = calls.batch * (calls.tokens + calls.context)
        return np.asarray(seconds + self._product(keys, calls.heads * (calls.key_dim + calls.value_dim), calls.latent))

    def _product(self, m: Floats, n: Floats, k: Floats) -> Floats:
        if self.setting.precision == "bfloat16":
            return matrix_gemm(np.ones_like(m), m, n, k, self.device, dtype="bfloat16").seconds
        return scaled_times(self.setting.precision, m, n, k, self.device).seconds

    def _batched(self, n: Floats, k: Floats) -> Floats:
        return matrix_gemm(self.calls.heads, self.calls.rows, n, k, self.device, dtype="bfloat16").seconds

    def _headed_seconds(self, constants: PrefillConstants) -> Floats:
        calls, ones = self.calls, np.ones_like(self.calls.batch)
        sizes = AttentionSizes(
            b=calls.batch, heads=calls.heads, kv_heads=calls.heads, queries=calls.tokens,
            keys=calls.tokens + calls.context, head_dim=calls.key_dim + calls.rope, value_dim=calls.value_dim,
            causal=ones, window=0 * ones, page=0 * ones,
        )  # fmt: skip
        return np.asarray(constants.attention_share * attention_seconds(sizes, self.device).kernel_seconds)

    def _latent_seconds(self, constants: AbsorbedConstants) -> Floats:
        """Blocks of rows and slices of keys; DRAM and the units that read and multiply overlap in part."""
        c, calls, device = constants, self.calls, self.device
        groups = np.ceil(calls.heads * calls.tokens / c.rows)
        blocks, keys = calls.batch * groups, calls.context + (calls.tokens + 1) / 2
        most = np.maximum(1.0, np.ceil((calls.context + calls.tokens) / SLICE_KEYS))
        splits = np.clip(np.floor(device.unit_count / blocks), 1, most)
        waves = np.ceil(blocks * splits / device.unit_count)
        element = c.cached_bytes if self.setting.has_narrow_cache else 2.0
        is_narrow = self.setting.has_narrow_cache and c.multiplies_narrow
        rate = MatrixRate.of(device, "float8_e4m3fn" if is_narrow else "bfloat16")
        filled = np.clip(calls.heads * calls.tokens, _LEAST_ROWS, c.rows)
        flops = 2 * filled * (calls.cached + calls.latent)
        multiplied = 0.0 if rate is None else flops * device.unit_count / (c.compute_share * rate.best)
        read = calls.cached * element / (c.unit_bytes * device.clocks.boost_hz)
        units = waves * keys / splits * np.maximum(read, multiplied)
        cache = calls.batch * (calls.context + calls.tokens) * calls.cached * element
        kept = 1 / (1 + np.minimum(cache / (KEPT_SHARE * l2_bytes(device)), 100.0) ** _SHARPNESS)
        missed = (1 - kept) * cache * (1 + c.again_share * (groups - 1))
        dram = missed / (c.dram_share * device.dram.bandwidth_bytes_per_second)
        return np.asarray((units**_OVERLAP + dram**_OVERLAP) ** (1 / _OVERLAP) + c.split_seconds * np.log2(splits))

    def _around_seconds(self, constants: AroundConstants) -> Floats:
        calls = self.calls
        moved = calls.rows * (constants.token_bytes + constants.head_bytes * calls.heads)
        return np.asarray(constants.start_seconds + moved / self.device.dram.bandwidth_bytes_per_second)
