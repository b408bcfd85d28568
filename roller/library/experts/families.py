"""Numbers of the libraries' kernels for layers of experts: one set a family, whatever board, precision and shape.

Chosen on rows of half of the shapes of each board (``today`` of AIConfigurator's performance database);
docs/accuracy.md has the errors on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roller.library.experts.untuned import Tile
from roller.library.scaled.tiled import TiledConstants


@dataclass(frozen=True, kw_only=True)
class ExpertsConstants:
    """The numbers of one family.

    Attributes:
        products: of its grouped products.
        menu: tiles that it is tuned among.
        is_untuned: whether tiles go by :mod:`roller.library.experts.untuned`, as no table of the boards is at hand.
        align_seconds: of the kernels that sort pairs by experts, together.
        pair_seconds: added for each pair of a token and an expert.
        empty_tile_seconds: of a unit for a tile of 64 x 64 results whose expert lives on another board.
        stream_seconds: of a kernel between products, after the gap before it.
        stream_share: of the board's DRAM and L2 rates there.
        resident: blocks of a product on a unit at a time.
        is_mapped: whether kernels visit rows and tiles of experts of other boards, by a map of experts.
        by_warps: whether products run on single warps whatever the board has, and units share their steps evenly.
    """

    products: TiledConstants
    menu: tuple[Tile, ...]
    is_untuned: bool = False
    align_seconds: float
    pair_seconds: float
    empty_tile_seconds: float
    stream_seconds: float
    stream_share: float
    resident: float = 1.0
    is_mapped: bool = False
    by_warps: bool = False


_FINE: tuple[Tile, ...] = (
    (16, 64, 128), (32, 64, 128), (64, 64, 128), (16, 128, 128), (32, 128, 128), (64, 128, 128), (128, 128, 128),
    (128, 256, 128), (256, 128, 128),
)  # fmt: skip
_ROWS_OF_128: tuple[Tile, ...] = tuple((rows, 128, 128) for rows in (8, 16, 32, 64, 128, 256))

#: What a unit copies in a cycle by single elements: chosen on A100 with 84 and 168 columns, judged on H100 and L40S.
_NARROW_BYTES = 12.0

FAMILIES: Mapping[str, ExpertsConstants] = {
    "triton, warp groups": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1.52e-07, staging=30.1, ramp_steps=8.74, store=1.93, port_reuse=1.54, dram_share=1.02,
            start_seconds=6.03e-07, cold_seconds=3.9e-06, best_share=0.735, written=0.474, overlap=1.87,
            narrow_bytes=_NARROW_BYTES,
        ),
        menu=_FINE, is_mapped=True, align_seconds=9.61e-06, pair_seconds=2.52e-11, empty_tile_seconds=5.57e-07,
        stream_seconds=2.69e-06, stream_share=1.31,
    ),
    "triton, warps": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1.43e-07, staging=29.1, ramp_steps=1.88, store=0.231, port_reuse=6.03, dram_share=0.916,
            start_seconds=7.18e-07, cold_seconds=2.9e-06, best_share=1.1, written=0.0151, overlap=3.2, l2_share=0.921,
            line_share=0.646, narrow_bytes=_NARROW_BYTES,
        ),
        menu=_FINE, is_mapped=True, is_untuned=True, align_seconds=7.69e-06, pair_seconds=1.84e-09,
        empty_tile_seconds=2.26e-07, stream_seconds=1.58e-06, stream_share=0.741, resident=4.0,
    ),
    "cutlass": ExpertsConstants(
        products=TiledConstants(
            step_seconds=6.06e-07, staging=71.9, ramp_steps=16.1, store=0.366, port_reuse=0.109, dram_share=0.203,
            start_seconds=1.42e-07, cold_seconds=1.89e-05, best_share=0.732, written=0.249, overlap=5.3,
        ),
        menu=_ROWS_OF_128[1:], align_seconds=1.23e-06, pair_seconds=6.3e-11, empty_tile_seconds=2.13e-09,
        stream_seconds=6.36e-07, stream_share=2.61,
    ),
    "cutlass block": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1e-07, staging=43.8, ramp_steps=26.4, store=3.85, port_reuse=8.12, dram_share=1.01,
            start_seconds=2.08e-07, cold_seconds=4.85e-06, best_share=1.2, written=6.18, overlap=1.74,
        ),
        menu=_ROWS_OF_128[1:], align_seconds=2.86e-06, pair_seconds=6.28e-10, empty_tile_seconds=1.02e-08,
        stream_seconds=2.08e-06, stream_share=2.68,
    ),
    "trtllm": ExpertsConstants(
        products=TiledConstants(
            step_seconds=9.41e-08, staging=5.02, ramp_steps=5.97, store=1.75, port_reuse=5.36, dram_share=1.1,
            start_seconds=3.21e-07, cold_seconds=6.37e-07, best_share=0.667, written=0.34, overlap=1.87,
        ),
        menu=_ROWS_OF_128, align_seconds=1.36e-06, pair_seconds=5.88e-11, empty_tile_seconds=8.69e-08,
        stream_seconds=2.81e-06, stream_share=12.6,
    ),
    "trtllm block": ExpertsConstants(
        products=TiledConstants(
            step_seconds=7.32e-08, staging=13.4, ramp_steps=3.88, store=0.446, port_reuse=8.33, dram_share=1.1,
            start_seconds=4.89e-06, cold_seconds=3.1e-06, best_share=0.282, written=0.81, overlap=1.68,
        ),
        menu=_ROWS_OF_128, align_seconds=5.16e-06, pair_seconds=1.32e-10, empty_tile_seconds=4.34e-07,
        stream_seconds=9.82e-07, stream_share=8.83,
    ),
    "marlin": ExpertsConstants(
        products=TiledConstants(
            step_seconds=1.3e-07, staging=37.3, ramp_steps=0.807, store=39.9, port_reuse=1.29, dram_share=0.923,
            start_seconds=7.63e-07, cold_seconds=1.05e-05, best_share=0.753, written=2.03, overlap=11.4,
        ),
        menu=_ROWS_OF_128[:4], by_warps=True, is_mapped=True, align_seconds=1.28e-05, pair_seconds=2.04e-11,
        empty_tile_seconds=7.12e-07, stream_seconds=2.54e-06, stream_share=4.07,
    ),
}  # fmt: skip
