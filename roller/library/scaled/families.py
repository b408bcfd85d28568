"""Numbers of the libraries' kernels for scaled and grouped products: one set a family, whatever board and shape.

Chosen on 1,500 rows of half of the shapes of each board (``today`` of AIConfigurator's performance database);
docs/accuracy.md has the errors on the other half, and with a board left out. Numbers that a family does not name are
those of cuBLAS's kernels for 16 bits, which are fed the same way (:mod:`roller.library.products.matrix_gemm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roller.library.products.matrix_gemm import CONSTANTS as SIXTEEN_BITS
from roller.library.products.matrix_tiles import Feed
from roller.library.scaled.tiled import TiledConstants


@dataclass(frozen=True, kw_only=True)
class QuantiseConstants:
    """The numbers of kernels that quantise activations.

    Attributes:
        start_cycles: of the boost clock: a row's block alone on its unit, its maximum and its result included.
        round_cycles: added for every 2048 elements of the row: loads, conversions, stores.
        busy_start_cycles: what a block adds to a unit that has others.
        busy_round_cycles: likewise for every 2048 elements.
        start_seconds: after the gap before the kernel.
        group_start_cycles: of kernels with a scale for a group of elements, which have threads for all groups.
        group_cycles: of a unit for each of its elements there.
        group_row_cycles: of a unit for each of its rows there.
        group_start_seconds: after the gap before such a kernel.
        dram_share: of the board's DRAM rate.
    """

    start_cycles: float
    round_cycles: float
    busy_start_cycles: float
    busy_round_cycles: float
    start_seconds: float
    group_start_cycles: float
    group_cycles: float
    group_row_cycles: float
    group_start_seconds: float
    dram_share: float


@dataclass(frozen=True, kw_only=True)
class ScaledConstants:
    """All numbers of scaled products.

    Attributes:
        quantise: kernels of the activations.
        families: kernels of the products, by name.
        host_seconds: of a call of vLLM's layer in Python, one after the other, by the kernels that it launches: rows of
            128x128 blocks were measured so, without a CUDA graph.
        host_pad_seconds: added where rows are no multiple of four and scales are copied (DeepGEMM on sm_100).
    """

    quantise: QuantiseConstants
    families: Mapping[str, TiledConstants]
    host_seconds: Mapping[str, float] = field(
        default_factory=lambda: {
            "cutlass block": 1.71e-4, "flashinfer block": 5.97e-5, "deepgemm, warp groups": 9.17e-5,
            "deepgemm, unit pairs": 1.80e-4, "triton block": 3.39e-4,
        }
    )  # fmt: skip
    host_pad_seconds: float = 5.5e-5


def _fed(feed: Feed, **numbers: Any) -> TiledConstants:
    """Numbers of kernels that are fed as cuBLAS's are in 16 bits; those that are not named are cuBLAS's."""
    sixteen = SIXTEEN_BITS.feeds[feed]
    fed = TiledConstants(
        step_seconds=sixteen.step_seconds, staging=sixteen.staging, ramp_steps=sixteen.ramp_steps,
        store=sixteen.store_cycles, port_reuse=sixteen.port_reuse, dram_share=sixteen.dram_share,
        start_seconds=SIXTEEN_BITS.start_seconds, cold_seconds=SIXTEEN_BITS.cold_seconds,
        best_share=SIXTEEN_BITS.best_share, written=SIXTEEN_BITS.written, overlap=SIXTEEN_BITS.overlap,
        limited_share=SIXTEEN_BITS.limited_share, limit_seconds=SIXTEEN_BITS.limit_seconds,
    )  # fmt: skip
    return replace(fed, **numbers)


CONSTANTS = ScaledConstants(
    quantise=QuantiseConstants(
        start_cycles=728, round_cycles=350, busy_start_cycles=719, busy_round_cycles=1064, start_seconds=3.5e-7,
        group_start_cycles=3026, group_cycles=0.0861, group_row_cycles=100, group_start_seconds=9.9e-7, dram_share=1.0,
    ),
    families={
        # CUTLASS 2, whose blocks end with their tile. As vLLM calls it, NVRTC 12.9 compiles it (CUTLASS 4.2, sm_89) to
        # 784 bytes of arguments in a thread's own memory, 864 for large tiles, and spills nothing.
        "cutlass, warps": TiledConstants(
            step_seconds=1.35e-7, staging=0.28, ramp_steps=1.015, store=16.5, port_reuse=1.15, dram_share=0.875,
            start_seconds=0.0, cold_seconds=1.38e-6, best_share=1.09, written=0.07, overlap=2.44, limited_share=1.05,
            limit_seconds=0.0103, end_seconds=3.25e-6, step_hz=2.52e9, argument_bytes=864,
        ),
        # CUTLASS 3, from Hopper on: bulk copies and blocks that stay.
        "cutlass": _fed(
            "bulk", is_persistent=True, store=4.66, best_share=0.936, start_seconds=1.01e-6, written=1.45,
            staging=9.17, ramp_steps=0.233, port_reuse=5.5, overlap=1.87, dram_share=0.917, cold_seconds=3.24e-7,
        ),
        "deepgemm": _fed(
            "bulk", is_persistent=True, store=0.755, best_share=0.756, start_seconds=4.81e-7, written=1.16,
            staging=11.8, ramp_steps=4.49, port_reuse=2.54, overlap=1.54,
        ),
        "triton block": _fed("warps", staging=62.3, best_share=0.871, written=1.09, overlap=2.57),
        "cute fp4": _fed(
            "bulk", store=0.708, best_share=1.04, start_seconds=5.68e-7, written=1.07, staging=76.3, ramp_steps=2.72,
            port_reuse=2.12, overlap=1.63, dram_share=0.891,
        ),
    },
)  # fmt: skip
