"""Numbers of the libraries' kernels for scaled and grouped products: one set a family, whatever board and shape.

Chosen on 1,500 rows of half of the shapes of each board (``today`` of AIConfigurator's performance database);
docs/accuracy.md has the errors on the other half, and with a board left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        families: kernels of the products, by name and generation.
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


CONSTANTS = ScaledConstants(
    quantise=QuantiseConstants(
        start_cycles=728, round_cycles=350, busy_start_cycles=719, busy_round_cycles=1064, start_seconds=3.5e-7,
        group_start_cycles=3026, group_cycles=0.0861, group_row_cycles=100, group_start_seconds=9.9e-7, dram_share=1.0,
    ),
    families={
        "cutlass, warps": TiledConstants(
            step_seconds=1.18e-07, staging=2.13, ramp_steps=1.15, store=33.5, port_reuse=1.25, dram_share=0.873,
            start_seconds=8.47e-07, cold_seconds=6.67e-07, best_share=1.67, written=0.4, overlap=4.3,
            limited_share=1.06, limit_seconds=3.96e-05, end_seconds=3.47e-06,
        ),
        "cutlass, warp groups": TiledConstants(
            step_seconds=5.93e-08, staging=8.83, ramp_steps=1.54, store=3.2, port_reuse=1.6, dram_share=0.943,
            start_seconds=7.14e-08, cold_seconds=6e-07, best_share=1.11, written=0.179, overlap=2.1,
            limited_share=1.07, limit_seconds=0.000221,
        ),
        "cutlass, unit pairs": TiledConstants(
            step_seconds=3.38e-08, staging=6.56, ramp_steps=2.81, store=4.58, port_reuse=1.8, dram_share=0.894,
            start_seconds=1.44e-06, cold_seconds=1e-06, best_share=1.53, written=0.823, overlap=5.24,
            limited_share=1.43, limit_seconds=0.000812,
        ),
        "deepgemm, warp groups": TiledConstants(
            step_seconds=1.46e-07, staging=10.3, ramp_steps=0.95, store=0.638, port_reuse=0.75, dram_share=1.09,
            start_seconds=6.48e-07, cold_seconds=3.99e-07, best_share=0.981, written=1.37, overlap=2.17,
        ),
        "deepgemm, unit pairs": TiledConstants(
            step_seconds=2.9e-07, staging=7.71, ramp_steps=1.68, store=0.64, port_reuse=1.79, dram_share=1.09,
            start_seconds=5.94e-07, cold_seconds=3e-07, best_share=0.922, written=2.65, overlap=2.42,
            limited_share=1.29, limit_seconds=0.000442,
        ),
        "triton block": TiledConstants(
            step_seconds=1.3e-07, staging=15, ramp_steps=0.795, store=3.66, port_reuse=1.85, dram_share=0.853,
            start_seconds=7.66e-07, cold_seconds=3e-07, best_share=0.535, written=1.08, overlap=3.03,
        ),
        "cute fp4": TiledConstants(
            step_seconds=1.51e-07, staging=7.02, ramp_steps=2.62, store=0.412, port_reuse=4.98, dram_share=0.813,
            start_seconds=8.62e-07, cold_seconds=8.98e-07, best_share=0.701, written=0.712, overlap=1.84,
        ),
    },
)  # fmt: skip
