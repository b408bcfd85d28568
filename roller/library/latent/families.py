"""Numbers of latent attention's kernels, one set a backend, whatever board, precision and shape.

Chosen on half of the shapes of L40S, H100 and B200 (``today`` of AIConfigurator's performance database, vLLM 0.24);
docs/accuracy.md has the errors on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AroundConstants:
    """Kernels around products and attention: norms, rotations, copies, writes to the cache.

    Attributes:
        start_seconds: of all of them with one token, attention's start included.
        token_bytes: moved through DRAM for each token.
        head_bytes: for each token and head.
    """

    start_seconds: float
    token_bytes: float
    head_bytes: float


@dataclass(frozen=True, kw_only=True)
class PrefillConstants:
    """Attention over keys and values of every head.

    Attributes:
        around: the other kernels.
        attention_share: of the time that :mod:`roller.library.attention` has for equally long keys and values.
    """

    around: AroundConstants
    attention_share: float


@dataclass(frozen=True, kw_only=True)
class AbsorbedConstants:
    """Attention over latent vectors, which all heads share.

    Attributes:
        around: the other kernels.
        rows: queries of a block, heads times tokens.
        cached_bytes: of an element of a cache of eight bits, its share of the scales included.
        multiplies_narrow: whether a cache of eight bits is multiplied as it is, and not in 16 bits.
        unit_bytes: of the cache that a unit reads in a clock cycle.
        compute_share: of the rate of the board's best product.
        dram_share: of the board's DRAM rate.
        split_seconds: of the sum over blocks that share a sequence, for every doubling of their number.
        again_share: of the cache that each further block of rows reads from DRAM once more.
    """

    around: AroundConstants
    rows: int
    cached_bytes: float = 1.0
    multiplies_narrow: bool = False
    unit_bytes: float
    compute_share: float
    dram_share: float
    split_seconds: float
    again_share: float = 0.05


PREFILL: Mapping[str, PrefillConstants] = {
    "flash attention, warps": PrefillConstants(
        around=AroundConstants(start_seconds=2.58e-5, token_bytes=15_100, head_bytes=2460), attention_share=0.829
    ),
    "flash attention, warp groups": PrefillConstants(
        around=AroundConstants(start_seconds=6.61e-5, token_bytes=97_300, head_bytes=3230), attention_share=0.684
    ),
    "flash attention, unit pairs": PrefillConstants(
        around=AroundConstants(start_seconds=1.27e-5, token_bytes=20_700, head_bytes=1580), attention_share=0.687
    ),
    "trtllm ragged": PrefillConstants(
        around=AroundConstants(start_seconds=1.75e-5, token_bytes=22_700, head_bytes=4520), attention_share=0.623
    ),
}

ABSORBED: Mapping[str, AbsorbedConstants] = {
    "triton": AbsorbedConstants(
        around=AroundConstants(start_seconds=3.28e-5, token_bytes=1510, head_bytes=11_400), rows=16, unit_bytes=4.54,
        compute_share=0.6, dram_share=0.935, split_seconds=5.38e-6, again_share=0.2,
    ),
    "flash attention": AbsorbedConstants(
        around=AroundConstants(start_seconds=7.14e-5, token_bytes=107_500, head_bytes=5540), rows=64, unit_bytes=47.1,
        compute_share=0.85, dram_share=1.0, split_seconds=1.03e-7,
    ),
    "flashmla": AbsorbedConstants(
        around=AroundConstants(start_seconds=8.25e-5, token_bytes=186_800, head_bytes=7410), rows=64,
        cached_bytes=656 / 576, unit_bytes=15.4, compute_share=0.896, dram_share=1.4, split_seconds=3.02e-7,
    ),
    "flashinfer": AbsorbedConstants(
        around=AroundConstants(start_seconds=1.32e-5, token_bytes=211_600, head_bytes=27_600), rows=128,
        multiplies_narrow=True, unit_bytes=25.3, compute_share=0.85, dram_share=1.3, split_seconds=1.15e-6,
    ),
}  # fmt: skip
